"""The cost model: the papers' numbers, its units, its devices."""

import math
from statistics import geometric_mean

import pytest

from ptxlab.errors import ArgumentError
from ptxlab.lowbit import cost
from ptxlab.lowbit.bench import counts
from ptxlab.lowbit.bench.shapes import LLAMA
from ptxlab.lowbit.cost import (
    DEVICES,
    SCHEMES,
    Device,
    Scheme,
    device,
    gemm_cost,
    largest_alpha,
    most_tops,
    tensor_rate,
    transition,
)
from ptxlab.lowbit.kernels.gemm import strips
from ptxlab.spec import KernelSpec

W4A8, W8A8 = SCHEMES["W4A8 LQQ"], SCHEMES["W8A8"]
# 10^12 bytes, 100·10^12 operations and 1.28·10^12 instructions per second.
ROUND = Device("round", "made up", False, 10, 1.0, 1.0, {"int8": 100.0}, start_us=3.0)
NIBBLE = Scheme("four bits, no constants", 4, "int8")


@pytest.mark.parametrize(
    ("gpu", "scheme", "tokens"),
    [
        ("h100", "W4A8 LQQ", 150),  # LiquidGEMM §3.3
        ("h100", "W8A8", 300),
        ("a100", "W8A8", 156),
        ("h800", "W4A8 QoQ", 150),
        ("a100", "W4A8 QoQ", 78),  # QServe §3.2: from here on 4-bit tensor cores would pay
    ],
)
def test_transitions_of_the_papers(gpu: str, scheme: str, tokens: float) -> None:
    assert transition(device(gpu), SCHEMES[scheme]) == pytest.approx(tokens, rel=0.025)


def test_the_papers_largest_alpha() -> None:
    """LiquidGEMM §3.3 derives it from 33.9·10^12 instructions per second.

    The 7 instructions per 8 weights stay far below.
    """
    assert device("h100").issue_tips == pytest.approx(33.9, rel=0.02)
    assert largest_alpha(device("h100"), W4A8) == pytest.approx(5.1, rel=0.02)
    assert largest_alpha(device("h100"), W4A8, 150) == pytest.approx(5.1, rel=0.02), "the MMA takes as long there"
    assert largest_alpha(device("h100"), W4A8, 300) == pytest.approx(10.2, rel=0.02)


def test_qserves_crossing_of_w4a16_and_w8a8() -> None:
    """QServe §3.1, Fig. 3, has W4A16 ahead below 78 tokens on an A100, and W8A8 beyond.

    W4A8 is never below either.
    """
    a100 = device("a100")

    def roofs(M: int) -> list[float]:
        return [most_tops(a100, SCHEMES[name], M) for name in ("W4A16", "W8A8", "W4A8 QoQ")]

    assert roofs(70)[0] > roofs(70)[1] and roofs(85)[0] < roofs(85)[1]
    assert all(w4a8 >= max(w4a16_and_w8a8) for M in range(1, 500) for *w4a16_and_w8a8, w4a8 in [roofs(M)])
    assert most_tops(a100, SCHEMES["W4A4"], 500) == 2 * most_tops(a100, W8A8, 500)


@pytest.mark.parametrize(
    ("scheme", "spec", "sizes"),
    [("W4A8 LQQ u8", strips.LARGE, {"g": 128}), ("W4A8 channel", strips.LARGE_CHANNEL, {})],
)
def test_bits_of_a_weight_are_those_of_its_packing(scheme: str, spec: KernelSpec, sizes: dict) -> None:
    nbytes = spec.arg("strips").nbytes({"N": 64, "K": 256, **sizes})
    assert nbytes * 8 / (64 * 256) == SCHEMES[scheme].bits


def test_what_weights_per_channel_gain() -> None:
    """A 33rd of the loads and two of five instructions are gone: what the guide says is predicted of it."""
    schemes = SCHEMES["W4A8 LQQ u8"], SCHEMES["W4A8 channel"]
    alphas = [counts.alpha_of(scheme.dequantiser) for scheme in schemes]
    assert [alpha * 8 for alpha in alphas] == [5, 3]

    def gain(*sizes: int) -> float:
        groups, channel = (
            gemm_cost(device("h200-measured"), scheme, *sizes, alpha=alpha)
            for scheme, alpha in zip(schemes, alphas, strict=True)
        )
        return groups.in_turn_us / channel.in_turn_us

    gains = [
        round(geometric_mean(gain(M, layer.N, layer.K) for layer in LLAMA), 2) for M in (1, 16, 32, 64, 128, 256, 512)
    ]
    assert gains == [1.02, 1.02, 1.02, 1.02, 1.05, 1.03, 1.03]


def test_costs_are_in_microseconds() -> None:
    costs = gemm_cost(ROUND, NIBBLE, 10, 1000, 2000, alpha=0.64)
    assert costs.load_us == pytest.approx(1e6 / 1e12 * 1e6), "half a byte per weight"
    assert costs.dequantise_us == pytest.approx(2e6 * 0.64 / 1.28e12 * 1e6)
    assert costs.multiply_us == pytest.approx(2 * 10 * 2e6 / 1e14 * 1e6)
    assert costs.in_turn_us == pytest.approx(3 + 1.4) and costs.overlapped_us == pytest.approx(3 + 1)
    assert costs.limit == "load" and gemm_cost(ROUND, NIBBLE, 100, 1000, 2000).limit == "multiply"


