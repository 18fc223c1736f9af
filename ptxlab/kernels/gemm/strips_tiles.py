"""Which tile `gemm_w4a8_sm90` takes: costs that were measured, and the rule that adds them up.

The costs are fits to sweeps over the layers of LLaMA-2-7B, -13B and -70B, Mixtral and Yi-34B on an H200, groups of 128
(`notebooks/results/h200/sweeps/gemm_strips.csv`). The tiles they choose are 1.2% from the best of each point in the
mean, and they say what a matrix that no sweep has seen will like.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from ptxlab.spec import Sizes

SMS = 132
ROOM = 232_448 - 1_536  # bytes of shared memory of a block, less its static ones
MOST_STAGES = 12


class Tile(NamedTuple):
    """Tokens; warp groups along the rows of W and along K; MMAs of 64 rows of each group; channels of a stage."""

    BM: int
    WN: int
    WK: int
    MN: int
    BK: int

    @property
    def strips(self) -> int:
        """Strips of 16 rows that fit."""
        return 4 * self.WN * self.MN


class Cost(NamedTuple):
    """Microseconds: of a stage, and per strip of it; of a tile; of the launch; of adding up in a cluster of two."""

    stage: float
    strip: float
    tile: float
    launch: float
    split: float


# Infinite where clusters of two were never better or the accumulators leave no room for them.
COSTS = {
    Tile(8, 1, 3, 1, 512): Cost(0.129, 0.084, 3.512, 0.000, math.inf),
    Tile(8, 2, 1, 1, 512): Cost(0.623, 0.012, 3.647, 0.000, 1.006),
    Tile(8, 2, 1, 2, 512): Cost(1.051, 0.000, 5.490, 0.000, 0.467),
    Tile(16, 1, 3, 1, 256): Cost(0.188, 0.019, 3.154, 0.000, 0.493),
    Tile(16, 2, 1, 1, 512): Cost(0.628, 0.017, 3.210, 0.410, 0.983),
    Tile(16, 2, 1, 2, 512): Cost(1.047, 0.020, 4.800, 0.000, 0.664),
    Tile(16, 2, 2, 1, 512): Cost(0.555, 0.015, 3.809, 0.000, 1.236),
    Tile(16, 3, 1, 1, 512): Cost(0.943, 0.000, 4.216, 0.222, 0.863),
    Tile(32, 1, 3, 1, 512): Cost(0.201, 0.075, 3.761, 0.000, 0.497),
    Tile(32, 2, 1, 1, 512): Cost(0.710, 0.016, 2.364, 1.238, 1.233),
    Tile(32, 3, 1, 1, 512): Cost(1.021, 0.000, 3.564, 1.055, 1.063),
    Tile(64, 1, 2, 1, 256): Cost(0.243, 0.012, 3.448, 0.000, 0.901),
    Tile(64, 2, 1, 1, 512): Cost(0.897, 0.011, 1.492, 2.587, 0.938),
    Tile(64, 2, 1, 2, 256): Cost(0.841, 0.002, 2.669, 2.256, 1.233),
    Tile(64, 2, 2, 1, 256): Cost(0.398, 0.010, 4.012, 0.000, 1.197),
    Tile(64, 3, 1, 1, 256): Cost(0.674, 0.001, 1.829, 2.583, 0.920),
    Tile(128, 1, 1, 2, 256): Cost(0.639, 0.004, 2.150, 1.678, 1.949),
    Tile(128, 1, 2, 1, 256): Cost(0.292, 0.029, 3.797, 0.000, 0.697),
    Tile(128, 2, 1, 2, 256): Cost(1.240, 0.000, 2.673, 0.921, math.inf),
    Tile(128, 3, 1, 1, 256): Cost(0.839, 0.009, 2.518, 1.483, math.inf),
    Tile(256, 1, 1, 1, 128): Cost(0.308, 0.008, 2.338, 0.984, 0.871),
    Tile(256, 2, 1, 1, 128): Cost(0.574, 0.006, 2.728, 0.893, math.inf),
}
_FULL = Tile(64, 2, 2, 1, 256)  # in a cluster, registers for the constants of groups of 128 alone
BMS = tuple(dict.fromkeys(tile.BM for tile in COSTS))


class Chosen(NamedTuple):
    """A tile for one matrix: its most strips, stages of the ring, blocks that share a tile, each with a slice of K."""

    tile: Tile
    strips: int
    stages: int
    split: int

    @property
    def constants(self) -> dict[str, int]:
        """Of the variant."""
        return {**self.tile._asdict(), "STRIPS": self.strips, "STAGES": self.stages, "SPLIT": self.split}


def choose(s: Sizes) -> Chosen:
    """The quickest by the costs. Sizes: M, N, K, g; and `rows`, the tokens of a tile of X, where X lies in tiles."""
    return min(_candidates(s), key=lambda chosen: (_microseconds(chosen, s), chosen.strips))


def tiles(s: Sizes, BM: int, strips: int) -> int:
    """Tiles of Y."""
    return -(-s["M"] // BM) * -(-_strips(s) // strips)


def shared_bytes(tile: Tile, strips: int, stages: int, split: int, group: int) -> int:
    """Dynamic shared memory: the ring; what a cluster's sum receives; a buffer per warp and the tokens' scales."""
    received = (split - 1) * (tile.WN * tile.MN * tile.BM // 8 // split) * 2048
    return stages * _stage_bytes(tile, strips, group) + received + tile.WN * (4 * 512 + 8 * tile.BM)


def _candidates(s: Sizes) -> Iterator[Chosen]:
    """Tiles about as wide as there are tokens, so high that the last round of blocks is full or nearly so."""
    widest = next((BM for BM in BMS if s["M"] <= BM), BMS[-1])
    wanted = {s["rows"]} if "rows" in s else {widest, *(BM for BM in BMS if 64 <= BM < widest)}
    for tile in COSTS:
        if tile.BM not in wanted:
            continue
        for split in _splits(tile, s["g"]):
            blocks, token_tiles = SMS // split, max(1, -(-s["M"] // tile.BM))
            heights = {-(-_strips(s) // rows) for n in range(1, 9) if (rows := n * blocks // token_tiles)}
            for strips in {min(tile.strips, height) for height in heights if height > tile.strips // 2} | {tile.strips}:
                once = tile.WK == split == 1 or tiles(s, tile.BM, strips) <= blocks
                stages = _stages(tile, strips, split, s["g"])
                if once and stages >= 2 * tile.WK:
                    yield Chosen(tile, strips, stages, split)


def _splits(tile: Tile, group: int) -> tuple[int, ...]:
    """Sizes of its clusters."""
    return (1, 2) if COSTS[tile].split < math.inf and (tile != _FULL or group == 128) else (1,)


def _stages(tile: Tile, strips: int, split: int, group: int) -> int:
    """As many as fit; none if what the warp groups along K add up through does not fit the ring."""
    stages = (ROOM - shared_bytes(tile, strips, 0, split, group)) // _stage_bytes(tile, strips, group)
    partial = (tile.WK - 1) * tile.WN * tile.MN * tile.BM // 8 * 2048
    return min(stages, MOST_STAGES) if stages * _stage_bytes(tile, strips, group) >= partial else 0


def _stage_bytes(tile: Tile, strips: int, group: int) -> int:
    """X, and of every strip a slot of whole 128 bytes."""
    slot = -(-tile.BK // 128 * (1024 + 128 // group * 32) // 128) * 128
    return -(-(tile.BM * tile.BK + strips * slot) // 1024) * 1024


def _strips(s: Sizes) -> int:
    return -(-s["N"] // 16)


def _microseconds(chosen: Chosen, s: Sizes) -> float:
    """Rounds of blocks, each as long as its stages and the end of its tile."""
    tile, cost = chosen.tile, COSTS[chosen.tile]
    rounds = -(-tiles(s, tile.BM, chosen.strips) // (SMS // chosen.split))
    height = _strips(s) / -(-_strips(s) // chosen.strips)
    stages = -(-s["K"] // tile.BK) / chosen.split
    once = stages * (cost.stage + cost.strip * height) + cost.tile
    return rounds * once + cost.launch + (cost.split if chosen.split > 1 else 0)
