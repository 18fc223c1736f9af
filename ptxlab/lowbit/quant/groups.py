"""Symmetric integers in groups with an FP16 scale each: what `int4`, `atom` and `fmpq` have in common."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F16, F32, S8, spread
from ptxlab.lowbit.quant.inputs import as_float32, by_strips

_MIN_SCALE = np.float16(2.0**-24)  # the smallest FP16 that is not zero


def integer_groups(
    name: str,
    x: npt.NDArray[Any],
    bits: int,
    steps: float,
    *,
    clip: float = 1.0,
    rows: int = 1,
    reciprocal: bool = False,
    largest_scale: int | None = None,
) -> tuple[S8, F16]:
    """Quantise groups to integers s8 [R, G, g] of `bits` bits, with scales max|x|·clip / steps in FP16 [R, G].

    A group of zeros has scale 1. Raises ArgumentError, which calls the array `name`, for a larger
    scale than FP16 has or `largest_scale`.

    Args:
        name: of the array, for errors.
        x: finite floats [R, G, g].
        bits: of an integer.
        steps: by what the largest magnitude is divided.
        clip: of the largest magnitude what the scale is made for.
        rows: neighbouring rows that share their scales.
        reciprocal: x is multiplied by an FP32 reciprocal and rounded half away from zero; else divided, ties to even.
        largest_scale: the largest scale.
    """
    R, G, g = x.shape
    (largest,) = by_strips(lambda strip: (np.abs(as_float32(strip)).reshape(-1, G, g).max(axis=2),), x.reshape(R, -1))
    if rows > 1:
        largest = np.repeat(largest.reshape(-1, rows, G).max(axis=1), rows, axis=0)
    scale = group_scales(largest, steps, clip)
    largest = largest * np.float32(clip)
    is_beyond = ~np.isfinite(scale) if largest_scale is None else scale > largest_scale
    if bool(is_beyond.any()):
        row, column = map(int, np.argwhere(is_beyond)[0])
        limit = "an FP16 number" if largest_scale is None else f"at most {largest_scale}"
        rule = f"a group's largest magnitude over {steps:g} must be {limit}"
        raise ArgumentError(name, rule, f"{float(largest[row, column]):g} in row {row}, group {column}")
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def round_strip(strip: npt.NDArray[Any], largest: F32, scale: F16) -> tuple[S8]:
        values = as_float32(strip).reshape(-1, G, g)
        if reciprocal:
            factor = np.float32(steps) / np.maximum(largest, np.float32(steps) * _MIN_SCALE.astype(np.float32))
            product = (values * factor[:, :, None]).astype(np.float64)  # to which a half adds exactly
            quotient = np.copysign(np.floor(np.abs(product) + 0.5), product)
        else:
            quotient = np.rint(values / scale.astype(np.float32)[:, :, None])
        return (quotient.clip(low, high).astype(np.int8),)

    (q,) = by_strips(round_strip, x.reshape(R, -1), largest, scale)
    return q, scale


def group_scales(largest: F32, steps: float, clip: float = 1.0) -> F16:
    """Compute the FP16 scale largest·clip / steps of each group from its largest magnitude.

    A scale is at least 2^-24. A group of zeros has scale 1. A scale beyond FP16 is infinite.
    """
    clipped_largest = largest * np.float32(clip)
    with np.errstate(over="ignore"):
        scale = np.maximum((clipped_largest / np.float32(steps)).astype(np.float16), _MIN_SCALE)
    return np.where(clipped_largest == 0, np.float16(1), scale)


def dequantize_groups(q: S8, scale: F16) -> F32:
    """Compute q·scale as f32 [R, K] from q s8 [R, K] and one scale per group, f16 [R, G]."""
    return q.astype(np.float32) * spread(scale.astype(np.float32), q.shape[1])
