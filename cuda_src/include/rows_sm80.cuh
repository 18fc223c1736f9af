// What the steps of W4A4 on mma.sync share: both operands as rows of 64 bytes of a stage, 128 INT4 or 64 INT8 channels.
//
// The registers of m16n8k64 (4 bits) and of m16n8k32 (8 bits) hold the same bytes, so one way through shared memory
// serves both: row r lies at 64 r, its 16-byte chunk c at c ^ (r / 2 & 3). Eight rows of one chunk are 128 bytes in
// different banks, and ldmatrix has no conflict.
#pragma once
#include <cuda_fp16.h>

#include "mma.cuh"
#include "output.cuh"

namespace ptxlab {

constexpr int ROW_BYTES = 64;  // of a stage

// Return the offset of 16-byte chunk `chunk` of a row of a stage.
__device__ __forceinline__ int chunk_at(int row, int chunk) {
    return row * ROW_BYTES + ((chunk ^ (row >> 1 & 3)) * 16);
}

// Copy bytes first_byte .. first_byte + 63 of ROWS rows from row0 on, of a matrix of `rows` rows of `bytes` bytes, a
// multiple of 16; what lies outside becomes zero.
template <int ROWS, int THREADS>
__device__ __forceinline__ void fetch_rows(unsigned char* destination, const unsigned char* source, int row0, int rows,
                                           int first_byte, int bytes) {
#pragma unroll
    for (int begin = 0; begin < ROWS * 4; begin += THREADS) {
        const int i = begin + threadIdx.x;
        if (ROWS * 4 % THREADS && i >= ROWS * 4) break;
        const int row = row0 + i / 4, byte = first_byte + i % 4 * 16;
        const bool inside = row < rows && byte < bytes;
        cp_async_16(destination + chunk_at(i / 4, i % 4), inside ? source + size_t(row) * bytes + byte : source,
                    inside);
    }
}

// Copy two neighbouring scales of each of ROWS rows from row0 on, those of columns 2 pair and 2 pair + 1.
template <int ROWS, int THREADS>
__device__ __forceinline__ void fetch_scales(__half* destination, const __half* source, int row0, int rows, int pair,
                                             int columns) {
#pragma unroll
    for (int begin = 0; begin < ROWS; begin += THREADS) {
        const int i = begin + threadIdx.x;
        if (ROWS % THREADS && i >= ROWS) break;
        const bool inside = row0 + i < rows;
        cp_async_4(destination + 2 * i, inside ? source + size_t(row0 + i) * columns + 2 * pair : source, inside);
    }
}

// A block's tile of Y, ROWS of W by COLUMNS tokens: a warp has 32 rows by TOKENS, and SPLIT warps share the tokens.
template <int ROWS_, int COLUMNS_, int SPLIT>
struct RowsTile {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
    static constexpr int WN = ROWS / 32, THREADS = 32 * WN * SPLIT, TOKENS = COLUMNS / SPLIT;
    static constexpr int W_BYTES = ROWS * ROW_BYTES, X_BYTES = COLUMNS * ROW_BYTES;  // of a stage
    static constexpr int SCALE_BYTES = (ROWS + COLUMNS) * 4;                         // two of every row
    using Sums = int[2][TOKENS / 8][4];      // of a thread: rows g + 8 r of W in 16, tokens 2 t + c in 8
    using Totals = float[2][TOKENS / 8][4];  // likewise

    const int M, N, token_tiles, token0, row0, lane, wn, wm;

    // This block's tile, of a grid that has one block per tile.
    __device__ __forceinline__ RowsTile(int M, int N)
        : M(M), N(N), token_tiles((M + COLUMNS - 1) / COLUMNS), token0(blockIdx.x % token_tiles * COLUMNS),
          row0(blockIdx.x / token_tiles * ROWS), lane(threadIdx.x % 32), wn(threadIdx.x / 32 % WN),
          wm(threadIdx.x / 32 / WN) {}
    __device__ __forceinline__ RowsTile(int M, int N, int token0, int row0)
        : M(M), N(N), token_tiles((M + COLUMNS - 1) / COLUMNS), token0(token0), row0(row0), lane(threadIdx.x % 32),
          wn(threadIdx.x / 32 % WN), wm(threadIdx.x / 32 / WN) {}

    // Copy a stage of an operand: bytes first_byte .. first_byte + 63 of its rows, which have `bytes` bytes.
    __device__ __forceinline__ void fetch_w(unsigned char* destination, const unsigned char* w, int first_byte,
                                            int bytes) const {
        fetch_rows<ROWS, THREADS>(destination, w, row0, N, first_byte, bytes);
    }
    __device__ __forceinline__ void fetch_x(unsigned char* destination, const unsigned char* x, int first_byte,
                                            int bytes) const {
        fetch_rows<COLUMNS, THREADS>(destination, x, token0, M, first_byte, bytes);
    }

    // Copy a pair of scales of every row, W's first.
    __device__ __forceinline__ void fetch_scales(void* destination, const __half* w_scale, const __half* x_scale,
                                                 int pair, int columns) const {
        __half* scales = static_cast<__half*>(destination);
        ptxlab::fetch_scales<ROWS, THREADS>(scales, w_scale, row0, N, pair, columns);
        ptxlab::fetch_scales<COLUMNS, THREADS>(scales + 2 * ROWS, x_scale, token0, M, pair, columns);
    }

    // Return the offset in W's stage of the first of this warp's 32 rows, in bytes.
    __device__ __forceinline__ int w_at() const { return wn * 32 * ROW_BYTES; }
    // Return the offset in X's stage of the first of this warp's TOKENS tokens, in bytes.
    __device__ __forceinline__ int x_at() const { return wm * TOKENS * ROW_BYTES; }

