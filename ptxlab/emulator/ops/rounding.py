"""Exact floating-point arithmetic in two float64s, and rounding from there to any type in any direction.

A result is carried as `hi + lo`: hi the float64 nearest to the exact value, lo the exact rest. To a narrower type it
goes by way of *round to odd* (hi with its last bit set if anything is missing), from where one more rounding gives
what rounding the exact value would have given: no double rounding. (Boldo and Melquiond, "Emulation of FMA and
correctly rounded sums".)
"""

from fractions import Fraction

import numpy as np

from ptxlab.emulator.front.types import DTYPES, Array

TINY = {
    "f16": 2.0**-14, "f16x2": 2.0**-14, "bf16": 2.0**-126, "bf16x2": 2.0**-126, "f32": 2.0**-126, "f32x2": 2.0**-126,
    "f64": 2.0**-1022,
}  # fmt: skip
CANONICAL_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF}
_BITS = {"f16": "u2", "bf16": "u2", "f32": "u4", "f64": "u8"}


def element(type_name: str) -> str:
    """Return the type of one number of a pair: "f16x2" -> "f16"."""
    return type_name.removesuffix("x2")


def unpack(raw: Array, type_name: str) -> Array:
    """Register values of a packed pair -> their numbers [n, 2], low half first."""
    return np.ascontiguousarray(raw).view(DTYPES[element(type_name)]).reshape(-1, 2)


def pack(numbers: Array, type_name: str) -> Array:
    """Pack numbers [n, 2] into register values of a packed pair."""
    packed: Array = np.ascontiguousarray(numbers).view(DTYPES[type_name])[:, 0]
    return packed


