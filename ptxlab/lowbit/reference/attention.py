"""Attention of one sequence in float64, the rotary embedding, and the values behind a quantised KV cache."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptxlab.hardware.words import F32

F64: TypeAlias = npt.NDArray[np.float64]
# Kinds of scaling that `rope_tables` knows, and what each of them needs.
ROPE_SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "per_pair": ("factors",),
}


def attention(
    q: npt.NDArray[Any], k: npt.NDArray[Any], v: npt.NDArray[Any], *, scale: float, window: int | None = None
) -> tuple[F64, F64]:
    """Compute softmax(q kᵀ · scale) v of one sequence: its last T tokens attend to themselves and all earlier tokens.

    Query head h attends to KV head h // (Hq / Hkv). Query t is token L - T + t. A query before the sequence's first
    token sees nothing, nor does any query of an empty sequence.

    Args:
        q: queries, float [T, Hq, D].
        k: keys, float [L, Hkv, D]; Hkv divides Hq.
        v: values, float [L, Hkv, D].
        scale: of the scores, usually D^-0.5.
        window: how many tokens a query sees at most, its own included; None for all.

    Returns:
        (out f64 [T, Hq, D], lse f64 [T, Hq]): lse is the natural logarithm of the sum of exp(score). Where nothing is
        seen, out is 0 and lse is -inf.
    """
    (T, Hq, D), (L, Hkv, _) = q.shape, k.shape
    if Hq % Hkv:
        raise ValueError(f"q: {Hkv} KV heads must divide its heads (got {Hq})")
    q, k, v = q.astype(np.float64), k.astype(np.float64), v.astype(np.float64)
    if L == 0:
        return np.zeros_like(q), np.full_like(q[:, :, 0], -np.inf)
    ratio = Hq // Hkv
    queries_by_kv_head = q.reshape(T, Hkv, ratio, D).transpose(1, 2, 0, 3).reshape(Hkv, ratio * T, D)
    scores = (queries_by_kv_head @ k.transpose(1, 2, 0) * scale).reshape(Hkv, ratio, T, L)
    scores = np.where(_visible(q, k, window), scores, -np.inf)

    peak = scores.max(axis=-1)
    peak = np.where(np.isinf(peak), 0.0, peak)  # -inf where nothing is seen, and -inf - -inf is no number
    weights = np.exp(scores - peak[..., None])
    total = weights.sum(axis=-1)
    with np.errstate(divide="ignore"):  # log(0) is the -inf that is wanted
        lse = peak + np.log(total)
    mean = weights.reshape(Hkv, ratio * T, L) @ v.transpose(1, 0, 2)
    mean = mean.reshape(Hkv, ratio, T, D) / np.where(total == 0, 1.0, total)[..., None]
    return mean.transpose(2, 0, 1, 3).reshape(T, Hq, D), lse.transpose(2, 0, 1).reshape(T, Hq)


def _visible(q: F64, k: F64, window: int | None) -> npt.NDArray[np.bool_]:
    """Compute which keys each query sees, bool [T, L], on the arrays' device."""
    T, L = len(q), len(k)
    token = np.arange(L - T, L, like=q)[:, None]
    key = np.arange(L, like=k)
    is_seen = key <= token
    is_visible: npt.NDArray[np.bool_] = is_seen if window is None else is_seen & (key > token - window)
    return is_visible


