// gemm_w4a8_sm90: Y = X W^T, INT8 activations, 4-bit weights in strips, on wgmma, for a few tokens to thousands.
//
// The implicit pipeline (LiquidGEMM section 5.1): one warp group copies stages; the others dequantise into registers,
// each under the wgmma of another. Unlike there, weights are unsigned, a tile is any number of strips high, and warp
// groups also divide K among them (WK). Blocks are persistent.
//
// Contract   accumulators[m, n] = sum_k x[m, k] * (q4 * s1 + o1 - 128)[n, k], exact in int32; y = accumulators *
//            x_scale[m] * w_scale[n] + bias[n], each operation rounded in f32, the result then rounded to the output
//            type, or the accumulators themselves (OUT == 3). Any M >= 1, N a multiple of 8, K a multiple of the group.
//            LiquidQuant: o1 = 128 + min; QoQ: o1 = 128 - zero * s1. The MMA takes w + 128 as u8, and the epilogue
//            subtracts 128 times the token sum; SIGNED: it takes w as s8 and needs no token sums. GROUP 0: scales per
//            channel alone, with token sums; the weight is q4[n, k] - w_zero[n].
// PDL        loads of the first weights do not wait for the preceding kernel; activations, scales and results do.
// Guide      notebooks/guide/kernels_gemm.md: strips, tile, ring, schedule, constants
// Measured   0.92, 0.92, 0.83, 0.78, 0.71, 0.61, 0.72, 0.79, 0.81, 0.70 of the floor on an H200 at M = 1, 4, 16, 32,
//            64, 128, 256, 512, 2048, 8192; 1.97, 1.92, 1.71, 1.56, 1.51, 1.22, 1.12, 1.16, 1.19, 1.04 times as fast as
//            cuBLAS FP8 (means of 1, 1, 6, 8, 8, 8, 8, 8, 8, 8 of LLaMA-2's matrices, on which it is launched; row-
//            major activations).
// PTX ISA    9.7.15 wgmma m64nNk32 (.u8.s8); 9.7.9.25-27 bulk and tensor copies; 9.7.13.15 mbarrier; 9.7.13.16 elect;
//            9.7.19.5 setmaxnreg; 9.7.14.5.16 stmatrix
#include "epilogue_sm90.cuh"
#include "fragments_out.cuh"
#include "griddep.cuh"
#include "named_barrier.cuh"
#include "strips_sm90.cuh"
#include "tile_order.cuh"
#include "timeline.cuh"

#ifndef BM
#define BM 64      // tokens of a tile
#define WN 2       // warp groups along the rows of W
#define WK 1       // warp groups along K
#define MN 1       // MMAs of 64 rows of each warp group
#define STRIPS 8   // strips of a tile, at most
#define BK 128     // channels of a stage
#define STAGES 4   // slots of the ring
#define SPLIT 1    // blocks of a cluster, each with a slice of K
#define GROUP 128  // weights of a level-2 scale; 0: constants per channel alone
#define OUT 0      // y as 0 f16, 1 bf16, 2 f32; 3 the int32 accumulators
#define ORDER 0    // of X: 0 row-major, 1 swizzled tiles of BM tokens
#define SIGNED 0   // 1: the MMA takes s8 weights; no token sums
#endif
#ifndef FUSED
#define FUSED 0  // 1: SiLU of the gate times up; 2: added to Y (output.cuh)
#endif

