"""Part of the check "divergence": `__syncthreads()` that not all threads of a block come to.

PTX lets warps of a block meet by different `bar.sync` instructions, and waits for nobody who has ended. CUDA C++ asks
for more of `__syncthreads()` and its like (CUDA C++ Programming Guide, synchronization functions): under a condition it
may stand only if that holds for all threads of the block or for none. Threads that have returned ahead of it are not
missed. That they have is read off the source: the compiler makes the same code of `if (a) return; f();` as of
`if (!a) f();`. Barriers in inline assembly, with a number of threads and in PTX files keep to the rule of PTX alone
(`divergence`).
"""

import re
from pathlib import Path

import numpy as np

from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.core.lanes import Lanes, count_of, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.ir import Entry, Immediate, Instruction
from ptxlab.emulator.front.types import Array

_LEAVES = re.compile(r"\b(return|exit|goto)\b")
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)((?:[^\n\\]|\\.)*)", re.MULTILINE | re.DOTALL)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)"', re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
Place = tuple[str, int]


def is_syncthreads(instruction: Instruction) -> bool:
    """Tell whether an instruction was compiled from `__syncthreads()` or one of its variants."""
    if instruction.head != "bar" or not instruction.is_compiled or "warp" in instruction.opcode:
        return False
    numbers = [operand for operand in instruction.operands if isinstance(operand, Immediate)]
    return [number.bits for number in numbers] == [0]


def frames(instruction: Instruction) -> tuple[Place, ...]:
    """List the lines that an instruction is at: its own, then those of the calls that it is inlined from."""
    return (instruction.path, instruction.line), *instruction.callers


def may_return(entry: Entry, instruction: Instruction) -> bool:
    """Tell whether threads can leave, ahead of an instruction, the kernel or a function that the instruction is in.

    Looked at are the lines of the kernel and of these functions, from the first to the last that has an instruction: in
    a loop what stands below comes first too. Yes, if the source cannot be read.
    """
    lines_by_callers: dict[tuple[Place, ...], dict[str, set[int]]] = {}  # of a function, by the calls that lead to it
    for each_instruction in entry.instructions:
        places = frames(each_instruction)
        for depth, (path, line) in enumerate(places):
            lines_by_callers.setdefault(places[depth + 1 :], {}).setdefault(path, set()).add(line)
    places = frames(instruction)
    return any(
        leaves(path, min(lines), max(lines))
        for depth in range(len(places))
        for path, lines in lines_by_callers[places[depth + 1 :]].items()
    )


def leaves(path: str, first: int, last: int) -> bool:
    """Tell whether source lines have a `return`, `exit` or `goto`, also by a macro; True if they cannot be read."""
    text = read_code(Path(path))
    if text is None:
        return True
    words = "|".join((_LEAVES.pattern, *(rf"\b{name}\b" for name in leaving_macros(Path(path), set()))))
    return any(re.search(words, line) for line in text.split("\n")[max(first - 1, 0) : last])


def read_code(path: Path) -> str | None:
    """Read a source, with its comments as empty lines; None if it cannot be read."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    return _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)


def leaving_macros(path: Path, seen: set[Path]) -> list[str]:
    """List the macros with a `return` or its like that a source and the files beside it that it includes define."""
    text = None if path in seen else read_code(path)
    if text is None:
        return []
    seen.add(path)
    included = [name for file in _INCLUDE.findall(text) for name in leaving_macros(path.parent / file, seen)]
    return [*included, *(name for name, body in _MACRO.findall(text) if _LEAVES.search(body))]


class WholeBlocks(Check):
    """Check for `__syncthreads()` that not all threads of a block reach; runs after `Divergence`."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.present: dict[tuple[int, int], list[tuple[Instruction, Lanes]]] = {}
        self.excused: dict[int, bool] = {}  # by instruction index: whether threads may have returned ahead of it

    def arrive(self, instruction: Instruction, barrier: tuple[int, int], lanes: Lanes) -> None:
        """Record threads that arrive at a `__syncthreads()`."""
        if is_syncthreads(instruction):
            self.present.setdefault(barrier, []).append((instruction, lanes))

    def depart(self, barrier: tuple[int, int], lanes: Lanes | None) -> None:
        """Check a completed barrier: did all threads of the block come to the same `__syncthreads()`?"""
        arrivals = self.present.pop(barrier, [])
        if not arrivals or self.is_divergent(arrivals):
            return
        (first, first_lanes), *later_arrivals = arrivals
        for arrival, arrival_lanes in later_arrivals:
            if (arrival.path, arrival.line, arrival.callers) != (first.path, first.line, first.callers):
                self.report_missing(first, first_lanes, f"comes to {arrival.seen_from(first)}", arrival_lanes)
                return
        gone_lanes = self.lanes_gone(barrier[0])
        if len(gone_lanes) and not self.is_excused(first):
            self.report_missing(first, first_lanes, "has gone past it, to the end", gone_lanes)

    def is_divergent(self, arrivals: list[tuple[Instruction, Lanes]]) -> bool:
        """Tell whether one of these instructions was already reported as divergent within a warp."""
        places = {("divergence", instruction.path, instruction.line) for instruction, _ in arrivals}
        return any(key[:3] in places for key in self.machine.launch.findings.by_key)

    def is_excused(self, instruction: Instruction) -> bool:
        """Tell whether threads may have returned ahead of an instruction, which allows their absence."""
        index = self.machine.index[id(instruction)]
        if index not in self.excused:
            self.excused[index] = may_return(self.machine.launch.entry, instruction)
        return self.excused[index]

    def lanes_gone(self, block: int) -> Array:
        """Lanes of a block that have left the kernel."""
        first, launch = block * self.machine.stride, self.machine.launch
        return first + np.flatnonzero(~self.machine.alive[first : first + launch.threads])

    def report_missing(self, instruction: Instruction, lanes: Lanes, deviation: str, absent: Lanes) -> None:
        """Report the threads that came, with one that did not."""
        _, thread = self.machine.place_of(int(indices_of(absent)[0]))
        thread_text = ",".join(map(str, thread))
        message = (
            f"by the rule of CUDA C++ all threads of a block have to come to the same __syncthreads(), but thread "
            f"({thread_text}) {deviation}; PTX allows that to whole warps,"
        )
        self.report(instruction, "divergence", lanes, np.ones(count_of(lanes), bool), message)
