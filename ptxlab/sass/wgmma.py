"""What only machine code shows of a wgmma kernel: operands that change while the tensor cores still read them.

A wgmma reads operand A from registers until a wait says that its group has ended (PTX ISA 9.7.15.7.1). In a kernel's
source that holds by the order of its statements; a compiler may still move what writes the next operand ahead of the
wait. No emulator of PTX can see that.
"""

import re
from collections.abc import Iterator, Sequence

from ptxlab.sass import SassInstruction
from ptxlab.sass.dataflow import written_registers
from ptxlab.sass.mainloop import basic_blocks, natural_loops

_MULTIPLIES = frozenset({"HGMMA", "IGMMA", "QGMMA", "BGMMA"})
_A_REGISTERS = 4


def overwritten_operands(instructions: Sequence[SassInstruction]) -> list[SassInstruction]:
    """List instructions of the innermost loops with wgmma that write operand A before a wait has ended that wgmma.

    A loop is gone through twice in the order of its addresses, whichever way its branches go.
    """
    blocks = basic_blocks(instructions)
    loops = [loop.body for loop in natural_loops(blocks)]
    bodies = [body for body in loops if not any(inner < body and _multiplies(blocks, inner) for inner in loops)]
    instruction_by_address: dict[int, SassInstruction] = {}
    for body in bodies:
        code = [instruction for index in sorted(body) for instruction in blocks[index]]
        instruction_by_address |= {
            instruction.address: instruction for instruction in _overwriting_instructions([*code, *code])
        }
    return list(instruction_by_address.values())


def describe_overwritten_operands(instructions: Sequence[SassInstruction]) -> Iterator[str]:
    """Yield a line for people about the overwritten operands, if there are any."""
    if overwritten := overwritten_operands(instructions):
        first = overwritten[0]
        line = f", line {first.line}" if first.line else ""
        place = f"{first.name} {first.operands[0]} at {first.address:#x}{line}"
        yield f"{len(overwritten)} instructions write registers that a wgmma under way may still read, first {place}"


def _multiplies(blocks: Sequence[Sequence[SassInstruction]], body: frozenset[int]) -> bool:
    return any(instruction.opcode in _MULTIPLIES for index in body for instruction in blocks[index])


def _overwriting_instructions(code: Sequence[SassInstruction]) -> Iterator[SassInstruction]:
    committed_groups: list[set[str]] = []  # groups that have been committed, oldest first
    open_group: set[str] = set()
    for instruction in code:
        operands = instruction.operands
        if instruction.opcode in _MULTIPLIES:
            if match := re.fullmatch(r"R(\d+)", operands[1]):
                open_group |= {f"R{int(match[1]) + i}" for i in range(_A_REGISTERS)}
            if operands[-1] == "gsb0":
                committed_groups, open_group = [*committed_groups, open_group], set()
        elif instruction.name == "WARPGROUP.DEPBAR.LE":
            pending_count = int(operands[-1], 16)
            committed_groups = committed_groups[-pending_count:] if pending_count else []
        elif operands and any(written_registers(instruction) & group for group in (*committed_groups, open_group)):
            yield instruction
