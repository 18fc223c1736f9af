"""Words as z3 bitvectors: constants, widths, fields, and the IEEE 754 numbers that they stand for."""

from typing import Any

import z3

from ptxlab.emulator.front.types import bits_of
from ptxlab.emulator.ops.rounding import CANONICAL_NAN

Bits = Any  # a z3 bitvector, or a Bool
SORTS: dict[str, Any] = {"f16": (5, 11), "bf16": (8, 8), "f32": (8, 24)}


def constant(number: int, bits: int) -> Bits:
    """Make a constant of `bits` bits."""
    return z3.BitVecVal(number, bits)


def extend(x: Bits, bits: int, signed: bool) -> Bits:
    """Truncate or extend a bitvector to a width."""
    spare_bits = bits - x.size()
    if spare_bits < 0:
        return z3.Extract(bits - 1, 0, x)
    return x if not spare_bits else z3.SignExt(spare_bits, x) if signed else z3.ZeroExt(spare_bits, x)


def split_fields(x: Bits, bits: int) -> list[Bits]:
    """Split a bitvector into fields of `bits` bits, lowest first."""
    return [z3.Extract(start + bits - 1, start, x) for start in range(0, x.size(), bits)]


def concatenate_fields(fields: list[Bits]) -> Bits:
    """Join fields into one bitvector, lowest first."""
    return z3.Concat(*reversed(fields)) if len(fields) > 1 else fields[0]


def clamp(x: Bits, low: int, high: int) -> Bits:
    """Clamp a signed bitvector to limits that it can hold."""
    bottom, top = constant(low, x.size()), constant(high, x.size())
    return z3.If(x < bottom, bottom, z3.If(x > top, top, x))


def as_float(x: Bits, type_name: str) -> Any:
    """View bits as the floating-point number that they encode."""
    return z3.fpBVToFP(x, z3.FPSort(*SORTS[type_name]))


def float_bits(x: Any, type_name: str) -> Bits:
    """Return the bits of a number; a NaN has the bits that the hardware makes."""
    nan = CANONICAL_NAN[type_name]
    return z3.If(z3.fpIsNaN(x), constant(nan, bits_of(type_name)), z3.fpToIEEEBV(x))
