"""The table of register-to-register operations: opcode -> types of its operands, and a function of their rows.

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
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.operand_rules import check_operands, require_kinds


@dataclass(frozen=True)
class AluOperation:
    """What an opcode does: PTX types of destinations and sources in operand order, and the function.

    The pseudo-type "cc" is the carry flag, which is no operand. `compute` returns an array, or a tuple of as many as
    there are destinations.
    """

    out: tuple[str, ...]
    sources: tuple[str, ...]
    compute: Callable[..., Any]


# What reductions, atomics and logic are made of
COMBINE: dict[str, np.ufunc] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip
Builder = Callable[[Opcode], AluOperation]
_BUILDERS: dict[tuple[str, bool], Builder] = {}


def operation(*names: str, floating: bool | None = None) -> Callable[[Builder], Builder]:
    """Enter a builder for opcodes of these names, on integers (False), floating-point types (True) or both (None)."""

    def enter(builder: Builder) -> Builder:
        for name in names:
            for domain in (False, True) if floating is None else (floating,):
                _BUILDERS[name, domain] = builder
        return builder

    return enter


@cache
def alu_operation(text: str, selectors: tuple[str, ...] = ()) -> AluOperation:
    """The form of a full opcode such as "mad.lo.u32", with its operands' selectors; raises `UnknownOpcode`."""
    opcode = Opcode(text, selectors)
    builder = _BUILDERS.get((opcode.name, opcode.floating))
    if builder is None:
        raise UnknownOpcode(text)
    result = builder(opcode)
    if opcode.modifiers or not opcode.selected:
        raise UnknownOpcode(text)
    return result


@binder(ANY_OTHER)
def _bind(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    """Handler of a register-to-register operation of the `alu` table."""
    check_operands(instruction)
    selectors = tuple(getattr(operand, "selector", "") for operand in instruction.operands)
    known = alu_operation(instruction.opcode, selectors if any(selectors) else ())
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
