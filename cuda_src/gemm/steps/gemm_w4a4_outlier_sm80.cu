// gemm_w4a4_outlier_sm80: mixed precision in one main loop: INT4, then a few INT8 outlier channels (Atom section 4.1).
//
// Contract   sum4[m, n] of the K INT4 channels and sum8[m, n] of the outliers behind them are exact in int32; y =
//            fma(sum8, x_scale[m, 1] * w_scale[n, 1], sum4 * (x_scale[m, 0] * w_scale[n, 0])) + bias[n] in f32, rounded
//            to the output (OUT 0 f16, 1 bf16, 2 f32). Any M >= 1, N a multiple of 8, K a multiple of 64; 0, 64 or 128
//            outliers. What lies outside the matrices is loaded as zeros.
// Shows      mixed precision without a loop of its own for the outliers: after the INT4 channels the same loop goes on
//            with m16n8k32, whose operand registers hold the same bytes as those of m16n8k64, so that one way through
//            shared memory serves both. The int32 sums are converted and scaled at most twice, not once per group.
// Guide      notebooks/guide/kernels_gemm.md: operands, schedule, constants
// PTX ISA    9.7.14 mma.m16n8k64 (.s4), mma.m16n8k32 (.s8), ldmatrix; 9.7.9 cp.async with zero fill.
#include "rows_sm80.cuh"
#include "timeline.cuh"

#ifndef BN
#define BN 128     // rows of W in a tile
#define BM 128     // tokens
#define WM 2       // warps along the tokens
#define STAGES 4   // slots of the ring
#define OUT 0      // y as 0 f16, 1 bf16, 2 f32
#define SUM_PAD 4  // f32 between rows of results in shared memory: each store of a warp takes 32 banks
#endif

namespace {

using Tile = ptxlab::RowsTile<BN, BM, WM>;
constexpr int STAGE_BYTES = Tile::W_BYTES + Tile::X_BYTES;
constexpr int SCALE_COLUMNS = 8;                  // scales of a row: INT4, outliers, padding to eight
constexpr int INT4_SCALE = 0, OUTLIER_SCALE = 1;  // columns

}  // namespace

// A warp has 32 rows of W: BN / 32 * WM warps are BN * WM threads.
extern "C" __global__ void __launch_bounds__(BN* WM) gemm_w4a4_outlier_sm80(
    const unsigned char* __restrict__ w4,  // u8  [N, K/2], two s4 a byte
    const unsigned char* __restrict__ w8,  // s8  [N, outliers]
    const __half* __restrict__ w_scale,    // f16 [N, SCALE_COLUMNS]
    const unsigned char* __restrict__ x4,  // u8  [M, K/2], two s4 a byte
    const unsigned char* __restrict__ x8,  // s8  [M, outliers]
    const __half* __restrict__ x_scale,    // f16 [M, SCALE_COLUMNS]
    const float* __restrict__ bias,        // f32 [N], or null
    void* __restrict__ y,                  // [M, N], by OUT
    int M, int N, int K, int outliers) {
    extern __shared__ __align__(128) unsigned char ring[];
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const Tile tile(M, N);
    // A stage is 64 bytes of every row: 128 INT4 channels (zeros behind K) or 64 outliers.
    const int stages4 = (K + 127) / 128, stages = stages4 + outliers / 64;
    unsigned char* scales = ring + STAGES * STAGE_BYTES;  // behind the ring: two f16 for each row of both operands
    const auto fetch = [&](int stage) {
        unsigned char* slot = ring + stage % STAGES * STAGE_BYTES;
        if (stage < stages) {
            const bool int4 = stage < stages4;
            const int first_byte = (int4 ? stage : stage - stages4) * ptxlab::ROW_BYTES,
                      row_bytes = int4 ? K / 2 : outliers;
            tile.fetch_w(slot, int4 ? w4 : w8, first_byte, row_bytes);
            tile.fetch_x(slot + Tile::W_BYTES, int4 ? x4 : x8, first_byte, row_bytes);
        }
        ptxlab::cp_async_commit();  // past the last stage, too: cp_async_wait counts groups, one per stage
    };

    Tile::Sums acc = {};      // s32, of the channels of one precision
    Tile::Totals total = {};  // f32, of acc times the scales
    PHASE(LOAD);
    // Pair 0 of the columns, both scales of a row; they come with the first stage.
    tile.fetch_scales(scales, w_scale, x_scale, 0, SCALE_COLUMNS);
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage);
    for (int stage = 0; stage < stages; ++stage) {
        PHASE(WAIT_COPY);
        ptxlab::cp_async_wait<STAGES - 2>();
        __syncthreads();  // the stage is there for everyone, and the oldest slot is free
        PHASE(LOAD);
        fetch(stage + STAGES - 1);
        PHASE(MULTIPLY);
        const unsigned char *slot = ring + stage % STAGES * STAGE_BYTES, *w = slot + tile.w_at(),
                            *x = slot + (Tile::W_BYTES + tile.x_at());
        // INT4 is done: total += acc times its scales, acc = 0.
        if (stage == stages4) tile.add_group(total, acc, scales, INT4_SCALE);
#pragma unroll
        for (int half = 0; half < 2; ++half)  // 32 bytes of a row: one MMA step
            if (stage < stages4) tile.multiply_half<true>(acc, w, x, half);
            else tile.multiply_half<false>(acc, w, x, half);
    }
    tile.add_group(total, acc, scales, outliers > 0 ? OUTLIER_SCALE : INT4_SCALE);  // what the last stage held

    PHASE(EPILOGUE);
    ptxlab::cp_async_wait<0>();  // only empty groups can be pending: no copy lands on the results
    tile.store_totals<OUT, SUM_PAD>(ring, total, y, bias);
}
