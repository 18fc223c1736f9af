"""One-level 4-bit weights with a float scale and a zero point per group: what other projects' checkpoints hold."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ptxlab.quant.qoq import QoQChannelWeight
from ptxlab.reference.packed import F32, U8


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
