// gemm_w4a4_s4_sm80: Y = X W^T, both in INT4, on the INT4 tensor cores: Atom's first bar (section 5.4, Fig. 8).
//
// Contract   accumulators[m, n] = sum_k x[m, k] * w[n, k] of s4, exact in int32; y = accumulators * x_scale[m] *
//            w_scale[n] + bias[n], each operation in f32 and then rounded to the output, or the accumulators themselves
//            (OUT == 3). Any M >= 1, N a multiple of 8, K of 32; padding is zero-filled on the way in.
// Shows      what mma.m16n8k64 is fed: two nibbles a byte as they lie in memory, through ldmatrix; a scale per token and
//            channel alone, as if a group were all of K. GPUs without INT4 tensor cores (sm_90) run it in software.
// Guide      notebooks/guide/kernels_gemm.md: operands, schedule, constants
// PTX ISA    9.7.14 mma.m16n8k64 (.s4), ldmatrix; 9.7.9 cp.async with zero fill.
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
constexpr int PITCH = BN + 4;  // int32 of the tile of results in shared memory

}  // namespace

extern "C" __global__ void __launch_bounds__(BN* WM) gemm_w4a4_s4_sm80(
    const unsigned char* __restrict__ w,  // u8  [N, K/2], two s4 a byte
    const float* __restrict__ w_scale,    // f32 [N]
    const unsigned char* __restrict__ x,  // u8  [M, K/2], likewise
    const float* __restrict__ x_scale,    // f32 [M]
    const float* __restrict__ bias,       // f32 [N], or null
    void* __restrict__ y,                 // [M, N], by OUT
    int M, int N, int K) {
    extern __shared__ __align__(128) unsigned char ring[];
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const int token_tiles = (M + BM - 1) / BM;
    const int token0 = blockIdx.x % token_tiles * BM, row0 = blockIdx.x / token_tiles * BN;
    const int lane = threadIdx.x % 32, wn = threadIdx.x / 32 % WN, wm = threadIdx.x / 32 / WN;
    const int stages = (K + 127) / 128;
    const auto fetch = [&](int stage) {
        unsigned char* slot = ring + stage % STAGES * STAGE_BYTES;
        if (stage < stages) {
            ptxlab::fetch_rows<BN, THREADS>(slot, w, row0, N, stage * ptxlab::ROW_BYTES, K / 2);
            ptxlab::fetch_rows<BM, THREADS>(slot + BN * ptxlab::ROW_BYTES, x, token0, M, stage * ptxlab::ROW_BYTES,
                                            K / 2);
        }
        ptxlab::cp_async_commit();
    };

    int acc[2][TOKENS / 8][4] = {};
    PHASE(LOAD);
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage);
    for (int stage = 0; stage < stages; ++stage) {
        PHASE(WAIT_COPY);
        ptxlab::cp_async_wait<STAGES - 2>();
        __syncthreads();  // the stage is there for everyone, and the oldest slot is free
        PHASE(LOAD);
        fetch(stage + STAGES - 1);
        PHASE(MULTIPLY);
        const unsigned char* slot = ring + stage % STAGES * STAGE_BYTES;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            ptxlab::multiply_half<true, TOKENS>(acc, slot + wn * 32 * ptxlab::ROW_BYTES,
                                                slot + (BN + wm * TOKENS) * ptxlab::ROW_BYTES, half, lane);
    }

    PHASE(EPILOGUE);
    ptxlab::cp_async_wait<0>();
    __syncthreads();  // the results take the ring's place
    int* tile = reinterpret_cast<int*>(ring);
    ptxlab::gather_results<TOKENS, PITCH>(tile + wm * TOKENS * PITCH + wn * 32, acc, lane);
    __syncthreads();
    for (int i = threadIdx.x; i < BM * BN / 8; i += THREADS) {
        const int m = i / (BN / 8), c = i % (BN / 8) * 8, token = token0 + m, n = row0 + c;
        if (token < M && n < N)
            ptxlab::store_8<OUT>(y, size_t(token) * N + n, tile + m * PITCH + c, x_scale[token], w_scale + n,
                                 bias ? bias + n : nullptr);
    }
}
