// gemm_w8a8_sm90: Y = X W^T on Hopper's tensor cores, 8-bit weights, both operands from shared memory.
//
// The 8-bit sibling of gemm_w4a8_sm90: the same pipeline without its dequantisation, hence what that costs is the
// difference. One warp group loads, the others multiply; persistent blocks.
//
// Contract   accumulators[m, n] = sum_k x[m, k] * w[n, k], exact in int32; y = accumulators * x_scale[m] * w_scale[n] +
//            bias[n], each operation in f32 and then rounded to the output, or the accumulators (OUT == 3). Any M >= 1,
//            N a multiple of 8, K a multiple of 16; padding is zero-filled on the way in.
// PDL        W does not wait for the kernel before, as far as the ring takes it; X, scales of tokens and results do.
// Guide      notebooks/guide/kernels_gemm.md: operands, tile, schedule, constants
// Measured   on an H200 at M = 1, 4, 16, 32, 64, 128, 256, 512, 2048, 8192: 1.08, 1.06, 1.03, 1.01, 1.05, 0.99, 1.10,
//            1.06, 1.16, 1.10 times as fast as cuBLAS FP8, 1.68, 1.45, 1.39, 1.33, 1.37, 1.67, 1.89, 1.66, 1.63, 1.57
//            times as its INT8 (means over LLaMA-2's matrices).
// PTX ISA    9.7.15 wgmma m64nNk32 (.s8.s8); 9.7.9.27 tensor copies; 9.7.13.13 griddepcontrol; 9.7.13.15 mbarrier;
//            9.7.13.16 elect; 9.7.14.5.16 stmatrix; 9.7.19.5 setmaxnreg
#include "epilogue_sm90.cuh"
#include "fragments_out.cuh"
#include "griddep.cuh"
#include "named_barrier.cuh"
#include "tile_order.cuh"
#include "timeline.cuh"
#include "wgmma.cuh"

#ifndef BM
#define BM 128  // most tokens of a tile
#define WN 2    // warp groups of 64 rows of W
#define BK 128
#define STAGES 6
#define SPLIT 1  // blocks of a cluster, along K
#define OUT 0
#endif

namespace {

using ptxlab::u64;
constexpr int THREADS = 128 * (WN + 1), ROWS = 64 * WN, BOX = 128;  // channels of a box
constexpr int X_BYTES = BM * BK, W_BYTES = ROWS * BK, STAGE_BYTES = X_BYTES + W_BYTES;
// Registers of a thread that multiplies and of one that loads; with one warp group there are enough for all.
constexpr bool UNEVEN = WN > 1;
constexpr int MORE = WN <= 2 ? 232 : 152, FEWER = 40;
static_assert(WN <= 3, "registers of four warp groups that multiply would have to be shared out otherwise");
static_assert(STAGES >= 2, "a slot is given back while the next stage is worked on");
using Sums = ptxlab::Epilogue<WN, BM, SPLIT>;

// Where a tile begins.
struct TileOrigin {
    int row, token;
};

}  // namespace

