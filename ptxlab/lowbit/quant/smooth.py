"""SmoothAttention (QServe §4.2): outliers of the keys' channels moved into the queries, which are not quantised.

λ_i = max(max|K_i|, max|K_{i+D/2}|)^alpha for the pair i, i + D/2 that RoPE rotates, so that it commutes with RoPE;
W_Q <- Λ W_Q and W_K <- Λ⁻¹ W_K, biases likewise, one Λ per KV head, repeated over its query heads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F32
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit.quant.inputs import as_float_matrix, as_floats, extremes, float_matrix


@dataclass(frozen=True, eq=False)
class SmoothedAttention:
    """Projections whose scores are those of the originals and whose keys are smooth; see `smooth_attention`.

    `w_q` [Hq·D, K], `w_k` [Hkv·D, K], `b_q` [Hq·D] and `b_k` [Hkv·D] or None, each of the dtype that it came in;
    `factor` f64 [Hkv, D], the λ by which keys were divided and queries multiplied.
    """

    w_q: npt.NDArray[Any]
    w_k: npt.NDArray[Any]
    b_q: npt.NDArray[Any] | None
    b_k: npt.NDArray[Any] | None
    factor: npt.NDArray[np.float64]


@break_graph
def smooth_attention(
    w_q: npt.NDArray[Any],
    w_k: npt.NDArray[Any],
    keys_max: npt.NDArray[Any],
    *,
    head_dim: int,
    b_q: npt.NDArray[Any] | None = None,
    b_k: npt.NDArray[Any] | None = None,
    alpha: float = 0.5,
) -> SmoothedAttention:
    """Fold SmoothAttention into the projections of queries and keys, computed in float64 and rounded once.

    Args:
        w_q: float [Hq·D, K], NumPy or CuPy.
        w_k: float [Hkv·D, K].
        keys_max: max|K| of each channel over calibration data, with or without RoPE, float [Hkv, D]. A pair of
            channels that are always zero stays as it is.
        head_dim: D, even.
        b_q: bias float [Hq·D] or None.
        b_k: bias float [Hkv·D] or None.
        alpha: strength, in 0..1.

    Raises:
        ArgumentError: shapes that do not fit together, a NaN or an infinity (with the place of the first), a negative
            maximum, alpha outside 0..1, or a result beyond its dtype.
    """
    if not isinstance(alpha, (int, float, np.number)) or not 0 <= alpha <= 1:
        raise ArgumentError("alpha", "must lie in 0..1", repr(alpha))
    if not isinstance(head_dim, (int, np.integer)) or head_dim < 2 or head_dim % 2:
        raise ArgumentError("head_dim", "must be a positive even number", repr(head_dim))
    peaks = as_float_matrix("keys_max", keys_max)
    w_k, w_q = float_matrix("w_k", w_k), float_matrix("w_q", w_q)
    Hkv, Hq = _heads("w_k", w_k, head_dim), _heads("w_q", w_q, head_dim)
    if peaks.shape != (Hkv, head_dim):
        raise ArgumentError("keys_max", f"must be [{Hkv}, {head_dim}] as w_k is", f"shape {peaks.shape}")
    if peaks.min() < 0:
        raise ArgumentError("keys_max", "must not be negative", float(peaks.min()))
    if Hq % Hkv:
        raise ArgumentError("w_q", f"must have a multiple of w_k's {Hkv} heads", Hq)
    if w_q.shape[1] != w_k.shape[1]:
        raise ArgumentError("w_q", f"K must be w_k's {w_k.shape[1]}", w_q.shape[1])
    factor = _factor(peaks, alpha)
    key_factors, query_factors = factor.reshape(-1), np.repeat(factor, Hq // Hkv, axis=0).reshape(-1)
    return SmoothedAttention(
        w_q=_scale_finite("w_q", w_q, query_factors[:, None]),
        w_k=_scale_finite("w_k", w_k, 1 / key_factors[:, None]),
        b_q=None if b_q is None else _scaled_bias("b_q", b_q, query_factors),
        b_k=None if b_k is None else _scaled_bias("b_k", b_k, 1 / key_factors),
        factor=factor,
    )


def _factor(peaks: F32, alpha: float) -> npt.NDArray[np.float64]:
    halves = peaks.astype(np.float64).reshape(len(peaks), 2, -1)
    pairs = halves.max(axis=1) ** alpha
    pairs = np.where(pairs == 0, 1.0, pairs)
    return np.concatenate([pairs, pairs], axis=1)


def _heads(argument: str, w: npt.NDArray[Any], head_dim: int) -> int:
    extremes(argument, w)  # refuses what is not finite
    if len(w) % head_dim:
        raise ArgumentError(argument, f"must have a multiple of head_dim {head_dim} rows", len(w))
    return len(w) // head_dim


def _scaled_bias(argument: str, bias: npt.NDArray[Any], factor: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    bias = as_floats(argument, bias)
    if bias.shape != factor.shape:
        raise ArgumentError(argument, f"must be [{factor.size}]", f"shape {bias.shape}")
    extremes(argument, bias)
    return _scale_finite(argument, bias, factor)


def _scale_finite(argument: str, x: npt.NDArray[Any], factor: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        scaled_values = (x.astype(np.float64) * factor).astype(x.dtype)
    is_lost = ~np.isfinite(scaled_values.astype(np.float64))
    if is_lost.any():
        place = [int(i) for i in np.argwhere(is_lost)[0]]
        raise ArgumentError(
            argument, f"must stay finite in {x.dtype} when smoothed", f"an overflow at {argument}{place}"
        )
    return scaled_values
