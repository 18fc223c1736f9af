"""The oracle's last steps: the warps' sums put together, then the parts of units, and what is written of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ptxlab.lowbit.kernels.attention.exact import tiles
from ptxlab.lowbit.kernels.attention.exact.arithmetic import EMULATED, Arithmetic, hopper
from ptxlab.lowbit.kernels.attention.exact.launched import AttentionLaunch, beside, require_constants
from ptxlab.lowbit.kernels.attention.exact.queries import rows
from ptxlab.lowbit.kernels.attention.exact.shares import Shares
from ptxlab.lowbit.layout import KVCache
from ptxlab.lowbit.quant import KV_SCHEMES
from ptxlab.lowbit.reference import bfloat16_bits

_LN2 = np.float32(0.693147181)
_BYTES = 1 << 25, 1 << 31  # that are worked on at a time, on the host and on a device


class Part(NamedTuple):
    """Sums over the tokens of a segment.

    `largest` is the largest score f32 [n, C], `weights` the sum of 2^(score - largest) f32 [n, C], and `values` the sum
    of these times the values f32 [n, D, C].
    """

    largest: Any
    weights: Any
    values: Any


def attention(
    q: Any,
    cache: KVCache,
    *,
    softmax_scale: float,
    blocks: int,
    config: Mapping[str, int],
    window: int = 0,
    arithmetic: Arithmetic | None = None,
) -> tuple[Any, Any]:
    """Compute what attention_kv4_sm90 writes, bit for bit.

    Args:
        q: f16 [B, T, Hq, D], or u16 with the bits of bfloat16; NumPy or CuPy, as the cache.
        cache: what lies beyond its lengths, in pages and table, may be anything.
        softmax_scale: of the scores.
        blocks: of the launch: they decide what is added up apart.
        config: constants of the variant (`SM90.config_for`), with BF16 for bfloat16.
        window: tokens that a query sees, 0 for all.
        arithmetic: of what runs it: by default `EMULATED` for NumPy arrays, and `hopper()` for CuPy arrays.

    Returns:
        (out like q, lse f32 [B, T, Hq]).

    Raises:
        ArgumentError: constants of the variant are not those of the arrays.
    """
    scheme = KV_SCHEMES[cache.scheme]
    require_constants(config, q, cache, BITS=scheme.bits, CHANNEL=int(scheme.by_channel))
    B, T, Hq, D = q.shape
    lengths = np.maximum(np.array(cache.lengths.tolist(), np.int64), 0)
    if arithmetic is None:
        arithmetic = EMULATED if isinstance(q, np.ndarray) else hopper()
    of = AttentionLaunch(cache, lengths, T, Hq, softmax_scale, window, config, arithmetic)
    shares = Shares.of(
        lengths,
        heads=cache.num_kv_heads,
        splits=of.splits,
        queries=T,
        window=window,
        groups=of.groups,
        blocks=blocks,
        part=of.part,
    )
    out, lse = np.zeros((B * T * Hq, D), q.dtype, like=q), np.zeros(B * T * Hq, np.float32, like=q) - np.float32(np.inf)
    if len(shares.first):
        with np.errstate(all="ignore"):
            parts = [_of_warps(of, tiles.of_segments(of, q, shares, some), shares, some) for some in _some(of, shares)]
            whole = _of_blocks(of, Part(*map(np.concatenate, zip(*parts, strict=True))), shares)
            _store(of, whole, shares, out, lse)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def _some(of: AttentionLaunch, shares: Shares) -> list[slice]:
    """List the segments that are worked on together: as many as the memory limit allows."""
    of_warp = (of.D + 1) * (16 * of.config["TOKENS"] + 64 * of.columns)  # about: tokens as f64, accumulators
    n = max(1, _BYTES[not isinstance(of.cache.pool, np.ndarray)] // (of_warp * of.warps))
    return [slice(i, i + n) for i in range(0, len(shares.sequence), n)]


def _of_warps(of: AttentionLaunch, warps: tiles.Warps, shares: Shares, some: slice) -> Part:
    """Combine the sums of each segment's warps; values in their units, less their zeros."""
    by_warp = (array.reshape(-1, of.warps, *array.shape[1:]) for array in (warps.largest, warps.weights, warps.sums))
    largest, weights, sums = by_warp
    values, zeros, back = sums[:, :, : of.D], sums[:, :, of.D], 2.0**24  # integers were subnormals
    units = np.zeros((of.D, 1), np.float32, like=values) + np.float32(back)
    if of.bits == 4:
        units.reshape(-1, 2, 4)[:, 1] = back / 16
    weights = zeros if of.by_channel else _neighbours(of, weights)
    most = largest.max(axis=1)
    factor = of.arithmetic.exp2(largest - most[:, None])
    total = np.zeros_like(values[:, 0])
    for w in range(of.warps):
        total = of.arithmetic.fma(values[:, w], factor[:, w, None], total)
    mul, sub = of.arithmetic.mul, of.arithmetic.sub
    weights, zeros = _halves(of, mul(weights, factor)), _halves(of, mul(zeros, factor))[:, None]
    if not of.by_channel:
        return Part(most, weights, sub(mul(total, units), zeros))
    assert of.cache.v_channel is not None
    scale, zero = (constant[beside(shares.head[some], total)][..., None] for constant in of.cache.v_channel)
    zeros = mul(zeros, np.full_like(zero, 128) if of.signed else zero)
    return Part(most, weights, mul(sub(mul(total, units), zeros), scale))


