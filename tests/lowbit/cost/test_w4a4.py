"""W4A4 on GPUs that were not measured: schemes by name, what is counted, and published figures with their errors."""

import pytest

from ptxlab.errors import ArgumentError
from ptxlab.hardware.sheets import LANES_PER_CLOCK, slowest_pipe
from ptxlab.lowbit import cost
from ptxlab.lowbit.bench import counts
from ptxlab.lowbit.cost import SCHEMES, LoopCounts, device, gemm_cost, schemes
from ptxlab.lowbit.cost.published import FIGURES, PublishedFigure, instructions_per_sum, predictions


def over_int8(gpu: str, scheme: str, M: int = 4096) -> tuple[float, float]:
    """Compute the speed relative to W8A8 at INT8's peak: (in turn, overlapped)."""
    costs = []
    for name in ("W8A8", scheme):
        counted = counts.loop_counts(SCHEMES[name], device(gpu).arch)
        costs.append(gemm_cost(device(gpu), SCHEMES[name], M, 4096, 4096, counts=counted))
    return costs[0].in_turn_us / costs[1].in_turn_us, costs[0].overlapped_us / costs[1].overlapped_us


# In turn, overlapped, error in turn: what the guide's page w4a4 explains.
PINNED = [
    (1114, 1321, 0.14),
    (1086, 1281, 0.21),
    (751, 1281, -0.02),
    (4.54, 7.76, 0.34),
    (1.14, 1.94, -0.40),
    (4.63, 8.00, 0.85),
    (1.19, 1.69, 1.52),
    (3.88, 3.88, 0.33),
    (3.88, 3.88, 0.31),
    (2.38, 3.20, -0.13),
    (1.09, 1.65, -0.60),
]


@pytest.mark.parametrize(("predicted", "pinned"), [*zip(predictions(counts.loop_counts), PINNED, strict=True)])
def test_published_figures_and_their_errors(predicted, pinned: tuple[float, float, float]) -> None:
    in_turn, overlapped, error = pinned
    assert (predicted.in_turn, predicted.overlapped) == (
        pytest.approx(in_turn, rel=5e-3),
        pytest.approx(overlapped, rel=5e-3),
    )
    assert predicted.error == pytest.approx(error, abs=0.006)


@pytest.mark.parametrize("name", ["W4A4 g128", "W4Ax token", "W8A8"])
def test_at_the_transition_loading_takes_as_long_as_multiplying(name: str) -> None:
    gpu = device("a100")
    tokens = round(cost.transition(gpu, SCHEMES[name]))
    costs = gemm_cost(gpu, SCHEMES[name], tokens, 4096, 4096)
    assert costs.load_us == pytest.approx(costs.multiply_us, rel=0.02)


def test_the_error_is_from_the_nearer_end_of_a_published_range() -> None:
    (within,) = predictions(lambda *_: LoopCounts({}), [PublishedFigure("x", "a100", "W4A4", 4096, 1000, 1300)])
    assert within.in_turn == pytest.approx(1248) and within.error == 0


def test_w4a4_loses_on_the_a100_and_wins_on_geforce_cards() -> None:
    """The comparison is with INT8 at its peak, in turn and overlapped alike.

    The guide's first lines say so.
    """
    for gpu in ("rtx3090", "rtx4090"):
        assert min(over_int8(gpu, "W4A4 Atom")) > 1.1 and max(over_int8(gpu, "W4A4 Atom")) < 2
        assert min(over_int8(gpu, "W4Ax g128")) > 0.99 and min(over_int8(gpu, "W4Ax token")) > 1.3
    for scheme in ("W4A4 Atom", "W4A4 g128", "W4Ax g128"):
        assert max(over_int8("a100", scheme)) < 0.85 and min(over_int8("a100", scheme)) > 0.5
        assert max(over_int8("l40s", scheme)) <= 1.0
    for scheme in ("W4A4", "W4Ax token"):
        assert min(over_int8("a100", scheme)) > 1.15, "without groups"
        assert max(over_int8("l40s", scheme)) <= 1.0


def test_comet_cannot_scale_every_block_on_an_a100() -> None:
    """Its 2.75x at 256 tokens is beyond what groups allow, and between the two ends of the model without them."""
    (token,) = predictions(counts.loop_counts, FIGURES[9:10])
    (groups,) = predictions(counts.loop_counts, FIGURES[10:11])
    assert groups.overlapped < 2.75 and token.in_turn < 2.75 < token.overlapped


def test_few_tokens_wait_for_weights() -> None:
    for gpu in ("rtx3090", "rtx4090", "l40s", "a100"):
        four, ours = (over_int8(gpu, name, 16) for name in ("W4A4 g128", "W4A8 sm80"))
        assert ours == pytest.approx(four, rel=0.03) and min(ours) > 1.9


