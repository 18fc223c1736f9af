"""Data races, by vector clocks.

Each warp has a clock, and knows how much of every other warp's time lies before its own present: `seen[warp, other]`.
An access at time t of warp v is ordered before one of warp w if `seen[w, v] >= t`. Barriers, release and acquire
operations, and fences beside strong operations (relaxed, volatile, atomic) hand knowledge on. Per byte the last write
and two concurrent readers are remembered, so a third reader that alone is unordered with a write is missed; so are
races between blocks of different waves. Lanes of one warp share its clock: what one has done in the present tick is
not ordered before what another does, though some races are missed as whatever moves the clock (bar.warp.sync, but also
a fence of one lane) counts for all. Two lanes that store different values to one address with one instruction are
reported too. Stores of the value that is there already are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptxlab.emulator.check import Watcher
from ptxlab.emulator.effects import spans
from ptxlab.emulator.types import Array, Lanes, count_of, indices_of

if TYPE_CHECKING:
    from ptxlab.emulator.access import Access, Sizes
    from ptxlab.emulator.effects import Effect
    from ptxlab.emulator.ir import Instruction
    from ptxlab.emulator.machine import Machine

# An event fits in 64 bits: strong (1), instruction index + 1 (20), actor (16), lane (5), time (22); 0 is none.
_LANE, _ACTOR, _CODE, _STRONG = np.uint64(22), np.uint64(27), np.uint64(43), np.uint64(1 << 63)
_WEAK = np.uint64(0)
_TIMES, _LANES, _ACTORS, _CODES = (np.uint64((1 << bits) - 1) for bits in (22, 5, 16, 20))


class Races(Watcher):
    """Conflicting accesses by different threads that nothing orders."""

    def __init__(self, machine: Machine, busy: Array | None = None) -> None:
        """`busy`: bytes that `inflight` looks at."""
        super().__init__(machine)
        warps = machine.lanes // 32
        self.busy = busy
        self.warps = warps
        actors = 2 * warps if machine.launch.entry.is_asynchronous else warps
        self.seen = np.eye(warps, actors, dtype=np.int32)
        self.published: dict[int, Array] = {}  # warp -> what it knew at its last fence
        self.pending: dict[int, Array] = {}  # warp -> what strong reads brought, to be known from the next fence on
        self.flags: dict[int, Array] = {}  # arena offset of a flag -> what its last release made known
        self.barriers: dict[tuple[int, int], Array] = {}
        self.arrived: dict[int, Array] = {}  # arena offset of an mbarrier -> what arrivals of this phase made known
        self.phases: dict[int, Array] = {}  # ... and those of the phases that are complete
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
            self.acquire(access, threads // 32, places)

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
        self.acquire(access, threads // 32, places)
        self.writes[places] = events

    def events(self, access: Access, lanes: Lanes, offsets: Array, strong: bool) -> tuple[Array, Array, Array]:
        """Per byte: its place, the thread (as a lane of the wave), and the event as it is stored."""
        threads = indices_of(lanes)
        warps = threads // 32
        events = self.event(access.instruction, threads, warps, self.seen[warps, warps], strong)
        places = (offsets[:, None] + np.arange(access.size)).reshape(-1)
        return places, np.repeat(threads, access.size), np.repeat(events, access.size)

    def event(self, instruction: Instruction, threads: Array, actors: Array, times: Array, strong: bool) -> Array:
        """What is stored of each thread: who did it, when, by which instruction."""
        event = times.astype(np.uint64) | threads.astype(np.uint64) % 32 << _LANE | actors.astype(np.uint64) << _ACTOR
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
        first = np.flatnonzero((past[1:] != past[:-1]) | (threads[1:] != threads[:-1])) + 1
        starts = np.concatenate(([0], first))
        counts = np.diff(starts, append=len(past))
        past, threads = past[starts], threads[starts]
        time, warps = (past & _TIMES).astype(np.int32), threads // 32
        other = (past >> _ACTOR & _ACTORS).astype(np.intp)
        beside = (other == warps) & ((past >> _LANE & _LANES).astype(np.intp) != threads % 32)
        late: Array = (past != 0) & (self.seen[warps, other] < time + beside)
        return np.repeat(late, counts)

    def compare(self, instruction: Instruction, sizes: Sizes, lanes: Lanes, places: Array, threads: Array,
                events: Array, strong: bool, what: str, among: Array | None = None) -> None:  # fmt: skip
        """Report the accesses, of so many bytes per lane, that race with past ones."""
        past = events[places]
        wrong: Array = self.unordered(past, threads)
        if among is not None:
            wrong &= among
        if strong:
            wrong &= past & _STRONG == 0
        if self.busy is not None and wrong.any():
            wrong &= (self.busy[places] == 0) | (past >> _ACTOR & _ACTORS < self.warps)
        if not wrong.any():
            return
        lane = np.repeat(np.arange(count_of(lanes)), sizes)
        first = int(np.argmax(wrong))
        event = int(past[first])
        other = self.machine.code[(event >> int(_CODE) & int(_CODES)) - 1]
        whose = (event >> int(_ACTOR) & int(_ACTORS)) % self.warps * 32 + (event >> int(_LANE) & int(_LANES))
        block, thread = ("({},{},{})".format(*index) for index in self.machine.place_of(whose))
        place = self.machine.memory.byte(int(places[first]))
        message = f"{what} {place} races with {other.seen_from(instruction)}, by thread {thread} of block {block},"
        self.report(instruction, "race", lanes, np.bincount(lane, wrong, count_of(lanes)) > 0, message)

    def issue(self, effect: Effect) -> None:
        """What the engine reads and writes, it does from now on until somebody has waited for it."""
        for lanes, starts, sizes, writes in ((*effect.reads, False), (*effect.writes, True)):
            places, threads = spans(starts, sizes), np.repeat(lanes, sizes)
            strong = writes and effect.accumulates  # as an atomic
            serials = np.full(len(lanes), effect.serial)
            events = self.event(effect.instruction, lanes, self.warps + lanes // 32, serials, strong)
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
        """What the warp knows (or knew at its last fence) goes with the flag; an atomic keeps what was there."""
        releasing = access.order in ("release", "acq_rel")
        if not releasing and not self.published:
            return
        for warp, place in dict.fromkeys(zip((indices_of(lanes) // 32).tolist(), offsets.tolist(), strict=True)):
            known = self.seen[warp].copy() if releasing else self.published.get(warp)
            if known is None:
                continue
            before = self.flags.get(place)
            self.flags[place] = known if before is None or not keep else np.maximum(known, before)
            self.seen[warp, warp] += releasing

    def acquire(self, access: Access, warps: Array, places: Array) -> None:
        """The warp takes over what came with the flag, at once or at its next fence."""
        if not self.flags:
            return
        for warp, place in dict.fromkeys(zip(warps.tolist(), places.tolist(), strict=True)):
            known = self.flags.get(place)
            if known is None:
                continue
            if access.order in ("acquire", "acq_rel"):
                np.maximum(self.seen[warp], known, out=self.seen[warp])
            else:
                self.pending[warp] = np.maximum(self.pending.get(warp, 0), known)

    def take_pending(self, warp: int) -> None:
        """What strong reads brought becomes known."""
        if warp in self.pending:
            np.maximum(self.seen[warp], self.pending.pop(warp), out=self.seen[warp])

    def fence(self, lanes: Lanes) -> None:
        """Strong reads before it acquire, strong writes after it release."""
        for warp in np.unique(indices_of(lanes) // 32).tolist():
            self.take_pending(warp)
            self.published[warp] = self.seen[warp].copy()
            self.seen[warp, warp] += 1

    def converge(self, lanes: Lanes) -> None:
        """Lanes of warps have met: a new tick."""
        warps = np.unique(indices_of(lanes) // 32)
        self.seen[warps, warps] += 1

    def arrive(self, barrier: tuple[int, int], lanes: Lanes) -> None:
        """A barrier learns what its warps know."""
        known = self.barriers.setdefault(barrier, np.zeros(self.seen.shape[1], np.int32))
        for warp in np.unique(indices_of(lanes) // 32).tolist():
            self.take_pending(warp)
            np.maximum(known, self.seen[warp], out=known)
            self.seen[warp, warp] += 1

    def depart(self, barrier: tuple[int, int], lanes: Lanes | None) -> None:
        """Whoever waited knows what the barrier learnt."""
        known = self.barriers.pop(barrier)
        if lanes is not None:
            warps = np.unique(indices_of(lanes) // 32)
            self.seen[warps] = np.maximum(self.seen[warps], known)

    def waited(self, effect: Effect, only_read: bool) -> None:
        """The warp knows what its engine has done."""
        warps = effect.lanes // 32
        np.maximum.at(self.seen, (warps, self.warps + warps), effect.serial)

    def landed(self, effect: Effect) -> None:
        """The mbarriers learn what the engine has done."""
        for warp, place in dict.fromkeys(zip((effect.lanes // 32).tolist(), effect.barrier.tolist(), strict=True)):
            if place >= 0:
                known = self.arrived.setdefault(place, np.zeros(self.seen.shape[1], np.int32))
                known[self.warps + warp] = max(known[self.warps + warp], effect.serial)

    def phase_arrive(self, place: int, lanes: Lanes) -> None:
        """The mbarrier learns what those know who arrive."""
        known = self.arrived.setdefault(place, np.zeros(self.seen.shape[1], np.int32))
        for warp in np.unique(indices_of(lanes) // 32).tolist():
            self.take_pending(warp)
            np.maximum(known, self.seen[warp], out=known)
            self.seen[warp, warp] += 1

    def phase_complete(self, place: int) -> None:
        """What arrivals made known is there for those who wait."""
        known = self.arrived.pop(place, np.zeros(self.seen.shape[1], np.int32))
        self.phases[place] = np.maximum(known, self.phases.get(place, 0))

    def phase_wait(self, place: int, lanes: Lanes) -> None:
        """Who has waited knows what the mbarrier learnt."""
        warps = np.unique(indices_of(lanes) // 32)
        self.seen[warps] = np.maximum(self.seen[warps], self.phases.get(place, 0))
