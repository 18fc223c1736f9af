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
    """What came of comparing two runs; `nans` counts NaNs that differ in their bits, which the manual leaves open."""

    differences: list[Difference]
    nans: int


def compare(program: Program, right: Values, other: Values) -> Comparison:
    """Compare what all slots hold; a slot's model stands in place of `right`."""
    rows = right.reshape(-1, program.total), other.reshape(-1, program.total)
    differs = np.zeros((len(program.slots), program.total), bool)  # a result in any bit, or what it was made of
    roots, nans = [], 0
    for i, slot in enumerate(program.slots):
        expected = rows[0][i] if slot.expected is None else _stored(slot, slot.expected)
        unequal, of_nans = _unequal(slot, expected, rows[1][i])
        inherited = np.zeros(program.total, bool)
        for source in slot.sources:
            if source.slot >= 0:
                before = differs[source.slot]
                inherited |= before.any() if slot.crosses else before
        differs[i] = inherited | (expected != rows[1][i])
        nans += int(np.count_nonzero(of_nans & ~inherited))
        if (unequal & ~inherited).any():
            roots.append(Difference(i, np.flatnonzero(unequal & ~inherited)))
    return Comparison(roots, nans)


def _stored(slot: Slot, model: Values) -> Values:
    """A model's result as it lies in memory, above it what was there before."""
    bits = stored_bits(slot.domain)
    low = np.uint64((1 << bits) - 1)
    return model & low | np.uint64(0xA5A5A5A5A5A5A5A5) & ~low


def _unequal(slot: Slot, right: Values, other: Values) -> tuple[Mask, Mask]:
    """Where two rows of a slot differ in value, and where only in the bits of NaNs."""
    unequal = right != other
    domain = DOMAINS[slot.domain]
    if not unequal.any() or domain.kind in ("i", "pred"):
        return unequal, np.zeros(len(unequal), bool)
    low = np.uint64((1 << domain.bits) - 1)
    beside = (right ^ other) & ~low != 0  # beyond the result
    with np.errstate(invalid="ignore", over="ignore"):
        x, y = (_numbers(row & low, domain.kind, domain.bits) for row in (right, other))
        both_nan = np.isnan(x) & np.isnan(y)
        equal = (x == y) & (np.signbit(x) == np.signbit(y))
        if slot.tolerance is not None:
            bound = np.maximum(slot.tolerance.relative * np.abs(x), slot.tolerance.absolute)
            equal |= np.abs(x - y) <= bound
    agree = ~beside & (equal | both_nan).all(axis=1)
    return ~agree, agree & unequal & both_nan.any(axis=1)


def _numbers(bits: Values, kind: str, width: int) -> npt.NDArray[np.float64]:
    """Raw values as numbers [threads, 1 or 2]."""
    raw = bits.astype(f"u{width // 8}")
    numbers = widen(raw if kind in ("bf16", "f16x2", "bf16x2") else raw.view(f"f{width // 8}"), kind)
    return numbers.reshape(len(bits), -1)
