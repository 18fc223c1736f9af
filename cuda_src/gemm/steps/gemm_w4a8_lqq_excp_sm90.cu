// gemm_w4a8_lqq_excp_sm90: Y = X W^T on wgmma, LiquidQuant weights, three warp groups in a row.
//
// The explicit coarse-grained pipeline (LiquidGEMM section 5.1): one warp group loads, one dequantises into shared
// memory, one multiplies from there. Dequantisation and multiplication overlap. The price: every weight takes a round
// trip through shared memory, and the groups wait for each other at every stage.
//
// Contract   accumulators[m, n] = sum_k x[m, k] * (q4 * s1 + min)[n, k], exact in int32; y = accumulators * x_scale[m]
//            * w_scale[n] + bias[n], each operation rounded in f32, the result then rounded to the output type, or the
//            accumulators themselves (OUT == 3). Groups of 64 or 128. What lies outside the matrices is loaded as
//            zeros.
// Tile       block: 64 WN rows x BM tokens x BK = 128 channels; a ring of STAGES for the copies, one of TILES for
//            dequantised s8 [64 WN][128]. Lane 4 g + t stores 4 bytes of row r at 16-byte column c ^ g, + 4 t: all 32
//            banks, once.
// Guide      notebooks/guide/kernels_gemm.md: operands, layout, the barriers full, empty, ready, spent, constants
// Measured   0.48, 0.41, 0.47 of the floor at M = 16, 64, 256 on an H200; 0.85 times as fast as cuBLAS FP8 (means).
// PTX ISA    9.7.15 wgmma m64nNk32 (.s8.s8); 9.7.9.25-27 bulk and tensor copies; 9.7.13.15 mbarrier; 9.7.13.4
//            fence.proxy.async; 9.7.19.5 setmaxnreg.
#include "dequant.cuh"
#include "epilogue_sm90.cuh"
#include "timeline.cuh"
#include "wgmma.cuh"

#ifndef BM
#define WN 2             // tiles of 64 rows of a block
#define BM 64            // tokens of a tile
#define STAGES 4         // slots of the ring of copies
#define TILES 2          // slots of the ring of dequantised tiles
#define CLUSTER 1        // blocks that share a tile, each with a slice of K
#define RESIDENT 1       // blocks per SM
#define GROUP 128        // channels of a level-2 scale
#define OUT 0            // y as 0 f16, 1 bf16, 2 f32; 3 the int32 accumulators
#define STORE_TOKENS 32  // tokens whose results are stored at a time
#define STORE_PITCH 68   // int32 from one of these tokens to the next in shared memory
#endif

namespace {

using ptxlab::u32;
using ptxlab::u64;
constexpr int BK = 128;
constexpr int kWBlockBytes = GROUP / 64 * 2048 + 128;  // GROUP channels of 64 rows, and their constants
constexpr int kWBytes = BK / GROUP * kWBlockBytes;     // of a stage and 64 rows
constexpr int kXBytes = BM * BK;
constexpr int kStageBytes = (kXBytes + WN * kWBytes + 1023) / 1024 * 1024;  // swizzled tiles begin at multiples of 1024
constexpr int kTileBytes = 64 * WN * BK;
static_assert(STAGES >= 2, "a slot is given back while the next stage is worked on");
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;  // with one block per SM
using Epilogue = ptxlab::Epilogue<WN, BM, CLUSTER>;

// The tile of Y that this block computes, and its stages of K.
struct Schedule {
    int rank, tile, num_token_tiles, num_row_tiles, w_blocks, token0, row_tile0;
    int k_stages, first_stage, num_stages;

