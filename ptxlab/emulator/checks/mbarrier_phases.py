"""Part of the check "async": waits by parity that could be over too early.

A wait by parity for a phase is over at once, too, while the phase before it is under way: the one before that has the
same parity, and is complete. So who waits has to know that the phase before is over. It does if it has waited for that
itself, or knows of a thread that has (`happens_before`), or of all arrivals where no copy arrives.
"""

import numpy as np

from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.checks.happens_before import HappensBefore
from ptxlab.emulator.checks.vector_clocks import NOTHING, Clock, groups, joined
from ptxlab.emulator.core.effect import Effect
from ptxlab.emulator.core.lanes import Lanes, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array
from ptxlab.emulator.sync.mbarrier import MBarriers


class Phase:
    """What is known of one phase of an mbarrier."""

    def __init__(self, lanes: int) -> None:
        self.arrivals: Clock = NOTHING  # what they made known
        self.copied = False  # whether a copy was among them
        self.times = np.zeros(lanes, np.int32)  # the lanes' own, when they had waited for it; 0 if they have not


class MBarrierPhases(Check):
    """Waits by lanes that do not know that the phase before is over. It has to look before `order` learns of a wait."""

    def __init__(self, machine: Machine, order: HappensBefore) -> None:
        super().__init__(machine)
        self.mbarriers, self.order = machine.unit(MBarriers), order
        self.phases: dict[int, tuple[Phase, Phase, Phase]] = {}  # by arena offset: the one under way, and two before it

    def begin(self, instruction: Instruction, lanes: Lanes, places: Array) -> None:
        """Nothing is known of these mbarriers."""
        for place in places.tolist():
            self.phases[place] = self.phase(), self.phase(), self.phase()

    def phase(self) -> Phase:
        """A phase that begins."""
        return Phase(self.machine.lanes)

    def landed(self, effect: Effect) -> None:
        """Copies arrive."""
        for place in np.unique(effect.barrier[effect.barrier >= 0]).tolist():
            self.phases[place][0].copied = True

    def phase_complete(self, place: int) -> None:
        """One phase more."""
        if place not in self.phases:  # a cluster's barrier
            return
        now, last, _ = self.phases[place]
        for known in self.order.arrived.get(place, {}).values():
            now.arrivals = joined(now.arrivals, known)
        self.phases[place] = self.phase(), now, last

    def phase_wait(self, instruction: Instruction, place: int, lanes: Lanes) -> None:
        """Lanes have seen the last phase end."""
        if place not in self.phases:
            return
        (_, last, before), indices, barrier = self.phases[place], indices_of(lanes), self.mbarriers.at[place]
        if barrier.phase > 1 and ".parity" in instruction.opcode and not before.times[indices].all():
            wrong = ~self.know_the_end(before, indices)
            if wrong.any():
                message = (
                    f"waits by parity for phase {barrier.phase - 1} of {barrier}, and nothing says that phase "
                    f"{barrier.phase - 2} is over: were it not, neither would be waited for,"
                )
                self.report(instruction, "async", lanes, wrong, message)
        last.times[indices] = self.order.clocks.own[indices]

    def know_the_end(self, phase: Phase, lanes: Array) -> Array:
        """Which of them know that it is over."""
        clocks, waited = self.order.clocks, np.flatnonzero(phase.times)
        known = np.zeros(len(lanes), bool)
        for group in groups(clocks.row[lanes]):  # of lanes that know the same
            first = np.full(len(waited), lanes[group[0]])
            known[group] = clocks.knows(first, waited, phase.times[waited]).any()
        for i in () if phase.copied else np.flatnonzero(~known).tolist():
            clock = clocks.known_to(lanes[i : i + 1])
            known[i] = all(at in clock and (clock[at] >= times).all() for at, times in phase.arrivals.items())
        return known
