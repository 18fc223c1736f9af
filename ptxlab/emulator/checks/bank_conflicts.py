"""What each shared-memory instruction costs, by the bank model of `hardware.banks`."""

from dataclasses import replace

import numpy as np

from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.findings import SharedAccess
from ptxlab.emulator.core.lanes import Lanes, indices_of
from ptxlab.emulator.front.types import Array
from ptxlab.hardware.banks import bank_use

COUNTED = ("ld", "st", "ldmatrix", "stmatrix")


class BankConflicts(Check):
    """Counts `ld.shared`, `st.shared`, `ldmatrix` and `stmatrix`; not atomics, nor copies."""

    def load(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Count the wavefronts of a read, if it is of shared memory."""
        self.count(access, lanes, offsets, access.instruction.opcode.startswith("ldmatrix"))

    def store(self, access: MemoryAccess, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Count the wavefronts of a write, if it is to shared memory."""
        self.count(access, lanes, offsets, True)

    def count(self, access: MemoryAccess, lanes: Lanes, offsets: Array, store: bool) -> None:
        """Add one execution by these warps to the counts of requests, wavefronts and conflicts in shared memory."""
        launch, instruction = self.machine.launch, access.instruction
        if instruction.head not in COUNTED or not launch.is_shared(offsets[:1])[0]:
            return
        indices = indices_of(lanes)
        warps, row = np.unique(indices // 32, return_inverse=True)
        addresses = np.full((len(warps), 32), -1)
        block_offsets = offsets - launch.shared_windows[indices // self.machine.stride]
        addresses[row, indices % 32] = np.where(
            (block_offsets >= 0) & (block_offsets < launch.window_bytes), block_offsets, -1
        )
        is_active = addresses >= 0
        if not is_active.any():  # shared memory of other blocks
            return
        use = bank_use(np.where(is_active, addresses, 0), access.size, active=is_active, store=store)
        key = instruction.path, instruction.line, instruction.text
        entry = launch.shared_accesses.get(key) or SharedAccess(
            path=instruction.path,
            line=instruction.line,
            text=instruction.text,
            requests=0,
            wavefronts=0,
            conflicts=0,
            width=access.size,
            store=store,
            addresses=tuple(addresses[0].tolist()),
        )
        launch.shared_accesses[key] = replace(
            entry,
            requests=entry.requests + len(warps),
            wavefronts=entry.wavefronts + int(use.wavefronts.sum()),
            conflicts=entry.conflicts + int(use.conflicts.sum()),
        )
