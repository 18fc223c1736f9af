"""QoQ weights: progressive group quantisation and the per-channel form (QServe §4.1, §5.2.2).

At protective range 119 a group scale is at most 16, a product q4·s1 at most 225, and every reconstructed |q8'| at most
121; range 120 is the smallest that overflows (120 -> 8·16 = 128).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.hardware.words import F32, S8, S32, U8
from ptxlab.lowbit import reference
from ptxlab.lowbit.quant.inputs import as_float32, by_strips, check_group, extremes, float_matrix, row_scales
from ptxlab.lowbit.quant.level1 import PROTECTIVE_RANGE, quantize_level1
from ptxlab.lowbit.quant.two_level import TwoLevelWeight


@dataclass(frozen=True, eq=False, kw_only=True)
class QoQWeight(TwoLevelWeight):
    """QoQ per group: w = (q4 - zero)·group_scale·channel_scale, with `zero` u8 [N, K/g] in 0..15."""

    zero: U8

    @property
    def offset(self) -> S8:
        """-zero·group_scale modulo 256, s8 [N, K/g]: what the kernel adds after the multiplication."""
        return (-(self.zero * self.group_scale)).view(np.int8)

    def level1(self) -> S8:
        """See `TwoLevelWeight.level1`; by `reference.dequant_qoq_vadd4`."""
        return reference.dequant_qoq_vadd4(self.q4, self.group_scale, self.offset)

    def restore(self, q4: U8) -> S32:
        """See `TwoLevelWeight.restore`."""
        return reference.exact_qoq(q4, self.group_scale, self.zero)


def quantize_qoq(w: npt.NDArray[Any], group: int = 128, protective_range: int = PROTECTIVE_RANGE) -> QoQWeight:
    """Quantise w float [N, K] to QoQ with `group` (32, 64 or 128) weights per level-2 scale.

    Raises ArgumentError as `quantize_level1` does, and for an unknown group or a K that is not a multiple of it.
    """
    level1 = quantize_level1(w, protective_range)
    check_group("w", level1.shape[1], group)
    q4, group_scale, zero = qoq_groups(level1.q8, group)
    return QoQWeight(
        q4=q4, group_scale=group_scale, zero=zero, channel_scale=level1.scale, protective_range=protective_range
    )


def qoq_groups(q8: S8, group: int) -> tuple[U8, U8, U8]:
    """Quantise level-1 integers q8 s8 [N, K] to level 2 of QoQ.

    Returns (q4 u8 [N, K], scale u8 [N, K/g], zero u8 [N, K/g]).

    A group's range is extended to include 0, which QServe's Eq. 2 does not: else the zero point of a one-sided group
    would not fit u4. Scale and zero are rounded to nearest, as in QServe §4.1; a walk-through in Chinese writes
    ceilings, which give the same in its example. A group of zeros has scale 1.
    """
    q4, scale, zero = by_strips(lambda strip: _qoq_strip(strip, group), q8)
    return q4, scale, zero


def _qoq_strip(q8: S8, group: int) -> tuple[U8, U8, U8]:
    groups = q8.reshape(q8.shape[0], -1, group)
    low = np.minimum(groups.min(axis=2), 0).astype(np.float32)
    high = np.maximum(groups.max(axis=2), 0).astype(np.float32)
    scale = np.maximum(np.rint((high - low) / 15), 1)
    zero = np.rint(-low / scale).clip(0, 15)
    q4 = (np.rint(groups / scale[:, :, None]) + zero[:, :, None]).clip(0, 15)
    return q4.astype(np.uint8).reshape(q8.shape), scale.astype(np.uint8), zero.astype(np.uint8)


@dataclass(frozen=True, eq=False)
class QoQChannelWeight:
    """QoQ per channel: w = (q4 - zero)·scale, `q4` u8 [N, K] in 0..15, `scale` f32 [N], `zero` u8 [N] in 0..15."""

    q4: U8
    scale: F32
    zero: U8

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        N, K = self.q4.shape
        return N, K

    def dequantize(self) -> F32:
        """Compute (q4 - zero)·scale as f32 [N, K]; in a GEMM the epilogue applies the zero point."""
        unpacked_integers = reference.dequant_qoq_channel(self.q4).astype(np.int32)
        return reference.scale_rows(unpacked_integers - self.zero[:, None], self.scale)


def quantize_qoq_channel(w: npt.NDArray[Any]) -> QoQChannelWeight:
    """Quantise w float [N, K] to u4 with one scale and zero point per row; its range is extended to include 0.

    An all-zero row has scale 1. Raises ArgumentError as `quantize_level1` does.
    """
    w = float_matrix("w", w)
    low, high = extremes("w", w)
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    with np.errstate(over="ignore"):  # an infinite extent is refused as a scale
        scale = row_scales("w", high - low, 15)
    zero = np.rint(-low / scale).clip(0, 15)

    def round_rows(w: npt.NDArray[Any], scale: F32, zero: F32) -> tuple[U8]:
        return ((np.rint(as_float32(w) / scale[:, None]) + zero[:, None]).clip(0, 15).astype(np.uint8),)

    (q4,) = by_strips(round_rows, w, scale, zero)
    return QoQChannelWeight(q4, scale, zero.astype(np.uint8))
