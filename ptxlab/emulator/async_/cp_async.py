"""cp.async: copies that go on while their threads do, and the groups of all such. When they happen: `effect_queue`.

Those of the copy engine, cp.async.bulk, stand in `cp_async_bulk`.
"""

import numpy as np

from ptxlab.emulator.async_.copy_effects import Copies
from ptxlab.emulator.async_.cp_async_bulk import SHARED, bulk, offsets_of, prefetch
from ptxlab.emulator.core.effect import UNGROUPED
from ptxlab.emulator.core.effect_queue import EffectQueue
from ptxlab.emulator.core.lanes import Handler, Lanes, indices_of
from ptxlab.emulator.core.machine import Machine, binder
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import bits_of
from ptxlab.emulator.sync.mbarrier import MBarrierOperand
from ptxlab.errors import MemoryFault

_GROUP_ACTIONS = ("commit_group", "wait_group", "wait_all")


@binder("cp")
def _copy(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    opcode = Opcode(instruction.opcode)
    for hint in ("L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"):
        opcode.flag(hint)
    if not opcode.flag("async"):
        raise UnknownOpcode(instruction.opcode)
    kind = "bulk" if opcode.flag("bulk") else "cp.async"
    if action := opcode.choice(*_GROUP_ACTIONS, default=""):
        handler = _group(machine, instruction, opcode, kind, action)
    elif opcode.flag("mbarrier"):
        handler = _arrive(machine, instruction, opcode)
    elif kind == "bulk" and opcode.flag("prefetch"):
        handler = prefetch(machine, instruction, opcode)
    else:
        handler = (bulk if kind == "bulk" else _small)(machine, instruction, opcode)
    if opcode.modifiers:
        raise UnknownOpcode(instruction.opcode)
    return handler


def _group(machine: Machine, instruction: Instruction, opcode: Opcode, kind: str, action: str) -> Handler:
    """commit_group, wait_group, wait_all."""
    pending = machine.unit(EffectQueue)
    if action == "commit_group":
        return lambda lanes: pending.commit(kind, lanes)
    if action == "wait_all" and kind == "cp.async":

        def wait_all(lanes: Lanes) -> None:
            pending.commit(kind, lanes)
            pending.wait(kind, lanes, 0)

        return wait_all
    if action == "wait_all":
        raise UnknownOpcode(instruction.opcode)
    (newest,), only_read = instruction.operands, kind == "bulk" and opcode.flag("read")
    if not isinstance(newest, ir.Immediate):
        raise ValueError("the number of groups has to be a constant")
    return lambda lanes: pending.wait(kind, lanes, newest.bits, only_read)


def _small(machine: Machine, instruction: Instruction, opcode: Opcode) -> Handler:
    """cp.async of 4, 8 or 16 bytes per lane; an optional operand says how many of them to read, or whether none."""
    cached = opcode.choice("ca", "cg")
    if not any(opcode.flag(space) for space in SHARED[:2]) or not opcode.flag("global"):
        raise UnknownOpcode(instruction.opcode)
    target, source, size, *more = instruction.operands
    if "L2::cache_hint" in instruction.opcode:
        more = more[:-1]  # the policy
    if not isinstance(size, ir.Immediate) or size.bits not in ((4, 8, 16) if cached == "ca" else (16,)):
        raise ValueError(f"cp.async.{cached} copies {'4, 8 or 16' if cached == 'ca' else '16'} bytes")
    count, ignores = size.bits, bool(more) and isinstance(more[0], ir.Register) and bits_of(more[0].type) == 1
    read_size = machine.reader(more[0] if more else size, "pred" if ignores else "u32")
    locate_target = offsets_of(machine, instruction, "store", "shared", target, count)
    locate_source = offsets_of(machine, instruction, "load", "global", source, count)
    pending = machine.unit(EffectQueue)

    def copy(lanes: Lanes) -> None:
        indices = indices_of(lanes)
        sizes, wanted = np.full(len(indices), count), np.broadcast_to(read_size(lanes), indices.shape)
        read = np.where(wanted, 0, count) if ignores else wanted.astype(np.int64)
        if (read > count).any():
            place = machine.fault_place(instruction, int(indices[int(np.argmax(read > count))]))
            raise MemoryFault(f"{place}: {int(read.max())} bytes to read, more than the {count} of the copy")
        pending.issue(
            Copies(
                instruction=instruction,
                kind="cp.async",
                lanes=indices,
                source=locate_source(lanes, read),
                target=locate_target(lanes, sizes),
                read=read,
                size=sizes,
                group=pending.committed["cp.async"][indices],
                barrier=np.full(len(indices), -1),
            )
        )

    return copy


def _arrive(machine: Machine, instruction: Instruction, opcode: Opcode) -> Handler:
    """cp.async.mbarrier.arrive: the mbarrier hears of the lane's cp.async so far as of an arrival."""
    extra = not opcode.flag("noinc")
    if not opcode.flag("arrive") or not opcode.flag("b64"):
        raise UnknownOpcode(instruction.opcode)
    space = opcode.choice(*SHARED[:2], default="generic").split("::")[0]
    find = MBarrierOperand(machine, instruction, space, instruction.operands[0], "load").objects

    def arrive(lanes: Lanes) -> None:
        indices, places = indices_of(lanes), np.zeros(len(indices_of(lanes)), np.int64)
        for barrier, who in find(lanes):
            places[who] = barrier.place
            barrier.missing += len(who) if extra else 0
        zero = np.zeros_like(places)
        machine.unit(EffectQueue).arrive(
            Copies(
                instruction=instruction,
                kind="cp.async",
                lanes=indices,
                source=zero,
                target=zero,
                read=zero,
                size=zero,
                group=zero + UNGROUPED,
                barrier=places,
                arrives=True,
            )
        )

    return arrive
