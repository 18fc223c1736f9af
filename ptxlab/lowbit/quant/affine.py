"""One-level 4-bit weights with a float scale and a zero point per group: what other projects' checkpoints hold."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.hardware.words import F32, U8
from ptxlab.lowbit.quant.inputs import GROUPS, by_strips, row_scales
from ptxlab.lowbit.quant.level1 import PROTECTIVE_RANGE
from ptxlab.lowbit.quant.lqq import MAX_GROUP_SCALE, LQQWeight, lqq_groups
from ptxlab.lowbit.quant.qoq import QoQChannelWeight

# Of the least channel scale that spans a row: a larger one may suit the groups' scales better
_CHANNEL_SCALES = np.linspace(1, 1.5, 16, dtype=np.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class AffineWeight:
    """w = (q4 - zero)·scale: `q4` u8 [N, K] in 0..15, `scale` and `zero` f32 [N, G], scales of any sign.

    Column k is in group k·G/K, or in `group_of[k]`, int32 [K], where groups are not contiguous or the last is shorter.
    """

    q4: U8
    scale: F32
    zero: F32
    group_of: npt.NDArray[np.int32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        N, K = self.q4.shape
        return N, K

    @property
    def column_groups(self) -> npt.NDArray[np.int32]:
        """The group of each column, int32 [K]."""
        if self.group_of is not None:
            return self.group_of
        K = self.shape[1]
        return np.arange(K, dtype=np.int32) // np.int32(K // self.scale.shape[1])

    def dequantize(self) -> F32:
        """Compute (q4 - zero)·scale, f32 [N, K]."""
        N, K = self.shape
        if self.group_of is not None:
            return (self.q4 - self.zero[:, self.group_of]) * self.scale[:, self.group_of]
        groups = self.q4.reshape(N, self.scale.shape[1], -1)
        return ((groups - self.zero[:, :, None]) * self.scale[:, :, None]).reshape(N, K)

    def per_channel(self) -> QoQChannelWeight | None:
        """Convert to a `qoq_channel` weight with the same numbers, or return None.

        None means that the weight has groups or a zero outside 0..15.

        A row of negative scale is mirrored: (q4 - zero)·scale = ((15 - q4) - (15 - zero))·(-scale).
        """
        zero = self.zero.clip(0, 15).astype(np.uint8)
        if self.scale.shape[1] != 1 or (zero != self.zero).any():
            return None
        is_negative = self.scale < 0
        q4, zero = (np.where(is_negative, 15 - array, array) for array in (self.q4, zero))
        return QoQChannelWeight(q4, np.abs(self.scale[:, 0]), zero[:, 0])

    def nearest_lqq(self, group: int) -> tuple[LQQWeight, int]:
        """Convert to an `lqq` weight in groups of `group` columns; count the groups quantised from floats.

        The levels of a group are rounded to integers of the row's unit, the channel scale, and each weight is then
        rounded anew. The unit is the one of a few candidates that loses least. Where the row's scales are multiples of
        a unit, that unit loses nothing and is taken. A group whose columns belong to several groups here has no such
        levels: it is quantised from its floats, and counted in the second result. No nibble of a group leaves s8.

        Raises ArgumentError if a row's unit is no normal float32.
        """
        runs = self.column_groups.reshape(-1, group)
        is_whole = (runs == runs[:, :1]).all(axis=1)
        step, zero = (constants[:, runs[:, 0]] for constants in (self.scale, self.zero))
        low, step = -zero * step + np.minimum(15 * step, 0), np.abs(step)
        extent = (np.maximum(np.abs(low), np.abs(low + 15 * step)) * is_whole).max(axis=1)
        if not is_whole.all():
            extent = np.maximum(extent, np.abs(self.dequantize()[:, np.repeat(~is_whole, group)]).max(axis=1))

        def round_rows(q4: U8, scale: F32, zero: F32, step: F32, low: F32, unit: F32) -> tuple[npt.NDArray[Any], ...]:
            rows = AffineWeight(q4=q4, scale=scale, zero=zero, group_of=self.group_of)
            return _round_rows(rows.dequantize().reshape(len(q4), -1, group), step, low, unit, is_whole)

        unit = row_scales("scale", extent, PROTECTIVE_RANGE)
        q4, scale, minimum, unit = by_strips(round_rows, self.q4, self.scale, self.zero, step, low, unit)
        weight = LQQWeight(
            q4=q4, group_scale=scale, minimum=minimum, channel_scale=unit, protective_range=PROTECTIVE_RANGE
        )
        return weight, len(unit) * int((~is_whole).sum())


def _round_rows(
    w: F32, step: F32, low: F32, least_unit: F32, whole: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[Any], ...]:
    """Round w [N, G, group] to q4, scale, minimum and unit. Only whole groups are of levels low + step·0..15."""
    with np.errstate(divide="ignore", invalid="ignore"):
        index = np.where(step[:, :, None] == 0, 0, (w - low[:, :, None]) / step[:, :, None])
    scale, minimum, unit = _round_levels(step, low, index, least_unit, whole)
    integers = w / unit[:, None, None]
    q4 = np.rint((integers - minimum[:, :, None]) / scale[:, :, None]).clip(0, 15).astype(np.uint8)
    if not whole.all():
        mixed_integers = np.rint(integers[:, ~whole]).clip(-PROTECTIVE_RANGE, PROTECTIVE_RANGE).astype(np.int8)
        searched_integers, scale[:, ~whole], minimum[:, ~whole] = lqq_groups(
            mixed_integers.reshape(len(w), -1), w.shape[2], "search"
        )
        q4[:, ~whole] = searched_integers.reshape(mixed_integers.shape)
    return q4.reshape(len(w), -1), scale.astype(np.uint8), minimum.astype(np.int8), unit


def _round_levels(
    step: F32, low: F32, index: F32, least_unit: F32, counted: npt.NDArray[np.bool_]
) -> tuple[F32, F32, F32]:
    """Round levels low + step·0..15 to scale and minimum [N, G], in units [N] of least error over counted groups.

    `index` [N, G, group] has the level of each weight.
    """
    mean, variance = index.mean(axis=2), index.var(axis=2)
    scale, minimum, unit = np.ones_like(low), np.zeros_like(low), np.ones_like(least_unit)
    least_error = np.full_like(least_unit, np.inf)
    trials = [*(least_unit * factor for factor in _CHANNEL_SCALES), _common_unit(step, least_unit)]
    for trial in (unit_of_rows[:, None] for unit_of_rows in trials):
        trial_scale = np.rint(step / trial).clip(1, MAX_GROUP_SCALE)
        tilt = trial_scale * trial - step  # the error of a weight is index·tilt + shift
        trial_minimum = np.rint((low - tilt * mean) / trial).clip(-128, 127 - 15 * trial_scale)
        shift = trial_minimum * trial - low
        error = ((tilt**2 * variance + (tilt * mean + shift) ** 2) * counted).sum(axis=1)
        is_better = error < least_error
        least_error = np.where(is_better, error, least_error)
        scale[is_better] = trial_scale[is_better]
        minimum[is_better] = trial_minimum[is_better]
        unit[is_better] = trial[is_better, 0]
    return scale, minimum, unit


def _common_unit(step: F32, otherwise: F32) -> F32:
    """Return each row's largest unit of which all its scales [N, G] are exact multiples, 1 to 16 times: f32 [N].

    A row without such a unit has that of `otherwise` [N].
    """
    largest_step, unit = step.max(axis=1), otherwise.copy()
    for multiple in range(MAX_GROUP_SCALE, 0, -1):  # the largest unit last
        trial = (largest_step / np.float32(multiple)).astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            multiples = np.rint(step / trial[:, None])
        is_exact = (multiples * trial[:, None] == step).all(axis=1) & (largest_step > 0)
        unit = np.where(is_exact, trial, unit)
    return unit


def lqq_group(column_groups: npt.NDArray[np.int32]) -> int:
    """Choose the `lqq` group for columns of these groups: the largest that lies within one of them everywhere.

    Where none does, 32: what is quantised again loses least in the smallest groups.
    """
    K = len(column_groups)
    for group in reversed(GROUPS):
        if K % group == 0 and (column_groups.reshape(-1, group) == column_groups[::group, None]).all():
            return group
    return GROUPS[0]
