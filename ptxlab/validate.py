"""Predicates on arguments of any type, used before anything is computed with them."""

from collections.abc import Collection
from typing import Any, TypeGuard

import numpy as np


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether that is an integer, Python's or NumPy's; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_one_of(value: Any, known: Collection[Any]) -> bool:
    """Whether that is one of the names or integers that are known (or None, where that is)."""
    return (value is None or isinstance(value, str) or is_integer(value)) and value in known


def shape_of(array: Any) -> tuple[Any, ...]:
    """The shape of an array of any library; of what has none, ()."""
    shape = getattr(array, "shape", ())
    return tuple(shape) if isinstance(shape, Collection) else ()
