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
        address |= _slice(instructions[:n], set(_registers(instructions[n].operands[-1:])))
    for n in stores:
        unpack |= _slice(instructions[:n], set(_wide(instructions[n].operands[-1], _words(instructions[n]))))
    return FragmentCost(len(loads), len(address), len(unpack))


def _slice(instructions: Sequence[SassInstruction], wanted: set[str]) -> set[int]:
    """Find the computations that `wanted` depend on, followed backwards to loads, special registers and constants."""
    found = set()
    for n, instruction in reversed(list(enumerate(instructions))):
        if not instruction.operands or not (results := written(instruction)) & wanted:
            continue
        wanted = wanted - results
        if instruction.section in _COMPUTES:
            found.add(n)
            wanted |= set(_registers(instruction.operands[1:]))
    return found


def written(instruction: SassInstruction) -> set[str]:
    """Return the registers that an instruction writes: its first operand, as wide as its modifiers say."""
    if instruction.section in ("store", "control"):
        return set()
    return set(_wide(instruction.operands[0], _words(instruction)))


def _words(instruction: SassInstruction) -> int:
    """Count the 32-bit registers of the value that an instruction moves or makes."""
    modifiers = instruction.modifiers
    if "128" in modifiers or (instruction.opcode == "LDSM" and "4" in modifiers):
        return 4
    if "64" in modifiers or "WIDE" in modifiers or (instruction.opcode == "LDSM" and "2" in modifiers):
        return 2
    return 1


def _wide(operand: str, words: int) -> list[str]:
    found = _REGISTER.search(operand)
    return [f"{found[1]}{int(found[2]) + i}" for i in range(words)] if found else []


def _registers(operands: Iterable[str]) -> list[str]:
    return ["".join(found) for operand in operands for found in _REGISTER.findall(operand)]
