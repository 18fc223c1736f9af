"""Grids: the levels that a scheme allows for the weights of a group, and the conversion to the scheme's format.

Every scheme is uniform within a group of a row: (base + step·q)·unit, q an integer in low..high. Schemes differ in the
units, steps and bases that they allow. The first candidate is that of plain rounding; with `clip`, narrower levels and
where they lie in the group's range are searched as well.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.lowbit.quant.atom import AtomRows
from ptxlab.lowbit.quant.groups import group_scales
from ptxlab.lowbit.quant.inputs import check_group, check_protective_range, float_matrix, strip_of
from ptxlab.lowbit.quant.level1 import PROTECTIVE_RANGE, quantize_level1
from ptxlab.lowbit.quant.lqq import MAX_GROUP_SCALE, LQQWeight
from ptxlab.lowbit.quant.qoq import QoQChannelWeight, QoQWeight

Array = Any  # of NumPy or CuPy
Constants = tuple[Array, ...]  # a group's levels as the format stores them, [N] each
SHRINKS = tuple(1 - 0.05 * i for i in range(9))  # searched factors of a floating-point scale: 1 to 0.6
NARROWER = (0, 1, 2, 3, 4, -1)  # searched differences of an integer scale from that of plain rounding
SHIFTS = (0.0, 0.5, 1.0)  # share of the range outside the levels that is cut off at the lower end


class Levels(NamedTuple):
    """(base + step·q)·unit, q an integer in low..high, for one group of each row.

    All are floats [N], or a number that holds for every row; of several candidates [C, N]. Base and step are integers,
    so that only the product with the unit rounds, as in the formats.
    """

    unit: Array
    step: Any = 1
    base: Any = 0
    low: Any = 0
    high: Any = 15

    def positions(self, w: Array) -> Array:
        """Return the positions of w [.., N] in steps from the level 0."""
        return (w / self.unit - self.base) / self.step

    def nearest_to(self, positions: Array) -> Array:
        """Return the integers, as floats, of the levels nearest to positions [.., N]."""
        return np.rint(positions).clip(self.low, self.high)

    def nearest(self, w: Array) -> Array:
        """Return the integers, as floats, of the levels nearest to w [.., N]."""
        return self.nearest_to(self.positions(w))

    def values(self, q: Array) -> Array:
        """Return the levels of the integers q [.., N]."""
        return (q * self.step + self.base) * self.unit


class Grid(ABC):
    """The levels for a matrix w float [N, K]; `bounds` has the first and last column + 1 of each group.

    `ratio` [N] fixes the levels of a row: those of plain rounding after both ends of each group's range are multiplied
    by it, as QServe §4.3.4 clips. NaN leaves a row to the search of `clip`.
    """

    bounds: list[tuple[int, int]]
    clip: bool
    ratio: Array | None = None

    def choose(self, group: int, w: Array, metric: Array) -> tuple[Levels, Constants]:
        """Choose the levels of a group for its weights w float [g, N], a column per row of the matrix.

        `metric` [g, g], or [g] for a diagonal, says what an error d [g] of a row costs: dᵀ metric d.
        """
        levels, constants = self.candidates(group, w)
        best_candidate, rows = _least(levels, w, metric) if self.clip else 0, np.arange(w.shape[1], like=w)
        chosen_arrays = [
            array[best_candidate, rows] if _depth(array) == 2 else array for array in (*levels, *constants)
        ]
        if self.ratio is not None:
            is_searched = np.isnan(self.ratio)
            ratio = np.where(is_searched, 1, self.ratio).astype(w.dtype)
            clipped_candidates = self.candidates(group, w.clip(ratio * w.min(axis=0), ratio * w.max(axis=0)))
            plain_arrays = [
                array[0] if _depth(array) == 2 else array for array in (*clipped_candidates[0], *clipped_candidates[1])
            ]
            pairs = zip(chosen_arrays, plain_arrays, strict=True)
            chosen_arrays = [
                np.where(is_searched, chosen_array, plain_array) if _depth(plain_array) else plain_array
                for chosen_array, plain_array in pairs
            ]
        return Levels(*chosen_arrays[: len(levels)]), tuple(chosen_arrays[len(levels) :])

    @abstractmethod
    def candidates(self, group: int, w: Array) -> tuple[Levels, Constants]:
        """Return levels for w [g, N] and their constants, [C, N] where candidates differ.

        The first are of plain rounding.
        """

    @abstractmethod
    def weight(self, q: Array, constants: Constants) -> Any:
        """Build the quantised weight with integers q [N, K] and the constants of all groups, [N, K/g] each."""

    def search_pairs(self, w: Array, first: Sequence[float], second: Sequence[float] = (0.0,)) -> tuple[Array, Array]:
        """Return every pair of the values to search, as columns [C, 1] of w's type.

        Without `clip` it is only the pair of the first values.
        """
        pairs = list(product(first, second))[: None if self.clip else 1]
        table = np.asarray(np.array(pairs, w.dtype), like=w)
        return table[:, :1], table[:, 1:]


def _least(levels: Levels, w: Array, metric: Array) -> Array:
    """Return the index of the candidate that costs each row the least, [N]; the first of equal ones."""
    count = max(len(array) for array in levels if _depth(array) == 2)
    strip = strip_of(w, count * len(w))
    best_indices = []
    for start in range(0, w.shape[1], strip):
        weights = w[:, None, start : start + strip]
        candidates = Levels(*(array[..., start : start + strip] if _depth(array) else array for array in levels))
        error = (candidates.values(candidates.nearest(weights)) - weights).reshape(len(w), -1)  # [g, C·strip]
        weighted = metric @ error if metric.ndim == 2 else metric[:, None] * error
        best_indices.append((weighted * error).sum(axis=0).reshape(count, -1).argmin(axis=0))
    return np.concatenate(best_indices)


def _depth(array: Any) -> int:
    """Return the dimensions of an array: 2 where candidates differ, 1 where rows do; 0 for a number."""
    return getattr(array, "ndim", 0)


class TwoLevelGrid(Grid):
    """Common part of LQQ and QoQ: a scale per row, fixed beforehand, and groups of 32, 64 or 128."""

    def __init__(self, w: Array, group: int, *, clip: bool = False, protective_range: int = PROTECTIVE_RANGE) -> None:
        check_protective_range(protective_range)
        w = float_matrix("w", w)
        check_group("w", w.shape[1], group)
        self.bounds, self.clip = groups_of(w.shape[1], group), clip
        self.protective_range = protective_range
        self.channel_scale = quantize_level1(w, protective_range).scale
        self.scale = self.channel_scale.astype(w.dtype)

    def extent(self, w: Array) -> tuple[Array, Array]:
        """Return the lowest and the highest level-1 integer of w [g, N], as floats."""
        R = self.protective_range
        low, high = (np.rint(group_end / self.scale).clip(-R, R) for group_end in (w.min(axis=0), w.max(axis=0)))
        return low, high

    def fields(self, q: Array, group_scale: Array) -> dict[str, Any]:
        """Return the fields of a `TwoLevelWeight`."""
        return {
            "q4": q.astype(np.uint8),
            "group_scale": group_scale.astype(np.uint8),
            "channel_scale": self.channel_scale,
            "protective_range": self.protective_range,
        }


class LQQGrid(TwoLevelGrid):
    """(q·group_scale + minimum)·channel_scale; also the form of QoQ as released, with an 8-bit zero."""

    def candidates(self, group: int, w: Array) -> tuple[Levels, Constants]:
        """See `Grid.candidates`."""
        low, high = self.extent(w)
        narrowing, shift = self.search_pairs(w, NARROWER, SHIFTS)
        nearest_scale = np.rint((high - low) / 15).clip(1, MAX_GROUP_SCALE)
        step = (nearest_scale - narrowing).clip(1, MAX_GROUP_SCALE)
        minimum = np.rint(low + shift * (high - low - 15 * step)).clip(-128, 127 - 15 * step)
        return Levels(self.scale, step, minimum), (step, minimum)

    def weight(self, q: Array, constants: Constants) -> LQQWeight:
        """See `Grid.weight`."""
        group_scale, minimum = constants
        return LQQWeight(minimum=minimum.astype(np.int8), **self.fields(q, group_scale))


class QoQGrid(TwoLevelGrid):
    """(q - zero)·group_scale·channel_scale, the paper's form: a zero of 4 bits."""

    def candidates(self, group: int, w: Array) -> tuple[Levels, Constants]:
        """See `Grid.candidates`."""
        low, high = self.extent(w)
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        narrowing, shift = self.search_pairs(w, NARROWER, SHIFTS)
        nearest_scale = np.maximum(np.rint((high - low) / 15), 1)
        step = (nearest_scale - narrowing).clip(1, nearest_scale)
        zero = np.rint(-(low + shift * (high - low - 15 * step)) / step).clip(0, 15)
        # Within s8, whatever is rounded: plain rounding only meets weights within the range.
        lowest = np.maximum(zero - np.floor(128 / step), 0)
        highest = np.minimum(zero + np.floor(127 / step), 15)
        return Levels(self.scale, step, -zero * step, lowest, highest), (step, zero)

    def weight(self, q: Array, constants: Constants) -> QoQWeight:
        """See `Grid.weight`."""
        group_scale, zero = constants
        return QoQWeight(zero=zero.astype(np.uint8), **self.fields(q, group_scale))


