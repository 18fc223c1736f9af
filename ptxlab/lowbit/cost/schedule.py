"""Schedules of tiles on SMs (COMET §4.4), simulated: which SM works on which tile, from when, until when.

A GEMM Y [M, N] = X [M, K] Wᵀ with mixed activations is cut into tiles of 128 x 128 x 128. A tile takes as long as the
block of 128 channels that it multiplies says: INT4 or INT8, the latter with the conversion of its weights. Schedules:

    naive       tile i of the grid on SM i mod S, and a barrier after every S tiles (COMET Fig. 8b)
    in order    the same tiles on the same SMs, no barriers (Fig. 8c)
    remapped    INT8 tiles first, each tile on the SM that is free first (Fig. 8d)
    decomposed  remapped, then SMs that would idle take quarters (64 x 64) of the last tiles of busy ones, beforehand
    stealing    remapped, then the last tiles' quarters go to whoever is free, at run time as in COMET (Fig. 8e)

The kernels `gemm_w4ax_inorder_sm80`, `_remap_`, `_comet_` and `_steal_sm80` have the orders but for the first.

A remapped schedule never takes longer than a naive one. With INT8 tiles first, as few rounds as possible wait for one.
And without barriers no tile of such a round ends later: while the S tiles of a round are placed, some SM has none of
them yet, and is free when the round begins at the latest. A decomposed schedule only gives away what then ends earlier.
Left out: loads, the reduction over K of tiles on different SMs, and what a cut tile loads twice.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ptxlab.errors import ArgumentError

TILE = 128
PIECES = 4  # that a tile can be cut into: 64 x 64 of Y each, what one warp multiplies
_WHOLE = range(PIECES)
_ROUNDING = 1e-9
_MOST_TILES, _MOST_SMS = 2_000_000, 100_000  # some seconds, and as many hundred MB
_LONGEST = 1e6  # time of a tile: sums of `_MOST_TILES` stay exact enough
SCHEDULES = ("naive", "in order", "remapped", "decomposed", "stealing")


class Tile(NamedTuple):
    """Position of a tile along M, N and K in tiles, and whether its block of channels is INT8."""

    m: int
    n: int
    k: int
    int8: bool


class TileWork(NamedTuple):
    """Pieces of a tile, of `PIECES`, that one SM works on from start to end."""

    sm: int
    tile: Tile
    pieces: range
    start: float
    end: float


@dataclass(frozen=True)
class Costs:
    """Times of a tile, in any unit: `int4`; `int8` without, and `conversion` for, the conversion of its weights."""

    int4: float = 1.0
    int8: float = 2.0
    conversion: float = 0.0

    def __post_init__(self) -> None:
        for name in ("int4", "int8"):
            if not 0 < getattr(self, name) <= _LONGEST:
                raise ArgumentError(name, f"a time above 0, at most {_LONGEST:.0e}", getattr(self, name))
        if not 0 <= self.conversion <= _LONGEST:
            raise ArgumentError("conversion", f"a time of 0 to {_LONGEST:.0e}", self.conversion)

    @property
    def ratio(self) -> float:
        """Time of an INT8 tile with its conversion over that of an INT4 tile."""
        return (self.int8 + self.conversion) / self.int4

    def of(self, tile: Tile) -> float:
        """Return the time of a whole tile."""
        return self.int8 + self.conversion if tile.int8 else self.int4


def int8_blocks(blocks: int, share: float, *, spread: bool = False) -> frozenset[int]:
    """Choose the indices of the INT8 blocks along K: a share of all blocks, the last ones or evenly spread."""
    if blocks < 1:
        raise ArgumentError("blocks", "at least 1", blocks)
    if not 0 <= share <= 1:
        raise ArgumentError("share", "0 to 1", share)
    count = round(share * blocks)
    if not spread:
        return frozenset(range(blocks - count, blocks))
    return frozenset(i for i in range(blocks) if i * count // blocks != (i + 1) * count // blocks)


def grid(M: int, N: int, K: int, int8: frozenset[int] = frozenset(), *, k_first: bool = True) -> list[Tile]:
    """List the tiles in the order of the grid; a tile is INT8 if its k is in `int8`.

    `k_first`: neighbours share a tile of Y and differ in k; else they share k and differ in n.
    """
    for name, size in {"M": M, "N": N, "K": K}.items():
        if size < 1:
            raise ArgumentError(name, "at least 1", size)
    rows, columns, blocks = (math.ceil(size / TILE) for size in (M, N, K))
    if rows * columns * blocks > _MOST_TILES:
        raise ArgumentError("M, N, K", f"at most {_MOST_TILES:,} tiles of {TILE} x {TILE} x {TILE}", f"{M}, {N}, {K}")
    if k_first:
        places = ((m, n, k) for m in range(rows) for n in range(columns) for k in range(blocks))
    else:
        places = ((m, n, k) for k in range(blocks) for m in range(rows) for n in range(columns))
    return [Tile(m, n, k, k in int8) for m, n, k in places]


def schedule(name: str, tiles: Sequence[Tile], sms: int, costs: Costs) -> list[TileWork]:
    """Schedule the tiles by one of `SCHEDULES`."""
    if name not in SCHEDULES:
        raise ArgumentError("schedule", f"one of {', '.join(SCHEDULES)}", name)
    functions = dict(zip(SCHEDULES, (naive, in_order, remapped, decomposed, work_stealing), strict=True))
    return functions[name](tiles, sms, costs)


def naive(tiles: Sequence[Tile], sms: int, costs: Costs) -> list[TileWork]:
    """Schedule rounds of one tile per SM; a round ends with its slowest tile."""
    _require_sms(sms)
    works: list[TileWork] = []
    start = 0.0
    for first in range(0, len(tiles), sms):
        round_tiles = tiles[first : first + sms]
        works += [TileWork(sm, tile, _WHOLE, start, start + costs.of(tile)) for sm, tile in enumerate(round_tiles)]
        start += max(map(costs.of, round_tiles))
    return works


def in_order(tiles: Sequence[Tile], sms: int, costs: Costs) -> list[TileWork]:
    """Put tiles on the SMs of `naive`, each as soon as the one before it is done."""
    _require_sms(sms)
    end_times, works = [0.0] * sms, []
    for index, tile in enumerate(tiles):
        sm = index % sms
        works.append(TileWork(sm, tile, _WHOLE, end_times[sm], end_times[sm] + costs.of(tile)))
        end_times[sm] = works[-1].end
    return works


def remapped(tiles: Sequence[Tile], sms: int, costs: Costs) -> list[TileWork]:
    """Schedule the longest tiles first, each on the SM that is free first (of several the lowest).

    Tiles of equal length keep the order of the grid.
    """
    _require_sms(sms)
    free_sms = [(0.0, sm) for sm in range(sms)]
    works = []
    for tile in sorted(tiles, key=costs.of, reverse=True):
        start, sm = free_sms[0]
        works.append(TileWork(sm, tile, _WHOLE, start, start + costs.of(tile)))
        heapq.heapreplace(free_sms, (works[-1].end, sm))
    return works


def decomposed(tiles: Sequence[Tile], sms: int, costs: Costs) -> list[TileWork]:
    """Schedule as `remapped`, then move pieces of tiles from the SM that ends last to the one that ends first.

    Pieces move while the receiving SM still ends earlier than the giving one did.
    """
    lists: list[list[TileWork]] = [[] for _ in range(sms)]
    for work in remapped(tiles, sms, costs):
        lists[work.sm].append(work)
    end_times = [works[-1].end if works else 0.0 for works in lists]
    while tiles:
        busy_sm, idle_sm = max(range(sms), key=end_times.__getitem__), min(range(sms), key=end_times.__getitem__)
        work = lists[busy_sm].pop()
        piece = costs.of(work.tile) / PIECES
        if end_times[idle_sm] + piece >= end_times[busy_sm] * (1 - _ROUNDING):
            lists[busy_sm].append(work)
            break
        if remaining_pieces := work.pieces[:-1]:
            lists[busy_sm].append(
                work._replace(pieces=remaining_pieces, end=work.start + len(remaining_pieces) * piece)
            )
        end_times[busy_sm] = lists[busy_sm][-1].end if lists[busy_sm] else 0.0
        lists[idle_sm].append(
            TileWork(idle_sm, work.tile, work.pieces[-1:], end_times[idle_sm], end_times[idle_sm] + piece)
        )
        end_times[idle_sm] += piece
    return [work for works in lists for work in works]


def work_stealing(tiles: Sequence[Tile], sms: int, costs: Costs) -> list[TileWork]:
    """Remap, but give away the last tile of every SM that would end later than the first, by quarters.

    An SM that is free takes the next quarter of its own such tile; if it has none left, of the next SM's that has one.
    """
    lists: list[list[TileWork]] = [[] for _ in range(sms)]
    for work in remapped(tiles, sms, costs):
        lists[work.sm].append(work)
    end_times = [sm_works[-1].end if sm_works else 0.0 for sm_works in lists]
    late_sms = [sm for sm in range(sms) if end_times[sm] * (1 - _ROUNDING) > min(end_times)]
    cut_tiles = {sm: lists[sm].pop().tile for sm in late_sms}
    pieces_left = {sm: [*_WHOLE] for sm in late_sms}
    free_sms = [(lists[sm][-1].end if lists[sm] else 0.0, sm) for sm in range(sms)]
    heapq.heapify(free_sms)
    while any(pieces_left.values()):
        start, sm = free_sms[0]
        first_victim = late_sms.index(sm) if sm in cut_tiles else sm % len(late_sms)  # its own tile first
        victim_sm = next(
            late_sm for late_sm in late_sms[first_victim:] + late_sms[:first_victim] if pieces_left[late_sm]
        )
        piece, tile = pieces_left[victim_sm].pop(0), cut_tiles[victim_sm]
        lists[sm].append(TileWork(sm, tile, range(piece, piece + 1), start, start + costs.of(tile) / PIECES))
        heapq.heapreplace(free_sms, (lists[sm][-1].end, sm))
    return [work for sm_works in lists for work in sm_works]


def makespan(works: Sequence[TileWork]) -> float:
    """Return the time at which the last SM is done; 0 without work."""
    return max((work.end for work in works), default=0.0)


def lower_bounds(tiles: Sequence[Tile], sms: int, costs: Costs) -> tuple[float, float]:
    """Lower bounds of a makespan: all work over all SMs, and the longest tile (not if tiles are cut)."""
    _require_sms(sms)
    times = [*map(costs.of, tiles)]
    return sum(times) / sms, max(times, default=0.0)


def w4a8(tiles: Sequence[Tile], sms: int, costs: Costs) -> float:
    """Compute the makespan of the same tiles, all INT8 with conversion: the baseline of COMET's Fig. 10."""
    _require_sms(sms)
    return math.ceil(len(tiles) / sms) * (costs.int8 + costs.conversion)


