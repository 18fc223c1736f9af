"""Signed INT4 with a float scale per group, what W4A16 checkpoints hold: no zero point, no second level."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.hardware.words import F16, F32, S8
from ptxlab.lowbit import reference
from ptxlab.lowbit.quant.groups import integer_groups
from ptxlab.lowbit.quant.inputs import as_float_matrix, check_group

MAX_INT4_SCALE = 8188  # 8 times that is 65504, the largest FP16


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
        """Compute the kernel's FP16 weights, returned as f32 [N, K]."""
        return reference.dequant_s4_f16(self.q4, self.scale).astype(np.float32)


def quantize_int4(w: npt.NDArray[Any], group: int = 128) -> Int4Weight:
    """Quantise w float [N, K] symmetrically with `group` (32, 64 or 128) weights per scale, max|w| / 7 in FP16.

    A group of zeros has scale 1. Raises ArgumentError as `quantize_level1` does for bad input, for an unknown group or
    a K that is not a multiple of it, and for a group whose scale would exceed 8188, 8 times which is the
    largest FP16.
    """
    floats = as_float_matrix("w", w)
    check_group("w", floats.shape[1], group)
    q4, scale = integer_groups("w", floats.reshape(len(floats), -1, group), 4, 7, largest_scale=MAX_INT4_SCALE)
    return Int4Weight(q4.reshape(floats.shape), scale)
