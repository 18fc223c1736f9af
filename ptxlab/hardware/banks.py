"""Shared memory has 32 banks of 4-byte words: how many wavefronts a warp's access takes, and which lanes collide.

A warp's access of 1, 2 or 4 bytes per lane is one phase. Of 8 bytes it is two phases of 16 lanes, of 16 bytes four
phases of 8 lanes: each phase can move 128 bytes. A phase takes as many wavefronts as the busiest bank has *different*
words to move (at least one): lanes on the same word share it, loads by broadcast, stores because one of them wins.
A phase without active lanes takes none. ldmatrix takes each 8 x 8 matrix, 8 rows of 16 bytes, as one such phase.

One exception, for loads of 8 and 16 bytes: if every active lane i has the address of lane i XOR 1 (or lane i XOR 1 is
inactive), or every one that of lane i XOR 2, neighbouring phases are taken together, which halves their number (NVIDIA
forums, "Unexpected shared memory bank conflict", on sm_70).

The minimum is one wavefront per phase; what exceeds it are *bank conflicts*, as ncu counts them:
`l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum` is the sum of `conflicts` over all accesses of a kernel, and
`l1tex__data_pipe_lsu_wavefronts_mem_shared.sum` that of `wavefronts`. (A conflict-free LDS.128 takes four wavefronts
and has no conflict.)
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.hardware.fragments import WARP

BANKS = 32
WIDTHS = (1, 2, 4, 8, 16)
Counts: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class BankUse:
    """`words` [..., phases, 32]: how many different words of each bank a phase moves; phases may be empty."""

    words: Counts

    @property
    def wavefronts(self) -> Counts:
        """[...]: passes over the banks."""
        total: Counts = self.words.max(axis=-1).sum(axis=-1)
        return total

    @property
    def minimum(self) -> Counts:
        """[...]: wavefronts that the same phases would take without conflicts."""
        total: Counts = self.words.any(axis=-1).sum(axis=-1)
        return total

    @property
    def conflicts(self) -> Counts:
        """[...]: wavefronts beyond the minimum."""
        return self.wavefronts - self.minimum


@dataclass(frozen=True)
class Collision:
    """Lanes that want different words of one bank in one phase: `words` maps a word's address to its lanes."""

    phase: int
    bank: int
    words: dict[int, tuple[int, ...]]


def bank_use(addresses: npt.ArrayLike, width: int, *, active: npt.ArrayLike = True, store: bool = False) -> BankUse:
    """Count how accesses of `width` bytes per lane at byte `addresses` [..., 32] use the banks.

    `active` bool [..., 32]: lanes that take part. Raises ArgumentError: a width not in 1, 2, 4, 8, 16, a last axis that
    is not 32 lanes, a negative or misaligned address of an active lane.
    """
    lanes, mask = _check_access(addresses, width, active)
    phase = _phases(lanes, width, mask, store)
    return _count(*np.broadcast_arrays(_words(lanes, width), phase[..., None], mask[..., None]))


def ldmatrix_use(addresses: npt.ArrayLike) -> BankUse:
    """Count how ldmatrix or stmatrix .x1, .x2, .x4 uses the banks, by row addresses [..., 8, 16 or 32].

    Raises ArgumentError: another number of addresses, or one that is not a multiple of 16.
    """
    rows = np.asarray(addresses, dtype=np.int64)
    if rows.ndim == 0 or rows.shape[-1] not in (8, 16, 32):
        raise ArgumentError("addresses", "must be 8, 16 or 32 rows", f"shape {rows.shape}")
    padding = [(0, 0)] * (rows.ndim - 1) + [(0, WARP - rows.shape[-1])]
    # stmatrix or ldmatrix: phases are never taken together, as for a store
    return bank_use(np.pad(rows, padding), 16, active=np.arange(WARP) < rows.shape[-1], store=True)


def collisions(
    addresses: npt.ArrayLike, width: int, *, active: npt.ArrayLike = True, store: bool = False
) -> list[Collision]:
    """List each bank of one warp's access, [32], that has more than one word to move; arguments as for `bank_use`."""
    return [
        Collision(phase, bank, words)
        for (phase, bank), words in sorted(_words_by_bank(addresses, width, active, store).items())
        if len(words) > 1
    ]


