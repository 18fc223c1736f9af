"""Would anybody notice? Each synchronising statement of the GEMM kernels is taken out, one at a time.

What is changed is the PTX that NVRTC makes: every copy of the statement goes, however often the compiler unrolled it. A
mutant is found by a finding, by an error (a deadlock, a fault), or by a wrong result, early and late.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from ptxlab import emulator, kernels, toolchain
from ptxlab.emulator import ir
from ptxlab.errors import EmulationError

NAMES = [name for name in kernels.specs() if name.startswith("gemm_")]
# Rounds of the ring enough to use every stage again, ending in its first stage or not, and fewer than it has stages; in
# tiles as small as the kernel takes.
PROBLEMS = tuple({"M": 9, "N": 40, "K": K, "g": 128} for K in (640, 896, 128))
TILES: Mapping[str, Mapping[str, int]] = {
    "gemm_w4a8_qoq_sm80": {"BN": 32, "BM": 8, "BK": 128, "WN": 1, "WM": 1, "WK": 2, "STAGES": 3},
}
MOST_STEPS = 2_000_000  # a mutant that spins for ever is found by that
SYNCHRONISING = re.compile(
    r"(bar|barrier)\.(cta\.)?(sync|arrive|red)|barrier\.cluster\.|(cp\.async(\.bulk)?|wgmma)\.(commit_group|wait_group)"
    r"|wgmma\.fence|mbarrier\.(arrive|try_wait|test_wait)|cp\.async\.mbarrier\.arrive|fence\."
)

# (what survives, why nothing can tell): regular expressions over "kernel: opcode".
SURVIVORS = ((r"gemm_w4a8_qoq_sm80:.*wait_group 0", "the groups that the loop has not waited for are empty"),)


@dataclass(frozen=True, eq=False)
class Mutant:
    """A kernel without one statement, which stood at `place`, the lines from the innermost function outwards."""

    kernel: str
    removed: str
    place: tuple[tuple[str, int], ...]
    module: emulator.Module

    def __str__(self) -> str:
        return f"{self.kernel}:{'<'.join(str(line) for _, line in self.place)}: {self.removed}"


@cache
def original(name: str) -> tuple[emulator.Module, dict[str, int]]:
    """The kernel's PTX, parsed, and the constants that it was compiled with."""
    spec, (source, *_) = kernels.find(name)
    config = {**spec.config_for(PROBLEMS[0]), **TILES.get(name, {})}
    text = toolchain.compile_cuda(source, spec.arch, output="ptx", defines=config).data.decode()
    return emulator.parse(text, f"PTX of {source.path}", source.path), config


def without(instruction: emulator.Instruction, index: int) -> emulator.Instruction:
    """Nothing in its place; a wait for an mbarrier succeeds at once."""
    if "_wait" in instruction.opcode and instruction.opcode.startswith("mbarrier"):
        zero = ir.Immediate(0)
        return replace(instruction, opcode="setp.eq.u32", operands=(instruction.operands[0], zero, zero))
    return replace(instruction, opcode="bra", operands=(ir.Label("what follows", index + 1),), guard=None)


def not_expecting(instruction: emulator.Instruction, index: int) -> emulator.Instruction:
    """An arrival that expects no bytes."""
    opcode = instruction.opcode.replace(".expect_tx", "")
    return replace(instruction, opcode=opcode, operands=instruction.operands[:2])


def mutants(name: str) -> Iterator[Mutant]:
    """One for every synchronising statement, and one more for every arrival that expects bytes."""
    module, _ = original(name)
    entry = module.entries[name]
    statements: dict[tuple, list[int]] = {}
    for index, instruction in enumerate(entry.instructions):
        if SYNCHRONISING.match(instruction.opcode):
            place = ((instruction.path, instruction.line), *instruction.callers)
            statements.setdefault((instruction.opcode, place), []).append(index)
    for (opcode, place), copies in statements.items():
        changes = {opcode: without}
        if ".expect_tx" in opcode:
            changes[f"expect_tx of {opcode}"] = not_expecting
        for what, change in changes.items():
            code = list(entry.instructions)
            for index in copies:
                code[index] = change(code[index], index)
            yield Mutant(
                name,
                what.replace(opcode, entry.instructions[copies[0]].text),
                place,
                replace(module, entries={name: replace(entry, instructions=code)}),
            )


@cache
def problem(name: str, which: int) -> tuple[list[Any], np.ndarray]:
    """The arguments in launch order, and what `y` should be."""
    spec, sizes = kernels.specs()[name], PROBLEMS[which]
    logical = spec.example(np.random.default_rng(0), **sizes)
    arrays = spec.pack(logical)
    for arg in spec.args:
        if arg.role in ("out", "scratch"):
            arrays[arg.name] = np.zeros(arg.resolve(sizes), arg.dtype)
    return [arrays[a.name] if a.shape else spec.scalar(a, sizes) for a in spec.args], spec.reference(**logical)


def diagnosis(name: str, module: emulator.Module, mode: str) -> list[emulator.Finding | str]:
    """Findings, the error, or "wrong result" of the first problem that has any; nothing if all seems well."""
    return next(filter(None, (diagnosis_of(name, module, mode, which) for which in range(len(PROBLEMS)))), [])


def diagnosis_of(name: str, module: emulator.Module, mode: str, which: int) -> list[emulator.Finding | str]:
    spec, config = kernels.specs()[name], original(name)[1]
    args, expected = problem(name, which)
    written = [i for i, a in enumerate(spec.args) if a.role in ("out", "scratch")]
    given = [arg.copy() if i in written else arg for i, arg in enumerate(args)]
    launch = spec.launch({**PROBLEMS[which], **config})
    try:
        result = emulator.run(
            module,
            name,
            given,
            grid=launch.grid,
            block=launch.block,
            shared_bytes=launch.shared_bytes,
            cluster=launch.cluster,
            checks=("race", "init", "async"),
            mode=mode,
            max_steps=MOST_STEPS,
            uninitialised=written,
        )
    except EmulationError as error:
        return [str(error)]
    (y,) = (given[i] for i, a in enumerate(spec.args) if a.role == "out")
    return [*result.findings, *([] if np.array_equal(y, expected) else ["wrong result"])]


@pytest.mark.parametrize("mode", emulator.MODES)
@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_itself_is_clean(name: str, mode: str) -> None:
    assert diagnosis(name, original(name)[0], mode) == []


def names_the_source(found: emulator.Finding | str, name: str) -> bool:
    """Whether a finding, or an error's text, is about a line of the kernel's own `.cu`."""
    path = kernels.find(name)[1][0].path
    if isinstance(found, str):
        return path in found or f"{name}.cu" in found
    return path in (found.path, *(caller for caller, _ in found.callers))


@pytest.mark.parametrize("mutant", [mutant for name in NAMES for mutant in mutants(name)], ids=str)
def test_every_missing_statement_is_found_early_and_late(mutant: Mutant) -> None:
    survives = any(re.search(pattern, str(mutant)) for pattern, _ in SURVIVORS)
    for mode in emulator.MODES:
        found = diagnosis(mutant.kernel, mutant.module, mode)
        if survives:
            assert not found, "a justification that is not needed any more"
            continue
        assert found, f"nobody notices, {mode}"
        assert names_the_source(found[0], mutant.kernel), found[0]
