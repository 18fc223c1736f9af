"""Asynchronous effects: work that an instruction starts and that goes on beside its threads."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Self

import numpy as np

from ptxlab.emulator.core.memory import Memory
from ptxlab.emulator.front.ir import Instruction, Register
from ptxlab.emulator.front.types import Array

Places = tuple[Array, Array, Array]  # lanes, arena offsets, sizes
NONE = np.zeros(0, np.int64)


def spans(starts: Array, sizes: Array, unit: int = 1) -> Array:
    """List the numbers of the units in all [start, start + size), one span after another.

    Starts and sizes are multiples of the unit.
    """
    counts = sizes // unit
    first = np.repeat(starts // unit - (np.cumsum(counts) - counts), counts)
    return first + np.arange(len(first))


def by_entry(hit: Array, sizes: Array) -> Array:
    """Tell for each entry whether any of its bytes is hit, from one bool per byte of entries of these sizes."""
    return np.bincount(np.repeat(np.arange(len(sizes)), sizes), hit, len(sizes)) > 0


@dataclass(eq=False, kw_only=True)
class Effect:
    """Asynchronous work that one execution of an instruction asks for, with one entry per lane or warp."""

    instruction: Instruction
    kind: str  # whose groups it belongs to: "cp.async"; "bulk", the copy engine's; "wgmma", the tensor cores'
    lanes: Array  # that asked; of a warp the first
    barrier: Array  # arena offset of the mbarrier that hears of it; -1 for none
    # from the queue: number of the lane's group of that kind; phase of that mbarrier when it heard, -1 before
    group: Array = field(default_factory=lambda: NONE)
    phase: Array = field(default_factory=lambda: NONE)
    serial: int = 0  # counts issues
    arrives: bool = False  # no more than an arrival, once the lanes' earlier effects of its kind have landed
    landed: bool = False
    accumulates: bool = False  # it adds to what is there, as others may at the same time
    units: dict[tuple[int, bool], Array] = field(init=False, default_factory=dict)  # see `read_units`

    @property
    def reads(self) -> Places:
        """Spans of memory that the effect reads."""
        return NONE, NONE, NONE

    @property
    def writes(self) -> Places:
        """Spans of memory that the effect writes."""
        return NONE, NONE, NONE

    def read_units(self, unit: int) -> Array:
        """List the numbers of the `unit`-byte units that the effect reads; cached, as every check asks for them."""
        if (unit, False) not in self.units:
            self.units[unit, False] = spans(*self.reads[1:], unit)
        return self.units[unit, False]

    def written_units(self, unit: int) -> Array:
        """List the numbers of the `unit`-byte units that the effect writes; cached like `read_units`."""
        if (unit, True) not in self.units:
            self.units[unit, True] = spans(*self.writes[1:], unit)
        return self.units[unit, True]

    @cached_property
    def grain(self) -> int:
        """The largest power of two up to 16 that all places and sizes are multiples of."""
        bits = 16
        for _, starts, sizes in (self.reads, self.writes):
            bits |= int(np.bitwise_or.reduce(starts)) | int(np.bitwise_or.reduce(sizes))
        return bits & -bits

    @property
    def adds_to(self) -> list[tuple[Register, Array]]:
        """Destination registers that the effect also reads, each with its lanes."""
        return []

    @property
    def in_order(self) -> bool:
        """True if the lanes' earlier effects of the same kind have to land first."""
        return self.arrives or self.kind == "wgmma"

    def take(self, memory: Memory) -> None:
        """Read the operands, if there are any in memory."""

    def write(self, memory: Memory) -> None:
        """Write the results, if there are any."""

    def select_entries(self, mask: Array) -> Self:
        """Return the effect with only the entries where `mask` holds."""
        return replace(self, **{f.name: getattr(self, f.name)[mask] for f in fields(self) if f.type == Array})

    def split(self, mask: Array) -> tuple[Self | None, Self | None]:
        """Split the entries into those where `mask` holds and the others; None stands for no entry."""
        if mask.all():
            return self, None
        return (self.select_entries(mask), self.select_entries(~mask)) if mask.any() else (None, self)
