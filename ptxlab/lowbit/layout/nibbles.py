"""Eight weights in one u32: the micro-kernel word, COMET's word, and the MMA word.

The *micro-kernel word*, which all dequantisers but COMET's take, holds e0..e3 in the low nibbles of bytes 0..3 and
e4..e7 in the high nibbles. One AND with 0x0f0f0f0f frees the first four, a shift and the same AND the other four, each
already in its own byte.

COMET stores signed nibbles and wants each in the *high* half of its byte, where zero extension gives 16·w (COMET §4.3).
Its "location switch" exchanges W1 and W2 of every four, so that neighbours in a register are no longer neighbours in
memory. Carried over to a word of eight: e0..e3 sit in the high nibbles of bytes 0..3 and e4..e7 in the low nibbles, so
one AND with 0xf0f0f0f0 gives 16·e0..16·e3, and a shift left by 4 with the same AND gives 16·e4..16·e7. It is the
micro-kernel word with its two halves exchanged: the half that needs no shift is the high one here.

An *MMA word* is a micro-kernel word of the eight weights that lane 4·g + t holds of one row in one k32 step of an 8-bit
MMA: e0..e3 are weights 4·t..4·t+3 and e4..e7 are weights 16+4·t..16+4·t+3. So the two halves that the dequantiser
frees are two registers of operand A, as the MMA takes them:

    bits   31-28 27-24 23-20 19-16 15-12 11-8  7-4   3-0
    weight  19+4t  3+4t 18+4t  2+4t 17+4t  1+4t 16+4t   4t     (k within the 32 of the step)
    low nibbles -> register of k 0-15, high nibbles -> register of k 16-31, of the same row

`exchange_nibbles` makes COMET's form of an MMA word.
"""

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import S8, U8, U32, as_bytes, as_words, unpack_nibbles

_LOW = np.uint32(0x0F0F0F0F)


def pack_u4(values: U8, argument: str = "q4") -> U32:
    """Pack u8 [..., K] with values 0..15 into micro-kernel words u32 [..., K/8].

    Raises ArgumentError, which calls the array `argument`: dtype not u8, K not a positive multiple of 8, a value above
    15 (with the place of the first).
    """
    require_nibbles(argument, values)
    halves = as_words(values).reshape(*values.shape[:-1], -1, 2)  # each holds four weights, one per byte
    return halves[..., 0] | halves[..., 1] << np.uint32(4)


def unpack_u4(words: U32) -> U8:
    """Unpack micro-kernel words u32 [..., K/8] to weights u8 [..., K]; the inverse of `pack_u4`."""
    _require_dtype("words", words, np.uint32)
    return unpack_nibbles(words)


def pack_s4(values: S8, argument: str = "q4") -> U32:
    """Pack s8 [..., K] with values -8..7 into micro-kernel words u32 [..., K/8], as two's complement nibbles.

    Raises ArgumentError, which calls the array `argument`: dtype not s8, K not a positive multiple of 8, a value
    outside -8..7 (with the place of the first).
    """
    _require_dtype(argument, values, np.int8)
    _require_whole_words(argument, values)
    is_outside = (values < -8) | (values > 7)
    if is_outside.any():
        place = [int(i) for i in np.argwhere(is_outside)[0]]
        raise ArgumentError(argument, "must lie in -8..7", f"{argument}{place} is {values[tuple(place)]}")
    return pack_u4(values.view(np.uint8) & np.uint8(15), argument)


def unpack_s4(words: U32) -> S8:
    """Unpack micro-kernel words u32 [..., K/8] to weights s8 [..., K]; the inverse of `pack_s4`."""
    return (unpack_u4(words) << np.uint8(4)).view(np.int8) >> np.int8(4)


def pack_comet(values: S8, argument: str = "q4") -> U32:
    """Pack s8 [..., K] with values -8..7 into COMET words u32 [..., K/8].

    Raises ArgumentError as `pack_s4` does.
    """
    return exchange_nibbles(pack_s4(values, argument))


def unpack_comet(words: U32) -> S8:
    """Unpack COMET words u32 [..., K/8] to weights s8 [..., K]; the inverse of `pack_comet`."""
    return unpack_s4(exchange_nibbles(words))


def pack_mma(values: U8, argument: str = "q4") -> U32:
    """Pack u8 [..., K] with values 0..15 into MMA words u32 [..., K/8], four words per 32 weights.

    Raises ArgumentError as `pack_u4` does, and for K not a multiple of 32.
    """
    require_nibbles(argument, values)
    if values.shape[-1] % 32:
        raise ArgumentError(argument, "the last axis must be a multiple of 32", f"shape {values.shape}")
    halves = as_words(values).reshape(*values.shape[:-1], -1, 2, 4)  # the 16-weight halves of each k32 step
    return (halves[..., 0, :] | halves[..., 1, :] << np.uint32(4)).reshape(*values.shape[:-1], -1)


def unpack_mma(words: U32) -> U8:
    """Unpack MMA words u32 [..., K/8] to weights u8 [..., K]; the inverse of `pack_mma`.

    Raises ArgumentError: dtype not u32, or not four words per 32 weights.
    """
    _require_dtype("words", words, np.uint32)
    if words.ndim == 0 or words.shape[-1] % 4:
        raise ArgumentError("words", "the last axis must be a multiple of 4", f"shape {words.shape}")
    leading_shape, count = words.shape[:-1], words.shape[-1]
    steps = words.reshape(*leading_shape, count // 4, 4)
    halves = np.stack([steps & _LOW, steps >> np.uint32(4) & _LOW], axis=-2)
    return as_bytes(halves).reshape(*leading_shape, 8 * count)


def exchange_nibbles(words: U32) -> U32:
    """Exchange the two nibbles of every byte of words u32 [...]: converts between a word's plain and its COMET form."""
    _require_dtype("words", words, np.uint32)
    return (words & _LOW) << np.uint32(4) | words >> np.uint32(4) & _LOW


def require_nibbles(argument: str, values: U8) -> None:
    """Raise ArgumentError unless `values` is u8 [..., 8k] with values 0..15, naming the place of the first other."""
    _require_dtype(argument, values, np.uint8)
    _require_whole_words(argument, values)
    if values.max() > 15:
        place = [int(i) for i in np.argwhere(values > 15)[0]]
        raise ArgumentError(argument, "must be at most 15", f"{argument}{place} is {values[tuple(place)]}")


def _require_dtype(argument: str, array: U8 | S8 | U32, dtype: type[np.generic]) -> None:
    if getattr(array, "dtype", None) != dtype:
        raise ArgumentError(argument, f"dtype must be {np.dtype(dtype)}", getattr(array, "dtype", type(array).__name__))


def _require_whole_words(argument: str, values: U8 | S8) -> None:
    if values.ndim == 0 or values.size == 0 or values.shape[-1] % 8:
        raise ArgumentError(argument, "the last axis must be a positive multiple of 8", f"shape {values.shape}")