namespace {

using ptxlab::u32;
using ptxlab::u64;
static_assert(GROUP != 0 || !SIGNED, "a zero point leaves with the token sum");
using Stage = ptxlab::StripStage<BM, BK, STRIPS, GROUP>;
using Ring = ptxlab::StripRing<Stage, STAGES>;
using Slot = ptxlab::Slot<STAGES>;
using TokenConstants = ptxlab::TokenConstants<BM>;

constexpr int kConsumerGroups = WN * WK, kMmaTiles = WN * MN;  // warp groups that multiply; MMAs along a tile's rows
constexpr int kThreads = 128 * (kConsumerGroups + 1);
constexpr int kConsumerRegisters = kConsumerGroups == 1   ? 240
                                   : kConsumerGroups == 2 ? 232
                                   : kConsumerGroups == 3 ? 152
                                                          : 112;
constexpr int kProducerRegisters = kConsumerGroups == 1 ? 56 : kConsumerGroups <= 3 ? 40 : 24;
constexpr int kStageBlocks = BK / 128, kStageBlockBytes = kStageBlocks * Stage::BLOCK;  // of a strip in a stage
constexpr int kWarpStrips = (STRIPS + 3) / 4;  // strips that a producer warp copies, at most
static_assert(STRIPS <= kMmaTiles * 4, "a warp has MN strips");
static_assert(STAGES >= 2 * WK, "a slot is given back while the next stage is worked on");
using ClusterSums = ptxlab::Epilogue<kMmaTiles, BM, SPLIT>;

// Kernel arguments that producer and consumers read.
struct Arguments {
    const unsigned char *strips, *w_zero;
    const ptxlab::TensorMap* x;
    const float *w_scale, *x_scale, *bias;
    const int* x_sum;
    void* y;
    int M, N, K;
};

// Initialise every barrier with its number of arrivals. For one thread.
__device__ __forceinline__ void init_barriers(const Ring& ring, u64* arrived) {
    for (int s = 0; s < STAGES; ++s) {
        ptxlab::mbarrier_init(&ring.full[s], 4);
        ptxlab::mbarrier_init(&ring.empty[s], 128 * WN);
    }
    if (SPLIT > 1) ClusterSums{nullptr, nullptr, arrived, int(ptxlab::cluster_rank())}.expect();
    ptxlab::fence_mbarrier_init();
}

// How Y is cut into tiles, and which stages of K this block computes.
struct Schedule {
    int slice;     // of K: the block's rank in its cluster
    int w_blocks;  // of 128 channels
    int num_strips, num_token_tiles, num_row_tiles, num_tiles;
    int tile_tokens;
    int first_stage, num_stages;
    ptxlab::RowTiles row_tiles;

    __device__ __forceinline__ Schedule(int M, int N, int K)
        : slice(SPLIT > 1 ? ptxlab::cluster_rank() : 0), w_blocks((K + 127) / 128), num_strips((N + 15) / 16),
          num_token_tiles((M + BM - 1) / BM), num_row_tiles((num_strips + STRIPS - 1) / STRIPS),
          num_tiles(num_token_tiles * num_row_tiles), tile_tokens(ORDER == 1 ? BM : (even_share(M) + 7) / 8 * 8),
          first_stage((K + BK - 1) / BK * slice / SPLIT),
          num_stages((K + BK - 1) / BK * (slice + 1) / SPLIT - first_stage), row_tiles(num_strips, num_row_tiles) {}

