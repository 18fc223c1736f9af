"""Error that floating results may have, and the comparison that judges them by it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Allowed:
    """The error that an output [..., N] may have.

    Attributes:
        per_element: of each element, [..., N].
        rms: root mean square of the errors of a row, [...]; None where elements are judged by themselves alone. What is
            a little wrong in all of a row shows here long before it shows in any one element.
    """

    per_element: Any
    rms: Any = None


def describe_mismatch(got: Mapping[str, Any], right: Mapping[str, Any], allowed: Mapping[str, Allowed]) -> str | None:
    """Describe what is wrong with results, in one line; None if all are as near as they have to be.

    Of an infinity only itself is near, and nothing of a NaN.

    Args:
        got: outputs by name, numbers of any width, NumPy or CuPy; axes before those of `right` are results of repeated
            launches. Only these are judged.
        right: what is right, f64.
        allowed: the error of each.
    """
    for name, output in got.items():
        label = f"{name}: " if len(got) > 1 else ""
        is_wrong, wrong_rows = misses(output, right[name], allowed[name])
        if bool(is_wrong.any()):
            place = _first(is_wrong)
            exact_value = np.broadcast_to(right[name], output.shape)[place]
            return (
                f"{label}{int(is_wrong.sum())} of {is_wrong.size} elements differ from the reference, "
                f"first at {list(place)}: {output[place]} instead of {exact_value}"
            )
        if bool(wrong_rows.any()):
            return (
                f"{label}{int(wrong_rows.sum())} of {wrong_rows.size} rows differ from the reference, no element by "
                f"itself, but all together, first at {list(_first(wrong_rows))}"
            )
    return None


def misses(got: Any, exact: Any, allowed: Allowed) -> tuple[Any, Any]:
    """Return which elements [..., N], and which rows [...], exceed their allowed error."""
    got, exact = got.astype(np.float64), exact.astype(np.float64)
    with np.errstate(invalid="ignore"):  # an infinity less itself
        error = np.where(got == exact, 0.0, np.abs(got - exact))
    is_wrong = ~(error <= allowed.per_element)
    if allowed.rms is None:
        return is_wrong, np.zeros_like(is_wrong[..., :0].any(axis=-1))
    return is_wrong, ~(np.sqrt((error**2).mean(axis=-1)) <= allowed.rms)


def _first(wrong: Any) -> tuple[int, ...]:
    """Return the index of the first true element."""
    return tuple(int(axis[0]) for axis in wrong.nonzero())
