// gemm_w4a8_small_sm90: Y = X W^T for a few tokens: every SM keeps all of X and streams whole strips of W past it.
//
// Up to about 16 tokens the product costs nothing beside streaming the weights. So a strip, 16 rows over all of K, lies
// contiguously in memory and arrives in few long copies; a block owns whole strips, and blocks exchange nothing. Of a
// block, ROWS x SLICES warps multiply, one warp copies, one writes results.
//
// Contract   accumulators[m, n] = sum_k x[m, k] * (q4 * s1 + o1 - 128)[n, k], exact in int32; y = accumulators *
//            x_scale[m] * w_scale[n] + bias[n], each operation rounded in f32, the result then rounded to the output
//            type, or the accumulators themselves (OUT == 3). 1 <= M <= 32, as far as X fits shared memory; N a
//            multiple of 8, K a multiple of the group. LiquidQuant: o1 = 128 + min; QoQ: o1 = 128 - zero * s1. The MMA
//            takes w + 128 as u8, and the epilogue subtracts 128 times the token sum; SIGNED: it takes w as s8 and
//            needs no token sums. GROUP 0: scales per channel alone, with token sums; the weight is q4[n, k] -
//            w_zero[n]. FUSED 1, 2: as gemm_w4a8_sm90.
// PDL        loads of the first weights do not wait for the preceding kernel; activations, scales and results do.
// Guide      notebooks/guide/kernels_gemm.md: strips, roles of the warps, barriers, constants
// Measured   0.85, 0.84, 0.74 of the floor on an H200 at M = 1, 4, 16; 1.80, 1.75, 1.43 times as fast as cuBLAS FP8
//            (means of 7, 7, 2 of LLaMA-2's matrices, on which it is launched; row-major activations).
// PTX ISA    9.7.14.5.9 mma.m16n8k32 (.u8.s8); 9.7.9.25, 27 bulk and tensor copies; 9.7.13.15 mbarrier; 9.7.13.16 elect
#include "dequant.cuh"
#include "griddep.cuh"
#include "mbarrier.cuh"
#include "named_barrier.cuh"
#include "output.cuh"
#include "timeline.cuh"

#ifndef BM
#define BM 16       // tokens, a multiple of 8
#define ROWS 2      // strips that a block multiplies at a time
#define SLICES 8    // warps that share a strip, each with 128 channels of a stage
#define STAGES 6    // slots of the ring
#define RESIDENT 1  // blocks per SM
#define GROUP 128   // weights of a level-2 scale; 0: constants per channel alone
#define OUT 0       // y as 0 f16, 1 bf16, 2 f32; 3 the int32 accumulators
#define ORDER 0     // of X: 0 row-major, 1 fragments
#define SIGNED 0    // 1: the MMA takes s8 weights; no token sums
#define SUM_PAD 4   // int32 between rows of sums in shared memory
#endif
#ifndef FUSED
#define FUSED 0  // 1: SiLU of the gate times up; 2: added to Y (output.cuh)
#endif

namespace {

using ptxlab::u32;
using ptxlab::u64;
static_assert(SUM_PAD % 4 == 0);
static_assert(GROUP != 0 || !SIGNED, "a zero point leaves with the token sum");
constexpr int kConsumerWarps = ROWS * SLICES, kProducerWarp = kConsumerWarps, kEpilogueWarp = kConsumerWarps + 1;
constexpr int kThreads = 32 * (kConsumerWarps + 2);
constexpr int kBlockBytes = ptxlab::STRIP_BLOCK<GROUP>;                     // bytes of 128 channels of a strip
constexpr int kWBytes = SLICES * kBlockBytes, kXBytes = SLICES * 128 * BM;  // in a stage: of a strip, of X
constexpr int kTokenTiles = BM / 8;                                         // MMAs along the tokens
constexpr int kPitch = ROWS * 16 + SUM_PAD, kSums = BM * kPitch;            // of sums: lane 4 g + t is at bank 8 t + g
// A lane of the epilogue warp makes 8 results at a time from a part of a strip, kPartRows rows. Parts of a strip, parts
// of all strips, tokens of a lane:
constexpr int kPartRows = FUSED == ptxlab::SILU_MUL ? 16 : 8, kStripParts = 16 / kPartRows, kParts = ROWS * kStripParts;
constexpr int kLaneTokens = (BM * kParts + 31) / 32;

// Barriers of the ring's slots: `full` completes when the copies of a stage have arrived, `empty` when all warps have
// multiplied. Barriers of the two tiles of sums: `summed` completes when all warps have added their sums, `cleared`
// when the epilogue has read and zeroed them.
struct Barriers {
    u64 *full, *empty, *summed, *cleared;