class ChannelGrid(Grid):
    """(q - zero)·scale with one of each per row."""

    def __init__(self, w: Array, *, clip: bool = False) -> None:
        w = float_matrix("w", w)
        self.bounds, self.clip = [(0, w.shape[1])], clip

    def candidates(self, group: int, w: Array) -> tuple[Levels, Constants]:
        """See `Grid.candidates`."""
        low, high = np.minimum(w.min(axis=0), 0), np.maximum(w.max(axis=0), 0)
        shrink, shift = self.search_pairs(w, SHRINKS, SHIFTS)
        scale = np.where(high > low, shrink * (high - low) / 15, 1).astype(np.float32)
        unit = scale.astype(w.dtype)
        zero = np.rint(-(low + shift * (1 - shrink) * (high - low)) / unit).clip(0, 15)
        return Levels(unit, base=-zero), (scale, zero)

    def weight(self, q: Array, constants: Constants) -> QoQChannelWeight:
        """See `Grid.weight`."""
        scale, zero = (constant[:, 0] for constant in constants)
        return QoQChannelWeight(q.astype(np.uint8), scale.astype(np.float32), zero.astype(np.uint8))


class SymmetricGrid(Grid):
    """q·scale: `bits` with a scale per group, and `kept_bits` with one scale in the last `kept` columns (Atom).

    With `group` None the other columns have one scale; W8A8 is that with 8 bits and nothing kept. Scales beside 4 bits
    are FP16, as Atom's kernels take them; of W8A8 and of 16 bits, which no kernel takes beside 4, FP32.
    """

    def __init__(
        self, w: Array, group: int | None, *, kept: int = 0, kept_bits: int = 8, bits: int = 4, clip: bool = False
    ) -> None:
        w = float_matrix("w", w)
        K = w.shape[1] - kept
        if K <= 0 or K % (group or K):
            raise ArgumentError("w", f"K less {kept} must be a multiple of the group", f"K={w.shape[1]}, group={group}")
        self.bounds, self.clip = groups_of(K, group or K), clip
        self.kept = kept
        self.bits = [bits] * len(self.bounds)
        if kept:
            self.bounds.append((K, K + kept))
            self.bits.append(kept_bits)
        self.packs = bits == 4 and (not kept or kept_bits == 8)

    def candidates(self, group: int, w: Array) -> tuple[Levels, Constants]:
        """See `Grid.candidates`."""
        bits = self.bits[group]
        largest_integer = 2 ** (bits - 1) - 1  # of 4 bits the smallest is one further, -8
        largest_weight = np.abs(w).max(axis=0)
        shrink, _ = self.search_pairs(w, SHRINKS)
        if self.packs:
            unit = group_scales(shrink.astype(np.float32) * largest_weight.astype(np.float32), largest_integer).astype(
                w.dtype
            )
        else:
            unit = (
                np.where(largest_weight > 0, shrink * largest_weight / largest_integer, 1)
                .astype(np.float32)
                .astype(w.dtype)
            )
        if not bool(np.isfinite(unit).all()):
            raise ArgumentError(
                "w", f"a group's largest weight over {largest_integer} must be FP16", f"{largest_weight.max():g}"
            )
        return Levels(unit, low=-8 if bits == 4 else -largest_integer, high=largest_integer), (unit,)

    def weight(self, q: Array, constants: Constants) -> AtomRows | None:
        """See `Grid.weight`; None for what Atom's kernels do not take."""
        if not self.packs:
            return None
        scale = constants[0].astype(np.float16)
        q, K = q.astype(np.int8), q.shape[1] - self.kept
        if self.kept:
            return AtomRows(q[:, :K], scale[:, :-1], q[:, K:], scale[:, -1])
        return AtomRows(q, scale, q[:, :0], np.ones_like(scale[:, 0]))


def groups_of(K: int, group: int) -> list[tuple[int, int]]:
    """Return the first column and the end of each group."""
    return [(start, start + group) for start in range(0, K, group)]