def test_every_tile_of_tokens_dequantises_again() -> None:
    """The weights come out of memory once, and the products are the same."""
    one, three = (gemm_cost(ROUND, NIBBLE, 192, 64, 64, alpha=1.0, tile=tile) for tile in (192, 64))
    assert three.dequantise_us == pytest.approx(3 * one.dequantise_us)
    assert (three.load_us, three.multiply_us) == (one.load_us, one.multiply_us)
    ragged = gemm_cost(ROUND, NIBBLE, 193, 64, 64, alpha=1.0, tile=64)
    assert ragged.dequantise_us == pytest.approx(4 * one.dequantise_us)


@pytest.mark.parametrize("name", DEVICES)
def test_the_transition_is_where_loading_takes_as_long_as_multiplying(name: str) -> None:
    gpu = device(name)
    for scheme in (scheme for scheme in SCHEMES.values() if scheme.operands in gpu.tops):
        tokens, roof = transition(gpu, scheme), tensor_rate(gpu, scheme)
        assert roof == gpu.tops[scheme.operands] or scheme.int8_share
        assert most_tops(gpu, scheme, 0.99 * tokens) < roof == most_tops(gpu, scheme, tokens * 1.01)
        alpha = largest_alpha(gpu, scheme)
        hidden, shown = (gemm_cost(gpu, scheme, 1, 512, 512, alpha=a) for a in (0.999 * alpha, 1.001 * alpha))
        assert hidden.dequantise_us < max(hidden.load_us, hidden.multiply_us) < shown.dequantise_us


def test_a_dequantiser_too_dear_to_hide_lowers_the_roof() -> None:
    gpu = device("h200")
    dear = 2 * largest_alpha(gpu, W4A8)
    assert most_tops(gpu, W4A8, 8, dear) == pytest.approx(most_tops(gpu, W4A8, 8) / 2)
    assert most_tops(gpu, W4A8, 4096, dear) == gpu.tops["int8"]


def test_sheets_say_what_is_measured() -> None:
    assert [name for name, gpu in DEVICES.items() if gpu.measured] == ["h200-measured"]
    measured, sheet, promised = device("H200-measured"), cost.sheet("h200"), device("h200")
    assert (measured.memory_tbps, measured.tops["int8"], measured.start_us) == (4.5, 1920, sheet.start_us)
    assert measured.memory_tbps < promised.memory_tbps and measured.issue_tips < promised.issue_tips
    assert all(measured.tops[operand] < tops for operand, tops in promised.tops.items())


@pytest.mark.parametrize(
    ("name", "cores", "tflops"),
    [("a100", 64, 19.5), ("h100", 128, 67), ("l40s", 128, 91.6), ("rtx3090", 128, 35.6), ("rtx4090", 128, 82.6)],
)
def test_clocks_make_the_fp32_rate_of_the_data_sheet(name: str, cores: int, tflops: float) -> None:
    gpu = device(name)
    assert gpu.sms * cores * 2 * gpu.clock_ghz / 1e3 == pytest.approx(tflops, rel=0.005)


@pytest.mark.parametrize(
    ("name", "operand", "per_clock"),
    [
        *(("a100", operand, rate) for operand, rate in (("fp16", 2048), ("int8", 4096), ("int4", 8192))),
        *((card, "fp16", 512) for card in ("rtx3090", "rtx4090")),
        *((card, "int8", 2048) for card in ("rtx3090", "rtx4090", "l40s")),
        *((card, "int4", 4096) for card in ("rtx3090", "rtx4090")),
    ],
)
def test_tensor_rates_are_those_of_an_sm(name: str, operand: str, per_clock: int) -> None:
    """Operations per clock: an SM of the A100 multiplies twice as much as one of the RTX cards, FP16 four times."""
    gpu = device(name)
    assert gpu.tops[operand] * 1e3 / (gpu.sms * gpu.clock_ghz) == pytest.approx(per_clock, rel=0.005)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"M": 0}, r"M: at least 1 \(got 0\)"),
        ({"K": -4}, r"K: at least 1 \(got -4\)"),
        ({"tile": 0}, r"tile: at least 1 \(got 0\)"),
        ({"alpha": -0.5}, r"alpha: instructions per weight, 0 or more \(got -0.5\)"),
        ({"alpha": math.nan}, r"alpha: .* \(got nan\)"),
        ({"scheme": SCHEMES["W4A4"]}, r"scheme: operands that h100 multiplies: fp16, fp8, int8 \(got W4A4\)"),
    ],
)
def test_bad_input(changed: dict, message: str) -> None:
    arguments = {"device": device("h100"), "scheme": W8A8, "M": 1, "N": 1, "K": 1, **changed}
    with pytest.raises(ArgumentError, match=message):
        gemm_cost(**arguments)


def test_unknown_device() -> None:
    with pytest.raises(ArgumentError, match=r"device: one of a100, .*, h200-measured; nearest: h200, .* \(got b200\)"):
        device("b200")
