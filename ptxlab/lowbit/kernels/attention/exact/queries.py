"""Queries as the kernel has them: integers of two signed bytes, the largest element of each 32512."""

from typing import Any, NamedTuple

import numpy as np

from ptxlab.lowbit.kernels.attention.exact.launched import AttentionLaunch, beside
from ptxlab.lowbit.kernels.attention.exact.shares import Shares
from ptxlab.lowbit.kernels.attention.sm90 import LARGEST
from ptxlab.spec.dtypes import floats

_LOG2E = np.float32(1.44269504)
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


def rows(of: AttentionLaunch, shares: Shares, some: Any) -> tuple[Any, Any, Any]:
    """Return rows of q and new tokens, s64 [n, C], of the columns of segments, and if a column exists, bool [n, C]."""
    column = shares.split[some][:, None] * of.config["COLUMNS"] + np.arange(of.columns)
    token = column // of.group
    row = (shares.sequence[some][:, None] * of.T + token) * of.Hq + shares.head[some][:, None] * of.group
    return row + column % of.group, token, column < of.group * of.T


def quantized(of: AttentionLaunch, q: Any, shares: Shares, some: slice) -> Queries:
    """Quantise the queries of segments."""
    fma, reciprocal = of.arithmetic.fma, of.arithmetic.reciprocal
    row, token, there = rows(of, shares, some)
    x = floats(q.reshape(-1, of.D)[beside(np.where(there, row, 0), q)])
    if of.by_channel:
        assert of.cache.k_channel is not None
        k_scale, k_zero = (constant[beside(shares.head[some], q)][:, None] for constant in of.cache.k_channel)
        x = x * k_scale
    x = of.cache.rotate(x)
    largest = np.maximum(np.abs(x).max(axis=-1), np.float32(2.0**-100))  # NaN of a NaN
    unit = fma(largest, np.float32(1) / np.float32(LARGEST), largest - largest)  # NaN of an infinity
    shifted = fma(x, reciprocal(unit)[..., None], _SHIFT)
    integers = _integers(shifted.view(np.int32))
    sums = integers.sum(axis=-1).astype(np.float32)  # exact
    if of.by_channel:
        sums = np.zeros_like(sums) if of.signed else _with_zeros(of, shifted - _SHIFT, k_zero)
    times = np.float32(16 if of.bits == 4 else 1)  # of the scores' integers
    factors = unit * (np.float32(of.softmax_scale) * _LOG2E / times)
    ends = of.lengths[shares.sequence[some]][:, None] - of.T + 1 + token
    return Queries(integers.swapaxes(1, 2).astype(np.float64), sums * -times, factors, beside(ends, q))


def _integers(bits: Any) -> Any:
    """Add a signed high byte and a signed low one: the number itself, except for NaN."""
    low, high = (part.astype(np.int8).astype(np.int32) for part in (bits, (bits + 128) >> 8))
    return high * 256 + low


def _with_zeros(of: AttentionLaunch, integers: Any, zeros: Any) -> Any:
    """Sum the integers times a key's zeros by channel, in the kernel's order.

    Each of four lanes adds up its part of a query, then the lanes' sums are added two by two.
    """
    words, per_word = of.D * of.bits // 128, 32 // of.bits  # of a lane; integers
    together = min(words, 4) * per_word  # dims that follow each other

    def by_lane(x: Any) -> Any:
        shape = x.shape[:-1]
        return x.reshape(*shape, -1, 4, together).swapaxes(-3, -2).reshape(*shape, 4, -1)

    integers, zeros = by_lane(integers), by_lane(zeros)
    total = np.zeros(integers.shape[:-1], np.float32, like=integers)
    for i in range(integers.shape[-1]):
        total = of.arithmetic.fma(integers[..., i], zeros[..., i], total)
    return (total[..., 0] + total[..., 1]) + (total[..., 2] + total[..., 3])
