"""Queries as the kernel has them: integers of two signed bytes, the largest element of each 32512."""

from typing import Any, NamedTuple

import numpy as np

from ptxlab.lowbit.kernels.attention.exact.launched import AttentionLaunch, to_device_of
from ptxlab.lowbit.kernels.attention.exact.shares import Shares
from ptxlab.lowbit.kernels.attention.sm90 import LARGEST
from ptxlab.spec.dtypes import floats

_LOG2E = np.float32(1.44269504)
_LANE_DIMS = 8  # of a query that one lane quantises
_SHIFT = np.float32(12582912)  # 1.5 · 2^23: a sum with it has an integer in its low bits


class Queries(NamedTuple):
    """Quantised queries of segments.

    `integers` are f64 [n, D, C]. A key's zero is multiplied by `sums`, a score by `factors`, f32 [n, C] each. `ends`
    are the first token that each query does not see, s64 [n, C].
    """

    integers: Any
    sums: Any
    factors: Any
    ends: Any


def query_rows(launch: AttentionLaunch, shares: Shares, segments: Any) -> tuple[Any, Any, Any]:
    """Return rows of q and new tokens, s64 [n, C], of the columns of segments, and if a column exists, bool [n, C]."""
    column = shares.split[segments][:, None] * launch.config["COLUMNS"] + np.arange(launch.columns)
    token = column // launch.group
    sequence, head = shares.sequence[segments][:, None], shares.head[segments][:, None]
    row = (sequence * launch.T + token) * launch.Hq + head * launch.group + column % launch.group
    return row, token, column < launch.group * launch.T


def quantize_queries(launch: AttentionLaunch, q: Any, shares: Shares, segments: slice) -> Queries:
    """Quantise the queries of segments."""
    fma, reciprocal = launch.arithmetic.fma, launch.arithmetic.reciprocal
    row, token, exists = query_rows(launch, shares, segments)
    x = floats(q.reshape(-1, launch.D)[to_device_of(np.where(exists, row, 0), q)])
    if launch.by_channel:
        assert launch.cache.k_channel is not None
        k_scale, k_zero = (
            constant[to_device_of(shares.head[segments], q)][:, None] for constant in launch.cache.k_channel
        )
        x = x * k_scale
    x = launch.cache.rotate(x)
    largest = np.maximum(np.abs(x).max(axis=-1), np.float32(2.0**-100))  # NaN of a NaN
    unit = fma(largest, np.float32(1) / np.float32(LARGEST), largest - largest)  # NaN of an infinity
    shifted_queries = fma(x, reciprocal(unit)[..., None], _SHIFT)
    integers = _integers(shifted_queries.view(np.int32))
    sums = integers.sum(axis=-1).astype(np.float32)  # exact
    if launch.by_channel:
        sums = np.zeros_like(sums) if launch.signed else _sum_with_zeros(launch, shifted_queries - _SHIFT, k_zero)
    score_factor = np.float32(16 if launch.bits == 4 else 1)  # of the scores' integers
    factors = unit * (np.float32(launch.softmax_scale) * _LOG2E / score_factor)
    token_ends = launch.lengths[shares.sequence[segments]][:, None] - launch.T + 1 + token
    return Queries(
        integers.swapaxes(1, 2).astype(np.float64), sums * -score_factor, factors, to_device_of(token_ends, q)
    )


def _integers(bits: Any) -> Any:
    """Add a signed high byte and a signed low one: the number itself, except for NaN."""
    low, high = (part.astype(np.int8).astype(np.int32) for part in (bits, (bits + 128) >> 8))
    return high * 256 + low


def _sum_with_zeros(launch: AttentionLaunch, integers: Any, zeros: Any) -> Any:
    """Sum the integers times a key's zeros by channel, in the kernel's order.

    Each lane adds up its dims of a query, then the lanes' sums are added two by two.
    """
    dims = (*integers.shape[:-1], -1, _LANE_DIMS)
    integers, zeros = integers.reshape(dims), zeros.reshape(*zeros.shape[:-1], -1, _LANE_DIMS)
    total = np.zeros(integers.shape[:-1], np.float32, like=integers)
    for i in range(_LANE_DIMS):
        total = launch.arithmetic.fma(integers[..., i], zeros[..., i], total)
    while total.shape[-1] > 1:
        total = total[..., ::2] + total[..., 1::2]
    return total[..., 0]
