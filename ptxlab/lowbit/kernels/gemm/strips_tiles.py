"""Which tile `gemm_w4a8_sm90` takes: costs that were measured, and the rule that adds them up.

The costs are fits to a sweep over layers of LLaMA-2-7B, -13B and -70B, LLaMA-3-8B, Mixtral and Yi-34B on an H200,
groups of 128 (`notebooks/results/h200/sweeps/gemm_strips.csv`). The tiles they choose are 0.8% from the best of each
point in the mean, and they say what a matrix that no sweep has seen will like. Weights without groups take a twentieth
less in most tiles, so the same costs choose for them, but for one (`UNGROUPED_FACTORS`): 0.8% from the best
(`gemm_strips_channel.csv`).
"""

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit.cost import SHEETS
from ptxlab.spec import Sizes

TUNED = SHEETS["h200"]  # where the costs were measured
SMS = TUNED.sms
NO_GROUPS = 0  # as a group: constants per channel alone
ROOM = 232_448 - 1_536  # bytes of shared memory of a block, less its static ones
MOST_STAGES = 12


class StripTile(NamedTuple):
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


class StripCost(NamedTuple):
    """Costs in microseconds.

    `stage` is a stage, `wide` its surplus for all tokens of the kind, `strip` its surplus per strip; `tile` is a tile,
    `launch` the launch, `split` adding up in a cluster of two. `drain` is the least on top of the stream of the
    weights.
    """

    stage: float
    wide: float
    strip: float
    tile: float
    launch: float
    split: float
    drain: float


# Costs of the widest tile of a kind. A tile of fewer tokens, down to the next kind, differs in narrower MMAs alone.
COSTS = {
    StripTile(8, 1, 3, 1, 512): StripCost(0.370, 0.000, 0.000, 2.500, 0.000, 1.880, 1.8),
    StripTile(8, 2, 1, 1, 512): StripCost(0.677, 0.000, 0.000, 3.655, 0.000, 0.353, 2.5),
    StripTile(8, 2, 1, 2, 512): StripCost(1.117, 0.000, 0.000, 3.790, 0.000, 0.352, 3.8),
    StripTile(8, 2, 2, 1, 512): StripCost(0.599, 0.000, 0.000, 3.278, 0.000, 0.865, 2.5),
    StripTile(8, 3, 1, 1, 512): StripCost(0.888, 0.000, 0.000, 3.570, 0.000, 0.681, 3.2),
    StripTile(16, 1, 2, 1, 512): StripCost(0.383, 0.000, 0.011, 2.500, 0.000, 1.887, 2.1),
    StripTile(16, 1, 3, 1, 256): StripCost(0.204, 0.000, 0.025, 2.688, 0.000, 0.526, 1.9),
    StripTile(16, 2, 1, 1, 512): StripCost(0.733, 0.000, 0.000, 3.415, 0.000, 0.680, 2.8),
    StripTile(16, 2, 1, 2, 512): StripCost(1.400, 0.000, 0.000, 4.004, 0.000, 0.704, 3.5),
    StripTile(16, 2, 2, 1, 512): StripCost(0.624, 0.000, 0.000, 3.369, 0.000, 1.049, 2.7),
    StripTile(16, 3, 1, 1, 512): StripCost(0.959, 0.000, 0.000, 3.511, 0.000, 0.787, 3.7),
    StripTile(32, 1, 2, 1, 512): StripCost(0.393, 0.000, 0.000, 3.579, 0.000, 0.000, 2.5),
    StripTile(32, 2, 1, 1, 512): StripCost(0.812, 0.000, 0.000, 3.371, 0.000, 0.886, 3.4),
    StripTile(32, 2, 1, 2, 256): StripCost(0.716, 0.000, 0.000, 3.715, 0.000, 0.552, 4.4),
    StripTile(32, 3, 1, 1, 512): StripCost(1.018, 0.000, 0.003, 3.847, 0.000, 0.765, 3.9),
    StripTile(64, 1, 2, 1, 256): StripCost(0.143, 0.077, 0.021, 3.200, 0.000, 0.967, 2.8),
    StripTile(64, 2, 1, 1, 512): StripCost(0.732, 0.190, 0.003, 1.855, 1.944, 1.139, 3.8),
    StripTile(64, 2, 1, 2, 256): StripCost(0.469, 0.378, 0.001, 3.575, 0.122, 1.984, 5.0),
    StripTile(64, 2, 2, 1, 256): StripCost(0.259, 0.186, 0.003, 3.623, 0.000, 1.335, 4.1),
    StripTile(64, 3, 1, 1, 256): StripCost(0.429, 0.238, 0.000, 2.621, 1.182, 1.089, 4.3),
    StripTile(128, 1, 1, 2, 256): StripCost(0.638, 0.039, 0.000, 2.344, 1.387, 2.153, 7.4),
    StripTile(128, 1, 2, 1, 256): StripCost(0.000, 0.379, 0.005, 3.672, 0.000, 1.627, 3.9),
    StripTile(128, 2, 1, 1, 256): StripCost(0.174, 0.479, 0.004, 2.281, 1.287, 1.596, 5.9),
    StripTile(128, 2, 1, 2, 128): StripCost(0.148, 0.474, 0.000, 4.652, 0.076, math.inf, 8.5),
    StripTile(128, 2, 1, 2, 256): StripCost(0.575, 0.626, 0.005, 2.725, 0.571, math.inf, 10.6),
    StripTile(128, 3, 1, 1, 128): StripCost(0.204, 0.296, 0.000, 3.167, 0.995, 1.155, 6.3),
    StripTile(128, 3, 1, 1, 256): StripCost(0.143, 0.774, 0.001, 3.229, 1.068, 2.557, 8.7),
    StripTile(256, 1, 1, 1, 128): StripCost(0.082, 0.210, 0.013, 2.446, 1.104, 1.425, 6.1),
    StripTile(256, 2, 1, 1, 128): StripCost(0.000, 0.600, 0.000, 3.873, 0.415, 2.132, 8.9),
}
# Weights without groups take so much of a stage's time in the one tile where the sweep finds enough of a difference to
# choose by: two warp groups of 64 rows x 128 tokens, outside a cluster.
UNGROUPED_FACTORS = {StripTile(128, 2, 1, 1, 256): 0.91}
_REGISTER_BOUND = StripTile(64, 2, 2, 1, 256)  # in a cluster, registers for the constants of groups of 128 alone
_KIND_WIDTHS = tuple(dict.fromkeys(tile.BM for tile in COSTS))
BMS = (8, 16, 32, *range(48, 257, 16))  # as wide as wgmma comes, but for 24


