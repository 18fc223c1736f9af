"""The measuring itself, on a GPU."""

import dataclasses
import warnings

import numpy as np
import pytest

from benchmarks import layer, peers, peers_layer
from ptxlab import bench, gpu, registry
from ptxlab.bench import copying
from ptxlab.errors import BenchmarkError
from ptxlab.llm.model import Config
from ptxlab.lowbit import cost, kernels
from ptxlab.lowbit.bench import attention, dequant, stream
from ptxlab.lowbit.bench.attention import append, merge
from ptxlab.lowbit.bench.attention import problem as attention_problem
from ptxlab.lowbit.bench.gemm import chain, grouped, headline, points, problem, quantiser, steps, w4a4
from ptxlab.lowbit.bench.shapes import EXPERTS, LAYERS, Batch, even
from ptxlab.lowbit.kernels.attention.options import AttentionOptions
from ptxlab.lowbit.kernels.attention.steps import STEPS, choose, why_not
from ptxlab.lowbit.layout.packed_activations import ORDERS
from ptxlab.runtime.timing import measure
from tests.support.timed_variants import EXPERT, compile_timed_variants

pytestmark = [pytest.mark.gpu, pytest.mark.timing]


@pytest.fixture(scope="module", autouse=True)
def compile_variants() -> None:
    """Compile what is timed, unless `test_compiling` has left it in the cache; nobody else has the device now."""
    compile_timed_variants()


@pytest.fixture(scope="module")
def ceilings() -> bench.Ceilings:
    return bench.measure_ceilings()


def test_ceilings_are_those_of_the_sheet(ceilings) -> None:
    slug = gpu.device_info().slug
    if slug not in cost.SHEETS:
        pytest.skip(f"no sheet for {slug}")
    sheet = cost.sheet(slug)
    assert bench.shortfall(ceilings, slug) == ""
    assert ceilings.read_tbps < 1.05 * sheet.read_tbps and ceilings.copy_tbps < 1.05 * sheet.copy_tbps


def test_clock_and_spread() -> None:
    source, target = (gpu.to_device(np.arange(64 << 20, dtype=np.uint8)) for _ in range(2))
    measured = measure([lambda: gpu.copy_bytes(target, source)])
    assert 300 < measured.sm_mhz < 3000
    assert measured.fastest <= measured.us <= measured.slowest


def test_longer_work_takes_longer() -> None:
    """Timing is per call: four times the bytes, about four times the time."""
    spec, (source, *_) = registry.find("dequant_qoq_channel")
    words = gpu.to_device(np.arange(16384 * 2048, dtype=np.uint32).reshape(16384, 2048))
    out = gpu.empty((16384, 16384), np.uint8)

    def time(rows: int) -> float:
        sizes = {"R": rows, "K": 16384}
        args = [words[:rows], out[:rows], spec.scalar(spec.arg("pairs"), sizes)]
        return measure([gpu.prepare(gpu.load(source, spec.name), args, spec.launch(sizes))]).us

    assert 3.5 < time(16384) / time(4096) < 4.5


def test_one_kernel_end_to_end(ceilings, monkeypatch) -> None:
    monkeypatch.setattr(bench, "measure_ceilings", lambda: ceilings)
    record = bench.run_suite("dequant_lqq")
    rows = {(row.source, row.measure): row for row in record.rows}
    assert set(rows) == {("ptx", "streaming"), ("cu", "streaming"), ("ptx", "registers")}
    assert all(0 < row.fraction < 1.05 for row in record.rows)
    assert rows["ptx", "streaming"].rate > 0.5 * 1e3 * ceilings.copy_tbps
    registers = rows["ptx", "registers"]
    assert 0.5 * registers.more["limit_with_harness"] < registers.rate < 1.02 * registers.more["limit_with_harness"]


def test_wrong_results_are_noticed(ceilings) -> None:
    spec, (source, *_) = registry.find("dequant_lqq")
    sizes = {"R": 512, "K": 1024, "g": 128}
    logical = spec.example(np.random.default_rng(0), **{**sizes, "R": 256})
    broken = dataclasses.replace(spec, reference=lambda **arrays: spec.reference(**arrays) ^ 1)
    assert dequant.streaming(spec, source, sizes, logical, ceilings).checked.startswith("all 524288 weights")
    with pytest.raises(BenchmarkError, match=r"dequant_lqq.ptx: the timed launches gave wrong results"):
        dequant.streaming(broken, source, sizes, logical, ceilings)


