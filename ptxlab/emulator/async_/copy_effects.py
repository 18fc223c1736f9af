"""What an instruction may ask for that goes on while its threads do."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from ptxlab.emulator.core.effect import Effect, Places, spans
from ptxlab.emulator.core.memory import Memory
from ptxlab.emulator.front.types import Array
from ptxlab.layout.descriptors import swizzle
from ptxlab.layout.tensor_map import TensorMap


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
