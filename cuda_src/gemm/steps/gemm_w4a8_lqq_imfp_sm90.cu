// gemm_w4a8_lqq_imfp_sm90: Y = X W^T on wgmma, LiquidQuant weights, dequantised under another group's wgmma.
//
// The implicit fine-grained pipeline (LiquidGEMM section 5.1): one warp group loads, two compute. Each of these two
// dequantises its own weights into registers and multiplies them, and nothing synchronises the two: while one occupies
// the tensor cores, the other dequantises. Blocks are persistent: the loads of a tile begin under the epilogue of the
// previous one. In LiquidGEMM compute groups fetch tasks when they are free (gemm_w4a8_lqq_dynamic_sm90); here each has
// 64 rows of every stage, because it keeps their sums in registers and the two have equally much to do.
//
// Contract   accumulators[m, n] = sum_k x[m, k] * (q4 * s1 + min)[n, k], exact in int32; y = accumulators * x_scale[m]
//            * w_scale[n] + bias[n], each operation rounded in f32, the result then rounded to the output type, or the
//            accumulators themselves (OUT == 3). Any M >= 1, N a multiple of 8, K a multiple of the group. What lies
//            outside the matrices is loaded as zeros.
// Tile       block: 2 warp groups of 64 rows each x BM tokens x BK channels; ring of STAGES; W in the dual-MMA layout.
// Guide      notebooks/guide/kernels_gemm.md: operands, layout, schedule, constants
// Measured   0.65, 0.56, 0.61 of the floor at M = 16, 64, 256 on an H200; 1.19 times as fast as cuBLAS FP8 (means).
// PTX ISA    9.7.15 wgmma m64nNk32 (.s8.s8); 9.7.9.25-27 bulk and tensor copies; 9.7.13.15 mbarrier; 9.7.19.5
//            setmaxnreg.
#include "dequant.cuh"
#include "epilogue_sm90.cuh"
#include "timeline.cuh"
#include "wgmma.cuh"

#ifndef BM
#define BM 64            // tokens of a tile
#define BK 128           // channels of a stage
#define STAGES 6         // slots of the ring
#define CLUSTER 1        // blocks that share a tile, each with a slice of K
#define RESIDENT 1       // blocks per SM
#define GROUP 128        // channels of a level-2 scale
#define OUT 0            // y as 0 f16, 1 bf16, 2 f32; 3 the int32 accumulators
#define STORE_TOKENS 32  // tokens whose results are stored at a time
#define STORE_PITCH 68   // int32 from one of these tokens to the next in shared memory
#endif
#ifndef ORDER
#define ORDER 0  // of X: 0 row-major, 1 swizzled tiles of BM tokens (quantize_activations, layout="tiles", rows=BM)
#endif

namespace {

using ptxlab::u32;
using ptxlab::u64;
constexpr int kBlockChannels = GROUP < 64 ? 64 : GROUP;                        // channels of a block of W
constexpr int kBlockGroups = kBlockChannels / GROUP;                           // groups of a block of W
constexpr int kWBlockBytes = kBlockChannels / 64 * 2048 + kBlockGroups * 128;  // bytes of a block of W
constexpr int kWBytes = BK / kBlockChannels * kWBlockBytes;                    // bytes of W in a stage, for 64 rows
constexpr int kXBytes = BM * BK;
constexpr int kStageBytes = (kXBytes + 2 * kWBytes + 1023) / 1024 * 1024;  // swizzled tiles begin at multiples of 1024
static_assert(STAGES >= 2, "a slot is given back while the next stage is worked on");
constexpr int kConsumerRegisters = RESIDENT == 1   ? 232
                                   : RESIDENT == 2 ? 104
                                                   : 72,
              kProducerRegisters = RESIDENT == 1 ? 40 : 24;
using Epilogue = ptxlab::Epilogue<2, BM, CLUSTER>;

// How Y is cut into tiles, and which stages of K this block computes.
struct Schedule {
    int rank, num_token_tiles, num_row_tiles;  // rank in the cluster; tiles of BM tokens, of 64 rows
    int w_blocks, num_tiles, k_tiles, k_stages, first_stage, num_stages;

