"""The check "init": reads of registers, and of bytes of memory, that nobody has written."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.checks.load_taint import LoadTaint
from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.effect import Effect, by_entry
from ptxlab.emulator.core.lanes import Handler, Lanes, as_lanes
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.ir import Instruction, Register
from ptxlab.emulator.front.types import Array

Span = tuple[int, int]  # lanes [start, stop)
# Of a register a flag per lane, the runs of lanes that are known to have written it, and the name
RegisterState = tuple[Array, set[Span], str]


class Initialised(Check):
    """Check for reads of registers and of bytes of memory that were never written."""

    def __init__(self, machine: Machine, taint: LoadTaint | None = None) -> None:
        """Watch a machine; `taint` knows which loads count."""
        super().__init__(machine)
        self.taint = taint
        assert machine.launch.unwritten is not None
        self.unwritten = machine.launch.unwritten
        self.words = {size: self.unwritten.view(f"u{size}") for size in (1, 2, 4, 8)}
        self.registers = {bits: np.zeros(file.shape, bool) for bits, file in machine.files.items()}
        self.register_states: dict[tuple[int, int], RegisterState] = {}  # by width and index
        # buffers and parameters are there from the start; the windows of this wave are not
        for start in machine.launch.shared_windows:
            self.unwritten[start : start + machine.launch.window_bytes] = True
        local = machine.launch.local_window
        self.unwritten[local : local + machine.launch.local_pitch * machine.lanes] = True

    def states_of(self, registers: list[Register]) -> list[RegisterState]:
        """Return the state of each register once: which lanes have written it, the runs seen whole, its name."""
        states_by_name = {}
        for register in registers:
            place = register.place
            if place not in self.register_states:
                self.register_states[place] = self.registers[place[0]][place[1]], set(), register.name
            states_by_name[register.name] = self.register_states[place]
        return list(states_by_name.values())

    def wrap_registers(
        self, instruction: Instruction, handler: Handler, sources: list[Register], targets: list[Register]
    ) -> Handler:
        """Wrap a handler to check the registers that it reads, then mark those that it writes.

        What has been written stays written: a run of lanes that has written a register is not looked at again there.
        """
        reads, writes = self.states_of(sources), self.states_of(targets)

        def check_and_mark(lanes: Lanes) -> Any:
            span = span_of(lanes)
            for is_written, spans, name in reads:
                if span in spans:
                    continue
                if not is_written[lanes].all():
                    message = f"{name} is read, but never written"
                    self.report(instruction, "uninitialised", lanes, ~is_written[lanes], message)
                    is_written[lanes] = True
                if span is not None:
                    spans.add(span)
            successors = handler(lanes)
            for is_written, spans, _ in writes:
                if span not in spans:
                    is_written[lanes] = True
                    if span is not None:
                        spans.add(span)
            return successors

        return check_and_mark if reads or writes else handler

    def wrap_copy(self, handler: Handler, source: Register, target: Register) -> Handler:
        """Wrap the handler of a `mov`: copy whether the source is written, and report nothing.

        Compilers make them of variables that are set in a loop, and declared outside.
        """
        ((source_written, source_spans, _),) = self.states_of([source])
        ((target_written, target_spans, _),) = self.states_of([target])

        def copy(lanes: Lanes) -> Any:
            span = span_of(lanes)
            if span not in target_spans:
                target_written[lanes] |= source_written[lanes]
                if span is not None and span in source_spans:
                    target_spans.add(span)
            return handler(lanes)

        return copy

    def wrap_handler(self, instruction: Instruction, handler: Handler) -> Handler:
        """Wrap a handler to check its sources and then mark its destinations as written."""
        operands = instruction.operands
        if instruction.head == "mov" and all(isinstance(o, Register) and not o.selector for o in operands):
            return self.wrap_copy(handler, *instruction.sources, *instruction.destinations)
        return self.wrap_registers(instruction, handler, instruction.sources, instruction.destinations)

    def wrap_guarded(self, instruction: Instruction, handler: Handler) -> Handler:
        """Check the guard, which all lanes read."""
        assert instruction.guard is not None
        return self.wrap_registers(instruction, handler, [instruction.guard], [])

    def parts(self, access: MemoryAccess, offsets: Array) -> Iterator[tuple[Array, Array]]:
        """Yield (flags as words, indices) covering an access."""
        width = min(access.size, 8)
        for first in range(0, access.size, width):
            yield self.words[width], (offsets + first) // width

    def load(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Report bytes that were never written, once; of an ordinary load only if its value is used."""
        instruction, is_uninitialised = access.instruction, np.zeros(len(offsets), bool)
        for words, index in self.parts(access, offsets):
            is_uninitialised |= words[index] != 0
        if not is_uninitialised.any():
            return
        if access.kind == "load" and access.order == "weak":
            self.machine.launch.suspects.add(self.machine.index[id(instruction)])

        def report_lanes(wrong_lanes: Array) -> None:
            if wrong_lanes.any():
                place = self.machine.memory.name_byte(int(offsets[int(np.argmax(wrong_lanes))]))
                self.report(instruction, "uninitialised", lanes, wrong_lanes, f"reads {place}, which was never written")

        if self.taint and self.taint.is_tracked(instruction):
            self.taint.report_when_used(
                self.taint.events(instruction, lanes), lambda used: report_lanes(used & is_uninitialised)
            )
            return
        report_lanes(is_uninitialised)
        self.store(access, lanes, offsets, offsets)

    def store(self, access: MemoryAccess, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Mark the bytes as written."""
        for words, index in self.parts(access, offsets):
            words[index] = 0

    def exchange(self, instruction: Instruction, lanes: Lanes, sources: Array, members: Array) -> None:
        """Report values taken from lanes that do not take part in the shuffle, which are undefined."""
        is_outside = members >> sources.astype(np.uint32) & np.uint32(1) == 0
        if is_outside.any():
            first = int(np.argmax(is_outside))
            origin = f"lane {sources[first]}, which does not take part (members {members[first]:#010x}),"
            self.report(instruction, "uninitialised", lanes, is_outside, f"takes the value of {origin}")

    def issue(self, effect: Effect) -> None:
        """Report unwritten bytes that an effect reads; what it writes counts as written now, `in_flight` knows when."""
        added_verb = "adds to" if effect.accumulates else ""
        for (lanes, _, sizes), touched_units, verb in (
            (effect.reads, effect.read_units, "takes"),
            (effect.writes, effect.written_units, added_verb),
        ):
            unit = min(effect.grain, 8)
            words, units = self.words[unit], touched_units(unit)
            if verb and np.count_nonzero(words[units]):
                places = touched_units(1)
                is_unwritten = self.unwritten[places]
                place = self.machine.memory.name_byte(int(places[int(np.argmax(is_unwritten))]))
                message = f"{verb} {place}, which was never written"
                self.report(effect.instruction, "uninitialised", lanes, by_entry(is_unwritten, sizes), message)
            words[units] = 0
        for register, lanes in effect.adds_to:
            ((is_written, spans, _),) = self.states_of([register])
            if len(lanes) and span_of(as_lanes(lanes)) in spans:
                continue
            is_unknown = ~is_written[lanes]
            if is_unknown.any():
                message = f"adds to {register.name}, which was never written"
                self.report(effect.instruction, "uninitialised", lanes, is_unknown, message)

    def atomic(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Check an atomic as a read, then as a write."""
        self.load(access, lanes, offsets)
        self.store(access, lanes, offsets, offsets)


def span_of(lanes: Lanes) -> Span | None:
    """Return the lanes as a run (first, end), or None if they are not one."""
    return (lanes.start, lanes.stop) if isinstance(lanes, slice) else None
