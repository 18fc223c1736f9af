// The GEMM of the Hopper ladder's first two steps, one thing after the other: the warp groups of a block wait for a stage
// of the ring, dequantise all of it, multiply, wait for that, and only then take the next. The steps differ in how four
// weights are dequantised (LiquidGEMM section 7.3, Fig. 13).
#pragma once
#include "epilogue_sm90.cuh"
#include "timeline.cuh"
#include "wgmma.cuh"

namespace ptxlab {

// A block: WARP_GROUPS of 64 rows each x TOKENS x CHANNELS of a stage, SLOTS of the ring; a cluster of BLOCKS, each with
// a slice of K; SIZE channels share a scale.
template <int WARP_GROUPS, int TOKENS, int CHANNELS, int SLOTS, int BLOCKS, int SIZE>
struct SerialGemm {
    static constexpr int GROUP_K = SIZE < 64 ? 64 : SIZE;                       // channels of a block of W
    static constexpr int W_BLOCK = GROUP_K / 64 * 2048 + GROUP_K / SIZE * 128;  // its bytes
    static constexpr int W_BYTES = CHANNELS / GROUP_K * W_BLOCK;                // of a stage and 64 rows
    static constexpr int X_BYTES = TOKENS * CHANNELS;
    // swizzled tiles begin at multiples of 1024
    static constexpr int STAGE_BYTES = (X_BYTES + WARP_GROUPS * W_BYTES + 1023) / 1024 * 1024;
    using Epilogue = ptxlab::Epilogue<WARP_GROUPS, TOKENS, BLOCKS>;

