"""The suite `layer` on a GPU made of the emulator: a tiny decoder, the fused kernels, what is checked and recorded."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import layer, peers, peers_layer
from benchmarks import layer_shapes as shapes
from benchmarks.decode import plain_row
from benchmarks.layer import decoder, ends, fused
from benchmarks.peers_layer import MixTime
from benchmarks.stored import stored_attention
from ptxlab import bench, emulator, gpu
from ptxlab.bench import copying
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row
from ptxlab.errors import ArgumentError, BenchmarkError
from ptxlab.llm import layer_chain
from ptxlab.llm.layer_chain import Decoder
from ptxlab.llm.model import Config, LayerWeights
from ptxlab.runtime.timing import Measured

TINY = Config(hidden=128, ffn=128, heads=1, kv_heads=1, head_dim=128, layers=1, vocabulary=32, name="tiny")
CEILINGS = Ceilings(4.6, 4.2)
REORDERING = ("reorder_quantize", "rmsnorm_reorder_quantize", "silu_mul_reorder_quantize")


@pytest.fixture
def tiny_gpu(emulated_gpu: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Send public calls on NumPy arrays to the emulator, with sequences of 70 tokens."""
    emulated_gpu.setattr(gpu, "why_not", lambda *_, **__: "a GPU made of the emulator")
    for module in (shapes, layer_chain):
        emulated_gpu.setattr(module, "LENGTH", 70)
    return emulated_gpu


def weights() -> list[LayerWeights]:
    first = LayerWeights.random(TINY, on_device=True)
    return [first, layer_chain.copy_of(first)]


@pytest.mark.full
def test_a_layer_is_timed_taken_apart_and_checked(tiny_gpu: pytest.MonkeyPatch) -> None:
    layers = weights()[:1]
    row = decoder.row(TINY, 2, layers, decoder.copies_of(layers[0]), CEILINGS, {"fp16/sdpa": 20.0}, {"x": 1.0}, True)
    assert row.time_us == 10.0 and row.sizes == shapes.sizes_of(TINY, 2) and row.checked.endswith("bit for bit")
    assert row.checked.startswith("10 steps: attention, down_in within bounds, all others equal in every bit; ")
    operations = {
        *("gemm qkv", "gemm o", "gemm gate_up", "gemm down", "attention", "rope_append_kv4 q"),
        *("rmsnorm_quantize qkv_in", "rmsnorm_quantize gate_up_in", "quantize_activations o_in"),
        "silu_mul_quantize down_in",
    }
    assert {name for name, us in row.more.items() if us == 10.0} >= operations
    assert row.more["gemm_us"] == 40.0 and row.more["attention_us"] == 10.0 and row.more["others_us"] == 50.0
    assert row.more["others_share"] == 0.5 and row.more["plain_us"] == 10.0 and row.more["x"] == 1.0
    assert row.more["invariant_attention_us"] == 10.0
    floors = [us for name, us in row.more.items() if name.startswith("floor ")]
    assert row.floor_us == pytest.approx(sum(floors)) and len(floors) == 5
    nbytes = sum(getattr(layers[0], name).nbytes for name in TINY.matrices)
    assert row.bytes == nbytes + 2 * 70 * 2 * 68 and row.floor_us == pytest.approx(row.bytes / 4.6e6)


@pytest.mark.full
def test_a_layer_of_experts_is_taken_apart_too(tiny_gpu: pytest.MonkeyPatch) -> None:
    """Its floor is that of the experts that have tokens: of one token, one of two."""
    config = replace(TINY, experts=2, chosen_experts=1, name="experts")
    layers = [LayerWeights.random(config, on_device=True)]
    row = decoder.row(config, 1, layers, decoder.copies_of(layers[0]), CEILINGS, {}, {}, compare_twin=True)
    assert row.checked.startswith("19 steps: attention, share, down_in within bounds, all others equal in every bit; ")
    assert {"route_tokens gate_up_in", "combine_experts hidden", "gemm gate_up", "gemm down"} <= set(row.more)
    read = [row.more[f"floor gemm {name}"] * 4.6e6 for name in ("gate_up", "down", "qkv")]
    assert read == pytest.approx([layers[0].gate_up.nbytes / 2, layers[0].down.nbytes / 2, layers[0].qkv.nbytes])


