// gemm_w4a4_outlier_sm80: INT4 with a few outlier channels in INT8, in one main loop: Atom's second bar (section 4.1).
//
// Contract   sum4[m, n] of the K INT4 channels and sum8[m, n] of the outliers behind them are exact in int32; y =
//            fma(sum8, x_scale[m, 1] * w_scale[n, 1], sum4 * (x_scale[m, 0] * w_scale[n, 0])) + bias[n] in f32, rounded
//            to the output (OUT 0 f16, 1 bf16, 2 f32). Any M >= 1, N a multiple of 8, K of 64, 0, 64 or 128 outliers; padding
//            is zero-filled on the way in.
// Shows      the gain of mixed precision without its price: behind the INT4 channels the same loop goes on with
//            m16n8k32, whose registers hold the same bytes; a sum leaves the tensor cores twice.
// Guide      notebooks/guide/kernels_gemm.md: operands, schedule, constants
// PTX ISA    9.7.14 mma.m16n8k64 (.s4), mma.m16n8k32 (.s8), ldmatrix; 9.7.9 cp.async with zero fill.
#include "rows_sm80.cuh"
#include "timeline.cuh"

#ifndef BN
#define BN 128
#define BM 128
#define WM 2
#define STAGES 4
#define OUT 0
#endif

namespace {

constexpr int WN = BN / 32, THREADS = 32 * WN * WM, TOKENS = BM / WM;  // warps along rows; tokens of a warp
constexpr int STAGE_BYTES = (BN + BM) * ptxlab::ROW_BYTES;
constexpr int PITCH = BN + 4;     // f32 of the tile of results in shared memory
constexpr int SCALE_COLUMNS = 8;  // of a row: INT4, outliers, padding

}  // namespace

extern "C" __global__ void __launch_bounds__(BN* WM) gemm_w4a4_outlier_sm80(
    const unsigned char* __restrict__ w4,  // u8  [N, K/2], two s4 a byte
    const unsigned char* __restrict__ w8,  // s8  [N, outliers]
    const __half* __restrict__ w_scale,    // f16 [N, 8]
    const unsigned char* __restrict__ x4,  // u8  [M, K/2], two s4 a byte
    const unsigned char* __restrict__ x8,  // s8  [M, outliers]
    const __half* __restrict__ x_scale,    // f16 [M, 8]
    const float* __restrict__ bias,        // f32 [N], or null
    void* __restrict__ y,                  // [M, N], by OUT
    int M, int N, int K, int outliers) {
    extern __shared__ __align__(128) unsigned char ring[];
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const int token_tiles = (M + BM - 1) / BM;
    const int token0 = blockIdx.x % token_tiles * BM, row0 = blockIdx.x / token_tiles * BN;
    const int lane = threadIdx.x % 32, wn = threadIdx.x / 32 % WN, wm = threadIdx.x / 32 / WN;
    const int stages4 = (K + 127) / 128, stages = stages4 + outliers / 64;
    __half* w_scales = reinterpret_cast<__half*>(ring + STAGES * STAGE_BYTES);  // 2 of each row
    __half* x_scales = w_scales + 2 * BN;
    const auto fetch = [&](int stage) {
        unsigned char* slot = ring + stage % STAGES * STAGE_BYTES;
        if (stage < stages) {
            const bool int4 = stage < stages4;
            const int first = (int4 ? stage : stage - stages4) * ptxlab::ROW_BYTES, bytes = int4 ? K / 2 : outliers;
            ptxlab::fetch_rows<BN, THREADS>(slot, int4 ? w4 : w8, row0, N, first, bytes);
            ptxlab::fetch_rows<BM, THREADS>(slot + BN * ptxlab::ROW_BYTES, int4 ? x4 : x8, token0, M, first, bytes);
        }
        ptxlab::cp_async_commit();
    };

    int acc[2][TOKENS / 8][4] = {};
    float total[2][TOKENS / 8][4] = {};
    PHASE(LOAD);
    ptxlab::fetch_scales<BN, THREADS>(w_scales, w_scale, row0, N, 0, SCALE_COLUMNS);  // they come with the first stage
    ptxlab::fetch_scales<BM, THREADS>(x_scales, x_scale, token0, M, 0, SCALE_COLUMNS);
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage);
    const auto add = [&](int odd) {
        ptxlab::add_group<TOKENS>(total, acc, w_scales + 2 * wn * 32, x_scales + 2 * wm * TOKENS, odd, lane);
    };
    for (int stage = 0; stage < stages; ++stage) {
        PHASE(WAIT_COPY);
        ptxlab::cp_async_wait<STAGES - 2>();
        __syncthreads();  // the stage is there for everyone, and the oldest slot is free
        PHASE(LOAD);
        fetch(stage + STAGES - 1);
        PHASE(MULTIPLY);
        const unsigned char *slot = ring + stage % STAGES * STAGE_BYTES, *w = slot + wn * 32 * ptxlab::ROW_BYTES,
                            *x = slot + (BN + wm * TOKENS) * ptxlab::ROW_BYTES;
        if (stage == stages4) add(0);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (stage < stages4) ptxlab::multiply_half<true, TOKENS>(acc, w, x, half, lane);
            else ptxlab::multiply_half<false, TOKENS>(acc, w, x, half, lane);
    }
    add(outliers > 0);

    PHASE(EPILOGUE);
    ptxlab::cp_async_wait<0>();
    __syncthreads();  // the results take the ring's place
    float* tile = reinterpret_cast<float*>(ring);
    ptxlab::gather_results<TOKENS, PITCH>(tile + wm * TOKENS * PITCH + wn * 32, total, lane);
    __syncthreads();
    for (int i = threadIdx.x; i < BM * BN / 8; i += THREADS) {
        const int m = i / (BN / 8), c = i % (BN / 8) * 8, token = token0 + m, n = row0 + c;
        if (token < M && n < N)
            ptxlab::store_8_floats<OUT>(y, size_t(token) * N + n, tile + m * PITCH + c, bias ? bias + n : nullptr);
    }
}
