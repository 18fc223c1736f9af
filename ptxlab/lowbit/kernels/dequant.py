"""Family `dequant`: 4-bit weights to 8-bit integers or FP16, one kernel per published way of doing it.

All kernels stream: `qweight` (micro-kernel words, see `layout.nibbles`) and per-group constants in, a row-major
matrix out. Two words (for FP16 one) per thread, so that a warp stores 512 contiguous bytes.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.layout.nibbles import pack_comet, pack_s4, pack_u4
from ptxlab.spec import Arg, Arrays, KernelClaim, KernelSpec, Launch, Sizes, WrongByDesign

THREADS = 256
GROUPS = (32, 64, 128)

_GROUP_RULES = (f"g in {GROUPS}", "K % g == 0", "R*K/16 < 2**32")
_GROUPED_SIZES = tuple(
    {"R": r, "K": k, "g": g} for r, k, g in ((1, 32, 32), (3, 320, 64), (8, 1024, 128), (17, 768, 32))
)
_SCALE_RULES = ("scale >= 1", "scale <= 16")
_SATURATING_RULES = ("scale >= 1", "scale <= 17", "zero <= 15")  # 17: (127 + 127) / 15, no protective range
_CLAMPED = "out[i] == clip((q4[i] - zero[i//g])*scale[i//g], -128, 127)"
_LQQ_RULES = (*_SCALE_RULES, "nibbles(qweight) * per_weight(scale) + per_weight(offset) <= 255")

# What quantisers leave behind (`lowbit.quant`), for weights q8 within low..high of their group. Ties may go either way,
# for other quantisers round otherwise; where that decides, the claim says so.
_LQQ_SCALE = {
    "nearest": "rounds(scale[i//g], high[i//g] - low[i//g], 15)",
    "ceiling": "15*scale[i//g] - 15 < high[i//g] - low[i//g] <= 15*scale[i//g]",
}
_LQQ_WEIGHTS = (
    "low[i//g] <= q8[i] <= high[i//g]",
    "offset[i//g] == low[i//g] + 128",
    "rounds(q4[i], q8[i] - low[i//g], scale[i//g]) or q4[i] == 15 and q8[i] - low[i//g] > 15*scale[i//g]",
)
_QOQ_WEIGHTS = (
    "low[i//g] <= 0 <= high[i//g]",
    "low[i//g] <= q8[i] <= high[i//g]",
    "rounds(scale[i//g], high[i//g] - low[i//g], 15) or scale[i//g] == 1 and high[i//g] - low[i//g] < 15",
    "rounds(zero[i//g], -low[i//g], scale[i//g]) or zero[i//g] == 15 and -low[i//g] > 15*scale[i//g]",
    "rounds(step[i], q8[i], scale[i//g])",
    "q4[i] == clip(step[i] + zero[i//g], 0, 15)",
    "(offset[i//g] + zero[i//g]*scale[i//g]) % 256 == 0",
)


def _lqq_claims(holds: str) -> tuple[KernelClaim, ...]:
    """Build the claims that LQQ is exact.

    It is exact by the spec's rules; by what `pack` asks of groups (`TwoLevelWeight.overflows`), whatever their scale;
    for every group that the quantiser can leave at a protective range, and not at the next one.
    """
    predicate = "q4[i]*scale[i//g] + offset[i//g] <= 255"
    claims = [KernelClaim("by the rules", holds, _LQQ_RULES), KernelClaim("by the predicate", holds, (predicate,))]
    cases: tuple[tuple[str, int, str, Literal["proved", "refuted"]], ...] = (
        ("nearest", 119, "", "proved"), ("nearest", 120, "", "proved"), ("nearest", 121, "", "refuted"),
        ("ceiling", 119, "", "proved"), ("ceiling", 120, "", "refuted"),
        ("ceiling", 120, ", ties to even", "proved"), ("ceiling", 121, ", ties to even", "refuted"),
    )  # fmt: skip
    for rounding, limit, ties, expected_verdict in cases:
        extent = "high[i//g] - low[i//g]"
        scale = f"{_LQQ_SCALE[rounding]} or scale[i//g] == 1 and {extent} < 15 or scale[i//g] == 16 and {extent} > 240"
        unknowns = dict.fromkeys(("low", "high", "q8"), (-limit, limit))
        weights = [text.replace("rounds(", "rounds_even(" if ties else "rounds(") for text in _LQQ_WEIGHTS]
        name = f"quantised at {limit}, {rounding}{ties}"
        claims.append(KernelClaim(name, holds, (scale, *weights), unknowns, expected_verdict, alone=True))
    return tuple(claims)


def _qoq_claims() -> tuple[KernelClaim, ...]:
    """Build the claims on QoQ: it wraps by byte while no product carries, and is exact for quantised groups at 119."""
    wraps = "(out[i] - q4[i]*scale[i//g] - offset[i//g]) % 256 == 0"
    exact_formula = "out[i] == (q4[i] - zero[i//g])*scale[i//g]"

    def claim_at_limit(limit: int, expect: Literal["proved", "refuted"]) -> KernelClaim:
        unknowns = {**dict.fromkeys(("low", "high", "q8", "step"), (-limit, limit)), "zero": (0, 15)}
        return KernelClaim(f"quantised at {limit}", exact_formula, _QOQ_WEIGHTS, unknowns, expect, alone=True)

    return (
        KernelClaim("scale to 17", wraps, ("scale <= 17",)),
        KernelClaim("scale 18", wraps, ("scale <= 18",), expect="refuted"),
        claim_at_limit(119, "proved"),
        claim_at_limit(120, "refuted"),
    )


def _launch(weights_per_thread: int) -> Callable[[Sizes], Launch]:
    def launch(sizes: Sizes) -> Launch:
        threads = sizes["R"] * sizes["K"] // weights_per_thread
        return Launch(grid=(ceil_div(threads, THREADS), 1, 1), block=(THREADS, 1, 1))

    return launch


def _weights(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Draw weights as language models have them: Gaussian, with a few outlier channels."""
    w = rng.standard_normal((rows, columns), dtype=np.float32) * 0.02
    w[:, rng.integers(0, columns, size=max(1, columns // 64))] *= 8
    return w


def _lqq_example(rng: np.random.Generator, *, R: int, K: int, g: int) -> Arrays:
    w = quant.quantize_lqq(_weights(rng, R, K), group=g)
    return {"q4": w.q4, "scale": w.group_scale, "offset": w.offset}


def _qoq_example(rng: np.random.Generator, *, R: int, K: int, g: int) -> Arrays:
    w = quant.quantize_qoq(_weights(rng, R, K), group=g)
    return {"q4": w.q4, "scale": w.group_scale, "offset": w.offset}


def _presub_example(rng: np.random.Generator, *, R: int, K: int, g: int) -> Arrays:
    """Quantise random weights by QoQ; give the zero points themselves, not offsets."""
    w = quant.quantize_qoq(_weights(rng, R, K), group=g)
    return {"q4": w.q4, "scale": w.group_scale, "zero": w.zero}


def _saturating_example(rng: np.random.Generator, *, R: int, K: int, g: int) -> Arrays:
    """Quantise random weights by QoQ without a protective range; give the zero points."""
    w = quant.quantize_qoq(_weights(rng, R, K), group=g, protective_range=127)
    return {"q4": w.q4, "scale": w.group_scale, "zero": w.zero}


def _plain_example(rng: np.random.Generator, *, R: int, K: int) -> Arrays:
    """Draw random u4 without scales."""
    return {"q4": rng.integers(0, 16, size=(R, K), dtype=np.uint8)}


def _signed_example(rng: np.random.Generator, *, R: int, K: int) -> Arrays:
    """Draw random s4 without scales."""
    return {"q4": rng.integers(-8, 8, size=(R, K), dtype=np.int8)}


def _int4_example(rng: np.random.Generator, *, R: int, K: int, g: int) -> Arrays:
    """Quantise random weights symmetrically: s4 with a scale per group, not packed yet."""
    w = quant.quantize_int4(_weights(rng, R, K), group=g)
    return {"q4": w.q4, "scale": w.scale}


def _pack(logical: Arrays) -> Arrays:
    return {**{k: v for k, v in logical.items() if k != "q4"}, "qweight": pack_u4(logical["q4"])}


def _pack_comet(logical: Arrays) -> Arrays:
    return {"qweight": pack_comet(logical["q4"])}


def _pack_int4(logical: Arrays) -> Arrays:
    return {"qweight": pack_s4(logical["q4"]), "scale": logical["scale"]}


def _grouped_spec(name: str, summary: str, out: str, second: str, **fields: Any) -> KernelSpec:
    """Build the spec of a kernel with a level-2 scale and a second constant per group; 16 weights per thread."""
    return KernelSpec(
        name=name,
        summary=summary,
        args=(
            Arg("qweight", "uint32", ("R", "K/8")),
            Arg("scale", "uint8", ("R", "K/g")),
            Arg(second, {"offset": "int8" if "qoq" in name else "uint8", "zero": "uint8"}[second], ("R", "K/g")),
            Arg("out", out, ("R", "K"), "out"),
            Arg("pairs", "uint32", role="scalar", value="R*K/16"),
            Arg("shift", "uint32", role="scalar", value="log2(g/16)"),
        ),
        launch=_launch(16),
        rules=_GROUP_RULES,
        operations="2*R*K",
        example_sizes=_GROUPED_SIZES,
        **{"pack": _pack, "value_rules": _SCALE_RULES, **fields},
    )


def _plain_spec(name: str, summary: str, out: str, **fields: Any) -> KernelSpec:
    """Build the spec of a kernel that takes only words: 16 weights per thread, 8 where the output is FP16."""
    per_thread = 8 if out == "float16" else 16
    return KernelSpec(
        name=name,
        summary=summary,
        args=(
            Arg("qweight", "uint32", ("R", "K/8")),
            Arg("out", out, ("R", "K"), "out"),
            Arg("words" if per_thread == 8 else "pairs", "uint32", role="scalar", value=f"R*K/{per_thread}"),
        ),
        launch=_launch(per_thread),
        rules=(f"K % {per_thread} == 0", f"R*K/{per_thread} < 2**32"),
        operations="0" if out != "float16" else "R*K",
        example_sizes=tuple({"R": r, "K": k} for r, k in ((1, 16), (3, 48), (8, 1024), (17, 784))),
        **{"pack": _pack, "example": _plain_example, **fields},
    )


SPECS = (
    _grouped_spec(
        "dequant_lqq",
        "LiquidQuant: unpack + IMAD + XOR (LiquidGEMM §4)",
        "int8",
        "offset",
        example=_lqq_example,
        reference=reference.dequant_lqq,
        value_rules=_LQQ_RULES,
        claims=_lqq_claims("out[i] == q4[i]*scale[i//g] + offset[i//g] - 128"),
    ),
    _grouped_spec(
        "dequant_lqq_unsigned",
        "LiquidQuant without the XOR: weight + 128 as u8, cancelled by the token sum",
        "uint8",
        "offset",
        example=_lqq_example,
        reference=reference.dequant_lqq_unsigned,
        value_rules=_LQQ_RULES,
        claims=(
            *_lqq_claims("out[i] == q4[i]*scale[i//g] + offset[i//g]"),
            KernelClaim("equals LQQ xor 0x80", "out[i] - 128 == other.out[i]", equals="dequant_lqq"),
        ),
    ),
    _grouped_spec(
        "dequant_qoq_vadd4",
        "QoQ: subtraction after multiplication with vadd4.u32 (QServe §5.2.3)",
        "int8",
        "offset",
        example=_qoq_example,
        reference=reference.dequant_qoq_vadd4,
        claims=_qoq_claims(),
    ),
    _grouped_spec(
        "dequant_qoq_vadd4_s32",
        "QoQ with vadd4.s32: the spelling to avoid (QServe §5.2.3)",
        "int8",
        "offset",
        example=_qoq_example,
        reference=reference.dequant_qoq_vadd4_s32,
        claims=(
            *_qoq_claims(),
            KernelClaim("equals vadd4.u32", "out == other.out", equals="dequant_qoq_vadd4"),
        ),
    ),
    _grouped_spec(
        "dequant_qoq_saturating",
        "QoQ with a saturating subtraction: what the protective range avoids (QServe §4.1)",
        "int8",
        "zero",
        example=_saturating_example,
        reference=reference.dequant_qoq_saturating,
        value_rules=_SATURATING_RULES,
        claims=(
            KernelClaim("saturates", _CLAMPED, _SATURATING_RULES),
            KernelClaim("scale 18", _CLAMPED, ("scale <= 18", "zero <= 15"), expect="refuted"),
        ),
    ),
    _grouped_spec(
        "dequant_qoq_presub",
        "QoQ with subtraction before multiplication: borrows spoil the neighbours (QServe §5.2.3)",
        "int8",
        "zero",
        example=_presub_example,
        reference=reference.dequant_qoq_presub,
        value_rules=(*_SCALE_RULES, "zero <= 15"),
        claims=(
            KernelClaim(
                "by the rules",
                "(out[i] - (q4[i] - zero[i//g])*scale[i//g]) % 256 == 0",
                (*_SCALE_RULES, "zero <= 15"),
                expect="refuted",
            ),
            KernelClaim(
                "nothing borrows",
                "(out[i] - (q4[i] - zero[i//g])*scale[i//g]) % 256 == 0",
                (*_SCALE_RULES, "zero[i//g] <= q4[i]"),
                alone=True,
            ),
        ),
        wrong=WrongByDesign(
            truth=reference.exact_qoq,
            misses=reference.presub_wrong,
            why="a byte whose q4 is below the zero point borrows from its upper neighbour",
        ),
    ),
    _plain_spec(
        "dequant_qoq_channel",
        "QoQ per channel: three logic instructions, zero point left to the epilogue (QServe §5.2.2)",
        "uint8",
        reference=reference.dequant_qoq_channel,
        claims=(KernelClaim("exact", "out[i] == q4[i]"),),
    ),
    _plain_spec(
        "dequant_int4_naive",
        "signed nibbles, shifted and sign-extended one by one (what COMET §4.3 counts against)",
        "int8",
        reference=reference.dequant_int4_naive,
        claims=(KernelClaim("exact", "out[i] == q4[i] - 16*(q4[i]//8)"),),
    ),
    _plain_spec(
        "dequant_comet",
        "location switch and zero extension: 16 times the signed nibble (COMET §4.3)",
        "int8",
        reference=reference.dequant_comet,
        example=_signed_example,
        pack=_pack_comet,
        claims=(KernelClaim("exact", "out[i] == 16*q4[i]"),),
    ),
    _plain_spec(
        "dequant_u4_f16",
        "FP16 through the magic number 0x6400, bias subtracted (QServe §5.3)",
        "float16",
        reference=reference.dequant_u4_f16,
        tolerance_reason="every result is exactly representable, so FP16 too is compared for equality",
        claims=(KernelClaim("exact", "out[i] == f16(q4[i])"),),
    ),
    _plain_spec(
        "dequant_u4_f16_subnormal",
        "AND only: the nibble as an FP16 subnormal, v·2^-24",
        "float16",
        reference=reference.dequant_u4_f16_subnormal,
        tolerance_reason="every result is exactly representable, so FP16 too is compared for equality",
        claims=(KernelClaim("exact", "out[i] == f16(q4[i]) * 2**-24"),),
    ),
    KernelSpec(
        name="dequant_s4_f16",
        summary="signed INT4, one FP16 scale per group (W4A16): what a scale costs that is no integer",
        args=(
            Arg("qweight", "uint32", ("R", "K/8")),
            Arg("scale", "float16", ("R", "K/g")),
            Arg("out", "float16", ("R", "K"), "out"),
            Arg("words", "uint32", role="scalar", value="R*K/8"),
            Arg("shift", "uint32", role="scalar", value="log2(g/8)"),
        ),
        launch=_launch(8),
        example=_int4_example,
        pack=_pack_int4,
        reference=reference.dequant_s4_f16,
        rules=(f"g in {GROUPS}", "K % g == 0", "R*K/8 < 2**32"),
        value_rules=("scale > 0", f"scale <= {quant.MAX_INT4_SCALE}"),
        operations="2*R*K",
        claims=(
            KernelClaim("rounded once", "out[i] == f16(q4[i]) * scale[i//g]", ("scale > 0",), alone=True),
            KernelClaim("finite", "-65504 <= out[i] <= 65504", ("scale > 0", f"scale <= {quant.MAX_INT4_SCALE}")),
            KernelClaim("scale 8192", "-65504 <= out[i] <= 65504", ("scale > 0", "scale <= 8192"), expect="refuted"),
        ),
        tolerance_reason="one rounding of an exact product, so FP16 too is compared for equality",
        example_sizes=_GROUPED_SIZES,
    ),
)
