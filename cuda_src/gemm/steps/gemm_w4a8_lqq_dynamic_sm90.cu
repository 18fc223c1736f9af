// gemm_w4a8_lqq_dynamic_sm90: Y = X W^T on wgmma, LiquidQuant weights, warp groups take tasks when they are free.
//
// The implicit fine-grained pipeline as LiquidGEMM section 5.1 has it. One warp group loads and cuts the weights into
// tasks. A task is one stage: 64 rows of W x BK channels. Each of two other warp groups takes the next task when it is
// free, dequantises and multiplies it. So both may hold sums of one tile: the first to leave the tile hands its sums
// over through shared memory, the second adds and stores. The sums are integers, so it does not matter which group
// computed what. gemm_w4a8_lqq_imfp_sm90 gives each group 64 rows of every stage instead.
//
// Contract   accumulators[m, n] = sum_k x[m, k] * (q4 * s1 + min)[n, k], exact in int32; y = accumulators * x_scale[m]
//            * w_scale[n] + bias[n], each operation rounded in f32, the result then rounded to the output type, or the
//            accumulators themselves (OUT == 3). Groups of 64 or 128. What lies outside the matrices is loaded as
//            zeros.
// Tile       block: 64 rows x BM tokens x BK channels a task; ring of STAGES; W in the dual-MMA layout.
// Order      A task is taken only when its operands have arrived, and so have those of all tasks before it: the parity
//            of a slot distinguishes two rounds, no more. A group takes no task of the next tile before it has left its
//            tile, so at most one tile's sums are on their way from one group to the other.
// Guide      notebooks/guide/kernels_gemm.md: operands, layout, schedule, constants
// PTX ISA    9.7.15 wgmma m64nNk32 (.s8.s8); 9.7.9.25-27 bulk and tensor copies; 9.7.13.15 mbarrier; 9.7.13.5
//            atom.acq_rel; 9.7.19.5 setmaxnreg.
#include "dequant.cuh"
#include "epilogue_sm90.cuh"
#include "tasks.cuh"
#include "timeline.cuh"
#include "wgmma.cuh"

#ifndef BM
#define BM 64            // tokens of a tile
#define BK 128           // channels of a stage
#define STAGES 6         // slots of the ring
#define RESIDENT 1       // blocks per SM
#define GROUP 128        // channels of a level-2 scale
#define OUT 0            // y as 0 f16, 1 bf16, 2 f32; 3 the int32 accumulators
#define STORE_TOKENS 32  // tokens whose results are stored at a time
#define STORE_PITCH 68   // int32 from one of these tokens to the next in shared memory
#endif

