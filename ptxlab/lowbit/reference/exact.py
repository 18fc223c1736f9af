"""The truth behind the dequantisers, lane by lane in wide integers: no word, no carry, no wrap.

Shapes as in `reference.dequant`: `q4` u8 [R, K], per-group arguments [R, K/g].
"""

import numpy as np

from ptxlab.hardware.words import S32, U8, Bool, spread

_LANES = 4  # weights that share a word, and so a carry chain


def exact_lqq(q4: U8, scale: U8, offset: U8) -> S32:
    """Compute q4·s1 + a - 128 as int32 [R, K]: the weight that `dequant_lqq` gives while no lane overflows."""
    K = q4.shape[-1]
    return q4.astype(np.int32) * spread(scale, K) + spread(offset, K) - 128


def exact_qoq(q4: U8, scale: U8, zero: U8) -> S32:
    """Compute (q4 - z)·s1 as int32 [R, K]: the weight that `dequant_qoq_vadd4` gives while it fits s8."""
    K = q4.shape[-1]
    return (q4.astype(np.int32) - spread(zero, K)) * spread(scale, K)


def fits_s8(values: S32) -> Bool:
    """Find the exact integers that fit s8."""
    return (values >= -128) & (values <= 127)


def presub_wrong(q4: U8, scale: U8, zero: U8) -> Bool:
    """Find the weights in which `dequant_qoq_presub` differs from `exact_qoq`, bool [R, K], by following the borrow.

    Modulo 2^32 the packed product is the sum of the exact lane products, each at its byte. So lane i receives what the
    lanes below it in the word could not keep in their bytes (a borrow if negative), and it is right only if it
    receives nothing and its own value fits s8.
    """
    exact = exact_qoq(q4, scale, zero)
    lanes = exact.reshape(*exact.shape[:-1], -1, _LANES)
    carry = np.zeros_like(lanes)
    for lane in range(1, _LANES):
        carry[..., lane] = (lanes[..., lane - 1] + carry[..., lane - 1]) // 256
    is_disturbed: Bool = (carry != 0).reshape(exact.shape)
    return is_disturbed | ~fits_s8(exact)
