"""Floats that only tensor cores and cvt know: fp8 (e4m3, e5m2), and tf32, which is f32 cut short."""

from functools import cache

import numpy as np

from ptxlab.emulator.front.types import Array
from ptxlab.emulator.ops.rounding import widen

FP8_NAN = 0x7F
_FP8 = {"e4m3": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B)}  # bits of the significand, bias, largest finite number
# Operands of matrix instructions, as NumPy sees their bits.
OPERANDS = {
    name: np.dtype(kind) for name, kind in {"f16": "f2", "bf16": "u2", "tf32": "u4", "e4m3": "u1", "e5m2": "u1"}.items()
}


@cache
def _values(type_name: str) -> Array:
    """All 256 values of an fp8 type."""
    bits, bias, largest = _FP8[type_name]
    code = np.arange(128)
    exponent, significand = code >> bits, code & (1 << bits) - 1
    normal = np.ldexp(1 + significand / (1 << bits), exponent - bias)
    values = np.where(exponent > 0, normal, np.ldexp(significand / (1 << bits), 1 - bias))
    values[largest + 1 :] = np.nan
    if type_name == "e5m2":
        values[largest + 1] = np.inf
    return np.concatenate((values, -values))


def floats(raw: Array, type_name: str) -> Array:
    """Bits of one of `OPERANDS` as float64; tensor cores ignore the low 13 bits of a tf32."""
    if type_name in _FP8:
        return _values(type_name)[raw]
    if type_name == "tf32":
        return (raw & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return widen(raw, type_name)


def to_fp8(x: Array, type_name: str) -> Array:
    """float64 -> bits u8, to nearest even; beyond the largest finite number it is that (.satfinite)."""
    largest = _FP8[type_name][2]
    finite = _values(type_name)[: largest + 1]
    middle = (finite[1:] + finite[:-1]) / 2
    size = np.abs(x)
    code = np.searchsorted(middle, size)  # how many of them are smaller
    tie = size == middle[np.minimum(code, largest - 1)]
    code = code + (tie & (code & 1 == 1))
    return np.where(np.isnan(x), FP8_NAN, code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def to_tf32(x: Array, mode: str, finite: bool = False) -> Array:
    """f32 -> bits u32 of a tf32: the nearest, ties to even (.rn) or away from zero (.rna), or towards zero (.rz).

    `finite`: beyond the largest number it is that (.satfinite).
    """
    bits = np.ascontiguousarray(x).view(np.uint32)
    up = np.uint32({"rn": 0xFFF, "rna": 0x1000, "rz": 0}[mode]) + (bits >> np.uint32(13) & np.uint32(mode == "rn"))
    found: Array = bits + up & np.uint32(0xFFFFE000)
    if finite:
        found = np.where(found & 0x7FFFFFFF == 0x7F800000, found - np.uint32(0x2000), found)
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), found)