    // Share M out evenly over the token tiles. A single tile needs no division, for which the first copy would wait.
    __device__ __forceinline__ int even_share(int M) const {
        return num_token_tiles == 1 ? M : (M + num_token_tiles - 1) / num_token_tiles;
    }
    // Row tile and token tile of a tile index.
    __device__ __forceinline__ ptxlab::TileCoord coord(int tile_index) const {
        return ptxlab::tile_coord(tile_index, num_token_tiles, num_row_tiles);
    }
};

// Zero the rows of X from tile_tokens on, in all stages: no copy writes them, but wgmma reads them.
__device__ __forceinline__ void clear_padding(unsigned char* ring, int tile_tokens) {
    const int padding_chunks = (BM - tile_tokens) * 8;  // of 16 bytes, in 128 channels
    for (int x_tile = threadIdx.x / 32; x_tile < STAGES * kStageBlocks; x_tile += kThreads / 32) {
        unsigned char* x = ring + x_tile / kStageBlocks * Stage::BYTES + x_tile % kStageBlocks * (BM * 128);
        for (int i = threadIdx.x % 32; i < padding_chunks; i += 32)
            *reinterpret_cast<int4*>(x + tile_tokens * 128 + i * 16) = make_int4(0, 0, 0, 0);
    }
    ptxlab::fence_proxy_async();
}

// Run the producer warp group: one thread of each warp copies every fourth strip. The last warp, which has the fewest
// strips, also copies X.
__device__ __forceinline__ void produce(const Arguments& arguments, const Schedule& schedule, const Ring& ring,
                                        Slot& slot TIMELINE_PARAMETER) {
    const bool elected = ptxlab::elect();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const u32 strip_pitch = schedule.w_blocks * Stage::BLOCK, ring_address = ptxlab::shared_address(ring.stages),
              full_address = ptxlab::shared_address(ring.full);
    const int first_stage = schedule.first_stage, num_stages = schedule.num_stages;
    int tile_index = blockIdx.x / SPLIT, height = 0, token_tile = 0;  // height: strips from this warp's first on
    const unsigned char* w = nullptr;                                 // this warp's weights of the next stage
    const auto begin_tile = [&] {
        const ptxlab::TileCoord tile = schedule.coord(tile_index);
        const int strip0 = schedule.row_tiles.first_strip(tile.row_tile) + warp;
        height = schedule.row_tiles.first_strip(tile.row_tile + 1) - strip0;
        w = arguments.strips + size_t(strip0) * strip_pitch + first_stage * kStageBlockBytes;
        token_tile = tile.token_tile;
    };
    const auto load_w = [&](int stage, int slot_index) {
        // Past the end of K any blocks will do, because X is zero there.
        const int valid_blocks = min(kStageBlocks, schedule.w_blocks - stage * kStageBlocks);
        const u32 barrier = full_address + slot_index * 8,
                  bytes = (warp == 3 ? schedule.tile_tokens * BK : 0) + max(0, height + 3) / 4 * kStageBlockBytes;
        const u32 w_slot = ring_address + slot_index * Stage::BYTES + Stage::X_BYTES + warp * Stage::W_SLOT;
        if (elected) {
            ptxlab::mbarrier_arrive_expect(&ring.full[slot_index], bytes);
#pragma unroll
            for (int i = 0; i < kWarpStrips; ++i)
                if (4 * i < height)
                    ptxlab::bulk_load(w_slot + 4 * i * Stage::W_SLOT, w + size_t(4 * i * strip_pitch),
                                      valid_blocks * Stage::BLOCK, barrier);
        }
#pragma unroll 1
        for (int b = valid_blocks; b < kStageBlocks; ++b)
            for (int i = 0; i < height; i += 4)
                if (elected)
                    ptxlab::bulk_load(w_slot + i * Stage::W_SLOT + b * Stage::BLOCK, w + size_t(i * strip_pitch),
                                      Stage::BLOCK, barrier);
        w += kStageBlockBytes;
    };
    const auto load_x = [&](int stage, int slot_index) {
        const u32 x_slot = ring_address + slot_index * Stage::BYTES, barrier = full_address + slot_index * 8;
#pragma unroll
        for (int i = 0; i < kStageBlocks; ++i) {
            const int k_tile = stage * kStageBlocks + i;
            const int column = ORDER == 0 ? k_tile * 128 : 0;
            const int row = ORDER == 0                   ? token_tile * schedule.tile_tokens
                            : k_tile < schedule.w_blocks ? (token_tile * schedule.w_blocks + k_tile) * BM
                                                         : -BM;
            if (elected && warp == 3) ptxlab::tensor_load(x_slot + i * BM * 128, arguments.x, column, row, barrier);
        }
    };
    ptxlab::lower_registers_to<kProducerRegisters>();
    bool has_w = num_stages > 0;  // whether the copies of the next stage's weights have been issued
    PHASE(LOAD);
    if (has_w) begin_tile(), load_w(first_stage, 0);  // weights do not wait for the kernel before
    if (elected) ptxlab::launch_dependents();
    ptxlab::wait_for_predecessors();
    for (; tile_index < schedule.num_tiles; tile_index += gridDim.x / SPLIT) {
        if (!has_w) begin_tile();
        for (int stage = first_stage; stage < first_stage + num_stages; ++stage, slot.advance()) {
            if (!has_w) {
                PHASE(WAIT_GROUP);
                ptxlab::mbarrier_wait(&ring.empty[slot.index], slot.parity ^ 1);
                PHASE(LOAD);
                load_w(stage, slot.index);
            }
            load_x(stage, slot.index);
            has_w = false;
        }
    }
    PHASE(WAIT_GROUP);
    __syncwarp();
    if (SPLIT > 1) ptxlab::cluster_wait();
}

// Store the sums of a warp group wk > 0 along K in the ring, for warp group wk = 0. The ring is free: with WK > 1 a
// block has one tile.
__device__ __forceinline__ void store_partial_sums(const int (&acc)[MN][BM / 2], int4* partial, int wn, int wk) {
#pragma unroll
    for (int h = 0; h < MN; ++h)
#pragma unroll
        for (int j = 0; j < BM / 8; ++j)
            partial[(((wk - 1) * kMmaTiles + wn * MN + h) * (BM / 8) + j) * 128] =
                make_int4(acc[h][4 * j], acc[h][4 * j + 1], acc[h][4 * j + 2], acc[h][4 * j + 3]);
}

// Add the sums that the warp groups wk > 0 stored. For warp group wk = 0.
__device__ __forceinline__ void add_partial_sums(int (&acc)[MN][BM / 2], const int4* partial, int wn) {
#pragma unroll
    for (int h = 0; h < MN; ++h)
#pragma unroll
        for (int j = 0; j < BM / 8; ++j)
#pragma unroll
            for (int k = 0; k < WK - 1; ++k) {
                const int4 addend = partial[((k * kMmaTiles + wn * MN + h) * (BM / 8) + j) * 128];
                acc[h][4 * j] += addend.x, acc[h][4 * j + 1] += addend.y, acc[h][4 * j + 2] += addend.z,
                    acc[h][4 * j + 3] += addend.w;
            }
}

// A consumer thread's warp group, its index along the rows (wn) and along K (wk); thread, warp and lane in the group.
struct ConsumerThread {
    int group = threadIdx.x / 128 - 1, wn = group % WN, wk = group / WN;
    int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
};

// A tile of Y: its first token, its strips strip0 .. end_strip - 1 and their number.
struct Tile {
    int token0, strip0, end_strip, height;

