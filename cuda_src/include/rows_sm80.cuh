// What the steps of W4A4 on mma.sync share: both operands as rows of 64 bytes of a stage, 128 INT4 or 64 INT8 channels.
//
// The registers of m16n8k64 (4 bits) and of m16n8k32 (8 bits) hold the same bytes, so one way through shared memory
// serves both: row r lies at 64 r, its 16-byte chunk c at c ^ (r / 2 & 3). Eight rows of one chunk are 128 bytes in
// different banks, and ldmatrix has no conflict.
#pragma once
#include <cuda_fp16.h>

#include "mma_s4.cuh"
#include "output.cuh"

namespace ptxlab {

constexpr int ROW_BYTES = 64;  // of a stage

__device__ __forceinline__ int chunk_at(int row, int chunk) {
    return row * ROW_BYTES + ((chunk ^ (row >> 1 & 3)) * 16);
}

// Bytes first .. first + 63 of ROWS rows from row0 on, of a matrix of so many rows and bytes per row, a multiple of 16;
// what lies outside becomes zero.
template <int ROWS, int THREADS>
__device__ __forceinline__ void fetch_rows(unsigned char* to, const unsigned char* from, int row0, int rows, int first,
                                           int bytes) {
#pragma unroll
    for (int begin = 0; begin < ROWS * 4; begin += THREADS) {
        const int i = begin + threadIdx.x;
        if (ROWS * 4 % THREADS && i >= ROWS * 4) break;
        const int row = row0 + i / 4, byte = first + i % 4 * 16;
        const bool inside = row < rows && byte < bytes;
        cp_async_16(to + chunk_at(i / 4, i % 4), inside ? from + size_t(row) * bytes + byte : from, inside);
    }
}

// Two neighbouring scales of each of ROWS rows from row0 on, those of columns 2 pair and 2 pair + 1.
template <int ROWS, int THREADS>
__device__ __forceinline__ void fetch_scales(__half* to, const __half* from, int row0, int rows, int pair,
                                             int columns) {
#pragma unroll
    for (int begin = 0; begin < ROWS; begin += THREADS) {
        const int i = begin + threadIdx.x;
        if (ROWS % THREADS && i >= ROWS) break;
        const bool inside = row0 + i < rows;
        cp_async_4(to + 2 * i, inside ? from + size_t(row0 + i) * columns + 2 * pair : from, inside);
    }
}

// acc += the products of a warp, 32 rows of W by TOKENS of X, over half a stage: 64 INT4 or 32 INT8 channels.
template <bool INT4, int TOKENS>
__device__ __forceinline__ void multiply_half(int (&acc)[2][TOKENS / 8][4], const unsigned char* w,
                                              const unsigned char* x, int half, int lane) {
    unsigned a[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) ldmatrix_x4(a[h], w + chunk_at(h * 16 + lane % 16, half * 2 + lane / 16));
#pragma unroll
    for (int m = 0; m < TOKENS / 8; m += 2) {
        // Two token tiles of 8: lanes 0-7, 8-15 the chunks of the first, 16-31 of the second, if there is one.
        unsigned b[4];
        const int row = m * 8 + lane % 8 + (TOKENS > 8 ? lane / 16 * 8 : 0);
        ldmatrix_x4(b, x + chunk_at(row, half * 2 + lane / 8 % 2));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (m + j >= TOKENS / 8) break;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (INT4) mma_s4(acc[h][m + j], a[h][0], a[h][1], a[h][2], a[h][3], b[2 * j], b[2 * j + 1]);
                else mma_s8(acc[h][m + j], a[h][0], a[h][1], a[h][2], a[h][3], b[2 * j], b[2 * j + 1]);
            }
        }
    }
}

// total += acc * (x_scale * w_scale), one fma each, and acc back to zero: column `odd` of the pairs of scales. A lane
// has rows g + 8 r of W and tokens 2 t + c. `counts`, a power of two: what an integer of acc stands for. ROUNDED: the
// product of the scales is rounded to f16, where it is exact in f32.
template <int TOKENS, bool ROUNDED = false>
__device__ __forceinline__ void add_group(float (&total)[2][TOKENS / 8][4], int (&acc)[2][TOKENS / 8][4],
                                          const __half* w_scales, const __half* x_scales, int odd, int lane,
                                          float counts = 1) {
    const int g = lane / 4, t = lane % 4;
    __half w[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int r = 0; r < 2; ++r) w[h][r] = w_scales[2 * (h * 16 + r * 8 + g) + odd];
#pragma unroll
    for (int m = 0; m < TOKENS / 8; ++m) {
        __half x[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) x[c] = x_scales[2 * (m * 8 + 2 * t + c) + odd];
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const __half scale = w[h][c / 2];
                const float both = ROUNDED ? __half2float(__hmul(x[c % 2], scale))
                                           : __fmul_rn(__half2float(x[c % 2]), __half2float(scale) * counts);
                float& sum = total[h][m][c];
                sum = __fmaf_rn(float(acc[h][m][c]), both, sum);
                acc[h][m][c] = 0;
            }
    }
}

// A warp's results, from its first row and token on, to where a block gathers them, [tokens][PITCH].
template <int TOKENS, int PITCH, class Number>
__device__ __forceinline__ void gather_results(Number* tile, const Number (&results)[2][TOKENS / 8][4], int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int m = 0; m < TOKENS / 8; ++m)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                tile[(m * 8 + lane % 4 * 2 + c % 2) * PITCH + h * 16 + c / 2 * 8 + lane / 4] = results[h][m][c];
}

// Eight neighbouring results, with the bias, to f16 (OUT 0), bf16 (1) or f32 (2).
template <int KIND>
__device__ __forceinline__ void store_8_floats(void* y, size_t at, const float* results, const float* bias) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = bias ? __fadd_rn(results[i], bias[i]) : results[i];
    if constexpr (KIND == 2) {
        float4* to = reinterpret_cast<float4*>(static_cast<float*>(y) + at);
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        *reinterpret_cast<uint4*>(static_cast<unsigned short*>(y) + at) =
            make_uint4(rounded_pair<KIND>(v[0], v[1]), rounded_pair<KIND>(v[2], v[3]), rounded_pair<KIND>(v[4], v[5]),
                       rounded_pair<KIND>(v[6], v[7]));
    }
}

}  // namespace ptxlab
