"""Shadow memory: what a check knows of each byte of memory.

Most accesses are of 4 to 16 bytes, and bytes that are used together carry the same. So a shadow is looked at in *units*
of several bytes where each of them is uniform, and byte by byte elsewhere; the answer is the same. It is kept in units
too, as long as nothing smaller is set.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from ptxlab.emulator.front.types import Array

UNITS = (16, 8, 4, 2, 1)  # bytes


class Shadow:
    """A number for each byte of memory, whose size is a multiple of 16; stored in cells of 1 to 16 bytes."""

    def __init__(self, size: int) -> None:
        self.grain = UNITS[0]  # bytes of a cell, the smallest unit that anything has been set in
        self.cells = np.zeros(size // self.grain, np.uint64)
        self.is_blank = True  # until something is set

    @property
    def by_byte(self) -> Array:
        """The number of each byte of memory, in the order of addresses."""
        return self.cells.repeat(self.grain)

    def rows(self, unit: int) -> Array:
        """View the cells as [units, cells per unit]."""
        return self.cells.reshape(-1, unit // self.grain)

    def get(self, places: Array, unit: int) -> Array:
        """Return the number of each unit, all of whose bytes must have the same; `places` are unit indices."""
        is_finer = unit < self.grain
        numbers: Array = self.cells[places // (self.grain // unit)] if is_finer else self.rows(unit)[places, 0]
        return numbers

    def put(self, places: Array, unit: int, values: Array | int) -> None:
        """Set the number of all bytes of each unit; `places` are unit indices."""
        if unit < self.grain:
            self.refine(self.grain // unit)
            self.grain = unit
        self.is_blank = False
        self.rows(unit)[places] = values[:, None] if isinstance(values, np.ndarray) else values

    def refine(self, parts: int) -> None:
        """Split each cell into `parts` cells; zeros that were never written take no memory."""
        count = 0 if self.is_blank else np.count_nonzero(self.cells)
        if count > self.cells.size // 8:
            self.cells = self.cells.repeat(parts)
            return
        coarse_cells, self.cells = self.cells, np.zeros(self.cells.size * parts, np.uint64)
        if count:
            places = np.flatnonzero(coarse_cells)
            self.cells.reshape(-1, parts)[places] = coarse_cells[places, None]

    def mark(self, offsets: Array, size: int, values: Array) -> None:
        """Set the number of all bytes of each access; the accesses have `size` bytes and are aligned to them."""
        unit = min(size, UNITS[0])
        places, count = offsets // unit, size // unit
        if count > 1:
            places, values = (places[:, None] + np.arange(count)).reshape(-1), values.repeat(count)
        self.put(places, unit, values)

    def is_uniform(self, places: Array, unit: int) -> bool:
        """Tell whether within each of these units all bytes have the same number."""
        if unit <= self.grain:
            return True
        rows = self.rows(unit)[places]
        return not np.count_nonzero(rows.reshape(-1) != rows[:, 0].repeat(rows.shape[1]))


@cache
def repeat_byte(byte: int, size: int) -> int:
    """Return the word of `size` bytes that are all the same."""
    return int.from_bytes(bytes([byte]) * size, "little")


def coarsest(grain: int, units: Callable[[int], Array], *shadows: Shadow) -> tuple[int, Array]:
    """Find the largest unit, up to `grain` bytes, within which all shadows are uniform, and the unit indices.

    `units` makes these indices for a unit.
    """
    for unit in UNITS[UNITS.index(grain) :]:
        if unit in (2, 8) and unit < grain:  # too small a gain to look for
            continue
        places = units(unit)
        if unit == 1 or all(shadow.is_uniform(places, unit) for shadow in shadows):
            break
    return unit, places