    __device__ __forceinline__ Tile(const Schedule& schedule, int tile_index) {
        const ptxlab::TileCoord tile = schedule.coord(tile_index);
        token0 = tile.token_tile * schedule.tile_tokens, strip0 = schedule.row_tiles.first_strip(tile.row_tile);
        end_strip = schedule.row_tiles.first_strip(tile.row_tile + 1), height = end_strip - strip0;
    }
};

// Load scale, bias and zero point of this lane's rows of W, two for each of MN MMAs, and compute where its warp's
// strips lie in the ring's first slot. A warp without a strip takes the last one again.
__device__ __forceinline__ void load_row_constants(float (&w_scale)[MN][2], float (&bias)[MN][2], int (&zero)[MN][2],
                                                   u32 (&strip_address)[MN], const Arguments& arguments,
                                                   const unsigned char* stages, const Tile& tile,
                                                   const ConsumerThread& self) {
    const int N = arguments.N;
#pragma unroll
    for (int h = 0; h < MN; ++h) {
        const int strip = (self.wn * MN + h) * 4 + self.warp, n = (tile.strip0 + strip) * 16 + self.lane / 4;
        strip_address[h] =
            ptxlab::shared_address(stages) + Stage::X_BYTES + max(0, min(strip, tile.height - 1)) * Stage::W_SLOT;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            w_scale[h][r] = arguments.w_scale[min(n + 8 * r, N - 1)];
            zero[h][r] = GROUP == 0 ? arguments.w_zero[min(n + 8 * r, N - 1)] : 128;
            bias[h][r] = ptxlab::bias_at(arguments.bias, min(n + 8 * r, N - 1));
        }
    }
}

}  // namespace

