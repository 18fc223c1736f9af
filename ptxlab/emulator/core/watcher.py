"""Findings, and what looks for them: a watcher, of which packed lanes are one.

A check is a *watcher*: `around(instruction, step)` may wrap an instruction when it is bound, the other methods see
every access and synchronisation. A launch without checks has no watchers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxlab.emulator.ir import called_from
from ptxlab.emulator.packed import LaneFault, lane_faults
from ptxlab.emulator.types import Array, Lanes, indices_of

if TYPE_CHECKING:
    from ptxlab.emulator.access import Access
    from ptxlab.emulator.effects import Effect
    from ptxlab.emulator.ir import Instruction
    from ptxlab.emulator.machine import Machine, Step

Index = tuple[int, int, int]


@dataclass(frozen=True)
class Finding:
    """Something a check found: the first occurrence at its line (and packed lane), and how many times it occurred."""

    kind: str  # "carry", "range", "uninitialised", "race", "async", "async-dirty", "divergence"
    path: str
    line: int
    text: str
    block: Index
    thread: Index
    lane: int | None  # packed lane within the register
    operands: dict[str, int]
    message: str
    count: int = 1
    callers: tuple[tuple[str, int], ...] = ()  # (path, line) of the calls, if the line is in an inlined function
    fault: LaneFault | None = field(default=None, repr=False)  # of packed lanes: registers and results in full

    def __str__(self) -> str:
        more = f"; {self.count - 1} more" if self.count > 1 else ""
        block, thread = ("({},{},{})".format(*index) for index in (self.block, self.thread))
        where = f"{self.path}:{self.line}{called_from(self.path, self.callers)}: `{self.text}`"
        return f"{self.kind}: {where}: {self.message} in block {block} thread {thread}{more}"


@dataclass
class Findings:
    """Findings so far, one per kind, line and packed lane."""

    found: dict[tuple, Finding] = field(default_factory=dict)

    def add(self, machine: Machine, instruction: Instruction, kind: str, lane_index: int, message: str, count: int = 1,
            fault: LaneFault | None = None) -> None:  # fmt: skip
        """Enter `count` occurrences, the first of them in lane `lane_index` of the machine."""
        packed, operands = (fault.lane, fault.operands) if fault else (None, {})
        key = (kind, instruction.path, instruction.line, instruction.callers, packed)
        known = self.found.get(key)
        if known:
            self.found[key] = replace(known, count=known.count + count)
            return
        block, thread = machine.place_of(lane_index)
        self.found[key] = Finding(
            kind,
            instruction.path,
            instruction.line,
            instruction.text,
            block,
            thread,
            packed,
            operands,
            message,
            count,
            instruction.callers,
            fault,
        )


class Watcher:
    """A check that sees nothing; the others override what they look at."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def around(self, instruction: Instruction, step: Step) -> Step:
        """Wrap a step when it is bound."""
        return step

    def around_guard(self, instruction: Instruction, step: Step) -> Step:
        """Wrap a step together with its guard."""
        return step

    def load(self, access: Access, lanes: Lanes, offsets: Array) -> None:
        """Lanes are about to read at arena offsets."""

    def store(self, access: Access, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Lanes are about to write at arena offsets."""

    def atomic(self, access: Access, lanes: Lanes, offsets: Array) -> None:
        """Lanes are about to read, change and write at arena offsets."""

    def fence(self, lanes: Lanes) -> None:
        """Lanes run a memory fence."""

    def converge(self, lanes: Lanes) -> None:
        """Lanes have met at bar.warp.sync."""

    def arrive(self, barrier: tuple[int, int], lanes: Lanes) -> None:
        """Lanes have come to a barrier, (block of the wave, number)."""

    def depart(self, barrier: tuple[int, int], lanes: Lanes | None) -> None:
        """The barrier is complete; these lanes waited there."""

    def exchange(self, instruction: Instruction, lanes: Lanes, sources: Array, members: Array) -> None:
        """Lanes take values of lanes `sources` of their warps, out of those in the masks `members`."""

    def issue(self, effect: Effect) -> None:
        """Lanes ask for something that goes on while they do."""

    def landed(self, effect: Effect) -> None:
        """It has been done; mbarriers hear of it next."""

    def waited(self, effect: Effect, only_read: bool) -> None:
        """The lanes that asked have waited for it, or for its operands to have been read."""

    def settled(self, effect: Effect) -> None:
        """Somebody has waited for it at its mbarrier."""

    def register_fence(self, lanes: Lanes) -> None:
        """Lanes run wgmma.fence."""

    def proxy_fence(self, lanes: Lanes, spaces: tuple[str, ...]) -> None:
        """What the lanes have written in these spaces becomes visible to the copy engine."""

    def begin(self, instruction: Instruction, lanes: Lanes, places: Array) -> None:
        """Lanes have initialised mbarriers at arena offsets."""

    def phase_arrive(self, place: int, lanes: Lanes) -> None:
        """Lanes arrive at an mbarrier."""

    def phase_complete(self, place: int) -> None:
        """A phase of an mbarrier is complete."""

    def phase_wait(self, place: int, lanes: Lanes) -> None:
        """Lanes have seen that the last phase of an mbarrier is complete."""

    def wait_for_predecessors(self, lanes: Lanes) -> None:
        """Lanes have waited for the kernel before."""

    def exit(self, lanes: Lanes) -> None:
        """Lanes have left the kernel."""

    def end(self) -> None:
        """All lanes have ended."""

    def report(
        self, instruction: Instruction, kind: str, lanes: Lanes, wrong: Array, message: str, **more: Any
    ) -> None:
        """A finding for the lanes (of the set) where `wrong`."""
        first = int(indices_of(lanes)[int(np.argmax(wrong))])
        self.machine.launch.findings.add(
            self.machine, instruction, kind, first, message, int(np.count_nonzero(wrong)), **more
        )


class PackedLanes(Watcher):
    """Recomputes annotated instructions lane by lane; see `packed`."""

    def around(self, instruction: Instruction, step: Step) -> Step:
        """Compare what the instruction stores with its lanes computed wide."""
        types = instruction.lanes
        if types is None:
            return step
        machine, width = self.machine, 32
        for part in instruction.opcode.split("."):
            if part[1:].isdigit() and part[0] in "usb":
                width = int(part[1:])
        target, *sources = instruction.operands
        stored = machine.reader(target, f"u{width}")
        letters = [letter for letter in "abc" if letter in types]
        findings = machine.launch.findings
        readers = {letter: machine.reader(sources["abc".index(letter)], f"u{width}") for letter in letters}

        def checked(lanes: Lanes):
            before = {letter: read(lanes).copy() for letter, read in readers.items()}
            outcome = step(lanes)
            for fault in lane_faults(instruction.opcode, types, np.ascontiguousarray(stored(lanes)), before):
                place = int(indices_of(lanes)[fault.index])
                findings.add(machine, instruction, fault.kind, place, fault.problem, fault.times, fault)
            return outcome

        return checked
