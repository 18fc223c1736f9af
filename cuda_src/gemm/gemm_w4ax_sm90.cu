// gemm_w4ax_sm90: Y = X W^T in COMET's format (COMET section 4) on Hopper, whose tensor cores have no INT4.
//
// The pipeline of gemm_w4a4_sm90: one warp group copies and prepares stages, WN warp groups multiply 64 rows of W each
// and scale their own sums; blocks are persistent. Activations of INT4 blocks are copied packed, and two warps unpack
// them in shared memory.
//
// Contract   y = sum over the blocks of 128 channels, K4 channels of INT4 and then K8 of INT8, of sum_b[m, n] *
//            (x_scale[m, b] * w_scale[n, b]) + bias, one fma after the other in f32 from 0 on, then rounded to the
//            output (OUT 0 f16, 1 bf16, 2 f32); the integer sums sum_b are exact in int32. Results equal those of
//            gemm_w4ax_naive_sm80 bit for bit. Any M >= 1, N a multiple of 8, K4 and K8 multiples of 128.
// Shows      what W4Ax gains without INT4 tensor cores: fewer bytes. Weights stay in the upper half of their bytes, as
//            16 w, and so do INT4 activations, so a product counts 256 times. Unpacking four takes an AND, or a shift
//            and an AND. It puts even channels before odd ones, and the weights are packed in this order. Both kinds of
//            stages take as long on the tensor cores, so there is nothing to balance among SMs.
// PDL        loads of weights do not wait for the preceding kernel. Loads of X and its scales do, and so do stores of
//            results.
// Guide      notebooks/guide/kernels_gemm.md: operands, tile, schedule, constants
// Measured   on an H200 at M = 64, 128, 256, 512, 1024: 2.23, 2.50, 2.80, 2.95, 3.01 of gemm_w4a8's time, 1.00, 0.88,
//            0.71, 0.60, 0.59 times as fast as cuBLAS INT8 (means over LLaMA-2's matrices, groups of 128; commit
//            630a63a4).
// PTX ISA    9.7.15 wgmma m64nNk32 (.s8.s8); 9.7.9.25-27 bulk and tensor copies; 9.7.13.13 griddepcontrol; 9.7.13.15
//            mbarrier; 9.7.13.16 elect; 9.7.14.5.16 stmatrix; 9.7.19.5 setmaxnreg
#include "fragments_out.cuh"
#include "griddep.cuh"
#include "group_sums_sm90.cuh"
#include "mbarrier.cuh"
#include "tile_order.cuh"
#include "timeline.cuh"
#include "vector_access.cuh"
#include "wgmma.cuh"

#ifndef BM
#define BM 64       // tokens of a tile, at most
#define WN 2        // warp groups that multiply, 64 rows of W each
#define TOGETHER 1  // INT4 blocks that a warp group has in wgmma at once
#define STAGES 6    // slots of the ring
#define OUT 0       // y as 0 f16, 1 bf16, 2 f32
#endif