def _require_sms(sms: int) -> None:
    if not 1 <= sms <= _MOST_SMS:
        raise ArgumentError("sms", f"1 to {_MOST_SMS:,}", sms)


def layer_speedups(
    matrices: Iterable[tuple[int, int]],
    M: int,
    sms: int,
    costs: Costs,
    *,
    int4_share: float = 0.75,
    spread: bool = False,
    k_first: bool = False,
) -> dict[str, float]:
    """Compute the speed-up of each schedule over W4A8, on matrices (N, K) one after the other."""
    total_times, base = dict.fromkeys(SCHEDULES, 0.0), 0.0
    for N, K in matrices:
        tiles = grid(M, N, K, int8_blocks(math.ceil(K / TILE), 1 - int4_share, spread=spread), k_first=k_first)
        base += w4a8(tiles, sms, costs)
        for name in SCHEDULES:
            total_times[name] += makespan(schedule(name, tiles, sms, costs))
    return {name: base / time for name, time in total_times.items()}


def rate_bound(int4_share: float, ratio: float) -> float:
    """Compute the largest speed-up over W4A8 with this share of INT4, if an INT8 tile takes `ratio` INT4 tiles."""
    return 1 / (1 - int4_share + int4_share / ratio)


def ratio_needed(int4_share: float, speedup: float) -> float:
    """Compute the ratio at which `rate_bound` is this speed-up; infinite if INT4 tiles would have to take no time."""
    remaining_share = 1 / speedup - (1 - int4_share)
    return int4_share / remaining_share if remaining_share > 0 else math.inf


# COMET §6.4, Fig. 10: over W4A8 on an A100's 108 SMs, 75% INT4, batches of 16 to 256.
COMET_SMS, COMET_INT4, COMET_TOKENS = 108, 0.75, (16, 64, 256)
COMET = {
    "LLaMA-3-8B": {"naive": 1.31, "remapped": 1.56, "decomposed": 1.71},
    "LLaMA-3-70B": {"naive": 1.18, "remapped": 1.60, "decomposed": 1.67},
}
