// gemm_w4a8_qoq_sm90: Y = X W^T on Hopper's tensor cores, QoQ weights, one thing after the other.
//
// The baseline of LiquidGEMM's ablation (section 7, Fig. 13): wgmma with the weights from registers, dequantised by
// multiply and __vadd4 (QServe section 5.2.3), and nothing overlaps but the loads: a warp group waits for a stage,
// dequantises all of it, multiplies, waits for that, and only then takes the next.
//
// Contract   accumulators[m, n] = sum_k x[m, k] * ((q4 - z) * s1)[n, k], exact in int32; y = accumulators * x_scale[m]
//            * w_scale[n] + bias[n], each operation in f32 and then rounded to the output, or the accumulators (OUT ==
//            3). Groups of 64 or 128. Padding is zero-filled on the way in.
// Tile       block: WN warp groups of 64 rows each x BM tokens x BK channels; ring of STAGES; W in the dual-MMA layout.
// Guide      notebooks/guide/kernels_gemm.md: operands, layout, schedule, constants
// Measured   0.60, 0.51, 0.51 of the floor at M = 16, 64, 256 on an H200; 1.03 times as fast as cuBLAS FP8 (means).
// PTX ISA    9.7.15 wgmma m64nNk32 (.s8.s8); 9.7.9.25-27 bulk and tensor copies; 9.7.13.15 mbarrier.
#include "dequant.cuh"
#include "epilogue_sm90.cuh"
#include "timeline.cuh"
#include "wgmma.cuh"

#ifndef BM
#define WN 2
#define BM 64
#define BK 128
#define STAGES 4
#define CLUSTER 1
#define GROUP 128
#define OUT 0
#endif

namespace {

using ptxlab::u32;
using ptxlab::u64;
constexpr int GROUP_K = GROUP < 64 ? 64 : GROUP;                      // channels of a block of W
constexpr int W_BLOCK = GROUP_K / 64 * 2048 + GROUP_K / GROUP * 128;  // its bytes
constexpr int W_BYTES = BK / GROUP_K * W_BLOCK;                       // of a stage and 64 rows
constexpr int X_BYTES = BM * BK;
constexpr int STAGE_BYTES = (X_BYTES + WN * W_BYTES + 1023) / 1024 * 1024;  // swizzled tiles begin at multiples of 1024
using Epilogue = ptxlab::Epilogue<WN, BM, CLUSTER>;

}  // namespace