def test_streams_take_what_the_sheet_says() -> None:
    slug = gpu.device_info().slug
    if slug not in cost.SHEETS:
        pytest.skip(f"no sheet for {slug}")
    sheet = cost.sheet(slug)
    for nbytes in (8_650_752, 46_530_560, 242_221_056):
        assert 0.9 < stream.measure_stream(nbytes) / sheet.stream_us(nbytes) < 1.05


def test_cublas_is_measured_where_pytorch_is() -> None:
    if not peers.importable():
        pytest.skip("PyTorch with a GPU is not installed")
    times = peers.cublas(4096, 4096, (4, 64))
    assert set(times) == {4, 64} and all(set(by_name) == set(peers.CUBLAS) for by_name in times.values())
    assert all(2 < us < 100 for by_name in times.values() for us in by_name.values())
    chained = peers.cublas_chain([(4096, 4096), (4096, 11008)], (4, 64))
    assert all(times[M]["cublas_fp8"] < chained[M]["cublas_fp8"] < 100 for M in (4, 64))


@pytest.mark.parametrize("name", [spec.name for spec in kernels.gemm.STEPS])
def test_a_gemm_is_timed_and_its_results_are_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = problem.steps_of([name])
    if not measured:
        pytest.skip(f"{name} does not run on this GPU")
    monkeypatch.setattr(steps, "TOKENS", (4, 100))
    rows = list(steps.layer_rows(LAYERS[1], measured, {4: {}, 100: {}}, points.streams(), lambda _: None))
    assert [row.sizes["M"] for row in rows] == [4, 100]
    assert all(row.checked.startswith(f"all {row.sizes['M'] * 4096} results of ") for row in rows)
    assert all(0.02 < row.fraction < 1.1 for row in rows)


@pytest.fixture
def launched() -> None:
    if not headline.steps():
        pytest.skip("what gemm_w4a8 launches for such a weight does not run on this GPU")


def test_what_is_launched_is_timed_and_its_results_are_exact(launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headline, "ALL_TOKENS", (1, 100))
    names = [step.spec.name for step in headline.steps()]
    rows = list(headline.layer_rows(LAYERS[1], names, {1: {}, 100: {}}, points.streams(), lambda _: None))
    assert {row.sizes["M"] for row in rows} == {1, 100} and len({row.key for row in rows}) == len(rows)
    assert all(row.checked.startswith(f"all {row.sizes['M'] * 4096} results of ") for row in rows)
    assert all(0.02 < row.fraction < 1.1 for row in rows)


