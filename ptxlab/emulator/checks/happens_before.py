"""Who knows of whom: the clocks of a wave, and how synchronisation hands their knowledge on.

Barriers, release and acquire operations, and fences beside strong operations (relaxed, volatile, atomic) hand knowledge
on: that of the lanes which do so, to the lanes which do so. Lanes of one warp order each other by `bar.warp.sync` and
barriers alone; neither running in step nor exchanging values (shfl, vote) does. The checks "race" and "async" ask.
A release is remembered with its scope, as it tells nothing to those whom that does not reach (`scopes`).
"""

from itertools import compress

import numpy as np

from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.checks.scopes import ALL, CTA, EVERYWHERE, Released, Scopes, reach_of
from ptxlab.emulator.checks.vector_clocks import NOTHING, Clock, Clocks, by_clock, groups, join_clocks
from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.effect import Effect
from ptxlab.emulator.core.lanes import Lanes, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array

# An event fits in 64 bits: strong (1), instruction index + 1 (20), actor (21), time (22); 0 is none.
_ACTOR, _CODE, STRONG = np.uint64(22), np.uint64(43), np.uint64(1 << 63)
_WEAK = np.uint64(0)
_TIMES, _ACTORS, _CODES = (np.uint64((1 << bits) - 1) for bits in (22, 21, 20))

PROXY_SPACES = ("shared", "global")  # of what a proxy fence makes visible; see `Clocks.fence_proxy`
Clocked = dict[Released, Clock]  # what is told, by the scope and the block of the release


def event(code: int, actors: Array, times: Array, strong: bool) -> Array:
    """Encode events, one per actor: the actor, the time, and the index of the instruction."""
    who_and_when = times.astype(np.uint64) | actors.astype(np.uint64) << _ACTOR
    return who_and_when | np.uint64(code + 1) << _CODE | (STRONG if strong else _WEAK)


def actors_of(events: Array) -> Array:
    """Return the actors of events: a lane, or an engine for it."""
    return (events >> _ACTOR & _ACTORS).astype(np.intp)


def without_actors(events: Array) -> Array:
    """Clear the actors in events."""
    return events & ~(_ACTORS << _ACTOR)


def codes_of(events: Array) -> Array:
    """Return the indices of the instructions of events."""
    return (events >> _CODE & _CODES).astype(np.intp) - 1


def times_of(events: Array) -> Array:
    """Return the times of events, by the actor's own time."""
    return (events & _TIMES).astype(np.int32)


