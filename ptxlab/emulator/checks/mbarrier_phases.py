"""Part of the check "async": waits by parity that could be over too early.

A wait by parity for a phase is over at once, too, while the phase before it is under way: the one before that has the
same parity, and is complete. So who waits has to know that the phase before is over. It does if it has waited for that
itself, or knows of a thread that has (`happens_before`), or of all arrivals (those that release; a relaxed one tells
nothing) where no copy arrives. A wait that really is over too early counts as one for the phase before; other
checks find what is read behind it.
"""

import numpy as np

from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.checks.happens_before import HappensBefore
from ptxlab.emulator.checks.vector_clocks import NOTHING, Clock, groups, join_clocks
from ptxlab.emulator.core.effect import Effect
from ptxlab.emulator.core.lanes import Lanes, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array
from ptxlab.emulator.sync.mbarrier import MBarriers


class Phase:
    """State of a phase of an mbarrier: its arrivals, and the lanes that have seen it over."""

    def __init__(self) -> None:
        self.arrivals: Clock = NOTHING  # what those made known that release
        self.copied = False  # whether a copy was among them
        # of the lanes of the cluster, their own time when they first saw it over, or 0; empty while nobody has
        self.seen = np.zeros(0, np.int32)

    def seen_by(self, columns: Array) -> Array:
        """Tell which of these lanes (as columns of the cluster) have seen the phase over."""
        return self.seen[columns] > 0 if len(self.seen) else np.zeros(len(columns), bool)


class MBarrierPhases(Check):
    """Check for waits by lanes that do not know the phase before to be over; runs before `order`."""

    def __init__(self, machine: Machine, order: HappensBefore) -> None:
        super().__init__(machine)
        self.mbarriers, self.order = machine.unit(MBarriers), order
        self.phases: dict[int, tuple[Phase, Phase, Phase]] = {}  # by arena offset: the one under way, and two before it

    def begin(self, instruction: Instruction, lanes: Lanes, places: Array) -> None:
        """Begin to track the phases of newly initialised mbarriers."""
        for place in places.tolist():
            self.phases[place] = Phase(), Phase(), Phase()

    def effect_complete(self, effect: Effect) -> None:
        """Record that copies arrive in the current phases of their mbarriers."""
        for place in np.unique(effect.barrier[effect.barrier >= 0]).tolist():
            self.phases[place][0].copied = True

    def phase_complete(self, place: int) -> None:
        """Begin to track another phase of an mbarrier."""
        if place not in self.phases:  # a cluster's barrier
            return
        current_phase, last_phase, _ = self.phases[place]
        for clock in self.order.arrived.get(place, {}).values():
            current_phase.arrivals = join_clocks(current_phase.arrivals, clock)
        self.phases[place] = Phase(), current_phase, last_phase

    def phase_seen(self, instruction: Instruction, place: int, lanes: Lanes) -> None:
        """Check that the lanes whose wait is over know that the phase before is over too."""
        (_, last, previous), phase = self.phases[place], self.mbarriers.by_place[place].phase - 1
        indices, clocks = indices_of(lanes), self.order.clocks
        columns = indices % clocks.size
        is_first = ~last.seen_by(columns)
        is_unsure = is_first & ~previous.seen_by(columns)
        if phase > 0 and is_unsure.any() and ".parity" in instruction.opcode:
            is_unsure[is_unsure] = ~self.know_the_end(previous, indices[is_unsure])
            if is_unsure.any():
                message = (
                    f"waits by parity for phase {phase} of {self.mbarriers.by_place[place]} without knowing that phase "
                    f"{phase - 1} is over, and while that is under way this wait is over at once: wait for that one, "
                    "too, or behind a thread that has (phases count from 0),"
                )
                self.report(instruction, "async", lanes, is_unsure, message)
        if not len(last.seen):
            last.seen = np.zeros(clocks.size, np.int32)
        last.seen[columns[is_first]] = clocks.own_times[indices[is_first]]

    def know_the_end(self, phase: Phase, lanes: Array) -> Array:
        """Tell which of these lanes, which have not seen the phase over, know from others that it is."""
        clocks, columns = self.order.clocks, np.flatnonzero(phase.seen)
        seers = lanes[0] - lanes[0] % clocks.size + columns
        is_known = np.zeros(len(lanes), bool)
        for group in groups(clocks.row[lanes]):  # of lanes that have learnt the same
            is_known[group] = clocks.knows(np.full(len(columns), lanes[group[0]]), seers, phase.seen[columns]).any()
        for i in np.flatnonzero(~is_known).tolist() if phase.arrivals and not phase.copied else ():
            clock = clocks.known_to(lanes[i : i + 1])
            is_known[i] = all(
                cluster in clock and (clock[cluster] >= times).all() for cluster, times in phase.arrivals.items()
            )
        return is_known