def wavefronts(
    addresses: npt.ArrayLike, width: int, *, active: npt.ArrayLike = True, store: bool = False
) -> list[dict[int, tuple[int, ...]]]:
    """Return one warp's access, [32], wavefront by wavefront: the lanes that each bank serves.

    Arguments are as for `bank_use`.
    """
    fronts: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
    for (phase, bank), words in sorted(_words_by_bank(addresses, width, active, store).items()):
        for position, lanes in enumerate(words.values()):
            fronts.setdefault((phase, position), {})[bank] = lanes
    return [front for _, front in sorted(fronts.items())]


def _words_by_bank(
    addresses: npt.ArrayLike, width: int, active: npt.ArrayLike, store: bool
) -> dict[tuple[int, int], dict[int, tuple[int, ...]]]:
    """Map each (phase, bank) of one warp's access to the words that the bank has to move.

    A word is given by its address and the lanes that access it.
    """
    lanes, mask = _check_access(addresses, width, active)
    if lanes.shape != (WARP,):
        raise ArgumentError("addresses", "must be those of one warp", f"shape {lanes.shape}")
    phases = _phases(lanes, width, mask, store)
    words_by_bank: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
    for lane in np.flatnonzero(mask):
        for word in _words(lanes, width)[lane]:
            bank = words_by_bank.setdefault((int(phases[lane]), int(word) % BANKS), {})
            bank[4 * int(word)] = (*bank.get(4 * int(word), ()), int(lane))
    return {place: dict(sorted(words.items())) for place, words in words_by_bank.items()}


def _check_access(addresses: npt.ArrayLike, width: int, active: npt.ArrayLike) -> tuple[Counts, npt.NDArray[np.bool_]]:
    if width not in WIDTHS:
        raise ArgumentError("width", f"must be one of {', '.join(map(str, WIDTHS))}", width)
    lanes = np.asarray(addresses, dtype=np.int64)
    if lanes.ndim == 0 or lanes.shape[-1] != WARP:
        raise ArgumentError("addresses", "must be [..., 32], one per lane", f"shape {lanes.shape}")
    mask = np.broadcast_to(np.asarray(active, dtype=bool), lanes.shape)
    is_misaligned = mask & ((lanes < 0) | (lanes % width != 0))
    if is_misaligned.any():
        place = [int(i) for i in np.argwhere(is_misaligned)[0]]
        raise ArgumentError("addresses", f"must be multiples of {width}", f"addresses{place} is {lanes[tuple(place)]}")
    return lanes, mask


def _words(lanes: Counts, width: int) -> Counts:
    """Return the words [..., 32, n] that each lane touches, counted from address 0."""
    return lanes[..., None] // 4 + np.arange(max(1, width // 4))


def _phases(lanes: Counts, width: int, mask: npt.NDArray[np.bool_], store: bool) -> Counts:
    """Return the phase [..., 32] of each lane."""
    lane = np.arange(WARP)
    phases = np.broadcast_to(lane * max(4, width) // (4 * WARP), lanes.shape)
    if store or width <= 4:
        return phases
    together: Any = False
    for partner in (lane ^ 1, lane ^ 2):
        equal_addresses = (lanes == lanes[..., partner]) | ~mask | ~mask[..., partner]
        together = together | equal_addresses.all(axis=-1, keepdims=True)
    return np.where(together, phases // 2, phases)


def _count(words: Counts, phases: Counts, mask: npt.NDArray[np.bool_]) -> BankUse:
    """Count different words per warp, phase and bank, of arrays [..., 32, n]."""
    leading_shape = words.shape[:-2]
    warp = np.arange(int(np.prod(leading_shape)), dtype=np.int64).reshape(*leading_shape, 1, 1)
    phase = (4 * warp + phases)[mask]
    distinct = np.unique(np.stack([phase, words[mask]]), axis=1)
    slots = distinct[0] * BANKS + distinct[1] % BANKS
    return BankUse(np.bincount(slots, minlength=4 * BANKS * warp.size).reshape(*leading_shape, 4, BANKS))
