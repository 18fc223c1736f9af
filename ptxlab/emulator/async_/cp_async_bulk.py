"""cp.async.bulk: what the copy engine moves, runs of bytes and boxes of a matrix, to one block or several.

It tells an mbarrier of every byte, or forms groups. When copies happen: `effect_queue`.
"""

from collections.abc import Callable

import numpy as np

from ptxlab.emulator.async_.copy_effects import Boxes, Copies
from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.addressing import locator
from ptxlab.emulator.core.effect import UNGROUPED
from ptxlab.emulator.core.effect_queue import EffectQueue
from ptxlab.emulator.core.lanes import Handler, Lanes, as_lanes, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.core.memory import BASE
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import Array
from ptxlab.emulator.sync.mbarrier import MBarrierOperand
from ptxlab.errors import MemoryFault
from ptxlab.layout.tensor_map import TensorMap

SHARED = ("shared", "shared::cta", "shared::cluster")
_BOX_ALIGNMENT = 128  # of where a box goes in shared memory

# (lanes, where their copies go in their own view) -> (positions of lanes, one per copy; targets; mbarriers, or -1)
Route = Callable[[Lanes, Array], tuple[Array, Array, Array]]


def offsets_of(machine: Machine, instruction: Instruction, kind: str, space: str, operand: ir.Operand, align: int
             ) -> Callable[[Lanes, Array], Array]:  # fmt: skip
    """Function (lanes, sizes) -> arena offsets; 0 where the size is 0, as such an address may be anything."""
    locate = locator(machine, MemoryAccess(instruction, kind, space, "weak", "b8", align, ()), operand)

    def offsets(lanes: Lanes, sizes: Array) -> Array:
        found, some = np.zeros(len(sizes), np.int64), sizes > 0
        if some.any():
            found[some] = locate(as_lanes(indices_of(lanes)[some]), sizes[some])
        return found

    return offsets


def bulk(machine: Machine, instruction: Instruction, opcode: Opcode) -> Handler:
    """cp.async.bulk and cp.async.bulk.tensor.2d."""
    tensor = opcode.flag("tensor")
    if tensor and not opcode.flag("2d"):
        raise UnknownOpcode(instruction.opcode)
    opcode.flag("tile")  # the mode of a tensor copy that is meant without it too
    told, multicast = opcode.flag("mbarrier::complete_tx::bytes"), opcode.flag("multicast::cluster")
    to, origin = (*opcode.modifiers, "", "")[:2]
    if told == opcode.flag("bulk_group") or (to, origin) not in _ways(tensor, told, multicast):
        raise UnknownOpcode(instruction.opcode)
    opcode.modifiers = [word for word in opcode.modifiers if word not in (to, origin)]
    target, source, *more = instruction.operands
    size = None if tensor else more.pop(0)
    place = offsets_of(machine, instruction, "store", to, target, _BOX_ALIGNMENT if tensor else 16)
    route = _route(machine, instruction, more, told, multicast)
    if size is None:
        return _boxes(machine, instruction, source, place, route)
    return _runs(machine, instruction, source, origin, size, place, route)


def _ways(tensor: bool, told: bool, multicast: bool) -> set[tuple[str, str]]:
    """What copies of a kind go (to, from)."""
    if multicast:
        return {("shared::cluster", "global")} if told else set()
    if told:
        filled = {("shared::cta", "global"), ("shared::cluster", "global")}
        return filled if tensor else filled | {("shared::cluster", "shared::cta")}
    return set() if tensor else {("global", "shared::cta")}


def _route(machine: Machine, instruction: Instruction, more: list[ir.Operand], told: bool, multicast: bool) -> Route:
    """Where copies go and whom they tell: a multicast, to the same place in each block that the mask names."""
    at = MBarrierOperand(machine, instruction, "shared::cluster", more[0], "load") if told else None
    read_mask = machine.reader(more[1], "u16") if multicast else None

    def route(lanes: Lanes, targets: Array) -> tuple[Array, Array, Array]:
        who = np.arange(len(targets))
        if at is None:
            return who, targets, np.full(len(targets), -1)
        barriers = at.locate(lanes)
        if read_mask is not None:
            masks = np.broadcast_to(read_mask(lanes), targets.shape)
            who, shifts = machine.cluster_memory.shifts(instruction, indices_of(lanes), masks)
            targets, barriers = targets[who] + shifts, barriers[who] + shifts
        list(at.objects(indices_of(lanes)[who], barriers))  # they have to be there
        return who, targets, barriers

    return route


