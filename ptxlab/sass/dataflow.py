"""Where a register's value comes from, in machine code without loops: what part of a kernel computes what."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ptxlab.sass import SassInstruction

_REGISTER = re.compile(r"\b(U?R)(\d+)\b")
_COMPUTES = frozenset({"arithmetic", "uniform"})


@dataclass(frozen=True)
class FragmentCost:
    """Instructions of one thread of a kernel of the family `load`: per 32 weights, since that is what a thread brings.

    Attributes:
        loads: shared memory -> registers.
        address: arithmetic on the addresses of these loads.
        unpack: arithmetic between them and the results.
    """

    loads: int
    address: int
    unpack: int


def fragment_cost(instructions: Sequence[SassInstruction]) -> FragmentCost:
    """Split a straight-line kernel into shared loads, their addresses, and what is done to their values."""
    loads = [n for n, i in enumerate(instructions) if i.opcode in ("LDS", "LDSM")]
    stores = [n for n, i in enumerate(instructions) if i.opcode == "STG"]
    address: set[int] = set()
    unpack: set[int] = set()
    for n in loads:
        address |= _backward_slice(instructions[:n], set(_registers(instructions[n].operands[-1:])))
    for n in stores:
        unpack |= _backward_slice(
            instructions[:n], set(_register_range(instructions[n].operands[-1], _register_count(instructions[n])))
        )
    return FragmentCost(len(loads), len(address), len(unpack))


def _backward_slice(instructions: Sequence[SassInstruction], registers: set[str]) -> set[int]:
    """Find the computations that registers depend on, followed backwards to loads, special registers and constants."""
    computations = set()
    for n, instruction in reversed(list(enumerate(instructions))):
        if not instruction.operands or not (outputs := written_registers(instruction)) & registers:
            continue
        registers = registers - outputs
        if instruction.section in _COMPUTES:
            computations.add(n)
            registers |= set(_registers(instruction.operands[1:]))
    return computations


def written_registers(instruction: SassInstruction) -> set[str]:
    """Return the registers that an instruction writes: its first operand, as wide as its modifiers say."""
    if instruction.section in ("store", "control"):
        return set()
    return set(_register_range(instruction.operands[0], _register_count(instruction)))


def _register_count(instruction: SassInstruction) -> int:
    """Count the 32-bit registers of the value that an instruction moves or makes."""
    modifiers = instruction.modifiers
    if "128" in modifiers or (instruction.opcode == "LDSM" and "4" in modifiers):
        return 4
    if "64" in modifiers or "WIDE" in modifiers or (instruction.opcode == "LDSM" and "2" in modifiers):
        return 2
    return 1


def _register_range(operand: str, words: int) -> list[str]:
    match = _REGISTER.search(operand)
    return [f"{match[1]}{int(match[2]) + i}" for i in range(words)] if match else []


def _registers(operands: Iterable[str]) -> list[str]:
    return ["".join(groups) for operand in operands for groups in _REGISTER.findall(operand)]