extern "C" __global__ void __launch_bounds__(128 * WN) gemm_w4a8_qoq_sm90(
    const unsigned char* __restrict__ blocks,     // u8  [N/64, K/max(64, g), bytes], dual-MMA layout
    const float* __restrict__ w_scale,            // f32 [N]
    const __grid_constant__ ptxlab::TensorMap x,  // s8  [M, K], boxes [BM][128] swizzled
    const float* __restrict__ x_scale,            // f32 [M]
    const float* __restrict__ bias,               // f32 [N], or null
    void* __restrict__ y,                         // [M, N], by OUT
    int M, int N, int K) {
    extern __shared__ __align__(1024) unsigned char ring[];
    __shared__ u64 full[STAGES], arrived;
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const int rank = CLUSTER > 1 ? ptxlab::cluster_rank() : 0, tile = blockIdx.x / CLUSTER;
    const int token_tiles = (M + BM - 1) / BM, row_tiles = (N + 63) / 64, w_blocks = (K + GROUP_K - 1) / GROUP_K;
    const int token0 = tile % token_tiles * BM, row_tile0 = tile / token_tiles * WN;
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
    const int all = (K + BK - 1) / BK, first = all * rank / CLUSTER, stages = all * (rank + 1) / CLUSTER - first;

    unsigned char* behind = ring + STAGES * STAGE_BYTES;
    const Epilogue epilogue{reinterpret_cast<int4*>(behind), reinterpret_cast<int*>(behind + Epilogue::RECEIVE_BYTES),
                            &arrived, rank};

    // One thread asks for a stage: X, and for every warp group its 64 rows of W (the last ones again where N ends).
    // Behind the end of K, where X comes as zeros, any weights will do.
    const auto fetch = [&](int stage) {
        unsigned char* slot = ring + stage % STAGES * STAGE_BYTES;
        u64* barrier = &full[stage % STAGES];
        ptxlab::mbarrier_arrive_expect(barrier, X_BYTES + WN * W_BYTES);
        for (int i = 0; i < BK / 128; ++i)
            ptxlab::tensor_load(slot + i * BM * 128, &x, (first + stage) * BK + i * 128, token0, barrier);
        const int block = (first + stage) * (BK / GROUP_K), there = min(BK / GROUP_K, w_blocks - block);
        for (int i = 0; i < WN; ++i) {
            const unsigned char* from = blocks + size_t(min(row_tile0 + i, row_tiles - 1)) * w_blocks * W_BLOCK;
            unsigned char* to = slot + X_BYTES + i * W_BYTES;
            ptxlab::bulk_load(to, from + size_t(block) * W_BLOCK, there * W_BLOCK, barrier);
#pragma unroll 1
            for (int b = there; b < BK / GROUP_K; ++b) ptxlab::bulk_load(to + b * W_BLOCK, from, W_BLOCK, barrier);
        }
    };
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) ptxlab::mbarrier_init(&full[s], 1);
        epilogue.expect();
        ptxlab::fence_mbarrier_init();
        PHASE(LOAD);
        for (int s = 0; s < STAGES && s < stages; ++s) fetch(s);
    }
    PHASE(WAIT_GROUP);
    __syncthreads();
    if (CLUSTER > 1) ptxlab::cluster_arrive();

    int acc[BM / 2] = {};
    for (int stage = 0; stage < stages; ++stage) {
        const unsigned char* slot = ring + stage % STAGES * STAGE_BYTES;
        const unsigned char* w = slot + X_BYTES + group * W_BYTES;
        const u64 x_tile = ptxlab::swizzled_128(slot);
        PHASE(WAIT_COPY);
        ptxlab::mbarrier_wait(&full[stage % STAGES], stage / STAGES & 1);

        PHASE(DEQUANTISE);
        u32 a[BK / 32][4];
#pragma unroll
        for (int unit = 0; unit < BK / 64; ++unit) {  // 64 k: the operands of two wgmmas
            const unsigned char* block = w + unit * 64 / GROUP_K * W_BLOCK;
            const uint4 q = *reinterpret_cast<const uint4*>(block + unit * 64 % GROUP_K / 64 * 2048 + thread * 16);
            const u32 c =
                *reinterpret_cast<const u32*>(block + GROUP_K / 64 * 2048 + (thread / 32 * 8 + thread % 32 / 4) * 4);
            const u32 scale[2] = {c & 0xff, c >> 16 & 0xff},
                      offset[2] = {__byte_perm(c, 0, 0x1111), __byte_perm(c, 0, 0x3333)};
            const u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint2 d = ptxlab::dequant_qoq_vadd4(words[j], scale[j & 1], offset[j & 1]);
                a[unit * 2 + j / 2][j & 1] = d.x;        // k 4 t .. of row r or r + 8
                a[unit * 2 + j / 2][2 + (j & 1)] = d.y;  // k 16 + 4 t ..
            }
        }
        PHASE(ISSUE, BK / 64 * BM);
        ptxlab::wgmma_fence();
#pragma unroll
        for (int step = 0; step < BK / 32; ++step)
            ptxlab::wgmma_s8(acc, a[step], x_tile + step / 4 * (BM * 128 / 16) + step % 4 * 2);
        ptxlab::wgmma_commit();
        PHASE(WAIT_MMA, 0);
        ptxlab::wgmma_wait<0>();
        ptxlab::pin(acc);
        PHASE(WAIT_GROUP);
        __syncthreads();  // everyone has done with the slot
        PHASE(LOAD);
        if (threadIdx.x == 0 && stage + STAGES < stages) fetch(stage + STAGES);
    }

    PHASE(REDUCE);
    if (CLUSTER > 1) ptxlab::cluster_wait();  // the blocks of the cluster have their barriers
    epilogue.send(acc, group, thread);
    epilogue.receive(acc, group, thread);
    PHASE(EPILOGUE);
    if (row_tile0 + group < row_tiles)
        epilogue.store<OUT>(acc, group, thread, {y, x_scale, w_scale, bias, M, N}, token0, (row_tile0 + group) * 64);
}
