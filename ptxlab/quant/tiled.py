"""Large weights of a small one: quantised once, in a block, and repeated. For benches and weights that mean nothing."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np


def tiled(part: Any, N: int, K: int) -> Any:
    """A quantised weight, or an array of one, repeated to [N, K]; what is left over at the ends is cut off.

    NumPy or CuPy arrays.
    """
    n, k = part.shape[0], part.shape[-1]

    def repeated(array: Any) -> Any:
        if array.ndim == 1:
            return np.tile(array, -(-N // n))[:N]
        return np.tile(array, (-(-N // n), -(-K // k)))[:N, : K * array.shape[1] // k].copy()

    return with_arrays(part, repeated)


def with_arrays(part: Any, change: Callable[[Any], Any]) -> Any:
    """An array, or a dataclass of arrays, with every array changed."""
    if hasattr(part, "ndim"):
        return change(part)
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    return replace(part, **{name: change(v) for name, v in values.items() if hasattr(v, "ndim")})
