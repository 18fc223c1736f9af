// gemm_w4a4_sm90: Y = X W^T in Atom's format (Atom section 4.2) on Hopper, whose tensor cores have no INT4.
//
// The pipeline of gemm_w8a8_sm90 with packed weights. One warp group copies stages and prepares the scales of X; WN
// warp groups multiply 64 rows of W each and scale their own sums, so that one multiplies while another scales. With
// one such warp group, TOGETHER groups of channels in flight hide the latency. Blocks are persistent.
//
// Contract   y = sum over the K / g groups, then the outliers, of sum_i[m, n] * (x_scale[m, i] * w_scale[n, i]) + bias,
//            one fma after the other in f32 from 0 on, then rounded to the output (OUT 0 f16, 1 bf16, 2 f32); the
//            integer sums sum_i are exact in int32. Results equal those of gemm_w4a4_atom_sm80 bit for bit. Any M >= 1,
//            N a multiple of 8, K a multiple of g (64 or 128); 0, 64 or 128 outliers.
// Shows      INT4 multiplied as s8. A weight stays in the upper half of its byte, as 16 w: an AND, or a shift and an
//            AND, unpack four. X has a byte per channel. Integer sums start at the bits of the f32 1.5 * 2^23, so as
//            f32 they read 1.5 * 2^23 + sum: one fma subtracts the start and applies the row's scale, a second one
//            applies the token's scale and adds to the total. The tensor cores have as much to do as in W4A8; scaling
//            takes three more instructions per sum of a group.
// PDL        loads of weights do not wait for the preceding kernel. Loads of X and its scales do, and so do stores of
//            results.
// Guide      notebooks/guide/kernels_gemm.md: operands, tile, schedule, constants
// Measured   on an H200 at M = 64, 128, 256, 512, 1024: 1.76, 1.85, 1.95, 1.98, 1.99 of gemm_w4a8's time, 1.27, 1.18,
//            1.01, 0.90, 0.89 times as fast as cuBLAS INT8 (means over LLaMA-2's matrices, groups of 128; commit
//            630a63a4).
// PTX ISA    9.7.15 wgmma m64nNk32 (.s8.s8); 9.7.9.25-27 bulk and tensor copies; 9.7.13.13 griddepcontrol; 9.7.13.15
//            mbarrier; 9.7.13.16 elect; 9.7.14.5.16 stmatrix; 9.7.19.5 setmaxnreg
#include "fragments_out.cuh"
#include "griddep.cuh"
#include "group_sums_sm90.cuh"
#include "mbarrier.cuh"
#include "tile_order.cuh"
#include "timeline.cuh"
#include "wgmma.cuh"

#ifndef BM
#define BM 64       // tokens of a tile, at most
#define WN 2        // warp groups that multiply, 64 rows of W each
#define TOGETHER 1  // groups of channels that a warp group has in wgmma at once
#define STAGES 6    // slots of the ring
#define GROUP 128   // channels of a scale: 64 or 128
#define OUT 0       // y as 0 f16, 1 bf16, 2 f32
#endif

