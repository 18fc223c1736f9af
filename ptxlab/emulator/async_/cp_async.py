"""cp.async: copies that go on while their threads do, and the groups of all such. When they happen: `effect_queue`.

Those of the copy engine, cp.async.bulk, move runs of bytes and boxes of a matrix, to one block or several. It tells an
mbarrier of every byte, or forms groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Self

import numpy as np

from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.addressing import locator, mark_written
from ptxlab.emulator.core.effect import Effect, Places, spans
from ptxlab.emulator.core.effect_queue import EffectQueue
from ptxlab.emulator.core.lanes import Handler, Lanes, as_lanes, indices_of
from ptxlab.emulator.core.machine import Machine, binder
from ptxlab.emulator.core.memory import BASE, Memory
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, Array, bits_of
from ptxlab.emulator.ops.atomic import combination
from ptxlab.emulator.sync.mbarrier import MBarrierOperand
from ptxlab.errors import EmulationError, MemoryFault
from ptxlab.hardware.descriptors import swizzle
from ptxlab.hardware.tensor_map import TensorMap

_GROUP_ACTIONS = ("commit_group", "wait_group", "wait_all")
_SHARED = ("shared", "shared::cta")
_PIECE = 16  # bytes that stay together under every swizzle
_BOX_ALIGNMENT = 128  # of where a box lies in shared memory
_LOGIC, _EXTREMES = ("and", "or", "xor"), ("min", "max")
_REDUCED: dict[str, tuple[str, ...]] = {  # types that cp.reduce.async combines, and how
    "u32": ("add", *_EXTREMES, "inc", "dec"), "s32": ("add", *_EXTREMES), "b32": _LOGIC,
    "u64": ("add", *_EXTREMES), "s64": _EXTREMES, "b64": _LOGIC,
    "f16": ("add", *_EXTREMES), "bf16": ("add", *_EXTREMES), "f32": ("add",), "f64": ("add",),
}  # fmt: skip
_REDUCTIONS = ("add", *_EXTREMES, *_LOGIC, "inc", "dec")
# What elements of a tensor map are taken for; the rest, .and of int64 too, is an illegal instruction (seen on an H200)
_ELEMENTS = {
    "int32": ("s32", "b32"), "uint32": ("u32", "b32"), "int64": ("s64",), "uint64": ("u64", "b64"),
    "float16": ("f16",), "float32": ("f32",), "float64": ("f64",),
}  # fmt: skip

# (lanes, where their copies go in their own view) -> (positions of lanes, one per copy; targets; mbarriers, or -1)
Route = Callable[[Lanes, Array], tuple[Array, Array, Array]]


@dataclass(eq=False, kw_only=True)
class Copies(Effect):
    """Entry i copies `read[i]` bytes, then zeros up to `size[i]`; `source` and `target` are arena offsets."""

    source: Array
    target: Array
    read: Array
    size: Array
    combine: Callable[..., Array] | None = None  # with what is there, as numbers of `type_name`
    type_name: str = ""
    source_units: Array | None = None  # the source bytes, once they have been read

    @property
    def reads(self) -> Places:
        """Spans of the source, in arena offsets."""
        return self.lanes, self.source, self.read

    @property
    def writes(self) -> Places:
        """Spans of the target, in arena offsets."""
        return self.lanes, self.target, self.size

    @property
    def unit(self) -> int:
        """Largest power of two up to 8 that divides all addresses and sizes."""
        bits = int(np.bitwise_or.reduce(self.source | self.target | self.read | self.size, initial=8))
        return bits & -bits

    def take(self, memory: Memory) -> None:
        """Read the source bytes, unless they have been read already."""
        if self.source_units is None:
            self.source_units = memory.view[self.unit][spans(self.source, self.read, self.unit)]

    def write(self, memory: Memory) -> None:
        """Write the source bytes and the padding zeros to the target."""
        self.take(memory)
        if self.combine is not None:
            self.reduce(memory)
            return
        view, padding = memory.view[self.unit], self.size - self.read
        view[spans(self.target, self.read, self.unit)] = self.source_units
        view[spans(self.target + self.read, padding, self.unit)] = 0
        self.source_units = None

    def reduce(self, memory: Memory) -> None:
        """Combine source and target one copy after another, as two copies may share a target."""
        assert self.combine is not None and self.source_units is not None
        view, dtype = memory.arena.view(DTYPES[self.type_name]), DTYPES[self.type_name]
        values, start = np.ascontiguousarray(self.source_units).view(np.uint8).view(dtype), 0
        for target, size in zip(self.target // dtype.itemsize, self.size // dtype.itemsize, strict=True):
            view[target : target + size] = self.combine(view[target : target + size], values[start : start + size])
            start += size
        self.source_units = None

    def select_entries(self, mask: Array) -> Self:
        """Return the effect with only the entries where `mask` holds, with their source bytes if these were read."""
        part = super().select_entries(mask)
        if self.source_units is not None:
            part.source_units = self.source_units[np.repeat(mask, self.read // self.unit)].view(f"u{part.unit}")
        return part


@dataclass(eq=False, kw_only=True)
class Boxes(Effect):
    """Entry i copies the box of a tensor map whose first element is at `first[i]`, any integers, to shared memory.

    Or from there into the array, if `stores`: elements replace those of the array, or are combined with them.
    """

    tensor_map: TensorMap
    start: int  # arena offset of the array
    first: Array  # [entries, axes]
    shared: Array  # arena offset of the box in shared memory
    stores: bool = False
    combine: Callable[..., Array] | None = None
    boxes: Array | None = None  # u8 [entries, *box, its last axis in bytes]

    def inside(self, i: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the part of a box that lies inside the array, as slices of the array and of the box.

        The last axis is in elements.
        """
        array, box = [], []
        for first, size, end in zip(self.first[i].tolist(), self.tensor_map.box, self.shape, strict=True):
            start, stop = max(first, 0), max(min(first + size, end), max(first, 0))
            array.append(slice(start, stop))
            box.append(slice(start - first, stop - first))
        return tuple(array), tuple(box)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        shape: tuple[int, ...] = self.tensor_map.array.shape
        return shape

    @cached_property
    def rows(self) -> Places:
        """Spans of the array that the boxes cover, one per row; what lies outside the array is left out."""
        lanes, starts, sizes = [], [], []
        strides = [prod(self.shape[axis + 1 :]) * self.tensor_map.itemsize for axis in range(len(self.shape))]
        for i in range(len(self.lanes)):
            *outer, row = self.inside(i)[0]
            offsets = np.array([self.start + row.start * self.tensor_map.itemsize])
            for axis, stride in zip(outer, strides, strict=False):
                offsets = (offsets[:, None] + np.arange(axis.start, axis.stop) * stride).reshape(-1)
            starts.append(offsets)
            sizes.append(np.full(len(offsets), (row.stop - row.start) * self.tensor_map.itemsize))
            lanes.append(np.full(len(offsets), self.lanes[i]))
        return np.concatenate(lanes), np.concatenate(starts), np.concatenate(sizes)

    @property
    def whole_boxes(self) -> Places:
        """Spans of the boxes in shared memory, one per box: a swizzle moves bytes within its span only."""
        return self.lanes, self.shared, np.full(len(self.lanes), self.tensor_map.box_bytes)

    @cached_property
    def inside_parts(self) -> Places:
        """Spans in shared memory of the elements inside the array: one per box, or one per element."""
        inside = [self.inside(i)[1] for i in range(len(self.lanes))]
        sizes = tuple(slice(0, size) for size in self.tensor_map.box)
        if all(box_slices == sizes for box_slices in inside):
            return self.whole_boxes
        size = self.tensor_map.itemsize
        linear = np.arange(0, self.tensor_map.box_bytes, size).reshape(self.tensor_map.box)
        offsets = [shared + linear[part].reshape(-1) for shared, part in zip(self.shared, inside, strict=True)]
        lanes = np.repeat(self.lanes, [len(elements) for elements in offsets])
        starts = swizzle(np.concatenate(offsets), self.tensor_map.swizzle or _PIECE)
        return lanes, starts, np.full(len(lanes), size)

    @property
    def reads(self) -> Places:
        """Spans that the copy reads: rows of the array, or, if it stores, the elements in shared memory."""
        return self.inside_parts if self.stores else self.rows

    @property
    def writes(self) -> Places:
        """Spans that the copy writes: the boxes in shared memory, or, if it stores, rows of the array."""
        return self.rows if self.stores else self.whole_boxes

    def array(self, memory: Memory) -> Array:
        """View the array in memory."""
        size = prod(self.shape) * self.tensor_map.itemsize
        array: Array = memory.arena[self.start : self.start + size].view(self.tensor_map.array.dtype)
        return array.reshape(self.shape)

    @property
    def pieces(self) -> Array:
        """Numbers of the 16-byte pieces that the boxes take up in shared memory.

        Windows lie so that bits of arena offsets are bits of addresses.
        """
        linear = self.shared[:, None] + np.arange(0, self.tensor_map.box_bytes, _PIECE)
        return swizzle(linear, self.tensor_map.swizzle or _PIECE) // _PIECE

    def take(self, memory: Memory) -> None:
        """Read the boxes; elements outside the array are zeros."""
        if self.boxes is not None:
            return
        dtype, shape = self.tensor_map.array.dtype, (len(self.lanes), *self.tensor_map.box)
        if self.stores:
            self.boxes = memory.arena.reshape(-1, _PIECE)[self.pieces].reshape(-1).view(dtype).reshape(shape)
            return
        self.boxes, array = np.zeros(shape, dtype), self.array(memory)
        for i, box in enumerate(self.boxes):
            array_slices, box_slices = self.inside(i)
            box[box_slices] = array[array_slices]

    def write(self, memory: Memory) -> None:
        """Write whole boxes to shared memory, or, if the copy stores, the elements inside the array to the array."""
        self.take(memory)
        assert self.boxes is not None
        if self.stores:
            array = self.array(memory)
            for i, box in enumerate(self.boxes):
                array_slices, box_slices = self.inside(i)
                values = box[box_slices]
                array[array_slices] = self.combine(array[array_slices], values) if self.combine else values
        else:
            pieces = self.pieces
            memory.arena.reshape(-1, _PIECE)[pieces] = self.boxes.reshape(-1).view(np.uint8).reshape(*pieces.shape, -1)
        self.boxes = None

    def select_entries(self, mask: Array) -> Self:
        """Return the effect with only the entries where `mask` holds, with their boxes if these were read."""
        part = super().select_entries(mask)
        part.boxes = None if self.boxes is None else self.boxes[mask]
        return part


