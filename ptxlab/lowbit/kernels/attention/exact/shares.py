"""How attention_kv4_sm90 shares out its work: which block has which tiles of what (`segments.cuh`), on the host."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit.kernels.attention.sm90 import EXTRA, MOST_PARTS, SLACK, TILE

S64: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shares:
    """Segments [n], the parts of units that one block has, in the order of units and tokens.

    Attributes:
        sequence, head, split: of the unit.
        number: of the unit; the units that have tokens are numbered.
        position: the first token of the segment's first tile.
        tiles: how many.
        turn: the group of warps that takes the first.
        first: of each unit [units], its first segment; the others follow.
        parts: of each unit [units], its segments, in as many blocks.
    """

    sequence: S64
    head: S64
    split: S64
    number: S64
    position: S64
    tiles: S64
    turn: S64
    first: S64
    parts: S64

    @classmethod
    def of(
        cls, lengths: S64, *, heads: int, splits: int, queries: int, window: int, groups: int, blocks: int, part: int
    ) -> "Shares":
        """Share out the work of sequences of these lengths.

        Each sequence has heads·splits units, and `queries` new tokens that see `window`. With `part` a unit is cut
        every so many tiles, and each part counts as a block's own.
        """
        begin = np.maximum(lengths - queries + 1 - window, 0) // TILE if window else np.zeros_like(lengths)
        tiles = ceil_div(lengths, TILE) - begin
        pad = np.where(lengths > 0, np.maximum(EXTRA - tiles // 4, 0), 0)  # the cost of a unit of few tiles beside them
        units, cost = heads * splits, pad + tiles
        block_cost = _choose_block_cost(cost, units, groups, blocks)

        unit_sequence = np.repeat(np.arange(len(lengths)), units)  # the sequence of each unit
        unit_start = np.cumsum(cost[unit_sequence]) - tiles[unit_sequence]  # where a unit's tiles lie among all costs
        has_tiles = tiles[unit_sequence] > 0
        unit_sequence, unit_start = unit_sequence[has_tiles], unit_start[has_tiles]
        unit = np.tile(np.arange(units), len(lengths))[has_tiles]
        share_cost = np.full(len(unit_sequence), block_cost)  # of a block, or of a part, where each unit is cut
        if part:
            unit_start = np.zeros_like(unit_start)
            share_cost = np.maximum(part, ceil_div(tiles[unit_sequence], MOST_PARTS))
        unit_stop = unit_start + tiles[unit_sequence]
        parts = ceil_div(unit_stop, share_cost) - unit_start // share_cost

        number = np.repeat(np.arange(len(unit_sequence)), parts)
        first, segment = np.cumsum(parts) - parts, np.arange(len(number))
        share_index = unit_start[number] // share_cost[number] + segment - first[number]
        segment_start = np.maximum(unit_start[number], share_index * share_cost[number])
        segment_stop = np.minimum(unit_stop[number], (share_index + 1) * share_cost[number])
        block = segment if part else share_index
        count, sequence = segment_stop - segment_start, unit_sequence[number]
        tiles_before = np.cumsum(count) - count  # tiles of the blocks before, and of this block's segments before
        first_of_block = np.searchsorted(block, block)  # its first segment
        return cls(
            sequence=sequence,
            head=unit[number] // splits,
            split=unit[number] % splits,
            number=number,
            position=(begin[sequence] + segment_start - unit_start[number]) * TILE,
            tiles=count,
            turn=(tiles_before - tiles_before[first_of_block]) % groups,
            first=first,
            parts=parts,
        )


def _choose_block_cost(cost: S64, units: int, groups: int, blocks: int) -> int:
    """Choose the cost of every block's share: even, or whole units where all are alike and that costs little more."""
    max_cost = max(1, int(cost.max(initial=0)))
    block_cost = max(groups, min(max_cost // 8, 8), ceil_div(int(cost.sum()) * units, blocks))
    whole_units_cost = ceil_div(len(cost) * units, blocks) * max_cost
    costs_alike = bool((cost == max_cost).all())
    takes_whole_units = costs_alike and block_cost <= whole_units_cost <= block_cost + SLACK
    return whole_units_cost if takes_whole_units else block_cost