namespace {

using ptxlab::u64;
using u32 = unsigned;
// Threads of a block; strips of a tile; threads that unpack X.
constexpr int kThreads = 128 * (WN + 1), kStrips = 4 * WN, kUnpackers = 64;
constexpr int kBlockChannels = 128, kBlockBytes = 1024 + 32;  // a strip's block in a stage
constexpr int kHalfBytes = BM * 64;                           // 64 of a stage's 128 channels of X
// Byte offsets in a stage: X in two halves, packed X, its scales, its spread scales, blocks of W.
constexpr int kPackedOffset = 2 * kHalfBytes, kScalesOffset = 3 * kHalfBytes, kSpreadOffset = kScalesOffset + BM * 16;
constexpr int kWeightsOffset = kSpreadOffset + ptxlab::SPREAD_BYTES<BM>;
constexpr int kStageBytes = (kWeightsOffset + kStrips * kBlockBytes + 1023) / 1024 * 1024;
constexpr bool kUneven = WN > 1;  // whether the consumers get registers of the producer
constexpr int kConsumerRegisters = ptxlab::CONSUMER_REGISTERS[WN], kProducerRegisters = ptxlab::PRODUCER_REGISTERS[WN];
static_assert(WN <= 4, "CONSUMER_REGISTERS and PRODUCER_REGISTERS have no more");
static_assert(BM <= 128, "sums and totals have a register each");
static_assert(STAGES >= TOGETHER, "blocks under wgmma keep their slots");

// Unpack pairs of s4, 64 bytes for each of `tokens` tokens, to bytes 16 x: 64 channels in each half of X. Source and
// destination have the 64-byte swizzle. Of 32 channels the even ones come first. Lanes whose stores would share a bank
// start with the odd ones. By `kUnpackers` threads, of which this is number `thread`.
__device__ __forceinline__ void unpack(unsigned char* x, int tokens, int thread) {
#pragma unroll 2
    for (int i = thread; i < tokens * 4; i += kUnpackers) {
        const int token = i / 4, chunk = i % 4, swizzle = token / 2 % 4;  // chunk: 32 channels
        unsigned char* half = x + chunk / 2 * kHalfBytes + token * 64;
        u32 q[4];
        ptxlab::load_words(q, x + kPackedOffset + token * 64 + (chunk ^ swizzle) * 16);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const int odd = chunk / 2 ^ step, shift = odd ? 0 : 4;
            u32 bytes[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) bytes[j] = q[j] << shift & 0xf0f0f0f0u;
            ptxlab::store_words(half + ((chunk % 2 * 2 + odd) ^ swizzle) * 16, bytes);
        }
    }
}

// Kernel arguments that the producer reads.
struct Arguments {
    const unsigned char* strips;
    const ptxlab::TensorMap *x, *x_scale;
    int K4;
};

// The stages in shared memory and a barrier of each kind per slot: `full` completes when the copies have arrived,
// `unpacked` when X is bytes and its scales are spread, `empty` when all consumers have multiplied.
struct Ring {
    unsigned char* stages;
    u64 *full, *unpacked, *empty;
};

// How Y is cut into tiles of up to kStrips strips x tile_tokens, and K into stages: INT4 blocks, then INT8 blocks.
struct Schedule {
    int num_token_tiles, num_strips, num_row_tiles, num_tiles;
    int tile_tokens, blocks4, num_stages;

    __device__ __forceinline__ Schedule(int M, int N, int K4, int K8)
        : num_token_tiles((M + BM - 1) / BM), num_strips((N + 15) / 16),
          num_row_tiles((num_strips + kStrips - 1) / kStrips), num_tiles(num_token_tiles * num_row_tiles),
          tile_tokens(((M + num_token_tiles - 1) / num_token_tiles + 7) / 8 * 8), blocks4(K4 / kBlockChannels),
          num_stages(blocks4 + K8 / kBlockChannels) {}
};

// Initialise every barrier with its number of arrivals. For one thread.
__device__ __forceinline__ void init_barriers(const Ring& ring) {
    for (int s = 0; s < STAGES; ++s) {
        ptxlab::mbarrier_init(&ring.full[s], 2);
        ptxlab::mbarrier_init(&ring.unpacked[s], kUnpackers);
        ptxlab::mbarrier_init(&ring.empty[s], 128 * WN);
    }
    ptxlab::fence_mbarrier_init();
}

// Zero the rows of X and of its scales from tile_tokens on, in all stages: no copy writes them, but wgmma and scaling
// read them.
__device__ __forceinline__ void clear_padding(unsigned char* stages, int tile_tokens) {
    const int padding_chunks = (BM - tile_tokens) * 9;  // 16 bytes each: of both halves of X, then of scales
    for (int i = threadIdx.x; i < STAGES * padding_chunks; i += kThreads) {
        const int piece = i % padding_chunks, of_half = (BM - tile_tokens) * 4;
        unsigned char* slot = stages + i / padding_chunks * kStageBytes;
        unsigned char* padding = piece < 2 * of_half
                                     ? slot + piece / of_half * kHalfBytes + tile_tokens * 64 + piece % of_half * 16
                                     : slot + kScalesOffset + (tile_tokens + piece - 2 * of_half) * 16;
        *reinterpret_cast<int4*>(padding) = make_int4(0, 0, 0, 0);
    }
    ptxlab::fence_proxy_async();
}

