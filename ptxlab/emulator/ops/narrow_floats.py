"""Floats that only tensor cores and cvt know: fp8, fp6, fp4, powers of two (ue8m0), and tf32, f32 cut short."""

from functools import cache

import numpy as np

from ptxlab.emulator.front.types import Array
from ptxlab.emulator.ops.rounding import widen

FP8_NAN = 0x7F
NARROW = {  # bits, those of the significand, bias, largest finite number
    "e4m3": (8, 3, 7, 0x7E), "e5m2": (8, 2, 15, 0x7B), "e2m3": (6, 3, 1, 0x1F), "e3m2": (6, 2, 3, 0x1F),
    "e2m1": (4, 1, 1, 0x07),
}  # fmt: skip
# Operands of matrix instructions, as NumPy sees their bits.
OPERANDS = {
    name: np.dtype(kind) for name, kind in {"f16": "f2", "bf16": "u2", "tf32": "u4", "e4m3": "u1", "e5m2": "u1"}.items()
}


@cache
def _values(type_name: str) -> Array:
    """List all values of a narrow type, by code."""
    width, bits, bias, largest = NARROW[type_name]
    code = np.arange(1 << width - 1)
    exponent, significand = code >> bits, code & (1 << bits) - 1
    normal = np.ldexp(1 + significand / (1 << bits), exponent - bias)
    values = np.where(exponent > 0, normal, np.ldexp(significand / (1 << bits), 1 - bias))
    values[largest + 1 :] = np.nan
    if type_name == "e5m2":
        values[largest + 1] = np.inf
    return np.concatenate((values, -values))


def floats(raw: Array, type_name: str) -> Array:
    """Convert bits of a type in `OPERANDS` or `NARROW` to float64; tensor cores ignore a tf32's low 13 bits."""
    if type_name in NARROW:
        numbers: Array = _values(type_name)[raw & (1 << NARROW[type_name][0]) - 1]
        return numbers
    if type_name == "tf32":
        return (raw & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return widen(raw, type_name)


def to_narrow(x: Array, type_name: str) -> Array:
    """Round float64 to bits u8, ties to even; beyond the largest finite number it is that (.satfinite).

    fp6 and fp4 have no NaN: one becomes the largest number.
    """
    width, _, _, largest = NARROW[type_name]
    finite_values = _values(type_name)[: largest + 1]
    middle = (finite_values[1:] + finite_values[:-1]) / 2
    size = np.abs(x)
    code = np.searchsorted(middle, size)  # how many of them are smaller
    is_tie = size == middle[np.minimum(code, largest - 1)]
    code = code + (is_tie & (code & 1 == 1))
    nan = FP8_NAN if width == 8 else largest
    return np.where(np.isnan(x), nan, code | np.where(np.signbit(x), 1 << width - 1, 0)).astype(np.uint8)


def to_ue8m0(x: Array, up: bool, finite: bool) -> Array:
    """Convert float64 to bits u8 of the power of two below |x|, or above it (`up`).

    0 stands for 2^-127 and less, 255 for NaN. `finite`: infinity becomes the largest power (.satfinite).
    """
    significand, exponent = np.frexp(np.abs(x))  # |x| = significand * 2^exponent, from 1/2 to below 1
    powers = np.where(x == 0, 0, exponent - 1 + (up & (significand > 0.5)) + 127).clip(0, 255)
    powers = np.where(np.isinf(x), 255, powers)
    powers = np.minimum(powers, 254) if finite else powers
    return np.where(np.isnan(x), 255, powers).astype(np.uint8)


def of_ue8m0(raw: Array) -> Array:
    """Convert bits u8 of a ue8m0 to float64."""
    return np.where(raw == 255, np.nan, np.ldexp(1.0, raw.astype(np.int64) - 127))


def to_tf32(x: Array, mode: str, finite: bool = False) -> Array:
    """Round f32 to bits u32 of a tf32: the nearest, ties to even (.rn) or away from zero (.rna), or towards zero (.rz).

    `finite`: beyond the largest number it is that (.satfinite).
    """
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounding_addend = np.uint32({"rn": 0xFFF, "rna": 0x1000, "rz": 0}[mode]) + (
        bits >> np.uint32(13) & np.uint32(mode == "rn")
    )
    tf32_bits: Array = bits + rounding_addend & np.uint32(0xFFFFE000)
    if finite:
        tf32_bits = np.where(tf32_bits & 0x7FFFFFFF == 0x7F800000, tf32_bits - np.uint32(0x2000), tf32_bits)
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), tf32_bits)
