"""The check "async" for registers: a running wgmma owns its A (nobody may write it) and its D (nobody may touch it).

They are in use until wgmma.wait_group. And a wgmma sees only what registers held at the last wgmma.fence, which every
warp needs before its first.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ptxlab.emulator.async_.wgmma import WgmmaProducts
from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.core.effect import Effect
from ptxlab.emulator.core.effect_queue import EffectQueue
from ptxlab.emulator.core.lanes import Handler, Lanes, count_of, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.ir import Entry, Instruction, Register, remembered
from ptxlab.emulator.front.types import bits_of

_TAKEN, _GIVEN = 1, 2  # what a wgmma in flight does to a register


class RegistersInUse(Check):
    """Accesses to the registers of a running wgmma, and a wgmma that registers have not been fenced for."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        shape = machine.files[32].shape
        self.used = np.zeros(shape, np.uint8)
        self.written = np.zeros(shape, np.int32)  # since the last fence: by which instruction, its index + 1
        self.since: set[int] = set()  # registers that have been written since some fence
        self.in_use: set[int] = set()  # registers that are, in some lanes
        self.fenced = np.zeros(machine.lanes, bool)

    def around(self, instruction: Instruction, handler: Handler) -> Handler:
        """Look at sources and destinations before; remember destinations after."""
        if instruction.opcode.startswith("wgmma"):
            return handler
        pc = self.machine.index[id(instruction)]
        if pc not in (known := concerned(self.machine.launch.entry)):
            return handler
        (sources, targets), number = known[pc], pc + 1
        rows = [self.written[register.index] for register in targets]
        written = {register.index for register in targets}

        def checked(lanes: Lanes) -> Any:
            if self.in_use:
                for register in sources:
                    self.meet(instruction, register, lanes, _GIVEN, "reads")
                for register in targets:
                    self.meet(instruction, register, lanes, _TAKEN | _GIVEN, "writes")
            successors = handler(lanes)
            for row in rows:
                row[lanes] = number
            self.since |= written
            return successors

        return checked

    def meet(self, instruction: Instruction, register: Register, lanes: Lanes, flags: int, does: str) -> None:
        """Report an access to a register in use."""
        if register.index not in self.in_use:
            return
        hit = self.used[register.index, lanes] & flags != 0
        if hit.any():
            by = next(e.instruction for e in self.machine.unit(EffectQueue).queue if self.uses(e, register, flags))
            message = (
                f"{does} {register.name}, still in use by {by.seen_from(instruction)}, as nobody has waited for that,"
            )
            self.report(instruction, "async", lanes, hit, message)

    def uses(self, effect: Effect, register: Register, flags: int) -> bool:
        """Whether it is a wgmma that takes or gives the register."""
        if not isinstance(effect, WgmmaProducts):
            return False
        taken, given = effect.decoded.a_registers, effect.decoded.d_registers
        return register in (taken if flags == _TAKEN else given if flags == _GIVEN else taken + given)

    def issue(self, effect: Effect) -> None:
        """A wgmma meets others, and registers that it cannot see."""
        if not isinstance(effect, WgmmaProducts):
            return
        lanes, instruction = indices_of(effect.all_lanes), effect.instruction
        if not self.fenced[lanes].all():
            self.report(instruction, "async", lanes, ~self.fenced[lanes], "no wgmma.fence since the kernel began,")
        decoded, (a_rows, d_rows) = effect.decoded, effect.decoded.rows
        for registers, rows, flag, does in (
            (decoded.a_registers, a_rows, _GIVEN, "takes"),
            (decoded.d_registers, d_rows, _TAKEN, "writes"),  # two wgmmas may add to one D, in order
        ):
            late = self.written[rows, lanes]
            for i in np.flatnonzero(late.any(axis=1)).tolist():
                by = self.machine.code[int(late[i].max()) - 1].seen_from(instruction)
                message = f"takes {registers[i].name}, which {by}, wrote, and no wgmma.fence since,"
                self.report(instruction, "async", lanes, late[i] != 0, message)
            for i in np.flatnonzero((self.used[rows, lanes] & flag).any(axis=1)).tolist():
                self.meet(instruction, registers[i], lanes, flag, does)
        self.mark(effect)

    def mark(self, effect: WgmmaProducts) -> None:
        """Its registers are in use."""
        lanes = indices_of(effect.all_lanes)
        for rows, flag in zip(effect.decoded.rows, (_TAKEN, _GIVEN), strict=True):
            self.used[rows, lanes] |= flag
            self.in_use.update(rows[:, 0].tolist())

    def waited(self, effect: Effect, only_read: bool) -> None:
        """The registers are free, but for those that others use."""
        if isinstance(effect, WgmmaProducts):
            for rows in effect.decoded.rows:
                self.used[rows, indices_of(effect.all_lanes)] = 0
            self.in_use.clear()
            for other in self.machine.unit(EffectQueue).queue:
                if isinstance(other, WgmmaProducts):
                    self.mark(other)

    def register_fence(self, lanes: Lanes) -> None:
        """What the registers hold now can be seen."""
        rows = np.array(sorted(self.since), np.intp)
        self.written[np.ix_(rows, indices_of(lanes))] = 0
        if count_of(lanes) == self.machine.lanes:
            self.since.clear()
        self.fenced[lanes] = True


@remembered
def concerned(entry: Entry) -> dict[int, tuple[list[Register], list[Register]]]:
    """Instructions that read or write registers which some wgmma takes or gives, and these registers."""
    multiplies = (i for i in entry.instructions if i.opcode.startswith("wgmma.mma_async"))
    theirs = {register.index for i in multiplies for register in words((*i.destinations, *i.sources))}
    found = {}
    for pc, each in enumerate(entry.instructions):
        some = each.sources, each.destinations
        sources, targets = ([register for register in words(of) if register.index in theirs] for of in some)
        if sources or targets:
            found[pc] = sources, targets
    return found


def words(registers: Iterable[Register]) -> list[Register]:
    """The 32-bit registers among operands."""
    return [register for register in registers if bits_of(register.type) == 32]