    // Initialise every barrier with its number of arrivals. For one thread.
    __device__ __forceinline__ void init() const {
        for (int s = 0; s < STAGES; ++s) {
            ptxlab::mbarrier_init(&full[s], 1);
            ptxlab::mbarrier_init(&empty[s], 32 * kConsumerWarps);
        }
        for (int b = 0; b < 2; ++b) {
            ptxlab::mbarrier_init(&summed[b], 32 * kConsumerWarps);
            ptxlab::mbarrier_init(&cleared[b], 32);
        }
        ptxlab::fence_mbarrier_init();
    }
};

// Kernel arguments that the roles read.
struct Arguments {
    const unsigned char* strips;
    const float* w_scale;
    const unsigned char* w_zero;
    const ptxlab::TensorMap& x;
    const float* x_scale;
    const int* x_sum;
    const float* bias;
    void* y;
    int M, N;
};

// Strips of this block: every `strip_step`-th from first_strip on. Each is cut into num_stages stages.
struct Schedule {
    int w_blocks;  // of 128 channels
    int num_stages, num_strips, strip_step, first_strip;

    __device__ __forceinline__ Schedule(int N, int K)
        : w_blocks((K + 127) / 128), num_stages((w_blocks + SLICES - 1) / SLICES), num_strips((N + 15) / 16),
          strip_step(gridDim.x), first_strip(blockIdx.x) {}
};

// Layout of shared memory: all of X, the ring of W's stages, two tiles of sums [2][BM][kPitch].
struct Buffers {
    unsigned char *x, *ring;
    int* sums;

