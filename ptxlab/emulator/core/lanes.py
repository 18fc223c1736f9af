"""Sets of lanes, and the functions of them that instructions and operands are bound to."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxlab.emulator.front.types import Array

# A set of lanes: a slice when they are contiguous (views, no copies), else a sorted index array.
Lanes = slice | Array
# Where lanes go on, as (instruction index, lanes); None: all of them at the next instruction.
Successors = list[tuple[int, Lanes]] | None
Handler = Callable[[Lanes], Successors]  # what an instruction is bound to: executes it for these lanes
Reader = Callable[[Lanes], Array]
Writer = Callable[[Lanes, Array], Any]


def count_of(lanes: Lanes) -> int:
    """Count the lanes in a set."""
    return lanes.stop - lanes.start if isinstance(lanes, slice) else len(lanes)


def indices_of(lanes: Lanes) -> Array:
    """Return the lanes of a set as a sorted index array."""
    return np.arange(lanes.start, lanes.stop) if isinstance(lanes, slice) else lanes


def as_lanes(indices: Array) -> Lanes:
    """Return the set of the given sorted, distinct indices; a slice if they are contiguous."""
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if last - first + 1 == len(indices) else indices


def merge(a: Lanes, b: Lanes) -> Lanes:
    """Unite two disjoint sets."""
    all_indices = np.concatenate((indices_of(a), indices_of(b)))
    all_indices.sort(kind="stable")
    return as_lanes(all_indices)


def split(lanes: Lanes, mask: Array) -> tuple[Lanes | None, Lanes | None]:
    """Split a set into the lanes where `mask` (one bool per lane of the set) holds and the others.

    None stands for an empty set.
    """
    chosen = int(np.count_nonzero(mask))
    if chosen == count_of(lanes):
        return lanes, None
    if chosen == 0:
        return None, lanes
    indices = indices_of(lanes)
    return as_lanes(indices[mask]), as_lanes(indices[~mask])
