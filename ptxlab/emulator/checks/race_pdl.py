"""Part of the check "race": what the kernel before on the stream may still be using, until griddepcontrol.wait.

A kernel in which that instruction stands, or of which the caller says what it reads from its predecessor, is judged as
one that begins before that has ended; every other is left alone. Until the wait it may not write to global memory at
all (the predecessor may still read or write there), nor read the buffers that the caller says come from the
predecessor. An access, or the issue of a copy, lies behind a wait if its thread has waited itself, or if something
orders it behind a thread of its cluster that has: a barrier, an mbarrier, release and acquire, as in `race`; or knowing
that a copy is done which was issued behind a wait. Waits in other clusters are not looked at.

Nor may it read those buffers by ld.global.nc, even behind the wait: that says that they do not change while the kernel
runs, and ptxas has moved such loads ahead of the wait, which the compiler makes of `const T* __restrict__` (found in
the SASS of a kernel that read offsets so, 13.0).
"""

import numpy as np

from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.checks.happens_before import HappensBefore
from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.effect import Effect
from ptxlab.emulator.core.lanes import Lanes, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array

WAIT = "griddepcontrol.wait"


class RacePdl(Check):
    """Check for accesses to global memory that do not wait for the kernel before."""

    def __init__(self, machine: Machine, order: HappensBefore) -> None:
        super().__init__(machine)
        self.clocks = clocks = order.clocks
        self.is_behind = np.zeros(machine.lanes, bool)  # lanes of which it is known; once so, always so
        # cluster, and column of `clocks.rows` -> since when that actor is behind a wait; 0: it is not
        self.behind_since = np.zeros((machine.lanes // clocks.size, clocks.rows.shape[1]), np.int32)
        self.is_predecessor_region = np.isin(machine.memory.starts, machine.launch.after_wait)  # of each region

    def wait_for_predecessors(self, lanes: Lanes) -> None:
        """Record that these lanes have waited: later, only `.nc` reads of the predecessor's buffers are not allowed."""
        indices = indices_of(lanes)
        self.is_behind[indices] = True
        self.record_behind(indices, self.clocks.own_times[indices], engine=False)

    def record_behind(self, indices: Array, times: Array | int, engine: bool) -> None:
        """Record the times from which lanes (or their engines) are behind a wait; the first time counts."""
        size = self.clocks.size
        cells = indices // size, indices % size + engine * size
        self.behind_since[cells] = np.where(self.behind_since[cells] == 0, times, self.behind_since[cells])

    def are_behind_wait(self, indices: Array) -> Array:
        """Tell which of these lanes are behind a wait, their own or one that they know of."""
        clocks = self.clocks
        for row in np.unique(clocks.row[indices[~self.is_behind[indices]]]).tolist():
            members = np.flatnonzero(clocks.row == row)
            wait_times = self.behind_since[members[0] // clocks.size]
            self.is_behind[members] |= bool(((wait_times > 0) & (clocks.rows[row] >= wait_times)).any())
        return self.is_behind[indices]

    # Accesses

    def load(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Check reads of buffers that the predecessor writes."""
        if "nc" in access.instruction.opcode.split("."):
            self.read_as_constant(access.instruction, indices_of(lanes), offsets)
        else:
            self.read(access.instruction, indices_of(lanes), offsets)

    def store(self, access: MemoryAccess, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Check writes to global memory, which the predecessor may use."""
        self.write(access.instruction, indices_of(lanes), offsets)

    def atomic(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Check an atomic as a store."""
        self.write(access.instruction, indices_of(lanes), offsets)

    def issue(self, effect: Effect) -> None:
        """Check the accesses of an effect, which begin now.

        Whoever learns that they are done, knows that the wait was before.
        """
        for (lanes, starts, sizes), judge in ((effect.reads, self.read), (effect.writes, self.write)):
            judge(effect.instruction, lanes[sizes > 0], starts[sizes > 0])
        waited_lanes = effect.lanes[self.are_behind_wait(effect.lanes)]
        self.record_behind(waited_lanes, effect.serial, engine=True)

    def read(self, instruction: Instruction, indices: Array, offsets: Array) -> None:
        """Report reads of the predecessor's buffers that lie behind no wait."""
        self.judge(instruction, indices, offsets, self.is_from_predecessor(offsets), "read of", "write")

    def read_as_constant(self, instruction: Instruction, indices: Array, offsets: Array) -> None:
        """Report `.nc` reads of the predecessor's buffers, wherever placed: ptxas may move them ahead of the wait."""
        from_predecessor = self.is_from_predecessor(offsets)
        if from_predecessor.any():
            place = self.machine.memory.name_byte(int(offsets[int(np.argmax(from_predecessor))]))
            message = f"read of {place} as read-only (.nc), which ptxas may move ahead of {WAIT}"
            self.report(instruction, "race", indices, from_predecessor, message)

    def is_from_predecessor(self, offsets: Array) -> Array:
        """Tell which of these bytes lie in the predecessor's buffers."""
        if not self.is_predecessor_region.any():
            return np.zeros(len(offsets), bool)
        return self.is_predecessor_region[np.searchsorted(self.machine.memory.starts_array, offsets, "right") - 1]

    def write(self, instruction: Instruction, indices: Array, offsets: Array) -> None:
        """Report writes to global memory that lie behind no wait."""
        # Shared and local memory lie behind all buffers.
        is_global = offsets < self.machine.cluster_memory.first_window
        self.judge(instruction, indices, offsets, is_global, "write to", "use")

    def judge(
        self, instruction: Instruction, indices: Array, offsets: Array, mask: Array, action: str, use: str
    ) -> None:
        """Report the accesses in `mask` that do not lie behind a wait."""
        if not mask.any() or self.is_behind[indices].all():
            return
        is_wrong = mask & ~self.are_behind_wait(indices)
        if is_wrong.any():
            place = self.machine.memory.name_byte(int(offsets[int(np.argmax(is_wrong))]))
            message = f"{action} {place} ahead of {WAIT}: the kernel before may still {use} it,"
            self.report(instruction, "race", indices, is_wrong, message)