    __device__ __forceinline__ Buffers(unsigned char* begin, const Schedule& schedule)
        : x(begin), ring(begin + schedule.num_stages * kXBytes),
          sums(reinterpret_cast<int*>(ring + STAGES * ROWS * kWBytes)) {}
};

// d += a b by one m16n8k32 MMA: 16 rows of W, as s8 or u8 (SIGNED), by 8 tokens.
__device__ __forceinline__ void multiply(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (SIGNED) ptxlab::mma_s8(d, a[0], a[1], a[2], a[3], b0, b1);
    else ptxlab::mma_u8(d, a[0], a[1], a[2], a[3], b0, b1);
}

// Load operand B of 64 channels and 8 tokens: two registers for each of two MMAs.
__device__ __forceinline__ uint4 fragment(const unsigned char* x, int block, int k_unit, int m, int lane) {
    if (ORDER == 1)
        return *reinterpret_cast<const uint4*>(x + ((block * 2 + k_unit) * kTokenTiles + m) * 512 + lane * 16);
    const int g = lane / 4, t = lane % 4;
    const unsigned char* row = x + (block * BM + m * 8 + g) * 128 + t * 4;
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = *reinterpret_cast<const u32*>(row + ((k_unit * 4 + i) ^ g) * 16);
    return make_uint4(word[0], word[1], word[2], word[3]);
}

// Load scale, bias and zero point of kPartRows rows of W from row n on, one part of a strip.
__device__ __forceinline__ void load_row_constants(float (&row_scale)[kPartRows], float (&row_bias)[kPartRows],
                                                   int (&row_zero)[kPartRows], const float* w_scale, const float* bias,
                                                   const unsigned char* w_zero, int n, bool inside) {
#pragma unroll
    for (int i = 0; i < kPartRows; ++i) row_zero[i] = GROUP == 0 ? (inside ? w_zero[n + i] : 0) : 128;
    if (inside) {
#pragma unroll
        for (int i = 0; i < kPartRows; ++i) row_scale[i] = w_scale[n + i], row_bias[i] = bias ? bias[n + i] : 0;
    }
}

// Run the producer warp: one thread issues the copies.
__device__ __forceinline__ void produce(const Arguments& arguments, const Schedule& schedule, const Buffers& buffers,
                                        const Barriers& barriers, ptxlab::Slot<STAGES>& slot TIMELINE_PARAMETER) {
    const bool elected = ptxlab::elect();
    const u32 pitch = schedule.w_blocks * kBlockBytes;  // bytes of a strip
    const auto load_w = [&](int strip0, int stage, int slot_index) {
        const u32 bytes = min(SLICES, schedule.w_blocks - stage * SLICES) * kBlockBytes;
        u32 expected = strip0 != schedule.first_strip ? 0
                       : ORDER == 1 ? kXBytes
                                    : min(SLICES, schedule.w_blocks - stage * SLICES) * 128 * arguments.M;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) expected += strip0 + i * schedule.strip_step < schedule.num_strips ? bytes : 0;
        if (elected) ptxlab::mbarrier_arrive_expect(&barriers.full[slot_index], expected);
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            if (strip0 + i * schedule.strip_step < schedule.num_strips && elected)
                ptxlab::bulk_load(buffers.ring + (slot_index * ROWS + i) * kWBytes,
                                  arguments.strips + size_t(strip0 + i * schedule.strip_step) * pitch + stage * kWBytes,
                                  bytes, &barriers.full[slot_index]);
    };
    const auto load_x = [&](int stage, int slot_index) {
        unsigned char* x_slot = buffers.x + stage * kXBytes;
        if (ORDER == 1) {
            if (elected)
                ptxlab::tensor_load(x_slot, &arguments.x, 0, stage * (kXBytes / 128), &barriers.full[slot_index]);
        } else {
#pragma unroll 1
            for (int i = 0; i < min(SLICES, schedule.w_blocks - stage * SLICES); ++i)
                if (elected)
                    ptxlab::tensor_load(x_slot + i * 128 * BM, &arguments.x, (stage * SLICES + i) * 128, 0,
                                        &barriers.full[slot_index]);
        }
    };
    if (elected) barriers.init();
    __syncwarp();
    PHASE(LOAD);
    load_w(schedule.first_strip, 0, 0);   // weights do not wait for the kernel before
    ptxlab::arrive_threads(0, kThreads);  // do not wait for the others, which first zero X's padding
    ptxlab::wait_for_predecessors();
    for (int strip0 = schedule.first_strip; strip0 < schedule.num_strips; strip0 += ROWS * schedule.strip_step)
        for (int stage = 0; stage < schedule.num_stages; ++stage, slot.advance()) {
            if (strip0 != schedule.first_strip || stage > 0) {
                PHASE(WAIT_GROUP);
                // The first round finds the slots empty.
                ptxlab::mbarrier_wait(&barriers.empty[slot.index], slot.parity ^ 1);
                PHASE(LOAD);
                load_w(strip0, stage, slot.index);
            }
            if (strip0 == schedule.first_strip) load_x(stage, slot.index);
        }
    if (elected) ptxlab::launch_dependents();  // not earlier: its loads would compete with these
}

// Zero the sums and, if X is row-major, its rows from M on. No copy brings those, because rows outside the matrix
// arrive slowly. For the warps that multiply.
__device__ __forceinline__ void clear_shared_memory(const Arguments& arguments, const Schedule& schedule,
                                                    const Buffers& buffers, int warp) {
    for (int i = threadIdx.x; i < 2 * kSums; i += 32 * kConsumerWarps) buffers.sums[i] = 0;
    const int padding_chunks = (BM - arguments.M) * 8;  // 16 bytes each, of 128 channels
    for (int block = warp; ORDER == 0 && block < schedule.w_blocks; block += kConsumerWarps)
        for (int i = threadIdx.x % 32; i < padding_chunks; i += 32)
            *reinterpret_cast<int4*>(buffers.x + (block * BM + arguments.M) * 128 + i * 16) = make_int4(0, 0, 0, 0);
}

