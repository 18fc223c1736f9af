"""Which tile `gemm_w4a8_small_sm90` takes: costs that were measured, and the rule that adds them up.

Fits as in `strips_tiles`, to `notebooks/results/h200/sweeps/gemm_strips_small.csv`: up to 16 tokens 1.2% from the best
in the mean.
"""

import math
from typing import NamedTuple

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit.kernels.gemm.common import SUM_PAD
from ptxlab.lowbit.kernels.gemm.strips_tiles import ROOM, SMS, block_bytes, group_of, stream_microseconds
from ptxlab.spec import Sizes

_ROOM_OF_TWO = 114_600  # bytes of shared memory of a block where an SM is to hold two
_MOST_STAGES = 16


class SmallTile(NamedTuple):
    """Tokens; strips at a time; warps that share the channels of a stage, 128 each; blocks that an SM is to hold."""

    BM: int
    ROWS: int
    SLICES: int
    RESIDENT: int


class SmallCost(NamedTuple):
    """Costs in microseconds.

    `strip` is a strip in a stage, `sums` each time that sums go out, `launch` the launch, `channels` 1,000 channels of
    X. `drain` is the least on top of the stream of the weights.
    """

    strip: float
    sums: float
    launch: float
    channels: float
    drain: float


COSTS = {
    SmallTile(8, 1, 8, 2): SmallCost(0.447, 0.400, 1.500, 0.216, 1.16),
    SmallTile(8, 2, 4, 2): SmallCost(0.190, 1.097, 1.500, 0.333, 1.56),
    SmallTile(8, 2, 8, 1): SmallCost(0.234, 0.399, 2.712, 0.032, 1.27),
    SmallTile(16, 1, 8, 1): SmallCost(0.257, 0.415, 2.500, 0.145, 1.78),
    SmallTile(16, 1, 8, 2): SmallCost(0.527, 0.281, 2.304, 0.000, 1.45),
    SmallTile(16, 2, 4, 2): SmallCost(0.190, 1.714, 1.500, 0.154, 2.04),
    SmallTile(16, 2, 8, 1): SmallCost(0.211, 0.748, 1.500, 0.353, 1.81),
    SmallTile(16, 4, 4, 1): SmallCost(0.105, 1.163, 1.500, 0.563, 2.99),
}


def choose(s: Sizes) -> dict[str, int]:
    """Choose the constants of the quickest tile by the costs; those of 16 tokens serve more.

    Sizes: M, N, K, and `g` of weights with groups.
    """
    tile = quickest(s)
    return {**tile._asdict(), "STAGES": max(2, _stages(tile, s))}


def quickest(s: Sizes) -> SmallTile:
    """Return the quickest tile by the costs."""
    BM = max(1, ceil_div(s["M"], 8)) * 8
    candidates = [tile for tile in COSTS if min(BM, 16) == tile.BM and _stages(tile._replace(BM=BM), s) >= 2]
    best_tile = min(candidates, key=lambda tile: microseconds(tile, s)) if candidates else SmallTile(BM, 1, 8, 1)
    return best_tile._replace(BM=BM)


def shared_bytes(tile: SmallTile, stages: int, s: Sizes) -> int:
    """Count dynamic shared memory: all of X, the ring, two tiles of sums."""
    channels = tile.SLICES * 128
    x = int(ceil_div(s["K"], channels)) * channels * tile.BM
    ring = stages * tile.ROWS * tile.SLICES * block_bytes(group_of(s))
    return x + ring + 2 * tile.BM * (tile.ROWS * 16 + SUM_PAD) * 4


def _stages(tile: SmallTile, s: Sizes) -> int:
    """Count the stages that fit."""
    room_bytes = (ROOM if tile.RESIDENT == 1 else _ROOM_OF_TWO) - shared_bytes(tile, 0, s)
    return min(_MOST_STAGES, room_bytes // (shared_bytes(tile, 1, s) - shared_bytes(tile, 0, s)))


def microseconds(tile: SmallTile, s: Sizes) -> float:
    """Estimate the microseconds of a tile by the costs; infinite for a tile without costs."""
    cost, strips = COSTS.get(tile._replace(BM=min(tile.BM, 16))), ceil_div(s["N"], 16)
    if cost is None:
        return math.inf
    strips_per_block = ceil_div(strips, min(strips, SMS * tile.RESIDENT))  # of a block
    stages = ceil_div(s["K"], tile.SLICES * 128)
    sums = ceil_div(strips_per_block, tile.ROWS) * cost.sums
    loop: float = strips_per_block * stages * cost.strip + sums + cost.launch + s["K"] / 1000 * cost.channels
    return max(loop, stream_microseconds(s) + cost.drain)
