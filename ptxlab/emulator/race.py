"""Data races, by vector clocks.

An access is ordered before another one if the lane that does the latter knows of it (`order`). Per byte the last write
and two concurrent readers are remembered, so a third reader that alone is unordered with a write is missed; so are
races between blocks of different waves. Two lanes that store different values to one address with one instruction are
reported too. Stores of the value that is there already are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptxlab.emulator.order import STRONG, Order, actors_of
from ptxlab.emulator.types import Array, Lanes, count_of, indices_of

if TYPE_CHECKING:
    from ptxlab.emulator.access import Access, Sizes
    from ptxlab.emulator.effects import Effect
    from ptxlab.emulator.ir import Instruction
    from ptxlab.emulator.machine import Machine


class Races(Order):
    """Conflicting accesses by different threads that nothing orders."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.busy: Array | None = None  # bytes that `inflight` looks at
        self.writes, self.reads, self.other_reads = (np.zeros(machine.memory.size, np.uint64) for _ in range(3))

    # Accesses

    def load(self, access: Access, lanes: Lanes, offsets: Array) -> None:
        """A read races with an unordered write."""
        if access.space in ("local", "param", "const"):
            return
        strong = access.order != "weak"
        places, threads, events = self.events(access, lanes, offsets, strong)
        self.compare(access.instruction, access.size, lanes, places, threads, self.writes, strong, "read of")
        self.remember_reads(places, threads, events)
        super().load(access, lanes, offsets)

    def store(self, access: Access, lanes: Lanes, offsets: Array, values: Array) -> None:
        """A write races with unordered reads and writes, and with its own like in the other lanes."""
        if access.space in ("local", "param", "const"):
            return
        self.same_instruction(access, lanes, offsets, values)
        super().store(access, lanes, offsets, values)
        strong = access.order != "weak"
        places, threads, events = self.events(access, lanes, offsets, strong)
        new = (
            np.ascontiguousarray(np.broadcast_to(values, (len(offsets), *values.shape[1:]))).view(np.uint8).reshape(-1)
        )
        changed = self.machine.memory.arena[places] != new
        for past in (self.writes, self.reads, self.other_reads):
            self.compare(access.instruction, access.size, lanes, places, threads, past, strong, "write to", changed)
        self.reads[places] = self.other_reads[places] = 0
        self.writes[places] = events

    def atomic(self, access: Access, lanes: Lanes, offsets: Array) -> None:
        """Atomics race with ordinary accesses only."""
        places, threads, events = self.events(access, lanes, offsets, True)
        for past in (self.writes, self.reads, self.other_reads):
            self.compare(access.instruction, access.size, lanes, places, threads, past, True, "atomic on")
        super().atomic(access, lanes, offsets)
        self.writes[places] = events

    def events(self, access: Access, lanes: Lanes, offsets: Array, strong: bool) -> tuple[Array, Array, Array]:
        """Per byte: its place, the thread (as a lane of the wave), and the event as it is stored."""
        threads = indices_of(lanes)
        events = self.event(access.instruction, threads, self.clocks.own[threads], strong)
        return *self.bytes(access, lanes, offsets), np.repeat(events, access.size)

    def remember_reads(self, places: Array, threads: Array, events: Array) -> None:
        """Two concurrent readers per byte."""
        replace = ~self.unordered(self.reads[places], threads)  # what it replaces lies before it, so nothing is lost
        if replace.all():
            self.reads[places] = events
            second = self.reads[places] != events
        else:
            self.reads[places[replace]] = events[replace]
            second = ~replace | (self.reads[places] != events)
        if second.any():
            self.other_reads[places[second]] = events[second]

    def compare(self, instruction: Instruction, sizes: Sizes, lanes: Lanes, places: Array, threads: Array,
                events: Array, strong: bool, what: str, among: Array | None = None) -> None:  # fmt: skip
        """Report the accesses, of so many bytes per lane, that race with past ones."""
        past = events[places]
        wrong: Array = self.unordered(past, threads)
        if among is not None:
            wrong &= among
        if strong:
            wrong &= past & STRONG == 0
        if self.busy is not None and wrong.any():
            wrong &= (self.busy[places] == 0) | (actors_of(past) < self.machine.lanes)
        if not wrong.any():
            return
        lane = np.repeat(np.arange(count_of(lanes)), sizes)
        first = int(np.argmax(wrong))
        other = self.instruction_of(past[first])
        whose = int(actors_of(past[first])) % self.machine.lanes
        block, thread = ("({},{},{})".format(*index) for index in self.machine.place_of(whose))
        place = self.machine.memory.byte(int(places[first]))
        message = f"{what} {place} races with {other.seen_from(instruction)}, by thread {thread} of block {block},"
        self.report(instruction, "race", lanes, np.bincount(lane, wrong, count_of(lanes)) > 0, message)

    def issue(self, effect: Effect) -> None:
        """What the engine reads and writes, it does from now on until somebody has waited for it."""
        for (lanes, _, sizes), places, writes in (
            (effect.reads, effect.read_bytes, False),
            (effect.writes, effect.written_bytes, True),
        ):
            threads = np.repeat(lanes, sizes)
            strong = writes and effect.accumulates  # as an atomic
            serials = np.full(len(lanes), effect.serial)
            events = self.event(effect.instruction, self.machine.lanes + lanes, serials, strong)
            events = np.repeat(events, sizes)
            at = effect.instruction, sizes, lanes, places, threads
            if not writes:
                self.compare(*at, self.writes, False, "read of")
                self.remember_reads(places, threads, events)
                continue
            for past in (self.writes, self.reads, self.other_reads):
                self.compare(*at, past, strong, "write to")
            self.reads[places] = self.other_reads[places] = 0
            self.writes[places] = events

    def same_instruction(self, access: Access, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Two lanes that store different values to one address; strong stores may."""
        if access.order != "weak":
            return
        order = np.argsort(offsets, kind="stable")
        ordered = offsets[order]
        repeated = ordered[1:] == ordered[:-1]
        if not repeated.any():
            return
        values = np.broadcast_to(values, (len(offsets), *values.shape[1:])).reshape(len(offsets), -1)[order]
        wrong = np.zeros(len(offsets), bool)
        wrong[order[1:]] = repeated & (values[1:] != values[:-1]).any(axis=1)
        if wrong.any():
            place = self.machine.memory.byte(int(offsets[int(np.argmax(wrong))]))
            message = f"write to {place} by several threads at once, with different values"
            self.report(access.instruction, "race", lanes, wrong, message)
