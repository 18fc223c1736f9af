"""Which tile `gemm_w4a4_sm90` and `gemm_w4ax_sm90` take, by measured costs, and what a launch of it needs.

The costs are fits to a sweep over matrices of LLaMA-2 on an H100 (`notebooks/results/h100/sweeps/w4a4_tiles.csv`). They
rank tiles; with few tokens a launch takes up to twice as long. What they choose is 3% from the best of the sweep in the
mean for W4A4 (10% at 16 tokens, 3% at 64, below 1% beyond), and 1% for W4Ax (4% at 16). Fewer tokens were not swept.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit.kernels.gemm import strips_tiles
from ptxlab.lowbit.kernels.gemm.strips_tiles import MOST_STAGES, ROOM, count_tiles
from ptxlab.lowbit.layout.atom import OUTLIER_BYTES, strip_bytes
from ptxlab.spec import Launch, Sizes


class GroupTile(NamedTuple):
    """Tokens; warp groups, each with 64 rows of W; groups of channels that a warp group has under wgmma at once."""

    BM: int
    WN: int
    TOGETHER: int


class GroupCost(NamedTuple):
    """Microseconds: of a stage of 128 channels; of a tile besides."""

    stage: float
    tile: float


class Tiles(NamedTuple):
    """Tiles that a kernel may take, with their costs, and bytes of a stage by BM and WN."""

    costs: Mapping[GroupTile, GroupCost]
    stage_bytes: Callable[[int, int], int]


def choose(kernel: Tiles, s: Sizes, channels: int) -> dict[str, int]:
    """Choose BM, WN and TOGETHER of the tile with the quickest rounds of blocks, and as many STAGES as fit.

    `channels` are those of a token; of the sizes M and N count.
    """

    def microseconds(tile: GroupTile) -> float:
        rounds = ceil_div(count_tiles(s, tile.BM, 4 * tile.WN), strips_tiles.SMS)
        return rounds * (channels / 128 * kernel.costs[tile].stage + kernel.costs[tile].tile)

    best_width = min(kernel.costs, key=microseconds)
    stages = (ROOM - _buffer_bytes(best_width.WN)) // kernel.stage_bytes(best_width.BM, best_width.WN)
    return {**best_width._asdict(), "STAGES": min(stages, MOST_STAGES)}


def launch(kernel: Tiles, s: Sizes) -> Launch:
    """Return the launch of persistent blocks: one warp group loads, WN multiply."""
    BM, WN = s["BM"], s["WN"]
    shared_memory = s["STAGES"] * kernel.stage_bytes(BM, WN) + _buffer_bytes(WN)
    return Launch((min(count_tiles(s, BM, 4 * WN), strips_tiles.SMS), 1, 1), (128 * (WN + 1), 1, 1), shared_memory)


def _stage_bytes_w4a4(BM: int, WN: int) -> int:
    """Count the bytes of a stage of W4A4.

    A stage has 128 channels of X, their scales, and those spread for two groups; and a block of every strip, as large
    as one of outliers.
    """
    return _whole_kilobytes(BM * (128 + 16) + 2 * _spread_bytes(BM) + 4 * WN * OUTLIER_BYTES)


def _stage_bytes_w4ax(BM: int, WN: int) -> int:
    """Count the bytes of a stage of W4Ax.

    A stage has 128 channels of X as bytes and as pairs, their scales, those spread, and a block of every strip.
    """
    return _whole_kilobytes(BM * (128 + 64 + 16) + _spread_bytes(BM) + 4 * WN * strip_bytes(128, 0, 128))


def _spread_bytes(BM: int) -> int:
    """Count the bytes of a group's scales as floats, for whole sixteens of tokens."""
    return ceil_div(BM, 16) * 64


def _buffer_bytes(WN: int) -> int:
    """Count the bytes behind the ring: 512 per warp."""
    return WN * 4 * 512


def _whole_kilobytes(nbytes: int) -> int:
    return ceil_div(nbytes, 1024) * 1024


W4A4 = Tiles(
    {
        GroupTile(16, 1, 2): GroupCost(0.174, 1.92),
        GroupTile(16, 2, 4): GroupCost(0.299, 0.44),
        GroupTile(32, 1, 4): GroupCost(0.129, 6.00),
        GroupTile(32, 2, 1): GroupCost(0.298, 1.13),
        GroupTile(64, 1, 2): GroupCost(0.224, 6.00),
        GroupTile(64, 2, 2): GroupCost(0.401, 0.83),
        GroupTile(64, 3, 1): GroupCost(0.599, 0.10),
        GroupTile(128, 2, 1): GroupCost(0.623, 1.80),
    },
    _stage_bytes_w4a4,
)
W4AX = Tiles(
    {
        GroupTile(16, 1, 2): GroupCost(0.256, 0.89),
        GroupTile(16, 2, 2): GroupCost(0.311, 0.42),
        GroupTile(16, 4, 2): GroupCost(0.473, 0.00),
        GroupTile(32, 2, 1): GroupCost(0.391, 1.33),
        GroupTile(32, 3, 2): GroupCost(0.493, 0.83),
        GroupTile(64, 2, 1): GroupCost(0.609, 1.39),
        GroupTile(64, 3, 1): GroupCost(0.733, 1.05),
        GroupTile(96, 3, 1): GroupCost(1.023, 1.77),
    },
    _stage_bytes_w4ax,
)
