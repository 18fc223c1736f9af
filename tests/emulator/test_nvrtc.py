"""PTX that NVRTC makes of ordinary CUDA, with all checks on."""

import numpy as np
import pytest

from ptxlab import emulator
from tests.support.small_kernels import cuda_to_ptx

GRID_BARRIER = r"""
__device__ unsigned arrived;
extern "C" __global__ void meet(int* y) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&arrived, 1);
        while (*(volatile unsigned*)&arrived < gridDim.x);
        __threadfence();
    }
    __syncthreads();
    y[blockIdx.x * blockDim.x + threadIdx.x] = arrived;
}"""


def test_as_many_blocks_wait_for_each_other_as_an_h200_has_sms():
    y = np.zeros(132 * 512, np.int32)
    emulator.run(cuda_to_ptx(GRID_BARRIER), None, [y], grid=132, block=512, max_steps=20_000)
    assert (y == 132).all()


SOURCE = r"""
#include <cuda_fp16.h>
extern "C" __global__ void reduce(const float* x, float* y, int n) {
    __shared__ float part[32];
    float s = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) s += x[i];
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
    __syncthreads();
    if (threadIdx.x < 32) {
        s = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0.f;
        for (int o = 16; o; o >>= 1) s += __shfl_down_sync(~0u, s, o);
        if (!threadIdx.x) y[blockIdx.x] = s;
    }
}
extern "C" __global__ void histogram(const unsigned char* x, unsigned* h, int n) {
    extern __shared__ unsigned local[];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) local[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&local[x[i]], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x) if (local[i]) atomicAdd(&h[i], local[i]);
}
extern "C" __global__ void axpy(const __half2* x, __half2* y, __half a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __hfma2(__half2half2(a), x[i], y[i]);
}
extern "C" __global__ void divide(const long long* a, const long long* b, long long* q, unsigned long long* r, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { q[i] = a[i] / b[i]; r[i] = (unsigned long long)a[i] % (unsigned long long)b[i]; }
}
extern "C" __global__ void collatz(const int* x, int* y) {
    int i = threadIdx.x, v = x[i], n = 0;
    while (v != 1) { if (v & 1) v = 3 * v + 1; else v /= 2; n++; }
    int local[8];
    for (int k = 0; k < 8; k++) local[k] = n * k;
    y[i] = local[x[i] & 7];
}
__device__ unsigned arrived;
extern "C" __global__ void last_block(const int* x, int* partial, int* sum) {
    __shared__ bool last;
    __shared__ int total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    atomicAdd(&total, x[blockIdx.x * blockDim.x + threadIdx.x]);
    __syncthreads();
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = total;
        __threadfence();
        last = atomicAdd(&arrived, 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        int s = 0;
        for (int i = 0; i < gridDim.x; i++) s += partial[i];
        *sum = s;
    }
}
"""


@pytest.fixture(scope="module")
def module():
    return emulator.parse(cuda_to_ptx(SOURCE), "k.ptx")


def run(module, entry, *args, grid=1, block=32, **options):
    launch = emulator.run(module, entry, args, grid=grid, block=block, checks=["lanes", "race", "init"], **options)
    assert not launch.findings, str(launch.findings[0])


def test_block_reduction(module):
    x = np.random.default_rng(0).integers(0, 8, 20000).astype(np.float32)
    y = np.zeros(7, np.float32)
    run(module, "reduce", x, y, np.int32(len(x)), grid=7, block=256)
    assert y.sum() == x.sum()  # small integers: exact in any order


def test_histogram(module):
    x = np.random.default_rng(1).integers(0, 256, 10000).astype(np.uint8)
    h = np.zeros(256, np.uint32)
    run(module, "histogram", x, h, np.int32(len(x)), grid=5, block=96, shared_bytes=1024)
    assert np.array_equal(h, np.bincount(x, minlength=256))


def test_half_axpy(module):
    x, y = np.random.default_rng(2).standard_normal((2, 2000)).astype(np.float16)
    a = np.float16(1.7)
    expected = (np.float64(a) * x + y).astype(np.float16)  # exact in float64, rounded once
    y = y.copy()
    run(module, "axpy", x, y, a, np.int32(1000), grid=8, block=128)
    assert np.array_equal(y, expected)


