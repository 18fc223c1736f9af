"""Per-token INT8 activations (QServe §6.1) with the token sum that zero points in an epilogue need."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.hardware.words import F32, S8, S32
from ptxlab.lowbit import reference
from ptxlab.lowbit.quant.inputs import as_float32, by_strips, extremes, float_matrix, row_scales


@dataclass(frozen=True, eq=False)
class QuantizedActivations:
    """Activations as INT8 per token: `q` s8 [M, K] in ±127, `scale` f32 [M], `token_sum` s32 [M] = sum of q over K."""

    q: S8
    scale: F32
    token_sum: S32

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K)."""
        M, K = self.q.shape
        return M, K

    def dequantize(self) -> F32:
        """Multiply each token's integers by its scale: f32 [M, K]."""
        return reference.scale_rows(self.q, self.scale)


def quantize_activations(x: npt.NDArray[Any]) -> QuantizedActivations:
    """Quantise x float [M, K] symmetrically per row: s = max|x| / 127, q = round(x / s), ties to even.

    An all-zero token has scale 1. Raises ArgumentError as `token_scales` does.
    """
    x = float_matrix("x", x)
    scale = token_scales(x)

    def round_rows(x: npt.NDArray[Any], scale: F32) -> tuple[S8, S32]:
        q = np.rint(as_float32(x) / scale[:, None]).astype(np.int8)
        return q, q.sum(axis=1, dtype=np.int32)

    q, token_sum = by_strips(round_rows, x, scale)
    return QuantizedActivations(q, scale, token_sum)


def token_scales(x: npt.NDArray[Any]) -> F32:
    """Compute each token's scale max|x| / 127, f32 [M], of x float [M, K]; a token of zeros has scale 1.

    Raises ArgumentError for bad input (`inputs.as_float_matrix`) or a row whose scale is not a usable float32
    (`inputs.row_scales`).
    """
    low, high = extremes("x", float_matrix("x", x))
    return row_scales("x", np.maximum(-low, high), 127)
