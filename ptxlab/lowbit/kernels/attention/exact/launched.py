"""What the steps of the oracle know of a launch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels.attention.exact.arithmetic import Arithmetic
from ptxlab.lowbit.kernels.attention.sm90 import TILE
from ptxlab.lowbit.layout import KVCache


def require_constants(config: Mapping[str, int], q: Any, cache: KVCache, **constants: int) -> None:
    """Raise ArgumentError unless a variant has the constants of the arrays, and those that are given beside."""
    constants |= {
        "HEAD_DIM": cache.head_dim,
        "PAGE": cache.page_size,
        "BF16": int(q.dtype == np.uint16),
        "ROTATED": int(cache.rotated),
    }
    for name, number in constants.items():
        if config.get(name, 0) != number:
            raise ArgumentError("exact: config", f"{name} must be {number} for these arrays", config.get(name, 0))


@dataclass(frozen=True, eq=False)
class AttentionLaunch:
    """The kernel, compiled with the constants `config`, on T queries of Hq heads of each sequence.

    `lengths` are the cache's, s64 [B] on the host.
    """

    cache: KVCache
    lengths: npt.NDArray[np.int64]
    T: int
    Hq: int
    softmax_scale: float
    window: int
    config: Mapping[str, int]
    arithmetic: Arithmetic

    @property
    def D(self) -> int:  # noqa: N802
        """Dimension of a head."""
        return self.cache.head_dim

    @property
    def bits(self) -> int:
        """Bits of a key or value."""
        return self.config["BITS"]

    @property
    def by_channel(self) -> bool:
        """True if scales and zeros are by channel."""
        return bool(self.config["CHANNEL"])

    @property
    def signed(self) -> bool:
        """True if integers are signed."""
        return self.by_channel and self.bits == 8

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.Hq // self.cache.num_kv_heads

    @property
    def columns(self) -> int:
        """Queries of a unit, C."""
        return min(self.config["COLUMNS"], self.group * self.T)

    @property
    def splits(self) -> int:
        """Units of a kv head."""
        return ceil_div(self.group * self.T, self.config["COLUMNS"])

    @property
    def warps(self) -> int:
        """Warps of a block that multiply."""
        return self.config["WARPS"]

    @property
    def share(self) -> int:
        """Warps of a tile."""
        return TILE // self.config["TOKENS"]

    @property
    def promote(self) -> int:
        """Tiles of a warp after which it promotes its sums; 0 where it never does."""
        return self.config["PROMOTE"] // self.config["TOKENS"]

    @property
    def part(self) -> int:
        """Tiles after which a unit is cut by its own length; 0 where blocks have equal shares."""
        return self.config.get("PART", 0)

    @property
    def groups(self) -> int:
        """Groups of warps, which take turns."""
        return self.warps // self.share


def to_device_of(array: Any, example: Any) -> Any:
    """Copy a NumPy array to the library and device of `example`."""
    return np.asarray(array, like=example)
