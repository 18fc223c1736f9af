"""Signed INT4 with a float scale per group, what W4A16 checkpoints hold: no zero point, no second level."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab import reference
from ptxlab.errors import ArgumentError
from ptxlab.quant.inputs import as_float32, as_float_matrix, by_strips, check_group
from ptxlab.reference.packed import F16, F32, S8

MAX_INT4_SCALE = 8188  # 8 times that is 65504, the largest FP16
_MIN_SCALE = np.float16(2.0**-24)  # the smallest FP16 that is not zero


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """w = q4·scale: `q4` s8 [N, K] in -8..7, `scale` f16 [N, K/g]."""

    q4: S8
    scale: F16

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        N, K = self.q4.shape
        return N, K

    def dequantize(self) -> F32:
        """The FP16 numbers that the kernel gives, as f32 [N, K]."""
        return reference.dequant_s4_f16(self.q4, self.scale).astype(np.float32)


def quantize_int4(w: npt.NDArray[Any], group: int = 128) -> Int4Weight:
    """Quantise w float [N, K] symmetrically with `group` (32, 64 or 128) weights per scale, max|w| / 7 in FP16.

    A group of zeros has scale 1. Raises ArgumentError as `quantize_level1` does for bad input, for an unknown group or
    a K that is not a multiple of it, and for a group whose scale would exceed 8188, 8 times which is the
    largest FP16.
    """
    floats = as_float_matrix("w", w)
    check_group("w", floats.shape[1], group)
    q4, scale = by_strips(lambda strip: _strip(strip, group), floats)
    if (scale > MAX_INT4_SCALE).any():
        row, column = map(int, np.argwhere(scale > MAX_INT4_SCALE)[0])
        largest = np.abs(floats[row, column * group : (column + 1) * group]).max()
        rule = f"a group's largest magnitude over 7 must be at most {MAX_INT4_SCALE}"
        raise ArgumentError("w", rule, f"{largest:g} in row {row}, group {column}")
    return Int4Weight(q4, scale)


def _strip(w: npt.NDArray[Any], group: int) -> tuple[S8, F16]:
    groups = as_float32(w).reshape(w.shape[0], -1, group)
    largest = np.abs(groups).max(axis=2)
    with np.errstate(over="ignore"):  # an infinite scale is refused
        scale = np.maximum((largest / np.float32(7)).astype(np.float16), _MIN_SCALE)
    scale = np.where(largest == 0, np.float16(1), scale)
    q4 = np.rint(groups / scale[:, :, None].astype(np.float32)).clip(-8, 7)
    return q4.astype(np.int8).reshape(w.shape), scale
