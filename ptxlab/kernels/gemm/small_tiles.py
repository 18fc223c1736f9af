"""Which tile `gemm_w4a8_small_sm90` takes: costs that were measured, and the rule that adds them up.

Fits as in `strips_tiles`, to `notebooks/results/h200/sweeps/gemm_strips_small.csv`: up to 16 tokens 1% from the best in
the mean.
"""

from typing import NamedTuple

from ptxlab.kernels.gemm.strips_tiles import ROOM, SMS
from ptxlab.spec import Sizes

_ROOM_OF_TWO = 114_600  # bytes of shared memory of a block where an SM is to hold two
_MOST_STAGES = 16


class Tile(NamedTuple):
    """Tokens; strips at a time; warps that share the channels of a stage, 128 each; blocks that an SM is to hold."""

    BM: int
    ROWS: int
    SLICES: int
    RESIDENT: int


class Cost(NamedTuple):
    """Microseconds: of a strip in a stage; of each time that sums go out; of the launch; of 1,000 channels of X."""

    strip: float
    sums: float
    launch: float
    channels: float


COSTS = {
    Tile(8, 1, 16, 1): Cost(0.336, 0.691, 2.016, 0.179),
    Tile(8, 1, 16, 2): Cost(0.843, 0.354, 3.228, 0.111),
    Tile(8, 2, 8, 1): Cost(0.218, 0.558, 2.596, 0.101),
    Tile(8, 4, 4, 1): Cost(0.095, 1.362, 1.680, 0.249),
    Tile(8, 4, 4, 2): Cost(0.224, 1.177, 1.480, 0.318),
    Tile(16, 1, 8, 1): Cost(0.234, 0.521, 2.682, 0.103),
    Tile(16, 1, 8, 2): Cost(0.383, 0.576, 0.000, 0.825),
    Tile(16, 2, 4, 2): Cost(0.171, 1.597, 0.000, 0.691),
    Tile(16, 2, 8, 1): Cost(0.201, 0.794, 1.741, 0.338),
    Tile(16, 4, 4, 1): Cost(0.088, 1.987, 0.000, 0.678),
}


def choose(s: Sizes) -> dict[str, int]:
    """Constants of the quickest tile by the costs; those of 16 tokens serve more. Sizes: M, N, K, g."""
    BM = max(1, -(-s["M"] // 8)) * 8
    known = [tile for tile in COSTS if min(BM, 16) == tile.BM and _stages(tile._replace(BM=BM), s) >= 2]
    best = min(known, key=lambda tile: _microseconds(tile, s)) if known else Tile(BM, 1, 8, 1)
    tile = best._replace(BM=BM)
    return {**tile._asdict(), "STAGES": max(2, _stages(tile, s))}


def shared_bytes(tile: Tile, stages: int, s: Sizes) -> int:
    """Dynamic shared memory: all of X, the ring, two tiles of sums."""
    channels = tile.SLICES * 128
    x = -(-s["K"] // channels) * channels * tile.BM
    ring = stages * tile.ROWS * tile.SLICES * (1024 + 128 // s["g"] * 32)
    return x + ring + 2 * tile.BM * (tile.ROWS * 16 + 4) * 4


def _stages(tile: Tile, s: Sizes) -> int:
    """As many as fit."""
    room = (ROOM if tile.RESIDENT == 1 else _ROOM_OF_TWO) - shared_bytes(tile, 0, s)
    return min(_MOST_STAGES, room // (shared_bytes(tile, 1, s) - shared_bytes(tile, 0, s)))


def _microseconds(tile: Tile, s: Sizes) -> float:
    cost, strips = COSTS[tile], -(-s["N"] // 16)
    most = -(-strips // min(strips, SMS * tile.RESIDENT))  # of a block
    stages = -(-s["K"] // (tile.SLICES * 128))
    return most * stages * cost.strip + -(-most // tile.ROWS) * cost.sums + cost.launch + s["K"] / 1000 * cost.channels
