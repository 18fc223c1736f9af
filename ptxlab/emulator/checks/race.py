"""Data races, by vector clocks.

An access is ordered before another one if the lane that does the latter knows of it (`happens_before`). Per byte the
last write and two concurrent readers are remembered, so a third reader that alone is unordered with a write is missed.
Races between blocks of different waves are for `race_waves`. Volatile accesses do not race with each other, but where
lanes of one warp share memory by them as if they ran in step. Two lanes that store different values to one address with
one instruction are reported too, and `ld.global.nc` of what the launch has written, whatever orders them: that path
sees no writes. Stores of the value that is there already are not; nor are races of loads whose value nobody uses
(`load_taint`).
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from ptxlab.emulator.checks.happens_before import STRONG, HappensBefore, actors_of, codes_of, times_of
from ptxlab.emulator.checks.load_taint import LoadTaint
from ptxlab.emulator.checks.scopes import reach_of
from ptxlab.emulator.checks.shadow import UNITS, Shadow, coarsest
from ptxlab.emulator.core.access import AccessSizes, MemoryAccess
from ptxlab.emulator.core.effect import Effect
from ptxlab.emulator.core.lanes import Lanes, count_of, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array


@dataclass
class Race:
    """Accesses of one instruction, unit by unit, each with the past access that it races with."""

    instruction: Instruction
    action: str  # it does there
    lanes: Lanes  # that run it
    lane: Array  # position in these
    places: Array  # the first byte each that races
    past: Array  # events
    reads: Array  # that of the two events which is a read, if one is

    def select_units(self, mask: Array) -> Self:
        """Return the race with only the units where `mask` holds."""
        part = {name: getattr(self, name)[mask] for name in ("lane", "places", "past", "reads")}
        return replace(self, **part)


@dataclass
class Touch:
    """Accesses of one instruction, unit by unit."""

    instruction: Instruction
    lanes: Lanes
    counts: AccessSizes  # units of each lane
    unit: int  # bytes
    places: Array  # numbers of the units
    threads: Array  # of each unit
    events: Array  # that it leaves
    strong: bool


class Races(HappensBefore):
    """Check for conflicting accesses by different threads that nothing orders."""

    def __init__(self, machine: Machine, taint: LoadTaint | None = None) -> None:
        """Watch a machine; `taint` knows which loads count."""
        super().__init__(machine)
        self.taint = taint
        self.busy: Array | None = None  # bytes that `in_flight` looks at
        self.loads = np.array([i.opcode.startswith("ld") for i in machine.code])
        self.volatile = np.array(["volatile" in i.opcode for i in machine.code])
        self.writes, self.reads, self.other_reads = (Shadow(machine.memory.size) for _ in range(3))

    # Accesses

    def load(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Report a read that races with an unordered write."""
        if access.space in ("local", "param", "const"):
            return
        load_touch = self.touch(
            access, lanes, offsets, access.order != "weak", self.writes, self.reads, self.other_reads
        )
        self.compare(load_touch, self.writes, "read of", reads=None if load_touch.strong else load_touch.events)
        if ".nc." in access.instruction.opcode:
            self.require_read_only(load_touch)
        self.remember_reads(load_touch)
        super().load(access, lanes, offsets)

    def store(self, access: MemoryAccess, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Report a write that races with unordered reads and writes, or with its own like in the other lanes."""
        if access.space in ("local", "param", "const"):
            return
        self.check_concurrent_stores(access, lanes, offsets, values)
        super().store(access, lanes, offsets, values)
        shadows = self.writes, self.reads, self.other_reads
        touch = self.touch(access, lanes, offsets, access.order != "weak", *shadows)
        new_bytes = np.ascontiguousarray(np.broadcast_to(values, (len(offsets), *values.shape[1:])))
        old_bytes = self.machine.memory.arena.reshape(-1, touch.unit)[touch.places]
        is_changed = old_bytes != new_bytes.view(np.uint8).reshape(old_bytes.shape)
        for shadow in shadows:
            self.compare(touch, shadow, "write to", is_changed)
        self.reads.put(touch.places, touch.unit, 0)
        self.other_reads.put(touch.places, touch.unit, 0)
        self.writes.put(touch.places, touch.unit, touch.events)

    def atomic(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Report an atomic that races; atomics race with ordinary accesses only."""
        shadows = self.writes, self.reads, self.other_reads
        touch = self.touch(access, lanes, offsets, True, *shadows)
        for shadow in shadows:
            self.compare(touch, shadow, "atomic on")
        self.check_concurrent_atomics(access, lanes, offsets)
        super().atomic(access, lanes, offsets)
        self.writes.put(touch.places, touch.unit, touch.events)

    def observe_flag(self, place: int, lanes: Array) -> None:
        """Order a write before the strong reads that see it, whatever it releases."""
        self.observe_write(place, int(self.writes.get(np.array([place]), 1)[0]), lanes)

    def touch(self, access: MemoryAccess, lanes: Lanes, offsets: Array, strong: bool, *shadows: Shadow) -> Touch:
        """Return an access as units of memory, each with its thread and the event to record."""
        size, threads = access.size, indices_of(lanes)

        def units(unit: int) -> Array:
            if unit == size:
                return offsets // size
            return (offsets[:, None] // unit + np.arange(size // unit)).reshape(-1)

        unit, places = coarsest(min(size, UNITS[0]), units, *shadows)
        events = self.event(access.instruction, threads, self.clocks.own_times[threads], strong)
        counts = size // unit
        if counts > 1:
            threads, events = threads.repeat(counts), events.repeat(counts)
        return Touch(access.instruction, lanes, counts, unit, places, threads, events, strong)

    def require_read_only(self, touch: Touch) -> None:
        """Report reads by the read-only path of bytes that this launch has written."""
        writes = self.writes.get(touch.places, touch.unit)
        if not (is_written := writes != 0).any():
            return
        unit = int(np.argmax(is_written))
        place = self.machine.memory.name_byte(int(touch.places[unit]) * touch.unit)
        writer = self.instruction_of(writes[unit]).seen_from(touch.instruction)
        message = f"reads {place} through the read-only path, though {writer}, has written it in this launch,"
        count = count_of(touch.lanes)
        lanes = np.bincount(np.repeat(np.arange(count), touch.counts)[is_written], minlength=count) > 0
        self.report(touch.instruction, "race", touch.lanes, lanes, message)

    def remember_reads(self, touch: Touch) -> None:
        """Record the readers of each byte, up to two that are concurrent with each other."""
        places, unit, events = touch.places, touch.unit, touch.events
        # what it replaces lies before it, so nothing is lost
        replace = ~self.is_unordered(self.reads.get(places, unit), touch.threads)
        if replace.all():
            self.reads.put(places, unit, events)
            is_second_reader = self.reads.get(places, unit) != events
        else:
            self.reads.put(places[replace], unit, events[replace])
            is_second_reader = ~replace | (self.reads.get(places, unit) != events)
        if np.count_nonzero(is_second_reader):
            self.other_reads.put(places[is_second_reader], unit, events[is_second_reader])

    def compare(
        self, touch: Touch, events: Shadow, action: str, among: Array | None = None, reads: Array | None = None
    ) -> None:
        """Report the units that race with past accesses; `among`: the bytes that count; `reads`: events, if loads."""
        instruction, places, threads, unit = touch.instruction, touch.places, touch.threads, touch.unit
        past_events = events.get(places, unit)
        is_race: Array = self.is_unordered(past_events, threads)
        if not np.count_nonzero(is_race):
            return
        if self.observed and events is self.writes:
            is_race[is_race] = ~self.is_observed(places[is_race] * unit, threads[is_race], past_events[is_race])
        is_racing = np.ones((len(places), unit), bool) if among is None else among.copy()
        if touch.strong:
            is_race &= (
                (past_events & STRONG == 0)
                | self.in_step(instruction, places * unit, threads, past_events)
                | self.is_out_of_scope(instruction, threads, past_events)
            )
        if self.busy is not None:
            is_at_rest = self.busy.reshape(-1, unit)[places] == 0
            is_racing &= is_at_rest | (actors_of(past_events) < self.machine.lanes)[:, None]
        is_race &= is_racing.any(axis=1)
        if not is_race.any():
            return
        lanes = touch.lanes
        lane = np.repeat(np.arange(count_of(lanes)), touch.counts)[is_race]
        first = places[is_race] * unit + is_racing[is_race].argmax(axis=1)
        race = Race(instruction, action, lanes, lane, first, past_events[is_race], past_events[is_race])
        if reads is not None:
            race.reads = reads[is_race]
        code = codes_of(race.reads)
        is_ordinary = (reads is not None or events is not self.writes) & self.loads[code] & (race.reads & STRONG == 0)
        is_ordinary &= actors_of(race.reads) < self.machine.lanes
        self.machine.launch.suspects.update(code[is_ordinary].tolist())
        if self.taint is None:
            self.report_race(race)
            return
        if is_ordinary.any():
            held_race = race.select_units(is_ordinary)
            self.taint.report_when_used(held_race.reads, lambda used: self.report_race(held_race.select_units(used)))
        if not is_ordinary.all():
            self.report_race(race.select_units(~is_ordinary))

    def report_race(self, race: Race) -> None:
        """Report a race, naming the past access of the other thread."""
        past_instruction = self.instruction_of(race.past[0])
        past_lane = int(actors_of(race.past[:1])[0]) % self.machine.lanes
        block, thread = ("({},{},{})".format(*index) for index in self.machine.place_of(past_lane))
        place = self.machine.memory.name_byte(int(race.places[0]))
        message = f"{race.action} {place} races with {past_instruction.seen_from(race.instruction)}, "
        message += f"by thread {thread} of block {block},"
        lane = indices_of(race.lanes)[race.lane[:1]]
        blocks = past_lane // self.scopes.block, int(lane[0]) // self.scopes.block
        if race.past[0] & STRONG and np.any(self.is_out_of_scope(race.instruction, lane, race.past[:1])):
            message += " as a scope does not reach the other block,"
        elif reason := self.unreached.get(blocks):
            message += f" as {reason}"
        elif blocks[0] != blocks[1] and self.is_fenced(past_lane, int(times_of(race.past[:1])[0])):
            message += self.explain_fence(blocks[0], past_lane, race.instruction)
        is_racing_lane = np.bincount(race.lane, minlength=count_of(race.lanes)) > 0
        self.report(race.instruction, "race", race.lanes, is_racing_lane, message)

    def explain_fence(self, block: int, writer: int, reader: Instruction) -> str:
        """Explain a race where the writer has fenced, but another thread has set the flag."""
        setter, lane = self.flag_setters.get(block, (None, writer))
        if setter is None or lane == writer:
            return ""
        thread = ",".join(map(str, self.machine.place_of(lane)[1]))
        return (
            f" which has a fence behind that, but {setter.seen_from(reader)}, sets the flag in thread ({thread}): by "
            "the letter of PTX that thread needs a fence of its own between the barrier and the flag,"
        )

    def is_out_of_scope(self, instruction: Instruction, threads: Array, past: Array) -> Array | bool:
        """Tell which past accesses are of blocks that the narrower scope of the two instructions does not reach."""
        if not self.scopes.matter:
            return False
        reaches = np.minimum(self.scopes.reaches[codes_of(past)], reach_of(instruction.opcode))
        return self.scopes.is_out_of_scope(threads, actors_of(past) % self.machine.lanes, reaches)

    def in_step(self, instruction: Instruction, places: Array, threads: Array, past: Array) -> Array | bool:
        """Tell which volatile accesses to shared memory follow one by another lane of their warp."""
        is_in_step = self.volatile[codes_of(past)] & (actors_of(past) // 32 == threads // 32)
        return "volatile" in instruction.opcode and is_in_step & self.machine.launch.is_shared(places)

    def issue(self, effect: Effect) -> None:
        """Check and record the engine's reads and writes, which go on from now until somebody has waited for them."""
        shadows = self.writes, self.reads, self.other_reads
        for (lanes, _, sizes), touched_units, writes in (
            (effect.reads, effect.read_units, False),
            (effect.writes, effect.written_units, True),
        ):
            unit, units = coarsest(effect.grain, touched_units, *shadows)
            is_strong = writes and effect.accumulates  # as an atomic
            serials, counts = np.full(len(lanes), effect.serial), sizes // unit
            events = self.event(effect.instruction, self.machine.lanes + lanes, serials, is_strong).repeat(counts)
            touch = Touch(effect.instruction, lanes, counts, unit, units, lanes.repeat(counts), events, is_strong)
            if not writes:
                self.compare(touch, self.writes, "read of")
                self.remember_reads(touch)
                continue
            for shadow in shadows:
                self.compare(touch, shadow, "write to")
            self.reads.put(units, unit, 0)
            self.other_reads.put(units, unit, 0)
            self.writes.put(units, unit, events)

    def check_concurrent_stores(self, access: MemoryAccess, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Report two lanes that store different values to one address; strong stores may, where their scope reaches."""
        if access.order != "weak":
            self.check_concurrent_atomics(access, lanes, offsets)
            return
        order = np.argsort(offsets, kind="stable")
        sorted_offsets = offsets[order]
        is_repeated = sorted_offsets[1:] == sorted_offsets[:-1]
        if not is_repeated.any():
            return
        values = np.broadcast_to(values, (len(offsets), *values.shape[1:])).reshape(len(offsets), -1)[order]
        is_wrong = np.zeros(len(offsets), bool)
        is_wrong[order[1:]] = is_repeated & (values[1:] != values[:-1]).any(axis=1)
        if is_wrong.any():
            place = self.machine.memory.name_byte(int(offsets[int(np.argmax(is_wrong))]))
            message = f"write to {place} by several threads at once, with different values"
            self.report(access.instruction, "race", lanes, is_wrong, message)

    def check_concurrent_atomics(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Report lanes of different blocks at one address, with one strong instruction whose scope does not reach."""
        if not self.scopes.matter:
            return
        order = np.argsort(offsets, kind="stable")
        threads, sorted_offsets = indices_of(lanes)[order], offsets[order]
        reaches = np.full(len(threads) - 1, reach_of(access.instruction.opcode))
        is_wrong = np.zeros(len(offsets), bool)
        is_out_of_scope = self.scopes.is_out_of_scope(threads[1:], threads[:-1], reaches)
        is_wrong[order[1:]] = (sorted_offsets[1:] == sorted_offsets[:-1]) & is_out_of_scope
        if is_wrong.any():
            place = self.machine.memory.name_byte(int(offsets[int(np.argmax(is_wrong))]))
            message = f"access to {place} by several blocks at once, as a scope does not reach the other block,"
            self.report(access.instruction, "race", lanes, is_wrong, message)
