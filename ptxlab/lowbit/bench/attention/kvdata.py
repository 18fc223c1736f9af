"""Test data for caches in which a missing page or token shows in the results, at every length.

Integers are uniform; scales and zeros decide what counts. Queries have a common direction, as those of models do: keys
that lie along it stand out for all heads, and those against it are hardly seen. So every page has its part in the
results, and the last token of a sequence as much as a page.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ptxlab.lowbit.bench.shapes import HEAD_DIM, PAGE
from ptxlab.lowbit.layout import KVCache, page_bytes
from ptxlab.lowbit.layout.pages import PageView
from ptxlab.lowbit.quant import KV_SCHEMES, QuantizedKV, calibrate_kv

_OFFSET = 0.5  # of queries
_CHANNEL_RANGES = 1.6, 3.0  # of keys and of values by channel, to both sides of 0
_STANDING_OUT = 1.6, 0.0  # the last token's key: 4 or 5 above one whose numbers are around 0


class Constants(NamedTuple):
    """Random ranges and zero points of keys and values, each [pages, Hkv, PAGE].

    `k_range` and `v_range` are the range of a token's numbers. `k_zero` and `v_zero` are the place of 0 in the range,
    from 0 to 1.
    """

    k_range: np.ndarray
    k_zero: np.ndarray
    v_range: np.ndarray
    v_zero: np.ndarray


Channel = tuple[np.ndarray, np.ndarray]  # scale and zero
Data = Callable[[np.random.Generator, tuple[int, ...]], Constants]


def spread(rng: np.random.Generator, shape: tuple[int, ...]) -> Constants:
    """Draw constants that give every token some weight: scores are roughly Gaussian around 0."""
    return Constants(
        rng.uniform(2.5, 4, shape), np.full(shape, 0.5), rng.uniform(4, 8, shape), rng.uniform(0, 1, shape)
    )


def dominant(rng: np.random.Generator, shape: tuple[int, ...]) -> Constants:
    """Draw constants that give one token of every page 50 times the weight of the others."""
    is_dominant = np.arange(shape[-1]) == rng.integers(0, shape[-1], shape[:-1])[..., None]
    zero_shares = np.where(is_dominant, 0.15, 0.85)
    return Constants(np.ones(shape), zero_shares, rng.uniform(4, 8, shape), rng.uniform(0, 1, shape))


def one_sign(rng: np.random.Generator, shape: tuple[int, ...]) -> Constants:
    """Draw constants that make the values of a page all positive or all negative, so that their sum nearly cancels."""
    sign = rng.integers(0, 2, shape[:-1])[..., None]
    return spread(rng, shape)._replace(v_zero=np.broadcast_to(sign, shape).astype(np.float64))


DATA: tuple[Data, ...] = (spread, dominant, one_sign)


def random_queries(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw queries f16 [..., D]: Gaussian around a common direction."""
    return (rng.standard_normal(shape, np.float32) + np.float32(_OFFSET)).astype(np.float16)


def random_pages(
    rng: np.random.Generator, pages: int, Hkv: int, scheme: str = "kv4", data: Data = spread, D: int = HEAD_DIM
) -> np.ndarray:
    """Draw pages u8 [pages, 2, Hkv, page_bytes] of 64 tokens, as a quantiser could have written them."""
    shape = pages, 2, Hkv, page_bytes(scheme, PAGE, D)
    random_bytes = np.frombuffer(rng.bytes(int(np.prod(shape))), np.uint8).reshape(shape).copy()
    constants = PageView.of(random_bytes, scheme, PAGE, D).constants
    if KV_SCHEMES[scheme].low == -127:
        random_bytes[random_bytes == 0x80] = 0x81  # no quantiser writes -128
    if constants is not None:  # per token and head; those by channel are not in the pages
        levels = 2.0 ** KV_SCHEMES[scheme].bits - 1
        drawn_data = data(rng, (pages, Hkv, PAGE))
        scales = np.stack([drawn_data.k_range, drawn_data.v_range], axis=1) / levels
        zeros = np.rint(np.stack([drawn_data.k_zero, drawn_data.v_zero], axis=1) * levels)
        constants[...] = np.stack([scales, zeros], axis=-1)
    return random_bytes


def random_channels(rng: np.random.Generator, Hkv: int, scheme: str, D: int = HEAD_DIM) -> Iterator[Channel]:
    """Yield scale and zero f32 [Hkv, D] of keys and of values by channel, calibrated on uniform numbers."""
    for largest_range in _CHANNEL_RANGES:
        yield calibrate_kv(rng.uniform(-largest_range, largest_range, (PAGE, Hkv, D)).astype(np.float32), scheme)


def roll_tokens(pages: Any, by: int, scheme: str, D: int = HEAD_DIM) -> Any:
    """Copy the pages with their integers rolled by `by` tokens; scales and zeros stay."""
    rolled = pages.copy()
    features = PageView.of(rolled, scheme, PAGE, D).features
    features[...] = np.roll(features, by % PAGE, axis=-2)
    return rolled


def let_last_stand_out(cache: KVCache) -> None:
    """Give the last token of every sequence a key that counts as much as a page of others, in place."""
    kv_scheme = KV_SCHEMES[cache.scheme]
    levels = 2.0**kv_scheme.bits - 1
    last_positions, sequences = cache.lengths - 1, np.arange(len(cache.lengths), like=cache.lengths)
    view = PageView.of(cache.pool, cache.scheme, PAGE, cache.head_dim).part(0)
    page = cache.block_table[sequences, last_positions // PAGE]
    if view.constants is None:  # of a scheme by channel: the upper half of the integers does it
        assert cache.k_channel is not None
        shape = len(sequences), cache.num_kv_heads, cache.head_dim
        upper_integers = np.random.default_rng(0).integers(
            (kv_scheme.low + kv_scheme.high + 1) // 2, kv_scheme.high + 1, shape
        )
        tokens = QuantizedKV(
            cache.scheme, np.array(upper_integers.astype(kv_scheme.dtype), like=sequences), *cache.k_channel
        )
        view.write(tokens, page * PAGE + last_positions % PAGE)
    else:
        view.constants[page, :, last_positions % PAGE, 0] = _STANDING_OUT[0] / levels
        view.constants[page, :, last_positions % PAGE, 1] = _STANDING_OUT[1]
