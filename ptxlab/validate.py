"""Questions about arguments of any type, asked before anything is computed with them."""

from collections.abc import Collection
from typing import Any, TypeGuard

import numpy as np

from ptxlab.errors import ArgumentError


def is_integer(value: Any) -> TypeGuard[int]:
    """Check whether a value is an integer, Python's or NumPy's; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def require_integer(name: str, value: Any, minimum: int = 0) -> None:
    """Raise ArgumentError unless the value is an integer of at least `minimum`."""
    if not is_integer(value) or value < minimum:
        raise ArgumentError(name, f"must be an integer, {minimum} or more", repr(value))


def require_number(name: str, value: Any, low: float, high: float) -> None:
    """Raise ArgumentError unless the value is a number in low..high."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ArgumentError(name, f"must be a number in {low:g}..{high:g}", repr(value))


def is_one_of(value: Any, choices: Collection[Any]) -> bool:
    """Check whether a value is one of the names or integers in `choices` (or None, where that is among them)."""
    return (value is None or isinstance(value, str) or is_integer(value)) and value in choices


def shape_of(array: Any) -> tuple[Any, ...]:
    """Return the shape of an array of any library; () for a value that has none."""
    shape = getattr(array, "shape", ())
    return tuple(shape) if isinstance(shape, Collection) else ()
