"""Where two runs of a program differ: result by result, and only where an operand did not differ before."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ptxlab.emulator.ops.rounding import widen
from tests.fuzz.domains import DOMAINS, Values
from tests.fuzz.program import Program, Slot, stored_bits

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Difference:
    """A result that differs although its operands agree; `threads` are those of all blocks, in order."""

    slot: int
    threads: npt.NDArray[np.intp]


@dataclass(frozen=True)
class Comparison:
    """Differences of two runs; `nans` counts NaNs that differ in their bits, which the manual leaves open."""

    differences: list[Difference]
    nans: int


def compare(program: Program, right: Values, observed: Values, *, models: bool = False) -> Comparison:
    """Compare what all slots hold; with `models`, those of the hardware stand in place of `right`."""
    rows = right.reshape(-1, program.total), observed.reshape(-1, program.total)
    differs = np.zeros((len(program.slots), program.total), bool)  # a result in any bit, or what it was made of
    roots, nans = [], 0
    for i, slot in enumerate(program.slots):
        expected = _memory_bits(slot, slot.expected) if models and slot.expected is not None else rows[0][i]
        unequal, of_nans = _find_unequal(slot, expected, rows[1][i])
        inherited = np.zeros(program.total, bool)
        for source in slot.sources:
            if source.slot >= 0:
                changed = differs[source.slot]
                inherited |= changed.any() if slot.crosses else changed
        differs[i] = inherited | (expected != rows[1][i])
        nans += int(np.count_nonzero(of_nans & ~inherited))
        if (unequal & ~inherited).any():
            roots.append(Difference(i, np.flatnonzero(unequal & ~inherited)))
    return Comparison(roots, nans)


def _memory_bits(slot: Slot, model: Values) -> Values:
    """Return a model's values as they lie in memory, with the old bits above them."""
    bits = stored_bits(slot.domain)
    low = np.uint64((1 << bits) - 1)
    return model & low | np.uint64(0xA5A5A5A5A5A5A5A5) & ~low


def _find_unequal(slot: Slot, right: Values, observed: Values) -> tuple[Mask, Mask]:
    """Tell where two rows of a slot differ in value, and where only in the bits of NaNs."""
    unequal = right != observed
    domain = DOMAINS[slot.domain]
    if not unequal.any() or domain.kind in ("i", "pred"):
        return unequal, np.zeros(len(unequal), bool)
    low = np.uint64((1 << domain.bits) - 1)
    beyond = (right ^ observed) & ~low != 0  # beyond the result
    with np.errstate(invalid="ignore", over="ignore"):
        x, y = (_decode_bits(row & low, domain.kind, domain.bits) for row in (right, observed))
        both_nan = np.isnan(x) & np.isnan(y)
        equal = (x == y) & (np.signbit(x) == np.signbit(y))
        if slot.tolerance is not None:
            bound = np.maximum(slot.tolerance.relative * np.abs(x), slot.tolerance.absolute)
            equal |= np.abs(x - y) <= bound
    agree = ~beyond & (equal | both_nan).all(axis=1)
    return ~agree, agree & unequal & both_nan.any(axis=1)


def _decode_bits(bits: Values, kind: str, width: int) -> npt.NDArray[np.float64]:
    """Convert raw bits to numbers [threads, 1 or 2]."""
    raw = bits.astype(f"u{width // 8}")
    numbers = widen(raw if kind in ("bf16", "f16x2", "bf16x2") else raw.view(f"f{width // 8}"), kind)
    return numbers.reshape(len(bits), -1)
