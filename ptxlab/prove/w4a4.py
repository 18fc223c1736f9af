"""Claims on how activations become INT4: the arithmetic of `reorder_quantize`, as formulas over all its numbers.

They are on what `cuda_src/include/reorder_row.cuh` and `pack.cuh` write, not on the kernel's PTX, whose threads
exchange channels in shared memory. What becomes of INT4 in a GEMM's loop is proved from its PTX (`main_loops`, claims
`converts`).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from ptxlab.prove.claims import Claim, register
from ptxlab.prove.solve import Query

SHIFT = 12582912.0  # 1.5 * 2^23: what is added to it loses the bits behind the point, and is an integer in the low bits
FOUR = (-8, 7)


@register
def conversions() -> Iterator[Claim]:
    """From quotients to the low bits of a word, and to pairs."""
    claim = partial(Claim, "INT4 activations")
    for bits, low, high in ((4, *FOUR), (8, -128, 127)):
        yield claim(
            f"rounded to INT{bits}",
            f"every FP32 x within {low}..{high}: the low {bits} bits of x + 1.5 * 2^23 are x, rounded half to even",
            partial(_rounded, bits, low, high),
        )
    yield claim(
        "rounded to INT4, up to 7.5",
        "every FP32 x within -8..7.5: the low 4 bits of x + 1.5 * 2^23 are x, rounded half to even (7.5 gives 8)",
        partial(_rounded, 4, -8, 7.5),
        "refuted",
    )
    yield claim(
        "rounded away from zero",
        "every FP32 x within -8..7: x cut, and 1 by its sign where |x - that| >= 1/2, is x rounded half away from zero",
        _rounded_away,
    )
    yield claim(
        "paired",
        "every four bytes within s4: 16 bits, by masks, a shift and a prmt, have their nibbles in order",
        _paired,
    )


def _rounded(bits: int, low: float, high: float) -> Query:
    import z3

    x = z3.FP("x", z3.Float32())
    shifted = z3.fpToIEEEBV(z3.fpAdd(z3.RNE(), x, z3.FPVal(SHIFT, z3.Float32())))
    found = z3.SignExt(32 - bits, z3.Extract(bits - 1, 0, shifted))
    return Query(found == z3.fpToSBV(z3.RNE(), x, z3.BitVecSort(32)), _within(x, low, high), {"x": x})


def _rounded_away() -> Query:
    import z3

    x, one = z3.FP("x", z3.Float32()), z3.FPVal(1.0, z3.Float32())
    whole = z3.fpRoundToIntegral(z3.RTZ(), x)
    rest = z3.fpAbs(z3.fpSub(z3.RNE(), x, whole))
    away = z3.fpAdd(z3.RNE(), whole, z3.If(z3.fpIsNegative(x), z3.fpNeg(one), one))
    found = z3.If(z3.fpGEQ(rest, z3.FPVal(0.5, z3.Float32())), away, whole)
    return Query(z3.fpEQ(found, z3.fpRoundToIntegral(z3.RNA(), x)), _within(x, *FOUR), {"x": x})


def _paired() -> Query:
    import z3

    from ptxlab.prove.semantics import computation

    q = [z3.BitVec(f"q[{i}]", 8) for i in range(4)]
    word = z3.Concat(*reversed(q))
    pairs = (word & 0x000F000F) | (z3.LShR(word, 4) & 0x00F000F0)
    both = computation("prmt.b32")(pairs, z3.BitVecVal(0, 32), z3.BitVecVal(0x4420, 32))
    holds = z3.And([z3.SignExt(4, z3.Extract(4 * i + 3, 4 * i, both)) == x for i, x in enumerate(q)])
    within = [z3.And(x >= FOUR[0], x <= FOUR[1]) for x in q]
    return Query(holds, within, {f"q[{i}]": x for i, x in enumerate(q)})


def _within(x: Any, low: float, high: float) -> list[Any]:
    import z3

    return [z3.fpGEQ(x, z3.FPVal(low, z3.Float32())), z3.fpLEQ(x, z3.FPVal(high, z3.Float32()))]
