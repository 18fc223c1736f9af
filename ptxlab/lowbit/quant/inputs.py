"""What the quantisers demand of their input, and the scales they derive from it."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F32
from ptxlab.io.dlpack import to_numpy, without_subclass
from ptxlab.lowbit import reference
from ptxlab.validate import is_one_of

GROUPS = (32, 64, 128)  # group sizes along K
STRIP = 1 << 17  # elements that a quantiser works on at a time, so that its temporaries stay in a core's cache
DEVICE_STRIP = 1 << 26  # the same on a GPU, where a launch costs more than a million elements
_HOST = 1  # DLPack's device type
_FLOATS = ("float16", "bfloat16", "float32", "float64")
# A subnormal scale has lost bits and is flushed to zero by some kernels; one above the maximum turns -128 into -inf.
MIN_SCALE = np.finfo(np.float32).tiny
MAX_SCALE = np.finfo(np.float32).max / 128


def as_floats(argument: str, x: Any) -> npt.NDArray[Any]:
    """Convert an array of floats to NumPy's or keep CuPy's; bfloat16 becomes float32.

    Arrays of PyTorch and other libraries on the host are shared, not copied.

    Raises ArgumentError: not such an array (a masked one, one on a GPU that is not CuPy's), or no float dtype.
    """
    if hasattr(x, "is_cuda"):  # PyTorch, which shares nothing that gradients are wanted for
        x = x.detach()
    is_foreign = not hasattr(x, "__array_function__")
    if is_foreign and not (hasattr(x, "__dlpack__") and hasattr(x, "dtype") and not isinstance(x, np.generic)):
        raise ArgumentError(argument, "must be an array of NumPy, CuPy or PyTorch", type(x).__name__)
    # By name: bfloat16 is not NumPy's own and has no dtype to compare with unless ml_dtypes is installed.
    name = str(x.dtype).removeprefix("torch.") if is_foreign else x.dtype.name
    if name not in _FLOATS:
        raise ArgumentError(argument, f"dtype must be one of {', '.join(_FLOATS)}", name)
    if is_foreign:
        if x.__dlpack_device__()[0] != _HOST:
            raise ArgumentError(argument, "must be on the host (.cpu()), or a CuPy array (cupy.from_dlpack)", "a GPU's")
        shared_array = to_numpy(argument, x)
        return reference.from_bfloat16_bits(shared_array) if name == "bfloat16" else shared_array
    floats: npt.NDArray[Any] = without_subclass(argument, x) if isinstance(x, np.ndarray) else x
    return floats


def float_matrix(argument: str, x: Any) -> npt.NDArray[Any]:
    """Convert a matrix [rows, K] as `as_floats` does; raise ArgumentError for other axes or an empty matrix."""
    matrix = as_floats(argument, x)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ArgumentError(argument, "must be a non-empty matrix [rows, K]", f"shape {tuple(matrix.shape)}")
    return matrix


def channel_vector(argument: str, x: Any) -> npt.NDArray[Any]:
    """Convert a vector of one number per channel, [K], as `as_floats` does.

    Raises ArgumentError for another number of axes, NaN and infinity.
    """
    sizes = as_floats(argument, x)
    if sizes.ndim != 1:
        raise ArgumentError(argument, "must be a vector, a number per channel", f"shape {tuple(sizes.shape)}")
    if not bool(np.isfinite(sizes).all()):
        raise ArgumentError(argument, "must be finite", f"channel {int(np.argmin(np.isfinite(sizes)))}")
    return sizes


def as_float_matrix(argument: str, x: Any) -> F32:
    """Convert `x` to f32 [rows, K]: f16 and bf16 convert exactly, f64 rounds to f32.

    Raises ArgumentError as `float_matrix` does, and for NaN or infinity, with the place of the first.
    """
    x = float_matrix(argument, x)
    extremes(argument, x)
    return as_float32(x)


def extremes(argument: str, x: npt.NDArray[Any]) -> tuple[F32, F32]:
    """Find the smallest and the largest element along the last axis of x float [..., K], K > 0: f32 [...] each.

    Raises ArgumentError for NaN or infinity, with the place of the first.
    """
    rows = x.reshape(-1, x.shape[-1])
    low, high = by_strips(_extremes, rows)
    is_finite = np.isfinite(low) & np.isfinite(high)  # NaN is propagated into both
    if not is_finite.all():
        row = int(np.argwhere(~is_finite)[0, 0])
        column = int(np.argwhere(~np.isfinite(as_float32(rows[row])))[0, 0])
        place = [*map(int, np.unravel_index(row, x.shape[:-1])), column]
        raise ArgumentError(argument, "must be finite in float32", f"{argument}{place} is {rows[row, column]}")
    return low.reshape(x.shape[:-1]), high.reshape(x.shape[:-1])


def as_float32(x: npt.NDArray[Any]) -> F32:
    """Convert `x` to f32; values beyond its range become infinite."""
    with np.errstate(over="ignore"):
        floats: F32 = x.astype(np.float32, copy=False)
    return floats


def _extremes(x: npt.NDArray[Any]) -> tuple[F32, F32]:
    floats = as_float32(x)
    return floats.min(axis=1), floats.max(axis=1)


def by_strips(
    function: Callable[..., tuple[npt.NDArray[Any], ...]], *arrays: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], ...]:
    """Call `function(*arrays)` on a few rows at a time and join the results.

    A row of the results depends on the same row of the arrays alone. Strips bound the function's temporaries and keep
    them in the cache. The first array is a matrix.
    """
    rows, K = arrays[0].shape
    step = strip_of(arrays[0], K)
    strips = [function(*(array[i : i + step] for array in arrays)) for i in range(0, max(rows, 1), step)]
    return tuple(np.concatenate(parts) for parts in zip(*strips, strict=True))


def strip_of(x: Any, elements: int) -> int:
    """Return how many pieces of x, each of `elements` elements, to work on at a time."""
    return max(1, (STRIP if isinstance(x, np.ndarray) else DEVICE_STRIP) // elements)


def row_scales(argument: str, extent: F32, steps: int) -> F32:
    """Compute one scale per row, `extent` f32 [rows] divided by `steps`: f32 [rows], 1 where the extent is 0.

    Raises ArgumentError if a scale is not a normal float32, or so large that 128 times it is infinite.
    """
    scale = extent / np.float32(steps)
    representable = (extent == 0) | ((scale >= MIN_SCALE) & (scale <= MAX_SCALE))
    if not representable.all():
        row = int(np.argwhere(~representable)[0, 0])
        rule = f"row scales must lie in {MIN_SCALE:.3g}..{MAX_SCALE:.3g}"
        raise ArgumentError(argument, rule, f"row {row} has {float(extent[row]) / steps:.3g}")
    return np.where(extent == 0, np.float32(1), scale)


def check_group(argument: str, K: int, group: int) -> None:
    """Raise ArgumentError unless `group` is a known group size and divides K."""
    if not is_one_of(group, GROUPS):
        raise ArgumentError("group", f"must be one of {', '.join(map(str, GROUPS))}", group)
    if K % group:
        raise ArgumentError(argument, "K must be a multiple of the group", f"K={K}, group={group}")


def check_protective_range(protective_range: int) -> None:
    """Raise ArgumentError unless `protective_range` is an integer in 1..127."""
    try:
        is_inside = 1 <= operator.index(protective_range) <= 127
    except TypeError:
        is_inside = False
    if not is_inside:
        raise ArgumentError("protective_range", "must be an integer in 1..127", protective_range)