@binder("cp")
def _copy(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    opcode = Opcode(instruction.opcode)
    for hint in ("L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"):
        opcode.flag(hint)
    if opcode.flag("reduce") and "bulk" not in opcode.modifiers:
        raise UnknownOpcode(instruction.opcode)
    if not opcode.flag("async"):
        raise UnknownOpcode(instruction.opcode)
    kind = "bulk" if opcode.flag("bulk") else "cp.async"
    if action := opcode.choice(*_GROUP_ACTIONS, default=""):
        handler = _group(machine, instruction, opcode, kind, action)
    elif opcode.flag("mbarrier"):
        handler = _arrive(machine, instruction, opcode)
    elif kind == "bulk" and opcode.flag("prefetch"):
        handler = _prefetch(machine, instruction, opcode)
    else:
        handler = (_bulk if kind == "bulk" else _bind_cp_async)(machine, instruction, opcode)
    if opcode.modifiers:
        raise UnknownOpcode(instruction.opcode)
    return handler


def _group(machine: Machine, instruction: Instruction, opcode: Opcode, kind: str, action: str) -> Handler:
    """Bind commit_group, wait_group or wait_all."""
    effects = machine.unit(EffectQueue)
    if action == "commit_group":
        return lambda lanes: effects.commit(kind, lanes)
    if action == "wait_all" and kind == "cp.async":

        def wait_all(lanes: Lanes) -> None:
            effects.commit(kind, lanes)
            effects.wait(kind, lanes, 0)

        return wait_all
    if action == "wait_all":
        raise UnknownOpcode(instruction.opcode)
    (newest_count,), only_read = instruction.operands, kind == "bulk" and opcode.flag("read")
    if not isinstance(newest_count, ir.Immediate):
        raise ValueError("the number of groups has to be a constant")
    return lambda lanes: effects.wait(kind, lanes, newest_count.bits, only_read)


def _bind_cp_async(machine: Machine, instruction: Instruction, opcode: Opcode) -> Handler:
    """Bind cp.async of 4, 8 or 16 bytes per lane.

    An optional operand says how many of them to read, or whether none.
    """
    cache_operator = opcode.choice("ca", "cg")
    if not any(opcode.flag(space) for space in _SHARED) or not opcode.flag("global"):
        raise UnknownOpcode(instruction.opcode)
    target, source, size, *options = instruction.operands
    if "L2::cache_hint" in instruction.opcode:
        options = options[:-1]  # the policy
    if not isinstance(size, ir.Immediate) or size.bits not in ((4, 8, 16) if cache_operator == "ca" else (16,)):
        raise ValueError(f"cp.async.{cache_operator} copies {'4, 8 or 16' if cache_operator == 'ca' else '16'} bytes")
    count = size.bits
    has_ignore_operand = bool(options) and isinstance(options[0], ir.Register) and bits_of(options[0].type) == 1
    read_size = machine.reader(options[0] if options else size, "pred" if has_ignore_operand else "u32")
    locate_target = _offset_locator(machine, instruction, "store", "shared", target, count)
    locate_source = _offset_locator(machine, instruction, "load", "global", source, count)
    effects = machine.unit(EffectQueue)

    def copy(lanes: Lanes) -> None:
        indices = indices_of(lanes)
        sizes, operand_values = np.full(len(indices), count), np.broadcast_to(read_size(lanes), indices.shape)
        source_bytes = np.where(operand_values, 0, count) if has_ignore_operand else operand_values.astype(np.int64)
        if (source_bytes > count).any():
            _, place = machine.first_fault(instruction, lanes, source_bytes > count)
            raise MemoryFault(f"{place}: {int(source_bytes.max())} bytes to read, more than the {count} of the copy")
        effects.issue(
            Copies(
                instruction=instruction,
                kind="cp.async",
                lanes=indices,
                source=locate_source(lanes, source_bytes),
                target=locate_target(lanes, sizes),
                read=source_bytes,
                size=sizes,
                barrier=np.full(len(indices), -1),
            )
        )

    return copy


def _arrive(machine: Machine, instruction: Instruction, opcode: Opcode) -> Handler:
    """Bind cp.async.mbarrier.arrive: arrive at the mbarrier once the lane's earlier cp.async have landed."""
    counts_as_arrival = not opcode.flag("noinc")
    if not opcode.flag("arrive") or not opcode.flag("b64"):
        raise UnknownOpcode(instruction.opcode)
    space = opcode.choice(*_SHARED, default="generic").split("::")[0]
    find = MBarrierOperand(machine, instruction, space, instruction.operands[0], "load").objects

    def arrive(lanes: Lanes) -> None:
        indices, places = indices_of(lanes), np.zeros(len(indices_of(lanes)), np.int64)
        for barrier, positions in find(lanes):
            places[positions] = barrier.place
            barrier.missing += len(positions) if counts_as_arrival else 0
        arrival = Effect(instruction=instruction, kind="cp.async", lanes=indices, barrier=places, arrives=True)
        machine.unit(EffectQueue).arrive(arrival)

    return arrive


# The copy engine


def _offset_locator(machine: Machine, instruction: Instruction, kind: str, space: str, operand: ir.Operand, align: int
             ) -> Callable[[Lanes, Array], Array]:  # fmt: skip
    """Build a function (lanes, sizes) -> arena offsets.

    An offset is 0 where the size is 0, as such an address may be anything.
    """
    locate = locator(machine, MemoryAccess(instruction, kind, space, "weak", "b8", align, ()), operand)

    def offsets(lanes: Lanes, sizes: Array) -> Array:
        offsets_or_zero, is_used = np.zeros(len(sizes), np.int64), sizes > 0
        if is_used.any():
            offsets_or_zero[is_used] = locate(as_lanes(indices_of(lanes)[is_used]), sizes[is_used])
        return offsets_or_zero

    return offsets


def _bulk(machine: Machine, instruction: Instruction, opcode: Opcode) -> Handler:
    """Bind cp.async.bulk and cp.async.bulk.tensor.

    The same with cp.reduce.async combines instead of copying.
    """
    is_tensor, is_reduction = opcode.flag("tensor"), instruction.opcode.startswith("cp.reduce")
    axes = int(opcode.choice(*(f"{n}d" for n in range(1, 6)))[0]) if is_tensor else 0
    opcode.flag("tile")  # the mode of a tensor copy that is meant without it too
    notifies_mbarrier, multicast = opcode.flag("mbarrier::complete_tx::bytes"), opcode.flag("multicast::cluster")
    operation = opcode.choice(*_REDUCTIONS) if is_reduction else ""
    t = opcode.choice(*_REDUCED) if is_reduction and not is_tensor else ""
    noftz = operation == "add" and t in ("f16", "bf16")  # said of these, and of these alone
    if (t and operation not in _REDUCED[t]) or opcode.flag("noftz") != noftz:
        raise UnknownOpcode(instruction.opcode)
    destination_space, origin = (*opcode.modifiers, "", "")[:2]
    if notifies_mbarrier == opcode.flag("bulk_group") or (destination_space, origin) not in space_pairs(
        is_tensor, notifies_mbarrier, multicast, is_reduction
    ):
        raise UnknownOpcode(instruction.opcode)
    opcode.modifiers = [word for word in opcode.modifiers if word not in (destination_space, origin)]
    if opcode.modifiers:
        raise UnknownOpcode(instruction.opcode)
    target, source, *extra_operands = instruction.operands
    if is_tensor and destination_space == "global":
        place = _offset_locator(machine, instruction, "load", origin, source, _BOX_ALIGNMENT)
        return _boxes(machine, instruction, axes, target, place, _as_they_are, True, operation)
    size = None if is_tensor else extra_operands.pop(0)
    place = _offset_locator(
        machine, instruction, "store", destination_space, target, _BOX_ALIGNMENT if is_tensor else 16
    )
    route = _route(machine, instruction, extra_operands, notifies_mbarrier, multicast)
    if size is None:
        return _boxes(machine, instruction, axes, source, place, route)
    return _runs(machine, instruction, source, origin, size, place, route, combination(operation, t) if t else None, t)


def space_pairs(tensor: bool, notifies: bool, multicast: bool, reduces: bool) -> set[tuple[str, str]]:
    """Return the pairs of spaces (to, from) that copies of a kind may have."""
    if reduces:
        if multicast or (notifies and tensor):
            return set()
        return {("shared::cluster" if notifies else "global", "shared::cta")}
    if multicast:
        return {("shared::cluster", "global")} if notifies else set()
    if notifies:
        filled = {("shared::cta", "global"), ("shared::cluster", "global")}
        return filled if tensor else filled | {("shared::cluster", "shared::cta")}
    return {("global", "shared::cta")}


def _route(
    machine: Machine, instruction: Instruction, extra_operands: list[ir.Operand], notifies: bool, multicast: bool
) -> Route:
    """Build the function (lanes, targets) -> per entry its lane's position, target offset, and mbarrier or -1.

    A multicast goes to the same place in each block that the mask names.
    """
    if not notifies:
        return _as_they_are
    mbarrier = MBarrierOperand(machine, instruction, "shared::cluster", extra_operands[0], "load")
    read_mask = machine.reader(extra_operands[1], "u16") if multicast else None

    def route(lanes: Lanes, targets: Array) -> tuple[Array, Array, Array]:
        positions, barriers = np.arange(len(targets)), mbarrier.locate(lanes)
        if read_mask is not None:
            masks = np.broadcast_to(read_mask(lanes), targets.shape)
            positions, shifts = machine.cluster_memory.shifts(instruction, indices_of(lanes), masks)
            targets, barriers = targets[positions] + shifts, barriers[positions] + shifts
        list(mbarrier.objects(indices_of(lanes)[positions], barriers))  # they have to be there
        return positions, targets, barriers

    return route


def _as_they_are(lanes: Lanes, targets: Array) -> tuple[Array, Array, Array]:
    """Route a copy that notifies no mbarrier: an entry per lane."""
    return np.arange(len(targets)), targets, np.full(len(targets), -1)


def _sizes(machine: Machine, instruction: Instruction, operand: ir.Operand) -> Callable[[Lanes], Array]:
    """Build a function lanes -> sizes of their copies in bytes, which must be multiples of 16."""
    read = machine.reader(operand, "u32")

    def sizes(lanes: Lanes) -> Array:
        indices = indices_of(lanes)
        sizes = np.broadcast_to(read(lanes), indices.shape).astype(np.int64)
        is_misaligned = sizes % 16 != 0
        if is_misaligned.any():
            first, place = machine.first_fault(instruction, lanes, is_misaligned)
            raise MemoryFault(f"{place}: the size has to be a multiple of 16 bytes, not {int(sizes[first])}")
        return sizes

    return sizes


def _prefetch(machine: Machine, instruction: Instruction, opcode: Opcode) -> Handler:
    """Bind cp.async.bulk.prefetch: a hint, that moves nothing.

    A run of bytes has to be there all the same; a box need not.
    """
    tensor = opcode.flag("tensor")
    axes = not tensor or opcode.choice(*(f"{n}d" for n in range(1, 6)))
    if not (opcode.flag("L2") and opcode.flag("global") and axes):
        raise UnknownOpcode(instruction.opcode)
    if tensor:
        opcode.flag("tile")
        return lambda lanes: None
    source, size = instruction.operands[:2]
    read_sizes = _sizes(machine, instruction, size)
    locate = _offset_locator(machine, instruction, "load", "global", source, 16)

    def check_address(lanes: Lanes) -> None:
        locate(lanes, read_sizes(lanes))

    return check_address


def _runs(machine: Machine, instruction: Instruction, source: ir.Operand, origin: str, size: ir.Operand,
          place: Callable[[Lanes, Array], Array], route: Route, combine: Callable[..., Array] | None, t: str
          ) -> Handler:  # fmt: skip
    """Build the handler that copies any multiple of 16 bytes per lane."""
    read_sizes, effects = _sizes(machine, instruction, size), machine.unit(EffectQueue)
    locate_source = _offset_locator(machine, instruction, "load", origin, source, 16)

    def copy(lanes: Lanes) -> None:
        indices, sizes = indices_of(lanes), read_sizes(lanes)
        sources = locate_source(lanes, sizes)
        positions, targets, barriers = route(lanes, place(lanes, sizes))
        effects.issue(
            Copies(
                instruction=instruction,
                kind="bulk",
                lanes=indices[positions],
                source=sources[positions],
                target=targets,
                read=sizes[positions],
                size=sizes[positions],
                barrier=barriers,
                accumulates=combine is not None,
                combine=combine,
                type_name=t,
            )
        )

    return copy


def _boxes(machine: Machine, instruction: Instruction, axes: int, array: ir.Operand,
           place: Callable[[Lanes, Array], Array], route: Route, stores: bool = False, operation: str = ""
           ) -> Handler:  # fmt: skip
    """Build the handler that copies a box of a tensor map per lane."""
    if not isinstance(array, ir.Address) or len(array.coordinates) != axes:
        raise ValueError(f"a box of {axes} dimensions is at [map, {{{', '.join('xyzuv'[:axes])}}}]")
    read_map = machine.reader(array.base, "u64")
    readers = [machine.reader(coordinate, "s32") for coordinate in reversed(array.coordinates)]
    effects, shift = machine.unit(EffectQueue), array.offset - BASE
    write_access = MemoryAccess(instruction, "store", "global", "weak", "b8", 1, ())

    def map_at(offset: int, lane: int) -> tuple[TensorMap, int]:
        map_and_start = machine.launch.tensor_maps.get(offset)
        if map_and_start is None:
            place = machine.fault_place(instruction, lane)
            raise MemoryFault(f"{place}: no argument that is a tensor map is at address {offset + BASE:#x}")
        if (dimensions := map_and_start[0].array.ndim) != axes:
            place = machine.fault_place(instruction, lane)
            raise EmulationError(f"{place}: a box of {axes} dimensions of a tensor map of {dimensions}")
        return map_and_start

    def check_places(tensor_map: TensorMap, indices: Array, places: Array) -> None:
        """Raise for first elements that make hardware report an illegal instruction (seen on an H200)."""
        is_misaligned = places[:, -1] * tensor_map.itemsize % 16 != 0
        if is_misaligned.any():
            first, place = machine.first_fault(instruction, indices, is_misaligned)
            rule = f"the column has to be a multiple of {16 // tensor_map.itemsize}, 16 bytes"
            raise MemoryFault(f"{place}: {rule}, not {int(places[first, -1])}")
        is_in_front = np.min(places, axis=1) < 0
        if stores and is_in_front.any():
            first, place = machine.first_fault(instruction, indices, is_in_front)
            rule = "what is written may end behind the array, but not begin in front of it"
            raise MemoryFault(f"{place}: {rule}: {tuple(reversed(places[first].tolist()))}")

    def reduction(tensor_map: TensorMap, indices: Array) -> Callable[..., Array]:
        """Return the function (old, new) -> combined elements of a reducing copy."""
        dtype = tensor_map.array.dtype
        t = next((name for name in _ELEMENTS.get(dtype.name, ()) if operation in _REDUCED[name]), "")
        if not t:
            raise EmulationError(f"{machine.place(instruction, indices)}: .{operation} of elements of type {dtype}")
        return combination(operation, t)

    def copy(lanes: Lanes) -> None:
        all_indices = indices_of(lanes)
        maps = np.broadcast_to(read_map(lanes).view(np.int64) + shift, all_indices.shape)
        first = np.stack([np.broadcast_to(read(lanes), all_indices.shape) for read in readers], axis=1).astype(np.int64)
        for offset in np.unique(maps).tolist():
            uses_map = maps == offset
            indices = all_indices[uses_map]
            tensor_map, start = map_at(offset, int(indices[0]))
            check_places(tensor_map, indices, first[uses_map])
            combine = reduction(tensor_map, indices) if operation else None
            if stores:
                region = machine.memory.region_of(start)
                assert region is not None
                mark_written(machine, write_access, as_lanes(indices), region)
            targets = place(as_lanes(indices), np.full(len(indices), tensor_map.box_bytes))
            positions, targets, barriers = route(as_lanes(indices), targets)
            effects.issue(
                Boxes(
                    instruction=instruction,
                    kind="bulk",
                    lanes=indices[positions],
                    tensor_map=tensor_map,
                    start=start,
                    first=first[uses_map][positions],
                    shared=targets,
                    stores=stores,
                    barrier=barriers,
                    accumulates=combine is not None,
                    combine=combine,
                )
            )

    return copy
