"""Keys and values of attention as 4 or 8 bits: per token and head (QServe §5.1), or per channel.

Per channel is the format of COMET, 4 bits with a zero point (COMET §6.1), and of LiquidServe, 8 bits (LiquidGEMM §6).

Per token and head the constants come with every token, the scale rounded to FP16 before anything is divided by it.
Per channel they are calibrated once, in float32, and whatever lies beyond them is clipped.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F16, F32
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit import reference
from ptxlab.lowbit.quant.inputs import MAX_SCALE, MIN_SCALE, as_float32, as_floats, extremes
from ptxlab.validate import is_one_of


class KVScheme(NamedTuple):
    """Integer format of quantised keys or values.

    Attributes:
        bits: 4 or 8.
        low: the smallest integer.
        high: the largest.
        by_channel: constants per channel, calibrated; else per token and head.
    """

    bits: int
    low: int
    high: int
    by_channel: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the integers, one per byte: s8 if they are symmetric, otherwise u8."""
        return np.dtype(np.int8 if self.low < 0 else np.uint8)

    @property
    def constant(self) -> np.dtype[Any]:
        """Dtype of scale and zero."""
        return np.dtype(np.float32 if self.by_channel else np.float16)


KV_SCHEMES = {
    "kv4": KVScheme(4, 0, 15, by_channel=False),
    "kv8": KVScheme(8, 0, 255, by_channel=False),
    "kv4_channel": KVScheme(4, 0, 15, by_channel=True),
    "kv8_channel": KVScheme(8, -127, 127, by_channel=True),
}
BY_CHANNEL = tuple(name for name, scheme in KV_SCHEMES.items() if scheme.by_channel)
BY_TOKEN = tuple(name for name in KV_SCHEMES if name not in BY_CHANNEL)


