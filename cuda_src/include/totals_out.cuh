// From f32 totals in the fragments of a wgmma straight to Y, one warp by itself: as fragments_out.cuh does it with sums.
// A warp has 16 rows of W (n) and TOKENS columns; lane 4 g + t holds, of every 8 tokens, rows g, g, g + 8, g + 8 at
// tokens 2 t, 2 t + 1, twice.
#pragma once
#include "mma.cuh"
#include "output.cuh"

namespace ptxlab {

// Tokens token0 .. of rows n0 .. n0 + 15, as far as they are below M and N, with the bias of rows g and g + 8 (-0 where
// there is none), to f16 (KIND 0), bf16 (1) or f32 (2). `buffer`: 512 bytes of this warp.
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
        const int row = lane % 8, matrix = lane / 8;  // whose address this lane gives: token, and (half, 8 tokens)
        const unsigned to = shared_address(buffer) + (matrix / 2 * 8 + row) * 32 + ((matrix % 2) ^ (row / 4)) * 16;
        const int out = lane / 2, half = lane % 2;  // what this lane writes: token, and 8 rows
        const unsigned from = shared_address(buffer) + out * 32 + (half ^ (out / 4 % 2)) * 16;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j += AT_ONCE) {
            unsigned h[4] = {};
#pragma unroll
            for (int i = 0; i < 2 * AT_ONCE; ++i) {
                const float* d = total + 4 * j + 2 * i;
                h[i] = rounded_pair<KIND>(__fadd_rn(d[0], bias[i % 2]), __fadd_rn(d[1], bias[i % 2]));
            }
            __syncwarp();  // what was there has been taken
            store_matrices_transposed(to, h);
            __syncwarp();
            const uint4 v = load_shared_16(from);
            const int token = token0 + j * 8 + out, n = n0 + half * 8;
            if (out < AT_ONCE * 8 && token < M && n < N)
                *reinterpret_cast<uint4*>(static_cast<unsigned short*>(y) + size_t(token) * N + n) = v;
        }
    }
}

}  // namespace ptxlab
