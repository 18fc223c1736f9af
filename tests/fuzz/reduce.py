"""A program with a mismatch, reduced: units that only compute give way to loads of what they made in the emulator.

What is left is the instruction that differs, and those without which it does not.
"""

import re
from collections.abc import Callable, Sequence

from tests.fuzz.compare import compare
from tests.fuzz.domains import DOMAINS, Values
from tests.fuzz.program import Program, Unit, load

Run = Callable[[Program, str], Values]  # a text of the program -> its slots
_REGISTER = re.compile(r"%[a-z]+\d*")


def reduce_to_instruction(program: Program, slot: int, emulate: Run, run: Run) -> str:
    """Return PTX with as few instructions as still give a slot another value by `run` than by `emulate`.

    The program gets an input more for each slot: what the emulator makes of it.
    """
    slots = emulate(program, program.render()).reshape(-1, program.total)
    first_row = len(program.inputs)
    program.inputs += list(slots)

    def differs(units: Sequence[Unit]) -> bool:
        text = program.render(units)
        differences = compare(program, emulate(program, text), run(program, text), models=True).differences
        return any(difference.slot == slot for difference in differences)

    def loads(unit: Unit) -> Unit:
        lines = [line for register, i in unit.makes
                 for line in load(register, DOMAINS[program.slots[i].domain].bits,
                                  f"%in+{8 * program.total * (first_row + i)}")]  # fmt: skip
        return Unit(lines, unit.makes, is_pure=True, kernel=unit.kernel)

    units = without_unread(_units_until(program, slot))
    if not differs(units):
        return program.render()
    for i, unit in enumerate(units):
        if unit.is_pure and unit.makes and all(j >= 0 and j != slot for _, j in unit.makes):
            candidate = [*units[:i], loads(unit), *units[i + 1 :]]
            units = candidate if differs(candidate) else units
    return program.render(without_unread(units))


def _units_until(program: Program, slot: int) -> list[Unit]:
    """List the units up to the one that makes the slot, and its store; no other slot is stored."""
    units = []
    for unit in program.units:
        if not unit.stores or slot in unit.stores:
            units.append(unit)
        if slot in unit.stores:
            break
    return units


def without_unread(units: Sequence[Unit]) -> list[Unit]:
    """Leave out what only computes registers that nobody reads behind it."""
    read: set[str] = set()
    needed = []
    for unit in reversed(units):
        if not unit.is_pure or any(register in read for register, _ in unit.makes):
            needed.append(unit)
            read.update(register for line in unit.lines for register in _REGISTER.findall(line))
    return needed[::-1]