def test_64_bit_division(module):
    rng = np.random.default_rng(3)
    a, b = rng.integers(-(2**62), 2**62, 500), rng.integers(1, 2**40, 500) * rng.choice([-1, 1], 500)
    q, r = np.zeros_like(a), np.zeros(500, np.uint64)
    run(module, "divide", a, b, q, r, np.int32(500), grid=4, block=128)
    exact = [abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert q.tolist() == exact
    assert np.array_equal(r, a.view(np.uint64) % b.view(np.uint64))


def test_struct_by_value():
    text = cuda_to_ptx('struct S { int n; float s; int t[4]; };\nextern "C" __global__ void k(S p, float* y)'
                "{ int i = threadIdx.x; if (i < p.n) y[i] = p.s * i + p.t[i & 3]; }")  # fmt: skip
    y = np.zeros(32, np.float32)
    struct = np.int32(20).tobytes() + np.float32(0.5).tobytes() + np.array([10, 20, 30, 40], np.int32).tobytes()
    run(emulator.parse(text), "k", struct, y)
    assert y.tolist() == [0.5 * i + (10, 20, 30, 40)[i & 3] if i < 20 else 0 for i in range(32)]


def test_divergent_loop_and_local_memory(module):
    def steps(v):
        n = 0
        while v != 1:
            v, n = (3 * v + 1 if v & 1 else v // 2), n + 1
        return n

    x, y = np.arange(1, 65, dtype=np.int32), np.zeros(64, np.int32)
    run(module, "collatz", x, y, block=64)
    assert y.tolist() == [steps(v) * (v & 7) for v in range(1, 65)]


def test_last_block_sums_up(module):
    x, partial, total = np.arange(640, dtype=np.int32), np.zeros(10, np.int32), np.zeros(1, np.int32)
    run(module, "last_block", x, partial, total, grid=10, block=64)
    assert total[0] == x.sum()


MATHS = r"""
__device__ __noinline__ float twice(float x) { return x * 2; }
__device__ __noinline__ float four_times(float x) { return twice(twice(x)); }
extern "C" __global__ void k(const float* x, float* y, double* z, unsigned* w) {
    int i = threadIdx.x;
    float v = x[i];
    y[i] = expf(v); y[i + 32] = logf(fabsf(v) + 1); y[i + 64] = sinf(v * 1e6f); y[i + 96] = v / 3.7f;
    y[i + 128] = four_times(v);
    z[i] = exp((double)v); z[i + 32] = sin(v * 1e5); z[i + 64] = 1.0 / v; z[i + 96] = sqrt(fabs((double)v));
    switch (i % 6) {
        case 0: w[i] = 10; break;
        case 1: w[i] = __vadd4(i, 0xff); break;
        case 2: w[i] = __brev(i); break;
        case 3: w[i] = __dp4a(i, i, 1); break;
        case 4: w[i] = __ffs(i); break;
        default: w[i] = __byte_perm(i, 7, 0x4440);
    }
}
"""


def test_libraries_of_cuda():
    """The compiler's own arithmetic, functions and tables: argument reduction of sin calls a function, switch jumps."""
    x = np.random.default_rng(4).standard_normal(32).astype(np.float32) * 3
    y, z, w = np.zeros((5, 32), np.float32), np.zeros((4, 32)), np.zeros(32, np.uint32)
    run(emulator.parse(cuda_to_ptx(MATHS)), "k", x, y, z, w)
    wide = x.astype(np.float64)
    large = (x * np.float32(1e6)).astype(np.float64)
    # within 2 units in the last place, which is what CUDA promises for these functions
    expected = np.array([np.exp(wide), np.log(np.abs(wide) + 1), np.sin(large)])
    assert (np.abs(y[:3] - expected) <= 2**-22 * np.abs(expected) + 2**-23).all()
    assert np.array_equal(y[3], x / np.float32(3.7)) and np.array_equal(y[4], x * 4)
    expected = np.array([np.exp(wide), np.sin(wide * 1e5)])
    assert (np.abs(z[:2] - expected) <= 2**-51 * np.abs(expected)).all()
    assert np.array_equal(z[2:], [1 / wide, np.sqrt(np.abs(wide))])
    kinds = [lambda i: 10, lambda i: i & ~255 | i + 255 & 255, lambda i: int(f"{i:032b}"[::-1], 2), lambda i: i * i + 1,
             lambda i: (i & -i).bit_length(), lambda i: 0x070707 << 8 | i]  # fmt: skip
    assert w.tolist() == [kinds[i % 6](i) for i in range(32)]


HALF = {
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: 10.0**x, "log": np.log, "log2": np.log2, "log10": np.log10,
    "sin": np.sin, "cos": np.cos, "rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt,
    "tanh": np.tanh, "tanh_approx": np.tanh,
}  # fmt: skip
HALVES = """
#include <cuda_{kind}16.h>
#define ALL(f) extern "C" __global__ void f##_(const {one}* x, {one}* y, const {two}* xx, {two}* yy) {{ \\
    int i = threadIdx.x; y[i] = h##f(x[i]); yy[i] = h2##f(xx[i]); }}
"""


@pytest.mark.default_cases("fp-compute_75", "fp-compute_90", "bf-compute_80")
@pytest.mark.parametrize("arch", ["compute_75", "compute_80", "compute_90"])
@pytest.mark.parametrize("kind", ["fp", "bf"])
def test_functions_of_the_headers_for_halves(kind, arch):
    """Their inline assembly declares registers without blanks. To 2 units in the last place."""
    one, two, bits = ("__half", "__half2", 10) if kind == "fp" else ("__nv_bfloat16", "__nv_bfloat162", 7)
    text = HALVES.format(kind=kind, one=one, two=two) + "".join(f"ALL({name})\n" for name in HALF)
    module = emulator.parse(cuda_to_ptx(text, arch))
    x = np.linspace(0.1, 3, 64, dtype=np.float32)
    x = x.astype(np.float16) if kind == "fp" else (x.view(np.uint32) >> 16).astype(np.uint16)
    numbers = x.astype(np.float64) if kind == "fp" else (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    for name, function in HALF.items():
        y, pairs = np.zeros_like(x), np.zeros_like(x)
        emulator.run(module, f"{name}_", [x, y, x, pairs], grid=1, block=32)
        expected = function(numbers)
        unit = np.exp2(np.floor(np.log2(np.abs(expected))) - bits)
        for got, want in ((y[:32], expected[:32]), (pairs, expected)):
            got = got.astype(np.float64) if kind == "fp" else (got.astype(np.uint32) << 16).view(np.float32)
            assert (np.abs(got - want) <= 2 * unit[: len(got)]).all(), name
