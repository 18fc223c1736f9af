"""Instructions that the lanes of a warp execute together: who comes first is parked until the rest has come."""

from collections.abc import Callable, Hashable

import numpy as np

from ptxlab.emulator.core.lanes import Handler, Lanes, Successors, as_lanes, count_of, indices_of, merge, split
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array
from ptxlab.errors import EmulationError

Apply = Callable[[Lanes, Array], None]  # lanes and, for each, the mask of those that take part


def bind_collective(machine: Machine, pc: int, mask: ir.Operand | None, apply: Apply) -> Handler:
    """Build the handler of a collective: `apply` runs once all lanes of a mask have come.

    Without a mask, `apply` runs on the lanes that are there.
    """
    read = machine.reader(mask, "u32") if mask is not None else None
    whole_warps = isinstance(mask, ir.Immediate) and mask.bits & 0xFFFFFFFF == 0xFFFFFFFF
    full_masks = np.full(machine.lanes, 0xFFFFFFFF, np.uint32) if whole_warps else np.zeros(0, np.uint32)

    def handler(lanes: Lanes) -> Successors:
        nobody_missing = whole_warps and machine.living == machine.lanes and pc not in machine.meetings
        if nobody_missing and isinstance(lanes, slice) and lanes.start % 32 == 0 == lanes.stop % 32:
            apply(lanes, full_masks[lanes])
            return None
        if read is None:
            is_present = np.zeros(machine.lanes, bool)
            is_present[lanes] = True
            apply(lanes, pack_bits(is_present)[indices_of(lanes) // 32])
            return None
        ready = meet(machine, pc, pc, lanes, read(lanes)).get(pc)
        if ready is None:
            return []
        alive_masks = pack_bits(machine.alive)[indices_of(ready) // 32]
        apply(ready, read(ready) & alive_masks)
        return None if ready is lanes else [(pc + 1, ready)]

    return handler


def meet(machine: Machine, key: Hashable, pc: int, lanes: Lanes, masks: Array) -> dict[int, Lanes]:
    """Park lanes until all living lanes of their masks (u32 [lanes]) have arrived at the meeting `key`.

    Returns where whole groups are now complete: instruction index -> lanes. The others are parked.
    """
    lane_bits = np.uint32(1) << (indices_of(lanes) % 32).astype(np.uint32)
    if not (masks & lane_bits).all():
        outside_lanes = as_lanes(indices_of(lanes)[np.broadcast_to(masks & lane_bits == 0, lane_bits.shape)])
        raise EmulationError(
            f"{machine.place(machine.code[pc], outside_lanes)}: the lane is not in its own member mask"
        )
    whole_warps = isinstance(lanes, slice) and lanes.start % 32 == 0 == lanes.stop % 32
    if key not in machine.meetings and (whole_warps or count_of(lanes) == machine.living):
        return {pc: lanes}
    arrived_groups = [*machine.meetings.pop(key, []), (pc, lanes, np.broadcast_to(masks, lane_bits.shape))]
    is_present = np.zeros(machine.lanes, bool)
    for _, arrived_lanes, _ in arrived_groups:
        is_present[arrived_lanes] = True
    missing_masks = pack_bits(machine.alive & ~is_present)
    complete_lanes: dict[int, Lanes] = {}
    for place, arrived_lanes, members in arrived_groups:
        is_complete = (members & missing_masks[indices_of(arrived_lanes) // 32]) == 0
        chosen, still_waiting = split(arrived_lanes, is_complete)
        if chosen is not None:
            complete_lanes[place] = merge(complete_lanes[place], chosen) if place in complete_lanes else chosen
        if still_waiting is not None:
            machine.meetings.setdefault(key, []).append((place, still_waiting, members[~is_complete]))
    return complete_lanes


def pack_bits(flags: Array) -> Array:
    """Pack one bool per lane of the wave into one u32 per warp."""
    return np.packbits(flags.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32)[:, 0]


EVERYBODY = ir.Immediate(-1)  # the mask of an .aligned instruction


def whole_warps(machine: Machine, instruction: Instruction, lanes: Lanes, members: Array) -> None:
    """Raise unless all 32 threads of each warp are there, as an .aligned instruction needs."""
    if (members != 0xFFFFFFFF).any():
        raise EmulationError(f"{machine.place(instruction, lanes)}: not all 32 threads of the warp are there")
