"""Large random weights: one block is quantised and repeated. `with_arrays` changes every array of what holds some."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from ptxlab.arithmetic import ceil_div

BLOCK_ROWS, BLOCK_K = 520, 7 * 128  # of that block: no multiples of a tile's, so that a tile in a wrong place shows


def repeat_to_shape(part: Any, N: int, K: int) -> Any:
    """Repeat a quantised weight, or an array of one, to [N, K]; cut off the excess at the ends.

    NumPy or CuPy arrays.
    """
    n, k = part.shape[0], part.shape[-1]

    def repeat_array(array: Any) -> Any:
        if array.ndim == 1:
            return np.tile(array, ceil_div(N, n))[:N]
        return np.tile(array, (ceil_div(N, n), ceil_div(K, k)))[:N, : K * array.shape[1] // k].copy()

    return with_arrays(part, repeat_array)


def with_arrays(part: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every array of a dataclass, mapping or tuple at any depth, or to one array."""
    if hasattr(part, "ndim"):
        return change(part)
    if isinstance(part, tuple):
        return tuple(with_arrays(element, change) for element in part)
    if isinstance(part, Mapping):
        return {name: with_arrays(element, change) for name, element in part.items()}
    if not is_dataclass(part) or isinstance(part, type):
        return part
    return replace(part, **{field.name: with_arrays(getattr(part, field.name), change) for field in fields(part)})
