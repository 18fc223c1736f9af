// gemm_w4a8_lqq_sm80: Y = X W^T, INT8 activations, LiquidQuant weights in groups (LiquidGEMM section 4), on mma.sync.
//
// Contract   accumulators[m, n] = sum_k x[m, k] * (q4 * s1 + min)[n, k], exact in int32 for K < 131,072; y =
//            accumulators * x_scale[m] * w_scale[n] + bias[n], each operation rounded in f32, the result then rounded
//            to the output type, or the accumulators themselves (OUT == 3). Any M >= 1, N a multiple of 8, K a multiple
//            of the group. What lies outside the matrices is loaded as zeros.
// Shows      gemm_w4a8_qoq_sm80 with another dequantiser: one IMAD and one XOR for four weights in place of a multiply
//            and vadd4. Layout, tile, ring and epilogue are that kernel's. Outside the matrices, zero constants
//            dequantise to -128, which meets zero activations.
// Guide      notebooks/guide/kernels_gemm.md: operands, schedule, order of blocks, constants
// PTX ISA    9.7.14 mma.m16n8k32 (.s8), ldmatrix; 9.7.9 cp.async with zero fill.
#include "dequant.cuh"
#include "mma.cuh"
#include "output.cuh"
#include "qserve_sm80.cuh"
#include "timeline.cuh"

#ifndef BN
#define BN 128     // rows of W in a tile
#define BM 64      // tokens
#define BK 128     // channels of a stage
#define WN 4       // warps along the rows
#define WM 1       // along the tokens
#define WK 1       // along the channels
#define STAGES 4   // slots of the ring
#define GROUP 128  // channels of a level-2 scale
#define OUT 0      // y as 0 f16, 1 bf16, 2 f32; 3 the int32 accumulators
#define SUM_PAD 4  // int32 between rows of results in shared memory
#endif

