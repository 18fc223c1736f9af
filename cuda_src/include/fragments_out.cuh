// Store the accumulators of a wgmma with weights as operand A to Y, each warp by itself: no barrier of the warp
// group. A warp has 16 rows of W (n) and TOKENS columns; lane 4 g + t holds, of every 8 tokens, rows g, g, g + 8, g + 8
// at tokens 2 t, 2 t + 1, twice.
//
// 2-byte outputs   16 tokens at a time, transposed through shared memory (`TokenTranspose`): 16 bytes a lane.
// 4-byte outputs   from the registers: eight lanes write one sector of 32 bytes.
// SILU_MUL         a lane has gate and up, so 8 features are left: 32 tokens at a time, 16 bytes each, a lane per token.
#pragma once
#include "mma.cuh"
#include "output.cuh"

namespace ptxlab {

// Scales, zero points and biases of a warp's sums. Arrays in shared memory begin at the tile's first token.
struct Scaling {
    const float* x_scale;  // [TOKENS]
    const int* x_sum;      // [TOKENS], or null
    int zero[2];           // of rows g and g + 8: zero * x_sum is subtracted
    float w_scale[2];
    float bias[2];  // -0 where there is none: adding it changes nothing
};

// Tokens of a tile whose constants each consumer thread loads.
template <int TOKENS>
constexpr int THREAD_TOKENS = (TOKENS + 127) / 128;

// Return the bias of row n. Without a bias that is -0: x + -0 is x, also for x = -0.
template <class Index>
__device__ __forceinline__ float bias_at(const float* bias, Index n) {
    return bias ? bias[n] : -0.0f;
}

constexpr int WARP_BUFFER_BYTES = 512;  // of shared memory, in which a warp transposes results

// Transposes results from pairs of tokens per lane to 8 rows of one token per lane. One stmatrix.x4.trans transposes
// four 8 x 8 matrices [n][token] into shared memory, 16 tokens x 16 rows, 32 bytes per token, from where each lane
// loads 16 bytes. The halves of tokens 4..7 of every 8 change places: no bank conflicts.
struct TokenTranspose {
    unsigned store_address, load_address;  // shared addresses
    int token, row_half;                   // what this lane gets: rows 0-7 or 8-15 of a token

    __device__ __forceinline__ TokenTranspose(unsigned char* buffer, int lane) {
        const int row = lane % 8, matrix = lane / 8;  // whose address this lane gives: token, and (half, 8 tokens)
        store_address = shared_address(buffer) + (matrix / 2 * 8 + row) * 32 + ((matrix % 2) ^ (row / 4)) * 16;
        token = lane / 2, row_half = lane % 2;
        load_address = shared_address(buffer) + token * 32 + (row_half ^ (token / 4 % 2)) * 16;
    }

