"""The prefill kernels in their own order of operations: attention_kv4_prefill_sm90, in parts or not, and
attention_kv4_prefill_mma_sm80, which adds up in the same order.

A row is one query of one head. Scores of a block of keys are sums of products of 16 dims each; weights are relative to
the row's largest score so far, unless that is exceeded by little; sums over values take 16 keys at a time. Each of four
lanes adds up weights of its own columns. What no row of a tile sees changes nothing, so tiles matter to parts alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.hardware.words import as_words
from ptxlab.lowbit.kernels.attention.exact.arithmetic import EMULATED, Arithmetic, hopper
from ptxlab.lowbit.kernels.attention.exact.launched import require_constants, to_device_of
from ptxlab.lowbit.kernels.attention.prefill import ROWS
from ptxlab.lowbit.layout import KVCache
from ptxlab.lowbit.layout.nibbles import unpack_u4
from ptxlab.lowbit.layout.pages import PageView
from ptxlab.lowbit.reference import bfloat16_bits
from ptxlab.spec.dtypes import floats

_MMA = 16  # dims, or keys, of one product
_LANES, _NEIGHBOURS = 4, 2  # that share a row of scores; columns that follow each other in a lane
_LOWEST = np.float32(-1e30)  # below any score, yet finite
_SMALLEST = np.float32(2.0**-100)  # largest element of a query, at least
_LOG2E, _LN2 = np.float32(1.44269504), np.float32(0.693147181)


class Sums(NamedTuple):
    """Sums of rows over some blocks of keys.

    `largest` is what weights are relative to, f32 [heads, rows]. `weights` are the sums of weights, f32 [heads, rows,
    4], one per lane. `values` are the sums of weights times values, f32 [heads, rows, D].
    """

    largest: Any
    weights: Any
    values: Any


class TileRows(NamedTuple):
    """Queries of a tile as f16 [heads, rows, D].

    `factors` multiply the scores, f32 [heads, rows]. `ends` are the first token that each row does not see, s64 [rows].
    """

    queries: Any
    factors: Any
    ends: Any


class QueryTile(NamedTuple):
    """Rows `first` to `stop` of a sequence, of every kv head, and the blocks of keys that some of them see."""

    first: int
    stop: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class PrefillLaunch:
    """The kernel, compiled with the constants `config`, on one sequence: `queries` new tokens, its last ones.

    `own_kv` are these tokens' keys and values [queries, Hkv, D] as `q` is, or None where they are the cache's.
    """

    cache: KVCache
    sequence: int
    context: int
    queries: int
    group: int
    softmax_scale: float
    window: int
    parts: int
    config: Mapping[str, int]
    arithmetic: Arithmetic
    own_kv: tuple[Any, Any] | None = None

    @property
    def block_keys(self) -> int:
        """Tokens of a block of keys."""
        return self.config["KEYS"]

    def tiles(self) -> Iterator[QueryTile]:
        """Yield the tiles of the sequence."""
        rows = ROWS if "WARPS" not in self.config else 16 * self.config["WARPS"]
        cached_tokens = self.context - self.queries
        for first in range(0, self.queries * self.group, rows):
            first_end = cached_tokens + first // self.group + 1
            last_end = cached_tokens + min((first + rows - 1) // self.group, self.queries - 1) + 1
            begin = max(0, first_end - self.window) // self.block_keys if self.window else 0
            end = max(begin, ceil_div(last_end, self.block_keys)) if last_end > 0 else begin
            yield QueryTile(first, min(first + rows, self.queries * self.group), begin, end)

    def parts_of(self, tile: QueryTile) -> list[range]:
        """Return the blocks of each part of a tile."""
        blocks = tile.end - tile.begin
        count = max(1, min(self.parts, blocks // self.config["PART_BLOCKS"])) if self.config.get("SPLIT") else 1
        cuts = [tile.begin + blocks * part // count for part in range(count + 1)]
        return [range(begin, end) for begin, end in pairwise(cuts)]


def prefill(
    q: Any,
    cache: KVCache,
    starts: Any,
    *,
    softmax_scale: float,
    config: Mapping[str, int],
    window: int = 0,
    parts: int = 1,
    arithmetic: Arithmetic | None = None,
    own_kv: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:
    """Attend as the prefill kernels do, bit for bit.

    Args:
        q: f16 [N, Hq, D], or u16 with the bits of bfloat16; NumPy or CuPy, as the cache.
        cache: what lies beyond its lengths, in pages and table, may be anything.
        starts: s32 [B + 1]: sequence b has queries starts[b] .. starts[b + 1].
        softmax_scale: of the scores.
        config: constants of the variant (`PREFILL.config_for`, `PREFILL_SM80.config_for`), with BF16 for bfloat16.
        window: tokens that a query sees, 0 for all.
        parts: of a tile at most, where config has SPLIT.
        arithmetic: of what runs it: by default `EMULATED` for NumPy arrays, and `hopper()` for CuPy arrays.
        own_kv: keys and values [N, Hkv, D] of the queries' own tokens, as q, where config has OWN: not rotated.

    Returns:
        (out like q, lse f32 [N, Hq]); rows that belong to no sequence are 0 and -inf.

    Raises:
        ArgumentError: constants of the variant are not those of the arrays.
    """
    require_constants(config, q, cache, OWN=int(own_kv is not None))
    if arithmetic is None:
        arithmetic = EMULATED if isinstance(q, np.ndarray) else hopper()
    out, lse = np.zeros_like(q), np.zeros(q.shape[:-1], np.float32, like=q) - np.float32(np.inf)
    group, lengths = q.shape[1] // cache.num_kv_heads, cache.lengths.tolist()
    for sequence, (begin, end) in enumerate(pairwise(starts.tolist())):
        if begin == end:
            continue
        launch = PrefillLaunch(
            cache, sequence, lengths[sequence], end - begin, group, softmax_scale, window, parts, config, arithmetic,
            None if own_kv is None else (own_kv[0][begin:end], own_kv[1][begin:end]),
        )  # fmt: skip
        with np.errstate(all="ignore"):
            out[begin:end], lse[begin:end] = _attend(launch, q[begin:end])
    return out, lse


def _attend(launch: PrefillLaunch, q: Any) -> tuple[Any, Any]:
    """Attend for the queries of one sequence: out like q [queries, Hq, D], and lse [queries, Hq]."""
    heads, D = launch.cache.num_kv_heads, launch.cache.head_dim
    rows = floats(q).reshape(launch.queries, heads, launch.group, D).swapaxes(0, 1).reshape(heads, -1, D)
    tiles = [_attend_tile(launch, tile, rows[:, tile.first : tile.stop]) for tile in launch.tiles()]
    out, lse = (np.concatenate(arrays, axis=1) for arrays in zip(*tiles, strict=True))
    out = bfloat16_bits(out) if launch.config["BF16"] else out.astype(np.float16)
    token_arrays = (x.reshape(heads, launch.queries, launch.group, *x.shape[2:]).swapaxes(0, 1) for x in (out, lse))
    out, lse = (x.reshape(launch.queries, heads * launch.group, *x.shape[3:]) for x in token_arrays)
    return out, lse


def _attend_tile(launch: PrefillLaunch, tile: QueryTile, x: Any) -> tuple[Any, Any]:
    """Attend for the rows f32 [heads, rows, D] of a tile: results f32 [heads, rows, D], logarithms [heads, rows]."""
    rows = _round_queries(launch, tile, x)
    parts = [_sum_blocks(launch, rows, blocks) for blocks in launch.parts_of(tile)]
    sums = parts[0] if len(parts) == 1 else _merge(launch, parts)
    a, b, c, d = (sums.weights[..., lane] for lane in range(_LANES))
    add, mul = launch.arithmetic.add, launch.arithmetic.mul
    weights = add(add(a, b), add(c, d))
    is_empty = weights == 0
    inverse = np.where(is_empty, np.float32(0), launch.arithmetic.exact_reciprocal(weights))
    lse = np.where(is_empty, np.float32(-np.inf), mul(add(sums.largest, launch.arithmetic.log2(weights)), _LN2))
    return mul(sums.values, inverse[..., None]), lse


def _round_queries(launch: PrefillLaunch, tile: QueryTile, x: Any) -> TileRows:
    """Round queries to f16, over the power of two that leads each row. A row with an infinity becomes NaN."""
    x = launch.cache.rotate(x)
    largest = np.abs(x).max(axis=-1)  # NaN of a NaN
    exponent = np.where(np.isnan(largest), _SMALLEST, np.maximum(largest, _SMALLEST)).view(np.int32) & 0x7F800000
    power, inverse = exponent.view(np.float32), (0x7F000000 - exponent).view(np.float32)
    queries = launch.arithmetic.mul(x, (inverse + (largest - largest))[..., None]).astype(np.float16)
    token = np.minimum(np.arange(tile.first, tile.stop) // launch.group, launch.queries - 1)
    factors = launch.arithmetic.mul(np.float32(launch.softmax_scale) * _LOG2E, power)
    return TileRows(queries, factors, to_device_of(launch.context - launch.queries + token + 1, x))


def _restore(launch: PrefillLaunch, block: int) -> tuple[Any, Any]:
    """Restore a block's keys and values: f16 [heads, tokens, D] each, 0 behind the last token."""
    cache = launch.cache
    token = block * launch.block_keys + np.arange(launch.block_keys, like=cache.pool)
    cached_tokens = launch.context if launch.own_kv is None else launch.context - launch.queries
    place = np.clip(token, 0, max(0, cached_tokens - 1))
    page, offset = cache.block_table[launch.sequence, place // cache.page_size], place % cache.page_size
    key_and_value_pages = PageView.of(cache.pool, cache.scheme, cache.page_size, cache.head_dim)
    is_stored = (token < cached_tokens)[:, None]

    def restore(view: PageView) -> Any:
        assert view.constants is not None
        integers = unpack_u4(as_words(view.features[page, :, offset])).astype(np.float32)
        pairs = view.constants[page, :, offset].astype(np.float32)
        scale, zero = (np.where(is_stored, pairs[..., i], np.float32(0))[..., None] for i in (0, 1))
        return ((integers - zero) * scale).astype(np.float16).swapaxes(0, 1)

    keys, values = restore(key_and_value_pages.part(0)), restore(key_and_value_pages.part(1))
    if launch.own_kv is not None:
        is_own = ((token >= cached_tokens) & (token < launch.context))[:, None]
        row = np.clip(token - cached_tokens, 0, launch.queries - 1)
        k, v = (floats(x)[row].swapaxes(0, 1) for x in launch.own_kv)  # [heads, tokens, D]
        keys = np.where(is_own, cache.rotate(k).astype(np.float16), keys)
        values = np.where(is_own, v.astype(np.float16), values)
    return keys, values


def _sum_blocks(launch: PrefillLaunch, rows: TileRows, blocks: range) -> Sums:
    """Add up blocks of keys, one after the other."""
    fma, mul, exp2 = launch.arithmetic.fma, launch.arithmetic.mul, launch.arithmetic.exp2
    shape, headroom = rows.queries.shape, np.float32(launch.config["HEADROOM"])
    largest, weights, values = (
        np.zeros(shape, np.float32, like=rows.queries) for shape in (shape[:2], (*shape[:2], _LANES), shape)
    )
    largest = largest + _LOWEST
    for block in blocks:
        k, v = _restore(launch, block)
        score = _scores(launch, rows, k, block)
        largest_score = np.where(np.isnan(score), np.float32(-np.inf), score).max(axis=-1)
        previous_largest, peak = largest, mul(largest_score, rows.factors)
        largest = np.where(peak > previous_largest + headroom, peak, previous_largest)
        rescale = exp2(previous_largest - largest)[..., None]
        weight = exp2(fma(score, rows.factors[..., None], -largest[..., None]))
        weights = fma(weights, rescale, _by_lane(launch, weight))
        values = _multiply(launch, weight.astype(np.float16), v, mul(values, rescale))
    return Sums(largest, weights, values)


def _scores(launch: PrefillLaunch, rows: TileRows, keys: Any, block: int) -> Any:
    """Multiply queries and keys: f32 [heads, rows, tokens]; -inf for what is not seen."""
    start = np.zeros((*rows.queries.shape[:2], launch.block_keys), np.float32, like=keys)
    score = _multiply(launch, rows.queries, keys.swapaxes(1, 2), start)
    token, ends = block * launch.block_keys + np.arange(launch.block_keys, like=keys), rows.ends[:, None]
    is_seen = token < ends
    if launch.window:
        is_seen = is_seen & (token >= ends - launch.window)
    return np.where(is_seen, score, np.float32(-np.inf))


def _multiply(launch: PrefillLaunch, a: Any, b: Any, sums: Any) -> Any:
    """Add a [heads, rows, n] times b [heads, n, columns] to sums, 16 of n at a time."""
    for first in range(0, a.shape[-1], _MMA):
        terms = slice(first, first + _MMA)
        sums = launch.arithmetic.mma(a[..., terms], b[:, terms], sums)
    return sums


def _by_lane(launch: PrefillLaunch, weight: Any) -> Any:
    """Add up the weights [heads, rows, tokens] of each lane's columns: f32 [heads, rows, 4]."""
    columns = weight.reshape(*weight.shape[:2], -1, _LANES, _NEIGHBOURS)
    total = np.zeros_like(columns[:, :, 0, :, 0])
    for eight in range(columns.shape[2]):
        for neighbour in range(_NEIGHBOURS):
            total = launch.arithmetic.add(total, columns[:, :, eight, :, neighbour])
    return total


def _merge(launch: PrefillLaunch, parts: list[Sums]) -> Sums:
    """Add up the parts of a tile in the order of their keys: statistics first, then values."""
    fma, mul, exp2 = launch.arithmetic.fma, launch.arithmetic.mul, launch.arithmetic.exp2
    largest, weights = np.zeros_like(parts[0].largest) + _LOWEST, np.zeros_like(parts[0].weights)
    for part in parts:
        previous_largest, largest = largest, np.maximum(largest, part.largest)
        factor, rescale = (exp2(x - largest)[..., None] for x in (part.largest, previous_largest))
        weights = fma(part.weights, factor, mul(weights, rescale))
    values = np.zeros_like(parts[0].values)
    for part in parts:
        values = fma(part.values, exp2(part.largest - largest)[..., None], values)
    return Sums(largest, weights, values)