@dataclass(frozen=True, eq=False)
class QuantizedKV:
    """Keys or values as integers: x = (values - zero)·scale.

    `values` is [..., tokens, heads, D], u8 or, for kv8_channel, s8. `scale` and `zero`, an integer, are f16
    [..., tokens, heads] for kv4 and kv8, and f32 [heads, D] for the schemes by channel; kv8_channel's zeros are 0.
    Raises ArgumentError if dtypes or shapes are others.
    """

    scheme: str
    values: npt.NDArray[Any]
    scale: npt.NDArray[Any]
    zero: npt.NDArray[Any]

    def __post_init__(self) -> None:
        kv_format = kv_scheme(self.scheme)
        shape = tuple(getattr(self.values, "shape", ()))
        if len(shape) < 3:
            raise ArgumentError("values", "must be [..., tokens, heads, D]", f"shape {shape}")
        _check_array("values", self.values, kv_format.dtype, shape)
        expected_shape = shape[-2:] if kv_format.by_channel else shape[:-1]
        for name in ("scale", "zero"):
            _check_array(name, getattr(self, name), kv_format.constant, expected_shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., tokens, heads, D]."""
        return self.values.shape

    def dequantize(self) -> F32:
        """Compute (values - zero)·scale as f32 [..., tokens, heads, D].

        The subtraction is exact, the product is rounded once.
        """
        return reference.dequantize_kv(self.values, self.scale, self.zero)


@break_graph
def quantize_kv(x: npt.NDArray[Any], scheme: str = "kv4", channel: tuple[F32, F32] | None = None) -> QuantizedKV:
    """Quantise keys or values in float32, with IEEE division and ties to even.

    Per token and head (kv4, kv8), the range of its D elements extended to include 0, levels 15 or 255:

        scale  = f16((max - min) / levels), or 1 if that is 0
        zero   = clip(rint(-min / scale), 0, levels), never -0
        values = clip(rint(x / scale) + zero, 0, levels)

    By channel, with constants that are there already: values the same, clipped to -127..127 for kv8_channel.

    Args:
        x: keys or values, float [..., tokens, heads, D], NumPy or CuPy.
        scheme: one of `KV_SCHEMES`.
        channel: (scale, zero) f32 [heads, D] of a scheme by channel, see `calibrate_kv`; None calibrates on x itself.

    Raises:
        ArgumentError: an unknown scheme, constants that do not belong to it, not a float array of three axes or more, a
            NaN or an infinity (with the place of the first), a scale that is infinite in float16 (with its place).
    """
    kv_format = kv_scheme(scheme)
    x = _tokens(x)
    if kv_format.by_channel:
        extremes("x", x)  # refuses what is not finite
        channel = calibrate_kv(x, scheme) if channel is None else channel
        check_channel("channel", scheme, channel, x.shape[-2:])
        scale, zero = channel
        return QuantizedKV(scheme, _round_values(x, scale, zero, kv_format), scale, zero)
    if channel is not None:
        raise ArgumentError("channel", f"{scheme} has constants of its own: must be None", "constants")
    low, high = extremes("x", x)
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    half_scale = _token_scales(low, high, kv_format)
    scale = half_scale.astype(np.float32)
    zero = np.rint((0 - low) / scale).clip(kv_format.low, kv_format.high)  # -low would give -0 where low is 0
    values = _round_values(x, scale[..., None], zero[..., None], kv_format)
    return QuantizedKV(scheme, values, half_scale, zero.astype(np.float16))


@break_graph
def calibrate_kv(x: npt.NDArray[Any], scheme: str) -> tuple[F32, F32]:
    """Compute the constants (scale, zero) f32 [heads, D] of a scheme by channel from x float [..., tokens, heads, D].

    kv4_channel: of the range of each channel, extended to include 0, scale = (max - min) / 15 and
    zero = rint(-min / scale). kv8_channel: scale = max|x| / 127, zero = 0. A channel of zeros has scale 1.

    Raises ArgumentError as `quantize_kv` does, and for x without a token, or a scale that is not a normal float32 or so
    large that 128 times it is infinite.
    """
    kv_format = kv_scheme(scheme)
    if not kv_format.by_channel:
        raise ArgumentError("scheme", "must be one by channel", scheme)
    x = _tokens(x)
    if x.size == 0:
        raise ArgumentError("x", "must have a token to calibrate on", f"shape {x.shape}")
    heads, D = x.shape[-2:]
    extremes("x", x)  # refuses what is not finite
    floats = as_float32(x).reshape(-1, heads, D)
    low, high = floats.min(axis=0), floats.max(axis=0)
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    with np.errstate(over="ignore"):  # an infinite extent is refused as a scale
        extent = np.maximum(-low, high) if kv_format.low else high - low
    scale = extent / np.float32(kv_format.high)
    scale = np.where(extent == 0, np.float32(1), scale)
    _check_scales("x", scale)
    zero = np.rint((0 - low) / scale).clip(0, 0 if kv_format.low else kv_format.high)
    return scale, zero


def kv_scheme(scheme: str) -> KVScheme:
    """Return the KV scheme of that name; raise ArgumentError, with the known names, if there is none."""
    if not is_one_of(scheme, KV_SCHEMES):
        raise ArgumentError("scheme", f"must be one of {', '.join(KV_SCHEMES)}", scheme)
    return KV_SCHEMES[scheme]


def check_channel(argument: str, scheme: str, channel: Any, shape: tuple[int, ...]) -> None:
    """Raise ArgumentError unless `channel` is (scale, zero), f32 [heads, D] each, of this scheme by channel.

    Scales are normal and not too large (`calibrate_kv`), zeros integers in 0..15, or 0 for the symmetric scheme.
    """
    kv_format = kv_scheme(scheme)
    if not isinstance(channel, tuple) or len(channel) != 2:
        raise ArgumentError(argument, f"must be (scale, zero) for {scheme}", type(channel).__name__)
    scale, zero = channel
    _check_array(f"{argument} scale", scale, kv_format.constant, shape)
    _check_array(f"{argument} zero", zero, kv_format.constant, shape)
    _check_scales(f"{argument} scale", scale)
    highest_zero = 0 if kv_format.low else kv_format.high
    is_wrong = ~((zero >= 0) & (zero <= highest_zero) & (zero == np.rint(zero)))
    if is_wrong.any():
        place = _first(is_wrong)
        rule = f"must be integers in 0..{highest_zero}"
        raise ArgumentError(f"{argument} zero", rule, f"channel {place} has {float(zero[tuple(place)]):g}")


def _tokens(x: Any) -> npt.NDArray[Any]:
    """Check and convert floats [..., tokens, heads, D] to a NumPy or CuPy array."""
    floats = as_floats("x", x)
    if floats.ndim < 3 or 0 in floats.shape[-2:]:
        raise ArgumentError("x", "must be [..., tokens, heads, D] with heads and dims", f"shape {tuple(floats.shape)}")
    return floats


def _token_scales(low: F32, high: F32, kv_format: KVScheme) -> F16:
    """Compute f16((high - low) / levels), and 1 where that is 0; raise ArgumentError where it is infinite."""
    with np.errstate(over="ignore"):
        exact_scale = (high - low) / np.float32(kv_format.high)
        scale: F16 = exact_scale.astype(np.float16)
    if not np.isfinite(scale).all():
        place = _first(~np.isfinite(scale))
        rule = "the scale of a token and head must be finite in float16"
        raise ArgumentError("x", rule, f"x{place} has {float(exact_scale[tuple(place)]):.6g}")
    return np.where(scale == 0, np.float16(1), scale)


def _check_array(argument: str, array: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if getattr(array, "dtype", None) != dtype or array.shape != shape:
        got = f"{array.dtype} {list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
        raise ArgumentError(argument, f"must be {dtype} {list(shape)}", got)


def _check_scales(argument: str, scale: F32) -> None:
    is_wrong = ~((scale >= MIN_SCALE) & (scale <= MAX_SCALE))
    if is_wrong.any():
        place = _first(is_wrong)
        rule = f"scales by channel must lie in {MIN_SCALE:.3g}..{MAX_SCALE:.3g}"
        raise ArgumentError(argument, rule, f"channel {place} has {float(scale[tuple(place)]):.3g}")


def _round_values(x: npt.NDArray[Any], scale: F32, zero: F32, kv_format: KVScheme) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):  # clipped
        quotient = np.rint(as_float32(x) / scale)
    values: npt.NDArray[Any] = (quotient + zero).clip(kv_format.low, kv_format.high).astype(kv_format.dtype)
    return values


def _first(mask: npt.NDArray[np.bool_]) -> list[int]:
    """Return the indices of the first true element."""
    return [int(i) for i in np.argwhere(mask)[0]]