namespace {

using ptxlab::u32;
using ptxlab::u64;
constexpr int kWBlockBytes = GROUP / 64 * 2048 + 128;  // bytes of 64 rows x GROUP channels
constexpr int kWBytes = BK / GROUP * kWBlockBytes;     // of a stage
constexpr int kXBytes = BM * BK;
constexpr int kStageBytes = (kXBytes + kWBytes + 1023) / 1024 * 1024;  // swizzled tiles begin at multiples of 1024
constexpr int NOTHING = -1;                                            // no task, or no tile yet
constexpr int kConsumerRegisters = RESIDENT == 1   ? 232
                                   : RESIDENT == 2 ? 104
                                                   : 72,
              kProducerRegisters = RESIDENT == 1 ? 40 : 24;
using Epilogue = ptxlab::Epilogue<2, BM, 1>;

// Take the next task: increment the counter `next` and return the old value, once the task's operands have arrived.
// Return NOTHING if all tasks are taken (`end`), or if the next one belongs to another tile than `tile`, unless that is
// NOTHING. For one thread.
__device__ __forceinline__ int fetch(int* next, u64* full, int stages, int tile, int end) {
    for (;;) {
        const int task = ptxlab::load_acquire(next);
        if (task == end || (tile != NOTHING && task / stages != tile)) return NOTHING;
        const bool is_there = ptxlab::mbarrier_test(&full[task % STAGES], task / STAGES & 1);
        if (is_there && ptxlab::compare_and_swap(next, task, task + 1) == task) return task;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(384, RESIDENT) gemm_w4a8_lqq_dynamic_sm90(
    const unsigned char* __restrict__ blocks,     // u8  [N/64, K/g, bytes], dual-MMA layout
    const float* __restrict__ w_scale,            // f32 [N]
    const __grid_constant__ ptxlab::TensorMap x,  // s8  [M, K], boxes [BM][128] swizzled
    const float* __restrict__ x_scale,            // f32 [M]
    const float* __restrict__ bias,               // f32 [N], or null
    void* __restrict__ y,                         // [M, N], by OUT
    int M, int N, int K) {
    extern __shared__ __align__(1024) unsigned char ring[];
    __shared__ u64 full[STAGES], empty[STAGES], handed_over;
    __shared__ int next, leavers, told[2][2];
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const int token_tiles = (M + BM - 1) / BM, w_blocks = K / GROUP, stages = (K + BK - 1) / BK;
    const int tiles = token_tiles * ((N + 63) / 64);
    const int tasks = (tiles - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x) * stages;  // of this block

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            ptxlab::mbarrier_init(&full[s], 1);
            ptxlab::mbarrier_init(&empty[s], 128);
        }
        ptxlab::mbarrier_init(&handed_over, 128);
        next = leavers = 0;
        ptxlab::fence_mbarrier_init();
    }
    __syncthreads();

    if (threadIdx.x < 128) {  // the warp group that loads: one thread issues the copies
        ptxlab::lower_registers_to<kProducerRegisters>();
        if (threadIdx.x == 0) {
            ptxlab::Slot<STAGES> slot;
            for (int task = 0; task < tasks; ++task, slot.advance()) {
                const int tile = blockIdx.x + task / stages * gridDim.x, stage = task % stages;
                unsigned char* stage_slot = ring + slot.index * kStageBytes;
                u64* barrier = &full[slot.index];
                PHASE(WAIT_GROUP);
                ptxlab::mbarrier_wait(&empty[slot.index], slot.parity ^ 1);  // the first round finds them empty
                PHASE(LOAD);
                ptxlab::mbarrier_arrive_expect(barrier, kXBytes + kWBytes);
                for (int i = 0; i < BK / 128; ++i)
                    ptxlab::tensor_load(stage_slot + i * BM * 128, &x, stage * BK + i * 128, tile % token_tiles * BM,
                                        barrier);
                // Past K any weights will do, because X is zero there.
                const unsigned char* row_blocks = blocks + size_t(tile / token_tiles) * w_blocks * kWBlockBytes;
                const int block = stage * (BK / GROUP), valid_blocks = min(BK / GROUP, w_blocks - block);
                ptxlab::bulk_load(stage_slot + kXBytes, row_blocks + size_t(block) * kWBlockBytes,
                                  valid_blocks * kWBlockBytes, barrier);
#pragma unroll 1
                for (int b = valid_blocks; b < BK / GROUP; ++b)
                    ptxlab::bulk_load(stage_slot + kXBytes + b * kWBlockBytes, row_blocks, kWBlockBytes, barrier);
            }
        }
        return;
    }

    // A warp group that dequantises and multiplies.
    ptxlab::raise_registers_to<kConsumerRegisters>();
    const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, rows = thread / 32 * 8 + thread % 32 / 4;
    int4* partial = reinterpret_cast<int4*>(ring + STAGES * kStageBytes);  // [BM / 8][128]: sums handed over
    const Epilogue epilogue{nullptr, reinterpret_cast<int*>(partial + BM / 8 * 128), nullptr, 0};
    // Broadcast a value of a group's first thread to the group. Two buffers take turns, as the previous value may still
    // be read.
    int told_slot = 0;
    const auto tell = [&](int value) {
        told_slot ^= 1;
        if (thread == 0) told[group][told_slot] = value;
        ptxlab::sync_one_of_two(group);
        return told[group][told_slot];
    };

    for (;;) {
        int tile = NOTHING, done = 0, acc[BM / 2] = {};  // of a tile of this block: this group's tasks and sums
        for (;;) {
            PHASE(WAIT_COPY);
            const int task = tell(thread == 0 ? fetch(&next, full, stages, tile, tasks) : 0);
            if (task == NOTHING) break;
            tile = task / stages;
            const int slot = task % STAGES;
            const unsigned char* x_slot = ring + slot * kStageBytes;
            const u64 x_tile = ptxlab::swizzled_128(x_slot);
            ptxlab::mbarrier_wait(&full[slot], task / STAGES & 1);
            PHASE(DEQUANTISE);
            uint4 packed[BK / 64];  // units of 64 channels
            u32 constants[BK / 64];
#pragma unroll
            for (int k_unit = 0; k_unit < BK / 64; ++k_unit) {
                const unsigned char* block = x_slot + kXBytes + k_unit * 64 / GROUP * kWBlockBytes;
                packed[k_unit] = *reinterpret_cast<const uint4*>(block + k_unit * 64 % GROUP / 64 * 2048 + thread * 16);
                constants[k_unit] = *reinterpret_cast<const u32*>(block + GROUP / 64 * 2048 + rows * 4);
            }
#pragma unroll
            for (int k_unit = 0; k_unit < BK / 64; ++k_unit) {
                const u32 words[4] = {packed[k_unit].x, packed[k_unit].y, packed[k_unit].z, packed[k_unit].w};
                u32 a[2][4];  // [MMA][register]
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const u32 pair = constants[k_unit] >> 16 * (j & 1);
                    const uint2 d = ptxlab::dequant_lqq(words[j], pair & 0xff, __byte_perm(pair, 0, 0x1111));
                    a[j / 2][j & 1] = d.x;        // k 4 t to 4 t + 3, t = lane % 4; j odd: row + 8
                    a[j / 2][2 + (j & 1)] = d.y;  // k 16 + 4 t to 16 + 4 t + 3
                }
                PHASE(ISSUE, BM);
                ptxlab::wgmma_fence();
                const u64 x_descriptor = x_tile + k_unit / 2 * (BM * 128 / 16) + k_unit % 2 * 4;
                ptxlab::wgmma_s8(acc, a[0], x_descriptor);
                ptxlab::wgmma_s8(acc, a[1], x_descriptor + 2);
                ptxlab::wgmma_commit();
                PHASE(DEQUANTISE);
            }
            PHASE(WAIT_MMA, 0);
            ptxlab::wgmma_wait<0>();  // before the next task is waited for: its operands may need this slot
            ptxlab::pin(acc);
            ptxlab::mbarrier_arrive(&empty[slot]);
            ++done;
        }
        if (tile == NOTHING) return;

        PHASE(REDUCE);
        if (done < stages) {  // the other group did the rest
            const int leaver = tell(thread == 0 ? atomicAdd(&leavers, 1) : 0);
            if (leaver % 2 == 0) {
#pragma unroll
                for (int j = 0; j < BM / 8; ++j)
                    partial[j * 128 + thread] = make_int4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
                ptxlab::mbarrier_arrive(&handed_over);
                continue;
            }
            ptxlab::mbarrier_wait(&handed_over, leaver / 2 & 1);
#pragma unroll
            for (int j = 0; j < BM / 8; ++j) {
                const int4 received = partial[j * 128 + thread];
                acc[4 * j] += received.x, acc[4 * j + 1] += received.y, acc[4 * j + 2] += received.z,
                    acc[4 * j + 3] += received.w;
            }
        }
        PHASE(EPILOGUE);
        const int grid_tile = blockIdx.x + tile * gridDim.x;
        epilogue.store<OUT, STORE_TOKENS, STORE_PITCH>(acc, group, thread, {y, x_scale, w_scale, bias, M, N},
                                                       grid_tile % token_tiles * BM, grid_tile / token_tiles * 64);
    }
}