class HappensBefore(Check):
    """The happens-before order of a wave: vector clocks, and how synchronisation passes them on."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        cluster, entry = machine.cluster_memory.size * machine.stride, machine.launch.entry
        self.spaces = PROXY_SPACES if entry.uses_async_proxy or machine.launch.unfenced is not None else ()
        self.clocks = Clocks(machine.lanes, cluster, entry.is_asynchronous, len(self.spaces))
        self.scopes = Scopes(machine)
        # by the fence's reach: lane -> what its warp knew at its last fence, and what all lanes had done at theirs
        self.fenced: dict[int, tuple[dict[int, Clock], Array]] = {}
        # by release: lane -> what strong reads brought, to be known from the next fence on
        self.pending: dict[Released, dict[int, Clock]] = {}
        self.flags: dict[int, Clocked] = {}  # arena offset of a flag -> what its last release made known
        self.barriers: dict[tuple[int, int], Clock] = {}
        self.arrived: dict[int, Clocked] = {}  # arena offset of an mbarrier -> what arrivals of this phase made known
        self.phases: dict[int, Clocked] = {}  # ... and those of the phases that are complete
        self.unreached: dict[tuple[int, int], str] = {}  # (block that released, that acquired) -> where that failed
        # mbarriers by arena offset -> the event of mbarrier.init; those that fence.mbarrier_init has released since;
        # and by barrier of a cluster, those that were released before a phase of it was complete
        self.initialised: dict[int, int] = {}
        self.released: dict[int, int] = {}
        self.announced: dict[int, dict[int, int]] = {}
        # arena offset of a flag or mbarrier -> a write to it, and when each lane has learnt of that
        self.observed: dict[int, tuple[int, dict[int, int]]] = {}
        # by block: the last store to a flag behind a fence of the thread, and which lane did it
        self.flag_setters: dict[int, tuple[Instruction, int]] = {}

    def event(self, instruction: Instruction, actors: Array, times: Array, strong: bool) -> Array:
        """Encode events of an instruction, one per actor: the actor, the time, and the instruction."""
        return event(self.machine.index[id(instruction)], actors, times, strong)

    def instruction_of(self, event: int) -> Instruction:
        """Return the instruction of an event."""
        return self.machine.code[int(codes_of(np.array(event, np.uint64)))]

    def bytes(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> tuple[Array, Array]:
        """Return the place of every byte of an access, and its thread (as a lane of the wave)."""
        places = (offsets[:, None] + np.arange(access.size)).reshape(-1)
        return places, np.repeat(indices_of(lanes), access.size)

    def is_unordered(self, past: Array, threads: Array, proxy_space: int | None = None) -> Array:
        """Tell which past events are by other threads and not ordered before the present of `threads`.

        With a space, which ones the async proxy cannot see when these threads ask it for something now: it takes a
        proxy fence on the way from the event to here (PTX ISA, 8.6 and 8.9.5), of whichever thread.
        """
        if not np.count_nonzero(past):  # most bytes are met for the first time
            return np.zeros(len(past), bool)
        # neighbouring bytes have the same past
        starts = np.concatenate(([True], (past[1:] != past[:-1]) | (threads[1:] != threads[:-1])))
        distinct_past, distinct_threads = past[starts], threads[starts]
        has_past = distinct_past != 0
        distinct_past, distinct_threads = distinct_past[has_past], distinct_threads[has_past]
        actors = actors_of(distinct_past)
        if proxy_space is not None:
            actors = self.clocks.visible(actors, proxy_space)
        has_past[has_past] = ~self.clocks.knows(distinct_threads, actors, times_of(distinct_past))
        return has_past[np.cumsum(starts) - 1] if has_past.any() else np.zeros(len(past), bool)

    def fenced_by_nobody(self, past: Array, proxy_space: int) -> Array:
        """Tell which past events are not followed by a proxy fence of any thread that knew of them."""
        visible_times = self.clocks.visible(actors_of(past), proxy_space)
        return self.clocks.known_to_anyone(visible_times) < times_of(past)

    # Flags

    def load(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Acquire the clocks released with a flag, if the read is strong."""
        if access.order != "weak" and self.flags:
            self.acquire(access, *self.bytes(access, lanes, offsets))

    def store(self, access: MemoryAccess, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Release the lanes' clocks with the flag, if the write is strong."""
        if access.order != "weak":
            self.release(access, lanes, offsets, keep=False)

    def atomic(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Release the lanes' clocks with the flag and acquire those released with it before."""
        self.release(access, lanes, offsets, keep=True)
        if self.flags:
            self.acquire(access, *self.bytes(access, lanes, offsets))

    def merge_release(self, releases: Clocked, release: Released, news: Clock) -> None:
        """Join a clock into the clock of a release."""
        releases[release] = join_clocks(news, releases.get(release, NOTHING))

    def release(self, access: MemoryAccess, lanes: Lanes, offsets: Array, keep: bool) -> None:
        """Store the lanes' clocks, now or at their last fence, with the flag; with `keep` join those stored before."""
        is_release = access.order in ("release", "acq_rel")
        if not is_release and not self.fenced:
            return
        indices = indices_of(lanes)
        self.flag_setters[int(indices[0]) // self.scopes.block] = access.instruction, int(indices[0])
        for group in groups(offsets):
            place = int(offsets[group[0]])
            released_clocks = self.clocks_to_release(access.instruction, indices[group], is_release)
            if keep:
                for release, clock in self.flags.get(place, {}).items():
                    self.merge_release(released_clocks, release, clock)
            if released_clocks:
                self.flags[place] = released_clocks
        if is_release:
            self.clocks.tick(indices)

    def is_fenced(self, lane: int, time: int) -> bool:
        """Tell whether a lane has run a memory fence since `time`, counted by its own clock."""
        return any(lane in fenced and times[lane] >= time for fenced, times in self.fenced.values())

    def clocks_to_release(self, instruction: Instruction, lanes: Array, now: bool) -> Clocked:
        """Return the lanes' joined clocks by release: those of now, or those at their last fences."""
        released_clocks: Clocked = {}
        reach = reach_of(instruction.opcode)
        for release, block_lanes in self.scopes.by_block(reach, lanes) if now else ():
            self.merge_release(released_clocks, release, self.clocks.known_to(block_lanes))
        for fence, (fenced, own_times) in self.fenced.items() if not now else ():
            for release, block_lanes in self.scopes.by_block(min(fence, reach), lanes):
                for clock, clock_lanes in by_clock(fenced, block_lanes):
                    self.merge_release(released_clocks, release, self.clocks.known_to(clock_lanes, clock, own_times))
        return released_clocks

    def acquire(self, access: MemoryAccess, places: Array, threads: Array) -> None:
        """Join the clocks released with a flag into the lanes' clocks, at once or at their next fence."""
        for group in groups(places):
            for release, released_clock in self.flags.get(int(places[group[0]]), {}).items():
                lanes = self.lanes_reached(release, access.instruction, np.unique(threads[group]))
                if not len(lanes):
                    continue
                self.observe_flag(int(places[group[0]]), lanes)
                if access.order in ("acquire", "acq_rel"):
                    self.clocks.learn(lanes, released_clock)
                else:
                    self.learn_at_fence(release, lanes, released_clock)

    def learn_at_fence(self, release: Released, lanes: Array, released_clock: Clock) -> None:
        """Remember what a relaxed read has brought to the lanes, to be known from their next fence on."""
        pending = self.pending.setdefault(release, {})
        for clock, clock_lanes in by_clock(pending, lanes):
            pending.update(dict.fromkeys(clock_lanes.tolist(), join_clocks(clock, released_clock)))
        self.pending[release] = dict.fromkeys(lanes.tolist(), released_clock) | pending

    def observe_flag(self, place: int, lanes: Array) -> None:
        """Record that lanes have read the flag at an arena offset; a hook, which the check "race" overrides."""

    def observe_write(self, place: int, write: int, lanes: Array) -> None:
        """Record that lanes have learnt of one write (its event) at a place, and of nothing before it."""
        observed_write, times = self.observed.get(place, (0, {}))
        times = times if observed_write == write else {}
        times.update(zip(lanes.tolist(), self.clocks.own_times[lanes].tolist(), strict=True))
        self.observed[place] = write, times

    def is_observed(self, places: Array, threads: Array, past: Array) -> Array:
        """Tell which past writes the threads have learnt of by `observe_write`, themselves or through other lanes."""
        is_known = np.zeros(len(places), bool)
        for i, (place, thread, write) in enumerate(zip(places.tolist(), threads.tolist(), past.tolist(), strict=True)):
            observed_write, times = self.observed.get(place, (0, {}))
            if observed_write == write:
                lanes = np.array([*times])
                knows = self.clocks.knows(np.full(len(lanes), thread), lanes, np.array([*times.values()]))
                is_known[i] = knows.any()
        return is_known

    def lanes_reached(self, release: Released, instruction: Instruction, lanes: Array) -> Array:
        """Return the lanes whose acquire is in scope of the release.

        The others are remembered, to be named where they race.
        """
        reached_lanes = self.scopes.lanes_reached(release, reach_of(instruction.opcode), lanes)
        if len(reached_lanes) < len(lanes):
            missing_side = "acquires" if reach_of(instruction.opcode) < release[0] else "finds a release"
            scope = "cta" if CTA in (release[0], reach_of(instruction.opcode)) else "cluster"
            reason = (
                f"line {instruction.line} {missing_side} in scope .{scope} only, which does not reach the other block,"
            )
            for block in np.unique(np.setdiff1d(lanes, reached_lanes) // self.scopes.block).tolist():
                self.unreached[release[1], block] = reason
        return reached_lanes

    def take_pending(self, lanes: Array, fence: Instruction | None = None) -> None:
        """Join the clocks that strong reads brought into the lanes' clocks, where the fence's scope reaches.

        None stands for a barrier of the block, which counts as a fence of its scope: it acquires nothing of others.
        """
        for release, pending in self.pending.items():
            acquiring = lanes
            if fence is None and self.scopes.matter and release[1] >= 0:
                is_own = lanes // self.scopes.block == release[1]
                self.note_barrier(release[1], [lane for lane in lanes[~is_own].tolist() if lane in pending])
                acquiring = lanes[is_own]
            elif fence is not None and self.scopes.matter:
                acquiring = np.array([lane for lane in lanes.tolist() if lane in pending], np.intp)
                acquiring = self.lanes_reached(release, fence, acquiring)
            for clock, clock_lanes in by_clock(pending, acquiring):
                self.clocks.learn(clock_lanes, clock)
                for lane in clock_lanes.tolist():
                    del pending[lane]

    def note_barrier(self, releasing: int, lanes: list[int]) -> None:
        """Remember lanes that have read a flag of another block and come to a barrier, to say so where they race.

        A fence of too narrow a scope is the better reason, and stays.
        """
        reason = (
            "nobody has fenced between the read of the flag or mbarrier and the barrier, which is no fence between "
            "blocks,"
        )
        for block in {lane // self.scopes.block for lane in lanes}:
            self.unreached.setdefault((releasing, block), reason)

    def fence(self, instruction: Instruction, lanes: Lanes) -> None:
        """Acquire what strong reads before the fence brought, and let strong writes after it release.

        `fence.release` does not acquire, and `fence.acquire` does not release.
        """
        indices, words = indices_of(lanes), instruction.opcode.split(".")
        if "release" not in words:
            self.take_pending(indices, instruction)
        if "acquire" in words:
            return
        reach = reach_of(instruction.opcode) if self.scopes.matter else ALL
        fenced, own_times = self.fenced.setdefault(reach, ({}, self.clocks.own_times.copy()))
        for group in groups(self.clocks.row[indices]):
            row_lanes = indices[group]
            fenced.update(dict.fromkeys(row_lanes.tolist(), self.clocks.shared_by(row_lanes)))
        actors = self.clocks.columns(indices)[1]
        own_times[actors] = self.clocks.own_times[actors]
        self.clocks.tick(indices)

    def proxy_fence(self, lanes: Lanes, spaces: tuple[str, ...]) -> None:
        """Make events that these lanes know of visible to the async proxy, for threads ordered after the fence."""
        for number, space in enumerate(self.spaces):
            if space in spaces:
                self.clocks.fence_proxy(indices_of(lanes), number)
        self.clocks.tick(indices_of(lanes))

    def converge(self, lanes: Lanes) -> None:
        """Join the clocks of the lanes that have met, warp by warp."""
        self.clocks.meet(indices_of(lanes))

    def arrive(self, instruction: Instruction, barrier: tuple[int, int], lanes: Lanes) -> None:
        """Join the lanes' clocks into the barrier's clock."""
        self.barriers[barrier] = join_clocks(self.barriers.get(barrier, NOTHING), self.publish_clock(lanes))

    def publish_clock(self, lanes: Lanes, acquires: bool = True) -> Clock:
        """Return what the lanes know, and now make known; at a barrier they first acquire what strong reads brought."""
        indices = indices_of(lanes)
        if acquires:
            self.take_pending(indices)
        clock = self.clocks.known_to(indices)
        self.clocks.tick(indices)
        return clock

    def depart(self, barrier: tuple[int, int], lanes: Lanes | None) -> None:
        """Join the barrier's clock into the clocks of the lanes that have waited."""
        clock = self.barriers.pop(barrier)
        if lanes is not None:  # what they knew, the barrier has learnt from them: they now know the same
            self.clocks.meet(indices_of(lanes))
            self.clocks.learn(indices_of(lanes), clock)

    def effect_wait(self, effect: Effect, only_read: bool) -> None:
        """Record that lanes know their effect to be done; for a wgmma, that their warps do."""
        self.clocks.wait(effect.lanes, effect.serial, effect.kind == "wgmma")

    def effect_complete(self, effect: Effect) -> None:
        """Join the clocks of the effect's engines into those of its mbarriers."""
        for place in np.unique(effect.barrier[effect.barrier >= 0]).tolist():
            lanes = np.unique(effect.lanes[effect.barrier == place])
            released_clocks = self.arrived.setdefault(place, {})
            self.merge_release(released_clocks, EVERYWHERE, self.clocks.engines(lanes, effect.serial))

    def phase_arrive(self, instruction: Instruction, place: int, lanes: Lanes) -> None:
        """Join the arriving lanes' clocks into the mbarrier's clock of this phase."""
        released_clocks = self.arrived.setdefault(place, {})
        if "relaxed" in instruction.opcode.split("."):
            for release, clock in self.clocks_to_release(instruction, indices_of(lanes), now=False).items():
                self.merge_release(released_clocks, release, clock)
            return
        for release, block_lanes in self.scopes.by_block(reach_of(instruction.opcode), indices_of(lanes)):
            # an arrival at an mbarrier only releases; the barrier of a cluster counts as a fence like that of a block
            self.merge_release(released_clocks, release, self.publish_clock(block_lanes, acquires=place < 0))

    def begin(self, instruction: Instruction, lanes: Lanes, places: Array) -> None:
        """Record the event that initialised each mbarrier."""
        threads = indices_of(lanes)
        events = self.event(instruction, threads, self.clocks.own_times[threads], strong=False)
        for place, event in zip(places.tolist(), events.tolist(), strict=True):
            self.initialised[place] = event
            for places_told in (self.released, *self.announced.values()):
                places_told.pop(place, None)

    def release_mbarriers(self, lanes: Lanes) -> None:
        """Record that mbarriers which these lanes initialised are released to waiters at the cluster's next barrier."""
        actors = actors_of(np.array([*self.initialised.values()], np.uint64))
        is_own = np.isin(actors, indices_of(lanes)).tolist()
        self.released.update(dict(compress(self.initialised.items(), is_own)))

    def are_initialised(self, places: Array, lanes: Array) -> Array:
        """Tell which mbarriers their lanes know to be initialised; true where no mbarrier.init was seen."""
        events = np.array([self.initialised.get(place, 0) for place in places.tolist()], np.uint64)
        is_known = ~self.is_unordered(events, lanes)
        is_unknown = ~is_known
        is_known[is_unknown] = self.is_observed(places[is_unknown], lanes[is_unknown], events[is_unknown])
        return is_known

    def phase_complete(self, place: int) -> None:
        """Move the arrivals' clocks to the complete phase; for a cluster's barrier also the released mbarriers."""
        if place < 0 and self.released:
            size = self.machine.cluster_memory.size * self.machine.stride  # lanes of a cluster
            clusters = actors_of(np.array([*self.released.values()], np.uint64)) // size
            is_own = clusters == -1 - place
            self.announced.setdefault(place, {}).update(compress(self.released.items(), is_own))
            self.released = dict(compress(self.released.items(), ~is_own))
        phase_clocks = self.phases.setdefault(place, {})
        for release, clock in self.arrived.pop(place, {}).items():
            self.merge_release(phase_clocks, release, clock)

    def phase_wait(self, instruction: Instruction, place: int, lanes: Lanes) -> None:
        """Tell the lanes that have waited what the mbarrier, or the barrier of their cluster, learnt.

        A relaxed wait is a strong read of the mbarrier: with a fence behind it, it acquires (PTX ISA, 8.8).
        """
        for mbarrier, event in self.announced.get(place, {}).items():
            self.observe_write(mbarrier, event, indices_of(lanes))
        for release, clock in self.phases.get(place, {}).items():
            acquiring = self.lanes_reached(release, instruction, indices_of(lanes))
            if len(acquiring):
                if ".relaxed" in instruction.opcode:
                    self.learn_at_fence(release, acquiring, clock)
                else:
                    self.clocks.learn(acquiring, clock)