// Run the epilogue warp: turn sums into results, and zero the sums for the next strips.
__device__ __forceinline__ void write_results(const Arguments& arguments, const Schedule& schedule,
                                              const Buffers& buffers, const Barriers& barriers TIMELINE_PARAMETER) {
    const int lane = threadIdx.x % 32;
    int buffer = 0, parity = 0;          // of the tiles of sums
    const int row_part = lane % kParts;  // kPartRows rows of the ROWS * 16
    float token_scale[kLaneTokens];
    int token_sum[kLaneTokens];
    for (int strip0 = schedule.first_strip; strip0 < schedule.num_strips; strip0 += ROWS * schedule.strip_step) {
        const int n = (strip0 + row_part / kStripParts * schedule.strip_step) * 16 + row_part % kStripParts * kPartRows;
        const bool inside = n < arguments.N;
        float row_scale[kPartRows] = {}, row_bias[kPartRows] = {};
        int row_zero[kPartRows];
        load_row_constants(row_scale, row_bias, row_zero, arguments.w_scale, arguments.bias, arguments.w_zero, n,
                           inside);
        if (strip0 == schedule.first_strip) {
            ptxlab::wait_for_predecessors();
#pragma unroll
            for (int i = 0; i < kLaneTokens; ++i) {
                const int token = (i * 32 + lane) / kParts;
                token_scale[i] = OUT != 3 && token < arguments.M ? arguments.x_scale[token] : 1;
                token_sum[i] = !SIGNED && token < arguments.M ? arguments.x_sum[token] : 0;
            }
        }
        PHASE(WAIT_GROUP);
        ptxlab::mbarrier_wait(&barriers.summed[buffer], parity);
        PHASE(EPILOGUE);
#pragma unroll
        for (int i = 0; i < kLaneTokens; ++i) {
            const int token = (i * 32 + lane) / kParts;
            if (token >= arguments.M) continue;
            int4* part_sums =
                reinterpret_cast<int4*>(buffers.sums + buffer * kSums + token * kPitch + row_part * kPartRows);
            int v[kPartRows];
#pragma unroll
            for (int j = 0; j < kPartRows / 4; ++j) {
                const int4 four = part_sums[j];
                v[4 * j] = four.x, v[4 * j + 1] = four.y, v[4 * j + 2] = four.z, v[4 * j + 3] = four.w;
            }
#pragma unroll
            for (int j = kPartRows / 4 - 1; j >= 0; --j) part_sums[j] = make_int4(0, 0, 0, 0);
#pragma unroll
            for (int j = 0; j < kPartRows; ++j) v[j] -= row_zero[j] * token_sum[i];
            if (!inside) continue;
            const size_t index = size_t(token) * (arguments.N / (kPartRows / 8)) + n / (kPartRows / 8);
            if (arguments.bias) ptxlab::store_8<OUT, FUSED>(arguments.y, index, v, token_scale[i], row_scale, row_bias);
            else ptxlab::store_8<OUT, FUSED>(arguments.y, index, v, token_scale[i], row_scale, nullptr);
        }
        ptxlab::mbarrier_arrive(&barriers.cleared[buffer]);
        if ((buffer ^= 1) == 0) parity ^= 1;
    }
}

}  // namespace