namespace {

using ptxlab::u32;
using Tile = ptxlab::QServeTile<BN, BM, BK, WN, WM, WK>;
using Groups = ptxlab::QServeGroups<Tile, BK, GROUP>;
constexpr int TILE_PITCH = BN + SUM_PAD;  // int32 of the tile of results in shared memory

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * WN * WM * WK) gemm_w4a8_lqq_sm80(
    const uint4* __restrict__ qweight,  // u32 [N/32, K/32, 128], QServe's order
    const uint4* __restrict__ scale,    // u8  [N/32, K/g, 32]
    const uint4* __restrict__ offset,   // u8  [N/32, K/g, 32]: 128 + min
    const float* __restrict__ w_scale,  // f32 [N]
    const signed char* __restrict__ x,  // s8  [M, K]
    const float* __restrict__ x_scale,  // f32 [M]
    const float* __restrict__ bias,     // f32 [N], or null
    void* __restrict__ y,               // [M, N], by OUT
    int M, int N, int K) {
    extern __shared__ __align__(128) unsigned char ring[];
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const int token_tiles = (M + BM - 1) / BM;
    const int token0 = blockIdx.x % token_tiles * BM, strip0 = blockIdx.x / token_tiles * Tile::STRIPS;
    const Groups::Operands in{{qweight, x, M, K, (N + 31) / 32, K / 32}, scale, offset, K / GROUP};

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int wn = warp % WN, wm = warp / WN % WM, wk = warp / (WN * WM);
    const int g = lane / 4;

    Tile::Sums acc = {};
    const int stages = (K + BK - 1) / BK;
    PHASE(LOAD);
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < stages) Groups::fetch(in, ring + s * Groups::STAGE_BYTES, s, strip0, token0);
        else ptxlab::cp_async_commit();
    }
    for (int stage = 0; stage < stages; ++stage) {
        PHASE(WAIT_COPY);
        ptxlab::cp_async_wait<STAGES - 2>();
        __syncthreads();  // the stage is there for everyone, and the oldest slot is free
        PHASE(LOAD);
        const int ahead = stage + STAGES - 1;
        if (ahead < stages) Groups::fetch(in, ring + ahead % STAGES * Groups::STAGE_BYTES, ahead, strip0, token0);
        else ptxlab::cp_async_commit();

        const unsigned char* slot = ring + stage % STAGES * Groups::STAGE_BYTES;
        const unsigned char* xs = slot + Tile::W_BYTES + wm * Tile::TOKENS * BK;
        const unsigned char* cs = slot + Tile::W_BYTES + Tile::X_BYTES + wn * Groups::COUNT * 64 + g * 4;
#pragma unroll
        for (int i = 0; i < Tile::STEPS / WK; ++i) {
            const int step = i * WK + wk;
            PHASE(DEQUANTISE);
            const uint4 q = *reinterpret_cast<const uint4*>(slot + ((wn * Tile::STEPS + step) * 32 + lane) * 16);
            const int group = Groups::COUNT == 1 ? 0 : step * 32 / GROUP;
            // Byte r of s4 and o4: scale and offset of row g + 8 r.
            const u32 s4 = *reinterpret_cast<const u32*>(cs + group * 64),
                      o4 = *reinterpret_cast<const u32*>(cs + group * 64 + 32);
            uint2 a[4];  // a[r]: row g + 8 r, channels 4 t .. + 3 (x) and 16 + 4 t .. + 3 (y)
            const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
            for (int r = 0; r < 4; ++r)
                a[r] = ptxlab::dequant_lqq(words[r], s4 >> (8 * r) & 0xff, __byte_perm(o4, 0, 0x1111 * r));
            PHASE(MULTIPLY);
#pragma unroll
            for (int m = 0; m < Tile::TOKENS / 8; m += 2) {
                // ldmatrix of two token tiles of 8 x 32 channels: lanes 0-7 and 8-15 address the two chunks of the
                // first tile's rows, lanes 16-31 those of the second.
                const int row = m * 8 + (lane & 7) + (lane >> 4 & (Tile::TOKENS > 8)) * 8,
                          chunk = step * 2 + (lane >> 3 & 1);
                u32 b[4];
                ptxlab::ldmatrix_x4(b, xs + row * BK + ((chunk ^ (row & 7)) * 16));
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    if (m + h >= Tile::TOKENS / 8) break;
                    ptxlab::mma_s8(acc[0][m + h], a[0].x, a[1].x, a[0].y, a[1].y, b[2 * h], b[2 * h + 1]);
                    ptxlab::mma_s8(acc[1][m + h], a[2].x, a[3].x, a[2].y, a[3].y, b[2 * h], b[2 * h + 1]);
                }
            }
        }
    }

    // Epilogue: the WK partial sums meet in a tile [BM][BN] that takes the ring's place.
    PHASE(REDUCE);
    ptxlab::cp_async_wait<0>();
    __syncthreads();
    int* result_tile = reinterpret_cast<int*>(ring);
    for (int k_warp = 0; k_warp < WK; ++k_warp) {
        if (wk == k_warp) {
#pragma unroll
            for (int a = 0; a < 2; ++a)
#pragma unroll
                for (int m = 0; m < Tile::TOKENS / 8; ++m)
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        const int n = wn * 32 + a * 16 + g + c / 2 * 8,
                                  token = wm * Tile::TOKENS + m * 8 + lane % 4 * 2 + c % 2;
                        int& sum = result_tile[token * TILE_PITCH + n];
                        sum = k_warp ? sum + acc[a][m][c] : acc[a][m][c];
                    }
        }
        __syncthreads();
    }
    PHASE(EPILOGUE);
    for (int i = threadIdx.x; i < BM * BN / 8; i += Tile::THREADS) {
        const int token = token0 + i / (BN / 8), n = strip0 * 32 + i % (BN / 8) * 8;
        if (token < M && n < N)
            ptxlab::store_8<OUT>(y, size_t(token) * N + n, result_tile + i / (BN / 8) * TILE_PITCH + i % (BN / 8) * 8,
                                 x_scale[token], w_scale + n, bias ? bias + n : nullptr);
    }
}
