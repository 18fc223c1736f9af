"""What the warps make of their tiles, one after the other: scores, weights, sums."""

from typing import Any, NamedTuple

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit.kernels.attention.exact import tokens
from ptxlab.lowbit.kernels.attention.exact.launched import AttentionLaunch, beside
from ptxlab.lowbit.kernels.attention.exact.queries import Queries, quantized
from ptxlab.lowbit.kernels.attention.exact.shares import Shares
from ptxlab.lowbit.kernels.attention.sm90 import TILE

_LOWEST = np.float32(-1e30)  # below any score, yet finite
_MMA = 16  # tokens of one


class Warps(NamedTuple):
    """State of warps after the tiles so far.

    `largest` is the largest score f32 [n, C]. `weights` are weights / scale, summed for the tokens of each row of a
    fragment by themselves, f32 [n, 8, C]. `accumulators` are the MMA's, for each dim and for the zeros, f32 [n, D + 1,
    C]. `sums` are what these were promoted to, and `largest_then` is the largest score at that time.
    """

    largest: Any
    weights: Any
    accumulators: Any
    sums: Any
    largest_then: Any


def of_segments(of: AttentionLaunch, q: Any, shares: Shares, some: slice) -> Warps:
    """Compute the state of all warps of n segments, [n · warps, ..]; warps without a tile keep the lowest score."""
    queries, warp = quantized(of, q, shares, some), np.arange(of.warps)
    skip = (warp // of.share - shares.turn[some][:, None]) % of.groups
    count = np.maximum(ceil_div(shares.tiles[some][:, None] - skip, of.groups), 0).ravel()  # tiles of a warp
    busiest = np.argsort(-count, kind="stable")
    segment, warp = np.divmod(busiest, of.warps)
    position = shares.position[some][segment] + warp % of.share * of.config["TOKENS"] + skip.ravel()[busiest] * TILE
    sequence, head = (beside(array[some][segment], q) for array in (shares.sequence, shares.head))
    busy = [int((count > step).sum()) for step in range(int(count.max()) + 1)]  # warps that have so many tiles and more

    warps = _before(of, len(count), q)
    for step, n in enumerate(busy[:-1]):
        mine = Queries(*(array[beside(segment[:n], q)] for array in queries))
        first = beside(position[:n] + step * of.groups * TILE, q)
        _tile(of, Warps(*(array[:n] for array in warps)), mine, first, sequence[:n], head[:n])
        whole = of.promote and (step + 1) % of.promote == 0
        _promote(of, Warps(*(array[0 if whole else busy[step + 1] : n] for array in warps)), step)
    in_order = beside(np.argsort(busiest), q)
    return Warps(*(array[in_order] for array in warps))


def _before(of: AttentionLaunch, n: int, q: Any) -> Warps:
    """Return the state of n warps before their first tile."""
    shapes = (n, of.columns), (n, 8, of.columns), (n, of.D + 1, of.columns)
    largest, weights, accumulators = (np.zeros(shape, np.float32, like=q) for shape in shapes)
    return Warps(largest + _LOWEST, weights, accumulators, accumulators.copy(), largest + _LOWEST)


def _tile(of: AttentionLaunch, warps: Warps, queries: Queries, first: Any, sequence: Any, head: Any) -> None:
    """Add the tokens of a warp's tile, from `first` on, to the warp's state, in place."""
    fma, mul, exp2, mma = of.arithmetic.fma, of.arithmetic.mul, of.arithmetic.exp2, of.arithmetic.mma
    at = first[:, None] + np.arange(of.config["TOKENS"], like=first)
    read = tokens.read(of, at, sequence, head)
    score = _scores(of, read, queries, at[..., None])

    # Sums are of the largest score so far. (Where no column of a warp has a larger one, it does not multiply by 1.)
    largest = np.fmax(warps.largest, np.where(np.isnan(score), _LOWEST, score).max(axis=1))
    less = exp2(warps.largest - largest)[:, None]
    weights, accumulators = mul(warps.weights, less), mul(warps.accumulators, less)
    weight, inverse = exp2(score - largest[:, None]), of.arithmetic.reciprocal(read.v_scale)
    for row in range(0, of.config["TOKENS"], 8):
        eight = slice(row, row + 8)
        weights = fma(weight[:, eight], inverse[:, eight], weights)
    rounded = weight.astype(np.float16)
    for row in range(0, of.config["TOKENS"], _MMA):
        sixteen = slice(row, row + _MMA)
        accumulators = mma(read.operands[:, sixteen].swapaxes(1, 2), rounded[:, sixteen], accumulators)
    warps.largest[:], warps.weights[:], warps.accumulators[:] = largest, weights, accumulators


def _promote(of: AttentionLaunch, warps: Warps, step: int) -> None:
    """Add what tensor cores have added up, truncating, to sums that round, and begin anew.

    `step` counts tiles: the first time there is nothing to add to.
    """
    sums = warps.accumulators.copy()
    if of.bits == 4:
        words = sums[:, : of.D].reshape(-1, of.D // 8, 2, 4, of.columns)  # high nibbles have the low ones with them
        words[:, :, 1] = of.arithmetic.sub(words[:, :, 1], words[:, :, 0])
        sums[:, : of.D] = words.reshape(-1, of.D, of.columns)
    if of.promote and step >= of.promote:
        less = of.arithmetic.exp2(warps.largest_then - warps.largest)[:, None]
        sums = of.arithmetic.fma(warps.sums, less, sums)
    warps.sums[:], warps.largest_then[:], warps.accumulators[:] = sums, warps.largest, 0


def _scores(of: AttentionLaunch, read: tokens.Tokens, queries: Queries, token: Any) -> Any:
    """Compute scores f32 [n, tokens, C] in base 2, plus the logarithm of the value's scale; -inf for unseen tokens."""
    fma, sums, factors, ends = of.arithmetic.fma, *(array[:, None] for array in queries[1:])
    score = (read.keys @ queries.integers * (16 if of.bits == 4 else 1)).astype(np.float32)  # of exact sums
    score = score + sums if of.by_channel else of.arithmetic.mul(fma(read.k_zero, sums, score), read.k_scale)
    score = fma(score, factors, of.arithmetic.log2(read.v_scale))
    seen = token < ends
    if of.window:
        seen = seen & (token >= ends - of.window)
    return np.where(seen, score, np.float32(-np.inf))
