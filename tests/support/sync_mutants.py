"""Kernels without one of the statements that synchronise: would anybody notice?

What is changed is the PTX that NVRTC makes: every copy of the statement goes, however often the compiler unrolled it.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from ptxlab import emulator
from ptxlab.emulator.core.findings import Findings
from ptxlab.emulator.front import ir
from ptxlab.errors import EmulationError, VerificationError
from ptxlab.runtime import Kernel

# Without fence.mbarrier_init: barriers order the same.
SYNCHRONISING = re.compile(
    r"(bar|barrier)\.(cta\.|warp\.)?(sync|arrive|red)|barrier\.cluster\.|(cp\.async(\.bulk)?|wgmma)\.(commit_group|wait_group)"
    r"|wgmma\.fence|mbarrier\.(arrive|try_wait|test_wait)|cp\.async\.mbarrier\.arrive|fence\.(?!mbarrier_init)|griddepcontrol\.wait"
)
WAITS = re.compile(r"bar\.|cp\.async\.(wait|commit)_group")
Place = tuple[tuple[str, int], ...]  # (path, line), from the innermost function outwards
Statement = tuple[str, int]  # opcode, line of the kernel's own source
Change = Callable[[emulator.Instruction, int], emulator.Instruction]

_add = Findings.add


def remove(instruction: emulator.Instruction, index: int) -> emulator.Instruction:
    """Remove an instruction by a jump to the next one; a wait for an mbarrier succeeds at once instead."""
    if "_wait" in instruction.opcode and instruction.opcode.startswith("mbarrier"):
        zero = ir.Immediate(0)
        return replace(instruction, opcode="setp.eq.u32", operands=(instruction.operands[0], zero, zero))
    return replace(instruction, opcode="bra", operands=(ir.Label("what follows", index + 1),), guard=None)


def expect_no_bytes(instruction: emulator.Instruction, index: int) -> emulator.Instruction:
    """Change an arrival to one that expects no bytes."""
    opcode = instruction.opcode.replace(".expect_tx", "")
    return replace(instruction, opcode=opcode, operands=instruction.operands[:2])


def count_own_vote(instruction: emulator.Instruction, index: int) -> emulator.Instruction:
    """Change a vote to one in which every lane only sees its own part."""
    return replace(instruction, opcode="mov.pred", operands=instruction.operands[:2])


def statements_by_place(kernel: Kernel, pattern: re.Pattern[str] = SYNCHRONISING) -> dict[tuple[str, Place], list[int]]:
    """Find statements by opcode and place, each with the instructions that the compiler made of it."""
    copies_by_place: dict[tuple[str, Place], list[int]] = {}
    for index, instruction in enumerate(kernel.module.entries[kernel.entry].instructions):
        if pattern.match(instruction.opcode):
            place = ((instruction.path, instruction.line), *instruction.callers)
            copies_by_place.setdefault((instruction.opcode, place), []).append(index)
    return copies_by_place


def waits_by_line(kernel: Kernel) -> dict[Statement, list[int]]:
    """Find waits by opcode and line of the kernel's own source, inlined functions included."""
    copies_by_statement: dict[Statement, list[int]] = {}
    for (opcode, place), copies in statements_by_place(kernel, WAITS).items():
        line = next(line for path, line in place if path == kernel.source.path)
        copies_by_statement.setdefault((opcode, line), []).extend(copies)
    return copies_by_statement


def apply_change(kernel: Kernel, copies: Iterable[int], change: Change = remove) -> emulator.Module:
    """Return the kernel's module with these instructions changed."""
    entry = kernel.module.entries[kernel.entry]
    code = list(entry.instructions)
    for index in copies:
        code[index] = change(code[index], index)
    return replace(kernel.module, entries={entry.name: replace(entry, instructions=code)})


def unnoticed_removals(kernel: Kernel, notices: Callable[[emulator.Module], object]) -> list[Statement]:
    """List the waits whose removal no check notices; there have to be some waits."""
    copies_by_statement = waits_by_line(kernel)
    assert copies_by_statement
    return [statement for statement, copies in copies_by_statement.items() if not notices(apply_change(kernel, copies))]


def end_at_first_finding(patch: pytest.MonkeyPatch) -> None:
    """End a run at its first finding, by an error that names it: the further findings of a mutant do not matter."""
    patch.setattr(Findings, "add", _add_and_end)


def _add_and_end(*args: Any, **options: Any) -> None:
    _add(*args, **options)
    raise EmulationError("ended at the first finding")


def diagnosis(module: emulator.Module, check: Callable[[], object], patch: pytest.MonkeyPatch) -> str:
    """Run a check on kernels with this module, and return the error that it raises; empty if none."""
    patch.setattr(Kernel, "module", module)
    end_at_first_finding(patch)
    try:
        check()
    except (AssertionError, EmulationError, VerificationError) as error:
        return str(error) or "wrong"
    return ""
