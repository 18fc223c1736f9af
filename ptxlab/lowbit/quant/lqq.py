"""LQQ weights: groups shifted into u8 before they are scaled (LiquidGEMM §4).

At protective range 119 no byte of the kernel's q4·s1 + a leaves [9, 255], for every rounding of s1: s1 <= 16 bounds the
product by 240 and the rounding error by 8, so q4·s1 + a = q8' + 128 <= 119 + 8 + 128. Nearest and ceiling hold up to
range 120 and overflow from 121 on, search and levels from 120 on.
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

Rounding = Literal["nearest", "ceiling", "search", "levels"]
MAX_GROUP_SCALE = 16  # what kernels admit; 15·16 = 240 spans every group up to range 120, beyond that the top clips
# From end to end of a group. Weights that lie on 16 levels, as those of 4-bit files, span 15 steps or fewer; numbers
# below 8 have a multiple among these.
_STEPS = range(15, 7, -1)


@dataclass(frozen=True, eq=False, kw_only=True)
class LQQWeight(TwoLevelWeight):
    """LQQ: w = (q4·group_scale + minimum)·channel_scale, with `minimum` s8 [N, K/g], the lowest level of the group."""

    minimum: S8

    @property
    def offset(self) -> U8:
        """128 + minimum, u8 [N, K/g]: the constant a that the kernel's multiply-add adds to every byte."""
        return self.minimum.view(np.uint8) ^ np.uint8(0x80)

    def level1(self) -> S8:
        """See `TwoLevelWeight.level1`; by `reference.dequant_lqq`."""
        return reference.dequant_lqq(self.q4, self.group_scale, self.offset)

    def restore(self, q4: U8) -> S32:
        """See `TwoLevelWeight.restore`."""
        return reference.exact_lqq(q4, self.group_scale, self.offset)


def quantize_lqq(
    w: npt.NDArray[Any],
    group: int = 64,
    protective_range: int = PROTECTIVE_RANGE,
    rounding: Rounding = "nearest",
) -> LQQWeight:
    """Quantise w float [N, K] to LQQ with `group` (32, 64 or 128) weights per level-2 scale.

    `rounding` is how the level-2 scale becomes an integer in 1..16: "nearest" as LiquidGEMM §2 rounds, which may clip
    the top of a group (its formula, Eq. 7, was missing from the text at hand); "ceiling", which never clips at range
    120 or less; or "search" for the scale that minimises the group's squared error. "levels" searches for scale and
    minimum, which need not be the smallest weight, with 8 to 15 steps from end to end of the group; it finds the levels
    of weights that 4 bits held before.

    Raises ArgumentError as `quantize_level1` does, for an unknown group or a K that is not a multiple of it, and for an
    unknown rounding.

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
    """Quantise level-1 integers q8 s8 [N, K] to level 2 of LQQ.

    Returns (q4 u8 [N, K], scale u8 [N, K/g], minimum s8 [N, K/g]).

    A group of equal values has scale 1 and, except with "levels", q4 = 0.
    """
    q4, scale, minimum = by_strips(lambda strip: _lqq_strip(strip, group, rounding), q8)
    return q4, scale, minimum


def _lqq_strip(q8: S8, group: int, rounding: Rounding) -> tuple[U8, U8, S8]:
    groups = q8.reshape(q8.shape[0], -1, group).astype(np.float32)
    minimum = groups.min(axis=2)
    shifted_groups = groups - minimum[:, :, None]
    if rounding == "levels":
        scale, levels_below = _levels_of_least_error(shifted_groups, minimum)
        minimum -= levels_below
        shifted_groups += levels_below[:, :, None]
    elif rounding == "search":
        scale = _scale_of_least_error(shifted_groups)
    else:
        round_scale = np.rint if rounding == "nearest" else np.ceil
        scale = round_scale(shifted_groups.max(axis=2) / 15).clip(1, MAX_GROUP_SCALE)
    q4 = _divide(shifted_groups, scale)
    return q4.astype(np.uint8).reshape(q8.shape), scale.astype(np.uint8), minimum.astype(np.int8)


def _divide(shifted: F32, scale: F32) -> F32:
    q4 = _nearest(shifted, scale)
    return q4.clip(0, 15, out=q4)


def _nearest(shifted: F32, step: F32) -> F32:
    """Count the steps of its group to which each element of f32 [N, K/g, g] is nearest."""
    steps: F32 = shifted / step[:, :, None]
    np.rint(steps, out=steps)
    return steps


def _squared_error(shifted: F32, scale: F32) -> F32:
    """Sum the squared error over each group; sums are integers below 2^24, so float32 compares them exactly."""
    error = _divide(shifted, scale)
    error *= scale[:, :, None]
    error -= shifted
    error *= error
    total: F32 = error.sum(axis=2)
    return total


def _scale_of_least_error(shifted: F32) -> F32:
    """Find the scale in 1..16 of least squared error per group of f32 [N, K/g, g]; the smallest if several tie."""
    best_scale = np.ones_like(shifted[:, :, 0])
    least_error = np.full_like(best_scale, np.inf)
    for candidate in range(1, MAX_GROUP_SCALE + 1):
        scale = np.full_like(best_scale, candidate)
        error = _squared_error(shifted, scale)
        best_scale = np.where(error < least_error, scale, best_scale)
        least_error = np.minimum(error, least_error)
    return best_scale


def _levels_of_least_error(shifted: F32, minimum: F32) -> tuple[F32, F32]:
    """Find scale and lowest level of least squared error per group; the level is the distance below the minimum.

    Each number of steps from end to end has its step, which is rounded to a scale. The mean error then vanishes, to a
    rounding, if the lowest level lies lower by the rounding times the mean of the weights in steps.
    """
    extent = np.maximum(shifted.max(axis=2), 1)
    scale, levels_below, least_error = np.ones_like(extent), np.zeros_like(extent), np.full_like(extent, np.inf)
    for count in _STEPS:
        step = extent / count
        candidate = np.rint(step).clip(1, MAX_GROUP_SCALE)
        offset = np.rint((candidate - step) * _nearest(shifted, step).mean(axis=2))
        offset = np.minimum(offset, minimum + 128)  # the lowest level is an s8
        error = _squared_error(shifted + offset[:, :, None], candidate)
        is_better = error < least_error
        scale, levels_below = np.where(is_better, candidate, scale), np.where(is_better, offset, levels_below)
        least_error = np.minimum(error, least_error)
    return scale, levels_below
