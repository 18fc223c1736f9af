// gemm_w8a8_sm90: Y = X W^T on Hopper's tensor cores, 8-bit weights, both operands from shared memory.
//
// The pipeline of gemm_w4a8_sm90 with 8-bit weights and hence without dequantisation: what that costs is the difference
// in time. One warp group copies stages; WN warp groups multiply 64 rows of W each, both operands from shared memory.
// Blocks are persistent.
//
// Contract   accumulators[m, n] = sum_k x[m, k] * w[n, k], exact in int32; y = accumulators * x_scale[m] * w_scale[n] +
//            bias[n], each operation rounded in f32, the result then rounded to the output type, or the accumulators
//            themselves (OUT == 3). Any M >= 1, N a multiple of 8, K a multiple of 16. What lies outside the matrices
//            is loaded as zeros.
// PDL        loads of W do not wait for the preceding kernel, until the ring is full; X, scales of tokens and results
//            do.
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
#define BM 128    // tokens of a tile, at most
#define WN 2      // warp groups that multiply, 64 rows of W each
#define BK 128    // channels of a stage
#define STAGES 6  // slots of the ring
#define SPLIT 1   // blocks of a cluster, each with a slice of K
#define OUT 0     // y as 0 f16, 1 bf16, 2 f32; 3 the int32 accumulators
#endif

namespace {

using ptxlab::u64;
using Slot = ptxlab::Slot<STAGES>;
using ClusterSums = ptxlab::Epilogue<WN, BM, SPLIT>;
constexpr int kThreads = 128 * (WN + 1), kTileRows = 64 * WN;
constexpr int kBoxChannels = 128, kBoxes = BK / kBoxChannels;  // boxes of an operand in a stage
constexpr int kXBytes = BM * BK, kStageBytes = kXBytes + kTileRows * BK;
constexpr bool kUneven = WN > 1;  // with one warp group there are registers enough for all
constexpr int kConsumerRegisters = WN <= 2 ? 232 : 152, kProducerRegisters = 40;
static_assert(WN <= 3, "registers of four warp groups that multiply would have to be shared out otherwise");
static_assert(STAGES >= 2, "a slot is given back while the next stage is worked on");

// The stages in shared memory and a barrier of each kind per slot: `full` completes when both copies have arrived,
// `empty` when wgmma has read the slot.
struct Ring {
    unsigned char* stages;
    u64 *full, *empty;
};

// Initialise every barrier with its number of arrivals. For one thread.
__device__ __forceinline__ void init_barriers(const Ring& ring, const ClusterSums& sums) {
    for (int s = 0; s < STAGES; ++s) {
        ptxlab::mbarrier_init(&ring.full[s], 2);
        ptxlab::mbarrier_init(&ring.empty[s], 4 * WN);
    }
    sums.expect();
    ptxlab::fence_mbarrier_init();
}

// First row of W and first token of a tile.
struct TileOrigin {
    int row, token;
};

// How Y is cut into tiles, and which stages of K this block computes.
struct Schedule {
    int slice;  // of K: the block's rank in its cluster
    int num_token_tiles, num_row_tiles, num_tiles;
    int tile_tokens;
    int first_stage, num_stages;

    __device__ __forceinline__ Schedule(int M, int N, int K)
        : slice(SPLIT > 1 ? ptxlab::cluster_rank() : 0), num_token_tiles((M + BM - 1) / BM),
          num_row_tiles((N + kTileRows - 1) / kTileRows), num_tiles(num_token_tiles * num_row_tiles),
          tile_tokens(((M + num_token_tiles - 1) / num_token_tiles + 7) / 8 * 8),
          first_stage((K + BK - 1) / BK * slice / SPLIT),
          num_stages((K + BK - 1) / BK * (slice + 1) / SPLIT - first_stage) {}

