"""What `gemm_w4a8` launches, alone, in chains and with experts, measured without a GPU: launches are emulated."""

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab import bench, gpu, registry, sources
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Record, Row
from ptxlab.errors import BenchmarkError
from ptxlab.lowbit.bench import gemm
from ptxlab.lowbit.bench.gemm import ampere, chain, grouped, groups, headline, problem, quantiser, steps, w4a4
from ptxlab.lowbit.bench.gemm.points import Point
from ptxlab.lowbit.bench.peers import Peers
from ptxlab.lowbit.bench.shapes import (
    ALL_TOKENS,
    EXPERTS,
    GROUP,
    GROUPS,
    LLAMA,
    MIXTRAL,
    PER_CHANNEL,
    SWEPT,
    SWEPT_TOKENS,
    UNTUNED,
    UNTUNED_TOKENS,
    Layer,
)
from ptxlab.lowbit.kernels.gemm import ladder
from ptxlab.lowbit.layout.packed_activations import ORDERS
from tests.support.bench_rows import slow_down

SMALL, NEXT = Layer("test", "small", N=128, K=256), Layer("test", "next", N=64, K=128)
FP8 = {"cublas_fp8": 8.0}
PEERS = Peers(
    cublas=lambda N, K, tokens, names: {M: dict.fromkeys(names or ("cublas_fp8",), 8.0) for M in tokens},
    cublas_chain=lambda matrices, tokens: {M: {"cublas_fp8": 30.0} for M in tokens},
    humming=lambda N, K, tokens: {M: {"humming_w4a8_g128": 20.0} for M in tokens},
    attention=lambda batch: {},
)


def stream_us(nbytes: int) -> float:
    return 4.0


def quiet(_: str) -> None:
    """Print no progress."""


def ladder_names() -> list[str]:
    return [step.spec.name for step in ladder.LADDER]


