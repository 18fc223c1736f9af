"""Part of the check "race": who uses the shared memory of another block of its cluster has to be done when that ends.

A block knows of what others did to its memory what its warps know when they end; `race` keeps these clocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptxlab.emulator.check import Watcher
from ptxlab.emulator.types import Array, Lanes, indices_of

if TYPE_CHECKING:
    from ptxlab.emulator.access import Access
    from ptxlab.emulator.effects import Effect
    from ptxlab.emulator.ir import Instruction
    from ptxlab.emulator.machine import Machine
    from ptxlab.emulator.race import Races


def _first_of_each(pairs: Array) -> tuple[Array, Array]:
    """The distinct columns, as rows, and where each of them stands first."""
    distinct, first = np.unique(pairs, axis=1, return_index=True)
    return distinct.T, first


class Guests(Watcher):
    """Accesses to the shared memory of a block that may have ended."""

    def __init__(self, machine: Machine, races: Races) -> None:
        super().__init__(machine)
        self.races = races
        # block -> actor, as `race` numbers them -> when it was there last, by which instruction, of which lane
        self.visits: dict[int, dict[int, tuple[int, Instruction, int]]] = {}
        self.known: dict[int, Array] = {}  # block -> what its warps knew that have ended

    def load(self, access: Access, lanes: Lanes, offsets: Array) -> None:
        """Shared memory is named by the window of the cluster, or by a generic address."""
        if access.space not in ("shared::cluster", "generic"):
            return
        if ".async" in access.instruction.opcode:  # it looks at the mbarrier; the visit is the effect
            return
        indices = indices_of(lanes)
        warps = indices // 32
        self.visit(access.instruction, indices, offsets, warps, self.races.seen[warps, warps])

    def store(self, access: Access, lanes: Lanes, offsets: Array, values: Array) -> None:
        """As a load."""
        self.load(access, lanes, offsets)

    def atomic(self, access: Access, lanes: Lanes, offsets: Array) -> None:
        """As a load."""
        self.load(access, lanes, offsets)

    def issue(self, effect: Effect) -> None:
        """What is under way to another block."""
        lanes, targets, sizes = effect.writes
        if len(lanes) and sizes[0]:
            actors = self.races.warps + lanes // 32
            self.visit(effect.instruction, lanes, targets, actors, np.full(len(lanes), effect.serial))

    def visit(self, instruction: Instruction, indices: Array, offsets: Array, actors: Array, times: Array) -> None:
        """Remember who was where."""
        peers = self.machine.peers
        blocks = peers.block_at(offsets)
        far = np.flatnonzero((blocks >= 0) & (blocks != peers.block[indices]))
        pairs = np.stack((blocks[far], actors[far]))
        for (block, actor), i in zip(*(a.tolist() for a in _first_of_each(pairs)), strict=True):
            self.visits.setdefault(block, {})[actor] = int(times[far[i]]), instruction, int(indices[far[i]])

    def exit(self, lanes: Lanes) -> None:
        """The last warp of a block takes the memory with it."""
        machine, indices = self.machine, indices_of(lanes)
        for block in np.unique(machine.peers.block[indices]).tolist():
            warps = np.unique(indices[machine.peers.block[indices] == block] // 32)
            known = np.max(self.races.seen[warps], axis=0)
            self.known[block] = np.maximum(known, self.known.get(block, 0))
            if machine.alive[block * machine.stride : (block + 1) * machine.stride].any():
                continue
            for actor, (time, instruction, lane) in self.visits.pop(block, {}).items():
                if self.known[block][actor] < time:
                    whose = "({},{},{})".format(*machine.blocks[block])
                    message = (
                        f"shared memory of block {whose}, which may have ended by then: it does not wait for this,"
                    )
                    self.report(instruction, "race", np.array([lane]), np.array([True]), message)
