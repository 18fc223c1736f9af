// quantize_activations_s8: per-token symmetric INT8 with the token sum, in the order that a GEMM reads (QServe 4.1).
//
// Contract   scale[m] = max_k |x[m, k]| / 127, or 1 where that is no normal f32 (a row of zeros, or of less than
//            1.5e-36); x_q[m, k] = x[m, k] / scale[m] rounded half to even; token_sum[m] = sum_k x_q[m, k]. Both
//            divisions are IEEE's: the same bits as `quant.quantize_activations`. A row with a NaN or an infinity gets
//            a scale that is no number either, so that it shows in whatever is computed from it. x f16, bf16 or f32 (IN
//            0, 1, 2); K a multiple of 32. x_q by LAYOUT, padded with zeros to whole tiles: 0 row-major; 1 fragment
//            order [K/64][M/8][512]; 2 swizzled tiles [M/rows][K/128][rows][128], for wgmma.
// Guide      notebooks/guide/kernels_quantize.md: layouts, tile, constants
// PTX ISA    9.7.3 fma; 9.7.9 shfl.sync; 9.7.13 redux.sync; 9.7.1 dp4a.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "pack.cuh"
#include "reduce.cuh"

#ifndef IN
#define IN 0
#define LAYOUT 0
#define THREADS 256
#define CHUNKS 1
#endif

namespace {

constexpr int VECTORS = IN == 2 ? 4 : 2;  // of 16 bytes, in a chunk of 16 values

struct Chunk {
    uint4 v[VECTORS];

    __device__ __forceinline__ float operator[](int i) const {
        const unsigned* words = reinterpret_cast<const unsigned*>(v);
        if (IN == 2) return __uint_as_float(words[i]);
        const unsigned half = words[i / 2] >> (i % 2 * 16);
        return IN == 1 ? __uint_as_float(half << 16)
                       : __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
    }
};

__device__ __forceinline__ Chunk load(const uint4* __restrict__ row, int chunk, bool inside) {
    Chunk c;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) c.v[i] = inside ? row[chunk * VECTORS + i] : make_uint4(0, 0, 0, 0);
    return c;
}

// As bits, magnitudes are ordered like numbers, and infinity and NaN lie above them all.
__device__ __forceinline__ unsigned magnitude(const Chunk& c) {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) most = max(most, __float_as_uint(c[i]) & 0x7fffffffu);
    return most;
}

// x / scale as IEEE rounds it, with one reciprocal for the whole row: the second correction starts within one unit in
// the last place, where the remainder is exact (Markstein). `lift` keeps the remainders of small numbers from
// underflowing.
struct Divider {
    float lift, scale, reciprocal;

    __device__ __forceinline__ explicit Divider(float s)
        : lift(IN == 0 || s > 0x1p-64f ? 1.0f : 0x1p64f), scale(s * lift), reciprocal(__frcp_rn(scale)) {}

    __device__ __forceinline__ float operator()(float x) const {
        const float a = IN == 0 ? x : x * lift;  // f16 has no numbers that small
        float q = a * reciprocal;
        q = fmaf(fmaf(-scale, q, a), reciprocal, q);
        return fmaf(fmaf(-scale, q, a), reciprocal, q);
    }
};

// The 16 quantised values of a chunk. 1.5 * 2^23 leaves no bits behind the point: the low byte is the rounded quotient.
__device__ __forceinline__ uint4 quantize(const Chunk& c, const Divider& divide) {
    unsigned words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        int q[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) q[i] = __float_as_int(divide(c[4 * w + i]) + ptxlab::SHIFT);
        words[w] = ptxlab::bytes_of<0>(q);
    }
    return {words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ void exchange(unsigned& a, unsigned& b, int mask) {
    const bool upper = threadIdx.x & mask;
    const unsigned other = __shfl_xor_sync(0xffffffffu, upper ? a : b, mask);
    (upper ? a : b) = other;
}

// Word j of lane i of a quad becomes word i of lane j.
__device__ __forceinline__ void transpose_in_quad(uint4& w) {
    exchange(w.x, w.y, 1);
    exchange(w.z, w.w, 1);
    exchange(w.x, w.z, 2);
    exchange(w.y, w.w, 2);
}

// Where chunk `chunk` of token `m` goes, in 16-byte units; `chunks` per token, `tokens` with the padding.
__device__ __forceinline__ size_t place(int m, int chunk, int chunks, int tokens, int rows) {
    if (LAYOUT == 1) return (size_t(chunk / 4) * (tokens / 8) + m / 8) * 32 + m % 8 * 4 + chunk % 4;
    if (LAYOUT == 2)
        return (size_t(m / rows * (chunks / 8) + chunk / 8) * rows + m % rows) * 8 + (chunk % 8 ^ (m % rows & 7));
    return size_t(m) * chunks + chunk;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) quantize_activations_s8(
    const uint4* __restrict__ x,  // [M, K], by IN
    uint4* __restrict__ x_q,      // s8  [M, K], by LAYOUT
    float* __restrict__ scale,    // f32 [M]
    int* __restrict__ token_sum,  // s32 [M]
    int M, int K, int rows) {     // rows: tokens of a tile
    __shared__ unsigned partial[32];
    constexpr int SPAN = LAYOUT == 2 ? 128 : LAYOUT == 1 ? 64 : 32;
    const int m = blockIdx.x, inside = m < M ? K / 16 : 0, chunks = (K + SPAN - 1) / SPAN * (SPAN / 16);
    const uint4* row = x + size_t(m) * (K / 16) * VECTORS;
    const int first = threadIdx.x, further = first + CHUNKS * THREADS;

    Chunk held[CHUNKS];
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        held[i] = load(row, first + i * THREADS, first + i * THREADS < inside);
        most = max(most, magnitude(held[i]));
    }
    for (int c = further; c < inside; c += THREADS) most = max(most, magnitude(load(row, c, true)));

    const float extent = __uint_as_float(ptxlab::block_max<THREADS>(most, partial)),
                quotient = __fdiv_rn(extent, 127.0f);
    const float s = quotient < 0x1p-126f ? 1.0f : quotient;
    const Divider divide(s);
    int sum = 0;
    const auto finish = [&](const Chunk& values, int chunk) {
        uint4 q = quantize(values, divide);
        sum = __dp4a(int(q.x), 0x01010101, __dp4a(int(q.y), 0x01010101, sum));
        sum = __dp4a(int(q.z), 0x01010101, __dp4a(int(q.w), 0x01010101, sum));
        if (LAYOUT == 1) transpose_in_quad(q);  // of all lanes, whether they store or not
        if (chunk < chunks) x_q[place(m, chunk, chunks, gridDim.x, rows)] = q;
    };
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) finish(held[i], first + i * THREADS);
    for (int c = CHUNKS * THREADS; c < chunks; c += THREADS)
        finish(load(row, first + c, first + c < inside), first + c);

    sum = ptxlab::block_sum<THREADS>(sum, partial);
    if (threadIdx.x == 0 && m < M) {
        scale[m] = s;
        token_sum[m] = sum;
    }
}
