// gemm_w4ax_naive_sm80: Y = X W^T, INT4 weights, INT4 and INT8 activation blocks; mixed tiles (COMET section 4.2).
//
// Contract   y = sum over the blocks of 128 channels, K4 channels of INT4 and then K8 of INT8, of sum_b[m, n] *
//            (x_scale[m, b] * w_scale[n, b]) + bias, one fma after the other in f32 from 0 on, then rounded to the
//            output (OUT 0 f16, 1 bf16, 2 f32); the integer sums are exact in int32. Any M >= 1, N a multiple of 8, K4
//            and K8 of 128. What lies outside the matrices is loaded as zeros.
// Shows      tiles of 128 x 128 x 128 of two kinds in the order of the grid. INT4 activations: m16n8k64. INT8
//            activations: m16n8k32, for which the weights become bytes by location switch and zero extension (COMET
//            section 4.3): an AND, or a shift and an AND, leave 16 w in each. A block works through all tiles of its
//            part of Y, one after the other, each behind a barrier. So blocks are alike and there is nothing to
//            balance. (COMET shares tiles along K out among SMs, and balances that by remapping and decomposition.)
//            Unlike in COMET, weights stay in registers when they become bytes (COMET section 4.1 stores them to shared
//            memory), which saves a barrier; the ring has three slots, not two buffers (COMET section 4.2); and a warp
//            has 32 x 64 of either kind of tile (COMET section 5: 64 x 64, half the warps for INT4), so that both kinds
//            have the same accumulators.
// Guide      notebooks/guide/kernels_gemm.md: operands, schedule, constants
// PTX ISA    9.7.14 mma.m16n8k64 (.s4), mma.m16n8k32 (.s8), ldmatrix; 9.7.9 cp.async with zero fill.
#include "rows_sm80.cuh"
#include "timeline.cuh"

#ifndef BN
#define BN 128     // rows of W in a tile
#define BM 128     // tokens
#define WM 2       // warps along the tokens
#define STAGES 3   // slots of the ring
#define OUT 0      // y as 0 f16, 1 bf16, 2 f32
#define SUM_PAD 4  // numbers between rows of results in shared memory
#endif

namespace {

using Tile = ptxlab::RowsTile<BN, BM, WM>;
constexpr int OPERANDS = Tile::W_BYTES + 2 * Tile::X_BYTES;  // bytes of 128 channels; only INT8 uses the second X
constexpr int STAGE_BYTES = OPERANDS + Tile::SCALE_BYTES;

}  // namespace

extern "C" __global__ void __launch_bounds__(BN* WM) gemm_w4ax_naive_sm80(
    const unsigned char* __restrict__ w,   // u8  [N, (K4 + K8) / 2]: pairs; behind K4 / 2 bytes in COMET's order
    const __half* __restrict__ w_scale,    // f16 [N, (K4 + K8) / 128 in whole eights]
    const unsigned char* __restrict__ x4,  // u8  [M, K4/2], two s4 a byte
    const unsigned char* __restrict__ x8,  // s8  [M, K8]
    const __half* __restrict__ x_scale,    // f16 [M, (K4 + K8) / 128 in whole eights]
    const float* __restrict__ bias,        // f32 [N], or null
    void* __restrict__ y,                  // [M, N], by OUT
    int M, int N, int K4, int K8) {
    extern __shared__ __align__(128) unsigned char ring[];
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const Tile tile(M, N);
    const int blocks4 = K4 / 128, blocks = blocks4 + K8 / 128, columns = (blocks + 7) / 8 * 8;  // scales of a row
    // Issue the copies of a block of 128 channels and its scales into its slot, as one commit group.
    const auto fetch = [&](int block) {
        unsigned char *slot = ring + block % STAGES * STAGE_BYTES, *xs = slot + Tile::W_BYTES;
        if (block < blocks) {
            tile.fetch_w(slot, w, block * ptxlab::ROW_BYTES, (K4 + K8) / 2);
            if (block < blocks4) {
                tile.fetch_x(xs, x4, block * ptxlab::ROW_BYTES, K4 / 2);
            } else {
                const int first_byte = (block - blocks4) * 128;
                tile.fetch_x(xs, x8, first_byte, K8);
                tile.fetch_x(xs + Tile::X_BYTES, x8, first_byte + ptxlab::ROW_BYTES, K8);
            }
            tile.fetch_scales(slot + OPERANDS, w_scale, x_scale, block / 2, columns);
        }
        ptxlab::cp_async_commit();
    };

    Tile::Sums acc = {};
    Tile::Totals total = {};
    PHASE(LOAD);
    for (int block = 0; block < STAGES - 1; ++block) fetch(block);
    for (int block = 0; block < blocks; ++block) {
        PHASE(WAIT_COPY);
        ptxlab::cp_async_wait<STAGES - 2>();
        __syncthreads();  // the block is there for everyone, and the oldest slot is free
        PHASE(LOAD);
        fetch(block + STAGES - 1);
        PHASE(MULTIPLY);
        const unsigned char *slot = ring + block % STAGES * STAGE_BYTES, *ws = slot + tile.w_at(),
                            *xs = slot + Tile::W_BYTES + tile.x_at();
        const bool int4 = block < blocks4;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (int4) tile.multiply_half<true>(acc, ws, xs, half);
            else tile.multiply_switched(acc, ws, xs + half * Tile::X_BYTES, half);
        const unsigned char* scales = slot + OPERANDS;
        tile.add_group(total, acc, scales, block & 1, int4 ? 1 : 1 / 16.0f);
    }

    PHASE(EPILOGUE);
    ptxlab::cp_async_wait<0>();
    tile.store_totals<OUT, SUM_PAD>(ring, total, y, bias);
}
