// gemm_w4a8_grouped_sm90: GEMMs of all experts of a layer in one launch: y = x W_e^T for the rows x of each expert e.
//
// gemm_w4a8_sm90 with another list of tiles. How many rows an expert has is known only on the device, where the router
// has just written it. So every warp works the list out for itself (experts.cuh).
//
// Contract   rows offsets[e] .. offsets[e + 1] - 1 of X are multiplied by W_e: offsets never fall, from offsets[0] = 0
//            to offsets[E] = M; an expert may have no rows. accumulators[m, n] = sum_k x[m, k] * (q4 * s1 + o1 -
//            128)[e, n, k], exact in int32; y = accumulators * x_scale[m] * w_scale[e, n] + bias[e, n], each operation
//            rounded in f32, the result then rounded to the output type, or the accumulators themselves (OUT == 3). Any
//            M >= 1, E >= 1, N a multiple of 8, K a multiple of the group. LiquidQuant: o1 = 128 + min; QoQ: o1 = 128 -
//            zero * s1. The MMA takes w + 128 as u8, and the epilogue subtracts 128 times the token sum; SIGNED: it
//            takes w as s8 and needs no token sums. GROUP 0: scales per channel alone, with token sums; the weight is
//            q4[e, n, k] - w_zero[e, n].
// PDL        all warps wait for the preceding kernel, which may write `offsets`: these say which weights are needed.
//            Pointers that it may write are not __restrict__, because ptxas moves loads of read-only data
//            (ld.global.nc) ahead of griddepcontrol.wait.
// Guide      notebooks/guide/kernels_gemm.md: strips, tiles of experts, schedule, constants
// Measured   Mixtral, 8 experts, top 2, on an H200, of the floor at 1, 8, 64 tokens: gate+up 0.83, 0.90, 0.88; down
//            0.75, 0.93, 0.87; 0.97 to 1.51 times as fast as a loop of single GEMMs, 1.33 in the mean from 32 tokens
//            on.
// PTX ISA    9.7.15 wgmma m64nNk32 (.u8.s8); 9.7.9.25-27 bulk and tensor copies; 9.7.13.15 mbarrier; 9.7.13.16 elect;
//            9.7.19.5 setmaxnreg; 9.7.14.5.16 stmatrix
#include "experts.cuh"
#include "fragments_out.cuh"
#include "griddep.cuh"
#include "named_barrier.cuh"
#include "strips_sm90.cuh"
#include "timeline.cuh"

#ifndef BM
#define BM 32      // tokens of a tile
#define WN 2       // warp groups that multiply, along the rows of W
#define MN 1       // MMAs of 64 rows of each of them
#define STRIPS 8   // strips of a tile, at most
#define BK 128     // channels of a stage
#define STAGES 4   // slots of the ring
#define GROUP 128  // weights of a level-2 scale; 0: constants per channel alone
#define OUT 0      // y as 0 f16, 1 bf16, 2 f32; 3 the int32 accumulators
#define SIGNED 0   // 1: the MMA takes s8 weights; no token sums
#endif

namespace {

using ptxlab::u32;
using ptxlab::u64;
static_assert(GROUP != 0 || !SIGNED, "a zero point leaves with the token sum");
using Stage = ptxlab::StripStage<BM, BK, STRIPS, GROUP>;
using Ring = ptxlab::StripRing<Stage, STAGES>;
using TokenConstants = ptxlab::TokenConstants<BM>;
constexpr int kBlockBytes = Stage::BLOCK;  // bytes of 128 channels of a strip
static_assert(STRIPS <= WN * MN * 4, "a warp has MN strips");
static_assert(WN <= 3, "registers");

constexpr int kThreads = 128 * (WN + 1);
constexpr int kStageBlocks = BK / 128, kWarpStrips = (STRIPS + 3) / 4;  // strips that a producer warp copies
constexpr int kConsumerRegisters = WN <= 2 ? 232 : 152, kProducerRegisters = 40;

// Kernel arguments that producer and consumers read.
struct Arguments {
    const unsigned char *strips, *w_zero;
    const ptxlab::TensorMap* x;
    const float *w_scale, *bias;
    int M, N;
};

// Initialise every barrier with its number of arrivals. For one thread.
__device__ __forceinline__ void init_barriers(const Ring& ring) {
    for (int s = 0; s < STAGES; ++s) {
        ptxlab::mbarrier_init(&ring.full[s], 4);
        ptxlab::mbarrier_init(&ring.empty[s], 128 * WN);
    }
    ptxlab::fence_mbarrier_init();
}

// Load scale, bias and zero point of this lane's rows of W, two for each of MN MMAs, and compute where its warp's
// strips lie in the ring's first slot. A warp without a strip takes the last one again.
__device__ __forceinline__ void load_row_constants(float (&w_scale)[MN][2], float (&bias)[MN][2], int (&zero)[MN][2],
                                                   u32 (&strip_address)[MN], const Arguments& arguments,
                                                   const unsigned char* stages, const ptxlab::ExpertTile& tile,
                                                   int strip0, int height, int wn, int warp, int lane) {
    const int N = arguments.N;
#pragma unroll
    for (int h = 0; h < MN; ++h) {
        const int strip = (wn * MN + h) * 4 + warp, n = (strip0 + strip) * 16 + lane / 4;
        strip_address[h] = ptxlab::shared_address(stages) + Stage::X_BYTES + min(strip, height - 1) * Stage::W_SLOT;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const size_t row = size_t(tile.expert) * N + min(n + 8 * r, N - 1);
            w_scale[h][r] = arguments.w_scale[row];
            zero[h][r] = GROUP == 0 ? arguments.w_zero[row] : 128;
            bias[h][r] = ptxlab::bias_at(arguments.bias, row);
        }
    }
}