@pytest.mark.full
def test_chains_for_the_sanitizers_are_checked(
    tiny_gpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_gpu.setattr(layer_chain, "_WATCHED", (1,))
    tiny_gpu.setattr(layer_chain, "Config", lambda **sizes: replace(TINY, name=sizes["name"]))
    with emulator.chain(()) as chain:
        layer_chain.check_chains()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" steps")[0] for line in lines] == [
        "dense, batch 1: 12",
        "dense with epilogues, batch 1: 10",
        "experts, batch 1: 19",
    ]
    assert len(chain.launches) == 2 * 10 + 2 * 10 + 2 * 13


@pytest.mark.full
def test_layers_with_all_ends_are_timed_in_turn_and_checked(tiny_gpu: pytest.MonkeyPatch) -> None:
    layers = {interleaved: layer_chain.layers_of(TINY, interleaved=interleaved)[:1] for interleaved in (False, True)}
    times = iter((10.0, 11.0, 12.0, 13.0, 14.0, 9.0, 15.0, 16.0))  # in turn, twice

    def time_calls(calls: list[Callable[[], None]], **_: int) -> tuple[Measured, list[Callable[[], None]]]:
        return Measured(next(times), 1.0, 20.0, 1900.0), calls

    tiny_gpu.setattr(ends, "measure_graph", time_calls)
    tiny_gpu.setattr(Decoder, "check", lambda self, graph: f"{len(graph)} layers bit for bit")
    rows = ends.rows_at(TINY, 2, layers, CEILINGS, compare_twin=True)
    assert [(row.sizes["residual"], row.sizes["silu_mul"], row.time_us) for row in rows] == [
        (0, 0, 10.0),
        (1, 0, 9.0),
        (0, 1, 12.0),
        (1, 1, 13.0),
    ]
    assert len({row.key for row in rows}) == 4 and {row.measure for row in rows} == {layer.EPILOGUES}
    assert [row.checked.partition(" steps")[0] for row in rows] == ["12", "10", "12", "10"]
    assert all(row.checked.endswith("; 1 layers bit for bit") for row in rows), "once each"
    assert [row.more["predicted_us"] for row in rows] == pytest.approx([10.0] * 4, abs=0.1)


def test_what_ends_should_bring() -> None:
    seven = Config.named("LLaMA-2-7B")
    small_batch, large_batch = (ends.predicted_us(seven, B, ends.Ends(True, False)) for B in (16, 256))
    assert large_batch == pytest.approx(16 * small_batch) == pytest.approx(-8 * 256 * 4096 / 12e6)
    assert ends.predicted_us(seven, 256, ends.Ends(False, False)) == 0.0
    predictions = [ends.predicted_us(seven, 64, choice) for choice in ends.ALL]
    assert predictions[2] > 0 and predictions[3] == pytest.approx(predictions[1] + predictions[2])


@pytest.mark.full
def test_another_bit_of_the_timed_graph_is_found(tiny_gpu: pytest.MonkeyPatch) -> None:
    chain = Decoder(TINY, 1, weights())
    assert len(chain.calls()) == 2, "two layers, one after the other"
    _, graph = decoder.measure_graph(chain.calls())
    replay = graph.replay

    def wrong() -> None:
        replay()
        chain.residual.view(np.uint16)[0, 7] ^= 1

    graph.replay = wrong
    with pytest.raises(BenchmarkError, match="tiny, batch 1: other bits than its calls one by one"):
        chain.check(graph)


def test_products_set_the_floor_of_large_batches() -> None:
    work = shapes.Work("gemm", nbytes=10**6, operations=10**12)
    assert work.us(CEILINGS) == pytest.approx(1e6 / 1920)
    assert work._replace(operations=10).us(CEILINGS) == pytest.approx(1 / 4.6)