def rope(x: npt.NDArray[Any], cos: npt.NDArray[Any], sin: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rotate elements i and i + D/2 of each head as a pair, in the tables' dtype.

    Each multiplication and addition is rounded.

    Args:
        x: queries or keys, float [..., tokens, heads, D], converted to that dtype first.
        cos: of the tokens' angles, [..., tokens, D/2]; float32 as kernels compute, or float64.
        sin: as cos.

    Returns:
        [..., tokens, heads, D] of the tables' dtype: first half x1·cos - x2·sin, second half x2·cos + x1·sin.
    """
    half_dims = x.shape[-1] // 2
    x1, x2 = x[..., :half_dims].astype(cos.dtype), x[..., half_dims:].astype(cos.dtype)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def rotate_heads(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rotate queries or keys by a Hadamard matrix of blocks of min(D, 128), in Sylvester's order, over √block.

    The matrix is symmetric and orthogonal: x rotated twice is x, and queries and keys that are both rotated have the
    same scores. An element far larger than the others of its block is spread over the block, so that 4 bits lose less
    (QuaRot, arXiv 2404.00456). Sums and differences of dims 1 apart, then 2, 4 ... apart, and at last a product with
    block^-0.5 are rounded one by one: this is the kernels' order.

    Args:
        x: float [..., D], D 64, 128 or 256; in float32 unless it is float64.

    Returns:
        [..., D], float32 or float64.
    """
    D, dtype = x.shape[-1], np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
    block = min(D, 128)
    if block < 2 or block & (block - 1) or D % block:
        raise ValueError(f"x: D must be a power of two, or a multiple of 128 (got {D})")
    rotated_heads = x.astype(dtype)
    distance = 1
    while distance < block:
        pairs = rotated_heads.reshape(*x.shape[:-1], D // (2 * distance), 2, distance)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        rotated_heads = np.stack([first + second, first - second], axis=-2).reshape(x.shape)
        distance *= 2
    normalized: npt.NDArray[Any] = rotated_heads * dtype.type(block**-0.5)
    return normalized


def rope_tables(
    positions: npt.NDArray[Any], head_dim: int, base: float = 10000.0, scaling: dict[str, Any] | None = None
) -> tuple[F32, F32]:
    """Compute cosines and sines for `rope` in float64 and round them once to float32.

    The angle of position p and pair i is p·f(i), with f(i) = base^(-2i / head_dim) unless it is scaled:

    - `linear`: f / factor for every pair.
    - `llama3`: a frequency turns f·L / 2π times in the L = `original_max_position_embeddings` positions of training.
      One that turns more than `high_freq_factor` times stays, one that turns less than `low_freq_factor` times is
      divided by `factor`, and in between the two are mixed linearly.
    - `per_pair`: f(i) / factors[i], which is how GGUF files keep `llama3`.

    Args:
        positions: integers [...].
        head_dim: D, even.
        base: `rope_theta` of a Hugging Face config.
        scaling: None, or `rope_scaling` of a Hugging Face config: `rope_type` (or `type`), and what it needs.

    Returns:
        (cos, sin), f32 [..., D/2].

    Raises:
        ValueError: an odd head_dim, a kind of scaling that is not known, or a number that it lacks.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim: must be even, 2 or more (got {head_dim})")
    frequency = float(base) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angle = np.asarray(positions, np.float64)[..., None] * _scale_frequencies(frequency, scaling or {})
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def _scale_frequencies(frequency: F64, scaling: dict[str, Any]) -> F64:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        raise ValueError(f"scaling: rope_type must be one of {', '.join(ROPE_SCALINGS)} (got {kind})")
    if kind == "per_pair":
        factors = np.asarray(scaling.get("factors", ()), np.float64)
        if factors.shape != frequency.shape or not (factors > 0).all():
            raise ValueError(f"scaling: per_pair needs {len(frequency)} factors above 0 (got {factors.shape})")
        divided: F64 = frequency / factors
        return divided
    needs = ROPE_SCALINGS[kind]
    if missing_names := [name for name in needs if not isinstance(scaling.get(name), int | float)]:
        raise ValueError(f"scaling: {kind} needs the number {missing_names[0]} (got {scaling.get(missing_names[0])})")
    factor, *llama3_numbers = (float(scaling[name]) for name in needs) if needs else (1.0,)
    if not llama3_numbers:
        return frequency / factor
    low, high, trained = llama3_numbers
    if not 0 < low < high:
        raise ValueError(f"scaling: 0 < low_freq_factor < high_freq_factor (got {low:g}, {high:g})")
    unscaled_share = np.clip((frequency * trained / (2 * np.pi) - low) / (high - low), 0, 1)
    mixed_frequency: F64 = unscaled_share * frequency + (1 - unscaled_share) * frequency / factor
    return mixed_frequency


def dequantize_kv(values: npt.NDArray[Any], scale: npt.NDArray[Any], zero: npt.NDArray[Any]) -> F32:
    """Compute (values - zero)·scale in float32, each operation rounded.

    Args:
        values: u8 or s8 [..., tokens, heads, D].
        scale: f16 [..., tokens, heads] per token and head, or f32 [heads, D] per channel.
        zero: integers, as scale.

    Returns:
        f32 [..., tokens, heads, D]; exact for scales of float16.
    """
    if scale.dtype == np.float16:
        scale, zero = scale[..., None], zero[..., None]
    dequantized: F32 = (values.astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32)
    return dequantized
