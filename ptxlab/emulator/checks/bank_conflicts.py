"""What each shared-memory instruction costs, by the bank model of `layout.banks`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ptxlab.emulator.check import Watcher
from ptxlab.emulator.types import Array, Lanes, indices_of
from ptxlab.layout.banks import bank_use

if TYPE_CHECKING:
    from ptxlab.emulator.access import Access

COUNTED = ("ld", "st", "ldmatrix", "stmatrix")


@dataclass(frozen=True)
class SharedAccess:
    """All executions of one load or store of shared memory, ldmatrix and stmatrix among them.

    Attributes:
        line, text: where it stands.
        requests: how many warps have executed it; a warp whose lanes came apart counts once for each part.
        wavefronts, conflicts: passes over the banks, and those beyond the minimum; see `layout.banks`.
        width: bytes per lane, a row's 16 for ldmatrix and stmatrix.
        store: as `layout.banks` takes it: ldmatrix counts as a store, its rows are never taken together.
        addresses: of the 32 lanes of the first request, from the block's first byte of shared memory; -1 for a lane
            that takes no part. For ldmatrix and stmatrix those of the rows.
    """

    line: int
    text: str
    requests: int
    wavefronts: int
    conflicts: int
    width: int
    store: bool
    addresses: tuple[int, ...]


class Wavefronts(Watcher):
    """Counts `ld.shared`, `st.shared`, `ldmatrix` and `stmatrix`; not atomics, nor copies."""

    def load(self, access: Access, lanes: Lanes, offsets: Array) -> None:
        """A read, if of shared memory."""
        self.count(access, lanes, offsets, access.instruction.opcode.startswith("ldmatrix"))

    def store(self, access: Access, lanes: Lanes, offsets: Array, values: Array) -> None:
        """A write, if to shared memory."""
        self.count(access, lanes, offsets, True)

    def count(self, access: Access, lanes: Lanes, offsets: Array, store: bool) -> None:
        """Enter one execution by some warps."""
        launch, instruction = self.machine.launch, access.instruction
        if instruction.opcode.split(".")[0] not in COUNTED or not launch.is_shared(offsets[:1])[0]:
            return
        indices = indices_of(lanes)
        warps, row = np.unique(indices // 32, return_inverse=True)
        addresses = np.full((len(warps), 32), -1)
        own = offsets - launch.shared_windows[indices // self.machine.stride]
        addresses[row, indices % 32] = np.where((own >= 0) & (own < launch.window_bytes), own, -1)
        active = addresses >= 0
        if not active.any():  # shared memory of other blocks
            return
        use = bank_use(np.where(active, addresses, 0), access.size, active=active, store=store)
        key = instruction.path, instruction.line, instruction.text
        known = launch.shared_accesses.get(key) or SharedAccess(
            instruction.line, instruction.text, 0, 0, 0, access.size, store, tuple(addresses[0].tolist())
        )
        launch.shared_accesses[key] = replace(
            known,
            requests=known.requests + len(warps),
            wavefronts=known.wavefronts + int(use.wavefronts.sum()),
            conflicts=known.conflicts + int(use.conflicts.sum()),
        )