@pytest.mark.default_cases("silu_mul_quantize")
@pytest.mark.parametrize(
    "make",
    [
        lambda: fused.rmsnorm_kernel(3, 96),
        lambda: fused.silu_mul_kernel(3, 96),
        lambda: fused.quantize_kernel(3, 96),
        lambda: fused.rope_append_kernel(3, 2, 1, 64),
        *(lambda i=i: list(fused.reordering_kernels(3, 256, 64, 64))[i] for i in range(3)),
    ],
    ids=["rmsnorm_quantize", "silu_mul_quantize", "quantize_activations_s8", "rope_append_kv4", *REORDERING],
)
def test_a_fused_kernel_is_timed_beside_copies_and_checked(
    make: Callable[[], fused.Fused], tiny_gpu: pytest.MonkeyPatch
) -> None:
    tiny_gpu.setattr(fused, "copy_us", lambda nbytes, copies: 3.0 + copies)
    tiny_gpu.setattr(
        peers_layer, "time_public_versions", lambda *arguments: {"torch_compile": 7.0} if arguments[-1] == 2 else {}
    )
    kernel = make()
    row = fused.measure_kernel(kernel, CEILINGS)
    assert (row.kernel, row.sizes, row.time_us) == (kernel.kernel, kernel.sizes, 10.0)
    assert row.more["copy_us"] == 5.0 and row.more["copy_l2_us"] == 4.0 and row.more["chain_us"] == 10.0
    assert row.peers == ({"torch_compile": 7.0} if kernel.public else {})
    assert (kernel.public is None) == (kernel.kernel in ("rope_append_kv4", *REORDERING))
    assert row.floor_us == pytest.approx(kernel.nbytes / 4.2e6)
    arrays = kernel.make()
    with pytest.raises(BenchmarkError, match=f"{kernel.kernel.removesuffix('_s8')}: (wrong|pages)"):
        kernel.check(arrays)  # nothing was launched on these


@pytest.mark.parametrize("nbytes", [16, 4096, 16384, 40016])
def test_a_copy_copies(nbytes: int) -> None:
    source, geometry = copying.source(), copying.geometry(nbytes)
    read = np.random.default_rng(0).integers(0, 256, nbytes + 16, np.uint8)
    written = np.full(nbytes + 16, 7, np.uint8)
    emulator.run(
        emulator.parse(source.text, source.path),
        "stream_copy",
        [read, written, np.uint64(nbytes)],
        grid=geometry.grid,
        block=geometry.block,
        checks=("race", "init"),
    )
    assert (written[:nbytes] == read[:nbytes]).all() and (written[nbytes:] == 7).all()


def test_copies_are_timed_cold_and_warm(emulated_gpu: pytest.MonkeyPatch) -> None:
    assert copying.copy_us(100, 3) == copying.copy_us(100, 1) == 10.0


