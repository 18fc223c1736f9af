"""setmaxnreg: changes no results; the register counts that warps give up and take have to add up."""

from itertools import zip_longest

import numpy as np

from ptxlab.emulator.core.lanes import Handler, Lanes, indices_of
from ptxlab.emulator.core.machine import Machine, Unit, binder
from ptxlab.emulator.core.warp import EVERYBODY, bind_collective, whole_warps
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import UnknownOpcode
from ptxlab.emulator.front.types import Array
from ptxlab.errors import EmulationError

LEAST, MOST = 24, 256
_OF_AN_SM = 65536
_GROUP = 4  # warps


@binder("setmaxnreg")
def _set(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    _, action, *modifiers = instruction.opcode.split(".")
    if action not in ("inc", "dec") or modifiers != ["sync", "aligned", "u32"]:
        raise UnknownOpcode(instruction.opcode)
    (count,) = instruction.operands
    if not isinstance(count, ir.Immediate) or not LEAST <= count.bits <= MOST or count.bits % 8:
        raise ValueError(f"the number of registers has to be a multiple of 8 from {LEAST} to {MOST}")

    budget = machine.unit(RegisterBudget)

    def change(lanes: Lanes, members: Array) -> None:
        whole_warps(machine, instruction, lanes, members)
        budget.change(instruction, indices_of(lanes)[::32] // 32, count.bits, grows=action == "inc")

    return bind_collective(machine, pc, EVERYBODY, change)


class RegisterBudget(Unit):
    """Registers that each warp has, where that is known: from `.maxnreg`, or its first setmaxnreg."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        warps, entry = machine.lanes // 32, machine.launch.entry
        declared_registers = entry.directives.get("maxnreg", (0,))[0]
        self.registers = np.full(warps, declared_registers)
        self.history: list[list[Instruction]] = [[] for _ in range(warps)]
        self.per_block = machine.stride // 32
        # A block keeps the registers it starts with: as many as let it start, in eights for each thread.
        threads = (entry.max_threads or machine.stride) * entry.directives.get("minnctapersm", (1,))[0]
        self.at_start = declared_registers or min(_OF_AN_SM // threads // 8 * 8, MOST)

    def change(self, instruction: Instruction, warps: Array, count: int, grows: bool) -> None:
        """Record the register count that warps set with a setmaxnreg, and check it."""
        for warp in warps.tolist():
            old_count = int(self.registers[warp])
            if old_count and (count < old_count if grows else count > old_count):
                change = "increase" if grows else "decrease"
                self.fail(instruction, warp, f"the warp has {old_count} registers per thread, so this is no {change}")
            self.registers[warp] = count
            self.history[warp].append(instruction)
            self.check_sum(instruction, warp)

    def check_sum(self, instruction: Instruction, warp: int) -> None:
        """Check that the registers of a block exist, once all of its warps that set any have done so equally often."""
        first = warp // self.per_block * self.per_block
        block = slice(first, first + self.per_block)
        if len({len(history) for history in self.history[block] if history}) == 1:
            total_registers = 32 * int(self.registers[block].sum())
            available_registers = 32 * self.per_block * self.at_start
            if total_registers > available_registers:
                start_note = (
                    f"{available_registers}, at most {self.at_start} per thread, with which it starts: "
                    "this waits for ever"
                )
                self.fail(
                    instruction,
                    warp,
                    f"the block's warps then have {total_registers} registers, more than the {start_note}",
                )

    def finish(self) -> None:
        """Check in the end that all four warps of a warp group have executed the same setmaxnreg."""
        for warp, history in enumerate(self.history):
            block = warp // self.per_block * self.per_block
            first = block + (warp - block) // _GROUP * _GROUP
            longest_history = max(self.history[first : min(first + _GROUP, block + self.per_block)], key=len)
            if history != longest_history:
                pairs = zip_longest(longest_history, history)
                first_missed = next(missed for missed, executed in pairs if executed is not missed)
                problem = "not all warps of the warp group execute this: one that does not is that of this thread"
                self.fail(first_missed, warp, problem)

    def fail(self, instruction: Instruction, warp: int, problem: str) -> None:
        """Raise for a warp."""
        raise EmulationError(f"{self.machine.fault_place(instruction, 32 * warp)}: {problem}")
