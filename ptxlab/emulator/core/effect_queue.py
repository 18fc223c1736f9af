"""What lanes have asked for and nobody has waited for yet.

An effect (a copy, or a product of `wgmma`) is issued; then it takes its operands, lands (writes its results, and tells
its mbarrier); and it is settled once somebody has waited for it. Mode "early" takes and lands at once. Mode "late" does
so when a lane waits for the effect's group; when a lane is parked at its mbarrier and nobody else can run; or, for what
nobody waits for, at the very end. Whatever may happen in any order happens in one that is drawn from the seed. Nothing
but a wait settles an effect.
"""

from collections.abc import Iterable, Mapping, Sized
from typing import Protocol

import numpy as np

from ptxlab.emulator.core.effect import Effect
from ptxlab.emulator.core.lanes import Lanes
from ptxlab.emulator.core.machine import Machine, Unit
from ptxlab.emulator.front.types import Array
from ptxlab.errors import EmulationError

UNGROUPED = 1 << 62  # group of what tells an mbarrier: no wait_group waits for it


class Notified(Protocol):
    """The part of an mbarrier that effects use."""

    @property
    def phase(self) -> int:
        """Phases completed so far."""

    @property
    def waiting(self) -> Sized:
        """Lanes that are parked at it."""

    def expect(self, size: int) -> None:
        """Add bytes that are expected; a negative size counts bytes that have landed."""

    def arrive(self, count: int) -> None:
        """Count arrivals."""