namespace {

using ptxlab::u64;
using u32 = unsigned;
// Threads of a block; strips of a tile; channels of a stage; threads that spread the scales of X.
constexpr int kThreads = 128 * (WN + 1), kStrips = 4 * WN, kBlockChannels = 128, kSpreaders = 64;
// Groups of an INT4 block, MMAs of a group; bytes of a strip's block in INT4 and in INT8; bytes of the spread scales of
// a group, for two of which a stage has room.
constexpr int kBlockGroups = kBlockChannels / GROUP, kGroupMmas = GROUP / 32;
constexpr int kBlock4Bytes = 1024 + 32 * kBlockGroups, kBlock8Bytes = 2048 + 32;
constexpr int kSpreadBytes = ptxlab::SPREAD_BYTES<BM>;
// Byte offsets in a stage: X, its scales, its spread scales, blocks of W.
constexpr int kScalesOffset = BM * kBlockChannels, kSpreadOffset = kScalesOffset + BM * 16;
constexpr int kWeightsOffset = kSpreadOffset + 2 * kSpreadBytes;
constexpr int kStageBytes = (kWeightsOffset + kStrips * kBlock8Bytes + 1023) / 1024 * 1024;
constexpr bool kUneven = WN > 1;  // whether the consumers get registers of the producer
constexpr int kConsumerRegisters = ptxlab::CONSUMER_REGISTERS[WN], kProducerRegisters = ptxlab::PRODUCER_REGISTERS[WN];
static_assert(WN <= 4, "CONSUMER_REGISTERS and PRODUCER_REGISTERS have no more");
static_assert(BM <= 128, "sums and totals have a register each");
static_assert(GROUP == 64 || GROUP == 128, "a stage has one group or two");
static_assert(STAGES * kBlockGroups >= TOGETHER, "groups under wgmma keep their slots");

// Kernel arguments that the producer reads.
struct Arguments {
    const unsigned char* strips;
    const ptxlab::TensorMap *x, *x_scale;
    int K, outliers;
};

// The stages in shared memory and a barrier of each kind per slot: `full` completes when the copies have arrived,
// `spread` when the scales of X are spread, `empty` when all consumers have multiplied.
struct Ring {
    unsigned char* stages;
    u64 *full, *spread, *empty;
};

// How Y is cut into tiles of up to kStrips strips x tile_tokens: M is shared out evenly over the tiles, in multiples of
// 8.
struct Schedule {
    int num_token_tiles, num_strips, num_row_tiles, num_tiles;
    int tile_tokens;

    __device__ __forceinline__ Schedule(int M, int N)
        : num_token_tiles((M + BM - 1) / BM), num_strips((N + 15) / 16),
          num_row_tiles((num_strips + kStrips - 1) / kStrips), num_tiles(num_token_tiles * num_row_tiles),
          tile_tokens(((M + num_token_tiles - 1) / num_token_tiles + 7) / 8 * 8) {}
};

// Initialise every barrier with its number of arrivals. For one thread.
__device__ __forceinline__ void init_barriers(const Ring& ring) {
    for (int s = 0; s < STAGES; ++s) {
        ptxlab::mbarrier_init(&ring.full[s], 2);
        ptxlab::mbarrier_init(&ring.spread[s], kSpreaders);
        ptxlab::mbarrier_init(&ring.empty[s], 128 * WN);
    }
    ptxlab::fence_mbarrier_init();
}

// Zero the rows of X and of its scales from tile_tokens on, in all stages: no copy writes them, but wgmma and scaling
// read them.
__device__ __forceinline__ void clear_padding(unsigned char* stages, int tile_tokens) {
    const int padding_chunks = (BM - tile_tokens) * 9;  // 16 bytes each: of X, then of scales
    for (int i = threadIdx.x; i < STAGES * padding_chunks; i += kThreads) {
        const int piece = i % padding_chunks, of_x = (BM - tile_tokens) * 8;
        unsigned char* slot = stages + i / padding_chunks * kStageBytes;
        unsigned char* padding = piece < of_x ? slot + tile_tokens * kBlockChannels + piece * 16
                                              : slot + kScalesOffset + (tile_tokens + piece - of_x) * 16;
        *reinterpret_cast<int4*>(padding) = make_int4(0, 0, 0, 0);
    }
    ptxlab::fence_proxy_async();
}

// Run the producer warp group: one thread of warp 0 copies W, one of warp 1 X and its scales; warps 2 and 3 spread the
// scales. A row of W has `num_stages` blocks, the first `blocks4` of them INT4. NOTE as members of Schedule these two
// give the consumer other registers.
__device__ __forceinline__ void produce(const Arguments& arguments, const Schedule& schedule, const int& blocks4,
                                        const int& num_stages, const Ring& ring,
                                        ptxlab::Slot<STAGES>& slot TIMELINE_PARAMETER) {
    const bool elected = ptxlab::elect();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int pitch = blocks4 * kBlock4Bytes + (arguments.outliers > 0 ? kBlock8Bytes : 0);
    // The first column of a stage's scales.
    const auto column = [&](int stage) { return stage < blocks4 ? stage * kBlockGroups : arguments.K / GROUP; };
    const auto load_w = [&](int row_tile, int stage, unsigned char* stage_slot, u64* barrier) {
        const int bytes = stage < blocks4 ? kBlock4Bytes : kBlock8Bytes;
        ptxlab::mbarrier_arrive_expect(barrier, kStrips * bytes);
#pragma unroll
        for (int i = 0; i < kStrips; ++i) {  // past N the last strip is loaded again
            const int strip = min(row_tile * kStrips + i, schedule.num_strips - 1);
            ptxlab::bulk_load(stage_slot + kWeightsOffset + i * kBlock8Bytes,
                              arguments.strips + size_t(strip) * pitch + stage * kBlock4Bytes, bytes, barrier);
        }
    };
    const auto load_x = [&](int token, int stage, unsigned char* stage_slot, u64* barrier) {
        const bool block4 = stage < blocks4;
        ptxlab::mbarrier_arrive_expect(barrier, schedule.tile_tokens * (kBlockChannels + 16));
        ptxlab::tensor_load(stage_slot, arguments.x, block4 ? stage * kBlockChannels : arguments.K, token, barrier);
        ptxlab::tensor_load(stage_slot + kScalesOffset, arguments.x_scale, column(stage) / 8 * 8, token, barrier);
    };
    const auto prepare = [&](int stage, unsigned char* stage_slot, int index) {  // by two warps: spread scales
        const __half* token_scales = reinterpret_cast<const __half*>(stage_slot + kScalesOffset) + column(stage) % 8;
#pragma unroll
        for (int i = 0; i < kBlockGroups; ++i)  // an outlier stage has one group: its second copy is not used
            ptxlab::spread_scales<BM, kSpreaders>(
                reinterpret_cast<float*>(stage_slot + kSpreadOffset + i * kSpreadBytes),
                token_scales + (stage < blocks4 ? i : 0), threadIdx.x - (128 - kSpreaders));
        ptxlab::mbarrier_arrive(&ring.spread[index]);
    };
    if (kUneven) ptxlab::lower_registers_to<kProducerRegisters>();
    ptxlab::launch_dependents();
    if (warp == 1) ptxlab::wait_for_predecessors();
    ptxlab::load_tiles<kStageBytes>(slot, ring.stages, ring.full, ring.empty, schedule.num_tiles,
                                    schedule.num_token_tiles, schedule.num_row_tiles, schedule.tile_tokens, num_stages,
                                    warp, elected, load_w, load_x, prepare TIMELINE_ARGUMENT);
}

}  // namespace