def test_w4a4_is_timed_beside_w4a8(launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a matrix include the steps for INT4 tensor cores, which Hopper runs in software."""
    monkeypatch.setattr(w4a4, "COMPARED", (64,))
    rows = list(w4a4.compared_rows(LAYERS[1:2], [*registry.specs()], lambda _: None, peers.PUBLIC))
    assert [row.measure for row in rows] == ["headline", "w8a8", *["w4a4"] * 4, *["w4ax"] * 6]
    assert all(row.checked.startswith(f"all {64 * 4096} results of ") for row in rows)
    assert all(0.02 < row.fraction < 1.1 for row in rows if not row.kernel.endswith("_sm80"))
    assert not peers.importable() or all({*row.peers} == {*w4a4.CUBLAS} for row in rows)


def test_a_chain_takes_about_as_long_as_its_links(launched: None) -> None:
    layers, stream_us = LAYERS[:4], points.streams()
    logical = [{**headline.weight_of(layer), **problem.tokens(layer, 16)} for layer in layers]
    row = chain.measure_chain(layers, 16, logical, stream_us, {})
    alone = [
        headline.measure_launched(
            layer,
            16,
            inputs,
            problem.expected_bits(headline.choose_step(layer, 16).spec, inputs),
            measured_as="",
            stream_us=stream_us,
            peers={},
        )
        for layer, inputs in zip(layers, logical, strict=True)
    ]
    assert 0.5 < row.time_us / sum(link.time_us for link in alone) < 1.1
    assert row.checked.count("bit for bit") == 4


def test_a_loop_over_experts(launched: None) -> None:
    weights = [headline.weight_of(EXPERT, seed=expert) for expert in range(EXPERTS)]
    experts = grouped.Experts(EXPERT, weights, problem.tokens(EXPERT, 32), grouped.route_at_random(16))
    row = grouped.measure_loop(experts, points.streams())
    assert row.more["launches"] > 4 and 0.05 < row.fraction < 1.1


def test_experts_at_once(launched: None) -> None:
    weights = [headline.weight_of(EXPERT, seed=expert) for expert in range(EXPERTS)]
    experts = grouped.Experts(EXPERT, weights, problem.tokens(EXPERT, 32), grouped.route_at_random(16))
    row = grouped.measure_grouped(experts, points.streams(), 100.0)
    assert row.checked.startswith(f"in each of 3 places all {32 * 4096} results of ") and 0.1 < row.fraction < 1.1


@pytest.mark.parametrize("order", ORDERS)
def test_the_quantiser_is_timed_and_exact(order: str, ceilings) -> None:
    row = quantiser.measure_quantiser(quantiser._repeat_activations(64, 4096), order, ceilings)
    assert 0.5 < row.time_us < 20


@pytest.mark.parametrize("tokens", [64, 512])
@pytest.mark.parametrize("rope", [False, True])
def test_appending_is_timed_and_exact(tokens: int, rope: bool, ceilings) -> None:
    row = append.measure_append(tokens, 8, "kv4", rope, ceilings)
    assert 0.5 < row.time_us < 50 and row.fraction < 1.05


@pytest.mark.parametrize("batch", [even((32, 32), 4, 1024), even((64, 8), 1, 4096)], ids=str)
def test_attention_is_timed_alone_and_behind_an_append(batch: Batch, ceilings) -> None:
    after_append, alone = attention.batch_rows(choose(AttentionOptions(backend="gpu")), batch, ceilings, lambda _: None)
    assert 1 < alone.time_us < 200 and 1 < after_append.time_us < 200 and 0.02 < alone.fraction < 1.05
    assert alone.checked.startswith(f"all {len(batch.lengths) * batch.Hq * 128} results of ")
    assert after_append.more["plain_us"] > 1


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.spec.name)
def test_a_step_of_attention_is_timed_and_within_its_bound(step, ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    if why_not(step) is not None:
        pytest.skip(f"{step.spec.name} does not run on this GPU")
    monkeypatch.setattr(attention, "ABLATION", even((32, 32), 8, 512))
    (row,) = attention.ladder_rows(step, ceilings, lambda _: None)
    assert row.checked.startswith(f"all {8 * 32 * 128} results of ") and 1 < row.time_us < 500


def test_a_ragged_batch_is_timed(ceilings) -> None:
    rows = attention.ragged_rows(
        choose(AttentionOptions(backend="gpu")), Batch(32, 8, (1, 700, 64, 3000)), ceilings, lambda _: None
    )
    assert [row.measure for row in rows] == ["ragged", "even"]


def test_parts_are_merged_by_either_kernel(ceilings) -> None:
    row = merge.measure_merge(merge.BATCHES[0], ceilings)
    assert 1 < row.more["fused_us"] < 100 and 1 < row.time_us < 100


def test_an_attention_over_other_pages_is_noticed() -> None:
    drawn_problem = attention_problem.random_problem(even((32, 8), 2, 640))
    ready = attention_problem.launches(choose(AttentionOptions(backend="gpu")), drawn_problem)
    for call in ready.calls:
        call()
    ready.check(drawn_problem)
    drawn_problem.caches[0].block_table[1, :2] = drawn_problem.caches[0].block_table[0, :2]
    with pytest.raises(BenchmarkError, match=r"wrong results for sequence 1: out: .*, of heads 32/8, 2 x 640"):
        ready.check(drawn_problem)


def test_humming_is_right_and_measured_where_it_is() -> None:
    if not peers.importable():
        pytest.skip("PyTorch with a GPU is not installed")
    pytest.importorskip("humming.layer")  # the reason names what is missing: humming, or jinja2 that it needs
    if reason := peers.missing_humming_release():
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*left out")
        times = peers.humming(4096, 4096, (4, 64))  # BenchmarkError if its results are wrong
    assert set(times) == {4, 64} and all(set(by_name) == set(peers.HUMMING) for by_name in times.values())
    assert all(2 < us < 100 for by_name in times.values() for us in by_name.values())
    layers, weight, tiles = peers.humming_layers(4096, 4096, 128, (64,))
    with pytest.raises(BenchmarkError, match="humming: wrong results"):
        peers._humming_calls("humming", 64, layers, weight.flip(0), tiles)
    with pytest.warns(UserWarning, match="4100 x 4096: left out, AssertionError: assert "):
        assert peers.humming(4100, 4096, (64,)) == {64: {}}, "it takes multiples of 64 channels"


def test_pytorch_attention_is_measured_where_it_is() -> None:
    if not peers.importable():
        pytest.skip("PyTorch with a GPU is not installed")
    times = peers.sdpa(even((32, 8), 16, 1024))
    assert set(times) == {"sdpa_flash_f16"}
    assert all(5 < us < 100 for us in times.values())


SHARE = Config.named("LLaMA-2-70B").share(8)  # the smallest layer of the suite


def test_a_copy_takes_what_its_bytes_take(ceilings) -> None:
    nbytes = 256 << 20
    assert 0.8 < nbytes / ceilings.copy_tbps / 1e6 / copying.copy_us(nbytes, 2) < 1.1


def test_a_decoder_layer_is_timed_and_its_bits_are_those_of_its_calls(launched: None, ceilings) -> None:
    selection = layer.Selection(fused=False, timeline=False, configs=(SHARE,), batches=(2, 16), mixes=())
    small_batch, large_batch = layer.layer_rows(SHARE, selection, ceilings, lambda _: None)
    assert small_batch.checked.startswith("10 steps: ") and large_batch.checked.startswith("the graph that was timed")
    for row in (small_batch, large_batch):
        parts = sum(row.more[f"{name}_us"] for name in ("gemm", "attention", "others"))
        assert 0.2 < row.fraction < 1.05 and row.time_us < 1.1 * parts and row.time_us < 1.05 * row.more["plain_us"]


@pytest.mark.parametrize("make", [layer.fused.rmsnorm_kernel, layer.fused.silu_mul_kernel, layer.fused.quantize_kernel])
def test_a_fused_kernel_is_timed_and_right(make, launched: None, ceilings) -> None:
    row = layer.fused.measure_kernel(make(64, 4096), ceilings)
    assert 1 < row.time_us < 10 and row.more["chain_us"] < row.more["l2_us"] < row.time_us + 1


def test_a_capture_that_fails_spoils_none_that_follows(launched: None) -> None:
    """PyTorch's generator, above all: a call that waits for the device is refused while a graph is captured."""
    if not peers.importable():
        pytest.skip("PyTorch with a GPU is not installed")
    import torch

    with pytest.raises(RuntimeError):
        peers.capture([torch.cuda.synchronize])
    random_matrix = torch.randn(8, device="cuda")
    graph = peers.capture([random_matrix.normal_])
    first_numbers = random_matrix.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert (random_matrix != first_numbers).all()


def test_mixes_are_measured_where_pytorch_is(launched: None) -> None:
    if not peers.importable():
        pytest.skip("PyTorch with a GPU is not installed")
    names = ("fp16", "fp8_row", "fp8_tensor")
    times = dict(peers_layer.mixes(SHARE, (2, 16), names, lambda _: None))
    assert {name.partition("/")[0] for B in times for name in times[B]} == {*names}
    for time in (time for B in times for time in times[B].values()):
        assert 5 < time.gemms < time.without_attention < time.layer < 1000


def test_a_timeline_has_every_launch(launched: None) -> None:
    if not peers.importable():
        pytest.skip("PyTorch with a GPU is not installed")
    rows = list(layer.timeline_rows(SHARE, 16))
    assert [row.face.partition(" ")[0] for row in rows][:4] == [
        *("rmsnorm_quantize", "gemm", "rope_append_kv4", "attention")
    ]
    assert rows[-1].more["end_us"] < 2 * rows[-1].more["layer_us"]
