// gemm_w8a8_sm90: Y = X W^T on Hopper's tensor cores, 8-bit weights: nothing to dequantise, both operands from shared memory.
//
// The 8-bit sibling of gemm_w4a8_lqq_imfp_sm90: the same pipeline without its dequantisation, hence what that costs is the
// difference. One warp group loads, the others multiply. Persistent blocks: the loads of a tile begin under the epilogue of
// the one before.
//
// Contract   accumulators[m, n] = sum_k x[m, k] * w[n, k], exact in int32; y = accumulators * x_scale[m] * w_scale[n]
//            + bias[n], each operation in f32 and then rounded to the output, or the accumulators (OUT == 3).
//            Any M >= 1, N a multiple of 8, K a multiple of 16; padding is zero-filled on the way in.
// Operands   Y^T = W X^T: W is operand A (64 rows of N x 32 of K), X operand B (32 of K x BM tokens), both as they lie in
//            shared memory. Thread 128 w + 32 v + 4 g + t has rows r = 64 w + 16 v + g and r + 8 of the accumulators.
// Tile       block: WGS warp groups of 64 rows each x BM tokens x BK channels; ring of STAGES, each with its mbarriers:
//            full   completes when the copy engine has brought X and W; empty, when all warps are done with them
//            X, W   BK / 128 boxes [BM][128] and [64 WGS][128] under the 128-byte swizzle, by the copy engine, row-major
//            Tiles in bands of BAND tiles of rows, all tokens of a band before the next, so that what neighbours in time
//            share of W and X is in the L2.
// Split K    SPLIT blocks of a cluster share a tile, each with a slice of K; they add up through distributed shared memory.
// Share X    SHARE blocks of a cluster have tiles of neighbouring rows and the same tokens: each brings its part of X to
//            all of them (multicast). A slot is refilled when all have done with it: `ready` counts the other blocks.
// Tuned      tile, split and share by tokens and rows: see ptxlab/kernels/gemm/w8a8.py.
// Measured   not yet measured
// PTX ISA    9.7.15 wgmma m64nNk32 (.s8.s8); 9.7.9.27 tensor copies, multicast; 9.7.13.15 mbarrier; 9.7.19.5 setmaxnreg.
#include "narrow_epilogue_sm90.cuh"
#include "wgmma.cuh"

#ifndef BM
#define BM 128
#define WGS 2
#define BK 128
#define STAGES 6
#define SPLIT 1
#define SHARE 1
#define BAND 1
#define RESIDENT 1
#define OUT 0
#endif

namespace {

using ptxlab::u64;
constexpr int THREADS = 128 + 128 * WGS, ROWS = 64 * WGS, BOX = 128;  // channels of a box
constexpr int X_BYTES = BM * BK, W_BYTES = ROWS * BK, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int PART = BM / SHARE;  // tokens that a block brings
constexpr bool UNEVEN = WGS == 2 && RESIDENT == 1;  // registers: 168 for each thread would not do for 256 tokens
static_assert(STAGES >= 2, "a slot is given back while the next stage is worked on");
static_assert(PART % 8 == 0 && (SPLIT == 1 || SHARE == 1), "swizzled rows come by eights; a cluster splits or shares");
using Epilogue = ptxlab::NarrowEpilogue<WGS, BM, SPLIT>;

// Which tile: of rows, and of tokens.
struct Place {
    int rows, tokens;
};

// Rows go fastest within a band, then tokens.
__device__ __forceinline__ Place place_of(int tile, int row_tiles, int token_tiles) {
    const int band = tile / (BAND * token_tiles), inside = tile % (BAND * token_tiles);
    const int rows = min(BAND, row_tiles - band * BAND);
    return {band * BAND + inside % rows, inside / rows};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
gemm_w8a8_sm90(const __grid_constant__ ptxlab::TensorMap w,  // s8  [N, K], boxes [64 WGS][128] swizzled
               const float* __restrict__ w_scale,            // f32 [N]
               const __grid_constant__ ptxlab::TensorMap x,  // s8  [M, K], boxes [BM / SHARE][128] swizzled
               const float* __restrict__ x_scale,            // f32 [M]
               const float* __restrict__ bias,               // f32 [N], or null
               void* __restrict__ y,                         // [M, N], by OUT
               int M, int N, int K) {
    extern __shared__ __align__(1024) unsigned char ring[];
    __shared__ u64 full[STAGES], empty[STAGES], ready[STAGES], arrived;
    constexpr int CLUSTER = SPLIT * SHARE;
    const int rank = CLUSTER > 1 ? ptxlab::cluster_rank() : 0, slice = SPLIT > 1 ? rank : 0, part = SHARE > 1 ? rank : 0;
    const int token_tiles = (M + BM - 1) / BM, row_tiles = (N + ROWS * SHARE - 1) / (ROWS * SHARE);  // of a cluster
    const int tiles = token_tiles * row_tiles;
    const int all = (K + BK - 1) / BK, first = all * slice / SPLIT, stages = all * (slice + 1) / SPLIT - first;

    unsigned char* behind = ring + STAGES * STAGE_BYTES;
    const Epilogue epilogue{reinterpret_cast<int4*>(behind), reinterpret_cast<int*>(behind + Epilogue::RECEIVE_BYTES), &arrived, slice};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            ptxlab::mbarrier_init(&full[s], 1);
            ptxlab::mbarrier_init(&empty[s], 4 * WGS);
            if (SHARE > 1) ptxlab::mbarrier_init(&ready[s], SHARE - 1);
        }
        epilogue.expect();
        ptxlab::fence_mbarrier_init();
    }
    __syncthreads();
    if (CLUSTER > 1) ptxlab::cluster_arrive();
    if (SHARE > 1) ptxlab::cluster_wait();  // the other blocks have their barriers