// Run the producer warp group: one thread of warp 0 copies W, one of warp 1 X and its scales; warps 2 and 3 unpack X
// and spread its scales.
__device__ __forceinline__ void produce(const Arguments& arguments, const Schedule& schedule, const Ring& ring,
                                        ptxlab::Slot<STAGES>& slot TIMELINE_PARAMETER) {
    const bool elected = ptxlab::elect();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const auto load_w = [&](int row_tile, int stage, unsigned char* stage_slot, u64* barrier) {
        ptxlab::mbarrier_arrive_expect(barrier, kStrips * kBlockBytes);
#pragma unroll
        for (int i = 0; i < kStrips; ++i) {  // past N the last strip is loaded again
            const int strip = min(row_tile * kStrips + i, schedule.num_strips - 1);
            ptxlab::bulk_load(stage_slot + kWeightsOffset + i * kBlockBytes,
                              arguments.strips + (size_t(strip) * schedule.num_stages + stage) * kBlockBytes,
                              kBlockBytes, barrier);
        }
    };
    const auto load_x = [&](int token, int stage, unsigned char* stage_slot, u64* barrier) {
        const bool int4 = stage < schedule.blocks4;
        const int column = int4 ? stage * 64 : arguments.K4 / 2 + (stage - schedule.blocks4) * kBlockChannels;
        ptxlab::mbarrier_arrive_expect(barrier, schedule.tile_tokens * ((int4 ? 64 : kBlockChannels) + 16));
        ptxlab::tensor_load(int4 ? stage_slot + kPackedOffset : stage_slot, arguments.x, column, token, barrier);
        if (!int4) ptxlab::tensor_load(stage_slot + kHalfBytes, arguments.x, column + 64, token, barrier);
        ptxlab::tensor_load(stage_slot + kScalesOffset, arguments.x_scale, stage / 8 * 8, token, barrier);
    };
    const auto prepare = [&](int stage, unsigned char* stage_slot, int index) {
        if (stage < schedule.blocks4) {
            unpack(stage_slot, schedule.tile_tokens, threadIdx.x - kUnpackers);
            ptxlab::fence_proxy_async();
        }
        ptxlab::spread_scales<BM, kUnpackers>(reinterpret_cast<float*>(stage_slot + kSpreadOffset),
                                              reinterpret_cast<const __half*>(stage_slot + kScalesOffset) + stage % 8,
                                              threadIdx.x - kUnpackers);
        ptxlab::mbarrier_arrive(&ring.unpacked[index]);
    };
    if (kUneven) ptxlab::lower_registers_to<kProducerRegisters>();
    ptxlab::launch_dependents();
    if (warp == 1) ptxlab::wait_for_predecessors();
    ptxlab::load_tiles<kStageBytes>(slot, ring.stages, ring.full, ring.empty, schedule.num_tiles,
                                    schedule.num_token_tiles, schedule.num_row_tiles, schedule.tile_tokens,
                                    schedule.num_stages, warp, elected, load_w, load_x, prepare TIMELINE_ARGUMENT);
}

}  // namespace

