"""What the kernels of attention share: a problem, its arrays, and the oracle."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.kernels.attention.bound import allowed_error
from ptxlab.lowbit.kernels.attention.roundings import HALF, Operand, Roundings
from ptxlab.lowbit.layout import KVCache, gather, scatter
from ptxlab.lowbit.layout.pages import page_bytes
from ptxlab.lowbit.quant import KV_SCHEMES
from ptxlab.spec import Arrays, KernelSpec
from ptxlab.spec.tolerance import Allowed

Pair: TypeAlias = tuple[np.ndarray, np.ndarray]

FORM = "rotated"  # of kernels for caches whose keys are rotated
ROTATED_CONSTANTS: Mapping[str, int] = {"ROTATED": 1}
_WILD_PAGE = 0x7FFFFFF0  # where a table has no page: far outside every pool


def draw_cache(
    rng: np.random.Generator,
    lengths: np.ndarray,
    *,
    Hkv: int,
    P: int,
    pages: int,
    D: int = 128,
    page_size: int = 64,
    scheme: str = "kv4",
) -> KVCache:
    """Draw a cache of random tokens with outlier channels of keys, in pages of any order.

    Parts that no sequence uses are as bad as can be: nibbles at random, scales and zeros NaN, pages outside the pool.
    """
    used_pages = ceil_div(lengths, page_size)
    shape = pages, 2, Hkv, page_bytes(scheme, page_size, D)
    pool = rng.integers(0, 256, shape, dtype=np.uint8)
    if not KV_SCHEMES[scheme].by_channel:
        pool[..., -page_size * 4 :] = np.frombuffer(np.float16(np.nan).tobytes() * 2 * page_size, np.uint8)
    free_pages, table = rng.permutation(pages), np.full((len(lengths), P), _WILD_PAGE, np.int32)
    keys, values = [], []
    for b, length in enumerate(lengths):
        table[b, : used_pages[b]], free_pages = free_pages[: used_pages[b]], free_pages[used_pages[b] :]
        k, v = rng.standard_normal((2, length, Hkv, D), dtype=np.float32)
        k[:, :, :: D // 4] *= rng.uniform(10, 100, (1, Hkv, 4)).astype(np.float32)
        keys.append(k)
        values.append(v)
    return cache_of(keys, values, pool, table, page_size=page_size, scheme=scheme)


def cache_of(
    keys: list[np.ndarray],
    values: list[np.ndarray],
    pool: np.ndarray,
    table: np.ndarray,
    *,
    page_size: int,
    scheme: str,
) -> KVCache:
    """Quantise the tokens f32 [lengths[b], Hkv, D] of every sequence and write them to `pool` by the table."""
    constants: list[Any] = [None, None]
    if KV_SCHEMES[scheme].by_channel:
        heads = np.ones((1, *keys[0].shape[1:]), np.float32)  # so that there is a token
        constants = [quant.calibrate_kv(np.concatenate([heads, *tokens]), scheme) for tokens in (keys, values)]
    cache = KVCache(
        pool=pool,
        block_table=table,
        lengths=np.array([len(k) for k in keys], np.int32),
        page_size=page_size,
        head_dim=keys[0].shape[-1],
        scheme=scheme,
        k_channel=constants[0],
        v_channel=constants[1],
    )
    quantized_kv = (
        [quant.quantize_kv(x, scheme, c) for x in tokens] for tokens, c in zip((keys, values), constants, strict=True)
    )
    scatter(cache, *quantized_kv)
    return cache


def draw_lengths(rng: np.random.Generator, B: int, max_length: int, pages: int, page_size: int) -> np.ndarray:
    """Draw ragged lengths of 0 to `max_length` tokens that fit `pages`: one full, one empty, one of a single token."""
    lengths = rng.integers(0, max_length + 1, B)
    lengths[: min(B, 3)] = (max_length, 1, 0)[: min(B, 3)]
    while (ceil_div(lengths, page_size)).sum() > pages:
        lengths[lengths.argmax()] //= 2
    return rng.permutation(lengths)


def cache_arrays(cache: KVCache) -> Arrays:
    """Return the arguments that every kernel takes of a cache."""
    return {"pool": cache.pool, "table": cache.block_table, "lengths": cache.lengths}


def channel_constants(cache: KVCache) -> Arrays:
    """Return scale and zero of keys and values if the scheme has them by channel, otherwise nothing."""
    if cache.k_channel is None or cache.v_channel is None:
        return {}
    (k_scale, k_zero), (v_scale, v_zero) = cache.k_channel, cache.v_channel
    return {"k_scale": k_scale, "k_zero": k_zero, "v_scale": v_scale, "v_zero": v_zero}


def attention(q: np.ndarray, cache: KVCache, softmax_scale: float, window: int = 0, own_kv: Pair | None = None) -> Pair:
    """Compute the reference: out f64 [B, T, Hq, D] and lse f64 [B, T, Hq] of q [B, T, Hq, D]; `window` 0 for none.

    For a rotated cache queries and keys of `own_kv` are rotated in float32; the contract includes that, as it includes
    RoPE in float32. `own_kv` are the last keys and values of each sequence, [T, Hkv, D], in place of the cache's.
    """
    pairs = [
        reference.attention(x, *_dequantize(cache, k, v, own_kv), scale=softmax_scale, window=window or None)
        for x, k, v in zip(cache.rotate(q), *gather(cache), strict=True)
    ]
    return np.stack([out for out, _ in pairs]), np.stack([lse for _, lse in pairs])


def _dequantize(cache: KVCache, k: quant.QuantizedKV, v: quant.QuantizedKV, own_kv: Pair | None) -> Pair:
    """Dequantise the keys and values of a sequence, and put own ones in place of the last."""
    if own_kv is None:
        return k.dequantize(), v.dequantize()
    k_own, v_own = (x[max(0, len(x) - len(k.values)) :] for x in own_kv)
    cached_tokens = len(k.values) - len(k_own)
    keys, values = (x.dequantize()[:cached_tokens] for x in (k, v))
    return np.concatenate([keys, cache.rotate(k_own)]), np.concatenate([values, v_own])


def bound_error(
    q: np.ndarray,
    cache: KVCache,
    softmax_scale: float,
    roundings: Roundings,
    window: int = 0,
    stored: float = HALF,
    own_kv: Pair | None = None,
) -> tuple[Allowed, Allowed]:
    """Bound the error that `attention` may have (`bound.allowed_error`)."""
    bounds = []
    for x, k, v in zip(cache.rotate(q).astype(np.float64), *gather(cache), strict=True):
        T, L = len(x), len(k.values)
        token, key = np.arange(L - T, L)[:, None], np.arange(L)
        is_visible = (key <= token) & (key > token - window if window else True)
        keys, values = (
            (Operand.of_numbers(n, cache.scheme) for n in _dequantize(cache, k, v, own_kv)) if own_kv else (k, v)
        )
        bounds.append(
            allowed_error(x, keys, values, is_visible, scale=softmax_scale, roundings=roundings, stored=stored)
        )
    outs, lses = zip(*bounds, strict=True)
    return stack_bounds(outs), stack_bounds(lses)


def rotated_form(spec: KernelSpec) -> KernelSpec:
    """Return the form of an attention that rotates queries, for caches whose keys are rotated."""

    def example(rng: np.random.Generator, **sizes: Any) -> Arrays:
        logical = spec.example(rng, **sizes)
        return {**logical, "cache": replace(logical["cache"], rotated=True)}

    return replace(
        spec,
        form="_".join(filter(None, (spec.form, FORM))),
        summary=f"{spec.summary}; queries rotated as the cache's keys are",
        choose=lambda s: {**spec.config_for(s), **ROTATED_CONSTANTS},
        example=example,
        example_sizes=tuple(sizes for sizes in spec.example_sizes if not sizes.get("channel")),
    )


def stack_bounds(bounds: Sequence[Allowed]) -> Allowed:
    """Stack the bounds of sequences."""
    return Allowed(np.stack([bound.per_element for bound in bounds]), np.stack([bound.rms for bound in bounds]))