    // Run the kernel: `blocks` of W in the dual-MMA layout, X by its tensor map, Y as KIND. DEQUANTISE converts a word
    // of eight weights, given scale and offset.
    template <uint2 (*DEQUANTISE)(u32, u32, u32), int KIND, int AT_A_TIME, int PITCH>
    static __device__ __forceinline__ void run(const unsigned char* blocks, const TensorMap& x, const Output& out,
                                               int K) {
        extern __shared__ __align__(1024) unsigned char ring[];
        __shared__ u64 full[SLOTS], arrived;
        TIMELINE_THREAD(threadIdx.x % 128 == 0);
        const int rank = BLOCKS > 1 ? cluster_rank() : 0, tile = blockIdx.x / BLOCKS;
        const int token_tiles = (out.M + TOKENS - 1) / TOKENS, row_tiles = (out.N + 63) / 64,
                  w_blocks = (K + GROUP_K - 1) / GROUP_K;
        const int token0 = tile % token_tiles * TOKENS, row_tile0 = tile / token_tiles * WARP_GROUPS;
        const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
        const int k_stages = (K + CHANNELS - 1) / CHANNELS, first_stage = k_stages * rank / BLOCKS,
                  stages = k_stages * (rank + 1) / BLOCKS - first_stage;

        unsigned char* cluster_sums = ring + SLOTS * STAGE_BYTES;
        const Epilogue epilogue{reinterpret_cast<int4*>(cluster_sums),
                                reinterpret_cast<int*>(cluster_sums + Epilogue::RECEIVE_BYTES), &arrived, rank};

        // One thread copies a stage: X, and for every warp group its 64 rows of W (past N the last ones again).
        // Past K any weights will do, because X is zero there.
        const auto fetch = [&](int stage) {
            unsigned char* slot = ring + stage % SLOTS * STAGE_BYTES;
            u64* barrier = &full[stage % SLOTS];
            mbarrier_arrive_expect(barrier, X_BYTES + WARP_GROUPS * W_BYTES);
            for (int i = 0; i < CHANNELS / 128; ++i)
                tensor_load(slot + i * TOKENS * 128, &x, (first_stage + stage) * CHANNELS + i * 128, token0, barrier);
            const int block = (first_stage + stage) * (CHANNELS / GROUP_K),
                      valid_blocks = min(CHANNELS / GROUP_K, w_blocks - block);
            for (int i = 0; i < WARP_GROUPS; ++i) {
                const unsigned char* row_blocks =
                    blocks + size_t(min(row_tile0 + i, row_tiles - 1)) * w_blocks * W_BLOCK;
                unsigned char* w_slot = slot + X_BYTES + i * W_BYTES;
                bulk_load(w_slot, row_blocks + size_t(block) * W_BLOCK, valid_blocks * W_BLOCK, barrier);
#pragma unroll 1
                for (int b = valid_blocks; b < CHANNELS / GROUP_K; ++b)
                    bulk_load(w_slot + b * W_BLOCK, row_blocks, W_BLOCK, barrier);
            }
        };
        if (threadIdx.x == 0) {
            for (int s = 0; s < SLOTS; ++s) mbarrier_init(&full[s], 1);
            epilogue.expect();
            fence_mbarrier_init();
            PHASE(LOAD);
            for (int s = 0; s < SLOTS && s < stages; ++s) fetch(s);
        }
        PHASE(WAIT_GROUP);
        __syncthreads();
        if (BLOCKS > 1) cluster_arrive();

        int acc[TOKENS / 2] = {};
        for (int stage = 0; stage < stages; ++stage) {
            const unsigned char* slot = ring + stage % SLOTS * STAGE_BYTES;
            const unsigned char* w = slot + X_BYTES + group * W_BYTES;
            const u64 x_tile = swizzled_128(slot);
            PHASE(WAIT_COPY);
            mbarrier_wait(&full[stage % SLOTS], stage / SLOTS & 1);

            PHASE(DEQUANTISE);
            u32 a[CHANNELS / 32][4];
#pragma unroll
            for (int k_unit = 0; k_unit < CHANNELS / 64; ++k_unit) {  // 64 k: the operands of two wgmmas
                const unsigned char* block = w + k_unit * 64 / GROUP_K * W_BLOCK;
                const uint4 packed =
                    *reinterpret_cast<const uint4*>(block + k_unit * 64 % GROUP_K / 64 * 2048 + thread * 16);
                const u32 constants = *reinterpret_cast<const u32*>(block + GROUP_K / 64 * 2048 +
                                                                    (thread / 32 * 8 + thread % 32 / 4) * 4);
                const u32 scale[2] = {constants & 0xff, constants >> 16 & 0xff},
                          offset[2] = {__byte_perm(constants, 0, 0x1111), __byte_perm(constants, 0, 0x3333)};
                const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const uint2 d = DEQUANTISE(words[j], scale[j & 1], offset[j & 1]);
                    a[k_unit * 2 + j / 2][j & 1] = d.x;        // k 4 t to 4 t + 3, t = lane % 4; j odd: row + 8
                    a[k_unit * 2 + j / 2][2 + (j & 1)] = d.y;  // k 16 + 4 t to 16 + 4 t + 3
                }
            }
            PHASE(ISSUE, CHANNELS / 64 * TOKENS);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < CHANNELS / 32; ++step)
                wgmma_s8(acc, a[step], x_tile + step / 4 * (TOKENS * 128 / 16) + step % 4 * 2);
            wgmma_commit();
            PHASE(WAIT_MMA, 0);
            wgmma_wait<0>();
            pin(acc);
            PHASE(WAIT_GROUP);
            __syncthreads();  // everyone has done with the slot
            PHASE(LOAD);
            if (threadIdx.x == 0 && stage + SLOTS < stages) fetch(stage + SLOTS);
        }

        PHASE(REDUCE);
        if (BLOCKS > 1) cluster_wait();  // the barriers of the cluster's blocks are initialised
        epilogue.send(acc, group, thread);
        epilogue.receive(acc, group, thread);
        PHASE(EPILOGUE);
        if (row_tile0 + group < row_tiles)
            epilogue.store<KIND, AT_A_TIME, PITCH>(acc, group, thread, out, token0, (row_tile0 + group) * 64);
    }
};

}  // namespace ptxlab
