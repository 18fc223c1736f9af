"""Tokens as the kernel reads them from the pages."""

from typing import Any, NamedTuple

import numpy as np

from ptxlab.hardware.words import as_words
from ptxlab.lowbit.kernels.attention.exact.launched import AttentionLaunch
from ptxlab.lowbit.layout.nibbles import unpack_u4
from ptxlab.lowbit.layout.pages import PageView


class Tokens(NamedTuple):
    """Keys and values of tokens, as the kernel multiplies them.

    `keys` are integers f64 [n, tokens, D]. `operands` are values and, behind them, zeros, f16 [n, tokens, D + 1]. Scale
    and zero of keys and scale of values are f32 [n, tokens, 1].
    """

    keys: Any
    operands: Any
    k_scale: Any
    k_zero: Any
    v_scale: Any


def read(launch: AttentionLaunch, token: Any, sequence: Any, head: Any) -> Tokens:
    """Read tokens s64 [n, tokens] of sequences and kv heads [n]; beyond the end scales are 1, and zeros 0."""
    cache = launch.cache
    length = cache.lengths[sequence].astype(np.int64)[:, None]
    place = np.minimum(token, length - 1)
    page, offset = cache.block_table[sequence[:, None], place // cache.page_size], place % cache.page_size
    key_and_value_pages = PageView.of(cache.pool, cache.scheme, cache.page_size, cache.head_dim)
    raw, constants = [], []
    for view in (key_and_value_pages.part(0), key_and_value_pages.part(1)):
        raw.append(view.features[page, head[:, None], offset])
        zero = np.zeros(token.shape, np.float16, like=token)
        scale = np.ones_like(zero)
        if view.constants is not None:
            pairs = view.constants[page, head[:, None], offset]
            scale, zero = (np.where(token < length, pairs[..., i], x) for i, x in enumerate((scale, zero)))
        constants.append((scale, zero))
    (k_scale, k_zero), (v_scale, v_zero) = constants
    keys = unpack_u4(as_words(raw[0])) if launch.bits == 4 else raw[0].view(np.int8 if launch.signed else np.uint8)
    zeros = np.ones_like(v_zero) if launch.by_channel else v_zero  # by channel they are the sum of the weights
    operands = np.concatenate([_operands(launch, raw[1]), zeros[..., None]], axis=-1)
    scales = (x[..., None].astype(np.float32) for x in (k_scale, k_zero, v_scale))
    return Tokens(keys.astype(np.float64), operands, *scales)


def _operands(launch: AttentionLaunch, bytes_of_values: Any) -> Any:
    """Convert values to FP16 subnormals: 8 bits without a sign; 4 bits as low nibbles, and high ones in their bytes."""
    if launch.bits == 8:
        integers = bytes_of_values ^ np.uint8(0x80) if launch.signed else bytes_of_values
    else:
        words = bytes_of_values.reshape(*bytes_of_values.shape[:-1], -1, 4)
        integers = np.stack([words & np.uint8(0x0F), words], axis=-2).reshape(*bytes_of_values.shape[:-1], -1)
    return integers.astype(np.uint16).view(np.float16)
