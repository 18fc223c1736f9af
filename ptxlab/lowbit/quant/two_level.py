"""What the two-level weight formats have in common: u4 weights, a u8 scale per group, an f32 scale per channel."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ptxlab.hardware.words import F32, S8, S32, U8, Bool
from ptxlab.lowbit import reference


@dataclass(frozen=True, eq=False, kw_only=True)
class TwoLevelWeight(ABC):
    """A weight matrix [N, K]: `q4` u8 [N, K] in 0..15, `group_scale` u8 [N, K/g], `channel_scale` f32 [N]."""

    q4: U8
    group_scale: U8
    channel_scale: F32
    protective_range: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        N, K = self.q4.shape
        return N, K

    @property
    def group(self) -> int:
        """Weights per group, along K."""
        return int(self.q4.shape[1] // self.group_scale.shape[1])

    @abstractmethod
    def level1(self) -> S8:
        """Compute the level-1 integers q8', s8 [N, K], as the kernel does: an overflow wraps and carries."""

    def exact_level1(self) -> S32:
        """Compute the level-1 integers q8' without overflow, int32 [N, K].

        They equal `level1()` where nothing overflows.
        """
        return self.restore(self.q4)

    @abstractmethod
    def restore(self, q4: U8) -> S32:
        """Compute q8' without overflow, int32, from all nibbles [N, K] or from one nibble per group [N, K/g]."""

    def overflows(self) -> Bool:
        """Find groups in which some q8' does not fit s8, so that the kernel restores other weights: bool [N, K/g].

        q8' grows with q4, so each group's least and greatest nibble decide. None at protective range 119 (see the
        module of the scheme). `layout.pack`, `layout.load`, `ptxlab audit` and recipes refuse or name such groups.
        """
        N, groups = self.group_scale.shape
        nibbles = self.q4.reshape(N, groups, -1)
        group_extremes = nibbles.min(axis=2), nibbles.max(axis=2)
        lowest_fits, highest_fits = (
            reference.fits_s8(self.restore(extreme_nibbles)) for extreme_nibbles in group_extremes
        )
        return ~(lowest_fits & highest_fits)

    def dequantize(self) -> F32:
        """Compute the kernel's weights, f32 [N, K]: `level1()` times the channel scale.

        Overflow shows as on the GPU; `scale_rows(w.exact_level1(), w.channel_scale)` is the same without it.
        """
        return reference.scale_rows(self.level1(), self.channel_scale)
