"""The check "init": reads of registers, and of bytes of memory, that nobody has written."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.checks.load_taint import LoadTaint
from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.effect import Effect, by_entry
from ptxlab.emulator.core.lanes import Handler, Lanes
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.ir import Instruction, Register
from ptxlab.emulator.front.types import Array, bits_of


Span = tuple[int, int]  # lanes [start, stop)


class Initialised(Check):
    """Reads of registers, and of bytes of memory, that nobody has written."""

    def __init__(self, machine: Machine, taint: LoadTaint | None = None) -> None:
        """`taint`: who knows which loads count."""
        super().__init__(machine)
        self.taint = taint
        assert machine.launch.defined is not None
        self.memory = machine.launch.defined
        self.words = {size: self.memory.view(f"u{size}") for size in (1, 2, 4, 8)}
        self.registers = {bits: np.zeros(file.shape, bool) for bits, file in machine.files.items()}
        self.spans: dict[tuple[int, int], set[Span]] = {}  # by width and index
        # buffers and parameters are there from the start; the windows of this wave are not
        for start in machine.launch.shared_windows:
            self.memory[start : start + machine.launch.window_bytes] = False
        local = machine.launch.local_window
        self.memory[local : local + machine.launch.local_pitch * machine.lanes] = False

    def rows(self, registers: list[Register]) -> list[tuple[Array, set[Span], str]]:
        """Of each register the flags, the runs of lanes that are known to have written it, and the name."""
        found = []
        for r in {register.name: register for register in registers}.values():
            place = bits_of(r.type), r.index
            spans = self.spans.setdefault(place, set())
            found.append((self.registers[place[0]][r.index], spans, r.name))
        return found

    def marking(
        self, instruction: Instruction, handler: Handler, sources: list[Register], targets: list[Register]
    ) -> Handler:
        """The step, after a look at the registers that it reads, and with those marked that it writes.

        What has been written stays written: a run of lanes that has written a register is not looked at again there.
        """
        reads, writes = self.rows(sources), self.rows(targets)

        def marked(lanes: Lanes) -> Any:
            span = (lanes.start, lanes.stop) if isinstance(lanes, slice) else None
            for known, spans, name in reads:
                if span in spans:
                    continue
                if not known[lanes].all():
                    message = f"{name} is read, but never written"
                    self.report(instruction, "uninitialised", lanes, ~known[lanes], message)
                    known[lanes] = True
                if span is not None:
                    spans.add(span)
            successors = handler(lanes)
            for known, spans, _ in writes:
                if span not in spans:
                    known[lanes] = True
                    if span is not None:
                        spans.add(span)
            return successors

        return marked if reads or writes else handler

    def around(self, instruction: Instruction, handler: Handler) -> Handler:
        """Look at sources before, mark destinations after."""
        return self.marking(instruction, handler, instruction.sources, instruction.destinations)

    def around_guard(self, instruction: Instruction, handler: Handler) -> Handler:
        """The guard is read by all lanes."""
        assert instruction.guard is not None
        return self.marking(instruction, handler, [instruction.guard], [])

    def parts(self, access: MemoryAccess, offsets: Array) -> Iterator[tuple[Array, Array, int]]:
        """(flags as words, indices, value of a word that is all written) covering an access."""
        width = min(access.size, 8)
        for first in range(0, access.size, width):
            yield self.words[width], (offsets + first) // width, int.from_bytes(b"\1" * width, "little")

    def load(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Report bytes that were never written, once; of an ordinary load only if its value is used."""
        instruction, wrong = access.instruction, np.zeros(len(offsets), bool)
        for words, index, full in self.parts(access, offsets):
            wrong |= words[index] != full
        if not wrong.any():
            return
        if access.kind == "load" and access.order == "weak":
            self.machine.launch.suspects.add(self.machine.index[id(instruction)])

        def tell(some: Array) -> None:
            place = self.machine.memory.byte(int(offsets[int(np.argmax(some))]))
            self.report(instruction, "uninitialised", lanes, some, f"reads {place}, which was never written")

        if self.taint and self.taint.is_tracked(instruction):
            self.taint.hold(self.taint.events(instruction, lanes), lambda used: tell(used & wrong))
            return
        tell(wrong)
        self.store(access, lanes, offsets, offsets)

    def store(self, access: MemoryAccess, lanes: Lanes, offsets: Array, values: Array) -> None:
        """The bytes are written now."""
        for words, index, full in self.parts(access, offsets):
            words[index] = full

    def exchange(self, instruction: Instruction, lanes: Lanes, sources: Array, members: Array) -> None:
        """What a lane has that does not take part is undefined."""
        outside = members >> sources.astype(np.uint32) & np.uint32(1) == 0
        if outside.any():
            first = int(np.argmax(outside))
            where = f"lane {sources[first]}, which does not take part (members {members[first]:#010x}),"
            self.report(instruction, "uninitialised", lanes, outside, f"takes the value of {where}")

    def issue(self, effect: Effect) -> None:
        """Look at what is read; what is written counts as written, `in_flight` knows when."""
        adds = "adds to" if effect.accumulates else ""
        for (lanes, _, sizes), places, does in (
            (effect.reads, effect.read_bytes, "takes"),
            (effect.writes, effect.written_bytes, adds),
        ):
            known = self.memory[places]
            if does and not known.all():
                place = self.machine.memory.byte(int(places[int(np.argmin(known))]))
                message = f"{does} {place}, which was never written"
                self.report(effect.instruction, "uninitialised", lanes, by_entry(~known, sizes), message)
            self.memory[places] = True
        for register, lanes in effect.adds_to:
            unknown = ~self.registers[bits_of(register.type)][register.index, lanes]
            if unknown.any():
                message = f"adds to {register.name}, which was never written"
                self.report(effect.instruction, "uninitialised", lanes, unknown, message)

    def atomic(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Reads first."""
        self.load(access, lanes, offsets)
        self.store(access, lanes, offsets, offsets)
