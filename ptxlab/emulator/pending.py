"""Copies that lanes have asked for and nobody has waited for yet.

A copy is issued; then it takes its source bytes, lands (writes them, and tells its mbarrier); and it is settled once
somebody has waited for it. Mode "early" takes and lands at once. Mode "late" does so when a lane waits for the copy's
group; when a lane is parked at its mbarrier and nobody else can run; or, for what nobody waits for, at the very end.
Whatever may happen in any order happens in one that is drawn from the seed. Nothing but a wait settles a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from ptxlab.emulator.ir import Instruction
from ptxlab.emulator.memory import Memory
from ptxlab.emulator.types import Array, Lanes
from ptxlab.errors import EmulationError

if TYPE_CHECKING:
    from ptxlab.emulator.machine import Machine


UNGROUPED = 1 << 62  # group of what no wait_group waits for


def spans(starts: Array, sizes: Array, unit: int = 1) -> Array:
    """The units of all [start, start + size), one after another; both are multiples of the unit."""
    counts = sizes // unit
    first = np.repeat(starts // unit - (np.cumsum(counts) - counts), counts)
    return first + np.arange(len(first))


@dataclass(eq=False)
class Copies:
    """What one execution of an instruction asks for. Entry i copies `read[i]` bytes, then zeros up to `size[i]`.

    `source`, `target` and `barrier` are arena offsets. What cp.async.mbarrier.arrive asks for is here too: entries of
    no bytes that `arrives`.
    """

    instruction: Instruction
    kind: str  # whose groups it belongs to: "cp.async", or "bulk" for the copy engine
    lanes: Array  # that asked; so many entries
    source: Array
    target: Array
    read: Array
    size: Array
    group: Array  # number of the lane's group
    barrier: Array  # the mbarrier that hears of it; -1 for none
    phase: Array  # of that mbarrier when it heard; -1 before
    serial: int = 0  # counts issues
    arrives: bool = False
    landed: bool = False
    taken: Array | None = None  # the source bytes, as units

    @property
    def unit(self) -> int:
        """Largest power of two up to 8 that divides all addresses and sizes."""
        bits = int(np.bitwise_or.reduce(self.source | self.target | self.read | self.size, initial=8))
        return bits & -bits

    def take(self, memory: Memory) -> None:
        """Read the source."""
        if self.taken is None:
            self.taken = memory.view[self.unit][spans(self.source, self.read, self.unit)]

    def write(self, memory: Memory) -> None:
        """Write the target."""
        self.take(memory)
        view, rest = memory.view[self.unit], self.size - self.read
        view[spans(self.target, self.read, self.unit)] = self.taken
        view[spans(self.target + self.read, rest, self.unit)] = 0
        self.landed, self.taken = True, None

    def split(self, mask: Array) -> tuple[Copies | None, Copies | None]:
        """The entries where `mask` holds, and the others; None stands for no entry."""
        if mask.all():
            return self, None
        return (self.only(mask), self.only(~mask)) if mask.any() else (None, self)

    def only(self, mask: Array) -> Copies:
        """Some of the entries."""
        arrays = {f.name: getattr(self, f.name)[mask] for f in fields(self) if f.type == "Array"}
        taken = None if self.taken is None else self.taken[np.repeat(mask, self.read // self.unit)]
        part = replace(self, **arrays, taken=None)
        part.taken = None if taken is None else taken.view(f"u{part.unit}")
        return part


class Pending:
    """The copies of a wave that are not settled, in the order of their issue."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.late = machine.launch.mode == "late"
        self.random = np.random.default_rng(machine.launch.seed)
        self.queue: list[Copies] = []
        self.serial = 0
        # per lane, how many groups it has committed
        self.committed = {kind: np.zeros(machine.lanes, np.int64) for kind in ("cp.async", "bulk")}

    # Issue

    def issue(self, copies: Copies) -> None:
        """Lanes ask for copies."""
        self.serial += 1
        copies.serial = self.serial
        for watcher in self.machine.watchers:
            watcher.issue(copies)
        self.queue.append(copies)
        if not self.late:
            self.land(copies)

    def arrive(self, copies: Copies) -> None:
        """Lanes want an mbarrier to hear when all their cp.async so far have landed: cp.async.mbarrier.arrive."""
        place = np.full(self.machine.lanes, -1)
        place[copies.lanes] = copies.barrier
        for earlier in self.queue:
            if earlier.kind == "cp.async":
                earlier.barrier = np.where(earlier.barrier < 0, place[earlier.lanes], earlier.barrier)
                if earlier.landed:
                    heard = (earlier.phase < 0) & (earlier.barrier >= 0)
                    earlier.phase[heard] = self.phases(earlier.barrier)[heard]
        self.issue(copies)

    def commit(self, kind: str, lanes: Lanes) -> None:
        """What the lanes have issued since their last commit becomes a group."""
        self.committed[kind][lanes] += 1

    # Waiting

    def wait(self, kind: str, lanes: Lanes, newest: int, only_read: bool = False) -> None:
        """Lanes wait for their groups, all but the `newest` ones."""
        end = np.full(self.machine.lanes, -1)
        end[lanes] = self.committed[kind][lanes] - newest
        waited = self.extract([copies.group < end[copies.lanes] if copies.kind == kind else None
                               for copies in self.queue])  # fmt: skip
        for copies in waited:
            if not copies.landed:
                copies.take(self.machine.memory) if only_read else self.land(copies)
            for watcher in self.machine.watchers:
                watcher.waited(copies, only_read)
        if only_read:
            self.queue += waited

    def observe(self, place: int) -> None:
        """Lanes have seen the last phase of an mbarrier complete: what it has heard of in that phase is settled."""
        phase = self.machine.mbarriers[place].phase
        for copies in self.extract([(copies.barrier == place) & (copies.phase < phase) if copies.landed else None
                                    for copies in self.queue]):  # fmt: skip
            for watcher in self.machine.watchers:
                watcher.settled(copies)

    def phases(self, places: Array) -> Array:
        """The current phase of each mbarrier; -1 where there is none."""
        known, index = np.unique(places, return_inverse=True)
        barriers = [self.machine.mbarriers.get(int(place)) for place in known]
        return np.array([-1 if barrier is None else barrier.phase for barrier in barriers])[index]

    def extract(self, masks: Iterable[Array | None]) -> list[Copies]:
        """Take entries out of the queue; in an order drawn from the seed."""
        out, rest = [], []
        for copies, mask in zip(self.queue, masks, strict=True):
            chosen, others = copies.split(mask) if mask is not None else (None, copies)
            out += [chosen] if chosen is not None else []
            rest += [others] if others is not None else []
        self.queue = rest
        return [out[i] for i in self.random.permutation(len(out))] if self.late else out

    # Landing

    def advance(self, only_awaited: bool = False) -> bool:
        """Land something: what a lane waits for at an mbarrier or, unless `only_awaited`, anything. False: nothing."""
        flying = [copies for copies in self.queue if not copies.landed]
        if not flying:
            return False
        awaited = [place for place, barrier in self.machine.mbarriers.items() if barrier.waiting]
        chosen = [copies for copies in flying if np.isin(copies.barrier, awaited).any()]
        if not chosen and only_awaited:
            return False
        copies = (chosen or flying)[self.random.integers(len(chosen or flying))]
        if chosen:
            now, later = copies.split(np.isin(copies.barrier, awaited))
            at = self.queue.index(copies)
            self.queue[at : at + 1] = [part for part in (now, later) if part is not None]
            assert now is not None
            copies = now
        self.land(copies)
        return True

    def land(self, copies: Copies) -> None:
        """Write the target and tell the mbarriers."""
        if copies.arrives:
            self.land_before(copies)
        copies.write(self.machine.memory)
        for watcher in self.machine.watchers:
            watcher.landed(copies)
        copies.phase = np.where(copies.barrier >= 0, self.phases(copies.barrier), -1)
        if copies.kind == "cp.async" and not copies.arrives:
            return
        for i in np.flatnonzero(copies.barrier >= 0):
            try:
                barrier = self.machine.mbarriers.get(int(copies.barrier[i]))
                if barrier is None:
                    raise ValueError("its mbarrier has been invalidated")
                barrier.arrive(1) if copies.arrives else barrier.expect(-int(copies.size[i]))
            except ValueError as error:
                where = self.machine.fault_place(copies.instruction, int(copies.lanes[i]))
                raise EmulationError(f"{where}: {error}") from None

    def land_before(self, arrival: Copies) -> None:
        """Land the earlier cp.async of the lanes of a cp.async.mbarrier.arrive."""
        for copies in list(self.queue):
            if copies.kind == "cp.async" and copies.serial < arrival.serial and not copies.landed:
                now, later = copies.split(np.isin(copies.lanes, arrival.lanes))
                at = self.queue.index(copies)
                self.queue[at : at + 1] = [part for part in (now, later) if part is not None]
                if now is not None and not now.arrives:
                    self.land(now)