class StripChoice(NamedTuple):
    """A tile for one matrix: its most strips, stages of the ring, blocks that share a tile, each with a slice of K."""

    tile: StripTile
    strips: int
    stages: int
    split: int

    @property
    def constants(self) -> dict[str, int]:
        """Constants of the variant."""
        return {**self.tile._asdict(), "STRIPS": self.strips, "STAGES": self.stages, "SPLIT": self.split}


def choose(s: Sizes) -> StripChoice:
    """Choose the quickest variant by the costs.

    Sizes: M, N, K, `g` of weights with groups, and `rows`, the tokens of a tile of X, where X lies in tiles. In tens to
    hundreds of microseconds; what was chosen is kept.
    """
    return _choose(int(s["M"]), int(s["N"]), int(s["K"]), group_of(s), int(s.get("rows", 0)), SMS)


@lru_cache(maxsize=16_384)
def _choose(M: int, N: int, K: int, group: int, rows: int, sms: int) -> StripChoice:
    """Choose for sizes as numbers and a GPU of `SMS`; rows is 0 where X does not lie in tiles."""
    strips, channels = ceil_div(N, 16), ceil_div(K, 128)
    stream_us = TUNED.stream_us(strips * channels * block_bytes(group))

    def cost(choice: StripChoice) -> tuple[float, int]:
        return _total(choice, M, strips, K, group, stream_us, sms), choice.strips

    return min(_candidates(M, strips, group, rows, sms), key=cost)


def count_tiles(s: Sizes, BM: int, strips: int) -> int:
    """Count the tiles of Y."""
    return int(ceil_div(s["M"], BM) * ceil_div(_strips(s), strips))


def group_of(s: Sizes) -> int:
    """Return the kernels' constant GROUP: the weights per level-2 scale, or NO_GROUPS."""
    return int(s.get("g", NO_GROUPS))


