"""What each dequantisation kernel computes, on logical (unpacked) arrays.

These functions model the whole 32-bit word as the kernel computes it. A word holds four consecutive weights, one per
byte, so a lane that leaves its byte disturbs its neighbours here exactly as it does on the GPU. `reference.exact` has
the results that no lane can disturb.

Shapes: `q4` u8 [R, K] with values 0..15; per-group arguments [R, K/g], from which g follows, a multiple of 4.
"""

import numpy as np

from ptxlab.hardware.words import F16, F32, S8, S32, U8, U32, as_bytes, as_words, replicate, require_dtype, spread

_SIGN_BITS = np.uint32(0x80808080)


def dequant_lqq(q4: U8, scale: U8, offset: U8) -> S8:
    """Dequantise LQQ: one multiply-add on the packed word, then a flip of each byte's top bit (LiquidGEMM §4).

    `scale` u8 is the group scale s1, `offset` u8 the constant a = 128 + min. Gives s8 [R, K] = q4·s1 + min while no
    byte of q4·s1 + a exceeds 255.
    """
    return as_bytes(_lqq_words(q4, scale, offset) ^ _SIGN_BITS).view(np.int8)


def dequant_lqq_unsigned(q4: U8, scale: U8, offset: U8) -> U8:
    """Dequantise LQQ without the XOR: u8 [R, K] = weight + 128; the GEMM subtracts 128 times the token sum.

    QoQ at protective range 119 takes the same form, with the constant a = 128 - z·s1.
    """
    return as_bytes(_lqq_words(q4, scale, offset))


def _lqq_words(q4: U8, scale: U8, offset: U8) -> U32:
    words = as_words(q4)
    return words * _per_word(scale, words) + spread(replicate(offset), words.shape[-1])


def dequant_qoq_vadd4(q4: U8, scale: U8, offset: S8) -> S8:
    """Dequantise QoQ by a packed multiplication, then an addition that wraps in each byte (QServe §5.2.3).

    `scale` u8 is the group scale s1, `offset` s8 is -z·s1 modulo 256. Gives s8 [R, K] = (q4 - z)·s1 while no byte of
    q4·s1 exceeds 255 and the result fits s8.
    """
    require_dtype("offset", offset, np.int8)
    words = as_words(q4)
    products = as_bytes(words * _per_word(scale, words))
    return (products + spread(offset.view(np.uint8), products.shape[-1])).view(np.int8)


def dequant_qoq_vadd4_s32(q4: U8, scale: U8, offset: S8) -> S8:
    """Dequantise QoQ as `dequant_qoq_vadd4` does; the kernel only spells the addition with another instruction."""
    return dequant_qoq_vadd4(q4, scale, offset)


def dequant_qoq_saturating(q4: U8, scale: U8, zero: U8) -> S8:
    """Dequantise QoQ with a saturating subtraction: (q4 - z)·s1 clamped to s8 [R, K] (QServe §4.1).

    `scale` u8 is the group scale s1, `zero` u8 the zero point z. Level 1 needs no protective range, while no byte of
    q4·s1 or z·s1 exceeds 255.
    """
    words = as_words(q4)
    products = as_bytes(words * _per_word(scale, words)).astype(np.int16)
    offsets = zero.astype(np.uint32) * scale * np.uint32(0x01010101)
    subtrahends = as_bytes(spread(offsets, words.shape[-1])).astype(np.int16)
    return (products - subtrahends).clip(-128, 127).astype(np.int8)


def dequant_qoq_presub(q4: U8, scale: U8, zero: U8) -> S8:
    """Subtract the zero point before multiplying, on packed bytes: wrong by design (QServe Fig. 14a).

    `scale` u8 is the group scale s1, `zero` u8 the zero point z. A lane with q4 < z borrows from the lane above it, and
    the multiplication spreads the damage: s8 [R, K] misses (q4 - z)·s1 where `exact.presub_wrong` says.
    """
    words = as_words(q4)
    differences = words - spread(replicate(zero), words.shape[-1])
    return as_bytes(differences * _per_word(scale, words)).view(np.int8)


def dequant_qoq_channel(q4: U8) -> U8:
    """Unpack QoQ per channel to u8 [R, K]; the epilogue applies scale and zero point (QServe §5.2.2)."""
    require_dtype("q4", q4, np.uint8)
    return q4.copy()


def dequant_int4_naive(q4: U8) -> S8:
    """Sign-extend two's complement nibbles to s8 [R, K]: 0..7 stand for 0..7, 8..15 for -8..-1."""
    return dequant_comet(q4) >> np.int8(4)


def dequant_comet(q4: U8 | S8) -> S8:
    """Place the nibble w in the high half of its byte, COMET's zero extension: s8 [R, K] = 16·w (COMET §4.3).

    `q4` holds w as s8 -8..7 or as the nibble u8 0..15 that encodes it; the factor 16 belongs to the scale.
    """
    return (q4.view(np.uint8) << np.uint8(4)).view(np.int8)


def dequant_u4_f16(q4: U8) -> F16:
    """Combine the nibble with the bits of 1024.0 and subtract 1024: f16 [R, K] = q4, exactly."""
    require_dtype("q4", q4, np.uint8)
    biased = (q4.astype(np.uint16) | np.uint16(0x6400)).view(np.float16)
    return biased - np.float16(1024)


def dequant_u4_f16_subnormal(q4: U8) -> F16:
    """Read the nibble's own bits as an FP16 subnormal: f16 [R, K] = q4·2^-24, exactly."""
    require_dtype("q4", q4, np.uint8)
    return q4.astype(np.uint16).view(np.float16)


def dequant_s4_f16(q4: S8, scale: F16) -> F16:
    """Multiply signed INT4 by a float scale per group: f16 [R, K] = q4·scale, rounded once; `q4` s8 in -8..7."""
    require_dtype("q4", q4, np.int8)
    require_dtype("scale", scale, np.float16)
    return q4.astype(np.float16) * spread(scale, q4.shape[-1])


def scale_rows(integers: U8 | S8 | S32, scale: F32) -> F32:
    """Multiply integers [R, K] by one f32 scale per row [R], in f32: level 1, which a GEMM leaves to its epilogue."""
    return integers.astype(np.float32) * scale[:, None]


def _per_word(scale: U8, words: U32) -> U32:
    require_dtype("scale", scale, np.uint8)
    return spread(scale.astype(np.uint32), words.shape[-1])
