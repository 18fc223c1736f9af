"""The oracle's last steps: the warps' sums put together, then the parts of units, and what is written of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ptxlab.lowbit.kernels.attention.exact import tiles
from ptxlab.lowbit.kernels.attention.exact.arithmetic import EMULATED, Arithmetic, hopper
from ptxlab.lowbit.kernels.attention.exact.launched import AttentionLaunch, require_constants, to_device_of
from ptxlab.lowbit.kernels.attention.exact.queries import query_rows
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
    launch = AttentionLaunch(cache, lengths, T, Hq, softmax_scale, window, config, arithmetic)
    shares = Shares.of(
        lengths,
        heads=cache.num_kv_heads,
        splits=launch.splits,
        queries=T,
        window=window,
        groups=launch.groups,
        blocks=blocks,
        part=launch.part,
    )
    out, lse = np.zeros((B * T * Hq, D), q.dtype, like=q), np.zeros(B * T * Hq, np.float32, like=q) - np.float32(np.inf)
    if len(shares.first):
        with np.errstate(all="ignore"):
            parts = [
                _merge_warps(launch, tiles.compute_warps(launch, q, shares, segments), shares, segments)
                for segments in _segment_batches(launch, shares)
            ]
            whole_part = _merge_parts(launch, Part(*map(np.concatenate, zip(*parts, strict=True))), shares)
            _store(launch, whole_part, shares, out, lse)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def _segment_batches(launch: AttentionLaunch, shares: Shares) -> list[slice]:
    """List the segments that are worked on together: as many as the memory limit allows."""
    # About as many bytes as a warp's tokens as f64, and its accumulators, take.
    warp_bytes = (launch.D + 1) * (16 * launch.config["TOKENS"] + 64 * launch.columns)
    n = max(1, _BYTES[not isinstance(launch.cache.pool, np.ndarray)] // (warp_bytes * launch.warps))
    return [slice(i, i + n) for i in range(0, len(shares.sequence), n)]


def _merge_warps(launch: AttentionLaunch, warps: tiles.Warps, shares: Shares, segments: slice) -> Part:
    """Combine the sums of each segment's warps, and take the zeros off the values."""
    largest, weights, sums = (
        array.reshape(-1, launch.warps, *array.shape[1:]) for array in (warps.largest, warps.weights, warps.sums)
    )
    values, weighted_zeros = sums[:, :, : launch.D], sums[:, :, launch.D]  # by channel, zeros were 1
    integer_factors = np.zeros((launch.D, 1), np.float32, like=values) + np.float32(2**24)  # for FP16 subnormals
    if launch.bits == 4:
        integer_factors.reshape(-1, 2, 4)[:, 1] = 2**20  # high nibbles, in their bytes
    weights = weighted_zeros if launch.by_channel else _sum_neighbours(launch, weights)
    segment_largest = largest.max(axis=1)
    factor = launch.arithmetic.exp2(largest - segment_largest[:, None])
    total = np.zeros_like(values[:, 0])
    for w in range(launch.warps):
        total = launch.arithmetic.fma(values[:, w], factor[:, w, None], total)
    mul, sub = launch.arithmetic.mul, launch.arithmetic.sub
    weights = _sum_halves(launch, mul(weights, factor))
    weighted_zeros = _sum_halves(launch, mul(weighted_zeros, factor))[:, None]
    if not launch.by_channel:
        return Part(segment_largest, weights, sub(mul(total, integer_factors), weighted_zeros))
    assert launch.cache.v_channel is not None
    scale, zero = (
        constant[to_device_of(shares.head[segments], total)][..., None] for constant in launch.cache.v_channel
    )
    zero = np.full_like(zero, 128) if launch.signed else zero  # signed values were read plus 128
    weighted_zeros = mul(weighted_zeros, zero)
    return Part(segment_largest, weights, mul(sub(mul(total, integer_factors), weighted_zeros), scale))