@pytest.mark.full
def test_jobs_run_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that fails is left to fail where it is measured."""
    monkeypatch.setattr(layer, "_WORKERS", 1)
    layer.run_in_processes(
        [(os.mkdir, (tmp_path / "a",)), (os.rmdir, (tmp_path / "none",)), (os.mkdir, (tmp_path / "b",))]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    layer.run_in_processes([])


@pytest.mark.full
def test_what_is_compiled_is_what_is_measured(tiny_gpu: pytest.MonkeyPatch) -> None:
    between = {"rmsnorm_quantize", "silu_mul_quantize", "quantize_activations_s8"}
    with emulator.chain(()) as chain:
        decoder.warm(TINY, (1,))
    assert {*chain.launches} == between | {"gemm_w4a8_small_sm90", "rope_append_kv4", "attention_kv4_sm90"}
    tiny_gpu.setattr(fused, "WIDTHS", (256, 384))
    tiny_gpu.setattr(fused, "_REORDERED", ((256,), (64,)))
    tiny_gpu.setattr(fused, "HEADS", ((2, 1, 128),))
    for width, launched in ((256, between | {"rope_append_kv4", *REORDERING}), (384, between)):
        with emulator.chain(()) as chain:
            fused.warm(width)
        assert {*chain.launches} == launched


@pytest.mark.full
def test_a_layer_with_heads_of_64_is_measured_without_mixes(tiny_gpu: pytest.MonkeyPatch) -> None:
    narrow = replace(TINY, heads=2, head_dim=64, name="narrow")
    tiny_gpu.setattr(layer, "NARROW", narrow)
    tiny_gpu.setattr(layer, "run_in_processes", lambda jobs: None)
    tiny_gpu.setattr(peers, "importable", lambda: False)
    tiny_gpu.setattr(layer_chain, "layers_of", lambda config: [LayerWeights.random(config, on_device=True)])
    with pytest.warns(UserWarning, match="no mixes beside the layers"):
        (row,) = layer.rows([], CEILINGS, lambda _: None, only=["d64", "B=1"])
    assert (row.measure, row.sizes, row.peers) == (layer.D64, {**shapes.sizes_of(narrow, 1), "D": 64}, {})
    assert row.checked.startswith("10 steps: ") and "bit for bit" in row.checked
    assert row.more["floor attention"] == pytest.approx(2 * 70 * (32 + 4) / 4.6e6), "of one head"


def test_words_of_the_command_select_parts_of_the_suite() -> None:
    everything = layer.part([])
    assert everything.fused and everything.timeline and everything.d64 and everything.configs == layer.CONFIGS
    assert not everything.epilogues, "which has been decided"
    selection = layer.part(["LLaMA-2-7B", "B=1", "B=64", "fp8_row"])
    assert [config.name for config in selection.configs] == ["LLaMA-2-7B"] and selection.batches == (1, 64)
    assert selection.mixes == ("fp8_row",) and not selection.fused and not selection.timeline
    epilogues = layer.part(["epilogues", "B=1"])
    assert (
        epilogues.epilogues
        and epilogues.configs == ()
        and epilogues.batches == (1,)
        and not epilogues.fused
        and not selection.epilogues
    )
    assert not epilogues.d64 and layer.part(["d64"]) == layer.Selection(fused=False, timeline=False, configs=())
    assert layer.part(["fused"]).configs == () and layer.part(["alone"]).mixes == ()
    assert layer.part(["B=4"]).configs == layer.CONFIGS
    with pytest.raises(ArgumentError, match=r"only: one of fused, .* \(got B=3\)"):
        layer.part(["B=3"])


def test_a_stopped_run_goes_on_with_the_layer_it_was_at() -> None:
    """A layer is measured whole; before the first has a row, the fused kernels may not be complete."""
    first, second, *later_configs = layer.CONFIGS
    whole = layer.part([])

    def rows_at(measure: str, config: Config, batches: tuple[int, ...]) -> list[Row]:
        return [
            plain_row(measure, measure, shapes.sizes_of(config, B), 1.0, 1.0, sm_mhz=0, checked="") for B in batches
        ]

    fused_rows, narrow = rows_at(layer.FUSED, first, (1, 4)), rows_at(layer.D64, layer.NARROW, whole.batches)
    assert layer.remaining(whole, ()) == layer.remaining(whole, fused_rows) == (whole, [])
    first_rows, second_rows = (
        rows_at(layer.MEASURE, first, whole.batches),
        rows_at(layer.MEASURE, second, whole.batches[:3]),
    )
    unmeasured, kept_rows = layer.remaining(whole, [*fused_rows, *first_rows, *second_rows])
    assert (
        not unmeasured.fused
        and unmeasured.configs == (second, *later_configs)
        and unmeasured.d64
        and kept_rows == [*fused_rows, *first_rows]
    )
    all_rows = [row for config in layer.CONFIGS for row in rows_at(layer.MEASURE, config, whole.batches)]
    unmeasured, kept_rows = layer.remaining(
        whole, [*fused_rows, *all_rows, *narrow, *rows_at(layer.TIMELINE, first, (1,))]
    )
    assert unmeasured == layer.Selection(fused=False, configs=(), d64=False) and kept_rows == [
        *fused_rows,
        *all_rows,
        *narrow,
    ]


def test_whole_epilogues_are_a_record_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_record", lambda suite, *_: suite)
    names = [bench.run_suite(layer.SUITE, only=only) for only in ([], ["epilogues"], ["epilogues", "B=1"], ["fused"])]
    assert names == ["layer", "layer_epilogues", "layer_part", "layer_part"]


def test_a_layer_is_known_by_its_sizes() -> None:
    names = [config.name for config in layer.CONFIGS]
    assert names[1:5] == ["LLaMA-2-70B", "LLaMA-2-70B 1/2", "LLaMA-2-70B 1/4", "LLaMA-2-70B 1/8"]
    assert [layer.config_of(shapes.sizes_of(config, 4)) for config in layer.CONFIGS] == [*layer.CONFIGS]
    assert layer.config_of(shapes.sizes_of(TINY, 4)) is None


def test_the_stored_attention_stands_beside_that_of_the_run() -> None:
    config = Config.named("LLaMA-2-7B")
    us, breakdowns = layer.summarize_mixes(
        config, 16, {"fp8_row/sdpa": MixTime(200.0, 90.0, 60.0), "fp16/sdpa": MixTime(9.0, 5.0, 4.0)}
    )
    xqa = stored_attention()[32, 32, 16, 1024]
    assert us["fp8_row/sdpa"] == 200.0 and us["fp8_row/xqa_stored"] == 90.0 + xqa["fi_xqa_fp8"]
    assert us["fp16/xqa_stored"] == 5.0 + xqa["fi_xqa_f16"]
    assert (
        breakdowns["fp8_row/xqa_stored attention_us"] == xqa["fi_xqa_fp8"]
        and breakdowns["fp8_row/sdpa attention_us"] == 110.0
    )
    assert breakdowns["fp8_row/sdpa gemm_us"] == 60.0 and breakdowns["fp8_row/sdpa others_us"] == 30.0
    assert list(layer.summarize_mixes(config, 4, {"fp8_row/sdpa": MixTime(2.0, 1.0, 1.0)})[0]) == ["fp8_row/sdpa"]


def test_a_timeline_is_a_row_per_launch() -> None:
    operations = ["rmsnorm_quantize qkv_in", "gemm qkv"]
    spans = [("norm", 0.0, 2.0), ("gemm", 1.5, 10.0), ("norm", 10.5, 12.0), ("gemm", 11.5, 20.0)]
    rows = list(layer.spans_of(layer.CONFIGS[0], 4, spans, operations, 9.5))
    assert [(row.face, row.kernel, row.sizes["launch"]) for row in rows] == [
        ("rmsnorm_quantize qkv_in", "norm", 0),
        ("gemm qkv", "gemm", 1),
    ]
    assert [row.more["gap_us"] for row in rows] == [0.5, -0.5] and rows[1].more["start_us"] == 1.0
    assert all(row.more["layer_us"] == 9.5 and row.measure == layer.TIMELINE for row in rows)


def trace_launches(run: Callable[[], None]) -> list[tuple[str, float, float]]:
    """Return the spans that a tracer would see of these launches, captured and replayed."""
    with emulator.chain(()) as chain:
        run()
    names = chain.launches * 2
    return [(name, float(place), place + 0.5) for place, name in enumerate(names)]


@pytest.fixture
def graphs(tiny_gpu: pytest.MonkeyPatch) -> None:
    """Make captures call each function once; replays, which the tracer makes up, do nothing."""

    def capture(calls: list[Callable[[], None]]) -> SimpleNamespace:
        for call in calls:
            call()
        return SimpleNamespace(replay=lambda: None, synchronize=lambda: None, time=lambda: SimpleNamespace(median=9.0))

    tiny_gpu.setattr(gpu, "capture", capture)
    tiny_gpu.setattr(layer, "_TRACED", 2)


@pytest.mark.full
@pytest.mark.usefixtures("graphs")
def test_a_timeline_is_left_out_unless_every_launch_was_seen(tiny_gpu: pytest.MonkeyPatch) -> None:
    layers = weights()[:1]
    tiny_gpu.setattr(layer_chain, "layers_of", lambda config: layers)
    tiny_gpu.setattr(peers_layer, "trace_kernels", lambda run: [])
    with pytest.warns(UserWarning, match="timeline of tiny: left out, 0 kernels were seen of 40"):
        assert list(layer.timeline_rows(TINY, 1)) == []
    tiny_gpu.setattr(peers_layer, "trace_kernels", trace_launches)
    rows = list(layer.timeline_rows(TINY, 1))
    assert [row.face for row in rows][:3] == ["rmsnorm_quantize qkv_in", "gemm qkv", "rope_append_kv4 q"]
    assert len(rows) == 10 and rows[0].kernel == "rmsnorm_quantize" and rows[0].more["layer_us"] == 9.0


@pytest.mark.full
@pytest.mark.usefixtures("graphs")
def test_a_timeline_of_experts_has_both_launches_of_the_routing(tiny_gpu: pytest.MonkeyPatch) -> None:
    config = replace(TINY, experts=2, chosen_experts=1, name="experts")
    layers = [LayerWeights.random(config, on_device=True)]
    tiny_gpu.setattr(layer_chain, "layers_of", lambda config: layers)
    tiny_gpu.setattr(peers_layer, "trace_kernels", trace_launches)
    rows = list(layer.timeline_rows(config, 1))
    assert len(rows) == 13 and len({row.key for row in rows}) == 13
    assert [(row.face, row.kernel) for row in rows[6:9]] == [
        ("rmsnorm_quantize tokens", "rmsnorm_quantize"),
        ("route_tokens gate_up_in", "choose_experts"),
        ("route_tokens gate_up_in", "gather_tokens"),
    ]