// What the kernel before may be writing is not __restrict__: ptxas moves a read-only load ahead of griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_w8a8_sm90(
    const __grid_constant__ ptxlab::TensorMap w,  // s8  [N, K], boxes [64 WN][128] swizzled
    const float* __restrict__ w_scale,            // f32 [N]
    const __grid_constant__ ptxlab::TensorMap x,  // s8  [M, K], boxes [tokens of a tile][128] swizzled
    const float* x_scale,                         // f32 [M]
    const float* __restrict__ bias,               // f32 [N], or null
    void* __restrict__ y,                         // [M, N], by OUT
    int M, int N, int K) {
    extern __shared__ __align__(1024) unsigned char ring[];
    __shared__ u64 full[STAGES], empty[STAGES], arrived;
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const int slice = SPLIT > 1 ? ptxlab::cluster_rank() : 0;
    const int token_tiles = (M + BM - 1) / BM, row_tiles = (N + ROWS - 1) / ROWS, tiles = token_tiles * row_tiles;
    const int tokens = ((M + token_tiles - 1) / token_tiles + 7) / 8 * 8;  // of a tile
    const auto origin_of = [&](int tile) {
        const ptxlab::TileCoord coord = ptxlab::tile_coord(tile, token_tiles, row_tiles);
        return TileOrigin{coord.row_tile * ROWS, coord.token_tile * tokens};
    };
    const int k_stages = (K + BK - 1) / BK, first_stage = k_stages * slice / SPLIT,
              stages = k_stages * (slice + 1) / SPLIT - first_stage;

    unsigned char* cluster_sums = ring + STAGES * STAGE_BYTES;
    const Sums sums{reinterpret_cast<int4*>(cluster_sums), nullptr, &arrived, slice};
    unsigned char* buffers = cluster_sums + Sums::RECEIVE_BYTES;       // 512 bytes of each warp
    float* scales = reinterpret_cast<float*>(buffers + WN * 4 * 512);  // of each warp group 2 BM, for tiles in turn
    if (tokens < BM) {                                                 // what wgmma reads behind the copies' rows
        const int padding_chunks = (BM - tokens) * 8;                  // 16 bytes each, of a box
        for (int i = threadIdx.x; i < STAGES * (BK / BOX) * padding_chunks; i += THREADS) {
            const int box = i / padding_chunks;
            unsigned char* x_box = ring + box / (BK / BOX) * STAGE_BYTES + box % (BK / BOX) * (BM * BOX);
            *reinterpret_cast<int4*>(x_box + tokens * BOX + i % padding_chunks * 16) = make_int4(0, 0, 0, 0);
        }
        ptxlab::fence_proxy_async();
    }
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            ptxlab::mbarrier_init(&full[s], 2);
            ptxlab::mbarrier_init(&empty[s], 4 * WN);
        }
        sums.expect();
        ptxlab::fence_mbarrier_init();
    }
    __syncthreads();
    if (SPLIT > 1) ptxlab::cluster_arrive();

    ptxlab::Slot<STAGES> slot;
    if (threadIdx.x < 128) {  // the warp group that loads: one thread of two warps asks, the copy engine does
        const bool elected = ptxlab::elect();
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        const auto load = [&](const ptxlab::TensorMap& operand, int rows, int box_bytes, int offset,
                              int TileOrigin::* along) {
            for (int tile = blockIdx.x / SPLIT; tile < tiles; tile += gridDim.x / SPLIT) {
                const int row = origin_of(tile).*along;
#pragma unroll 1
                for (int stage = first_stage; stage < first_stage + stages; ++stage, slot.advance()) {
                    unsigned char* stage_slot = ring + slot.index * STAGE_BYTES + offset;
                    u64* barrier = &full[slot.index];
                    PHASE(WAIT_GROUP);
                    ptxlab::mbarrier_wait(&empty[slot.index], slot.parity ^ 1);  // the first round finds them empty
                    PHASE(LOAD);
                    if (elected) ptxlab::mbarrier_arrive_expect(barrier, rows * BK);
#pragma unroll
                    for (int i = 0; i < BK / BOX; ++i)
                        if (elected)
                            ptxlab::tensor_load(stage_slot + i * box_bytes, &operand, stage * BK + i * BOX, row,
                                                barrier);
                }
            }
        };
        if (UNEVEN) ptxlab::fewer_registers<FEWER>();
        ptxlab::launch_dependents();
        if (warp == 0) load(w, ROWS, ROWS * BOX, X_BYTES, &TileOrigin::row);
        if (warp == 1) {
            ptxlab::wait_for_predecessors();
            load(x, tokens, BM * BOX, 0, &TileOrigin::token);
        }
        PHASE(WAIT_GROUP);
        __syncwarp();
        if (SPLIT > 1) ptxlab::cluster_wait();
    } else {  // a warp group that multiplies
        if (UNEVEN) ptxlab::more_registers<MORE>();
        const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
        scales += group * 2 * BM, buffers += (group * 4 + warp) * 512;
        ptxlab::wait_for_predecessors();
        for (int tile = blockIdx.x / SPLIT, buffer_index = 0; tile < tiles;
             tile += gridDim.x / SPLIT, buffer_index ^= 1) {
            PHASE(SETUP);
            const int token0 = origin_of(tile).token, n0 = origin_of(tile).row + group * 64 + warp * 16;
            ptxlab::Scaling scaling{scales + buffer_index * BM, nullptr};
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int n = min(n0 + lane / 4 + 8 * r, N - 1);
                scaling.w_scale[r] = w_scale[n], scaling.bias[r] = bias ? bias[n] : -0.0f;
            }
            float token_scales[(BM + 127) / 128];
#pragma unroll
            for (int i = 0; i < (BM + 127) / 128; ++i) token_scales[i] = x_scale[min(token0 + i * 128 + thread, M - 1)];

            int acc[BM / 2] = {};
            int unreleased_slot = -1;  // the slot that wgmma may still read
            for (int stage = 0; stage < stages; ++stage, slot.advance()) {
                const unsigned char* x_slot = ring + slot.index * STAGE_BYTES;
                const u64 x_tile = ptxlab::swizzled_128(x_slot);
                const u64 w_tile = ptxlab::swizzled_128(x_slot + X_BYTES + group * 64 * BOX);
                PHASE(WAIT_COPY);
                ptxlab::mbarrier_wait(&full[slot.index], slot.parity);
                PHASE(ISSUE, BK / 64 * BM);
                ptxlab::wgmma_fence();
#pragma unroll
                for (int step = 0; step < BK / 32; ++step) {  // 32 channels each
                    const int box = step / 4, column = step % 4 * 2;
                    ptxlab::wgmma_s8(acc, w_tile + box * (ROWS * BOX / 16) + column,
                                     x_tile + box * (BM * BOX / 16) + column);
                }
                ptxlab::wgmma_commit();
                PHASE(WAIT_MMA, 1);
                ptxlab::wgmma_wait<1>();  // the stage before has been read
                if (lane == 0 && unreleased_slot >= 0) ptxlab::mbarrier_arrive(&empty[unreleased_slot]);
                unreleased_slot = slot.index;
            }
            PHASE(WAIT_MMA, 0);
            ptxlab::wgmma_wait<0>();
            ptxlab::pin(acc);
            if (lane == 0 && unreleased_slot >= 0) ptxlab::mbarrier_arrive(&empty[unreleased_slot]);

            PHASE(REDUCE);
            if (SPLIT > 1) ptxlab::cluster_wait();  // the other blocks have their barriers
            sums.send(acc, group, thread);
#pragma unroll
            for (int i = 0; i < (BM + 127) / 128; ++i)
                if (i * 128 + thread < BM) scales[buffer_index * BM + i * 128 + thread] = token_scales[i];
            ptxlab::sync_warp_group(group);  // those of the tile before may still be read
            sums.receive(acc, group, thread);
            PHASE(EPILOGUE);
            ptxlab::store_fragments<OUT, BM>(acc, scaling, y, buffers, lane, token0, n0, min(M, token0 + tokens), N, N,
                                             [&](int piece) { return Sums::owner(group, piece) == slice; });
            if (SPLIT > 1) break;  // its sums are received once
        }
    }
}
