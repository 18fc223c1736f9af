"""Which tile `gemm_w8a8_sm90` takes: costs that were measured, and the rule that adds them up.

Fits as in `strips_tiles`, to `notebooks/results/h200/sweeps/gemm_w8a8.csv`: within 1% of the best in the mean.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit.kernels.gemm.strips_tiles import MOST_STAGES, ROOM, SMS
from ptxlab.spec import Sizes


class W8A8Tile(NamedTuple):
    """Most tokens; warp groups of 64 rows of W, up to three; channels of a stage."""

    BM: int
    WN: int
    BK: int


class W8A8Cost(NamedTuple):
    """Microseconds: of a stage; of a tile; of the launch; of adding up in a cluster of two."""

    stage: float
    tile: float
    launch: float
    split: float


# Infinite where choosing clusters of two would lose more than it gains.
COSTS = {
    W8A8Tile(16, 1, 256): W8A8Cost(0.435, 0.662, 0.000, 3.082),
    W8A8Tile(16, 2, 256): W8A8Cost(0.611, 3.729, 0.000, 0.000),
    W8A8Tile(32, 1, 256): W8A8Cost(0.264, 0.000, 2.918, math.inf),
    W8A8Tile(32, 3, 128): W8A8Cost(0.269, 3.866, 0.000, math.inf),
    W8A8Tile(64, 1, 256): W8A8Cost(0.352, 0.352, 1.886, math.inf),
    W8A8Tile(64, 3, 256): W8A8Cost(0.799, 4.580, 0.000, math.inf),
    W8A8Tile(128, 1, 128): W8A8Cost(0.232, 1.300, 0.000, math.inf),
    W8A8Tile(128, 2, 128): W8A8Cost(0.356, 1.605, 1.160, 4.003),
    W8A8Tile(128, 3, 128): W8A8Cost(0.499, 3.276, 0.553, math.inf),
    W8A8Tile(256, 2, 128): W8A8Cost(0.651, 2.998, 0.000, math.inf),
}
_BMS = tuple(dict.fromkeys(tile.BM for tile in COSTS))


class W8A8Choice(NamedTuple):
    """A tile for one matrix: stages of the ring; blocks that share a tile, each with a slice of K."""

    tile: W8A8Tile
    stages: int
    split: int

    @property
    def constants(self) -> dict[str, int]:
        """Constants of the variant."""
        return {**self.tile._asdict(), "STAGES": self.stages, "SPLIT": self.split}


def choose(s: Sizes) -> W8A8Choice:
    """Choose the quickest variant by the costs for sizes M, N, K."""
    tile, split = min(_candidates(s), key=lambda candidate: _microseconds(s, *candidate))
    room_bytes = ROOM - shared_bytes(tile, 0, split)
    return W8A8Choice(tile, min(room_bytes // _stage_bytes(tile), MOST_STAGES), split)


def count_tiles(s: Sizes, tile: W8A8Tile) -> int:
    """Count the tiles of Y."""
    return int(ceil_div(s["M"], tile.BM) * ceil_div(s["N"], 64 * tile.WN))


def shared_bytes(tile: W8A8Tile, stages: int, split: int) -> int:
    """Count dynamic shared memory: the ring, what a cluster's sum receives, a buffer per warp, the tokens' scales."""
    received = (split - 1) * (tile.WN * tile.BM // 8 // split) * 2048
    return stages * _stage_bytes(tile) + received + tile.WN * (4 * 512 + 8 * tile.BM)


def _candidates(s: Sizes) -> Iterator[tuple[W8A8Tile, int]]:
    """Yield tiles about as wide as there are tokens; K is split where all blocks run at once."""
    widest = next((BM for BM in _BMS if s["M"] <= BM), _BMS[-1])
    token_counts = {widest, *(BM for BM in _BMS if 32 <= BM < widest)}
    for tile, cost in COSTS.items():
        if tile.BM in token_counts:
            yield tile, 1
            if cost.split < math.inf and 2 * count_tiles(s, tile) <= SMS:
                yield tile, 2


def _stage_bytes(tile: W8A8Tile) -> int:
    return (tile.BM + 64 * tile.WN) * tile.BK


def _microseconds(s: Sizes, tile: W8A8Tile, split: int) -> float:
    """Estimate the microseconds of rounds of blocks, each as long as its stages and the end of its tile."""
    cost = COSTS[tile]
    rounds = ceil_div(count_tiles(s, tile) * split, SMS)
    stages = float(ceil_div(s["K"], tile.BK)) / split
    return rounds * (stages * cost.stage + cost.tile) + cost.launch + (cost.split if split > 1 else 0)
