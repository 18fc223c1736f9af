"""LQQ weights: groups shifted into u8 before they are scaled (LiquidGEMM §4).

At protective range 119 no byte of the kernel's q4·s1 + a leaves [9, 255], for every rounding of s1: s1 <= 16 bounds the
product by 240 and the rounding error by 8, so q4·s1 + a = q8' + 128 <= 119 + 8 + 128. Nearest and ceiling hold up to
range 120 and overflow from 121 on, search from 120 on.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F32, S8, S32, U8
from ptxlab.lowbit import reference
from ptxlab.lowbit.quant.inputs import by_strips, check_group
from ptxlab.lowbit.quant.level1 import PROTECTIVE_RANGE, quantize_level1
from ptxlab.lowbit.quant.two_level import TwoLevelWeight
from ptxlab.validate import is_one_of

Rounding = Literal["nearest", "ceiling", "search"]
MAX_GROUP_SCALE = 16  # what kernels admit; 15·16 = 240 spans every group up to range 120, beyond that the top clips


@dataclass(frozen=True, eq=False, kw_only=True)
class LQQWeight(TwoLevelWeight):
    """LQQ: w = (q4·group_scale + minimum)·channel_scale, with `minimum` s8 [N, K/g], the smallest q8 of the group."""

    minimum: S8

    @property
    def offset(self) -> U8:
        """128 + minimum, u8 [N, K/g]: the constant a that the kernel's multiply-add adds to every byte."""
        return self.minimum.view(np.uint8) ^ np.uint8(0x80)

    def level1(self) -> S8:
        """See `TwoLevelWeight.level1`; by `reference.dequant_lqq`."""
        return reference.dequant_lqq(self.q4, self.group_scale, self.offset)

    def restored(self, q4: U8) -> S32:
        """See `TwoLevelWeight.restored`."""
        return reference.exact_lqq(q4, self.group_scale, self.offset)


def quantize_lqq(
    w: npt.NDArray[Any],
    group: int = 64,
    protective_range: int = PROTECTIVE_RANGE,
    rounding: Rounding = "nearest",
) -> LQQWeight:
    """Quantise w float [N, K] to LQQ with `group` (32, 64 or 128) weights per level-2 scale.

    `rounding` is how the level-2 scale becomes an integer in 1..16: "nearest" as in the paper (which may clip the top
    of a group), "ceiling" (which never clips at range 120 or less), or "search" for the scale that minimises the
    group's squared error. Raises ArgumentError as `quantize_level1` does, for an unknown group or a K that is not a
    multiple of it, and for an unknown rounding.

    `protective_range` 120 is proved safe for nearest and ceiling (claims `quantiser lqq nearest` of `ptxlab prove`).
    """
    if not is_one_of(rounding, get_args(Rounding)):
        raise ArgumentError("rounding", f"must be one of {', '.join(get_args(Rounding))}", rounding)
    level1 = quantize_level1(w, protective_range)
    check_group("w", level1.shape[1], group)
    q4, group_scale, minimum = lqq_groups(level1.q8, group, rounding)
    return LQQWeight(
        q4=q4, group_scale=group_scale, minimum=minimum, channel_scale=level1.scale, protective_range=protective_range
    )


def lqq_groups(q8: S8, group: int, rounding: Rounding = "nearest") -> tuple[U8, U8, S8]:
    """Level 2 of LQQ on integers q8 s8 [N, K]: (q4 u8 [N, K], scale u8 [N, K/g], minimum s8 [N, K/g]).

    A group of equal values has scale 1 and q4 = 0.
    """
    q4, scale, minimum = by_strips(lambda strip: _lqq_strip(strip, group, rounding), q8)
    return q4, scale, minimum


def _lqq_strip(q8: S8, group: int, rounding: Rounding) -> tuple[U8, U8, S8]:
    groups = q8.reshape(q8.shape[0], -1, group)
    minimum = groups.min(axis=2)
    shifted = groups.astype(np.float32) - minimum[:, :, None]
    if rounding == "search":
        scale = _scale_of_least_error(shifted)
    else:
        round_scale = np.rint if rounding == "nearest" else np.ceil
        scale = round_scale(shifted.max(axis=2) / 15).clip(1, MAX_GROUP_SCALE)
    q4 = _divide(shifted, scale)
    return q4.astype(np.uint8).reshape(q8.shape), scale.astype(np.uint8), minimum


def _divide(shifted: F32, scale: F32) -> F32:
    q4: F32 = np.rint(shifted / scale[:, :, None]).clip(0, 15)
    return q4


def _scale_of_least_error(shifted: F32) -> F32:
    """The scale in 1..16 of least squared error per group of f32 [N, K/g, g]; of equally good ones the smallest.

    The sums are integers below 2^24, so float32 compares them exactly.
    """
    best = np.ones_like(shifted[:, :, 0])
    least = np.full_like(best, np.inf)
    for candidate in range(1, MAX_GROUP_SCALE + 1):
        scale = np.full_like(best, candidate)
        error = ((_divide(shifted, scale) * scale[:, :, None] - shifted) ** 2).sum(axis=2)
        best = np.where(error < least, scale, best)
        least = np.minimum(error, least)
    return best
