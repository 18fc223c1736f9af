"""What an instruction may ask for that goes on while its threads do."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Self

import numpy as np

from ptxlab.emulator.ir import Instruction, Register
from ptxlab.emulator.memory import Memory
from ptxlab.emulator.types import Array

Places = tuple[Array, Array, Array]  # lanes, arena offsets, sizes
UNGROUPED = 1 << 62  # group of what no wait_group waits for


def spans(starts: Array, sizes: Array, unit: int = 1) -> Array:
    """The units of all [start, start + size), one after another; both are multiples of the unit."""
    counts = sizes // unit
    first = np.repeat(starts // unit - (np.cumsum(counts) - counts), counts)
    return first + np.arange(len(first))


def by_entry(hit: Array, sizes: Array) -> Array:
    """One bool per byte of entries of these sizes -> per entry, whether any of its bytes is hit."""
    return np.bincount(np.repeat(np.arange(len(sizes)), sizes), hit, len(sizes)) > 0


@dataclass(eq=False, kw_only=True)
class Effect:
    """What one execution of an instruction asks for, one entry per lane or warp."""

    instruction: Instruction
    kind: str  # whose groups it belongs to: "cp.async"; "bulk", the copy engine's; "wgmma", the tensor cores'
    lanes: Array  # that asked; of a warp the first
    group: Array  # number of the lane's group of that kind
    barrier: Array  # arena offset of the mbarrier that hears of it; -1 for none
    phase: Array = field(default_factory=lambda: np.zeros(0, np.int64))  # of that mbarrier when it heard; -1 before
    serial: int = 0  # counts issues
    arrives: bool = False  # no more than an arrival, once the lanes' earlier effects of its kind have landed
    landed: bool = False

    @property
    def reads(self) -> Places:
        """What of memory it reads."""
        raise NotImplementedError

    @property
    def writes(self) -> Places:
        """What of memory it writes."""
        raise NotImplementedError

    @property
    def adds_to(self) -> list[tuple[Register, Array]]:
        """Destination registers that it reads too, each with the lanes."""
        return []

    @property
    def in_order(self) -> bool:
        """Whether the lanes' earlier effects of its kind have to land first."""
        return self.arrives or self.kind == "wgmma"

    def take(self, memory: Memory) -> None:
        """Read the operands."""
        raise NotImplementedError

    def write(self, memory: Memory) -> None:
        """Write the results."""
        raise NotImplementedError

    def only(self, mask: Array) -> Self:
        """Some of the entries."""
        return replace(self, **{f.name: getattr(self, f.name)[mask] for f in fields(self) if f.type == "Array"})

    def split(self, mask: Array) -> tuple[Self | None, Self | None]:
        """The entries where `mask` holds, and the others; None stands for no entry."""
        if mask.all():
            return self, None
        return (self.only(mask), self.only(~mask)) if mask.any() else (None, self)


@dataclass(eq=False, kw_only=True)
class Copies(Effect):
    """Entry i copies `read[i]` bytes, then zeros up to `size[i]`; `source` and `target` are arena offsets."""

    source: Array
    target: Array
    read: Array
    size: Array
    taken: Array | None = None  # the source bytes, as units

    @property
    def reads(self) -> Places:
        """The source."""
        return self.lanes, self.source, self.read

    @property
    def writes(self) -> Places:
        """The target."""
        return self.lanes, self.target, self.size

    @property
    def unit(self) -> int:
        """Largest power of two up to 8 that divides all addresses and sizes."""
        bits = int(np.bitwise_or.reduce(self.source | self.target | self.read | self.size, initial=8))
        return bits & -bits

    def take(self, memory: Memory) -> None:
        """Read the source."""
        if self.taken is None:
            self.taken = memory.view[self.unit][spans(self.source, self.read, self.unit)]

    def write(self, memory: Memory) -> None:
        """Write the target."""
        self.take(memory)
        view, rest = memory.view[self.unit], self.size - self.read
        view[spans(self.target, self.read, self.unit)] = self.taken
        view[spans(self.target + self.read, rest, self.unit)] = 0
        self.taken = None

    def only(self, mask: Array) -> Self:
        """Some of the entries, with what they have taken."""
        part = super().only(mask)
        if self.taken is not None:
            part.taken = self.taken[np.repeat(mask, self.read // self.unit)].view(f"u{part.unit}")
        return part