// Pointers that the preceding kernel may write are not __restrict__: ptxas would move their read-only loads ahead of
// griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(kThreads, 1) gemm_w4ax_sm90(
    const unsigned char* __restrict__ strips,           // u8  [N/16, (K4 + K8) / 128 blocks]
    const __grid_constant__ ptxlab::TensorMap x,        // u8  [M, K4/2 + K8], boxes [tokens of a tile][64] swizzled
    const __grid_constant__ ptxlab::TensorMap x_scale,  // f16 [M, blocks in whole eights], boxes [tokens of a tile][8]
    const float* __restrict__ bias,                     // f32 [N], or null
    void* __restrict__ y,                               // [M, N], by OUT
    int M, int N, int K4, int K8) {
    extern __shared__ __align__(1024) unsigned char stages[];  // the ring, then a transpose buffer of each warp
    __shared__ u64 full[STAGES], unpacked[STAGES], empty[STAGES];
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const Arguments arguments{strips, &x, &x_scale, K4};
    const Ring ring{stages, full, unpacked, empty};
    const Schedule schedule(M, N, K4, K8);
    unsigned char* buffers = stages + STAGES * kStageBytes;

    if (schedule.tile_tokens < BM) clear_padding(stages, schedule.tile_tokens);
    if (threadIdx.x == 0) init_barriers(ring);
    __syncthreads();

    ptxlab::Slot<STAGES> slot;
    if (threadIdx.x < 128) {
        produce(arguments, schedule, ring, slot TIMELINE_ARGUMENT);
        return;
    }

    // The consumer: a warp group that multiplies and scales.
    if (kUneven) ptxlab::raise_registers_to<kConsumerRegisters>();
    ptxlab::Slot<STAGES> ahead;
    const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    unsigned char* buffer = buffers + (group * 4 + warp) * ptxlab::WARP_BUFFER_BYTES;
    // Shared addresses in the ring's first slot: this lane's words of its warp's strip, its rows' scales, its tokens'
    // scales. Pinned in registers, or the compiler recomputes them in every block.
    u32 words = ptxlab::shared_address(stages) + kWeightsOffset + (group * 4 + warp) * kBlockBytes + lane * 16;
    u32 row_scales =
        ptxlab::shared_address(stages) + kWeightsOffset + (group * 4 + warp) * kBlockBytes + 1024 + lane / 4 * 4;
    u32 token_scales = ptxlab::shared_address(stages) + kSpreadOffset + lane % 4 * 16;
    ptxlab::pin(words), ptxlab::pin(row_scales), ptxlab::pin(token_scales);
    for (int tile = blockIdx.x; tile < schedule.num_tiles; tile += gridDim.x) {
        float total[BM / 2] = {};
        const auto fetch = [&](u32(&a)[kBlockChannels / 32][4], u32& rows, int) {
            PHASE(WAIT_COPY);
            // The threads that unpacked waited for the copies first, so the copied data is visible, too.
            ptxlab::mbarrier_wait(&unpacked[ahead.index], ahead.parity);
            rows = ptxlab::load_shared_4(row_scales + ahead.index * kStageBytes);
            PHASE(DEQUANTISE);
#pragma unroll
            for (int k_unit = 0; k_unit < 2; ++k_unit)
                ptxlab::upper_halves(a + 2 * k_unit,
                                     ptxlab::load_shared_16(words + ahead.index * kStageBytes + k_unit * 512));
            const u64 x_half = ptxlab::swizzled_64(stages + ahead.index * kStageBytes);
            ahead.advance();
            return x_half;
        };
        const auto finish4 = [&](const int (&sum)[BM / 2], u32 rows, int) {
            ptxlab::add_group<true, 256>(total, sum, rows, token_scales + slot.index * kStageBytes);
            ptxlab::mbarrier_arrive(&empty[slot.index]);
            slot.advance();
        };
        const auto finish8 = [&](const int (&sum)[BM / 2], u32 rows, int) {
            ptxlab::add_group<false, 16>(total, sum, rows, token_scales + slot.index * kStageBytes);
            ptxlab::mbarrier_arrive(&empty[slot.index]);
            slot.advance();
        };
        ptxlab::scale_groups<TOGETHER, kBlockChannels / 32, kHalfBytes / 16, BM / 2>(schedule.blocks4, fetch,
                                                                                     finish4 TIMELINE_ARGUMENT);
        ptxlab::scale_groups<1, kBlockChannels / 32, kHalfBytes / 16, BM / 2>(schedule.num_stages - schedule.blocks4,
                                                                              fetch, finish8 TIMELINE_ARGUMENT);
        // Only the epilogue needs these: before the loop they would take registers, which are scarce there. NOTE
        // gemm_w4a4_sm90 has the same lines. In a shared function ptxas puts the instructions in another order.
        PHASE(EPILOGUE);
        const ptxlab::TileCoord coord = ptxlab::tile_coord(tile, schedule.num_token_tiles, schedule.num_row_tiles);
        const int token0 = coord.token_tile * schedule.tile_tokens,
                  n0 = (coord.row_tile * kStrips + group * 4 + warp) * 16;
        float row_bias[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) row_bias[r] = ptxlab::bias_at(bias, min(n0 + lane / 4 + 8 * r, N - 1));
        ptxlab::store_totals<OUT, BM>(total, row_bias, y, buffer, lane, token0, n0,
                                      min(M, token0 + schedule.tile_tokens), N);
    }
}
