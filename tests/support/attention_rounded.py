"""attention_kv4_sm90 in NumPy, with all its roundings, and with an MMA that truncates as Hopper's: nothing of its code.

On hardware an MMA aligns its 16 products, and the sum so far, to the largest of their exponents, where FP16's subnormal
numbers count 2⁻¹⁴, cuts off what is below 2⁻²⁵ of that, adds up, and cuts the sum off to FP32 (Fasi et al. 2021).
"""

import numpy as np

from ptxlab.bench.attention.problem import SCALE
from ptxlab.layout import KVCache, gather
from ptxlab.quant import QuantizedKV

LARGEST, TILE, SMALLEST, BITS = 32512, 64, -14, 25
F32 = np.float32


def attention(q: np.ndarray, cache: KVCache, warps: int, promoted: int) -> tuple[np.ndarray, np.ndarray]:
    """(out f16, lse f32) as of the kernel, of one sequence q f16 [1, 1, Hq, D], whose tiles `warps` take in turns."""
    (k,), (v,) = gather(cache)
    heads = q[0, 0].reshape(k.shape[1], -1, k.shape[2])
    found = [_head(x, _of_head(k, h), _of_head(v, h), warps, promoted) for h, x in enumerate(heads)]
    out, lse = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return out[None, None], lse[None, None]


def _of_head(x: QuantizedKV, head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers [n, D], scales and zeros [n]."""
    return x.values[:, head].astype(np.float64), x.scale[:, head].astype(F32), x.zero[:, head].astype(F32)


def _scores(q: np.ndarray, keys: tuple[np.ndarray, ...], log_scale: np.ndarray) -> np.ndarray:
    """In base 2, with the logarithm of the value's scale: f32 [n, r]."""
    integers, scale, zero = keys
    unit = np.maximum(np.abs(q).max(axis=-1).astype(F32), F32(2.0**-100)) * F32(1 / LARGEST)
    power = F32(1) / unit
    numbers = np.rint(q.astype(np.float64) * power[:, None])
    sums, column = (integers @ numbers.T * 16).astype(F32), (-16 * numbers.sum(axis=-1)).astype(F32)
    x = _fma(zero[:, None], column, sums) * scale[:, None]
    return _fma(x, unit * (F32(SCALE) * F32(1.44269504) / F32(16)), log_scale[:, None])


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b + c).astype(F32)


def _head(
    q: np.ndarray, keys: tuple[np.ndarray, ...], values: tuple[np.ndarray, ...], warps: int, promoted: int
) -> tuple[np.ndarray, np.ndarray]:
    (integers, scale, zero), D = values, q.shape[-1]
    n, tiles = len(integers), -(-len(integers) // (TILE * warps))
    x = np.full((tiles * warps * TILE, len(q)), -np.inf, F32)
    x[:n] = _scores(q, keys, np.log2(scale))
    inverse, places = np.ones(len(x), F32), np.zeros((len(x), D + D // 2 + 1))
    inverse[:n] = 1 / scale
    low = np.arange(D) % 8 < 4
    places[:n, :D] = np.where(low, integers, 16 * integers + np.roll(integers, 4, axis=-1)) * 2.0**-24
    places[:n, D:-1], places[:n, -1] = integers[:, low] * 2.0**-24, zero
    turns = [array.reshape(tiles, warps, TILE, -1) for array in (x, inverse, places)]

    m, summed = np.full((warps, 1, len(q)), -1e30, F32), np.zeros((warps, 8, len(q)), F32)
    total = np.zeros((warps, len(q), D + 1), F32)
    o = np.zeros((warps, len(q), places.shape[1]), F32)
    for turn, (scores, back, numbers) in enumerate(zip(*turns, strict=True)):
        before, m = m, np.maximum(m, scores.max(axis=1, keepdims=True))
        less = np.exp2(before - m)
        summed, total, o = summed * less, total * less.swapaxes(1, 2), o * less.swapaxes(1, 2)
        weights = np.exp2(scores - m)
        for i in range(0, TILE, 8):
            summed = _fma(weights[:, i : i + 8], back[:, i : i + 8], summed)
        for i in range(0, TILE, 16):
            o = mma(o, weights[:, i : i + 16].astype(np.float16).astype(np.float64), numbers[:, i : i + 16])
        if (turn + 1) * TILE % promoted == 0 or turn == tiles - 1:
            o[..., :D][..., ~low] -= o[..., D:-1]
            total, o = total + np.concatenate([o[..., :D], o[..., -1:]], axis=-1), np.zeros_like(o)
    most = m.max(axis=0)
    factor = np.exp2(m - most)
    total, summed = (
        (total * factor.swapaxes(1, 2)).sum(axis=0, dtype=F32),
        (summed * factor).sum(axis=(0, 1), dtype=F32),
    )
    out = total[:, :D] * np.where(low, F32(2.0**24), F32(2.0**20)) - total[:, -1:]
    return (out * (F32(1) / summed)[:, None]).astype(np.float16), (most[0] + np.log2(summed)) * F32(0.693147181)


def mma(c: np.ndarray, weights: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """c f32 [warps, r, N] + weights [warps, 16, r] times numbers [warps, 16, N], truncated."""
    products = weights[..., None] * numbers[:, :, None]
    exponents = (_exponent(weights)[..., None] + _exponent(numbers)[:, :, None]).max(axis=1)
    exponents = np.where(c == 0, exponents, np.maximum(exponents, np.frexp(c)[1] - 1))
    unit = np.exp2(exponents - float(BITS))
    total = (np.trunc(products / unit[:, None]).sum(axis=1) + np.trunc(c / unit)) * unit
    mantissa, exponent = np.frexp(total)
    return np.ldexp(np.trunc(np.ldexp(mantissa, 24)), exponent - 24).astype(F32)


def _exponent(x: np.ndarray) -> np.ndarray:
    return np.where(x == 0, SMALLEST, np.maximum(np.frexp(x)[1] - 1, SMALLEST))
