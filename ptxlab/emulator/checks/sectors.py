"""How many 32-byte sectors of global memory each instruction touches, and how many its bytes would fill."""

from dataclasses import replace

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.effect import Effect
from ptxlab.emulator.core.findings import GlobalAccess
from ptxlab.emulator.core.lanes import Lanes, indices_of
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array

SECTOR = 32  # bytes
COUNTED = ("ld", "ldu", "st", "atom", "red")


class Sectors(Check):
    """Counts loads, stores, atomics and `cp.async`, a warp at a time; not copies of the copy engine."""

    def load(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Count the sectors of an access, if it is of global memory."""
        launch = self.machine.launch
        if access.space in ("global", "generic") and access.instruction.head in COUNTED:
            is_global = ~launch.is_shared(offsets) & (offsets < launch.local_window)
            sizes = np.full(np.count_nonzero(is_global), access.size)
            self.count(access.instruction, indices_of(lanes)[is_global], offsets[is_global], sizes)

    def store(self, access: MemoryAccess, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Count a store like a load."""
        self.load(access, lanes, offsets)

    def atomic(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Count an atomic like a load."""
        self.load(access, lanes, offsets)

    def issue(self, effect: Effect) -> None:
        """Count the sectors of `cp.async`, whose copies threads make themselves."""
        lanes, starts, sizes = effect.reads
        if effect.kind == "cp.async" and not effect.arrives:
            self.count(effect.instruction, lanes[sizes > 0], starts[sizes > 0], sizes[sizes > 0])

    def count(self, instruction: Instruction, lanes: Array, starts: Array, sizes: Array) -> None:
        """Add the sectors of one execution by these warps to the counts; aligned accesses never cross a sector."""
        if not len(lanes):
            return
        accesses = self.machine.launch.global_accesses
        key = instruction.path, instruction.line, instruction.text
        warps = lanes // 32
        sectors = np.unique(np.stack((warps, starts // SECTOR)), axis=1)
        # what several lanes read counts once
        _, first = np.unique(np.stack((warps, starts)), axis=1, return_index=True)
        nbytes = np.bincount(warps[first], sizes[first])
        entry = accesses.get(key) or GlobalAccess(*key, 0, 0, 0)
        accesses[key] = replace(
            entry,
            requests=entry.requests + len(np.unique(warps)),
            sectors=entry.sectors + sectors.shape[1],
            needed=entry.needed + int(ceil_div(nbytes, SECTOR).sum()),
        )