class EffectQueue(Unit):
    """The effects of a wave that are not settled, in the order of their issue."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.mbarriers: Mapping[int, Notified] = {}  # by arena offset; see `mbarrier`
        self.late = machine.launch.options.mode == "late"
        self.random = np.random.default_rng(machine.launch.options.seed)
        self.queue: list[Effect] = []
        self.serial = 0
        # per lane, how many groups it has committed
        self.committed = {kind: np.zeros(machine.lanes, np.int64) for kind in ("cp.async", "bulk", "wgmma")}

    # Issue

    def issue(self, effect: Effect) -> None:
        """Put an effect into the queue; except in mode "late", land it at once."""
        self.serial += 1
        effect.serial, effect.phase = self.serial, np.full(len(effect.lanes), -1)
        effect.group = np.where(effect.barrier < 0, self.committed[effect.kind][effect.lanes], UNGROUPED)
        for watcher in self.machine.watchers:
            watcher.issue(effect)
        self.queue.append(effect)
        if not self.late:
            self.land(effect)

    def arrive(self, effect: Effect) -> None:
        """Attach the lanes' earlier cp.async to an mbarrier and queue its arrival: cp.async.mbarrier.arrive."""
        place = np.full(self.machine.lanes, -1)
        place[effect.lanes] = effect.barrier
        for earlier_effect in self.queue:
            if earlier_effect.kind == "cp.async":
                earlier_effect.barrier = np.where(
                    earlier_effect.barrier < 0, place[earlier_effect.lanes], earlier_effect.barrier
                )
                if earlier_effect.landed:
                    is_arrival_open = (earlier_effect.phase < 0) & (earlier_effect.barrier >= 0)
                    earlier_effect.phase[is_arrival_open] = self.phases(earlier_effect.barrier)[is_arrival_open]
        self.issue(effect)

    def commit(self, kind: str, lanes: Lanes) -> None:
        """Commit the effects that the lanes have issued since their last commit as a group."""
        self.committed[kind][lanes] += 1

    # Waiting

    def wait(self, kind: str, lanes: Lanes, newest: int, only_read: bool = False) -> None:
        """Complete the groups that lanes wait for, all but the `newest` ones."""
        end_group = np.full(self.machine.lanes, -1)
        end_group[lanes] = self.committed[kind][lanes] - newest
        effects = self.extract([effect.group < end_group[effect.lanes] if effect.kind == kind else None
                               for effect in self.queue])  # fmt: skip
        if kind == "wgmma":
            effects.sort(key=lambda effect: effect.serial)
        for effect in effects:
            if not effect.landed:
                effect.take(self.machine.memory) if only_read else self.land(effect)
            for watcher in self.machine.watchers:
                watcher.effect_wait(effect, only_read)
        if only_read:  # they have yet to land
            self.queue += effects

    def observe(self, place: int) -> None:
        """Remove effects that landed in phases of this mbarrier that are complete, now that lanes have seen it."""
        phase = self.mbarriers[place].phase
        for effect in self.extract([(effect.barrier == place) & (effect.phase < phase) if effect.landed else None
                                    for effect in self.queue]):  # fmt: skip
            for watcher in self.machine.watchers:
                watcher.effect_seen(effect)

    def phases(self, places: Array) -> Array:
        """Return the current phase of each mbarrier; -1 where there is none."""
        distinct, index = np.unique(places, return_inverse=True)
        barriers = [self.mbarriers.get(int(place)) for place in distinct]
        return np.array([-1 if barrier is None else barrier.phase for barrier in barriers])[index]

    def extract(self, masks: Iterable[Array | None]) -> list[Effect]:
        """Remove the entries in each effect's mask (None: no entry) and return them; in mode "late" shuffled."""
        taken_effects, remaining_effects = [], []
        for effect, mask in zip(self.queue, masks, strict=True):
            chosen, not_chosen = effect.split(mask) if mask is not None else (None, effect)
            taken_effects += [chosen] if chosen is not None else []
            remaining_effects += [not_chosen] if not_chosen is not None else []
        self.queue = remaining_effects
        return [taken_effects[i] for i in self.random.permutation(len(taken_effects))] if self.late else taken_effects

    # Landing

    def advance(self, only_awaited: bool = False) -> bool:
        """Land one effect, first those awaited at an mbarrier (`only_awaited`: only those); False if there is none."""
        effects_in_flight = [effect for effect in self.queue if not effect.landed]
        if not effects_in_flight:
            return False
        awaited_mbarriers = [place for place, barrier in self.mbarriers.items() if barrier.waiting]
        chosen = [effect for effect in effects_in_flight if np.isin(effect.barrier, awaited_mbarriers).any()]
        if not chosen and only_awaited:
            return False
        effect = (chosen or effects_in_flight)[self.random.integers(len(chosen or effects_in_flight))]
        if chosen:  # entries that nobody waits for may be later still
            effect = self.split_in_queue(effect, np.isin(effect.barrier, awaited_mbarriers))
        self.land(effect)
        return True

    def state(self) -> object:
        """List the effects in the queue, each with whether it has landed."""
        return [(effect.serial, effect.landed) for effect in self.queue]

    def split_in_queue(self, effect: Effect, mask: Array) -> Effect:
        """Split an effect of the queue in two, if need be; return the part where `mask` holds."""
        chosen, not_chosen = effect.split(mask)
        position = self.queue.index(effect)
        self.queue[position : position + 1] = [part for part in (chosen, not_chosen) if part is not None]
        assert chosen is not None
        return chosen

    def land(self, effect: Effect) -> None:
        """Write an effect's results, notify its mbarriers, and mark it as landed."""
        # a copy of the list, as splitting an effect changes the queue
        for earlier_effect in list(self.queue) if effect.in_order else ():
            if (
                earlier_effect.kind == effect.kind
                and earlier_effect.serial < effect.serial
                and not earlier_effect.landed
            ):
                same_lanes = np.isin(earlier_effect.lanes, effect.lanes)
                if same_lanes.any() and not earlier_effect.arrives:
                    self.land(self.split_in_queue(earlier_effect, same_lanes))
        effect.write(self.machine.memory)
        effect.landed = True
        for watcher in self.machine.watchers:
            watcher.effect_complete(effect)
        if np.count_nonzero(effect.barrier >= 0):
            effect.phase = np.where(effect.barrier >= 0, self.phases(effect.barrier), -1)
        if effect.arrives or effect.kind == "bulk":
            self.notify_mbarriers(effect)

    def notify_mbarriers(self, effect: Effect) -> None:
        """Tell the mbarriers of an effect that it has landed: subtract its bytes, or arrive."""
        sizes = effect.writes[2]
        for place in np.unique(effect.barrier[effect.barrier >= 0]).tolist():
            is_at_place = effect.barrier == place
            try:
                barrier = self.mbarriers.get(place)
                if barrier is None:
                    raise ValueError("its mbarrier has been invalidated")
                if not effect.arrives:
                    barrier.expect(-int(sizes[is_at_place].sum()))
                for _ in range(np.count_nonzero(is_at_place) if effect.arrives else 0):
                    barrier.arrive(1)
            except ValueError as error:
                fault = self.machine.fault_place(effect.instruction, int(effect.lanes[int(np.argmax(is_at_place))]))
                raise EmulationError(f"{fault}: {error}") from None