    __device__ __forceinline__ TileOrigin origin_of(int tile_index) const {
        const ptxlab::TileCoord coord = ptxlab::tile_coord(tile_index, num_token_tiles, num_row_tiles);
        return TileOrigin{coord.row_tile * kTileRows, coord.token_tile * tile_tokens};
    }
};

// Zero the rows of X from tile_tokens on, in all stages: no copy writes them, but wgmma reads them.
__device__ __forceinline__ void clear_padding(unsigned char* stages, int tile_tokens) {
    const int padding_chunks = (BM - tile_tokens) * 8;  // of 16 bytes, in a box
    for (int i = threadIdx.x; i < STAGES * kBoxes * padding_chunks; i += kThreads) {
        const int box = i / padding_chunks;
        unsigned char* x_box = stages + box / kBoxes * kStageBytes + box % kBoxes * (BM * kBoxChannels);
        *reinterpret_cast<int4*>(x_box + tile_tokens * kBoxChannels + i % padding_chunks * 16) = make_int4(0, 0, 0, 0);
    }
    ptxlab::fence_proxy_async();
}

// Run the producer warp group: one thread of warp 0 copies W, one of warp 1 X.
__device__ __forceinline__ void produce(const ptxlab::TensorMap& w, const ptxlab::TensorMap& x,
                                        const Schedule& schedule, const Ring& ring, Slot& slot TIMELINE_PARAMETER) {
    const bool elected = ptxlab::elect();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    // Copy all stages of an operand for all tiles of this block: boxes of `rows` rows to `offset` in a slot; `axis`
    // selects the tile's origin along those rows. NOTE as a function of its own ptxas gives it other registers.
    const auto load_operand = [&](const ptxlab::TensorMap& operand, int rows, int box_bytes, int offset,
                                  int TileOrigin::* axis) {
        const int first_stage = schedule.first_stage, num_stages = schedule.num_stages;
        for (int tile_index = blockIdx.x / SPLIT; tile_index < schedule.num_tiles; tile_index += gridDim.x / SPLIT) {
            const int row = schedule.origin_of(tile_index).*axis;
#pragma unroll 1
            for (int stage = first_stage; stage < first_stage + num_stages; ++stage, slot.advance()) {
                unsigned char* boxes = ring.stages + slot.index * kStageBytes + offset;
                u64* barrier = &ring.full[slot.index];
                PHASE(WAIT_GROUP);
                ptxlab::mbarrier_wait(&ring.empty[slot.index], slot.parity ^ 1);  // the first round finds them empty
                PHASE(LOAD);
                if (elected) ptxlab::mbarrier_arrive_expect(barrier, rows * BK);
#pragma unroll
                for (int i = 0; i < kBoxes; ++i)
                    if (elected)
                        ptxlab::tensor_load(boxes + i * box_bytes, &operand, stage * BK + i * kBoxChannels, row,
                                            barrier);
            }
        }
    };
    if (kUneven) ptxlab::lower_registers_to<kProducerRegisters>();
    ptxlab::launch_dependents();
    if (warp == 0) load_operand(w, kTileRows, kTileRows * kBoxChannels, kXBytes, &TileOrigin::row);
    if (warp == 1) {
        ptxlab::wait_for_predecessors();
        load_operand(x, schedule.tile_tokens, BM * kBoxChannels, 0, &TileOrigin::token);
    }
    PHASE(WAIT_GROUP);
    __syncwarp();
    if (SPLIT > 1) ptxlab::cluster_wait();
}

// Multiply a warp group's 64 rows over all stages of a tile: acc += products. A slot is released when wgmma has read
// it, while the next stage is multiplied.
__device__ __forceinline__ void multiply_stages(int (&acc)[BM / 2], const Ring& ring, Slot& slot, int num_stages,
                                                int group, int lane TIMELINE_PARAMETER) {
    int unreleased_slot = -1;  // the slot that wgmma may still read
    for (int stage = 0; stage < num_stages; ++stage, slot.advance()) {
        const unsigned char* x_slot = ring.stages + slot.index * kStageBytes;
        const u64 x_tile = ptxlab::swizzled_128(x_slot);
        const u64 w_tile = ptxlab::swizzled_128(x_slot + kXBytes + group * 64 * kBoxChannels);
        PHASE(WAIT_COPY);
        ptxlab::mbarrier_wait(&ring.full[slot.index], slot.parity);
        PHASE(ISSUE, BK / 64 * BM);
        ptxlab::wgmma_fence();
#pragma unroll
        for (int step = 0; step < BK / 32; ++step) {  // 32 channels each
            const int box = step / 4, column = step % 4 * 2;
            ptxlab::wgmma_s8(acc, w_tile + box * (kTileRows * kBoxChannels / 16) + column,
                             x_tile + box * (BM * kBoxChannels / 16) + column);
        }
        ptxlab::wgmma_commit();
        PHASE(WAIT_MMA, 1);
        ptxlab::wgmma_wait<1>();  // the previous stage has been read
        if (lane == 0 && unreleased_slot >= 0) ptxlab::mbarrier_arrive(&ring.empty[unreleased_slot]);
        unreleased_slot = slot.index;
    }
    PHASE(WAIT_MMA, 0);
    ptxlab::wgmma_wait<0>();
    ptxlab::pin(acc);
    if (lane == 0 && unreleased_slot >= 0) ptxlab::mbarrier_arrive(&ring.empty[unreleased_slot]);
}

}  // namespace