def test_the_a100_converts_on_a_slow_pipe_and_adds_on_a_narrow_one() -> None:
    sums = {arch: counts.load_mma_loops()["archs"][arch]["per_sum"] for arch in counts.MMA_ARCHS}
    assert "xu" in sums["sm_80"] and "xu" not in {*sums["sm_86"], *sums["sm_89"]}
    assert slowest_pipe(sums["sm_80"], "sm_80") == (1 / 16, "xu")
    assert slowest_pipe(sums["sm_86"], "sm_86")[1] == "issue"
    assert LANES_PER_CLOCK["sm_80"]["fma"] == LANES_PER_CLOCK["sm_86"]["fma"] / 2


def test_instructions_per_sum_that_apex4_implies() -> None:
    a100, rtx3090 = (instructions_per_sum(figure, counts.loop_counts) for figure in (FIGURES[6], FIGURES[5]))
    ours = sum(counts.load_mma_loops()["archs"]["sm_80"]["per_sum"].values())
    assert (a100, rtx3090, ours) == (
        pytest.approx(30, abs=0.5),
        pytest.approx(19, abs=0.5),
        pytest.approx(4.3, abs=0.1),
    )


def test_atoms_figures_at_512_tokens_contradict_its_tops() -> None:
    """The baselines would have run at these rates at the model's 751 TOPS; the RTX 4090 sums FP16 in FP32 at 165."""
    tops = predictions(counts.loop_counts, FIGURES[2:3])[0].in_turn
    assert tops / 3.4 == pytest.approx(221, abs=1) and tops / 3.4 > device("rtx4090").tops["fp16"]
    assert tops / 1.9 / device("rtx4090").tops["int8"] == pytest.approx(0.60, abs=0.01)


def test_int8_channels_and_sums_are_counted() -> None:
    """An SM of the A100 multiplies 4096 INT4 pairs a clock and half as many INT8 pairs; the rest is counted by hand."""
    gpu, M, N, K = device("a100"), 128, 256, 1024
    counted = LoopCounts({"alu": 2.0}, {"xu": 1.0, "fma": 2.0}, tile=64)
    costs = gemm_cost(gpu, SCHEMES["W4A4 Atom"], M, N, K, counts=counted)
    clocks = gpu.sms * gpu.clock_ghz * 1e3  # of all SMs in a microsecond
    pairs = M * N * (K - 128) + 2 * M * N * 128
    assert costs.multiply_us == pytest.approx(2 * pairs / 1248e6)
    assert costs.dequantise_us == pytest.approx(2 * N * K * 2.0 / 64 / clocks), "two tiles of tokens"
    assert costs.scale_us == pytest.approx(M * N * (K / 128) / 16 / clocks)
    parts = costs.dequantise_us + costs.scale_us
    assert costs.in_turn_us == pytest.approx(max(costs.load_us, parts + costs.multiply_us))
    assert costs.overlapped_us == pytest.approx(max(costs.load_us, parts, costs.multiply_us))
    mixed, plain = (gemm_cost(gpu, SCHEMES[name], M, N, K) for name in ("W4Ax g128", "W4A4"))
    assert mixed.multiply_us == pytest.approx(1.25 * plain.multiply_us)
    conversion = counts.loop_counts(SCHEMES["W4Ax token"], "sm_80").per_weight["alu"]
    assert conversion - counts.loop_counts(SCHEMES["W4A4"], "sm_80").per_weight["alu"] == 3 / 8 / 4


def test_a_loop_is_counted_where_it_was_compiled() -> None:
    assert counts.loop_counts(SCHEMES["W4A4"], "sm_90") is None
    assert counts.loop_counts(SCHEMES["W4A8 LQQ"], "sm_90") == LoopCounts({"issue": 7 / 8})


def test_schemes_by_name() -> None:
    assert [s.name for s in schemes("W4Ax,w4a8-lqq-u8,w4a8 lqq")] == [
        "W4Ax g128", "W4Ax token", "W4A8 LQQ u8", "W4A8 LQQ",
    ]  # fmt: skip
    assert [s.name for s in schemes("w4a4")] == ["W4A4", "W4A4 outlier", "W4A4 g128", "W4A4 Atom"]
    for scheme in cost.SCHEMES.values():
        assert scheme in schemes(scheme.slug)
    for wrong in ("w4a5", "", "w4a4,", "awq"):
        with pytest.raises(ArgumentError, match=r"^scheme: a known one; nearest: .* \(got "):
            schemes(wrong)
