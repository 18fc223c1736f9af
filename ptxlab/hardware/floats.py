"""What NumPy does not have: bfloat16, as its 16 bits, and a fused multiply-add."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ptxlab.hardware.words import F32, require_dtype

U16: TypeAlias = npt.NDArray[np.uint16]


def bfloat16_bits(values: F32) -> U16:
    """Round f32 to the nearest bfloat16, ties to even, and return its bits: the upper half of the f32's.

    A NaN stays one (0x7fff).
    """
    require_dtype("values", values, np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded_bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded_bits).astype(np.uint16)


def from_bfloat16_bits(bits: U16) -> F32:
    """Convert the bits of a bfloat16 to the f32 that they stand for, exactly."""
    require_dtype("bits", bits, np.uint16)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fma(a: F32, b: F32, c: F32) -> F32:
    """Compute a·b + c of finite f32, rounded once, as fma.rn.f32 does where the sum is finite.

    The product is exact in float64. Of the sum the last bit is set if anything is missing (round to odd), from where
    one more rounding gives what rounding the exact value would have given (Boldo and Melquiond).
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    back = total - product
    rounding_error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    is_outward = (rounding_error < 0) == (total < 0)
    odd_bits = np.where((rounding_error != 0) & (bits & 1 == 0), bits + np.where(is_outward, 1, -1), bits)
    rounded_sum: F32 = odd_bits.view(np.float64).astype(np.float32)
    return rounded_sum