def _neighbours(of: AttentionLaunch, x: Any) -> Any:
    """Sum the 8 elements of axis 2 pairwise: neighbours first, then neighbouring sums, and so on."""
    while x.shape[2] > 1:
        x = of.arithmetic.add(x[:, :, ::2], x[:, :, 1::2])
    return x[:, :, 0]


def _halves(of: AttentionLaunch, x: Any) -> Any:
    """Sum axis 1, of 4, 8 or 16 lanes: add the second half to the first, and so on."""
    lanes = next(n for n in (4, 8, 16) if n >= x.shape[1])
    x = np.concatenate([x, np.zeros((len(x), lanes - x.shape[1], x.shape[2]), np.float32, like=x)], axis=1)
    while x.shape[1] > 1:
        x = of.arithmetic.add(x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :])
    return x[:, 0]


def _of_blocks(of: AttentionLaunch, parts: Part, shares: Shares) -> Part:
    """Combine the parts of all units: other blocks' parts are added to the first one's, up to 4 or 8 at a time.

    Parts of units that are cut by their own length are added one by one.
    """
    whole = Part(*(array[beside(shares.first, array)] for array in parts))
    others = shares.parts - 1
    groups = ((1, others > 0),) if of.part else ((4, others <= 4), (8, others > 4))
    for ahead, of_these in groups:
        for done in range(0, int(others[of_these].max(initial=0)), ahead):
            units = np.flatnonzero(of_these & (others > done))
            number, last = done + np.arange(ahead), others[units][:, None] - 1
            at = shares.first[units][:, None] + 1 + np.minimum(number, last)
            more = Part(*(array[beside(at, array)] for array in parts))
            there, units = beside(number <= last, whole.weights), beside(units, whole.weights)
            added = _add(of, Part(*(array[units] for array in whole)), more, there)
            for array, changed in zip(whole, added, strict=True):
                array[units] = changed
    return whole


def _add(of: AttentionLaunch, whole: Part, more: Part, there: Any) -> Part:
    """Add parts [n, some, ..] to one part of each unit, in the order of the tokens; missing parts count nothing."""
    fma, mul, exp2 = of.arithmetic.fma, of.arithmetic.mul, of.arithmetic.exp2
    largest = np.fmax(whole.largest, more.largest.max(axis=1))
    less = exp2(whole.largest - largest)
    weights, values = mul(whole.weights, less), mul(whole.values, less[:, None])
    for i in range(there.shape[1]):
        factor = np.where(there[:, i, None], exp2(more.largest[:, i] - largest), np.float32(0))
        values = fma(more.values[:, i], factor[:, None], values)
        weights = fma(more.weights[:, i], factor, weights)
    return Part(largest, weights, values)


def _store(of: AttentionLaunch, whole: Part, shares: Shares, out: Any, lse: Any) -> None:
    """Store the values divided by the sum of weights, and its logarithm to base e; without weights 0 and -inf."""
    none = whole.weights == 0
    inverse = np.where(none, np.float32(0), of.arithmetic.reciprocal(whole.weights))
    values = of.arithmetic.mul(whole.values, inverse[:, None]).swapaxes(1, 2)
    logarithm = np.where(none, np.float32(-np.inf), (whole.largest + of.arithmetic.log2(whole.weights)) * _LN2)
    row, _, there = rows(of, shares, shares.first)
    row, there = beside(row[there], out), beside(there, out)
    out[row] = bfloat16_bits(values[there]) if of.config["BF16"] else values[there].astype(np.float16)
    lse[row] = logarithm[there]
