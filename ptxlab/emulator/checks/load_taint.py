"""Taint of loaded values: whether anything depends on the value of a tracked load.

Compilers load what may not be needed. NVRTC makes of `if (threadIdx.x < 32) v = total;` a load by all threads and a
select, and hoists loads of shared variables out of loops and branches. Where such a load races, or reads what nobody
has written, but its value is thrown away, no thread can notice: a PTX read always returns some value and has no other
effect (8.10 says which values; a race is no error in itself). So a finding about an ordinary load counts only if its
value has been used: it, or what was computed of it, has been stored, branched on, used as an address or handed to
another thread or an engine. What a select, or an `and` or `or` with a deciding other operand, leaves out is not used;
nor is what nobody reads any more.

To track every load would double the time of a launch. So it first runs as ever; if there is something about ordinary
loads then, it runs once more, in the very same order, and only the values of those loads are tracked.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.checks.happens_before import HappensBefore, actors_of, event, without_actors
from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.lanes import Handler, Lanes, count_of, indices_of
from ptxlab.emulator.core.machine import BINDERS, Machine
from ptxlab.emulator.front.ir import Instruction, Operand, Register, registers
from ptxlab.emulator.front.types import Array, bits_of

Marks = Array  # i64 per lane: a number in `LoadTaint.sets`


class LoadTaint(Check):
    """Track which loads (by their events) the value of each register depends on."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.order: HappensBefore | None = None  # whose times tell one execution of a load from another
        self.marks: dict[tuple[int, int], Marks] = {}  # by width and row of a register; of all lanes
        self.sets: list[frozenset[int]] = [frozenset()]  # of events without their actor, which is the register's lane
        self.numbers = {self.sets[0]: 0}
        self.used: dict[int, Array] = {}  # such an event -> bool per lane
        # such an event -> what there is to report if it is used: for each occurrence its lane, or -1
        self.waiting_reports: dict[int, list[tuple[Array, Callable[[Array], None]]]] = {}

    def wrap_handler(self, instruction: Instruction, handler: Handler) -> Handler:
        """Wrap a handler: a computation passes its operands' marks on, any other instruction counts as a use."""
        sources, targets = instruction.sources, instruction.destinations
        is_use = not computes(instruction)
        if instruction.opcode.startswith("wgmma"):  # it adds to its destination
            sources = [*sources, *targets]
        gather = self.build_gather(instruction) or (lambda lanes: self.unite_marks(sources, lanes))

        def track_and_run(lanes: Lanes) -> Any:
            if self.marks:
                if is_use:
                    self.mark_used(sources, lanes)
                marks = np.zeros(count_of(lanes), np.int64) if is_use else gather(lanes)
                for register in targets:
                    self.mark(register, lanes, marks)
            return handler(lanes)

        return track_and_run

    def wrap_guarded(self, instruction: Instruction, handler: Handler) -> Handler:
        """Wrap a guarded instruction to count its guard as used: what becomes of all lanes depends on it."""
        guard = instruction.guard
        assert guard is not None

        def use_and_run(lanes: Lanes) -> Any:
            if self.marks:
                self.mark_used([guard], lanes)
            return handler(lanes)

        return use_and_run

    def build_gather(self, instruction: Instruction) -> Callable[[Lanes], Marks] | None:
        """Build a function lanes -> marks of those operands that the result depends on.

        Returns None where it depends on all of them.
        """
        head, *modifiers = instruction.opcode.split(".")
        if head == "selp":
            a, b, predicate = instruction.operands[1:]
            read = self.machine.reader(predicate, "pred")
            return lambda lanes: self.union(
                np.where(read(lanes), self.marks_of(a, lanes), self.marks_of(b, lanes)), self.marks_of(predicate, lanes)
            )
        if head in ("and", "or"):
            t, (a, b) = modifiers[-1], instruction.operands[1:]
            kind = "pred" if t == "pred" else f"s{bits_of(t)}"
            decides = (head == "or") if t == "pred" else -1 if head == "or" else 0
            read_a, read_b = (self.machine.reader(operand, kind) for operand in (a, b))

            def either(lanes: Lanes) -> Marks:
                a_marks, b_marks = self.marks_of(a, lanes), self.marks_of(b, lanes)
                is_decided_by_a = (a_marks == 0) & (read_a(lanes) == decides)
                is_decided_by_b = (b_marks == 0) & (read_b(lanes) == decides)
                return self.union(np.where(is_decided_by_b, 0, a_marks), np.where(is_decided_by_a, 0, b_marks))

            return either
        return None

    # Marks

    def marks_of(self, operand: Operand, lanes: Lanes) -> Marks:
        """Return the marks of an operand."""
        return self.unite_marks(registers((operand,)), lanes)

    def unite_marks(self, sources: list[Register], lanes: Lanes) -> Marks:
        """Return the marks of several registers, united."""
        rows = [self.marks[key] for key in (source.place for source in sources) if key in self.marks]
        return reduce(self.union, [row[lanes] for row in rows], np.zeros(count_of(lanes), np.int64))

    def union(self, a: Marks, b: Marks) -> Marks:
        """Return the marks of the union of two sets of reads, lane by lane."""
        if not a.any() or not b.any():
            return a + b
        pairs, index = np.unique(np.stack((a, b)), axis=1, return_inverse=True)
        union_numbers = [self.number_of(self.sets[i] | self.sets[j]) for i, j in pairs.T.tolist()]
        return np.array(union_numbers)[index.reshape(-1)]

    def number_of(self, reads: frozenset[int]) -> int:
        """Return the number that stands for a set of reads, a new one for a new set."""
        if reads not in self.numbers:
            self.numbers[reads] = len(self.sets)
            self.sets.append(reads)
        return self.numbers[reads]

    def mark(self, register: Register, lanes: Lanes, marks: Marks) -> None:
        """Set a register's marks for these lanes."""
        key = register.place
        if key in self.marks or marks.any():
            self.marks.setdefault(key, np.zeros(self.machine.lanes, np.int64))[lanes] = marks

    # Reads

    def is_tracked(self, instruction: Instruction) -> bool:
        """Tell whether the instruction is one of the loads that are tracked."""
        return self.machine.index[id(instruction)] in self.machine.launch.tracked

    def events(self, instruction: Instruction, lanes: Lanes) -> Array:
        """Encode the reads of these lanes by a load, now."""
        threads = indices_of(lanes)
        times = self.order.clocks.own_times[threads] if self.order else np.zeros_like(threads)
        return event(self.machine.index[id(instruction)], threads, times, strong=False)

    def report_when_used(self, reads: Array, report: Callable[[Array], None]) -> None:
        """Call `report` with a mask of the reads that have been used, now and whenever more are used."""
        events, lanes = without_actors(reads), actors_of(reads)
        for load_event in np.unique(events).tolist():
            self.waiting_reports.setdefault(load_event, []).append((np.where(events == load_event, lanes, -1), report))
            self.report_used(load_event)

    def report_used(self, read: int) -> None:
        """Call the reports that wait for the use of a read."""
        used = self.used.get(read)
        if used is None or read not in self.waiting_reports:
            return
        waiting_reports, self.waiting_reports[read] = self.waiting_reports[read], []
        for lanes, report in waiting_reports:
            used_lanes = (lanes >= 0) & used[lanes]
            if used_lanes.any():
                report(used_lanes)
            if (unused_lanes := np.where(used_lanes, -1, lanes)).max() >= 0:
                self.waiting_reports[read].append((unused_lanes, report))

    def load(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Mark the values that a tracked load brings."""
        if not self.is_tracked(access.instruction):
            return
        reads = without_actors(self.events(access.instruction, lanes))
        distinct, index = np.unique(reads, return_inverse=True)
        marks = np.array([self.number_of(frozenset((read,))) for read in distinct.tolist()])[index]
        for register in access.instruction.destinations:
            self.mark(register, lanes, marks)

    def mark_used(self, sources: list[Register], lanes: Lanes) -> None:
        """Record that the reads in these registers' marks have been used.

        Their marks have done their work; a sum would gather more.
        """
        indices, marks = indices_of(lanes), self.unite_marks(sources, lanes)
        for register in sources:
            self.mark(register, lanes, np.zeros_like(marks))
        for number in np.unique(marks[marks > 0]).tolist():
            for load_event in self.sets[number]:
                used_lanes = self.used.setdefault(load_event, np.zeros(self.machine.lanes, bool))
                used_lanes[indices[marks == number]] = True
                self.report_used(load_event)


def computes(instruction: Instruction) -> bool:
    """Tell whether the instruction only computes its destinations from its sources. (Carries are not tracked.)"""
    head, *modifiers = instruction.opcode.split(".")
    if "cc" in modifiers or head in ("addc", "subc", "madc") or any(r.selector for r in instruction.destinations):
        return False
    return head in ("mov", "cvta") or not (head in BINDERS or ".".join((head, *modifiers[:1])) in BINDERS)
