"""attention_kv4_sm90 in its own order of operations, on arrays: the same bits, in the emulator and on an H200.

It is the kernel's numerics, written down: what is an integer, what is rounded when, what is added up in which order.
A column is one query of a unit; no two of them meet. NumPy or CuPy; the work of all warps at a time, of each warp one
tile after the other. Every operation on float32 is rounded once, as IEEE 754 wants it; the others are `Arithmetic`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.kernels.attention.arithmetic import EMULATED, Arithmetic
from ptxlab.kernels.attention.shares import Shares
from ptxlab.kernels.attention.sm90 import TILE
from ptxlab.layout import KVCache
from ptxlab.layout.pages import PageView
from ptxlab.layout.words import unpack_u4
from ptxlab.quant import KV_SCHEMES
from ptxlab.reference import bfloat16_bits, from_bfloat16_bits
from ptxlab.reference.packed import as_words

LOWEST, LOG2E, LN2 = np.float32(-1e30), np.float32(1.44269504), np.float32(0.693147181)
_SHIFT = np.float32(12582912)  # 1.5 · 2^23: a sum with it has an integer in its low bits
_LARGEST = 32512
_MMA = 16  # tokens of one MMA
_AT_ONCE = 1 << 17, 1 << 23  # accumulators of all warps at a time, on the host and on a device


class Part(NamedTuple):
    """Sums of some tokens: the largest score f32 [n, C], of 2^(score - largest) f32 [n, C], and of these times the
    values f32 [n, D, C].
    """

    largest: Any
    weights: Any
    values: Any


@dataclass(frozen=True, eq=False)
class Exact:
    """The kernel, compiled with the constants `config`, and what it is launched with; columns C of a unit."""

    cache: KVCache
    T: int
    Hq: int
    softmax_scale: float
    window: int
    config: Mapping[str, int]
    arithmetic: Arithmetic

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.Hq // self.cache.num_kv_heads

    @property
    def columns(self) -> int:
        """C."""
        return min(self.config["COLUMNS"], self.group * self.T)

    @property
    def splits(self) -> int:
        """Units of a kv head."""
        return -(-self.group * self.T // self.config["COLUMNS"])

    @property
    def by_channel(self) -> bool:
        """Whether scales and zeros are."""
        return bool(self.config["CHANNEL"])

    @property
    def signed(self) -> bool:
        """Whether integers are."""
        return self.by_channel and self.config["BITS"] == 8


def attention(
    q: Any,
    cache: KVCache,
    *,
    softmax_scale: float,
    blocks: int,
    config: Mapping[str, int],
    window: int = 0,
    arithmetic: Arithmetic = EMULATED,
) -> tuple[Any, Any]:
    """What the kernel writes.

    Args:
        q: f16 [B, T, Hq, D], or u16 with the bits of bfloat16; NumPy or CuPy, as the cache.
        cache: what lies beyond its lengths, in pages and table, may be anything.
        softmax_scale: of the scores.
        blocks: of the launch, which decide what is added up apart.
        config: constants of the variant (`SM90.config_for`), with BF16 for bfloat16.
        window: tokens that a query sees, 0 for all.
        arithmetic: `EMULATED` on NumPy arrays, `hopper()` on CuPy arrays.

    Returns:
        (out like q, lse f32 [B, T, Hq]). Raises ArgumentError for constants that are not the cache's.
    """
    _check(q, cache, config)
    B, T, Hq, D = q.shape
    of = Exact(cache, T, Hq, softmax_scale, window, config, arithmetic)
    lengths = np.array(cache.lengths.tolist(), np.int64)
    groups = config["WARPS"] * config["TOKENS"] // TILE
    shares = Shares.of(
        lengths, heads=cache.num_kv_heads, splits=of.splits, queries=T, window=window, groups=groups, blocks=blocks
    )
    out = np.zeros((B * T * Hq, D), q.dtype, like=q)
    lse = np.full(B * T * Hq, -np.inf, np.float32, like=q)
    if len(shares.first):
        parts = [_segments(of, q, shares, some) for some in _chunks(of, shares)]
        whole = Part(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        _store(of, out, lse, _put_together(of, shares, whole), shares)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def _check(q: Any, cache: KVCache, config: Mapping[str, int]) -> None:
    scheme = KV_SCHEMES[cache.scheme]
    wanted = {
        "D": cache.head_dim,
        "PAGE": cache.page_size,
        "BITS": scheme.bits,
        "CHANNEL": int(scheme.by_channel),
        "BF16": int(q.dtype == np.uint16),
    }
    for name, number in wanted.items():
        if config[name] != number:
            raise ArgumentError("exact: config", f"{name} must be {number} for these arrays", config[name])


def _chunks(of: Exact, shares: Shares) -> list[slice]:
    """Segments that are worked on together."""
    accumulators = of.config["WARPS"] * of.columns * (of.cache.head_dim + 1)
    some = max(1, _AT_ONCE[not isinstance(of.cache.pool, np.ndarray)] // accumulators)
    return [slice(i, i + some) for i in range(0, len(shares.sequence), some)]


# Queries -------------------------------------------------------------------------------------------------------------


class Queries(NamedTuple):
    """Integers f64 [n, D, C]; what a key's zero is multiplied by, and its score, f32 [n, C]; the first token that each
    does not see, s64 [n, C].
    """

    integers: Any
    sums: Any
    factors: Any
    ends: Any


def _rows(of: Exact, shares: Shares, units: Any) -> tuple[Any, Any, Any]:
    """Rows of q and the new tokens [n, C] of the columns of segments, and whether there is such a column."""
    column = shares.split[units][:, None] * of.config["COLUMNS"] + np.arange(of.columns)
    token = column // of.group
    row = (shares.sequence[units][:, None] * of.T + token) * of.Hq + shares.head[units][:, None] * of.group
    return row + column % of.group, token, column < of.group * of.T


def _queries(of: Exact, q: Any, shares: Shares, some: slice) -> Queries:
    """Each becomes integers of 16 bits, by the largest of its elements."""
    rows, tokens, there = _rows(of, shares, some)
    x = q.reshape(-1, q.shape[-1])[_like(np.where(there, rows, 0), q)]
    x = (from_bfloat16_bits(x) if of.config["BF16"] else x.astype(np.float32)) * _like(there[..., None], q)
    if of.by_channel:
        k_scale, k_zero = (array[_like(shares.head[some], q)][:, None] for array in _channel(of.cache.k_channel))
        x = x * k_scale
    largest = np.maximum(np.abs(x).max(axis=-1), np.float32(2.0**-100))  # NaN of a NaN
    fma = of.arithmetic.fma
    unit = fma(largest, np.float32(1 / _LARGEST) * np.ones_like(largest), largest - largest)  # NaN of an infinity
    power = of.arithmetic.reciprocal(unit)
    shifted = fma(x, power[..., None] + np.zeros_like(x), _SHIFT * np.ones_like(x))
    integers = _integers(shifted.view(np.int32))
    sums = integers.sum(axis=-1).astype(np.float32)  # exact
    if of.by_channel:
        sums = np.zeros_like(sums) if of.signed else _sum_of_zeros(of, shifted - _SHIFT, k_zero + np.zeros_like(x))
    times = np.float32(16 if of.config["BITS"] == 4 else 1)  # of the scores' integers
    factors = unit * (np.float32(of.softmax_scale) * LOG2E / times)
    lengths = np.array(of.cache.lengths.tolist(), np.int64)[shares.sequence[some]]
    ends = lengths[:, None] - of.T + 1 + tokens
    return Queries(integers.swapaxes(1, 2).astype(np.float64), sums * -times, factors, _like(ends, q))


def _integers(bits: Any) -> Any:
    """A signed high and a signed low byte: the number itself, but for NaN."""
    low, high = (bits.astype(np.int8).astype(np.int32) for bits in (bits, (bits + 128) >> 8))
    return high * 256 + low


def _sum_of_zeros(of: Exact, integers: Any, zeros: Any) -> Any:
    """Of a key's zeros by channel: the four lanes that share a query add up what they have of it, then two by two."""
    words, per_word = of.config["D"] * of.config["BITS"] // 128, 32 // of.config["BITS"]  # per lane; integers
    vector = min(words, 4)
    dims = np.arange(of.config["D"]).reshape(words // vector, 4, vector * per_word).swapaxes(0, 1).reshape(4, -1)
    total = np.zeros((*integers.shape[:-1], 4), np.float32, like=integers)
    for of_lanes in dims.T:
        total = of.arithmetic.fma(integers[..., of_lanes], zeros[..., of_lanes], total)
    return (total[..., 0] + total[..., 1]) + (total[..., 2] + total[..., 3])


# Tiles ---------------------------------------------------------------------------------------------------------------


class Warps(NamedTuple):
    """What warps have of their tiles so far: the largest score f32 [n, C]; the sum of weights, of the tokens of each
    row of a fragment apart, f32 [n, 8, C]; accumulators of the MMA, of each dim and of the zeros, f32 [n, D + 1, C].
    """

    largest: Any
    weights: Any
    sums: Any


class Tokens(NamedTuple):
    """Of a tile, as the kernel reads them: key integers f64 [n, tokens, D]; operands of values and zeros as f16 [n,
    tokens, D + 1]; scale and zero of keys, scale of values, f32 [n, tokens].
    """

    keys: Any
    operands: Any
    k_scale: Any
    k_zero: Any
    v_scale: Any


def _segments(of: Exact, q: Any, shares: Shares, some: slice) -> Part:
    """Of segments: every warp has some of the tiles, one after the other; then a warp puts their sums together."""
    config, queries = of.config, _queries(of, q, shares, some)
    share = TILE // config["TOKENS"]
    groups = config["WARPS"] // share
    warp = np.arange(config["WARPS"])
    tiles, turn = shares.tiles[some][:, None], shares.turn[some][:, None]
    skip = (warp // share - turn) % groups
    count = np.maximum(-(-(tiles - skip) // groups), 0)  # tiles of a warp
    segment, warp = np.unravel_index(np.argsort(-count, axis=None, kind="stable"), count.shape)  # the busiest first
    count, skip = count[segment, warp], skip[segment, warp]
    position = shares.position[some][segment] + warp % share * config["TOKENS"] + skip * TILE

    n, shape = len(count), (of.columns, of.cache.head_dim + 1)
    state = Warps(
        np.full((n, shape[0]), LOWEST, np.float32, like=q),
        np.zeros((n, 8, shape[0]), np.float32, like=q),
        np.zeros((n, shape[1], shape[0]), np.float32, like=q),
    )
    for step in range(int(count.max())):
        busy = int((count > step).sum())
        of_segment = _like(segment[:busy], q)
        mine = Queries(*(array[of_segment] for array in queries))
        at = _like(position[:busy] + step * groups * TILE, q)
        where = shares.sequence[some][segment[:busy]], shares.head[some][segment[:busy]]
        after = _tile(of, Warps(*(array[:busy] for array in state)), mine, at, *(_like(x, q) for x in where))
        for array, changed in zip(state, after, strict=True):
            array[:busy] = changed
    order = _like(np.argsort(segment * config["WARPS"] + warp), q)
    by_warp = (array[order].reshape(-1, config["WARPS"], *array.shape[1:]) for array in state)
    return _of_all_warps(of, Warps(*by_warp), _like(shares.head[some], q))


def _tile(of: Exact, so_far: Warps, queries: Queries, position: Any, sequence: Any, head: Any) -> Warps:
    """The tokens of one tile that a warp has, the first at `position`: scores, weights, sums."""
    fma, exp2 = of.arithmetic.fma, of.arithmetic.exp2
    token = position[:, None] + np.arange(of.config["TOKENS"], like=position)
    tokens = _tokens(of, token, sequence, head)
    products = np.matmul(tokens.keys, queries.integers) * (16 if of.config["BITS"] == 4 else 1)  # exact
    score = products.astype(np.float32)
    every = np.zeros_like(score)
    sums, factors = queries.sums[:, None] + every, queries.factors[:, None] + every
    if of.by_channel:
        score = score + sums
    else:
        score = fma(tokens.k_zero[..., None] + every, sums, score) * tokens.k_scale[..., None]
    score = fma(score, factors, of.arithmetic.log2(tokens.v_scale)[..., None] + every)
    seen = token[..., None] < queries.ends[:, None]
    if of.window:
        seen &= token[..., None] >= queries.ends[:, None] - of.window
    score = np.where(seen, score, np.float32(-np.inf))

    # Weights are of the largest score so far: sums become of a larger one.
    largest = np.fmax(so_far.largest, np.where(np.isnan(score), LOWEST, score).max(axis=1))
    less = exp2(so_far.largest - largest)[:, None]
    weights, sums = so_far.weights * less, so_far.sums * less
    weight = exp2(score - largest[:, None])
    inverse = of.arithmetic.reciprocal(tokens.v_scale)[..., None] + every
    half = weight.astype(np.float16)
    for first in range(0, of.config["TOKENS"], 8):
        eight = slice(first, first + 8)
        weights = fma(weight[:, eight], inverse[:, eight], weights)
    for first in range(0, of.config["TOKENS"], _MMA):
        sixteen = slice(first, first + _MMA)
        sums = of.arithmetic.mma(tokens.operands[:, sixteen].swapaxes(1, 2), half[:, sixteen], sums)
    return Warps(largest, weights, sums)


def _tokens(of: Exact, token: Any, sequence: Any, head: Any) -> Tokens:
    """Tokens [n, tokens] of sequences and kv heads [n]. Behind the end scales are 1 and zeros 0."""
    cache = of.cache
    length = cache.lengths[sequence].astype(np.int64)[:, None]
    place = np.minimum(token, length - 1)
    page, offset = cache.block_table[sequence[:, None], place // cache.page_size], place % cache.page_size
    views = PageView.of(cache.pool, cache.scheme, cache.page_size, cache.head_dim)
    raw, constants = [], []
    for view in (views.part(0), views.part(1)):
        raw.append(view.features[page, head[:, None], offset])
        neutral = np.zeros((*token.shape, 2), np.float32, like=raw[0])
        neutral[..., 0] = 1
        pairs = neutral if view.constants is None else view.constants[page, head[:, None], offset].astype(np.float32)
        constants.append(np.where((token < length)[..., None], pairs, neutral))
    (k_scale, k_zero), (v_scale, v_zero) = (np.moveaxis(pair, -1, 0) for pair in constants)
    keys = unpack_u4(as_words(raw[0])) if of.config["BITS"] == 4 else raw[0].view(np.int8 if of.signed else np.uint8)
    zero = (np.ones_like(v_zero) if of.by_channel else v_zero).astype(np.float16)  # by channel: the sum of the weights
    operands = np.concatenate([_operands(of, raw[1]), zero[..., None]], axis=-1)
    return Tokens(keys.astype(np.float64), operands, k_scale, k_zero, v_scale)


def _operands(of: Exact, raw: Any) -> Any:
    """Values as FP16 subnormals: of 8 bits without a sign, of 4 bits low nibbles in their bytes, 16 times the high."""
    if of.config["BITS"] == 8:
        integers = raw ^ np.uint8(0x80) if of.signed else raw
    else:
        words = raw.reshape(*raw.shape[:-1], -1, 4)
        integers = np.stack([words, words & np.uint8(0xF0)], axis=-2).reshape(*raw.shape[:-1], -1)
    return integers.astype(np.uint16).view(np.float16)


# Sums ----------------------------------------------------------------------------------------------------------------


def _of_all_warps(of: Exact, warps: Warps, head: Any) -> Part:
    """The sums [n, warps, ..] of a segment's warps, put together, with values in their units and less their zeros."""
    fma, D, W = of.arithmetic.fma, of.cache.head_dim, of.config["WARPS"]
    by_dim, zeros = warps.sums[:, :, :D], warps.sums[:, :, D]
    back = np.full((D, 1), 2.0**24, np.float32, like=zeros)  # integers were subnormals
    if of.config["BITS"] == 4:
        words = by_dim.reshape(*by_dim.shape[:2], D // 8, 2, 4, -1)
        low, high = words[:, :, :, 0], words[:, :, :, 1]
        by_dim = np.stack([low - high, high], axis=3).reshape(by_dim.shape)
        back.reshape(D // 8, 2, 4)[:, 1] = 2.0**20
    weights = zeros if of.by_channel else _pairwise(warps.weights, 2)
    largest = warps.largest.max(axis=1)
    factor = of.arithmetic.exp2(warps.largest - largest[:, None])
    values = np.zeros_like(by_dim[:, 0])
    for w in range(W):
        values = fma(by_dim[:, w], factor[:, w, None] + np.zeros_like(values), values)
    weights, zeros = (_in_halves(x * factor) for x in (weights, zeros))
    values, zeros = values * back, zeros[:, None]
    if of.by_channel:
        scale, zero = (array[head][:, :, None] for array in _channel(of.cache.v_channel))
        return Part(largest, weights, (values - zeros * (np.float32(128) if of.signed else zero)) * scale)
    return Part(largest, weights, values - zeros)


def _pairwise(x: Any, axis: int) -> Any:
    """Sums of neighbours, then of these, and so on."""
    while x.shape[axis] > 1:
        even, odd = (x[(*(slice(None),) * axis, slice(i, None, 2))] for i in (0, 1))
        x = even + odd
    return x.squeeze(axis)


def _in_halves(x: Any) -> Any:
    """Sums over axis 1, of 4, 8 or 16 lanes: the first half and the second, and so on."""
    lanes = next(n for n in (4, 8, 16) if n >= x.shape[1])
    x = np.concatenate([x, np.zeros((len(x), lanes - x.shape[1], x.shape[2]), np.float32, like=x)], axis=1)
    while x.shape[1] > 1:
        x = x[:, : x.shape[1] // 2] + x[:, x.shape[1] // 2 :]
    return x[:, 0]


def _put_together(of: Exact, shares: Shares, parts: Part) -> Part:
    """The units' parts: what others hand over is added to the first one's, up to 4 or 8 of them at a time."""
    whole = Part(*(array[_like(shares.first, array)] for array in parts))
    for at_once, few in ((4, True), (8, False)):
        others = np.where((shares.parts > 5) != few, shares.parts - 1, 0)
        for done in range(0, int(others.max()), at_once):
            units = np.flatnonzero(others > done)
            next_ones = np.minimum(done + np.arange(at_once), others[units][:, None] - 1)
            more = Part(*(array[_like(shares.first[units][:, None] + 1 + next_ones, array)] for array in parts))
            there = done + np.arange(at_once) < others[units][:, None]
            units = _like(units, whole.weights)
            added = _add(of, Part(*(array[units] for array in whole)), more, _like(there, whole.weights))
            for array, changed in zip(whole, added, strict=True):
                array[units] = changed
    return whole


def _add(of: Exact, whole: Part, more: Part, there: Any) -> Part:
    """Parts [n, some, ..] to one of each unit, in the order of the tokens; those that are not there count nothing."""
    fma, exp2 = of.arithmetic.fma, of.arithmetic.exp2
    largest = np.fmax(whole.largest, more.largest.max(axis=1))
    less = exp2(whole.largest - largest)
    weights, values = whole.weights * less, whole.values * less[:, None]
    for i in range(there.shape[1]):
        factor = np.where(there[:, i, None], exp2(more.largest[:, i] - largest), np.float32(0))
        values = fma(more.values[:, i], factor[:, None] + np.zeros_like(values), values)
        weights = fma(more.weights[:, i], factor, weights)
    return Part(largest, weights, values)


def _store(of: Exact, out: Any, lse: Any, whole: Part, shares: Shares) -> None:
    """Divided by the sum of weights; the logarithm to base e. Of no weights 0 and -inf."""
    none = whole.weights == 0
    inverse = np.where(none, np.float32(0), of.arithmetic.reciprocal(whole.weights))
    rows = (whole.values * inverse[:, None]).swapaxes(1, 2)
    logarithm = np.where(none, np.float32(-np.inf), (whole.largest + of.arithmetic.log2(whole.weights)) * LN2)
    row, _, there = _rows(of, shares, shares.first)
    at, there = _like(row[there], out), _like(there, out)
    out[at] = bfloat16_bits(rows[there]) if of.config["BF16"] else rows[there].astype(np.float16)
    lse[at] = logarithm[there]


def _channel(constants: Any) -> tuple[Any, Any]:
    assert constants is not None
    scale, zero = constants
    return scale, zero


def _like(array: Any, example: Any) -> Any:
    """A NumPy array where `example` lies."""
    return np.asarray(array, like=example)
