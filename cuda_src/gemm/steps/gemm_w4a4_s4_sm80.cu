// gemm_w4a4_s4_sm80: Y = X W^T, both in INT4, on the INT4 tensor cores: Atom's pure INT4 (Atom section 5.4.2).
//
// Contract   accumulators[m, n] = sum_k x[m, k] * w[n, k] of s4, exact in int32; y = accumulators * x_scale[m] *
//            w_scale[n] + bias[n], each operation rounded in f32, the result then rounded to the output type, or the
//            accumulators themselves (OUT == 3). Any M >= 1, N a multiple of 8, K a multiple of 32. What lies outside
//            the matrices is loaded as zeros.
// Shows      the operands of mma.m16n8k64: two nibbles a byte as they lie in memory, through ldmatrix; one scale per
//            token and channel, as if a group were all of K. GPUs without INT4 tensor cores (sm_90) run it in software.
// Guide      notebooks/guide/kernels_gemm.md: operands, schedule, constants
// PTX ISA    9.7.14 mma.m16n8k64 (.s4), ldmatrix; 9.7.9 cp.async with zero fill.
#include "rows_sm80.cuh"
#include "timeline.cuh"

#ifndef BN
#define BN 128     // rows of W in a tile
#define BM 128     // tokens
#define WM 2       // warps along the tokens
#define STAGES 4   // slots of the ring
#define OUT 0      // y as 0 f16, 1 bf16, 2 f32; 3 the int32 accumulators
#define SUM_PAD 4  // numbers between rows of results in shared memory
#endif

using Tile = ptxlab::RowsTile<BN, BM, WM>;

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
    const Tile tile(M, N);
    const int stages = (K + 127) / 128;
    const auto fetch = [&](int stage) {
        unsigned char* slot = ring + stage % STAGES * (Tile::W_BYTES + Tile::X_BYTES);
        if (stage < stages) {
            tile.fetch_w(slot, w, stage * ptxlab::ROW_BYTES, K / 2);
            tile.fetch_x(slot + Tile::W_BYTES, x, stage * ptxlab::ROW_BYTES, K / 2);
        }
        ptxlab::cp_async_commit();
    };

    Tile::Sums acc = {};
    PHASE(LOAD);
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage);
    for (int stage = 0; stage < stages; ++stage) {
        PHASE(WAIT_COPY);
        ptxlab::cp_async_wait<STAGES - 2>();
        __syncthreads();  // the stage is there for everyone, and the oldest slot is free
        PHASE(LOAD);
        fetch(stage + STAGES - 1);
        PHASE(MULTIPLY);
        const unsigned char* slot = ring + stage % STAGES * (Tile::W_BYTES + Tile::X_BYTES);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            tile.multiply_half<true>(acc, slot + tile.w_at(), slot + (Tile::W_BYTES + tile.x_at()), half);
    }

    PHASE(EPILOGUE);
    ptxlab::cp_async_wait<0>();
    tile.gather<SUM_PAD>(ring, acc, [&](size_t index, int token, int n, const int* sums) {
        ptxlab::store_8<OUT>(y, index, sums, x_scale[token], w_scale + n, bias ? bias + n : nullptr);
    });
}