// Pointers that the preceding kernel may write are not __restrict__: ptxas would move their read-only loads ahead of
// griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(kThreads, 1) gemm_w4a4_sm90(
    const unsigned char* __restrict__ strips,           // u8  [N/16, bytes]
    const __grid_constant__ ptxlab::TensorMap x,        // s8  [M, K + outliers], boxes [tokens of a tile][128] swizzled
    const __grid_constant__ ptxlab::TensorMap x_scale,  // f16 [M, K/g + 1 in whole eights], boxes [tokens of a tile][8]
    const float* __restrict__ bias,                     // f32 [N], or null
    void* __restrict__ y,                               // [M, N], by OUT
    int M, int N, int K, int outliers) {
    extern __shared__ __align__(1024) unsigned char stages[];  // the ring, then a transpose buffer of each warp
    __shared__ u64 full[STAGES], spread[STAGES], empty[STAGES];
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const Arguments arguments{strips, &x, &x_scale, K, outliers};
    const Ring ring{stages, full, spread, empty};
    const Schedule schedule(M, N);
    const int blocks4 = (K + kBlockChannels - 1) / kBlockChannels, num_stages = blocks4 + (outliers > 0);
    unsigned char* buffers = stages + STAGES * kStageBytes;

    if (schedule.tile_tokens < BM) clear_padding(stages, schedule.tile_tokens);
    if (threadIdx.x == 0) init_barriers(ring);
    __syncthreads();

    ptxlab::Slot<STAGES> slot;
    if (threadIdx.x < 128) {
        produce(arguments, schedule, blocks4, num_stages, ring, slot TIMELINE_ARGUMENT);
        return;
    }

    // The consumer: a warp group that multiplies and scales.
    if (kUneven) ptxlab::raise_registers_to<kConsumerRegisters>();
    // `ahead`: the slot from which weights are loaded next; `slot`: that of the sums to be scaled next.
    ptxlab::Slot<STAGES> ahead;
    const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    unsigned char* buffer = buffers + (group * 4 + warp) * ptxlab::WARP_BUFFER_BYTES;
    // Shared addresses in the ring's first slot: this lane's words of its warp's strip, its rows' scales, its tokens'
    // scales. Pinned in registers, or the compiler recomputes them in every group.
    u32 words = ptxlab::shared_address(stages) + kWeightsOffset + (group * 4 + warp) * kBlock8Bytes + lane * 16;
    u32 row_scales =
        ptxlab::shared_address(stages) + kWeightsOffset + (group * 4 + warp) * kBlock8Bytes + 1024 + lane / 4 * 4;
    u32 token_scales = ptxlab::shared_address(stages) + kSpreadOffset + lane % 4 * 16;
    ptxlab::pin(words), ptxlab::pin(row_scales), ptxlab::pin(token_scales);
    for (int tile = blockIdx.x; tile < schedule.num_tiles; tile += gridDim.x) {
        float total[BM / 2] = {};
        // Load group i: unpacked weights to `a`, the two row scales (f16) to `rows`; return the descriptor of X.
        const auto fetch4 = [&](u32(&a)[kGroupMmas][4], u32& rows, int i) {
            const int block_group = i % kBlockGroups;
            PHASE(WAIT_COPY);
            // The threads that spread the scales waited for the copies first, so the copied data is visible, too.
            if (block_group == 0) ptxlab::mbarrier_wait(&spread[ahead.index], ahead.parity);
            const u32 group_words = words + ahead.index * kStageBytes + block_group * 512;
            rows = ptxlab::load_shared_4(row_scales + ahead.index * kStageBytes + block_group * 32);
            PHASE(DEQUANTISE);
#pragma unroll
            for (int k_unit = 0; k_unit < GROUP / 64; ++k_unit)
                ptxlab::upper_halves(a + 2 * k_unit, ptxlab::load_shared_16(group_words + k_unit * 512));
            const u64 x_tile = ptxlab::swizzled_128(stages + ahead.index * kStageBytes) + block_group * kGroupMmas * 2;
            if (block_group == kBlockGroups - 1) ahead.advance();
            return x_tile;
        };
        // Scale the sums of group i into the totals; release the slot after its last group.
        const auto finish4 = [&](const int (&sum)[BM / 2], u32 rows, int i) {
            const int block_group = i % kBlockGroups;
            const u32 stage = slot.index * kStageBytes;
            ptxlab::add_group<true, 16>(total, sum, rows, token_scales + stage + block_group * kSpreadBytes);
            if (block_group == kBlockGroups - 1) {
                ptxlab::mbarrier_arrive(&empty[slot.index]);
                slot.advance();
            }
        };
        const auto fetch8 = [&](u32(&a)[4][4], u32& rows, int) {  // the same for outliers, one group
            PHASE(WAIT_COPY);
            ptxlab::mbarrier_wait(&spread[ahead.index], ahead.parity);
            rows = ptxlab::load_shared_4(row_scales + ahead.index * kStageBytes + 1024);
            PHASE(DEQUANTISE);
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const uint4 bytes = ptxlab::load_shared_16(words + ahead.index * kStageBytes + step * 512);
                a[step][0] = bytes.x, a[step][1] = bytes.y, a[step][2] = bytes.z, a[step][3] = bytes.w;
            }
            const u64 x_tile = ptxlab::swizzled_128(stages + ahead.index * kStageBytes);
            ahead.advance();
            return x_tile;
        };
        const auto finish8 = [&](const int (&sum)[BM / 2], u32 rows, int) {
            const u32 stage = slot.index * kStageBytes;
            ptxlab::add_group<false, 1>(total, sum, rows, token_scales + stage);
            ptxlab::mbarrier_arrive(&empty[slot.index]);
            slot.advance();
        };
        ptxlab::scale_groups<TOGETHER, kGroupMmas, 4, BM / 2>(blocks4 * kBlockGroups, fetch4,
                                                              finish4 TIMELINE_ARGUMENT);
        if (outliers > 0) ptxlab::scale_groups<1, 4, 4, BM / 2>(1, fetch8, finish8 TIMELINE_ARGUMENT);
        // Only the epilogue needs these: before the loop they would take registers, which are scarce there. NOTE
        // gemm_w4ax_sm90 has the same lines. In a shared function ptxas puts the instructions in another order.
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
