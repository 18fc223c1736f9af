"""Calls of `attention_kv4`: queries and a cache, every part of its contract, and what must hold of its results."""

from typing import Any

import numpy as np

from ptxlab.lowbit.kernels.attention import ladder, sm80, sm90
from ptxlab.lowbit.kernels.attention.sm80 import MMA
from ptxlab.lowbit.layout import KVCache
from ptxlab.spec.dtypes import numbers
from ptxlab.spec.tolerance import describe_mismatch
from tests.support import attention_problems as problems
from tests.support.fake_gpu import DeviceArray

SM90, SM80 = "attention_kv4_sm90", "attention_kv4_mma_sm80"
TEACHING = [spec.name for spec in ladder.SPECS]
LENGTHS = 75, 0, 1, 300
Q, CACHE = problems.problem(0, LENGTHS, Hq=4, Hkv=2, scheme="kv4", page_size=32)
Q = Q.astype(np.float16)


def assert_within_bound(
    q: np.ndarray, cache: KVCache, out: Any, lse: Any = None, *, window: int = 0, scale: float = 0.0
) -> None:
    """Assert that results of host queries [B, T, Hq, D] are within the spec's bound of the reference.

    Where the reference has zeros and -inf, the results do too.
    """
    BF16 = int(q.dtype == np.uint16)
    x, scale = numbers(q, sm80.DTYPES[BF16]).astype(np.float32), scale or cache.head_dim**-0.5
    expected = MMA.expected({"q": x, "cache": cache, "softmax_scale": scale, "window": window}, {"BF16": BF16})
    assert MMA.bound is not None
    got = {"out": numbers(out, sm80.DTYPES[BF16])} | ({} if lse is None else {"lse": lse})
    assert all(got[name].shape == expected[name].shape for name in got)
    bounds = (
        MMA.bound(x, cache, scale, window, BF16, roundings=roundings)
        for roundings in (sm80.roundings_of, sm90.roundings_of)
    )
    failures = [describe_mismatch(got, expected, dict(zip(expected, bound, strict=True))) for bound in bounds]
    assert None in failures, failures  # whichever kernel was chosen


def to_device_array(array: Any) -> Any:
    """Make a stand-in for a device array of a host array."""
    return DeviceArray(array)


def on_device(cache: KVCache) -> KVCache:
    """Copy a cache to the device, so that the original stays as it is."""
    return problems.map_arrays(cache, lambda array: to_device_array(np.array(array)))


def copy_with(array: np.ndarray, index: Any, element: Any) -> np.ndarray:
    """Return a copy of the array with another element at the index."""
    array = array.copy()
    array[index] = element
    return array


# Every scheme, head dim, page size, dtype, with one query and several, in one column and in several units.
CONTRACT: list[dict[str, Any]] = [
    {"scheme": "kv4", "D": 128, "page_size": 64, "T": 1, "Hq": 2, "Hkv": 2, "window": 0, "dtype": "float16"},
    {"scheme": "kv4", "D": 128, "page_size": 16, "T": 3, "Hq": 8, "Hkv": 2, "window": 40, "dtype": "bfloat16"},
    {"scheme": "kv8", "D": 64, "page_size": 32, "T": 8, "Hq": 3, "Hkv": 1, "window": 0, "dtype": "float16"},
    {"scheme": "kv4_channel", "D": 256, "page_size": 64, "T": 1, "Hq": 16, "Hkv": 1, "window": 1, "dtype": "bfloat16"},
    {"scheme": "kv8_channel", "D": 64, "page_size": 16, "T": 2, "Hq": 2, "Hkv": 2, "window": 70, "dtype": "float16"},
]