    __device__ __forceinline__ Schedule(int M, int N, int K)
        : rank(CLUSTER > 1 ? ptxlab::cluster_rank() : 0), num_token_tiles((M + BM - 1) / BM),
          num_row_tiles((N + 63) / 64), w_blocks((K + kBlockChannels - 1) / kBlockChannels),
          num_tiles(num_token_tiles * ((num_row_tiles + 1) / 2)), k_tiles((K + 127) / 128), k_stages((K + BK - 1) / BK),
          first_stage(k_stages * rank / CLUSTER), num_stages(k_stages * (rank + 1) / CLUSTER - first_stage) {}
};

// Issue the copies of all stages. For one thread, the producer.
__device__ __forceinline__ void load_stages(const unsigned char* blocks, const ptxlab::TensorMap& x,
                                            const Schedule& schedule, unsigned char* ring, u64* full, u64* empty,
                                            ptxlab::Slot<STAGES>& slot TIMELINE_PARAMETER) {
    for (int tile = blockIdx.x / CLUSTER; tile < schedule.num_tiles; tile += gridDim.x / CLUSTER) {
        const int token0 = tile % schedule.num_token_tiles * BM, row_tile0 = tile / schedule.num_token_tiles * 2;
        for (int stage = schedule.first_stage; stage < schedule.first_stage + schedule.num_stages;
             ++stage, slot.advance()) {
            unsigned char* stage_slot = ring + slot.index * kStageBytes;
            u64* barrier = &full[slot.index];
            PHASE(WAIT_GROUP);
            ptxlab::mbarrier_wait(&empty[slot.index], slot.parity ^ 1);  // the first round finds them empty
            PHASE(LOAD);
            ptxlab::mbarrier_arrive_expect(barrier, kXBytes + 2 * kWBytes);
            for (int i = 0; i < BK / 128; ++i) {
                const int k_tile = stage * (BK / 128) + i;  // of swizzled tiles, contiguous along K first
                const int row = k_tile < schedule.k_tiles
                                    ? (tile % schedule.num_token_tiles * schedule.k_tiles + k_tile) * BM
                                    : -BM;
                if (ORDER == 0) ptxlab::tensor_load(stage_slot + i * BM * 128, &x, k_tile * 128, token0, barrier);
                else ptxlab::tensor_load(stage_slot + i * BM * 128, &x, 0, row, barrier);
            }
            // Past N the last rows are loaded again. Past K any weights will do, because X is zero there.
            const int block = stage * (BK / kBlockChannels),
                      valid_blocks = min(BK / kBlockChannels, schedule.w_blocks - block);
            for (int i = 0; i < 2; ++i) {
                const unsigned char* row_blocks =
                    blocks + size_t(min(row_tile0 + i, schedule.num_row_tiles - 1)) * schedule.w_blocks * kWBlockBytes;
                unsigned char* w = stage_slot + kXBytes + i * kWBytes;
                ptxlab::bulk_load(w, row_blocks + size_t(block) * kWBlockBytes, valid_blocks * kWBlockBytes, barrier);
#pragma unroll 1
                for (int b = valid_blocks; b < BK / kBlockChannels; ++b)
                    ptxlab::bulk_load(w + b * kWBlockBytes, row_blocks, kWBlockBytes, barrier);
            }
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(384, RESIDENT) gemm_w4a8_lqq_imfp_sm90(
    const unsigned char* __restrict__ blocks,     // u8  [N/64, K/max(64, g), bytes], dual-MMA layout
    const float* __restrict__ w_scale,            // f32 [N]
    const __grid_constant__ ptxlab::TensorMap x,  // s8  [M, K], boxes [BM][128] swizzled
    const float* __restrict__ x_scale,            // f32 [M]
    const float* __restrict__ bias,               // f32 [N], or null
    void* __restrict__ y,                         // [M, N], by OUT
    int M, int N, int K) {
    extern __shared__ __align__(1024) unsigned char ring[];
    __shared__ u64 full[STAGES], empty[STAGES], arrived;
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const Schedule schedule(M, N, K);
    unsigned char* cluster_sums = ring + STAGES * kStageBytes;
    const Epilogue epilogue{reinterpret_cast<int4*>(cluster_sums),
                            reinterpret_cast<int*>(cluster_sums + Epilogue::RECEIVE_BYTES), &arrived, schedule.rank};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            ptxlab::mbarrier_init(&full[s], 1);
            ptxlab::mbarrier_init(&empty[s], 256);
        }
        epilogue.expect();
        ptxlab::fence_mbarrier_init();
    }
    __syncthreads();
    if (CLUSTER > 1) ptxlab::cluster_arrive();

    ptxlab::Slot<STAGES> slot;
    if (threadIdx.x < 128) {  // the warp group that loads: one thread issues the copies
        ptxlab::lower_registers_to<kProducerRegisters>();
        if (threadIdx.x == 0) load_stages(blocks, x, schedule, ring, full, empty, slot TIMELINE_ARGUMENT);
        PHASE(WAIT_GROUP);
        __syncwarp();
        if (CLUSTER > 1) ptxlab::cluster_wait();
    } else {  // a warp group that dequantises and multiplies
        ptxlab::raise_registers_to<kConsumerRegisters>();
        const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, rows = thread / 32 * 8 + thread % 32 / 4;
        for (int tile = blockIdx.x / CLUSTER; tile < schedule.num_tiles; tile += gridDim.x / CLUSTER) {
            const int token0 = tile % schedule.num_token_tiles * BM,
                      row_tile = tile / schedule.num_token_tiles * 2 + group;
            int acc[BM / 2] = {};
            u32 a[2][2][4];            // [unit of 64 k, odd or even][MMA][register]
            int unreleased_slot = -1;  // the slot that wgmma may still read
            for (int stage = 0; stage < schedule.num_stages; ++stage, slot.advance()) {
                const unsigned char* x_slot = ring + slot.index * kStageBytes;
                const unsigned char* w = x_slot + kXBytes + group * kWBytes;
                const u64 x_tile = ptxlab::swizzled_128(x_slot);
                PHASE(WAIT_COPY);
                ptxlab::mbarrier_wait(&full[slot.index], slot.parity);
                PHASE(DEQUANTISE);
                uint4 packed[BK / 64];
                u32 constants[BK / 64][kBlockGroups];
#pragma unroll
                for (int k_unit = 0; k_unit < BK / 64; ++k_unit) {
                    const unsigned char* block = w + k_unit * 64 / kBlockChannels * kWBlockBytes;
                    packed[k_unit] =
                        *reinterpret_cast<const uint4*>(block + k_unit * 64 % kBlockChannels / 64 * 2048 + thread * 16);
#pragma unroll
                    for (int i = 0; i < kBlockGroups; ++i)
                        constants[k_unit][i] = *reinterpret_cast<const u32*>(block + kBlockChannels / 64 * 2048 +
                                                                             (rows * kBlockGroups + i) * 4);
                }
#pragma unroll
                for (int k_unit = 0; k_unit < BK / 64; ++k_unit) {
                    int words[4] = {int(packed[k_unit].x), int(packed[k_unit].y), int(packed[k_unit].z),
                                    int(packed[k_unit].w)};
                    PHASE(WAIT_MMA, 1);
                    ptxlab::wgmma_wait<1>();  // the MMAs of two units ago are over: a[k_unit & 1] may be overwritten
                    ptxlab::pin(words);
                    // In unit 1 that wait covers the last MMAs of the previous stage, so its slot is free.
                    if (k_unit == 1 && unreleased_slot >= 0) ptxlab::mbarrier_arrive(&empty[unreleased_slot]);
                    PHASE(DEQUANTISE);
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const u32 pair = constants[k_unit][j / 2 * (kBlockGroups - 1)] >> 16 * (j & 1);
                        const uint2 d = ptxlab::dequant_lqq(words[j], pair & 0xff, __byte_perm(pair, 0, 0x1111));
                        a[k_unit & 1][j / 2][j & 1] = d.x;        // k 4 t to 4 t + 3, t = lane % 4; j odd: row + 8
                        a[k_unit & 1][j / 2][2 + (j & 1)] = d.y;  // k 16 + 4 t to 16 + 4 t + 3
                    }
                    PHASE(ISSUE, BM);
                    ptxlab::wgmma_fence();
                    const u64 x_descriptor = x_tile + k_unit / 2 * (BM * 128 / 16) + k_unit % 2 * 4;
                    ptxlab::wgmma_s8(acc, a[k_unit & 1][0], x_descriptor);
                    ptxlab::wgmma_s8(acc, a[k_unit & 1][1], x_descriptor + 2);
                    ptxlab::wgmma_commit();
                }
                unreleased_slot = slot.index;
            }
            PHASE(WAIT_MMA, 0);
            ptxlab::wgmma_wait<0>();
            ptxlab::pin(acc);
            if (unreleased_slot >= 0) ptxlab::mbarrier_arrive(&empty[unreleased_slot]);

            PHASE(REDUCE);
            if (CLUSTER > 1) ptxlab::cluster_wait();  // the other blocks' barriers are initialised
            epilogue.send(acc, group, thread);
            epilogue.receive(acc, group, thread);
            PHASE(EPILOGUE);
            if (row_tile < schedule.num_row_tiles)
                epilogue.store<OUT, STORE_TOKENS, STORE_PITCH>(acc, group, thread, {y, x_scale, w_scale, bias, M, N},
                                                               token0, row_tile * 64);
        }
    }
}