// Pointers that the preceding kernel may write are not __restrict__: ptxas would move their read-only loads ahead of
// griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT) gemm_w4a8_small_sm90(
    const unsigned char* __restrict__ strips,     // u8  [N/16, K/128, 1024 + 32 * 128 / g]
    const float* __restrict__ w_scale,            // f32 [N]
    const unsigned char* __restrict__ w_zero,     // u8  [N]; null unless GROUP == 0
    const __grid_constant__ ptxlab::TensorMap x,  // s8  [M, K], boxes [M][128] swizzled; or fragments
    const float* x_scale,                         // f32 [M]; null if OUT == 3
    const int* x_sum,                             // s32 [M]; null if SIGNED
    const float* __restrict__ bias,               // f32 [N], or null
    void* __restrict__ y,                         // [M, N], by OUT
    int M, int N, int K) {
    extern __shared__ __align__(1024) unsigned char x_tile[];
    __shared__ u64 full[STAGES], empty[STAGES], summed[2], cleared[2];
    const Schedule schedule(N, K);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    TIMELINE_THREAD(lane == 0 && (warp == 0 || warp >= kConsumerWarps));
    const Buffers buffers(x_tile, schedule);
    const Arguments arguments{strips, w_scale, w_zero, x, x_scale, x_sum, bias, y, M, N};
    const Barriers barriers{full, empty, summed, cleared};
    ptxlab::Slot<STAGES> slot;
    if (warp == kProducerWarp) {
        produce(arguments, schedule, buffers, barriers, slot TIMELINE_ARGUMENT);
        return;
    }
    if (warp < kConsumerWarps) clear_shared_memory(arguments, schedule, buffers, warp);
    ptxlab::sync_threads(0, kThreads);
    if (warp == kEpilogueWarp) {
        write_results(arguments, schedule, buffers, barriers TIMELINE_ARGUMENT);
        return;
    }

    // A warp that multiplies: one of the ROWS strips, one slice of each stage. NOTE as a function of its own, or with
    // `buffer` declared before `parity`, ptxas gives it other registers.
    int parity = 0, buffer = 0;  // of the tiles of sums
    const int strip = warp / SLICES, slice = warp % SLICES, g = lane / 4;
    for (int strip0 = schedule.first_strip; strip0 < schedule.num_strips; strip0 += ROWS * schedule.strip_step) {
        const bool has_strip = strip0 + strip * schedule.strip_step < schedule.num_strips;
        int acc[kTokenTiles][4] = {};
        for (int stage = 0; stage < schedule.num_stages; ++stage, slot.advance()) {
            const int block = stage * SLICES + slice;
            PHASE(WAIT_COPY);
            ptxlab::mbarrier_wait(&full[slot.index], slot.parity);
            if (has_strip && block < schedule.w_blocks) {
                const unsigned char* w = buffers.ring + (slot.index * ROWS + strip) * kWBytes + slice * kBlockBytes;
                const uint4 words[2] = {*reinterpret_cast<const uint4*>(w + lane * 16),
                                        *reinterpret_cast<const uint4*>(w + 512 + lane * 16)};
                ptxlab::StripConstants<GROUP> constants;
#pragma unroll
                for (int i = 0; i < ptxlab::STRIP_GROUPS<GROUP>; ++i)
                    constants[i] = *reinterpret_cast<const u32*>(w + 1024 + i * 32 + g * 4);
#pragma unroll
                for (int k_unit = 0; k_unit < 2; ++k_unit) {
                    PHASE(DEQUANTISE);
                    u32 a[2][4];
                    ptxlab::dequant_strip<SIGNED, GROUP>(words[k_unit], constants, k_unit, a);
                    PHASE(MULTIPLY);
#pragma unroll
                    for (int m = 0; m < kTokenTiles; ++m) {
                        const uint4 b = fragment(x_tile, block, k_unit, m, lane);
                        multiply(acc[m], a[0], b.x, b.y);
                        multiply(acc[m], a[1], b.z, b.w);
                    }
                }
            }
            ptxlab::mbarrier_arrive(&empty[slot.index]);
        }
        PHASE(REDUCE);
        ptxlab::mbarrier_wait(&cleared[buffer], parity ^ 1);  // the first two tiles of sums start clear
        if (has_strip) {
            int* strip_sums = buffers.sums + buffer * kSums + strip * 16 + g;
#pragma unroll
            for (int m = 0; m < kTokenTiles; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int token = m * 8 + lane % 4 * 2 + e % 2;
                    if (token < M) atomicAdd(strip_sums + token * kPitch + e / 2 * 8, acc[m][e]);
                }
        }
        ptxlab::mbarrier_arrive(&summed[buffer]);
        if ((buffer ^= 1) == 0) parity ^= 1;
    }
}
