"""Part of the check "race": who uses the shared memory of another block of its cluster has to be done when that ends.

A block knows of what others did to its memory what its warps know when they end; `race` keeps these clocks.
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


class RaceClusterExit(Check):
    """Check for accesses to the shared memory of a block of the cluster that may have ended."""

    def __init__(self, machine: Machine, order: HappensBefore) -> None:
        super().__init__(machine)
        self.clocks = order.clocks
        # block -> for each column of `clocks.rows`, when that actor was there last, and by which instruction
        self.visits: dict[int, tuple[Array, Array]] = {}
        self.known: dict[int, Array] = {}  # block -> what its lanes knew that have ended

    def load(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Record accesses to shared memory that is named by the window of the cluster, or by a generic address."""
        if access.space not in ("shared::cluster", "generic"):
            return
        if ".async" in access.instruction.opcode:  # it looks at the mbarrier; the visit is the effect
            return
        indices = indices_of(lanes)
        self.record_visit(access.instruction, indices, offsets, self.clocks.own_times[indices], engine=False)

    def store(self, access: MemoryAccess, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Record a store like a load."""
        self.load(access, lanes, offsets)

    def atomic(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Record an atomic like a load."""
        self.load(access, lanes, offsets)

    def issue(self, effect: Effect) -> None:
        """Record the writes of an effect that are under way to another block."""
        lanes, targets, sizes = effect.writes
        if len(lanes) and sizes[0]:
            self.record_visit(effect.instruction, lanes, targets, np.full(len(lanes), effect.serial), engine=True)

    def record_visit(
        self, instruction: Instruction, indices: Array, offsets: Array, times: Array, engine: bool
    ) -> None:
        """Record the last access of each lane (or its engine) to another block's shared memory."""
        peers, clocks = self.machine.cluster_memory, self.clocks
        blocks = peers.block_at(offsets)
        is_remote = (blocks >= 0) & (blocks != peers.block[indices])
        for block in np.unique(blocks[is_remote]).tolist():
            in_block = is_remote & (blocks == block)
            columns = indices[in_block] % clocks.size + engine * clocks.size
            last_times, code = self.visits.setdefault(block, (*np.zeros((2, clocks.rows.shape[1]), np.int32),))
            last_times[columns], code[columns] = times[in_block], self.machine.index[id(instruction)]

    def exit(self, lanes: Lanes) -> None:
        """Report other blocks' accesses that may come after the end of a block, whose shared memory is then gone."""
        machine, indices = self.machine, indices_of(lanes)
        for block in np.unique(machine.cluster_memory.block[indices]).tolist():
            rows = np.unique(self.clocks.row[indices[machine.cluster_memory.block[indices] == block]])
            known_times = self.clocks.rows[rows].max(axis=0)
            known_times = self.known[block] = np.maximum(known_times, self.known.get(block, 0))
            if machine.alive[block * machine.stride : (block + 1) * machine.stride].any() or block not in self.visits:
                continue
            last_times, code = self.visits.pop(block)
            late_threads = np.flatnonzero(known_times < last_times)
            first = block // machine.cluster_memory.size * self.clocks.size  # lane of the cluster
            block_index = "({},{},{})".format(*machine.blocks[block])
            message = f"shared memory of block {block_index}, which may have ended by then: it does not wait for this,"
            for index in np.unique(code[late_threads]).tolist():
                lanes = np.unique(first + late_threads[code[late_threads] == index] % self.clocks.size)
                self.report(machine.code[index], "race", lanes, np.ones(len(lanes), bool), message)
