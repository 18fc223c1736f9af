"""What Hopper's tensor cores make of FP16 operands and an FP32 sum, bit for bit.

The terms of a sum, 16 products and the sum so far, are lined up below the largest exponent among them, and what lies
more than 25 bits below it is cut off of each, towards zero. Then they are added up exactly, and the result is cut off
to FP32. (Fasi et al. 2021 have it so for the generations before; `tests/golden/hopper_mma.npz` is what an H200 does.)
"""

from typing import Any

import numpy as np

from ptxlab.hardware.words import F32

KEPT = 25  # bits below the largest exponent
_SMALLEST = -14  # the exponent of FP16's subnormals
_NONE = np.int32(-1000)  # of zeros: below any other
_PLUS, _SIGN = np.uint32(0), np.uint32(1 << 31)
_NAN = np.uint32(0x7FFFFFFF).view(np.float32)  # the one that hardware makes


def hopper_mma(a: Any, b: Any, c: F32, kept_bits: int = KEPT) -> Any:
    """Compute a·b + c with the bits of one `mma.m16n8k16`; NumPy or CuPy.

    Shapes are f16 [..., M, 16], f16 [..., 16, N] and f32 [..., M, N]. A product has the sum of its operands' exponents,
    whatever its significand is; subnormals have -14. A product of zero has no exponent, so the other summands keep
    their bits. A sum of zero is +0. Other tensor cores have `kept_bits` bits.
    """
    (a_bits, a_exponent), (b_bits, b_exponent) = _parts(a), _parts(b)
    c_bits, c_exponent = _parts_of_single(c)
    exponent = c_exponent
    for k in range(a.shape[-1]):
        exponent = np.maximum(exponent, a_exponent[..., :, k, None] + b_exponent[..., None, k, :])

    total = _cut(c_bits << (kept_bits - 23), exponent - c_exponent)
    for k in range(a.shape[-1]):
        product = a_bits[..., :, k, None] * b_bits[..., None, k, :]  # 20 bits behind the point
        bits_below = exponent - a_exponent[..., :, k, None] - b_exponent[..., None, k, :]
        total = total + _cut(product << (kept_bits - 20), bits_below)
    # a float64 has room for the sum; an FP32 has all but 29 bits of its significand, or multiples of 2^-149
    wide_sum = np.ldexp(total.astype(np.float64), exponent - kept_bits)
    with np.errstate(over="ignore", invalid="ignore"):  # of what is special
        single_values = (wide_sum.view(np.int64) & ~((1 << 29) - 1)).view(np.float64).astype(np.float32)
        subnormal_bits = np.trunc(np.abs(wide_sum) * 2.0**149).astype(np.uint32) | np.where(wide_sum < 0, _SIGN, _PLUS)
    single_values = np.where(np.abs(wide_sum) < 2.0**-126, subnormal_bits.view(np.float32), single_values)
    return _with_special(single_values, a, b, c)


def _parts(x: Any) -> tuple[Any, Any]:
    """Split f16 into (significand with its sign s64, exponent s32): significand · 2^(exponent - 10)."""
    bits = x.view(np.uint16).astype(np.int32)
    field = bits >> 10 & 31
    significand = (bits & 0x3FF) + (field > 0) * np.int32(0x400)
    exponent = np.where(bits & 0x7FFF, np.maximum(field - 15, _SMALLEST), _NONE)
    return np.where(bits >> 15, -significand, significand).astype(np.int64), exponent


def _parts_of_single(x: F32) -> tuple[Any, Any]:
    """Split f32 into (significand with its sign s64, exponent s32): significand · 2^(exponent - 23)."""
    bits = x.view(np.int32)
    field = bits >> 23 & 255
    significand = (bits & 0x7FFFFF) + (field > 0) * np.int32(0x800000)
    return np.where(bits < 0, -significand, significand).astype(np.int64), np.maximum(field - 127, -126)


def _cut(x: Any, places: Any) -> Any:
    """Drop the last `places` bits of integers, towards zero."""
    shift = np.minimum(places, 63)
    return np.where(x < 0, -(-x >> shift), x >> shift)


def _with_special(finite: Any, a: Any, b: Any, c: F32) -> Any:
    """Replace `finite` by infinity or NaN where an operand is one, as ordinary arithmetic does."""
    has_special = [~np.isfinite(x) for x in (a, b, c)]
    if not any(bool(x.any()) for x in has_special):
        return finite
    with np.errstate(invalid="ignore"):
        plain_products = (a[..., :, :, None].astype(np.float32) * b[..., None, :, :].astype(np.float32)).sum(
            axis=-2
        ) + c
    return np.where(np.isfinite(plain_products), finite, np.where(np.isnan(plain_products), _NAN, plain_products))