    // Load operand A, this warp's 32 rows of W, over half a stage, for each 16 rows two chunks.
    __device__ __forceinline__ void load_w(unsigned (&a)[2][4], const unsigned char* w, int half) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) ldmatrix_x4(a[h], w + chunk_at(h * 16 + lane % 16, half * 2 + lane / 16));
    }

    // Load operand B of half a stage, and call multiply(m, h, b0, b1) for each eight tokens m and each 16 rows h of
    // this warp.
    template <class Multiply>
    __device__ __forceinline__ void multiply_tokens(const unsigned char* x, int half, Multiply multiply) const {
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
                for (int h = 0; h < 2; ++h) multiply(m + j, h, b[2 * j], b[2 * j + 1]);
            }
        }
    }

    // acc += the products of this warp over half a stage: 64 INT4 or 32 INT8 channels.
    template <bool INT4>
    __device__ __forceinline__ void multiply_half(Sums& acc, const unsigned char* w, const unsigned char* x,
                                                  int half) const {
        unsigned a[2][4];
        load_w(a, w, half);
        multiply_tokens(x, half, [&](int m, int h, unsigned b0, unsigned b1) {
            if (INT4) mma_s4(acc[h][m], a[h][0], a[h][1], a[h][2], a[h][3], b0, b1);
            else mma_s8(acc[h][m], a[h][0], a[h][1], a[h][2], a[h][3], b0, b1);
        });
    }

    // acc += the products of this warp over half a block of COMET's W4A8: 64 INT8 channels of X, W in INT4 times 16. A
    // 16-byte chunk of a row of W is a k32 step, word t what lane t of four needs of it: in the high nibbles channels
    // 4 t .., in the low ones 16 + 4 t .. .
    __device__ __forceinline__ void multiply_switched(Sums& acc, const unsigned char* w, const unsigned char* x,
                                                      int half) const {
        unsigned a[2][4];  // rows 0-7, 8-15 of the first step, of the second
        load_w(a, w, half);
#pragma unroll
        for (int step = 0; step < 2; ++step)
            multiply_tokens(x, step, [&](int m, int h, unsigned b0, unsigned b1) {
                const unsigned top = a[h][2 * step], below = a[h][2 * step + 1];
                mma_s8(acc[h][m], top & 0xf0f0f0f0u, below & 0xf0f0f0f0u, top << 4 & 0xf0f0f0f0u,
                       below << 4 & 0xf0f0f0f0u, b0, b1);
            });
    }

    // total += acc * (x_scale * w_scale), one fma each, and set acc back to zero. `odd`: which column of the pairs of
    // scales. `counts`, a power of two: what an integer of acc stands for. ROUNDED: round the product of the scales to
    // f16; in f32 it is exact.
    template <bool ROUNDED = false>
    __device__ __forceinline__ void add_group(Totals& total, Sums& acc, const void* group_scales, int odd,
                                              float counts = 1) const {
        const __half* w_scales = static_cast<const __half*>(group_scales) + 2 * wn * 32;
        const __half* x_scales = static_cast<const __half*>(group_scales) + 2 * (ROWS + wm * TOKENS);
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

    // Call use(token, n, sum) for every sum of this thread that is inside Y.
    template <class Use>
    __device__ __forceinline__ void for_each_sum(const Sums& acc, Use use) const {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int m = 0; m < TOKENS / 8; ++m)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int token = token0 + wm * TOKENS + m * 8 + lane % 4 * 2 + c % 2;
                    const int n = row0 + wn * 32 + h * 16 + c / 2 * 8 + lane / 4;
                    if (token < M && n < N) use(token, n, acc[h][m][c]);
                }
    }

    // Collect the results of all warps in the ring's memory as [tokens][ROWS + PAD], then call store(index in Y, token,
    // n, results) for every eight neighbours that are inside Y.
    template <int PAD, class Number, class Store>
    __device__ __forceinline__ void gather(unsigned char* ring, const Number (&results)[2][TOKENS / 8][4],
                                           Store store) const {
        static_assert(PAD % 4 == 0, "rows begin at multiples of 16 bytes");
        constexpr int PITCH = ROWS + PAD;
        __syncthreads();  // nobody reads the ring any more
        Number* block_results = reinterpret_cast<Number*>(ring);
        Number* warp_results = block_results + wm * TOKENS * PITCH + wn * 32;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int m = 0; m < TOKENS / 8; ++m)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    warp_results[(m * 8 + lane % 4 * 2 + c % 2) * PITCH + h * 16 + c / 2 * 8 + lane / 4] =
                        results[h][m][c];
        __syncthreads();
        for (int i = threadIdx.x; i < COLUMNS * ROWS / 8; i += THREADS) {
            const int m = i / (ROWS / 8), c = i % (ROWS / 8) * 8, token = token0 + m, n = row0 + c;
            if (token < M && n < N) store(size_t(token) * N + n, token, n, block_results + m * PITCH + c);
        }
    }

    // Store totals, with the bias, as f16 (KIND 0), bf16 (1) or f32 (2).
    template <int KIND, int PAD>
    __device__ __forceinline__ void store_totals(unsigned char* ring, const Totals& total, void* y,
                                                 const float* bias) const {
        gather<PAD>(ring, total, [&](size_t index, int, int n, const float* results) {
            const float* own_bias = bias ? bias + n : nullptr;
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = own_bias ? __fadd_rn(results[i], own_bias[i]) : results[i];
            store_8_floats<KIND>(y, index, v);
        });
    }
};

}  // namespace ptxlab