def _sizes(machine: Machine, instruction: Instruction, operand: ir.Operand) -> Callable[[Lanes], Array]:
    """Function lanes -> bytes of their copies, multiples of 16."""
    read = machine.reader(operand, "u32")

    def sizes(lanes: Lanes) -> Array:
        indices = indices_of(lanes)
        found = np.broadcast_to(read(lanes), indices.shape).astype(np.int64)
        wrong = found % 16 != 0
        if wrong.any():
            where = machine.fault_place(instruction, int(indices[int(np.argmax(wrong))]))
            raise MemoryFault(f"{where}: the size has to be a multiple of 16 bytes, not {int(found[wrong][0])}")
        return found

    return sizes


def prefetch(machine: Machine, instruction: Instruction, opcode: Opcode) -> Handler:
    """cp.async.bulk.prefetch: a hint, that moves nothing; but a run of bytes has to be there, where a box need not."""
    tensor = opcode.flag("tensor")
    if not (opcode.flag("L2") and opcode.flag("global") and (not tensor or opcode.flag("2d"))):
        raise UnknownOpcode(instruction.opcode)
    if tensor:
        opcode.flag("tile")
        return lambda lanes: None
    source, size = instruction.operands[:2]
    sizes_of = _sizes(machine, instruction, size)
    locate = offsets_of(machine, instruction, "load", "global", source, 16)

    def look(lanes: Lanes) -> None:
        locate(lanes, sizes_of(lanes))

    return look


def _runs(machine: Machine, instruction: Instruction, source: ir.Operand, origin: str, size: ir.Operand,
          place: Callable[[Lanes, Array], Array], route: Route) -> Handler:  # fmt: skip
    """Any multiple of 16 bytes per lane."""
    sizes_of, pending = _sizes(machine, instruction, size), machine.unit(EffectQueue)
    locate_source = offsets_of(machine, instruction, "load", origin, source, 16)

    def copy(lanes: Lanes) -> None:
        indices, sizes = indices_of(lanes), sizes_of(lanes)
        sources = locate_source(lanes, sizes)
        who, targets, barriers = route(lanes, place(lanes, sizes))
        told = barriers >= 0
        pending.issue(
            Copies(
                instruction=instruction,
                kind="bulk",
                lanes=indices[who],
                source=sources[who],
                target=targets,
                read=sizes[who],
                size=sizes[who],
                group=np.where(told, UNGROUPED, pending.committed["bulk"][indices[who]]),
                barrier=barriers,
            )
        )

    return copy


def _boxes(machine: Machine, instruction: Instruction, source: ir.Operand, place: Callable[[Lanes, Array], Array],
           route: Route) -> Handler:  # fmt: skip
    """One box of a tensor map per lane."""
    if not isinstance(source, ir.Address) or len(source.coordinates) != 2:
        raise ValueError("a box of two dimensions is at [map, {column, row}]")
    read_map = machine.reader(source.base, "u64")
    read_column, read_row = (machine.reader(coordinate, "s32") for coordinate in source.coordinates)
    pending, shift = machine.unit(EffectQueue), source.offset - BASE

    def map_at(offset: int, lane: int) -> tuple[TensorMap, int]:
        known = machine.launch.tensor_maps.get(offset)
        if known is None:
            where = machine.fault_place(instruction, lane)
            raise MemoryFault(f"{where}: no argument that is a tensor map is at address {offset + BASE:#x}")
        return known

    def aligned(tensor_map: TensorMap, indices: Array, columns: Array) -> None:
        """Refuse columns that hardware takes for an illegal instruction (seen on an H200)."""
        wrong = columns * tensor_map.itemsize % 16 != 0
        if wrong.any():
            first = int(np.argmax(wrong))
            where = machine.fault_place(instruction, int(indices[first]))
            rule = f"the column has to be a multiple of {16 // tensor_map.itemsize}, 16 bytes"
            raise MemoryFault(f"{where}: {rule}, not {int(columns[first])}")

    def copy(lanes: Lanes) -> None:
        everybody = indices_of(lanes)
        maps = np.broadcast_to(read_map(lanes).view(np.int64) + shift, everybody.shape)
        columns, rows = (np.broadcast_to(read(lanes), everybody.shape) for read in (read_column, read_row))
        for offset in np.unique(maps).tolist():
            mine = maps == offset
            indices = everybody[mine]
            tensor_map, start = map_at(offset, int(indices[0]))
            aligned(tensor_map, indices, columns[mine])
            targets = place(as_lanes(indices), np.full(len(indices), tensor_map.box_bytes))
            who, targets, barriers = route(as_lanes(indices), targets)
            pending.issue(
                Boxes(
                    instruction=instruction,
                    kind="bulk",
                    lanes=indices[who],
                    tensor_map=tensor_map,
                    start=start,
                    column=columns[mine][who].astype(np.int64),
                    row=rows[mine][who].astype(np.int64),
                    target=targets,
                    group=np.full(len(who), UNGROUPED),
                    barrier=barriers,
                )
            )

    return copy
