// gemm_f16_sm80: Y = X W^T in FP16, summed in FP32 in one fixed order whatever else is in the batch: an LM head.
//
// Contract   y[m, n] = sum_k x[m, k] w[n, k], rounded once to f16. The sum goes through K in steps of 32 channels, each
//            of two MMAs of 16: channels 8 t .. 8 t + 3 for t = 0 .. 3, then 8 t + 4 .. 8 t + 7. So a row has the same
//            bits in any batch and in any tile. K a multiple of 32.
// Tile       a warp: 16 rows of W x BM tokens over all of K; a block: WARPS warps along the rows.
// Shows      operands of mma.sync loaded straight from global memory: 16 bytes of a row of W are a lane's operand of
//            two MMAs.
// Guide      notebooks/guide/kernels_gemm.md: operands, constants
// PTX ISA    9.7.14.5.8 mma.m16n8k16
#include "mma_f16.cuh"

#ifndef BM
#define BM 8      // tokens of a tile
#define UNROLL 8  // steps of 32 channels whose loads are in flight at once
#define WARPS 8   // of a block, 16 rows of W each
#endif

namespace {

constexpr int COLUMNS = BM / 8;  // MMA tiles of eight tokens

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * WARPS) gemm_f16_sm80(const __half* __restrict__ w,  // [N, K]
                                                                       const __half* __restrict__ x,  // [M, K]
                                                                       __half* __restrict__ y,        // [M, N]
                                                                       int M, int N, int K) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row = (blockIdx.y * WARPS + threadIdx.x / 32) * 16, token = blockIdx.x * BM;
    if (row >= N) return;
    // For rows and tokens past the end the last one is read again; their results are not stored.
    const auto row_of = [&](const __half* matrix, int index, int last) {
        return reinterpret_cast<const uint4*>(matrix + static_cast<size_t>(min(index, last)) * K) + t;
    };
    const uint4 *low = row_of(w, row + g, N - 1), *high = row_of(w, row + g + 8, N - 1);
    const uint4* column[COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) column[j] = row_of(x, token + 8 * j + g, M - 1);

    float sums[COLUMNS][4] = {};
#pragma unroll UNROLL
    for (int step = 0; step < K / 32; ++step) {
        const uint4 a = low[4 * step], b = high[4 * step];
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const uint4 of_token = column[j][4 * step];
            ptxlab::mma_f16(sums[j], a.x, b.x, a.y, b.y, of_token.x, of_token.y);
            ptxlab::mma_f16(sums[j], a.z, b.z, a.w, b.w, of_token.z, of_token.w);
        }
    }

#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int m = token + 8 * j + 2 * t + e % 2, n = row + g + e / 2 * 8;
            if (m < M && n < N) y[static_cast<size_t>(m) * N + n] = __float2half_rn(sums[j][e]);
        }
    }
}