    // Return rows row_half * 8 .. + 7 of token `token`, of 16 tokens whose results the warp's lanes have in h. By all
    // lanes.
    __device__ __forceinline__ uint4 operator()(const unsigned (&h)[4]) const {
        __syncwarp();  // what was there has been taken
        store_matrices_transposed(store_address, h);
        __syncwarp();
        return load_shared_16(load_address);
    }
};

// Return acc * x_scale * w_scale + bias in f32, each operation rounded.
__device__ __forceinline__ float scaled(int acc, float x_scale, float w_scale, float bias) {
    return __fadd_rn(__fmul_rn(__fmul_rn(float(acc), x_scale), w_scale), bias);
}

// Scale and store a warp's sums: tokens token0 .. below M of rows n0 .. n0 + 15 below `end`. `owns(piece)`: whether the
// sums of tokens 8 * piece .. are here. `buffer`: WARP_BUFFER_BYTES of this warp. SILU_MUL: Y has half as many columns,
// N / 2.
template <int KIND, int TOKENS, int WITH = 0, class Owns>
__device__ __forceinline__ void store_fragments(const int (&acc)[TOKENS / 2], const Scaling& s, void* y,
                                                unsigned char* buffer, int lane, int token0, int n0, int M, int N,
                                                int end, Owns owns) {
    static_assert(WITH == 0 || KIND < 2, "to 16 bits each");
    const int g = lane / 4, t = lane % 4;
    if constexpr (WITH == SILU_MUL) {
        constexpr int PIECES = TOKENS / 8, AT_ONCE = PIECES < 4 ? PIECES : 4;
        const unsigned column = shared_address(buffer) + lane * 16;  // 8 features of token `lane`
#pragma unroll
        for (int j = 0; j < PIECES; j += AT_ONCE) {
            unsigned h[4] = {};
            bool owned = false;  // the piece of the lane's token
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (j + i >= PIECES || !owns(j + i)) continue;
                owned |= lane / 8 == i;
                const int token = (j + i) * 8 + 2 * t;
                const float2 scale = *reinterpret_cast<const float2*>(s.x_scale + token);
                const int2 sum = s.x_sum ? *reinterpret_cast<const int2*>(s.x_sum + token) : make_int2(0, 0);
                const int* d = acc + 4 * (j + i);
                const auto result = [&](int gate, int up, float x_scale, int x_sum) {
                    const float v = scaled(gate - s.zero[0] * x_sum, x_scale, s.w_scale[0], s.bias[0]);
                    return __fmul_rn(activated<0>(v), scaled(up - s.zero[1] * x_sum, x_scale, s.w_scale[1], s.bias[1]));
                };
                h[i] = rounded_pair<KIND>(result(d[0], d[2], scale.x, sum.x), result(d[1], d[3], scale.y, sum.y));
            }
            __syncwarp();  // what was there has been taken
            store_matrices_transposed(column, h);
            __syncwarp();
            const uint4 v = load_shared_16(column);
            const int token = token0 + j * 8 + lane;
            if (owned && token < M && n0 < end) put_8<KIND, WITH>(y, size_t(token) * (N / 2) + n0 / 2, v);
        }
    } else if constexpr (KIND >= 2) {
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) {
            if (!owns(j)) continue;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int token = j * 8 + 2 * t + e % 2, n = n0 + g + e / 2 * 8;
                if (token0 + token >= M || n >= end) continue;
                const int sum = acc[4 * j + e] - (s.x_sum ? s.zero[e / 2] * s.x_sum[token] : 0);
                const size_t index = size_t(token0 + token) * N + n;
                if constexpr (KIND == 3) static_cast<int*>(y)[index] = sum;
                else static_cast<float*>(y)[index] = scaled(sum, s.x_scale[token], s.w_scale[e / 2], s.bias[e / 2]);
            }
        }
    } else {
        constexpr int AT_ONCE = TOKENS < 16 ? 1 : 2;
        const TokenTranspose transpose(buffer, lane);
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j += AT_ONCE) {
            if (!owns(j) && !(AT_ONCE == 2 && owns(j + 1))) continue;
            unsigned h[4] = {};
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int token = (j + i) * 8 + 2 * t;
                const float2 scale = *reinterpret_cast<const float2*>(s.x_scale + token);
                const int2 sum = s.x_sum ? *reinterpret_cast<const int2*>(s.x_sum + token) : make_int2(0, 0);
                const int* d = acc + 4 * (j + i);
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    h[2 * i + r] =
                        rounded_pair<KIND>(scaled(d[2 * r] - s.zero[r] * sum.x, scale.x, s.w_scale[r], s.bias[r]),
                                           scaled(d[2 * r + 1] - s.zero[r] * sum.y, scale.y, s.w_scale[r], s.bias[r]));
            }
            const uint4 v = transpose(h);
            const int token = token0 + j * 8 + transpose.token, n = n0 + transpose.row_half * 8;
            if (transpose.token < AT_ONCE * 8 && owns(j + transpose.token / 8) && token < M && n < end)
                put_8<KIND, WITH>(y, size_t(token) * N + n, v);
        }
    }
}

// Store f32 totals, as far as they are below M and N, plus the bias of rows g and g + 8 (-0 where there is none), as
// f16 (KIND 0), bf16 (1) or f32 (2). `buffer`: WARP_BUFFER_BYTES of this warp.
template <int KIND, int TOKENS>
__device__ __forceinline__ void store_totals(const float (&total)[TOKENS / 2], const float (&bias)[2], void* y,
                                             unsigned char* buffer, int lane, int token0, int n0, int M, int N) {
    const int g = lane / 4, t = lane % 4;
    if constexpr (KIND == 2) {
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int token = token0 + j * 8 + 2 * t + e % 2, n = n0 + g + e / 2 * 8;
                if (token < M && n < N)
                    static_cast<float*>(y)[size_t(token) * N + n] = __fadd_rn(total[4 * j + e], bias[e / 2]);
            }
    } else {
        constexpr int AT_ONCE = TOKENS < 16 ? 1 : 2;
        const TokenTranspose transpose(buffer, lane);
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j += AT_ONCE) {
            unsigned h[4] = {};
#pragma unroll
            for (int i = 0; i < 2 * AT_ONCE; ++i) {
                const float* d = total + 4 * j + 2 * i;
                h[i] = rounded_pair<KIND>(__fadd_rn(d[0], bias[i % 2]), __fadd_rn(d[1], bias[i % 2]));
            }
            const uint4 v = transpose(h);
            const int token = token0 + j * 8 + transpose.token, n = n0 + transpose.row_half * 8;
            if (transpose.token < AT_ONCE * 8 && token < M && n < N)
                *reinterpret_cast<uint4*>(static_cast<unsigned short*>(y) + size_t(token) * N + n) = v;
        }
    }
}

}  // namespace ptxlab
