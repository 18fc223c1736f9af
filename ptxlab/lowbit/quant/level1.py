"""Level 1 of the two-level schemes: per-channel INT8 with a protective range (QServe §4.1, LiquidGEMM §4).

The scale of a row is FP32, not FP16 as in QServe's Eq. 4: it then holds any FP16 or BF16 scale of a checkpoint exactly.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.hardware.words import F32, S8
from ptxlab.lowbit import reference
from ptxlab.lowbit.quant.inputs import as_float32, by_strips, check_protective_range, extremes, float_matrix, row_scales

PROTECTIVE_RANGE = 119  # rounding at level 2 adds up to s1/2 = 8, and 119 + 8 is the largest s8


@dataclass(frozen=True, eq=False)
class Level1Weight:
    """A weight matrix as INT8 per output channel: `q8` s8 [N, K] within ±protective_range, `scale` f32 [N]."""

    q8: S8
    scale: F32
    protective_range: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        N, K = self.q8.shape
        return N, K

    def dequantize(self) -> F32:
        """Compute q8·s0 as f32 [N, K]."""
        return reference.scale_rows(self.q8, self.scale)


def quantize_level1(w: npt.NDArray[Any], protective_range: int = PROTECTIVE_RANGE) -> Level1Weight:
    """Quantise w float [N, K] symmetrically per row: s0 = max|w| / range, q8 = round(w / s0), ties to even.

    An all-zero row has scale 1. Raises ArgumentError for bad input (`inputs.as_float_matrix`), a range outside 1..127,
    or a row so small or so large that s0 is not a usable float32 (`inputs.row_scales`).
    """
    check_protective_range(protective_range)
    w = float_matrix("w", w)
    low, high = extremes("w", w)
    scale = row_scales("w", np.maximum(-low, high), protective_range)

    def round_rows(w: npt.NDArray[Any], scale: F32) -> tuple[S8]:
        quotient = np.rint(as_float32(w) / scale[:, None])
        return (quotient.clip(-protective_range, protective_range).astype(np.int8),)

    (q8,) = by_strips(round_rows, w, scale)
    return Level1Weight(q8, scale, protective_range)
