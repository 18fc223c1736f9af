"""What the quantisers demand of their input, and the scales they derive from it."""

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.reference.packed import F32

GROUPS = (32, 64, 128)  # group sizes along K
_FLOATS = ("float16", "bfloat16", "float32", "float64")
# A subnormal scale has lost bits and is flushed to zero by some kernels; one above the maximum turns -128 into -inf.
_MIN_SCALE = np.finfo(np.float32).tiny
_MAX_SCALE = np.finfo(np.float32).max / 128


def as_float_matrix(argument: str, x: npt.NDArray[Any]) -> F32:
    """`x` as f32 [rows, K]; f16 and bf16 convert exactly, f64 rounds to f32.

    Raises ArgumentError: not a NumPy-like array, not a float dtype, not two-dimensional, empty, NaN or infinity (with
    the place of the first).
    """
    if not hasattr(x, "__array_function__"):
        raise ArgumentError(argument, "must be a NumPy or CuPy array", type(x).__name__)
    # By name: bfloat16 is not NumPy's own and has no dtype to compare with unless ml_dtypes is installed.
    if x.dtype.name not in _FLOATS:
        raise ArgumentError(argument, f"dtype must be one of {', '.join(_FLOATS)}", x.dtype)
    if x.ndim != 2 or 0 in x.shape:
        raise ArgumentError(argument, "must be a non-empty matrix [rows, K]", f"shape {x.shape}")
    with np.errstate(over="ignore"):  # a float64 beyond float32 is reported below
        floats: F32 = x.astype(np.float32, copy=False)
    finite = np.isfinite(floats)
    if not finite.all():
        place = [int(i) for i in np.argwhere(~finite)[0]]
        raise ArgumentError(argument, "must be finite in float32", f"{argument}{place} is {x[tuple(place)]}")
    return floats


def row_scales(argument: str, extent: F32, steps: int) -> F32:
    """One scale per row, `extent` f32 [rows] divided by `steps`: f32 [rows], and 1 for a row whose extent is 0.

    Raises ArgumentError if a scale is not a normal float32, or so large that 128 times it is infinite.
    """
    scale = extent / np.float32(steps)
    representable = (extent == 0) | ((scale >= _MIN_SCALE) & (scale <= _MAX_SCALE))
    if not representable.all():
        row = int(np.argwhere(~representable)[0, 0])
        rule = f"row scales must lie in {_MIN_SCALE:.3g}..{_MAX_SCALE:.3g}"
        raise ArgumentError(argument, rule, f"row {row} has {float(extent[row]) / steps:.3g}")
    return np.where(extent == 0, np.float32(1), scale)


def check_group(argument: str, K: int, group: int) -> None:
    """Raise ArgumentError unless `group` is a known group size and divides K."""
    if group not in GROUPS:
        raise ArgumentError("group", f"must be one of {', '.join(map(str, GROUPS))}", group)
    if K % group:
        raise ArgumentError(argument, "K must be a multiple of the group", f"K={K}, group={group}")


def check_protective_range(protective_range: int) -> None:
    """Raise ArgumentError unless `protective_range` is an integer in 1..127."""
    try:
        inside = 1 <= operator.index(protective_range) <= 127
    except TypeError:
        inside = False
    if not inside:
        raise ArgumentError("protective_range", "must be an integer in 1..127", protective_range)