def rows_of_small(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    monkeypatch.setattr(headline, "ALL_TOKENS", (1, 17))
    return list(headline.layer_rows(SMALL, ladder_names(), {1: FP8, 17: FP8}, stream_us, quiet))


@pytest.mark.full
def test_every_group_and_order_at_every_number_of_tokens(emulated_gpu: pytest.MonkeyPatch) -> None:
    rows = rows_of_small(emulated_gpu)
    measured = [(row.sizes.get("g", PER_CHANNEL), row.sizes["M"], row.activations) for row in rows]
    other_orders = ("fragment", "row_major-sums", "tiles")
    assert sorted(measured) == sorted(
        (g, M, order)
        for g in (*GROUPS, PER_CHANNEL)
        for M in (1, 17)
        for order in ("row_major", *(other_orders if g == GROUP else ()))
    )
    for row in rows:
        if row.activations == headline.WITHOUT_SUMS:
            assert row.variant["SIGNED"] == 1
            continue
        assert row.variant["SIGNED"] == 0
        step = headline.choose_step(SMALL, row.sizes["M"], row.sizes.get("g", PER_CHANNEL), row.activations)
        assert (row.kernel, row.face, row.measure) == (step.spec.name, "gemm_w4a8", "headline")
        assert row.peers == FP8 and (row.floor_us, row.time_us, row.fraction) == (4.0, 10.0, 0.4)
        assert row.checked == f"all {row.sizes['M'] * 128} results of 2 launches equal to the reference, bit for bit"
    assert len({row.key for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("order", "M", "rows"),
    [
        ("row_major", 17, 1),
        ("fragment", 17, 8),
        ("tiles", 1, 8),
        ("tiles", 17, 32),
        ("tiles", 32, 32),
        ("tiles", 256, 256),
        ("tiles", 8192, 256),
    ],
)
def test_a_tile_of_activations_holds_all_tokens_up_to_256(order: str, M: int, rows: int) -> None:
    assert headline.rows_of_tile(M, order) == rows


def test_fragments_only_of_as_many_tokens_as_their_kernel_takes(emulated_gpu: pytest.MonkeyPatch) -> None:
    assert "fragment" in headline._orders(SMALL, 32, GROUP) and "fragment" not in headline._orders(SMALL, 33, GROUP)


def test_only_what_is_asked_for_is_measured(emulated_gpu: pytest.MonkeyPatch) -> None:
    emulated_gpu.setattr(headline, "ALL_TOKENS", (1,))
    assert list(headline.layer_rows(SMALL, ["gemm_w4a8_qoq_sm80"], {1: FP8}, stream_us, quiet)) == []
    assert list(headline.points(["gemm_w4a8_qoq_sm80"])) == []


@pytest.mark.full
def test_a_point_that_was_chosen_otherwise_is_still_the_same_point(emulated_gpu: pytest.MonkeyPatch) -> None:
    row = rows_of_small(emulated_gpu)[0]
    assert replace(row, kernel="another").key == row.key
    assert replace(row, kernel="another", face="").key != replace(row, face="").key


@pytest.mark.full
def test_every_size_that_is_launched_obeys_the_rules(emulated_gpu: pytest.MonkeyPatch) -> None:
    def launched_points() -> Iterator[Point]:
        yield from headline.points(ladder_names())
        for layer in MIXTRAL:
            for M in range(1, 160):
                yield headline.point_at(layer, M)

    all_points = list(launched_points())
    for step, sizes in all_points:
        step.spec.check_sizes(sizes)
        assert step.spec.launch({**sizes, **problem.variant(step.spec, sizes)}).shared_bytes <= 227 << 10
    headlines = sum(
        len(headline._orders(layer, M, g)) for layer in LLAMA for g in (*GROUPS, PER_CHANNEL) for M in ALL_TOKENS
    )
    assert len(all_points) == headlines + len(UNTUNED) * len(UNTUNED_TOKENS) + 2 * 159


@pytest.mark.smoke
@pytest.mark.parametrize(("group", "sizes", "bits"), [(GROUP, {"g": 128}, 4.125), (PER_CHANNEL, {}, 4)])
def test_the_row_of_a_chain(emulated_gpu: pytest.MonkeyPatch, group: int, sizes: dict[str, int], bits: float) -> None:
    layers = [SMALL, NEXT]
    logical = [{**headline.weight_of(layer, group), **problem.tokens(layer, 5)} for layer in layers]
    row = chain.measure_chain(layers, 5, logical, stream_us, {"cublas_fp8": 30.0}, group=group)
    assert (row.measure, row.sizes, row.face) == ("chain", {"hidden": 256, "M": 5, **sizes}, "gemm_w4a8")
    assert row.operations == 2 * 5 * (128 * 256 + 64 * 128)
    assert row.more["packed_bytes"] == sum(layer.N * layer.K * bits / 8 for layer in layers)
    assert row.peers == {"cublas_fp8": 30.0} and row.more["plain_us"] == 10.0
    assert row.checked.count("bit for bit") == 2


def test_only_kernels_that_wait_are_launched_programmatically(emulated_gpu: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    emulated_gpu.setattr(gpu, "prepare", lambda kernel, args, geometry: seen.append(geometry.programmatic))
    step, sizes = headline.point_at(SMALL, 3)
    logical = {**headline.weight_of(SMALL), **problem.tokens(SMALL, 3)}
    impatient = replace(step, spec=replace(step.spec, after_wait=()))
    for launched_step in (impatient, step):
        for programmatic in (False, True):
            problem.launches(launched_step, sizes, logical, copies=1, programmatic=programmatic)
    assert seen == [False, False, False, True]


@pytest.mark.parametrize("count", [1, 2, 7, 512])
def test_random_routing_is_balanced_and_repeatable(count: int) -> None:
    offsets = grouped.route_at_random(count)
    by_expert = np.diff(offsets)
    assert offsets.dtype == np.int32 and offsets[0] == 0 and offsets[-1] == 2 * count
    assert (by_expert >= 0).all() and by_expert.max() <= count, "a token takes an expert once"
    assert (offsets == grouped.route_at_random(count)).all()
    if count == 512:
        assert by_expert.min() > 90 and len(set(by_expert.tolist())) > 1, "balanced, and random"


def test_the_loop_over_experts(emulated_gpu: pytest.MonkeyPatch) -> None:
    weights = [headline.weight_of(SMALL, seed=expert) for expert in range(EXPERTS)]
    offsets = np.array([0, 0, 3, 3, 4, 4, 4, 4, 8], np.int32)
    experts = grouped.Experts(SMALL, weights, problem.tokens(SMALL, 8), offsets)
    assert [M for M, _ in experts.problems()] == [3, 1, 4]
    row = grouped.measure_loop(experts, stream_us)
    assert (row.measure, row.sizes) == ("experts", {"tokens": 4, "N": 128, "K": 256, "g": 128})
    assert row.more["launches"] == 3 and row.operations == 2 * 8 * 128 * 256
    assert row.more["packed_bytes"] == 3 * 128 * 256 * 33 // 64
    assert "all 512 results of 2 launches" in row.checked


@pytest.mark.full
def test_experts_at_once(emulated_gpu: pytest.MonkeyPatch) -> None:
    """The floor is that of the two experts that have tokens, of which one has two tiles of them at least."""
    weights = [headline.weight_of(SMALL, seed=expert) for expert in range(EXPERTS)]
    offsets = np.array([0, 0, 9, 9, 9, 10, 10, 10, 10], np.int32)
    experts = grouped.Experts(SMALL, weights, problem.tokens(SMALL, 10), offsets)
    times = iter((30.0, 10.0, 20.0))  # of the places where the weights lie
    measure = grouped.measure
    emulated_gpu.setattr(grouped, "measure", lambda calls, **how: replace(measure(calls, **how), us=next(times)))
    row = grouped.measure_grouped(experts, stream_us, 12.5)
    assert row.time_us == 20.0
    assert (row.measure, row.sizes) == ("grouped", {"tokens": 5, "N": 128, "K": 256, "g": 128})
    assert (row.kernel, row.face, row.peers) == (grouped.GROUPED.name, "gemm_w4a8_grouped", {"experts": 12.5})
    assert row.operations == 2 * 10 * 128 * 256 and row.more["experts"] == 2
    assert row.more["packed_bytes"] == 2 * 128 * 256 * 33 // 64
    verdict = "all 1280 results of 2 launches equal to the reference, bit for bit"
    assert row.checked == f"in each of 3 places {verdict}"


@pytest.mark.full
def test_the_grouped_kernel_can_be_measured_alone(emulated_gpu: pytest.MonkeyPatch) -> None:
    assert list(grouped.points(ladder_names())) == []
    sizes = [sizes for _, sizes in grouped.points([grouped.GROUPED.name])]
    assert len(sizes) == 20 and sizes[0] == {"M": 2, "N": 28672, "K": 4096, "E": 8, "g": 128}
    emulated_gpu.setattr(gemm, "LAYERS", ())
    emulated_gpu.setattr(gemm.points, "compile_all", list)
    emulated_gpu.setattr(gemm.points, "streams", lambda: stream_us)
    emulated_gpu.setattr(gemm.limits, "with_limits", list)
    emulated_gpu.setattr(gemm, "MIXTRAL", (SMALL,))
    emulated_gpu.setattr(grouped, "ROUTED_TOKENS", (1,))
    rows = gemm.rows([grouped.GROUPED.name], Ceilings(4.6, 4.2), quiet)
    assert [row.measure for row in rows] == ["experts", "grouped"]
    assert gemm.rows([grouped.GROUPED.name], Ceilings(4.6, 4.2), quiet, matrices={(NEXT.N, NEXT.K)}) == []


def test_untuned_shapes(emulated_gpu: pytest.MonkeyPatch) -> None:
    emulated_gpu.setattr(headline, "UNTUNED_TOKENS", (3,))
    progress: list[str] = []
    (row,) = headline.untuned_rows([SMALL], ladder_names(), stream_us, progress.append, PEERS)
    assert (row.measure, row.sizes["M"], row.peers, row.face) == ("untuned", 3, FP8, "gemm_w4a8")
    other_names = [name for name in ladder_names() if name != row.kernel]
    assert list(headline.untuned_rows([SMALL], other_names, stream_us, progress.append, PEERS)) == []
    assert progress == [f"{SMALL}: untuned"]


def test_untuned_shapes_are_those_of_the_published_configurations() -> None:
    by_name = {str(layer): (layer.N, layer.K) for layer in UNTUNED}
    assert len(by_name) == 16
    assert by_name["Yi-34B QKV"] == (9216, 7168) and by_name["LLaMA-3-8B QKV"] == (6144, 4096)
    assert by_name["Qwen1.5-72B gate+up"] == (49152, 8192) and by_name["LLaMA-13B down"] == (5120, 13824)


@pytest.mark.full
def test_w8a8_rows(emulated_gpu: pytest.MonkeyPatch) -> None:
    """The kernel comes by its name; here another one stands in for it."""
    emulated_gpu.setattr(steps, "W8A8_KERNEL", "gemm_w4a8_lqq_sm90")
    emulated_gpu.setattr(steps, "ALL_TOKENS", (3,))
    assert steps.w8a8_of(["gemm_w4a8_qoq_sm80"]) == []
    (row,) = steps.layer_rows(SMALL, steps.w8a8_of(ladder_names()), {3: FP8}, stream_us, quiet, steps.W8A8)
    assert (row.measure, row.kernel, row.face, row.peers) == ("w8a8", "gemm_w4a8_lqq_sm90", "", FP8)


@pytest.mark.full
def test_w4a4_rows(emulated_gpu: pytest.MonkeyPatch) -> None:
    """The steps for sm_80 on one matrix alone; what is left of K behind the outliers is INT4."""
    every = [spec.name for spec in registry.specs().values() if "w4a4" in spec.name or "w4ax" in spec.name]
    emulated_gpu.setattr(w4a4, "TOKENS", (3, 5))
    emulated_gpu.setattr(problem, "SMS", 2)
    assert list(w4a4.layer_rows(SMALL, ["gemm_w4a8_sm90"], {}, stream_us, quiet)) == []
    rows = list(w4a4.layer_rows(SMALL, every, {3: FP8, 5: FP8}, stream_us, quiet))
    assert [(row.measure, row.kernel, row.sizes["M"]) for row in rows] == [
        (measure, f"gemm_{measure}_sm90", M) for measure in ("w4a4", "w4ax") for M in (3, 5)
    ]
    assert rows[0].sizes == {"M": 3, "N": 128, "K": 128, "outliers": 128, "g": 128} and rows[0].peers == FP8
    assert rows[2].sizes == {"M": 3, "N": 128, "K4": 128, "K8": 128}
    assert rows[0].operations == rows[2].operations == 2 * 3 * 128 * 256
    emulated_gpu.setattr(w4a4, "LADDER_LAYER", SMALL)
    ladder_rows = list(w4a4.layer_rows(SMALL, every, {3: FP8, 5: FP8}, stream_us, quiet))
    assert [row.kernel for row in ladder_rows[::2]] == every and len({row.key for row in ladder_rows}) == 2 * len(every)
    emulated_gpu.setattr(w4a4, "LLAMA", (SMALL,))
    assert [(step.spec.name, sizes["M"]) for step, sizes in w4a4.points(every)] == [
        (n, M) for n in every for M in (3, 5)
    ]


@pytest.mark.full
def test_w4a4_beside_others_in_one_run(emulated_gpu: pytest.MonkeyPatch) -> None:
    """The part measures its own numbers of tokens, beside cuBLAS alone, in a record with a name of its own."""
    layers = {"LLAMA": (SMALL,), "LADDER_LAYER": LLAMA[0], "COMPARED": (3, 5)}
    for name, replacement in layers.items():
        emulated_gpu.setattr(w4a4, name, replacement)
    emulated_gpu.setattr(w4a4, "compile_all", lambda planned: compiled.extend(planned))
    emulated_gpu.setattr(w4a4, "streams", lambda: stream_us)
    emulated_gpu.setattr(steps, "W8A8_KERNEL", "gemm_w4a8_lqq_sm90")
    compiled: list[Any] = []
    assert gemm.part(["w4a4"]) == LLAMA and gemm.part(["70B", "w4a4"]) == LLAMA[4:] and gemm.part([]) == LLAMA
    emulated_gpu.setattr(gemm, "LLAMA", (SMALL,))
    rows = gemm.rows([*registry.specs()], Ceilings(4.6, 4.2), quiet, only=["w4a4"], peers=PEERS)
    assert [(row.measure, row.sizes["M"]) for row in rows] == [
        (measure, M) for measure in ("headline", "w8a8", "w4a4", "w4ax") for M in (3, 5)
    ]
    assert all(row.peers == {"cublas_fp8": 8.0, "cublas_int8": 8.0} and "bit for bit" in row.checked for row in rows)
    assert {step.spec.name for step, _ in compiled} == {name for row in rows for name in row.kernel.split(", ")}
    assert gemm.SUITE.record_name(["w4a4"]) == "gemm_w4a4" and gemm.SUITE.record_name(["w4a4", "7B"]) == "gemm_part"


@pytest.mark.full
def test_the_ladder_in_groups_of_64(emulated_gpu: pytest.MonkeyPatch) -> None:
    """Measure what `gemm_w4a8` launches and every step with groups, in a record of its own."""
    compiled: list[Any] = []
    emulated_gpu.setattr(groups, "TOKENS", (3,))
    emulated_gpu.setattr(groups, "compile_all", lambda planned: compiled.extend(planned))
    emulated_gpu.setattr(groups, "streams", lambda: stream_us)
    emulated_gpu.setattr(gemm, "LLAMA", (SMALL,))
    rows = gemm.rows([*registry.specs()], Ceilings(4.6, 4.2), quiet, only=["g64"], peers=PEERS)
    ladder_steps = [step.spec.name for step in problem.steps_of(ladder_names()) if "g" in step.spec.symbols]
    assert [(row.measure, row.kernel) for row in rows[1:]] == [("gemm", name) for name in ladder_steps]
    assert "gemm_w4a8_lqq_imfp_sm90" in ladder_steps and rows[0].face == "gemm_w4a8"
    assert all(row.sizes == {"M": 3, "N": 128, "K": 256, "g": 64} for row in rows[1:])
    assert all(row.sizes["g"] == 64 and "bit for bit" in row.checked and row.peers for row in rows)
    assert {step.spec.name for step, _ in compiled} == {row.kernel for row in rows}
    assert [gemm.SUITE.record_name(words) for words in (["g64"], ["g64", "7B"], ["g64", "w4a4"])] == [
        "gemm_g64",
        "gemm_part",
        "gemm_part",
    ]


def test_steps_for_ampere_are_compiled_for_it(emulated_gpu: pytest.MonkeyPatch) -> None:
    """Measure each step for sm_80 while kernels are compiled for that, in a record of its own."""
    compiled: list[Any] = []
    targets: list[str | None] = []
    emulated_gpu.setattr(ampere, "TOKENS", (3,))
    emulated_gpu.setattr(ampere, "compile_all", lambda planned: compiled.extend((*p, gpu.target()) for p in planned))
    emulated_gpu.setattr(ampere, "streams", lambda: stream_us)
    emulated_gpu.setattr(gemm, "LLAMA", (SMALL,))
    rows = gemm.rows(
        [*registry.specs()], Ceilings(4.6, 4.2), lambda _: targets.append(gpu.target()), only=["compute_80"]
    )
    kernels = ["gemm_w4a8_qoq_sm80", "gemm_w4a8_lqq_sm80", "gemm_w4a8_qoq_channel_sm80"]
    assert [(row.measure, row.kernel) for row in rows] == [("compute_80", name) for name in kernels]
    assert all("bit for bit" in row.checked and not row.peers for row in rows)
    assert [(step.spec.name, arch) for step, _, arch in compiled] == [(name, "sm_80") for name in kernels]
    assert targets == [None] + ["sm_80"] * len(kernels) and gpu.target() is None
    assert gemm.SUITE.record_name(["compute_80"]) == "gemm_compute_80"


@pytest.mark.default_cases("row_major")
@pytest.mark.parametrize("order", ORDERS)
def test_the_quantiser(order: str, emulated_gpu: pytest.MonkeyPatch) -> None:
    x = quantiser._repeat_activations(5, 256)
    row = quantiser.measure_quantiser(x, order, Ceilings(4.6, 4.2))
    assert (row.measure, row.activations, row.sizes["M"], row.sizes["K"]) == ("quantise", order, 5, 256)
    assert row.variant["IN"] == 0 and row.floor_us == pytest.approx(row.bytes / 4.2e6)


def test_a_quantiser_that_writes_nothing_is_found(emulated_gpu: pytest.MonkeyPatch) -> None:
    emulated_gpu.setattr(gpu, "prepare", lambda *_: lambda: None)
    with pytest.raises(BenchmarkError, match="wrong results in the order fragment at M=5, K=256"):
        quantiser.measure_quantiser(quantiser._repeat_activations(5, 256), "fragment", Ceilings(4.6, 4.2))


@pytest.mark.full
def test_the_whole_suite_on_small_matrices(emulated_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The suite runs from its entry to a record that is compared with itself: no two rows have one key."""
    patches: dict[Any, dict[str, Any]] = {
        gemm: {
            "LAYERS": (SMALL,),
            "LLAMA": (SMALL,),
            "MIXTRAL": (SMALL,),
            "UNTUNED": (NEXT,),
            "TOKENS": (3,),
            "ALL_TOKENS": (3, 9),
        },
        steps: {"LAYERS": (SMALL,), "TOKENS": (3,)},
        headline: {"LLAMA": (SMALL,), "ALL_TOKENS": (3, 9), "UNTUNED": (NEXT,), "UNTUNED_TOKENS": (2,)},
        quantiser: {"LLAMA": (SMALL,), "_TOKENS": (3, 9)},
        chain: {"CHAINS": ((SMALL, NEXT),), "FEW_TOKENS": (3,)},
        grouped: {"MIXTRAL": (SMALL,), "ROUTED_TOKENS": (1, 2)},
        gemm.points: {"compile_all": list, "streams": lambda: stream_us},
        gemm.limits: {"with_limits": list},
    }
    for module, replaced in patches.items():
        for name, replacement in replaced.items():
            emulated_gpu.setattr(module, name, replacement)
    rows = gemm.rows(ladder_names(), Ceilings(4.6, 4.2), quiet, peers=PEERS)
    counts = Counter(row.measure for row in rows)
    launched = 2 * (4 + 1 + 1)  # numbers of tokens; three orders and none of sums; the other group, and none, in one
    experts = {"experts": 2, "grouped": 2}
    assert counts == {"gemm": 8, "headline": launched, "quantise": 6, "chain": 2, "untuned": 1} | experts
    assert all(("humming_w4a8_g128" in row.peers) == (row.measure == "headline") for row in rows)
    record = Record("gemm", {"slug": "h200"}, {}, {}, tuple(rows))
    assert bench.load(bench.save(record, tmp_path / "r.json")) == record
    assert len({row.key for row in rows}) == len(rows)
    slow_record = replace(record, rows=tuple(slow_down(row, 0.5) for row in rows))
    assert bench.compare(record, record) == [] and len(bench.compare(slow_record, record)) == len(rows)


def test_the_whole_suite_has_every_part(emulated_gpu: pytest.MonkeyPatch) -> None:
    """A single kernel has its points and the untuned shapes; the family also has chains, experts and the quantiser."""
    parts = {"chain": chain, "grouped": grouped, "untuned": headline, "quantiser": quantiser}
    emulated_gpu.setattr(gemm.points, "compile_all", list)
    emulated_gpu.setattr(gemm, "layer_rows", lambda *_: [])
    emulated_gpu.setattr(gemm.limits, "with_limits", list)
    for part, module in parts.items():
        rows = "untuned_rows" if part == "untuned" else "rows"
        emulated_gpu.setattr(module, rows, lambda *_, part=part: [part])
    assert gemm.rows(["gemm_w4a8_lqq_sm90"], Ceilings(4.6, 4.2), quiet) == ["untuned"]
    assert sorted(map(str, gemm.rows(ladder_names(), Ceilings(4.6, 4.2), quiet))) == sorted(parts)
    assert not {"chain", "quantiser"} & {*map(str, gemm.rows(ladder_names(), Ceilings(4.6, 4.2), quiet, matrices=()))}


def test_which_matrices_of_other_models_the_sweeps_have() -> None:
    with (sources.results_dir() / "h200" / "sweeps" / "gemm_strips.csv").open() as file:
        lines = list(csv.DictReader(file))
    swept = {(int(line["N"]), int(line["K"])) for line in lines}
    assert {(layer.N, layer.K) for layer in UNTUNED} & swept == SWEPT
    assert {int(line["M"]) for line in lines} & set(UNTUNED_TOKENS) == set(SWEPT_TOKENS)