// Pointers that the preceding kernel may write are not __restrict__: ptxas would move their read-only loads ahead of
// griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(kThreads, 1) gemm_w4a8_sm90(
    const unsigned char* __restrict__ strips,  // u8  [N/16, K/128, 1024 + 32 * 128 / g]
    const float* __restrict__ w_scale,         // f32 [N]
    const unsigned char* __restrict__ w_zero,  // u8  [N]; null unless GROUP == 0
    // s8  [M, K], boxes [tokens of a tile][128] swizzled; or tiles
    const __grid_constant__ ptxlab::TensorMap x,
    const float* x_scale,            // f32 [M]; null if OUT == 3
    const int* x_sum,                // s32 [M]; null if SIGNED
    const float* __restrict__ bias,  // f32 [N], or null
    void* __restrict__ y,            // [M, N], by OUT; [M, N / 2] if FUSED == 1
    int M, int N, int K) {
    extern __shared__ __align__(1024) unsigned char stages[];  // ring, sums of other blocks, buffers, TokenConstants
    __shared__ u64 full[STAGES], empty[STAGES], arrived;
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const Ring ring{stages, full, empty};
    if (threadIdx.x == 128) init_barriers(ring, &arrived);  // not by the producer, which has divisions to do
    const Arguments arguments{strips, w_zero, &x, w_scale, x_scale, bias, x_sum, y, M, N, K};
    const Schedule schedule(M, N, K);
    unsigned char* cluster_sums = stages + STAGES * Stage::BYTES;
    const ClusterSums sums{reinterpret_cast<int4*>(cluster_sums), nullptr, &arrived, schedule.slice};
    if (schedule.tile_tokens < BM) clear_padding(stages, schedule.tile_tokens);
    __syncthreads();
    if (SPLIT > 1) ptxlab::cluster_arrive();
    unsigned char* buffers = cluster_sums + ClusterSums::RECEIVE_BYTES;
    Slot slot;
    if (threadIdx.x < 128) {
        produce(arguments, schedule, ring, slot TIMELINE_ARGUMENT);
        return;
    }

    // The consumer. NOTE as a function like the producer's, ptxas gives it other registers.
    ptxlab::raise_registers_to<kConsumerRegisters>();
    const ConsumerThread self;
    const int wn = self.wn, wk = self.wk, thread = self.thread, warp = self.warp, lane = self.lane;
    TokenConstants* token_constants =
        reinterpret_cast<TokenConstants*>(buffers + WN * 4 * ptxlab::WARP_BUFFER_BYTES) + wn;
    if (WK > 1)
        for (int i = 0; i < wk; ++i) slot.advance();
    for (int tile_index = blockIdx.x / SPLIT; tile_index < schedule.num_tiles; tile_index += gridDim.x / SPLIT) {
        const Tile tile(schedule, tile_index);
        PHASE(SETUP);
        int acc[MN][BM / 2] = {};
        u32 a[2][MN][2][4], strip_address[MN];
        float row_scale[MN][2], row_bias[MN][2];
        int row_zero[MN][2];
        load_row_constants(row_scale, row_bias, row_zero, strip_address, arguments, stages, tile, self);
        float token_scale[ptxlab::THREAD_TOKENS<BM>];
        int token_sum[ptxlab::THREAD_TOKENS<BM>];
        ptxlab::wait_for_predecessors();
        ptxlab::load_token_constants<OUT != 3, !SIGNED>(token_scale, token_sum, x_scale, x_sum, tile.token0, M, thread);
        uint4 words[2][MN];
        Stage::Constants constants[MN], next_constants[MN];
        ptxlab::multiply_strips<Stage, WK, SIGNED, true>(acc, a, strip_address, words, constants, next_constants,
                                                         stages, full, empty, slot, wk, schedule.num_stages,
                                                         schedule.w_blocks, lane TIMELINE_ARGUMENT);

        PHASE(REDUCE);
        if (WK > 1) {  // one tile per block: the ring is free
            int4* partial = reinterpret_cast<int4*>(stages) + thread;
            ptxlab::sync_threads(8, 128 * kConsumerGroups);
            if (wk > 0) store_partial_sums(acc, partial, wn, wk);
            ptxlab::sync_threads(8, 128 * kConsumerGroups);
            if (wk > 0) {
                if (SPLIT > 1) ptxlab::cluster_wait();
                return;
            }
            add_partial_sums(acc, partial, wn);
        }
        if (SPLIT > 1) ptxlab::cluster_wait();
#pragma unroll
        for (int h = 0; h < MN; ++h) sums.send(acc[h], wn * MN + h, thread);
        ptxlab::share_token_constants(token_constants, token_scale, token_sum, wn, thread);
#pragma unroll
        for (int h = 0; h < MN; ++h) {
            const int mma_tile = wn * MN + h;
            PHASE(REDUCE);
            sums.receive(acc[h], mma_tile, thread);
            PHASE(EPILOGUE);
            const ptxlab::Scaling scaling{token_constants->x_scale,
                                          SIGNED ? nullptr : token_constants->x_sum,
                                          {row_zero[h][0], row_zero[h][1]},
                                          {row_scale[h][0], row_scale[h][1]},
                                          {row_bias[h][0], row_bias[h][1]}};
            ptxlab::store_fragments<OUT, BM, FUSED>(
                acc[h], scaling, y, buffers + (wn * 4 + warp) * ptxlab::WARP_BUFFER_BYTES, lane, tile.token0,
                (tile.strip0 + mma_tile * 4 + warp) * 16, min(M, tile.token0 + schedule.tile_tokens), N,
                min(N, tile.end_strip * 16),
                [&](int piece) { return ClusterSums::owner(mma_tile, piece) == schedule.slice; });
        }
    }
}
