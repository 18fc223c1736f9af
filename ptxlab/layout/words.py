"""Eight weights in one u32: the micro-kernel word, and COMET's.

The micro-kernel word holds e0..e3 in the low nibbles of bytes 0..3 and e4..e7 in the high nibbles: one AND with
0x0f0f0f0f frees the first four, a shift and the same AND the other four, each already in its own byte.

COMET stores signed nibbles and wants each in the *high* half of its byte, where zero extension gives 16·w (COMET §4.3).
Its "location switch" exchanges W1 and W2 of every four, so that neighbours in a register are no longer neighbours in
memory. Carried over to a word of eight: e0..e3 sit in the high nibbles of bytes 0..3 and e4..e7 in the low nibbles, so
one AND with 0xf0f0f0f0 gives 16·e0..16·e3, and a shift left by 4 with the same AND gives 16·e4..16·e7. It is the
micro-kernel word with its two halves exchanged: the half that needs no shift is the high one here.
"""

import math

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.reference.packed import S8, U8, U32, as_bytes, as_words


def pack_u4(values: U8, argument: str = "q4") -> U32:
    """Pack u8 [..., K] with values 0..15 into micro-kernel words u32 [..., K/8].

    Raises ArgumentError, which calls the array `argument`: dtype not u8, K not a positive multiple of 8, a value above
    15 (with the place of the first).
    """
    _require_dtype(argument, values, np.uint8)
    _require_whole_words(argument, values)
    if (values > 15).any():
        place = [int(i) for i in np.argwhere(values > 15)[0]]
        raise ArgumentError(argument, "must be at most 15", f"{argument}{place} is {values[tuple(place)]}")
    halves = values.reshape(*values.shape[:-1], -1, 2, 4)
    return as_words(halves[..., 0, :] | halves[..., 1, :] << np.uint8(4))[..., 0]


def unpack_u4(words: U32) -> U8:
    """The weights u8 [..., K] of micro-kernel words u32 [..., K/8]; the inverse of `pack_u4`."""
    _require_dtype("words", words, np.uint32)
    four = as_bytes(words[..., None])
    halves = np.stack([four & np.uint8(15), four >> np.uint8(4)], axis=-2)
    return halves.reshape(*words.shape[:-1], 8 * math.prod(words.shape[-1:]))


def pack_comet(values: S8, argument: str = "q4") -> U32:
    """Pack s8 [..., K] with values -8..7 into COMET words u32 [..., K/8].

    Raises ArgumentError, which calls the array `argument`: dtype not s8, K not a positive multiple of 8, a value
    outside -8..7 (with the place of the first).
    """
    _require_dtype(argument, values, np.int8)
    _require_whole_words(argument, values)
    outside = (values < -8) | (values > 7)
    if outside.any():
        place = [int(i) for i in np.argwhere(outside)[0]]
        raise ArgumentError(argument, "must lie in -8..7", f"{argument}{place} is {values[tuple(place)]}")
    return pack_u4(_exchange_halves(values.view(np.uint8) & np.uint8(15)), argument)


def unpack_comet(words: U32) -> S8:
    """The weights s8 [..., K] of COMET words u32 [..., K/8]; the inverse of `pack_comet`."""
    nibbles = _exchange_halves(unpack_u4(words))
    return (nibbles << np.uint8(4)).view(np.int8) >> np.int8(4)


def _exchange_halves(values: U8) -> U8:
    return values.reshape(*values.shape[:-1], values.shape[-1] // 8, 2, 4)[..., ::-1, :].reshape(values.shape)


def _require_dtype(argument: str, array: U8 | S8 | U32, dtype: type[np.generic]) -> None:
    if getattr(array, "dtype", None) != dtype:
        raise ArgumentError(argument, f"dtype must be {np.dtype(dtype)}", getattr(array, "dtype", type(array).__name__))


def _require_whole_words(argument: str, values: U8 | S8) -> None:
    if values.ndim == 0 or values.size == 0 or values.shape[-1] % 8:
        raise ArgumentError(argument, "the last axis must be a positive multiple of 8", f"shape {values.shape}")