    __device__ __forceinline__ Schedule(int M, int N, int K)
        : rank(CLUSTER > 1 ? ptxlab::cluster_rank() : 0), tile(blockIdx.x / CLUSTER),
          num_token_tiles((M + BM - 1) / BM), num_row_tiles((N + 63) / 64), w_blocks(K / GROUP),
          token0(tile % num_token_tiles * BM), row_tile0(tile / num_token_tiles * WN), k_stages((K + BK - 1) / BK),
          first_stage(k_stages * rank / CLUSTER), num_stages(k_stages * (rank + 1) / CLUSTER - first_stage) {}
};

// Issue the copies of all stages. For one thread, the producer.
__device__ __forceinline__ void load_stages(const unsigned char* blocks, const ptxlab::TensorMap& x,
                                            const Schedule& schedule, unsigned char* ring, u64* full, u64* empty,
                                            ptxlab::Slot<STAGES>& slot TIMELINE_PARAMETER) {
    for (int stage = schedule.first_stage; stage < schedule.first_stage + schedule.num_stages;
         ++stage, slot.advance()) {
        unsigned char* stage_slot = ring + slot.index * kStageBytes;
        u64* barrier = &full[slot.index];
        PHASE(WAIT_GROUP);
        ptxlab::mbarrier_wait(&empty[slot.index], slot.parity ^ 1);  // the first round finds them empty
        PHASE(LOAD);
        ptxlab::mbarrier_arrive_expect(barrier, kXBytes + WN * kWBytes);
        ptxlab::tensor_load(stage_slot, &x, stage * BK, schedule.token0, barrier);
        // Past N the last rows are loaded again. Past K any weights will do, because X is zero there.
        const int block = stage * (BK / GROUP), valid_blocks = min(BK / GROUP, schedule.w_blocks - block);
        for (int i = 0; i < WN; ++i) {
            const unsigned char* row_blocks = blocks + size_t(min(schedule.row_tile0 + i, schedule.num_row_tiles - 1)) *
                                                           schedule.w_blocks * kWBlockBytes;
            unsigned char* w = stage_slot + kXBytes + i * kWBytes;
            ptxlab::bulk_load(w, row_blocks + size_t(block) * kWBlockBytes, valid_blocks * kWBlockBytes, barrier);
            if (valid_blocks < BK / GROUP)
                ptxlab::bulk_load(w + valid_blocks * kWBlockBytes, row_blocks, kWBlockBytes, barrier);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(384, RESIDENT) gemm_w4a8_lqq_excp_sm90(
    const unsigned char* __restrict__ blocks,     // u8  [N/64, K/g, bytes], dual-MMA layout
    const float* __restrict__ w_scale,            // f32 [N]
    const __grid_constant__ ptxlab::TensorMap x,  // s8  [M, K], boxes [BM][128] swizzled
    const float* __restrict__ x_scale,            // f32 [M]
    const float* __restrict__ bias,               // f32 [N], or null
    void* __restrict__ y,                         // [M, N], by OUT
    int M, int N, int K) {
    extern __shared__ __align__(1024) unsigned char ring[];
    __shared__ u64 full[STAGES], empty[STAGES], ready[TILES], spent[TILES], arrived;
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const Schedule schedule(M, N, K);
    const int role = threadIdx.x / 128, thread = threadIdx.x % 128;

    unsigned char* tiles = ring + STAGES * kStageBytes;
    unsigned char* cluster_sums = tiles + TILES * kTileBytes;
    const Epilogue epilogue{reinterpret_cast<int4*>(cluster_sums),
                            reinterpret_cast<int*>(cluster_sums + Epilogue::RECEIVE_BYTES), &arrived, schedule.rank};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            ptxlab::mbarrier_init(&full[s], 1);
            ptxlab::mbarrier_init(&empty[s], 128 + 4);
        }
        for (int t = 0; t < TILES; ++t) {
            ptxlab::mbarrier_init(&ready[t], 128);
            ptxlab::mbarrier_init(&spent[t], 4);
        }
        epilogue.expect();
        ptxlab::fence_mbarrier_init();
    }
    __syncthreads();
    if (CLUSTER > 1) ptxlab::cluster_arrive();

    ptxlab::Slot<STAGES> slot;
    ptxlab::Slot<TILES> dequantised;
    if (role == 0) {  // load: one thread issues the copies
        if (RESIDENT == 1) ptxlab::lower_registers_to<kProducerRegisters>();
        if (thread == 0) load_stages(blocks, x, schedule, ring, full, empty, slot TIMELINE_ARGUMENT);
        PHASE(WAIT_GROUP);
        __syncwarp();
        if (CLUSTER > 1) ptxlab::cluster_wait();
    } else if (role == 1) {  // dequantise
        const int row = thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
        for (int stage = 0; stage < schedule.num_stages; ++stage, slot.advance(), dequantised.advance()) {
            const unsigned char* w = ring + slot.index * kStageBytes + kXBytes;
            unsigned char* tile_slot = tiles + dequantised.index * kTileBytes;
            PHASE(WAIT_COPY);
            ptxlab::mbarrier_wait(&full[slot.index], slot.parity);
            PHASE(WAIT_GROUP);
            ptxlab::mbarrier_wait(&spent[dequantised.index], dequantised.parity ^ 1);
            PHASE(DEQUANTISE);
#pragma unroll
            for (int i = 0; i < WN; ++i) {
#pragma unroll
                for (int k_unit = 0; k_unit < 2; ++k_unit) {
                    const unsigned char* block = w + i * kWBytes + k_unit * 64 / GROUP * kWBlockBytes;
                    const uint4 packed =
                        *reinterpret_cast<const uint4*>(block + k_unit * 64 % GROUP / 64 * 2048 + thread * 16);
                    const u32 constants = *reinterpret_cast<const u32*>(block + GROUP / 64 * 2048 +
                                                                        (thread / 32 * 8 + thread % 32 / 4) * 4);
                    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const u32 pair = constants >> 16 * (j & 1);
                        const uint2 d = ptxlab::dequant_lqq(words[j], pair & 0xff, __byte_perm(pair, 0, 0x1111));
                        const int r = row + 8 * (j & 1), column = k_unit * 4 + j / 2 * 2;  // of 16 bytes
                        unsigned char* tile_row = tile_slot + (i * 64 + r) * 128 + 4 * t;
                        *reinterpret_cast<u32*>(tile_row + ((column ^ (r & 7)) * 16)) = d.x;
                        *reinterpret_cast<u32*>(tile_row + (((column + 1) ^ (r & 7)) * 16)) = d.y;
                    }
                }
            }
            ptxlab::fence_proxy_async();  // wgmma reads what these stores wrote
            ptxlab::mbarrier_arrive(&ready[dequantised.index]);
            ptxlab::mbarrier_arrive(&empty[slot.index]);
        }
        PHASE(WAIT_GROUP);
        if (CLUSTER > 1) ptxlab::cluster_wait();
    } else {  // multiply
        if (RESIDENT == 1) ptxlab::raise_registers_to<kConsumerRegisters>();
        int acc[WN][BM / 2] = {};
        int unreleased_slot = -1, unreleased_tile = -1;
        for (int stage = 0; stage < schedule.num_stages; ++stage, slot.advance(), dequantised.advance()) {
            const u64 x_tile = ptxlab::swizzled_128(ring + slot.index * kStageBytes);
            const u64 w_tile = ptxlab::swizzled_128(tiles + dequantised.index * kTileBytes);
            PHASE(WAIT_COPY);
            ptxlab::mbarrier_wait(&full[slot.index], slot.parity);
            PHASE(WAIT_GROUP);
            ptxlab::mbarrier_wait(&ready[dequantised.index], dequantised.parity);
            PHASE(ISSUE, BK / 64 * WN * BM);
            ptxlab::wgmma_fence();
#pragma unroll
            for (int step = 0; step < BK / 32; ++step)
#pragma unroll
                for (int i = 0; i < WN; ++i)
                    ptxlab::wgmma_s8(acc[i], w_tile + i * (64 * 128 / 16) + step * 2, x_tile + step * 2);
            ptxlab::wgmma_commit();
            PHASE(WAIT_MMA, 1);
            ptxlab::wgmma_wait<1>();                         // the previous stage has been read
            if (unreleased_slot >= 0 && thread % 32 == 0) {  // only wgmma reads both
                ptxlab::mbarrier_arrive(&empty[unreleased_slot]);
                ptxlab::mbarrier_arrive(&spent[unreleased_tile]);
            }
            unreleased_slot = slot.index, unreleased_tile = dequantised.index;
        }
        PHASE(WAIT_MMA, 0);
        ptxlab::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < WN; ++i) ptxlab::pin(acc[i]);
        PHASE(REDUCE);
        if (CLUSTER > 1) ptxlab::cluster_wait();  // the other blocks' barriers are initialised
#pragma unroll
        for (int i = 0; i < WN; ++i) epilogue.send(acc[i], i, thread);
#pragma unroll
        for (int i = 0; i < WN; ++i) {
            PHASE(REDUCE);
            epilogue.receive(acc[i], i, thread);
            PHASE(EPILOGUE);
            if (schedule.row_tile0 + i < schedule.num_row_tiles)
                epilogue.store<OUT, STORE_TOKENS, STORE_PITCH>(acc[i], i, thread, {y, x_scale, w_scale, bias, M, N},
                                                               schedule.token0, (schedule.row_tile0 + i) * 64);
        }
    }
}
