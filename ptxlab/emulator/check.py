"""Findings, and the checks that look for them: uninitialised reads and packed lanes. (Races: `race`.)

A check is a *watcher*: `around(instruction, step)` may wrap an instruction when it is bound, the other methods see
every access and synchronisation. A launch without checks has no watchers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxlab.emulator.effects import by_entry
from ptxlab.emulator.ir import called_from
from ptxlab.emulator.packed import LaneFault, lane_faults
from ptxlab.emulator.types import Array, Lanes, bits_of, indices_of

if TYPE_CHECKING:
    from ptxlab.emulator.access import Access
    from ptxlab.emulator.effects import Effect
    from ptxlab.emulator.ir import Instruction, Register
    from ptxlab.emulator.machine import Machine, Step

Index = tuple[int, int, int]


@dataclass(frozen=True)
class Finding:
    """Something a check found: the first occurrence at its line (and packed lane), and how many times it occurred."""

    kind: str  # "carry", "range", "uninitialised", "race", "async", "async-dirty"
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

    def fault(self) -> None:
        """The launch ends here, with an error."""

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


class Initialised(Watcher):
    """Reads of registers, and of bytes of memory, that nobody has written."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        assert machine.launch.defined is not None
        self.memory = machine.launch.defined
        self.words = {size: self.memory.view(f"u{size}") for size in (1, 2, 4, 8)}
        self.registers = {bits: np.zeros(file.shape, bool) for bits, file in machine.files.items()}
        # buffers and parameters are there from the start; the windows of this wave are not
        for start in machine.launch.shared_windows:
            self.memory[start : start + machine.launch.window_bytes] = False
        local = machine.launch.local_window
        self.memory[local : local + machine.local_pitch * machine.lanes] = False

    def rows(self, registers: list[Register]) -> dict[str, Array]:
        """Flags of registers, by name."""
        return {r.name: self.registers[bits_of(r.type)][r.index] for r in registers}

    def marking(self, instruction: Instruction, step: Step, sources: list[Register], targets: list[Register]) -> Step:
        """The step, after a look at the registers that it reads, and with those marked that it writes.

        What has been written stays written: lanes that come again, as they do in a loop, are not looked at again.
        """
        reads, writes = self.rows(sources), list(self.rows(targets).values())
        seen: set[tuple[int, int]] = set()

        def marked(lanes: Lanes) -> Any:
            place = (lanes.start, lanes.stop) if isinstance(lanes, slice) else None
            if place in seen:
                return step(lanes)
            for name, known in reads.items():
                if not known[lanes].all():
                    self.report(
                        instruction, "uninitialised", lanes, ~known[lanes], f"{name} is read, but never written"
                    )
                    known[lanes] = True
            outcome = step(lanes)
            for known in writes:
                known[lanes] = True
            if place is not None:
                seen.add(place)
            return outcome

        return marked if reads or writes else step

    def around(self, instruction: Instruction, step: Step) -> Step:
        """Look at sources before, mark destinations after."""
        return self.marking(instruction, step, instruction.sources, instruction.destinations)

    def around_guard(self, instruction: Instruction, step: Step) -> Step:
        """The guard is read by all lanes."""
        assert instruction.guard is not None
        return self.marking(instruction, step, [instruction.guard], [])

    def parts(self, access: Access, offsets: Array) -> Iterator[tuple[Array, Array, int]]:
        """(flags as words, indices, value of a word that is all written) covering an access."""
        step = min(access.size, 8)
        for first in range(0, access.size, step):
            yield self.words[step], (offsets + first) // step, int.from_bytes(b"\1" * step, "little")

    def load(self, access: Access, lanes: Lanes, offsets: Array) -> None:
        """Report bytes that were never written, once."""
        wrong = np.zeros(len(offsets), bool)
        for words, index, full in self.parts(access, offsets):
            wrong |= words[index] != full
        if wrong.any():
            place = self.machine.memory.byte(int(offsets[int(np.argmax(wrong))]))
            self.report(access.instruction, "uninitialised", lanes, wrong, f"reads {place}, which was never written")
            self.store(access, lanes, offsets, offsets)

    def store(self, access: Access, lanes: Lanes, offsets: Array, values: Array) -> None:
        """The bytes are written now."""
        for words, index, full in self.parts(access, offsets):
            words[index] = full

    def issue(self, effect: Effect) -> None:
        """Look at what is read; what is written counts as written, `inflight` knows when."""
        lanes, _, sizes = effect.reads
        places = effect.read_bytes
        known = self.memory[places]
        if not known.all():
            message = f"takes {self.machine.memory.byte(int(places[int(np.argmin(known))]))}, which was never written"
            self.report(effect.instruction, "uninitialised", lanes, by_entry(~known, sizes), message)
            self.memory[places] = True
        lanes, _, sizes = effect.writes
        places = effect.written_bytes
        known = self.memory[places]
        if effect.accumulates and not known.all():
            message = f"adds to {self.machine.memory.byte(int(places[int(np.argmin(known))]))}, which was never written"
            self.report(effect.instruction, "uninitialised", lanes, by_entry(~known, sizes), message)
        self.memory[places] = True
        for register, lanes in effect.adds_to:
            unknown = ~self.registers[bits_of(register.type)][register.index, lanes]
            if unknown.any():
                message = f"adds to {register.name}, which was never written"
                self.report(effect.instruction, "uninitialised", lanes, unknown, message)

    def atomic(self, access: Access, lanes: Lanes, offsets: Array) -> None:
        """Reads first."""
        self.load(access, lanes, offsets)
        self.store(access, lanes, offsets, offsets)
