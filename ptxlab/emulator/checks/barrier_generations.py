"""Part of the check "race": threads that come to a named barrier while its generation before may be under way.

A barrier with a count of threads is complete when so many have come, whoever they are. A thread that comes again too
early is counted in the generation under way, which is then complete without a thread that others wait for. So who comes
has to know that the generation before is over: it has waited for that itself, or knows of all who came to it
(`happens_before`). Two groups of warps that use one barrier at once break the same rule. A generation of one warp is
over as soon as that has come.
"""

import numpy as np

from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.checks.happens_before import HappensBefore
from ptxlab.emulator.checks.vector_clocks import groups
from ptxlab.emulator.core.lanes import Lanes, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.ir import Entry, Instruction


def counts_threads(entry: Entry) -> bool:
    """Tell whether a kernel has a barrier that names its number of threads."""
    return any(i.head in ("bar", "barrier") and len(i.operands) > 1 for i in entry.instructions)


class Generation:
    """Arrivals at one generation of a barrier, by thread of the block."""

    def __init__(self, threads: int) -> None:
        self.times = np.zeros(threads, np.int32)  # by their own time; 0 for who has not
        self.codes = np.zeros(threads, np.int32)  # the index of the instruction by which
        self.waited = np.zeros(threads, bool)  # and seen it over

    @property
    def is_one_warp(self) -> bool:
        """True if all threads that have arrived are of one warp."""
        arrived_threads = np.flatnonzero(self.times)
        return bool(arrived_threads[0] // 32 == arrived_threads[-1] // 32)


class BarrierGenerations(Check):
    """Check for arrivals by threads that do not know the generation before to be over; runs before `order`."""

    def __init__(self, machine: Machine, order: HappensBefore) -> None:
        super().__init__(machine)
        self.order = order
        self.under_way: dict[tuple[int, int], Generation] = {}  # by block of the wave, and number
        self.complete: dict[tuple[int, int], Generation] = {}  # the last of each

    def arrive(self, instruction: Instruction, barrier: tuple[int, int], lanes: Lanes) -> None:
        """Record arrivals at the current generation; check that the threads know the previous one to be over."""
        indices, stride = indices_of(lanes), self.machine.stride
        threads = indices % stride
        current_generation = self.under_way.setdefault(barrier, Generation(stride))
        previous_generation, has_arrived = self.complete.get(barrier), current_generation.times[threads] > 0
        if has_arrived.any():
            message = f"comes to barrier {barrier[1]} twice before all of its threads have come once,"
            self.report(instruction, "race", lanes, has_arrived, message)
        elif (
            previous_generation
            and not previous_generation.is_one_warp
            and not previous_generation.waited[threads].all()
        ):
            self.require_the_end(instruction, barrier, lanes, previous_generation)
        current_generation.times[threads] = self.order.clocks.own_times[indices]
        current_generation.codes[threads] = self.machine.index[id(instruction)]

    def require_the_end(
        self, instruction: Instruction, barrier: tuple[int, int], lanes: Lanes, previous: Generation
    ) -> None:
        """Report the threads that do not know of all arrivals of the generation before."""
        clocks, indices = self.order.clocks, indices_of(lanes)
        arrived_threads = np.flatnonzero(previous.times)
        columns = (barrier[0] * self.machine.stride + arrived_threads) % clocks.size
        is_unsure, unknown_thread = np.zeros(len(indices), bool), 0
        for warp in groups(indices // 32):
            clock = clocks.known_to(indices[warp])[int(indices[0]) // clocks.size]
            is_unseen = clock[columns] < previous.times[arrived_threads]
            if is_unseen.any():
                is_unsure[warp] = ~previous.waited[indices[warp] % self.machine.stride]
                unknown_thread = unknown_thread or int(arrived_threads[int(np.argmax(is_unseen))])
        if is_unsure.any():
            _, thread = self.machine.place_of(barrier[0] * self.machine.stride + unknown_thread)
            arrival = self.machine.code[previous.codes[unknown_thread]].seen_from(instruction)
            message = (
                f"comes to barrier {barrier[1]} without knowing that its generation before is over, to which thread "
                f"({','.join(map(str, thread))}) came by {arrival}: until that has come, this arrival counts in its "
                "place; wait for that generation (bar.sync), or behind a thread that has,"
            )
            self.report(instruction, "race", lanes, is_unsure, message)

    def depart(self, barrier: tuple[int, int], lanes: Lanes | None) -> None:
        """Complete the generation, and record that the waiting lanes have seen it over."""
        generation = self.complete[barrier] = self.under_way.pop(barrier)
        if lanes is not None:
            generation.waited[indices_of(lanes) % self.machine.stride] = True
