"""What the warps make of their tiles, one after the other: scores, weights, sums."""

from typing import Any, NamedTuple

import numpy as np

from ptxlab.kernels.attention.exact import tokens
from ptxlab.kernels.attention.exact.launched import Launched, beside
from ptxlab.kernels.attention.exact.queries import Queries, quantized
from ptxlab.kernels.attention.exact.shares import Shares
from ptxlab.kernels.attention.sm90 import TILE

_LOWEST = np.float32(-1e30)  # below any score, yet finite
_MMA = 16  # tokens of one


class Warps(NamedTuple):
    """Sums of a warp's tiles so far: the largest score f32 [n, C]; weights / scale, of the tokens of each row of a
    fragment apart, f32 [n, 8, C]; accumulators of the MMA for each dim and for the zeros, f32 [n, D + 1, C].
    """

    largest: Any
    weights: Any
    sums: Any


def of_segments(of: Launched, q: Any, shares: Shares, some: slice) -> Warps:
    """Of n segments all warps, [n · warps, ..]: those without a tile keep the lowest score."""
    queries, warp = quantized(of, q, shares, some), np.arange(of.warps)
    skip = (warp // of.share - shares.turn[some][:, None]) % of.groups
    count = np.maximum(-(-(shares.tiles[some][:, None] - skip) // of.groups), 0).ravel()  # tiles of a warp
    busiest = np.argsort(-count, kind="stable")
    segment, warp = np.divmod(busiest, of.warps)
    position = shares.position[some][segment] + warp % of.share * of.config["TOKENS"] + skip.ravel()[busiest] * TILE
    sequence, head = (beside(array[some][segment], q) for array in (shares.sequence, shares.head))

    C = of.columns
    state = Warps(
        np.zeros((len(count), C), np.float32, like=q) + _LOWEST,
        np.zeros((len(count), 8, C), np.float32, like=q),
        np.zeros((len(count), of.D + 1, C), np.float32, like=q),
    )
    for step in range(int(count.max())):
        busy = int((count > step).sum())
        mine = Queries(*(array[beside(segment[:busy], q)] for array in queries))
        first = beside(position[:busy] + step * of.groups * TILE, q)
        after = _tile(of, Warps(*(array[:busy] for array in state)), mine, first, sequence[:busy], head[:busy])
        for array, changed in zip(state, after, strict=True):
            array[:busy] = changed
    in_order = beside(np.argsort(busiest), q)
    return Warps(*(array[in_order] for array in state))


def _tile(of: Launched, so_far: Warps, queries: Queries, first: Any, sequence: Any, head: Any) -> Warps:
    """The tokens of a tile that a warp has, from `first` on."""
    fma, exp2, mma = of.arithmetic.fma, of.arithmetic.exp2, of.arithmetic.mma
    at = first[:, None] + np.arange(of.config["TOKENS"], like=first)
    read = tokens.read(of, at, sequence, head)
    score = _scores(of, read, queries, at[..., None])

    largest = np.fmax(so_far.largest, np.where(np.isnan(score), _LOWEST, score).max(axis=1))
    less = exp2(so_far.largest - largest)[:, None]
    weights, sums = so_far.weights * less, so_far.sums * less
    weight, inverse = exp2(score - largest[:, None]), of.arithmetic.reciprocal(read.v_scale)
    for row in range(0, of.config["TOKENS"], 8):
        eight = slice(row, row + 8)
        weights = fma(weight[:, eight], inverse[:, eight], weights)
    rounded = weight.astype(np.float16)
    for row in range(0, of.config["TOKENS"], _MMA):
        sixteen = slice(row, row + _MMA)
        sums = mma(read.operands[:, sixteen].swapaxes(1, 2), rounded[:, sixteen], sums)
    return Warps(largest, weights, sums)


def _scores(of: Launched, read: tokens.Tokens, queries: Queries, token: Any) -> Any:
    """f32 [n, tokens, C], in base 2, with the logarithm of the value's scale; -inf for what is not seen."""
    fma, sums, factors, ends = of.arithmetic.fma, *(array[:, None] for array in queries[1:])
    score = (read.keys @ queries.integers * (16 if of.bits == 4 else 1)).astype(np.float32)  # of exact sums
    score = score + sums if of.by_channel else fma(read.k_zero, sums, score) * read.k_scale
    score = fma(score, factors, of.arithmetic.log2(read.v_scale))
    seen = token < ends
    if of.window:
        seen = seen & (token >= ends - of.window)
    return np.where(seen, score, np.float32(-np.inf))