def block_bytes(group: int) -> int:
    """Count the bytes of 16 rows x 128 channels."""
    return 1024 + (128 // group * 32 if group else 0)


def shared_bytes(tile: StripTile, strips: int, stages: int, split: int, group: int) -> int:
    """Count dynamic shared memory: the ring, what a cluster's sum receives, a buffer per warp, the tokens' scales."""
    received = (split - 1) * ceil_div(ceil_div(tile.WN * tile.MN * tile.BM, 8), split) * 2048
    return stages * _stage_bytes(tile, strips, group) + received + tile.WN * (4 * 512 + 8 * tile.BM)


@lru_cache
def widest_of_kind(tile: StripTile) -> StripTile:
    """Return the widest tile of this tile's kind, under which the costs are listed."""
    return tile._replace(BM=next(BM for BM in _KIND_WIDTHS if tile.BM <= BM))


def candidate_widths(M: int) -> list[int]:
    """List the tokens of a tile worth trying: the least that do where one has up to 256, 128 or 64."""
    token_shares = [ceil_div(M, max(1, ceil_div(M, limit))) for limit in (256, 128, 64)]
    return sorted({next(BM for BM in BMS if share <= BM) for share in token_shares})


def tiles_of_widths(token_counts: Iterable[int]) -> Iterator[StripTile]:
    """Yield every tile of known cost that has one of these numbers of tokens."""
    for tile in COSTS:
        narrower_tiles = (tile._replace(BM=BM) for BM in token_counts)
        yield from (narrower_tile for narrower_tile in narrower_tiles if widest_of_kind(narrower_tile) == tile)


@lru_cache(maxsize=1024)
def _tiles_with_splits(token_counts: tuple[int, ...], group: int) -> tuple[tuple[StripTile, int], ...]:
    """Return every tile of known cost with one of these numbers of tokens, with each size of its clusters."""
    return tuple((tile, split) for tile in tiles_of_widths(token_counts) for split in _splits(tile, group))


def _candidates(M: int, all_strips: int, group: int, rows: int, sms: int) -> Iterator[StripChoice]:
    """Yield tiles about as wide as there are tokens, so high that the last round of blocks is full or nearly so."""
    for tile, split in _tiles_with_splits((rows,) if rows else tuple(candidate_widths(M)), group):
        blocks, token_tiles = sms // split, max(1, ceil_div(M, tile.BM))
        heights = {ceil_div(all_strips, share) for n in range(1, 9) if (share := n * blocks // token_tiles)}
        for strips in {min(tile.strips, height) for height in heights if height > tile.strips // 2} | {tile.strips}:
            # Blocks of a cluster, and those with warp groups along K, do one tile each: all must run at once.
            is_possible = tile.WK == split == 1 or ceil_div(M, tile.BM) * ceil_div(all_strips, strips) <= blocks
            if is_possible and (stages := _stages(tile, strips, split, group)) >= 2 * tile.WK:
                yield StripChoice(tile, strips, stages, split)


def _splits(tile: StripTile, group: int) -> tuple[int, ...]:
    """Return the cluster sizes of a tile."""
    widest_tile = widest_of_kind(tile)
    fits_registers = widest_tile != _REGISTER_BOUND or group in (128, NO_GROUPS)
    return (1, 2) if COSTS[widest_tile].split < math.inf and fits_registers else (1,)


@lru_cache(maxsize=16_384)
def _stages(tile: StripTile, strips: int, split: int, group: int) -> int:
    """Count the stages that fit; 0 if the ring is too small for the sums of the warp groups along K."""
    stages = (ROOM - shared_bytes(tile, strips, 0, split, group)) // _stage_bytes(tile, strips, group)
    partial_bytes = (tile.WK - 1) * tile.WN * tile.MN * tile.BM // 8 * 2048
    return min(stages, MOST_STAGES) if stages * _stage_bytes(tile, strips, group) >= partial_bytes else 0


def _stage_bytes(tile: StripTile, strips: int, group: int) -> int:
    """Count the bytes of a stage: X, and of every strip a slot of whole 128 bytes."""
    slot = ceil_div(ceil_div(tile.BK, 128) * block_bytes(group), 128) * 128
    return ceil_div(tile.BM * tile.BK + strips * slot, 1024) * 1024


def _strips(s: Sizes) -> int:
    return int(ceil_div(s["N"], 16))


def microseconds(choice: StripChoice, s: Sizes) -> float:
    """Estimate the microseconds of a choice by the costs, but not less than the stream allows.

    They are rounds of blocks, each as long as its stages and the end of its tile.
    """
    return _total(choice, int(s["M"]), _strips(s), int(s["K"]), group_of(s), stream_microseconds(s), SMS)


def _total(choice: StripChoice, M: int, all_strips: int, K: int, group: int, stream_us: float, sms: int) -> float:
    """Estimate the microseconds of a choice for sizes as numbers."""
    tile, strips, _, split = choice
    cost = COSTS[widest_of_kind(tile)]
    tile_rows = ceil_div(all_strips, strips)
    rounds = ceil_div(ceil_div(M, tile.BM) * tile_rows, sms // split)
    tile_us = tile_microseconds(tile, ceil_div(K, tile.BK) / split, all_strips / tile_rows, group, split)
    return max(rounds * tile_us + cost.launch + (cost.split if split > 1 else 0), stream_us + cost.drain)


@lru_cache(maxsize=65_536)
def tile_microseconds(tile: StripTile, stages: float, height: float, group: int, split: int = 1) -> float:
    """Estimate the microseconds of a tile: `stages` stages of `height` strips, and its end."""
    widest_tile = widest_of_kind(tile)
    cost = COSTS[widest_tile]
    stage = cost.stage + cost.wide * tile.BM / widest_tile.BM + cost.strip * height
    discount = UNGROUPED_FACTORS.get(widest_tile, 1) if group == NO_GROUPS and split == 1 else 1
    return stages * stage * discount + cost.tile


def stream_microseconds(s: Sizes) -> float:
    """Estimate the microseconds of a kernel that does nothing but stream the weights."""
    return TUNED.stream_us(_strips(s) * ceil_div(s["K"], 128) * block_bytes(group_of(s)))
