"""Kernels without one of the statements that make threads or copies wait: would anybody notice?"""

from dataclasses import replace

from ptxlab import emulator
from ptxlab.emulator import ir
from ptxlab.runtime import Kernel

WAITS = ("bar.", "cp.async.wait_group", "cp.async.commit_group")
Statement = tuple[str, int]  # opcode, line of the source


def statements(kernel: Kernel) -> dict[Statement, list[int]]:
    """The instructions that the compiler made of each of them, however often it unrolled a loop."""
    found: dict[Statement, list[int]] = {}
    for index, instruction in enumerate(kernel.module.entries[kernel.entry].instructions):
        if instruction.opcode.startswith(WAITS):
            places = ((instruction.path, instruction.line), *instruction.callers)
            line = next(line for path, line in places if path == kernel.source.path)
            found.setdefault((instruction.opcode, line), []).append(index)
    return found


def without(kernel: Kernel, statement: Statement) -> emulator.Module:
    """The kernel's module with nothing in their place."""
    entry = kernel.module.entries[kernel.entry]
    code = list(entry.instructions)
    for index in statements(kernel)[statement]:
        code[index] = replace(code[index], opcode="bra", operands=(ir.Label("what follows", index + 1),), guard=None)
    return replace(kernel.module, entries={entry.name: replace(entry, instructions=code)})