// How W is cut into row tiles of strips, and K into stages.
struct Schedule {
    int w_blocks, num_stages;  // of 128 channels; of BK channels
    int num_strips, num_row_tiles;
    ptxlab::RowTiles row_tiles;

    __device__ __forceinline__ Schedule(int N, int K)
        : w_blocks((K + 127) / 128), num_stages((K + BK - 1) / BK), num_strips((N + 15) / 16),
          num_row_tiles((num_strips + STRIPS - 1) / STRIPS), row_tiles(num_strips, num_row_tiles) {}
};

// Run the producer warp group: one thread of each warp copies every fourth strip. The last warp, which has the fewest
// strips, also copies X.
__device__ __forceinline__ void produce(const Arguments& arguments, const Schedule& schedule, const Ring& ring,
                                        ptxlab::ExpertTiles<BM>& tiles, ptxlab::ExpertTile& tile,
                                        ptxlab::Slot<STAGES>& slot TIMELINE_PARAMETER) {
    ptxlab::lower_registers_to<kProducerRegisters>();
    const bool elected = ptxlab::elect();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const u32 pitch = schedule.w_blocks * kBlockBytes, ring_address = ptxlab::shared_address(ring.stages),
              full_address = ptxlab::shared_address(ring.full);
    for (int tile_index = blockIdx.x; tiles.find(tile_index, tile); tile_index += gridDim.x) {
        const int strip0 = schedule.row_tiles.first_strip(tile.row_tile) + warp,
                  height = schedule.row_tiles.first_strip(tile.row_tile + 1) - strip0;
        const int warp_strips = max(0, height + 3) / 4;  // every fourth strip
        const unsigned char* w = arguments.strips + (size_t(tile.expert) * schedule.num_strips + strip0) * pitch;
        for (int stage = 0; stage < schedule.num_stages; ++stage, slot.advance(), w += kStageBlocks * kBlockBytes) {
            const u32 bytes = min(kStageBlocks, schedule.w_blocks - stage * kStageBlocks) * kBlockBytes,
                      barrier = full_address + slot.index * 8;
            const u32 x_slot = ring_address + slot.index * Stage::BYTES;
            PHASE(WAIT_GROUP);
            ptxlab::mbarrier_wait(&ring.empty[slot.index], slot.parity ^ 1);
            PHASE(LOAD);
            if (elected) {
                ptxlab::mbarrier_arrive_expect(&ring.full[slot.index],
                                               (warp == 3 ? Stage::X_BYTES : 0) + warp_strips * bytes);
#pragma unroll
                for (int i = 0; i < kWarpStrips; ++i)
                    if (i < warp_strips)
                        ptxlab::bulk_load(x_slot + Stage::X_BYTES + (warp + 4 * i) * Stage::W_SLOT,
                                          w + size_t(4 * i * pitch), bytes, barrier);
            }
#pragma unroll
            for (int i = 0; i < kStageBlocks; ++i)
                if (elected && warp == 3)
                    ptxlab::tensor_load(x_slot + i * BM * 128, arguments.x, (stage * kStageBlocks + i) * 128,
                                        tile.token0, barrier);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) gemm_w4a8_grouped_sm90(
    const unsigned char* __restrict__ strips,     // u8  [E, N/16, K/128, 1024 + 32 * 128 / g]
    const float* __restrict__ w_scale,            // f32 [E, N]
    const unsigned char* __restrict__ w_zero,     // u8  [E, N]; null unless GROUP == 0
    const __grid_constant__ ptxlab::TensorMap x,  // s8  [M, K], boxes [BM][128] swizzled
    const int* offsets,                           // s32 [E + 1]
    const float* x_scale,                         // f32 [M]; not read if OUT == 3
    const int* x_sum,                             // s32 [M]; null if SIGNED
    const float* __restrict__ bias,               // f32 [E, N], or null
    void* __restrict__ y,                         // [M, N], by OUT
    int M, int N, int K, int E) {
    extern __shared__ __align__(1024) unsigned char stages[];  // the ring, then transpose buffers, TokenConstants
    __shared__ u64 full[STAGES], empty[STAGES];
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const Ring ring{stages, full, empty};
    const Arguments arguments{strips, w_zero, &x, w_scale, bias, M, N};
    if (threadIdx.x == 128) init_barriers(ring);  // not by the producer, which has divisions to do
    const Schedule schedule(N, K);
    unsigned char* buffers = stages + STAGES * Stage::BYTES;
    TokenConstants* token_constants = reinterpret_cast<TokenConstants*>(buffers + WN * 4 * ptxlab::WARP_BUFFER_BYTES);

    if (threadIdx.x == 0) ptxlab::launch_dependents();
    ptxlab::wait_for_predecessors();
    ptxlab::ExpertTiles<BM> tiles(offsets, E, schedule.num_row_tiles);
    ptxlab::ExpertTile tile;
    __syncthreads();

    ptxlab::Slot<STAGES> slot;
    if (threadIdx.x < 128) {
        produce(arguments, schedule, ring, tiles, tile, slot TIMELINE_ARGUMENT);
        return;
    }

    // The consumer: a warp group that dequantises and multiplies.
    ptxlab::raise_registers_to<kConsumerRegisters>();
    const int wn = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    TokenConstants* group_constants = token_constants + wn;
    for (int tile_index = blockIdx.x; tiles.find(tile_index, tile); tile_index += gridDim.x) {
        const int strip0 = schedule.row_tiles.first_strip(tile.row_tile),
                  end_strip = schedule.row_tiles.first_strip(tile.row_tile + 1), height = end_strip - strip0;
        PHASE(SETUP);
        int acc[MN][BM / 2] = {};
        u32 a[2][MN][2][4];
        u32 strip_address[MN];
        float row_scale[MN][2], row_bias[MN][2];
        int row_zero[MN][2];
        load_row_constants(row_scale, row_bias, row_zero, strip_address, arguments, stages, tile, strip0, height, wn,
                           warp, lane);
        float token_scale[ptxlab::THREAD_TOKENS<BM>];
        int token_sum[ptxlab::THREAD_TOKENS<BM>];
        ptxlab::load_token_constants<OUT != 3, !SIGNED>(token_scale, token_sum, x_scale, x_sum, tile.token0, M, thread);
        uint4 words[2][MN];
        Stage::Constants constants[MN], next_constants[MN];
        ptxlab::multiply_strips<Stage, 1, SIGNED, false>(acc, a, strip_address, words, constants, next_constants,
                                                         stages, full, empty, slot, 0, schedule.num_stages,
                                                         schedule.w_blocks, lane TIMELINE_ARGUMENT);

        ptxlab::share_token_constants(group_constants, token_scale, token_sum, wn, thread);
#pragma unroll
        for (int h = 0; h < MN; ++h) {
            PHASE(EPILOGUE);
            const ptxlab::Scaling scaling{group_constants->x_scale,
                                          SIGNED ? nullptr : group_constants->x_sum,
                                          {row_zero[h][0], row_zero[h][1]},
                                          {row_scale[h][0], row_scale[h][1]},
                                          {row_bias[h][0], row_bias[h][1]}};
            ptxlab::store_fragments<OUT, BM>(acc[h], scaling, y, buffers + (wn * 4 + warp) * ptxlab::WARP_BUFFER_BYTES,
                                             lane, tile.token0, (strip0 + (wn * MN + h) * 4 + warp) * 16,
                                             tile.end_token, N, min(N, end_strip * 16),
                                             [](int) { return true; });  // this block has all sums
        }
    }
}
