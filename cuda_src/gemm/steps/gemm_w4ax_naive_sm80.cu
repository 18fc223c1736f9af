// gemm_w4ax_naive_sm80: Y = X W^T, activations in blocks of INT4 and of INT8, weights in INT4: COMET's first step (4.2).
//
// Contract   y = sum over the blocks of 128 channels, K4 channels of INT4 and then K8 of INT8, of sum_b[m, n] *
//            (x_scale[m, b] * w_scale[n, b]) + bias, one fma after the other in f32 from 0 on, then rounded to the output
//            (OUT 0 f16, 1 bf16, 2 f32); the sums are exact in int32. Any M >= 1, N a multiple of 8, K4 and K8 of 128;
//            padding is zero-filled on the way in.
// Shows      tiles of 128 x 128 x 128 of two kinds in the order of the grid: m16n8k64 where both operands are INT4;
//            m16n8k32 where the activations are INT8, for which the weights become bytes by location switch and zero
//            extension (4.3): an AND, or a shift and an AND, leave 16 w in each. A block works through all tiles of its
//            part of Y, one after the other, each behind a barrier: so blocks are alike, and there is nothing to
//            balance yet. (COMET shares tiles along K out among SMs, which its remapping and decomposition then balance.)
// Guide      notebooks/guide/kernels_gemm.md: operands, schedule, constants
// PTX ISA    9.7.14 mma.m16n8k64 (.s4), mma.m16n8k32 (.s8), ldmatrix; 9.7.9 cp.async with zero fill.
#include "rows_sm80.cuh"
#include "timeline.cuh"

#ifndef BN
#define BN 128
#define BM 128
#define WM 2
#define STAGES 3
#define OUT 0
#endif

namespace {

constexpr int WN = BN / 32, THREADS = 32 * WN * WM, TOKENS = BM / WM;              // warps along rows; tokens of a warp
constexpr int W_BYTES = BN * ptxlab::ROW_BYTES, X_BYTES = BM * ptxlab::ROW_BYTES;  // of 128 INT4 or 64 INT8 channels
constexpr int OPERANDS = W_BYTES + 2 * X_BYTES;
constexpr int STAGE_BYTES = OPERANDS + (BN + BM) * 4;  // two scales of every row
constexpr int PITCH = BN + 4;                          // f32 of the tile of results in shared memory

// acc += the products of a warp over half a block, 64 channels of INT8, the weights times 16. A 16-byte chunk of a row of
// W is a k32 step, word t what lane t of four needs of it: in the high nibbles channels 4 t .., in the low ones 16 + 4 t.
__device__ __forceinline__ void multiply_mixed(int (&acc)[2][TOKENS / 8][4], const unsigned char* w,
                                               const unsigned char* x, int half, int lane) {
    unsigned a[2][4];  // rows 0-7, 8-15 of the first step, of the second
#pragma unroll
    for (int h = 0; h < 2; ++h)
        ptxlab::ldmatrix_x4(a[h], w + ptxlab::chunk_at(h * 16 + lane % 16, half * 2 + lane / 16));
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int m = 0; m < TOKENS / 8; m += 2) {
            unsigned b[4];
            const int row = m * 8 + lane % 8 + (TOKENS > 8 ? lane / 16 * 8 : 0);
            ptxlab::ldmatrix_x4(b, x + ptxlab::chunk_at(row, step * 2 + lane / 8 % 2));
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (m + j >= TOKENS / 8) break;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const unsigned top = a[h][2 * step], below = a[h][2 * step + 1];
                    ptxlab::mma_s8(acc[h][m + j], top & 0xf0f0f0f0u, below & 0xf0f0f0f0u, top << 4 & 0xf0f0f0f0u,
                                   below << 4 & 0xf0f0f0f0u, b[2 * j], b[2 * j + 1]);
                }
            }
        }
}

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
    const int token_tiles = (M + BM - 1) / BM;
    const int token0 = blockIdx.x % token_tiles * BM, row0 = blockIdx.x / token_tiles * BN;
    const int lane = threadIdx.x % 32, wn = threadIdx.x / 32 % WN, wm = threadIdx.x / 32 / WN;
    const int blocks4 = K4 / 128, blocks = blocks4 + K8 / 128, columns = (blocks + 7) / 8 * 8;  // scales of a row
    const auto fetch = [&](int block) {
        unsigned char *slot = ring + block % STAGES * STAGE_BYTES, *xs = slot + W_BYTES;
        if (block < blocks) {
            ptxlab::fetch_rows<BN, THREADS>(slot, w, row0, N, block * ptxlab::ROW_BYTES, (K4 + K8) / 2);
            if (block < blocks4) {
                ptxlab::fetch_rows<BM, THREADS>(xs, x4, token0, M, block * ptxlab::ROW_BYTES, K4 / 2);
            } else {
                const int first = (block - blocks4) * 128;
                ptxlab::fetch_rows<BM, THREADS>(xs, x8, token0, M, first, K8);
                ptxlab::fetch_rows<BM, THREADS>(xs + X_BYTES, x8, token0, M, first + ptxlab::ROW_BYTES, K8);
            }
            __half* scales = reinterpret_cast<__half*>(slot + OPERANDS);
            ptxlab::fetch_scales<BN, THREADS>(scales, w_scale, row0, N, block / 2, columns);
            ptxlab::fetch_scales<BM, THREADS>(scales + 2 * BN, x_scale, token0, M, block / 2, columns);
        }
        ptxlab::cp_async_commit();
    };

    int acc[2][TOKENS / 8][4] = {};
    float total[2][TOKENS / 8][4] = {};
    PHASE(LOAD);
    for (int block = 0; block < STAGES - 1; ++block) fetch(block);
    for (int block = 0; block < blocks; ++block) {
        PHASE(WAIT_COPY);
        ptxlab::cp_async_wait<STAGES - 2>();
        __syncthreads();  // the block is there for everyone, and the oldest slot is free
        PHASE(LOAD);
        fetch(block + STAGES - 1);
        PHASE(MULTIPLY);
        const unsigned char *slot = ring + block % STAGES * STAGE_BYTES, *ws = slot + wn * 32 * ptxlab::ROW_BYTES,
                            *xs = slot + W_BYTES + wm * TOKENS * ptxlab::ROW_BYTES;
        const bool int4 = block < blocks4;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (int4) ptxlab::multiply_half<true, TOKENS>(acc, ws, xs, half, lane);
            else multiply_mixed(acc, ws, xs + half * X_BYTES, half, lane);
        const __half* scales = reinterpret_cast<const __half*>(slot + OPERANDS);
        ptxlab::add_group<TOKENS>(total, acc, scales + 2 * wn * 32, scales + 2 * (BN + wm * TOKENS), block & 1, lane,
                                  int4 ? 1 : 1 / 16.0f);
    }

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
