"""What the warps make of their tiles, one after the other: scores, weights, sums."""

from typing import Any, NamedTuple

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit.kernels.attention.exact import tokens
from ptxlab.lowbit.kernels.attention.exact.launched import AttentionLaunch, to_device_of
from ptxlab.lowbit.kernels.attention.exact.queries import Queries, quantize_queries
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


def compute_warps(launch: AttentionLaunch, q: Any, shares: Shares, segments: slice) -> Warps:
    """Compute the state of all warps of n segments, [n · warps, ..]; warps without a tile keep the lowest score."""
    queries, warp = quantize_queries(launch, q, shares, segments), np.arange(launch.warps)
    skip = (warp // launch.share - shares.turn[segments][:, None]) % launch.groups
    count = np.maximum(ceil_div(shares.tiles[segments][:, None] - skip, launch.groups), 0).ravel()  # tiles of a warp
    busiest_first = np.argsort(-count, kind="stable")
    segment, warp = np.divmod(busiest_first, launch.warps)
    position = (
        shares.position[segments][segment]
        + warp % launch.share * launch.config["TOKENS"]
        + skip.ravel()[busiest_first] * TILE
    )
    sequence, head = (to_device_of(array[segments][segment], q) for array in (shares.sequence, shares.head))
    # Warps that have so many tiles and more.
    busy_warps = [int((count > step).sum()) for step in range(int(count.max()) + 1)]

    warps = _initial_warps(launch, len(count), q)
    for step, n in enumerate(busy_warps[:-1]):
        step_queries = Queries(*(array[to_device_of(segment[:n], q)] for array in queries))
        first_token = to_device_of(position[:n] + step * launch.groups * TILE, q)
        _add_tile(launch, Warps(*(array[:n] for array in warps)), step_queries, first_token, sequence[:n], head[:n])
        is_promotion = launch.promote and (step + 1) % launch.promote == 0
        _promote(launch, Warps(*(array[0 if is_promotion else busy_warps[step + 1] : n] for array in warps)), step)
    warp_order = to_device_of(np.argsort(busiest_first), q)
    return Warps(*(array[warp_order] for array in warps))


def _initial_warps(launch: AttentionLaunch, n: int, q: Any) -> Warps:
    """Return the state of n warps before their first tile."""
    shapes = (n, launch.columns), (n, 8, launch.columns), (n, launch.D + 1, launch.columns)
    largest, weights, accumulators = (np.zeros(shape, np.float32, like=q) for shape in shapes)
    return Warps(largest + _LOWEST, weights, accumulators, accumulators.copy(), largest + _LOWEST)


def _add_tile(launch: AttentionLaunch, warps: Warps, queries: Queries, first: Any, sequence: Any, head: Any) -> None:
    """Add the tokens of a warp's tile, from `first` on, to the warp's state, in place."""
    fma, mul, exp2, mma = launch.arithmetic.fma, launch.arithmetic.mul, launch.arithmetic.exp2, launch.arithmetic.mma
    token = first[:, None] + np.arange(launch.config["TOKENS"], like=first)
    tile_tokens = tokens.read(launch, token, sequence, head)
    score = _scores(launch, tile_tokens, queries, token[..., None])

    # Sums are of the largest score so far. (Where no column of a warp has a larger one, it does not multiply by 1.)
    largest = np.fmax(warps.largest, np.where(np.isnan(score), _LOWEST, score).max(axis=1))
    rescale = exp2(warps.largest - largest)[:, None]
    weights, accumulators = mul(warps.weights, rescale), mul(warps.accumulators, rescale)
    weight, inverse = exp2(score - largest[:, None]), launch.arithmetic.reciprocal(tile_tokens.v_scale)
    for row in range(0, launch.config["TOKENS"], 8):
        eight = slice(row, row + 8)
        weights = fma(weight[:, eight], inverse[:, eight], weights)
    rounded_weight = weight.astype(np.float16)
    for row in range(0, launch.config["TOKENS"], _MMA):
        sixteen = slice(row, row + _MMA)
        accumulators = mma(tile_tokens.operands[:, sixteen].swapaxes(1, 2), rounded_weight[:, sixteen], accumulators)
    warps.largest[:], warps.weights[:], warps.accumulators[:] = largest, weights, accumulators


def _promote(launch: AttentionLaunch, warps: Warps, step: int) -> None:
    """Add what tensor cores have added up, truncating, to sums that round, and begin anew.

    `step` counts tiles: the first time there is nothing to add to.
    """
    sums = warps.accumulators.copy()
    if launch.bits == 4:
        # High nibbles have been multiplied with the low ones of their bytes, whose sums are taken off.
        words = sums[:, : launch.D].reshape(-1, launch.D // 8, 2, 4, launch.columns)
        words[:, :, 1] = launch.arithmetic.sub(words[:, :, 1], words[:, :, 0])
        sums[:, : launch.D] = words.reshape(-1, launch.D, launch.columns)
    if launch.promote and step >= launch.promote:
        rescale = launch.arithmetic.exp2(warps.largest_then - warps.largest)[:, None]
        sums = launch.arithmetic.fma(warps.sums, rescale, sums)
    warps.sums[:], warps.largest_then[:], warps.accumulators[:] = sums, warps.largest, 0


def _scores(launch: AttentionLaunch, read: tokens.Tokens, queries: Queries, token: Any) -> Any:
    """Compute scores f32 [n, tokens, C] in base 2, plus the logarithm of the value's scale; -inf for unseen tokens."""
    fma, sums, factors, ends = launch.arithmetic.fma, *(array[:, None] for array in queries[1:])
    score = (read.keys @ queries.integers * (16 if launch.bits == 4 else 1)).astype(np.float32)  # of exact sums
    score = score + sums if launch.by_channel else launch.arithmetic.mul(fma(read.k_zero, sums, score), read.k_scale)
    score = fma(score, factors, launch.arithmetic.log2(read.v_scale))
    is_seen = token < ends
    if launch.window:
        is_seen = is_seen & (token >= ends - launch.window)
    return np.where(is_seen, score, np.float32(-np.inf))
