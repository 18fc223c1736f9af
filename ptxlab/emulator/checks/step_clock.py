"""The step clock: a time for every warp, as if it had an issue slot to itself, copies and wgmma going on beside it.

An instruction takes its warp a step. Who waits at a barrier goes on when the last of the others has come; what the
copy engine brings, and what tensor cores multiply, takes as many steps as it would take clocks on an H200. It is no
prediction of a time, but shows who waits for whom. Without it the clock counts the instructions of all warps together.
"""

from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import numpy as np

from ptxlab.emulator.async_.wgmma import WgmmaProducts
from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.core.effect import Effect
from ptxlab.emulator.core.lanes import Handler, Lanes
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array

LATENCY = 600  # from asking for a copy to its first byte
BYTES_PER_STEP = 64  # of a block's copies: what an SM takes from the L2
COLUMNS_PER_STEP = 2  # of wgmma m64nNk32, 8-bit: 4096 multiply-adds per clock and SM


class StepClock(Check):
    """Times of the warps of a wave in steps, waits included, which the clock registers return."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.warps_per_block = machine.stride // 32
        self.time = machine.clock = np.full(machine.lanes // 32, machine.launch.elapsed)
        # place -> when the last of those who have arrived did so
        self.last_arrival: dict[Hashable, int] = defaultdict(int)
        self.complete: dict[int, int] = defaultdict(int)  # mbarrier -> when its last phase was complete
        self.copied: dict[int, int] = defaultdict(int)  # block -> when its copies so far have come
        self.multiplied: dict[tuple[int, int], int] = defaultdict(int)  # block, quarter of its SM -> likewise
        self.ends: dict[tuple[int, int], int] = {}  # serial of an effect, lane -> when it has ended

    def wrap_handler(self, instruction: Instruction, handler: Handler) -> Handler:
        """Wrap a handler to count a step; a guarded instruction is counted by `wrap_guarded`."""
        return handler if instruction.guard is not None else self.wrap_guarded(instruction, handler)

    def wrap_guarded(self, instruction: Instruction, handler: Handler) -> Handler:
        """Wrap a guarded instruction to count a step, also where the guard is false."""

        def count_and_run(lanes: Lanes) -> Any:
            self.time[self.warps(lanes)] += 1
            return handler(lanes)

        return count_and_run

    def warps(self, lanes: Lanes) -> slice | Array:
        """Return the warps that lanes belong to."""
        if isinstance(lanes, slice):
            return slice(lanes.start // 32, (lanes.stop + 31) // 32)
        return np.unique(lanes // 32)

    def arrive(self, instruction: Instruction, barrier: tuple[int, int], lanes: Lanes) -> None:
        """Record the time at which lanes come to a barrier of the block."""
        self.last_arrival[barrier] = max(self.last_arrival[barrier], int(self.time[self.warps(lanes)].max()))

    def depart(self, barrier: tuple[int, int], lanes: Lanes | None) -> None:
        """Hold the warps back until the last thread has come to the barrier."""
        last_arrival = self.last_arrival.pop(barrier)
        if lanes is not None:
            self.wait_until(lanes, last_arrival)

    def phase_arrive(self, instruction: Instruction, place: int, lanes: Lanes) -> None:
        """Record the time at which lanes come to an mbarrier, or to the barrier of a cluster."""
        self.last_arrival[place] = max(self.last_arrival[place], int(self.time[self.warps(lanes)].max()))

    def phase_complete(self, place: int) -> None:
        """Record the time at which the last thread or copy has come."""
        self.complete[place] = self.last_arrival.pop(place, 0)

    def phase_wait(self, instruction: Instruction, place: int, lanes: Lanes) -> None:
        """Hold the warps back until the phase is complete."""
        self.wait_until(lanes, self.complete[place])

    def wait_until(self, lanes: Lanes, time: int) -> None:
        """Hold the warps of these lanes back until a time."""
        warps = self.warps(lanes)
        self.time[warps] = np.maximum(self.time[warps], time)

    def issue(self, effect: Effect) -> None:
        """Set the step at which an effect ends.

        Copies of a block come one after another; each quarter of an SM multiplies for one warp at a time.
        """
        sizes = dict.fromkeys(effect.lanes.tolist(), 0)
        for lane, size in zip(effect.writes[0].tolist(), effect.writes[2].tolist(), strict=True):
            sizes[lane] += size
        for lane, size in sizes.items():
            issue_time, (block, warp) = int(self.time[lane // 32]), divmod(lane // 32, self.warps_per_block)
            if isinstance(effect, WgmmaProducts):
                place = block, warp % 4
                end_time = self.multiplied[place] = (
                    max(issue_time, self.multiplied[place]) + effect.decoded.n // COLUMNS_PER_STEP
                )
            else:
                self.copied[block] = max(issue_time, self.copied[block]) + size // BYTES_PER_STEP
                end_time = self.copied[block] + LATENCY
            self.ends[effect.serial, lane] = end_time

    def effect_complete(self, effect: Effect) -> None:
        """Record at the mbarriers the time at which their copies have landed."""
        for lane, place in zip(effect.lanes.tolist(), effect.barrier.tolist(), strict=True):
            if place >= 0:
                self.last_arrival[place] = max(self.last_arrival[place], self.ends[effect.serial, lane])

    def effect_wait(self, effect: Effect, only_read: bool) -> None:
        """Hold the warps back until the effect has ended."""
        for lane in effect.lanes.tolist():
            self.wait_until(np.array([lane]), self.ends[effect.serial, lane])

    def end(self) -> None:
        """Record the time at which this wave has ended: the next one begins there."""
        self.machine.launch.elapsed = int(self.time.max())