// Pointers that the preceding kernel may write are not __restrict__: ptxas would move their read-only loads ahead of
// griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(kThreads, 1) gemm_w8a8_sm90(
    const __grid_constant__ ptxlab::TensorMap w,  // s8  [N, K], boxes [64 WN][128] swizzled
    const float* __restrict__ w_scale,            // f32 [N]
    const __grid_constant__ ptxlab::TensorMap x,  // s8  [M, K], boxes [tokens of a tile][128] swizzled
    const float* x_scale,                         // f32 [M]
    const float* __restrict__ bias,               // f32 [N], or null
    void* __restrict__ y,                         // [M, N], by OUT
    int M, int N, int K) {
    extern __shared__ __align__(1024) unsigned char stages[];  // ring, sums of other blocks, buffers, scales
    __shared__ u64 full[STAGES], empty[STAGES], arrived;
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const Ring ring{stages, full, empty};
    const Schedule schedule(M, N, K);
    const int tile_tokens = schedule.tile_tokens;
    unsigned char* cluster_sums = stages + STAGES * kStageBytes;
    const ClusterSums sums{reinterpret_cast<int4*>(cluster_sums), nullptr, &arrived, schedule.slice};
    unsigned char* buffers = cluster_sums + ClusterSums::RECEIVE_BYTES;
    float* scales =
        reinterpret_cast<float*>(buffers + WN * 4 * ptxlab::WARP_BUFFER_BYTES);  // [WN][2][BM]: double-buffered
    if (tile_tokens < BM) clear_padding(stages, tile_tokens);
    if (threadIdx.x == 0) init_barriers(ring, sums);
    __syncthreads();
    if (SPLIT > 1) ptxlab::cluster_arrive();
    Slot slot;
    if (threadIdx.x < 128) {
        produce(w, x, schedule, ring, slot TIMELINE_ARGUMENT);
        return;
    }

    // The consumer: a warp group that multiplies.
    if (kUneven) ptxlab::raise_registers_to<kConsumerRegisters>();
    const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    scales += group * 2 * BM, buffers += (group * 4 + warp) * ptxlab::WARP_BUFFER_BYTES;
    ptxlab::wait_for_predecessors();
    for (int tile_index = blockIdx.x / SPLIT, buffer_index = 0; tile_index < schedule.num_tiles;
         tile_index += gridDim.x / SPLIT, buffer_index ^= 1) {
        PHASE(SETUP);
        const int token0 = schedule.origin_of(tile_index).token,
                  n0 = schedule.origin_of(tile_index).row + group * 64 + warp * 16;
        ptxlab::Scaling scaling{scales + buffer_index * BM, nullptr};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int n = min(n0 + lane / 4 + 8 * r, N - 1);
            scaling.w_scale[r] = w_scale[n], scaling.bias[r] = ptxlab::bias_at(bias, n);
        }
        float token_scales[ptxlab::THREAD_TOKENS<BM>];
#pragma unroll
        for (int i = 0; i < ptxlab::THREAD_TOKENS<BM>; ++i)
            token_scales[i] = x_scale[min(token0 + i * 128 + thread, M - 1)];
        int acc[BM / 2] = {};
        multiply_stages(acc, ring, slot, schedule.num_stages, group, lane TIMELINE_ARGUMENT);

        PHASE(REDUCE);
        if (SPLIT > 1) ptxlab::cluster_wait();  // the other blocks' barriers are initialised
        sums.send(acc, group, thread);
#pragma unroll
        for (int i = 0; i < ptxlab::THREAD_TOKENS<BM>; ++i)
            if (i * 128 + thread < BM) scales[buffer_index * BM + i * 128 + thread] = token_scales[i];
        ptxlab::sync_warp_group(group);  // the scales of the previous tile may still be read
        sums.receive(acc, group, thread);
        PHASE(EPILOGUE);
        ptxlab::store_fragments<OUT, BM>(acc, scaling, y, buffers, lane, token0, n0, min(M, token0 + tile_tokens), N, N,
                                         [&](int piece) { return ClusterSums::owner(group, piece) == schedule.slice; });
        if (SPLIT > 1) break;  // a cluster has one tile: sums are received once
    }
}
