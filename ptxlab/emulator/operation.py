"""Register-to-register operations: what the `alu` table computes, between registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptxlab.emulator import ir
from ptxlab.emulator.alu import form
from ptxlab.emulator.ir import Instruction
from ptxlab.emulator.kinds import check_operands, require_kinds
from ptxlab.emulator.types import Lanes

if TYPE_CHECKING:
    from ptxlab.emulator.machine import Machine, Step


def bind_operation(machine: Machine, instruction: Instruction, pc: int) -> Step:
    """Step of a register-to-register operation of the `alu` table."""
    check_operands(instruction)
    selectors = tuple(getattr(operand, "selector", "") for operand in instruction.operands)
    known = form(instruction.opcode, selectors if any(selectors) else ())
    operands = list(instruction.operands)
    explicit = [t for t in known.out if t != "cc"]
    if operands and isinstance(operands[0], ir.Vector) and operands[0].pair:
        operands[:1] = operands[0].items
    elif explicit[1:] == ["pred"]:
        operands.insert(1, ir.Sink())
    sources = [t for t in known.sources if t != "cc"]
    if len(operands) != len(explicit) + len(sources):
        raise ValueError(f"{instruction.opcode} takes {len(explicit) + len(sources)} operands, not {len(operands)}")
    require_kinds(operands, (*explicit, *sources))
    if explicit != ["pred", "pred"] and isinstance(instruction.operands[0], ir.Sink):
        raise ValueError("the result cannot be discarded")
    relaxed = instruction.opcode.startswith("cvt.") and ".bf16" not in instruction.opcode
    writers = [machine.writer(o, t, relaxed) for o, t in zip(operands, explicit, strict=False)]
    readers = [machine.reader(o, t, relaxed) for o, t in zip(operands[len(explicit) :], sources, strict=True)]
    if "cc" in known.sources:
        readers.append(machine.carry.__getitem__)
    if "cc" in known.out:
        writers.append(machine.carry.__setitem__)
    compute = known.compute
    if len(writers) == 1:
        write = writers[0]
        if len(readers) == 1:
            (read,) = readers
            return lambda lanes: write(lanes, compute(read(lanes)))
        if len(readers) == 2:
            first, second = readers
            return lambda lanes: write(lanes, compute(first(lanes), second(lanes)))
        return lambda lanes: write(lanes, compute(*[read(lanes) for read in readers]))

    def several(lanes: Lanes) -> None:
        for write, values in zip(writers, compute(*[read(lanes) for read in readers]), strict=True):
            write(lanes, values)

    return several
