"""Integer matrix products and their epilogue, on logical arrays (LiquidGEMM §3, QServe §5.2)."""

import numpy as np

from ptxlab.reference.packed import S8, S32, require_dtype

_EXACT_K = 2**53 // (128 * 255)  # float64 adds up so many products of bytes without a rounding


def gemm_accumulators(x_q: S8, weights: S32) -> S32:
    """X Wᵀ as a kernel's int32 accumulators hold it: modulo 2^32, so the order of the additions does not matter.

    Args:
        x_q: activations s8 [M, K].
        weights: integers int32 [N, K] in -128..255, what the dequantiser gives.

    Returns:
        int32 [M, N].
    """
    require_dtype("x_q", x_q, np.int8)
    if x_q.shape[1] > _EXACT_K:
        raise ValueError(f"K: at most {_EXACT_K} (got {x_q.shape[1]})")
    exact = x_q.astype(np.float64) @ weights.astype(np.float64).T  # BLAS, and every partial sum is an integer
    return exact.astype(np.int64).astype(np.int32)