def _sum_neighbours(launch: AttentionLaunch, x: Any) -> Any:
    """Sum the 8 elements of axis 2 pairwise: neighbours first, then neighbouring sums, and so on."""
    while x.shape[2] > 1:
        x = launch.arithmetic.add(x[:, :, ::2], x[:, :, 1::2])
    return x[:, :, 0]


def _sum_halves(launch: AttentionLaunch, x: Any) -> Any:
    """Sum axis 1, of 4, 8 or 16 lanes: add the second half to the first, and so on."""
    lanes = next(n for n in (4, 8, 16) if n >= x.shape[1])
    x = np.concatenate([x, np.zeros((len(x), lanes - x.shape[1], x.shape[2]), np.float32, like=x)], axis=1)
    while x.shape[1] > 1:
        x = launch.arithmetic.add(x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :])
    return x[:, 0]


def _merge_parts(launch: AttentionLaunch, parts: Part, shares: Shares) -> Part:
    """Combine the parts of all units: other blocks' parts are added to the first one's, up to 4 or 8 at a time.

    Parts of units that are cut by their own length are added one by one.
    """
    whole_part = Part(*(array[to_device_of(shares.first, array)] for array in parts))
    further_parts = shares.parts - 1
    groups = ((1, further_parts > 0),) if launch.part else ((4, further_parts <= 4), (8, further_parts > 4))
    for batch_size, is_handled in groups:
        for first in range(0, int(further_parts[is_handled].max(initial=0)), batch_size):
            units = np.flatnonzero(is_handled & (further_parts > first))
            number, last_number = first + np.arange(batch_size), further_parts[units][:, None] - 1
            segment = shares.first[units][:, None] + 1 + np.minimum(number, last_number)
            next_parts = Part(*(array[to_device_of(segment, array)] for array in parts))
            exists = to_device_of(number <= last_number, whole_part.weights)
            units = to_device_of(units, whole_part.weights)
            merged_part = _add_parts(launch, Part(*(array[units] for array in whole_part)), next_parts, exists)
            for array, changed_array in zip(whole_part, merged_part, strict=True):
                array[units] = changed_array
    return whole_part


def _add_parts(launch: AttentionLaunch, whole: Part, parts: Part, exists: Any) -> Part:
    """Add parts [n, some, ..] to one part of each unit, in the order of the tokens; missing parts count nothing."""
    fma, mul, exp2 = launch.arithmetic.fma, launch.arithmetic.mul, launch.arithmetic.exp2
    largest = np.fmax(whole.largest, parts.largest.max(axis=1))
    rescale = exp2(whole.largest - largest)
    weights, values = mul(whole.weights, rescale), mul(whole.values, rescale[:, None])
    for i in range(exists.shape[1]):
        factor = np.where(exists[:, i, None], exp2(parts.largest[:, i] - largest), np.float32(0))
        values = fma(parts.values[:, i], factor[:, None], values)
        weights = fma(parts.weights[:, i], factor, weights)
    return Part(largest, weights, values)


def _store(launch: AttentionLaunch, whole: Part, shares: Shares, out: Any, lse: Any) -> None:
    """Store the values divided by the sum of weights, and its logarithm to base e; without weights 0 and -inf."""
    is_empty = whole.weights == 0
    inverse = np.where(is_empty, np.float32(0), launch.arithmetic.reciprocal(whole.weights))
    values = launch.arithmetic.mul(whole.values, inverse[:, None]).swapaxes(1, 2)
    logarithm = np.where(is_empty, np.float32(-np.inf), (whole.largest + launch.arithmetic.log2(whole.weights)) * _LN2)
    row, _, exists = query_rows(launch, shares, shares.first)
    row, exists = to_device_of(row[exists], out), to_device_of(exists, out)
    out[row] = bfloat16_bits(values[exists]) if launch.config["BF16"] else values[exists].astype(np.float16)
    lse[row] = logarithm[exists]
