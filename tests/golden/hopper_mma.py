"""Operands of mma.m16n8k16 in FP16 on which its rounding shows, and the instruction itself, on either backend."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

import ptxlab
from ptxlab import gpu

RECORDED = Path(__file__).parent / "hopper_mma.npz"

# A warp per product: row-major A [16, 16], B [16, 8], C and D [16, 8].
SOURCE = """
#include "mma_f16.cuh"
__device__ unsigned pair(const unsigned short* x, int first, int second) { return x[first] | unsigned(x[second]) << 16; }

extern "C" __global__ void __launch_bounds__(32)
multiply(const unsigned short* a, const unsigned short* b, const float* c, float* d) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4 * 2;
    a += size_t(blockIdx.x) * 256, b += size_t(blockIdx.x) * 128, c += size_t(blockIdx.x) * 128, d += size_t(blockIdx.x) * 128;
    unsigned x[4], y[2];
    float sum[4];
    for (int i = 0; i < 4; ++i) {
        const int at = (g + i % 2 * 8) * 16 + t + i / 2 * 8;
        x[i] = pair(a, at, at + 1);
    }
    for (int i = 0; i < 2; ++i) y[i] = pair(b, (t + i * 8) * 8 + g, (t + i * 8 + 1) * 8 + g);
    for (int i = 0; i < 4; ++i) sum[i] = c[(g + i / 2 * 8) * 8 + t + i % 2];
    ptxlab::mma_f16(sum, x[0], x[1], x[2], x[3], y[0], y[1]);
    for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + t + i % 2] = sum[i];
}
"""  # noqa: E501

Operands = tuple[np.ndarray, np.ndarray, np.ndarray]
Case = Callable[[np.random.Generator, int], Operands]


def halves(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw any finite f16, subnormals and zeros of both signs among them."""
    exponent = rng.integers(0, 31, shape) * rng.integers(0, 2, shape)
    bits = exponent << 10 | rng.integers(0, 1024, shape) | rng.integers(0, 2, shape) << 15
    return np.where(rng.random(shape) < 0.1, bits & 0x8000, bits).astype(np.uint16).view(np.float16)


def singles(rng: np.random.Generator, shape: tuple[int, ...], low: int = -60, high: int = 20) -> np.ndarray:
    """Draw f32 of both signs, all bits in use, from 2^low to 2^high; some are zero."""
    numbers = np.ldexp(rng.uniform(1, 2, shape), rng.integers(low, high, shape)) * rng.choice((-1, 1), shape)
    return np.where(rng.random(shape) < 0.05, 0, numbers).astype(np.float32)


def weights(rng: np.random.Generator, n: int) -> np.ndarray:
    """Draw the weights of a softmax, in [0, 1].

    In some matrices most of them are small, down to subnormal ones.
    """
    falls = rng.uniform(0, 25, (n, 1, 1))
    return np.exp2(-falls * rng.random((n, 16, 8))).astype(np.float16)


def nibbles(rng: np.random.Generator, n: int) -> Operands:
    """Draw integers as subnormals, times weights: the values of attention."""
    a = rng.integers(0, 256, (n, 16, 16)) & rng.choice((0xFF, 0xF0, 0x0F, 0), (n, 16, 1))
    return a.astype(np.uint16).view(np.float16), weights(rng, n), np.abs(singles(rng, (n, 16, 8), -50, -5))


def zero_points(rng: np.random.Generator, n: int) -> Operands:
    """Draw integers as they are, times weights: the zeros of attention."""
    a = rng.integers(0, 16, (n, 16, 16)).astype(np.float16)
    return a, weights(rng, n), np.abs(singles(rng, (n, 16, 8), -10, 15))


def anything(rng: np.random.Generator, n: int) -> Operands:
    return halves(rng, (n, 16, 16)), halves(rng, (n, 16, 8)), singles(rng, (n, 16, 8), -70, 45)


def cancellation(rng: np.random.Generator, n: int) -> Operands:
    """Draw operands whose products cancel the sum so far, to the last bit or nearly."""
    a, b, _ = anything(rng, n)
    c = -(a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
    moved = c.view(np.int32) + rng.integers(-2, 3, c.shape).astype(np.int32)
    return a, b, np.where(c == 0, c, moved.view(np.float32))


def pairs_that_cancel(rng: np.random.Generator, n: int) -> Operands:
    """Draw operands in which every product comes with its opposite, but for the last bit of one."""
    a, b, c = anything(rng, n)
    a[..., 8:], b[:, 8:] = -a[..., :8], b[:, :8]
    a[..., 15] = (a[..., 15].view(np.uint16) ^ 1).view(np.float16)
    return a, b, c * np.float32(2**-40)


def nothing_but_the_sum(rng: np.random.Generator, n: int) -> Operands:
    """Draw zeros of both signs, and a sum so far of any size."""
    a, b, _ = anything(rng, n)
    zero = np.where(rng.random((n, 16, 1)) < 0.5, np.float16(0), np.float16(-0.0))
    c = singles(rng, (n, 16, 8), -126, 127)
    c = np.where(rng.random(c.shape) < 0.1, np.float32(-0.0), c)
    return np.broadcast_to(zero, a.shape).copy(), b, c


def one_product(rng: np.random.Generator, n: int) -> Operands:
    """Draw operands with a single product of any size beside subnormal ones."""
    a, b, c = nibbles(rng, n)
    k = int(rng.integers(16))
    a[:, :, k] = halves(rng, (n, 16))
    return a, b, c


def special(rng: np.random.Generator, n: int) -> Operands:
    """Draw operands with infinities and NaN here and there."""
    a, b, c = anything(rng, n)
    for x in (a, b, c):
        x[rng.random(x.shape) < 0.01] = rng.choice((np.inf, -np.inf, np.nan))
    return a, b, c


CASES: tuple[Case, ...] = (
    nibbles, zero_points, anything, cancellation, pairs_that_cancel, nothing_but_the_sum, one_product, special,
)  # fmt: skip


def instruction(a: np.ndarray, b: np.ndarray, c: np.ndarray, backend: str) -> np.ndarray:
    """Compute the MMA by the instruction."""
    d = np.empty_like(c)
    arrays = [a.view(np.uint16), b.view(np.uint16), c, d]
    on_gpu = backend == "gpu"
    arrays = [gpu.to_device(array) for array in arrays] if on_gpu else arrays
    ptxlab.load(SOURCE)(*arrays, grid=len(a), block=32, backend=backend)
    return gpu.to_host(arrays[-1]) if on_gpu else arrays[-1]
