"""st.async and red.async: stores and additions to another block's shared memory, which tell an mbarrier there."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.addressing import elements, locator
from ptxlab.emulator.core.effect import Effect, Places
from ptxlab.emulator.core.effect_queue import EffectQueue
from ptxlab.emulator.core.lanes import Handler, Lanes, indices_of
from ptxlab.emulator.core.machine import Machine, binder
from ptxlab.emulator.core.memory import Memory
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, Array, bits_of
from ptxlab.emulator.ops.atomic import combination, split_into_rounds
from ptxlab.emulator.sync.mbarrier import MBarrierOperand


@dataclass(eq=False, kw_only=True)
class Stores(Effect):
    """Entry i stores its values, or combines them with what is there."""

    target: Array
    values: Array  # [entries, elements]
    combine: Callable[..., Array] | None = None

    @property
    def writes(self) -> Places:
        """The target."""
        return self.lanes, self.target, np.full(len(self.lanes), self.values[:1].nbytes)

    def write(self, memory: Memory) -> None:
        """Write the targets; additions to one of them go one after another."""
        size = self.values.itemsize
        view = memory.arena.view(self.values.dtype)
        for part in split_into_rounds(self.target):
            places = (self.target[part] // size)[:, None] + np.arange(self.values.shape[1])
            values = self.values[part]
            view[places] = values if self.combine is None else self.combine(view[places], values)


@binder("st.async", "red.async")
def _remote(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    opcode = Opcode(instruction.opcode)
    is_reduction = opcode.name == "red"
    required_flags = [opcode.flag(word) for word in ("async", "shared::cluster", "mbarrier::complete_tx::bytes")]
    opcode.flag("relaxed" if is_reduction else "weak")  # the order may be left out: there is one only
    if not all(required_flags) or (is_reduction and not opcode.flag("cluster")):
        raise UnknownOpcode(instruction.opcode)
    operation = opcode.choice("add", "min", "max", "and", "or", "xor", "inc", "dec") if is_reduction else ""
    count = 1 if is_reduction else int(opcode.choice("v2", "v4", default="v1")[1])
    t = opcode.choice("b32", "u32", "s32", "u64", *(() if is_reduction else ("f32", "b64", "s64", "f64")))
    if opcode.modifiers:
        raise UnknownOpcode(instruction.opcode)
    address, source, barrier = instruction.operands
    access = MemoryAccess(instruction, "store", "shared::cluster", "weak", t, count, (operation,))
    locate = locator(machine, access, address)
    mbarrier = MBarrierOperand(machine, instruction, "shared::cluster", barrier, "load")
    as_bits = t if is_reduction else f"u{bits_of(t)}"
    readers = [machine.reader(element, as_bits) for element in elements(source, count)]
    combine, effects = combination(operation, t) if is_reduction else None, machine.unit(EffectQueue)

    def store(lanes: Lanes) -> None:
        indices = indices_of(lanes)
        barriers = mbarrier.locate(lanes)
        list(mbarrier.objects(lanes, barriers))  # they have to be there
        columns = [np.broadcast_to(read(lanes), indices.shape) for read in readers]
        effects.issue(
            Stores(
                instruction=instruction,
                kind="bulk",
                accumulates=is_reduction,
                lanes=indices,
                target=locate(lanes),
                values=np.stack(columns, axis=1).astype(DTYPES[as_bits]),
                combine=combine,
                barrier=barriers,
            )
        )

    return store
