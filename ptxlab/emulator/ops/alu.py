"""The table of register-to-register operations: opcode -> operand types, and a function of arrays of lanes.

Each family module (`integer`, `floating`, `convert`, `video`) enters its operations with `@operation`. A function
takes one array per source and returns one per destination, all of shape [lanes]; a constant source has shape [1] and
broadcasts. Sources may be views of the register file, so a function never writes into them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ptxlab.emulator.core.lanes import Handler, Lanes
from ptxlab.emulator.core.machine import ANY_OTHER, Machine, binder
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction, cache_on_subject
from ptxlab.emulator.front.opcode import OpcodeTable
from ptxlab.emulator.front.operand_rules import check_operands, require_kinds


@dataclass(frozen=True)
class AluOperation:
    """Meaning of an opcode: PTX types of destinations and sources in operand order, and the function.

    The pseudo-type "cc" is the carry flag, which is no operand. `compute` returns an array, or a tuple of as many as
    there are destinations. It takes the `optional` source too if the instruction has it.
    """

    out: tuple[str, ...]
    sources: tuple[str, ...]
    compute: Callable[..., Any]
    optional: str = ""  # type of a last source


# What reductions, atomics and logic are made of
COMBINE: dict[str, np.ufunc] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip
_TABLE = OpcodeTable[AluOperation]()
operation = _TABLE.enter
Typed = list[tuple[ir.Operand, str]]


@cache
def alu_operation(text: str, selectors: tuple[str, ...] = ()) -> AluOperation:
    """Find the operation of a full opcode such as "mad.lo.u32", with its operands' selectors.

    Raises `UnknownOpcode`.
    """
    return _TABLE.find(text, selectors)


def selectors_of(instruction: Instruction) -> tuple[str, ...]:
    """Return the selectors of a video instruction's operands; an empty tuple for other instructions."""
    selectors = tuple(getattr(operand, "selector", "") for operand in instruction.operands)
    return selectors if any(selectors) else ()


@cache_on_subject
def typed_operands(instruction: Instruction) -> tuple[AluOperation, Typed, Typed]:
    """Return the operation, and its (operand, type) destinations and sources without the carry flag.

    Raises `UnknownOpcode`, and ValueError for operands that the operation does not take.
    """
    check_operands(instruction)
    alu = alu_operation(instruction.opcode, selectors_of(instruction))
    operands = list(instruction.operands)
    targets, sources = ([t for t in types if t != "cc"] for types in (alu.out, alu.sources))
    if operands and isinstance(operands[0], ir.Vector) and operands[0].pair:
        operands[:1] = operands[0].elements
    elif targets[1:] == ["pred"]:
        operands.insert(1, ir.Sink())
    types = [*targets, *sources]
    if alu.optional and len(operands) == len(types) + 1:
        types.append(alu.optional)
    if len(operands) != len(types):
        raise ValueError(f"{instruction.opcode} takes {len(types)} operands, not {len(operands)}")
    require_kinds(operands, types)
    if targets != ["pred", "pred"] and isinstance(instruction.operands[0], ir.Sink):
        raise ValueError("the result cannot be discarded")
    operands_and_types = list(zip(operands, types, strict=True))
    return alu, operands_and_types[: len(targets)], operands_and_types[len(targets) :]


@binder(ANY_OTHER)
def _bind(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    """Build the handler of a register-to-register operation of the `alu` table."""
    alu, targets, sources = typed_operands(instruction)
    is_relaxed = instruction.opcode.startswith("cvt.") and ".bf16" not in instruction.opcode
    writers = [machine.writer(operand, t, is_relaxed) for operand, t in targets]
    readers = [machine.reader(operand, t, is_relaxed) for operand, t in sources]
    if "cc" in alu.sources:
        readers.append(machine.carry.__getitem__)
    if "cc" in alu.out:
        writers.append(machine.carry.__setitem__)
    compute = alu.compute
    if len(writers) == 1:
        write = writers[0]
        if len(readers) == 1:
            (read,) = readers
            return lambda lanes: write(lanes, compute(read(lanes)))
        if len(readers) == 2:
            first, second = readers
            return lambda lanes: write(lanes, compute(first(lanes), second(lanes)))
        return lambda lanes: write(lanes, compute(*[read(lanes) for read in readers]))

    def write_all(lanes: Lanes) -> None:
        for write, values in zip(writers, compute(*[read(lanes) for read in readers]), strict=True):
            write(lanes, values)

    return write_all