def widen(raw: Array, type_name: str) -> Array:
    """Register values -> float64, exactly: shape [n], or [n, 2] for a packed pair (low half first)."""
    if type_name.endswith("x2"):
        return widen(unpack(raw, type_name), element(type_name))
    if type_name == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return raw.astype(np.float64)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Compute a + b exactly as hi + lo; where hi overflows, lo has the sign of the missing part."""
    hi = a + b
    a_is_larger = np.abs(a) >= np.abs(b)
    # The larger one is taken off first: that difference is exact, and cannot overflow where the sum does not.
    lo = np.where(a_is_larger, b, a) - (hi - np.where(a_is_larger, a, b))
    overflow = np.isinf(hi) & np.isfinite(a) & np.isfinite(b)
    return hi, np.where(np.isfinite(hi), lo, np.where(overflow, -np.copysign(1.0, hi), 0.0))


def directed_sum(a: Array, b: Array, mode: str) -> tuple[Array, Array]:
    """Compute `two_sum` with the rounding mode's sign of zero: rounding down, x + -x is -0."""
    hi, lo = two_sum(a, b)
    if mode == "rm":
        hi = np.where((hi == 0) & (lo == 0) & (np.signbit(a) | np.signbit(b)), -0.0, hi)
    return hi, lo


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Compute a * b as hi + lo; exact as long as nothing over- or underflows."""

    def halves(x: Array) -> tuple[Array, Array]:
        big = x * 134217729.0  # 2^27 + 1
        high = big - (big - x)
        return high, x - high

    hi = a * b
    (ah, al), (bh, bl) = halves(a), halves(b)
    lo = ((ah * bh - hi) + ah * bl + al * bh) + al * bl
    return hi, np.where(np.isfinite(lo), lo, 0.0)


def remainder_sign(x: Array, y: Array, z: Array, type_name: str) -> Array:
    """Return the sign of x - y * z, exactly, where y is a rounded quotient or root; 0 where anything is not finite."""
    if type_name != "f64":  # far from the ends of float64's range
        ph, pl = two_product(y, z)
        signs: Array = np.nan_to_num(np.sign((x - ph) - pl))
        return signs
    x, y, z = np.broadcast_arrays(x, y, z)
    signs = np.zeros(x.shape)
    for i in np.flatnonzero(np.isfinite(x) & np.isfinite(z) & ~np.isnan(y)):
        if np.isinf(y[i]):  # it overflowed, or z is zero
            signs[i] = -np.sign(y[i] * z[i])
        else:
            remainder = Fraction(x[i]) - Fraction(y[i]) * Fraction(z[i])
            signs[i] = (remainder > 0) - (remainder < 0)
    return np.nan_to_num(signs)


def to_odd(hi: Array, lo: Array) -> Array:
    """Truncate hi + lo to float64, with the last bit set unless that is exact."""
    hi, lo = np.broadcast_arrays(hi, lo)
    bits = np.ascontiguousarray(hi).view(np.int64)
    inexact_even = (lo != 0) & np.isfinite(hi) & (bits & 1 == 0)
    is_outward = np.signbit(lo) == np.signbit(hi)
    return np.where(inexact_even, bits + np.where(is_outward, 1, -1), bits).view(np.float64)


def round_to(hi: Array, lo: Array | float, type_name: str, mode: str = "rn") -> Array:
    """Round the exact value hi + lo to register values of a type; `mode` is rn, rz, rm or rp."""
    if type_name.endswith("x2"):
        return pack(round_to(hi, lo, element(type_name), mode), type_name)
    if type_name == "f64":
        return _step(hi, hi, np.asarray(np.sign(lo)), "f64", mode)
    exact = to_odd(hi, np.asarray(lo))
    nearest = _nearest(exact, type_name)
    if mode != "rn":
        nearest = _step(nearest, widen(nearest, type_name), exact, type_name, mode)
    if type_name not in CANONICAL_NAN:
        return nearest
    raw = nearest.view(_BITS[type_name])
    canonical = np.where(np.isnan(exact), np.array(CANONICAL_NAN[type_name], raw.dtype), raw)
    return canonical if type_name == "bf16" else canonical.view(nearest.dtype)


def _nearest(x: Array, type_name: str) -> Array:
    """Round float64 to f32, f16 or bf16 (as bits u16), ties to even; `x` must be exact or rounded to odd."""
    if type_name == "f32":
        return x.astype(np.float32)
    if type_name == "f16":
        return x.astype(np.float16)
    # bf16 is the upper half of a float32: make that float32 odd too, then round its bits to even
    single = x.astype(np.float32)
    bits = single.view(np.uint32)
    rounding_error = single.astype(np.float64) - x
    inexact_even = np.isfinite(single) & (rounding_error != 0) & (bits & 1 == 0)
    is_too_large = np.signbit(rounding_error) == np.signbit(single)
    bits = np.where(inexact_even, bits + np.where(is_too_large, -1, 1), bits).astype(np.uint32)
    has_overflowed = np.isinf(single)
    rounded_bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (np.where(has_overflowed, bits, rounded_bits) >> np.uint32(16)).astype(np.uint16)


def _step(nearest: Array, nearest_value: Array, exact: Array, type_name: str, mode: str) -> Array:
    """Move the nearest value a step where the mode needs it; for f64 `exact` is the sign of what is missing."""
    if mode == "rn":
        return nearest
    is_above = exact < 0 if type_name == "f64" else nearest_value > exact  # the nearest value lies above the exact one
    is_below = exact > 0 if type_name == "f64" else nearest_value < exact
    is_negative = np.signbit(nearest_value)
    toward_zero = {
        "rz": np.where(is_negative, is_below, is_above),
        "rm": is_above & ~is_negative,
        "rp": is_below & is_negative,
    }[mode]
    is_away = {"rz": np.zeros_like(is_negative), "rm": is_above & is_negative, "rp": is_below & ~is_negative}[mode]
    bits = np.ascontiguousarray(nearest).view(_BITS[type_name])
    moved_bits = bits - toward_zero.astype(bits.dtype) + is_away.astype(bits.dtype)
    stepped_values: Array = moved_bits if type_name == "bf16" else moved_bits.view(nearest.dtype)
    return stepped_values


def flush(x: Array, type_name: str) -> Array:
    """Replace subnormal numbers by zeros of their sign."""
    return np.where(np.abs(x) < TINY[type_name], np.copysign(x.dtype.type(0), x), x)


def round_and_flush(hi: Array, lo: Array | float, type_name: str, mode: str = "rn") -> Array:
    """Round as `round_to`, then as .ftz: what is smaller than all normal numbers becomes zero of its sign.

    The hardware looks at what it has rounded to the type's bits with any exponent: 2^-126 (1 - 2^-24) is smaller,
    though the nearest f32 is 2^-126.
    """
    tiny = TINY[type_name]
    if ((np.abs(hi) <= tiny) & (hi != 0)).any():
        scale = 0.25 / tiny  # far from subnormal numbers
        is_tiny = np.abs(widen(round_to(hi * scale, np.asarray(lo) * scale, type_name, mode), type_name)) < 0.25
        hi, lo = np.where(is_tiny, np.copysign(0.0, hi), hi), np.where(is_tiny, 0.0, lo)
    return round_to(hi, lo, type_name, mode)


def fused_multiply_add(a: Array, b: Array, c: Array, mode: str) -> Array:
    """Compute a * b + c in float64, rounded once."""
    a, b, c = np.broadcast_arrays(a, b, c)
    ph, pl = two_product(a, b)
    sh, sl = two_sum(c, pl)
    vh, vl = two_sum(ph, sh)
    hi, lo = two_sum(vh, to_odd(*two_sum(sl, vl)))
    special_sum = np.where(np.isinf(c) & np.isfinite(a) & np.isfinite(b), c, a * b + c)  # or NaN
    rounded_sum = round_to(np.where(np.isfinite(vh), hi, special_sum), np.where(np.isfinite(vh), lo, 0.0), "f64", mode)
    rounded_sum = np.where(rounded_sum == 0, directed_sum(a * b, c, mode)[0], rounded_sum)  # the sign of an exact zero
    # near the ends of the exponent range two_product is not exact: take those lanes one by one
    size = np.abs(np.stack((a, b, c, ph)))
    tiny = (np.abs(ph) < 2.0**-900) & (a != 0) & (b != 0)
    is_unsafe = ((size > 2.0**900).any(axis=0) | tiny) & np.isfinite(size[:3]).all(axis=0)
    for i in np.flatnonzero(is_unsafe):
        rounded_sum[i] = _fused_multiply_add_exactly(float(a[i]), float(b[i]), float(c[i]), mode)
    return rounded_sum


def _fused_multiply_add_exactly(a: float, b: float, c: float, mode: str) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return float(directed_sum(np.array([a * b]), np.array([c]), mode)[0][0])
    try:
        nearest = float(exact)  # correctly rounded
    except OverflowError:
        nearest = np.inf if exact > 0 else -np.inf
    remainder = exact - Fraction(nearest) if np.isfinite(nearest) else -exact
    error = (remainder > 0) - (remainder < 0)
    return float(round_to(np.array([nearest]), np.array([float(error)]), "f64", mode)[0])
