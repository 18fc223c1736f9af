"""What an instruction may ask for that goes on while its threads do."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Self

import numpy as np

from ptxlab.emulator.ir import Instruction, Register
from ptxlab.emulator.memory import Memory
from ptxlab.emulator.types import Array
from ptxlab.layout.descriptors import swizzle
from ptxlab.layout.tensor_map import TensorMap

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
    accumulates: bool = False  # it adds to what is there, as others may at the same time

    @property
    def reads(self) -> Places:
        """What of memory it reads."""
        raise NotImplementedError

    @property
    def writes(self) -> Places:
        """What of memory it writes."""
        raise NotImplementedError

    @cached_property
    def read_bytes(self) -> Array:
        """Arena offsets of all bytes that it reads; every check asks for them."""
        return spans(*self.reads[1:])

    @cached_property
    def written_bytes(self) -> Array:
        """Arena offsets of all bytes that it writes."""
        return spans(*self.writes[1:])

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


_PIECE = 16  # bytes that stay together under every swizzle


@dataclass(eq=False, kw_only=True)
class Boxes(Effect):
    """Entry i copies the box of a tensor map whose first element is [row, column], any integers, to `target`."""

    tensor_map: TensorMap
    start: int  # arena offset of the matrix
    row: Array
    column: Array
    target: Array
    taken: Array | None = None  # u8 [entries, rows, bytes]

    def inside(self, i: int) -> tuple[slice, slice, slice, slice]:
        """What of a box lies inside the matrix: its rows and bytes, in the matrix and in the box."""
        box, (height, _) = self.tensor_map, self.tensor_map.array.shape
        row, byte = int(self.row[i]), int(self.column[i]) * box.itemsize
        rows = slice(max(row, 0), max(min(row + box.box[0], height), 0))
        bytes_ = slice(max(byte, 0), max(min(byte + box.row_bytes, box.pitch), 0))
        return (
            rows,
            bytes_,
            slice(rows.start - row, max(rows.stop - row, 0)),
            slice(bytes_.start - byte, max(bytes_.stop - byte, 0)),
        )

    @cached_property
    def reads(self) -> Places:
        """What there is of the boxes' rows."""
        lanes, starts, sizes = [], [], []
        for i in range(len(self.lanes)):
            rows, bytes_, *_ = self.inside(i)
            starts.append(self.start + np.arange(rows.start, rows.stop) * self.tensor_map.pitch + bytes_.start)
            sizes.append(np.full(len(starts[-1]), max(bytes_.stop - bytes_.start, 0)))
            lanes.append(np.full(len(starts[-1]), self.lanes[i]))
        return np.concatenate(lanes), np.concatenate(starts), np.concatenate(sizes)

    @property
    def writes(self) -> Places:
        """The targets, in whole: a swizzle moves bytes within its span only."""
        return self.lanes, self.target, np.full(len(self.lanes), self.tensor_map.box_bytes)

    def take(self, memory: Memory) -> None:
        """Read the matrix, and zeros around it."""
        if self.taken is not None:
            return
        box, (height, _) = self.tensor_map, self.tensor_map.array.shape
        matrix = memory.arena[self.start : self.start + height * box.pitch].reshape(height, box.pitch)
        self.taken = np.zeros((len(self.lanes), box.box[0], box.row_bytes), np.uint8)
        for i, taken in enumerate(self.taken):
            rows, bytes_, to_rows, to_bytes = self.inside(i)
            taken[to_rows, to_bytes] = matrix[rows, bytes_]

    def write(self, memory: Memory) -> None:
        """Write the targets. Windows lie so that bits of arena offsets are bits of shared addresses."""
        self.take(memory)
        assert self.taken is not None
        linear = self.target[:, None] + np.arange(0, self.tensor_map.box_bytes, _PIECE)
        places = swizzle(linear, self.tensor_map.swizzle or _PIECE) // _PIECE
        memory.arena.reshape(-1, _PIECE)[places] = self.taken.reshape(*places.shape, _PIECE)
        self.taken = None

    def only(self, mask: Array) -> Self:
        """Some of the entries, with what they have taken."""
        part = super().only(mask)
        part.taken = None if self.taken is None else self.taken[mask]
        return part