    ptxlab::Slot<STAGES> slot;
    if (threadIdx.x < 128) {  // the warp group that loads: one thread asks, the copy engine does
        if (UNEVEN) ptxlab::fewer_registers<56>();
        if (threadIdx.x == 0) {
            for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += gridDim.x / CLUSTER) {
                const Place place = place_of(tile, row_tiles, token_tiles);
                const int token0 = place.tokens * BM + part * PART, row0 = (place.rows * SHARE + part) * ROWS;
                for (int stage = first; stage < first + stages; ++stage, slot.advance()) {
                    unsigned char* to = ring + slot.index * STAGE_BYTES;
                    u64* barrier = &full[slot.index];
                    ptxlab::mbarrier_wait(&empty[slot.index], slot.parity ^ 1);  // the first round finds them empty
                    ptxlab::mbarrier_arrive_expect(barrier, STAGE_BYTES);        // of X too what other blocks bring
                    for (int other = 1; other < SHARE; ++other)
                        ptxlab::mbarrier_arrive_in_block(&ready[slot.index], rank ^ other);
                    for (int i = 0; i < BK / BOX; ++i)
                        ptxlab::tensor_load(to + X_BYTES + i * ROWS * BOX, &w, stage * BK + i * BOX, row0, barrier);
                    if (SHARE > 1) ptxlab::mbarrier_wait(&ready[slot.index], slot.parity);
                    for (int i = 0; i < BK / BOX; ++i) {
                        unsigned char* box = to + (i * BM + part * PART) * BOX;
                        const int channel = stage * BK + i * BOX;
                        if (SHARE == 1) ptxlab::tensor_load(box, &x, channel, token0, barrier);
                        else ptxlab::tensor_load_multicast(box, &x, channel, token0, barrier, (1 << SHARE) - 1);
                    }
                }
            }
        }
        __syncwarp();
        if (SPLIT > 1) ptxlab::cluster_wait();
    } else {                  // a warp group that multiplies
        if (UNEVEN) ptxlab::more_registers<224>();
        const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
        const bool leads = thread % 32 == 0;                                   // gives slots back for its warp
        for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += gridDim.x / CLUSTER) {
            const Place place = place_of(tile, row_tiles, token_tiles);
            int acc[BM / 2] = {};
            int before = -1;                                                   // the slot that wgmma may still read
            for (int stage = 0; stage < stages; ++stage, slot.advance()) {
                const unsigned char* x_slot = ring + slot.index * STAGE_BYTES;
                const u64 x_tile = ptxlab::swizzled_128(x_slot);
                const u64 w_tile = ptxlab::swizzled_128(x_slot + X_BYTES + group * 64 * BOX);
                ptxlab::mbarrier_wait(&full[slot.index], slot.parity);
                ptxlab::wgmma_fence();
#pragma unroll
                for (int step = 0; step < BK / 32; ++step) {                   // 32 channels each
                    const int box = step / 4, column = step % 4 * 2;
                    ptxlab::wgmma_s8(acc, w_tile + box * (ROWS * BOX / 16) + column, x_tile + box * (BM * BOX / 16) + column);
                }
                ptxlab::wgmma_commit();
                ptxlab::wgmma_wait<1>();                                       // the stage before has been read
                if (leads && before >= 0) ptxlab::mbarrier_arrive(&empty[before]);
                before = slot.index;
            }
            ptxlab::wgmma_wait<0>();
            ptxlab::pin(acc);
            if (leads && before >= 0) ptxlab::mbarrier_arrive(&empty[before]);

            if (SPLIT > 1) ptxlab::cluster_wait();                             // the other blocks have their barriers
            epilogue.send(acc, group, thread);
            epilogue.receive(acc, group, thread);
            epilogue.store<OUT>(acc, group, thread, {y, x_scale, w_scale, bias, M, N}, place.tokens * BM,
                                (place.rows * SHARE + part) * ROWS + group * 64);
            if (SPLIT > 1) break;                                              // its sums are received once
        }
    }
}
