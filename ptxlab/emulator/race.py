"""Data races, by vector clocks.

An access is ordered before another one if the lane that does the latter knows of it (`clocks`). Barriers, release and
acquire operations, and fences beside strong operations (relaxed, volatile, atomic) hand knowledge on: that of the lanes
which do so, to the lanes which do so. Lanes of one warp order each other by `bar.warp.sync` and barriers alone; neither
running in step nor exchanging values (shfl, vote) does. Per byte the last write and two concurrent readers are
remembered, so a third reader that alone is unordered with a write is missed; so are races between blocks of different
waves. Volatile accesses do not race with each other, but where lanes of one warp share memory by them as if they ran
in step. Two lanes that store different values to one address with one instruction are reported too. Stores of the value
that is there already are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptxlab.emulator.check import Watcher
from ptxlab.emulator.clocks import NOTHING, Clock, Clocks, by_clock, groups, joined
from ptxlab.emulator.types import Array, Lanes, count_of, indices_of

if TYPE_CHECKING:
    from ptxlab.emulator.access import Access, Sizes
    from ptxlab.emulator.effects import Effect
    from ptxlab.emulator.ir import Instruction
    from ptxlab.emulator.machine import Machine

# An event fits in 64 bits: strong (1), instruction index + 1 (20), actor (21), time (22); 0 is none.
_ACTOR, _CODE, _STRONG = np.uint64(22), np.uint64(43), np.uint64(1 << 63)
_WEAK = np.uint64(0)
_TIMES, _ACTORS, _CODES = (np.uint64((1 << bits) - 1) for bits in (22, 21, 20))


def actors_of(events: Array) -> Array:
    """Who did it: a lane, or an engine for it."""
    return (events >> _ACTOR & _ACTORS).astype(np.intp)


class Races(Watcher):
    """Conflicting accesses by different threads that nothing orders."""

    def __init__(self, machine: Machine, busy: Array | None = None) -> None:
        """`busy`: bytes that `inflight` looks at."""
        super().__init__(machine)
        self.busy = busy
        cluster = machine.peers.size * machine.stride
        self.clocks = Clocks(machine.lanes, cluster, machine.launch.entry.is_asynchronous)
        self.fenced: dict[int, Clock] = {}  # lane -> what its warp knew at its last fence, and
        self.own_at_fence = self.clocks.own.copy()  # what it had done itself
        self.pending: dict[int, Clock] = {}  # lane -> what strong reads brought, to be known from the next fence on
        self.flags: dict[int, Clock] = {}  # arena offset of a flag -> what its last release made known
        self.barriers: dict[tuple[int, int], Clock] = {}
        self.arrived: dict[int, Clock] = {}  # arena offset of an mbarrier -> what arrivals of this phase made known
        self.phases: dict[int, Clock] = {}  # ... and those of the phases that are complete
        self.volatile = np.array([False, *("volatile" in i.opcode for i in machine.code)])  # by code of an event
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
        if strong:
            self.acquire(access, threads, places)

    def store(self, access: Access, lanes: Lanes, offsets: Array, values: Array) -> None:
        """A write races with unordered reads and writes, and with its own like in the other lanes."""
        if access.space in ("local", "param", "const"):
            return
        self.same_instruction(access, lanes, offsets, values)
        strong = access.order != "weak"
        if strong:
            self.release(access, lanes, offsets, keep=False)
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
        self.release(access, lanes, offsets, keep=True)
        self.acquire(access, threads, places)
        self.writes[places] = events

    def events(self, access: Access, lanes: Lanes, offsets: Array, strong: bool) -> tuple[Array, Array, Array]:
        """Per byte: its place, the thread (as a lane of the wave), and the event as it is stored."""
        threads = indices_of(lanes)
        events = self.event(access.instruction, threads, self.clocks.own[threads], strong)
        places = (offsets[:, None] + np.arange(access.size)).reshape(-1)
        return places, np.repeat(threads, access.size), np.repeat(events, access.size)

    def event(self, instruction: Instruction, actors: Array, times: Array, strong: bool) -> Array:
        """What is stored of each actor: who did it, when, by which instruction."""
        event = times.astype(np.uint64) | actors.astype(np.uint64) << _ACTOR
        return event | np.uint64(self.machine.index[id(instruction)] + 1) << _CODE | (_STRONG if strong else _WEAK)

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

    def unordered(self, past: Array, threads: Array) -> Array:
        """Which past events are of others, and not known to lie before the present of `threads`."""
        if not past.any():  # most bytes are met for the first time
            return np.zeros(len(past), bool)
        # neighbouring bytes have the same past
        starts = np.concatenate(([True], (past[1:] != past[:-1]) | (threads[1:] != threads[:-1])))
        old, whose = past[starts], threads[starts]
        late = old != 0
        old, whose = old[late], whose[late]
        late[late] = ~self.clocks.knows(whose, actors_of(old), (old & _TIMES).astype(np.int32))
        return late[np.cumsum(starts) - 1] if late.any() else np.zeros(len(past), bool)

    def compare(self, instruction: Instruction, sizes: Sizes, lanes: Lanes, places: Array, threads: Array,
                events: Array, strong: bool, what: str, among: Array | None = None) -> None:  # fmt: skip
        """Report the accesses, of so many bytes per lane, that race with past ones."""
        past = events[places]
        wrong: Array = self.unordered(past, threads)
        if among is not None:
            wrong &= among
        if strong:
            wrong &= (past & _STRONG == 0) | self.in_step(instruction, places, threads, past)
        if self.busy is not None and wrong.any():
            wrong &= (self.busy[places] == 0) | (actors_of(past) < self.machine.lanes)
        if not wrong.any():
            return
        lane = np.repeat(np.arange(count_of(lanes)), sizes)
        first = int(np.argmax(wrong))
        other = self.machine.code[(int(past[first]) >> int(_CODE) & int(_CODES)) - 1]
        whose = int(actors_of(past[first])) % self.machine.lanes
        block, thread = ("({},{},{})".format(*index) for index in self.machine.place_of(whose))
        place = self.machine.memory.byte(int(places[first]))
        message = f"{what} {place} races with {other.seen_from(instruction)}, by thread {thread} of block {block},"
        self.report(instruction, "race", lanes, np.bincount(lane, wrong, count_of(lanes)) > 0, message)

    def in_step(self, instruction: Instruction, places: Array, threads: Array, past: Array) -> Array | bool:
        """Which volatile accesses to shared memory follow one by another lane of the same warp."""
        alike = self.volatile[(past >> _CODE & _CODES).astype(np.intp)] & (actors_of(past) // 32 == threads // 32)
        return "volatile" in instruction.opcode and alike & self.machine.launch.is_shared(places)

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

    # Order

    def release(self, access: Access, lanes: Lanes, offsets: Array, keep: bool) -> None:
        """What the lanes know (or knew at their last fence) goes with the flag; an atomic keeps what was there."""
        releasing = access.order in ("release", "acq_rel")
        if not releasing and not self.fenced:
            return
        indices = indices_of(lanes)
        for group in groups(offsets):
            place, known = int(offsets[group[0]]), self.released(indices[group], releasing)
            if known:
                self.flags[place] = joined(known, self.flags.get(place, NOTHING)) if keep else known
        if releasing:
            self.clocks.tick(indices)

    def released(self, lanes: Array, now: bool) -> Clock:
        """What the lanes make known together, of now or of their last fences."""
        if now:
            return self.clocks.known_to(lanes)
        known = NOTHING
        for clock, those in by_clock(self.fenced, lanes):
            known = joined(known, self.clocks.known_to(those, clock, self.own_at_fence))
        return known

    def acquire(self, access: Access, threads: Array, places: Array) -> None:
        """The lanes take over what came with the flag, at once or at their next fence."""
        for group in groups(places) if self.flags else ():
            known = self.flags.get(int(places[group[0]]))
            if known is None:
                continue
            lanes = np.unique(threads[group])
            if access.order in ("acquire", "acq_rel"):
                self.clocks.learn(lanes, known)
                continue
            for clock, those in by_clock(self.pending, lanes):
                self.pending.update(dict.fromkeys(those.tolist(), joined(clock, known)))
            self.pending = dict.fromkeys(lanes.tolist(), known) | self.pending

    def take_pending(self, lanes: Array) -> None:
        """What strong reads brought becomes known."""
        for clock, those in by_clock(self.pending, lanes):
            self.clocks.learn(those, clock)
            for lane in those.tolist():
                del self.pending[lane]

    def fence(self, lanes: Lanes) -> None:
        """Strong reads before it acquire, strong writes after it release."""
        indices = indices_of(lanes)
        self.take_pending(indices)
        for group in groups(self.clocks.row[indices]):
            mine = indices[group]
            self.fenced.update(dict.fromkeys(mine.tolist(), self.clocks.shared_by(mine)))
        actors = self.clocks.columns(indices)[1]
        self.own_at_fence[actors] = self.clocks.own[actors]
        self.clocks.tick(indices)

    def converge(self, lanes: Lanes) -> None:
        """Lanes of warps have met."""
        self.clocks.meet(indices_of(lanes))

    def arrive(self, barrier: tuple[int, int], lanes: Lanes) -> None:
        """A barrier learns what the lanes know."""
        self.barriers[barrier] = joined(self.barriers.get(barrier, NOTHING), self.told_by(lanes))

    def told_by(self, lanes: Lanes) -> Clock:
        """What the lanes know, and now make known."""
        indices = indices_of(lanes)
        self.take_pending(indices)
        known = self.clocks.known_to(indices)
        self.clocks.tick(indices)
        return known

    def depart(self, barrier: tuple[int, int], lanes: Lanes | None) -> None:
        """Whoever waited knows what the barrier learnt."""
        known = self.barriers.pop(barrier)
        if lanes is not None:  # what they knew, the barrier has learnt from them: they now know the same
            self.clocks.meet(indices_of(lanes))
            self.clocks.learn(indices_of(lanes), known)

    def waited(self, effect: Effect, only_read: bool) -> None:
        """The lanes know what their engines have done; whole warps wait for wgmma."""
        self.clocks.wait(effect.lanes, effect.serial, effect.kind == "wgmma")

    def landed(self, effect: Effect) -> None:
        """The mbarriers learn what the engines have done."""
        for place in np.unique(effect.barrier[effect.barrier >= 0]).tolist():
            lanes = np.unique(effect.lanes[effect.barrier == place])
            done = self.clocks.engines(lanes, effect.serial)
            self.arrived[place] = joined(self.arrived.get(place, NOTHING), done)

    def phase_arrive(self, place: int, lanes: Lanes) -> None:
        """The mbarrier learns what those know who arrive."""
        self.arrived[place] = joined(self.arrived.get(place, NOTHING), self.told_by(lanes))

    def phase_complete(self, place: int) -> None:
        """What arrivals made known is there for those who wait."""
        self.phases[place] = joined(self.phases.get(place, NOTHING), self.arrived.pop(place, NOTHING))

    def phase_wait(self, place: int, lanes: Lanes) -> None:
        """Who has waited knows what the mbarrier learnt."""
        self.clocks.learn(indices_of(lanes), self.phases.get(place, NOTHING))
