"""Integer matrix products and their epilogue, on logical arrays (LiquidGEMM §2, QServe §5.2)."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.hardware.floats import bfloat16_bits, fma
from ptxlab.hardware.words import F16, F32, S8, S32, U8, require_dtype

_EXACT_K = 2**53 // (128 * 255)  # float64 adds up so many products of bytes without a rounding


def gemm_accumulators(x_q: S8, weights: S32) -> S32:
    """Compute X Wᵀ modulo 2^32, as a kernel's int32 accumulators do; the order of the additions does not matter.

    Args:
        x_q: activations s8 [M, K].
        weights: integers int32 [N, K] in -128..255, what the dequantiser gives.

    Returns:
        int32 [M, N].
    """
    require_dtype("x_q", x_q, np.int8)
    if x_q.shape[1] > _EXACT_K:
        raise ValueError(f"K: at most {_EXACT_K} (got {x_q.shape[1]})")
    exact_sums = x_q.astype(np.float64) @ weights.astype(np.float64).T  # BLAS, and every partial sum is an integer
    return exact_sums.astype(np.int64).astype(np.int32)


def gemm_accumulators_channel(x_q: S8, q4: U8, zero: U8, x_sum: S32) -> S32:
    """Compute X Wᵀ of per-channel weights q4 - zero, int32 [M, N], with the token sum (QServe §5.2.2).

    The product with q4 comes first; then the zero point times the token sum is subtracted.

    QServe's Eq. 13 sums the activations before they are quantised; here the integers are summed, so that the product is
    exactly that with q4 - zero.

    Args:
        x_q: activations s8 [M, K].
        q4: weights u8 [N, K] in 0..15.
        zero: zero points u8 [N].
        x_sum: token sums int32 [M], sum of x_q over K.
    """
    return gemm_accumulators(x_q, q4.astype(np.int32)) - x_sum[:, None] * zero.astype(np.int32)


def gemm_epilogue(
    accumulators: S32, x_scale: F32, w_scale: F32, bias: F32 | None = None, out: str = "float16"
) -> npt.NDArray[Any]:
    """Compute accumulators · x_scale · w_scale (+ bias) in float32, each operation rounded; round once to the output.

    Args:
        accumulators: int32 [M, N].
        x_scale: of the tokens, f32 [M].
        w_scale: of the output channels, f32 [N].
        bias: f32 [N] or None.
        out: `float16`, `float32`, `bfloat16` (its bits, as uint16), or `int32`: the accumulators as they are.

    Returns:
        [M, N] of that dtype.
    """
    if out == "int32":
        return accumulators
    scaled_sums = accumulators.astype(np.float32) * x_scale[:, None] * w_scale
    if bias is not None:
        scaled_sums = scaled_sums + bias
    return rounded_to(scaled_sums, out)


def gemm_group_sums(x4: S8, w4: S8, x8: S8, w8: S8, group: int) -> Iterator[S32]:
    """Yield the integer sums of every group of INT4 channels in turn, then of the INT8 channels (Atom §4).

    Args:
        x4, w4: INT4 channels s8 [M, K] and [N, K].
        x8, w8: INT8 channels s8 [M, O] and [N, O]; where O is 0 their sum is 0.
        group: K is a multiple of it.

    Yields:
        int32 [M, N], K/group + 1 times.
    """
    for k in range(0, x4.shape[1], group):
        yield gemm_accumulators(x4[:, k : k + group], w4[:, k : k + group].astype(np.int32))
    yield gemm_accumulators(x8, w8.astype(np.int32))


def gemm_add_groups(sums: Iterable[S32], x_scale: F16, w_scale: F16, *, halves: bool = False) -> F32:
    """Add sum · (x_scale · w_scale) over the groups by one fma after the other, from 0 on: the kernels' order.

    A sum is exact in float32 up to 2^24, and so is the product of two FP16 scales, which `halves` rounds to FP16.

    Args:
        sums: int32 [M, N] of each group.
        x_scale, w_scale: f16 [M, G] and [N, G].

    Returns:
        f32 [M, N].
    """
    total: F32 = np.zeros_like(x_scale, dtype=np.float32, shape=(len(x_scale), len(w_scale)))
    for group, group_sums in enumerate(sums):
        scale = x_scale[:, group, None].astype(np.float32) * w_scale[:, group].astype(np.float32)
        if halves:
            scale = scale.astype(np.float16).astype(np.float32)
        total = fma(group_sums.astype(np.float32), scale, total)
    return total


def rounded_to(values: F32, out: str) -> npt.NDArray[Any]:
    """Round f32 once to `float32`, `float16`, or `bfloat16` (its bits, as uint16)."""
    if out == "bfloat16":
        return bfloat16_bits(values)
    with np.errstate(over="ignore"):  # beyond 65504 float16 is infinite, as on the GPU
        return values.astype(out)
