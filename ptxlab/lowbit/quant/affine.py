"""One-level 4-bit weights with a float scale and a zero point per group: what other projects' checkpoints hold."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ptxlab.hardware.words import F32, U8
from ptxlab.lowbit.quant.inputs import GROUPS
from ptxlab.lowbit.quant.level1 import PROTECTIVE_RANGE
from ptxlab.lowbit.quant.lqq import MAX_GROUP_SCALE, LQQWeight
from ptxlab.lowbit.quant.qoq import QoQChannelWeight

# Of the least channel scale that spans a row: a larger one may suit the groups' scales better
_CHANNEL_SCALES = np.linspace(1, 1.5, 16, dtype=np.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class AffineWeight:
    """w = (q4 - zero)·scale: `q4` u8 [N, K] in 0..15, `scale` and `zero` f32 [N, G].

    Column k is in group k·G/K, or in `group_of[k]`, int32 [K], where the columns were quantised in another order.
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
    def group(self) -> int:
        """Weights per group."""
        return int(self.shape[1] // self.scale.shape[1])

    def dequantize(self) -> F32:
        """(q4 - zero)·scale, f32 [N, K]."""
        N, K = self.shape
        if self.group_of is not None:
            return (self.q4 - self.zero[:, self.group_of]) * self.scale[:, self.group_of]
        groups = self.q4.reshape(N, -1, self.group)
        return ((groups - self.zero[:, :, None]) * self.scale[:, :, None]).reshape(N, K)

    def per_channel(self) -> QoQChannelWeight | None:
        """The same numbers as `qoq_channel` has them; None where there are groups, or a zero that is not in 0..15."""
        zero = self.zero.clip(0, 15).astype(np.uint8)
        if self.scale.shape[1] != 1 or (zero != self.zero).any():
            return None
        return QoQChannelWeight(self.q4, self.scale[:, 0], zero[:, 0])

    def nearest_lqq(self) -> LQQWeight | None:
        """`lqq` of the same groups, each with its scale and smallest weight rounded to integers of a row's unit.

        That unit, the channel scale, is the one of a few that loses least; then each q4 is rounded anew. No nibble of a
        group leaves s8. None where the groups are none of `GROUPS`, not contiguous, or one has no positive scale.
        """
        if self.group not in GROUPS or self.group_of is not None or (self.scale <= 0).any():
            return None
        N, G = self.scale.shape
        q4 = self.q4.reshape(N, G, -1).astype(np.float32)
        mean, variance = q4.mean(axis=2), q4.var(axis=2)
        low = -self.zero * self.scale
        extent = np.maximum(np.abs(low), np.abs(low + 15 * self.scale)).max(axis=1) / PROTECTIVE_RANGE
        scale, minimum, unit = np.ones_like(low), np.zeros_like(low), np.ones_like(extent)
        least = np.full_like(extent, np.inf)
        for factor in _CHANNEL_SCALES:
            trial = (extent * factor)[:, None]
            s = np.rint(self.scale / trial).clip(1, MAX_GROUP_SCALE)
            tilt = s * trial - self.scale  # the error of a weight is q4·tilt + shift
            m = np.rint((low - tilt * mean) / trial).clip(-128, 127 - 15 * s)
            shift = m * trial - low
            error = (tilt**2 * variance + (tilt * mean + shift) ** 2).sum(axis=1)
            better = error < least
            least = np.where(better, error, least)
            scale[better], minimum[better], unit[better] = s[better], m[better], trial[better, 0]
        exact = (q4 * self.scale[:, :, None] + low[:, :, None]) / unit[:, None, None]
        rounded = np.rint((exact - minimum[:, :, None]) / scale[:, :, None]).clip(0, 15)
        return LQQWeight(
            q4=rounded.astype(np.uint8).reshape(self.shape),
            group_scale=scale.astype(np.uint8),
            minimum=minimum.astype(np.int8),
            channel_scale=unit,
            protective_range=PROTECTIVE_RANGE,
        )
