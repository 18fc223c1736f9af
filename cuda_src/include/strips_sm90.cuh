// The wgmma GEMMs whose weights lie in strips: how rows of W are cut into tiles, the ring of stages, and the main loop of
// one warp group. It loads its words of a stage from shared memory, dequantises them into registers under the previous
// wgmma, and multiplies them with all tokens of the tile.
#pragma once
#include "dequant.cuh"
#include "mbarrier.cuh"
#include "named_barrier.cuh"
#include "timeline.cuh"
#include "wgmma.cuh"

namespace ptxlab {

// A stage of the ring: X as CHANNELS / 128 tiles [TOKENS][128] under the 128-byte swizzle, then a slot of each strip.
template <int TOKENS_, int CHANNELS, int HEIGHT, int SIZE_>
struct StripStage {
    static constexpr int TOKENS = TOKENS_, SIZE = SIZE_;
    static constexpr int UNITS = CHANNELS / 64, GROUPS = STRIP_GROUPS<SIZE>, BLOCK = STRIP_BLOCK<SIZE>,
                         BLOCKS = CHANNELS / 128;
    using Constants = StripConstants<SIZE>;
    static constexpr int X_BYTES = TOKENS * CHANNELS, W_SLOT = (BLOCKS * BLOCK + 127) / 128 * 128;
    // Swizzled tiles begin at multiples of 1024.
    static constexpr int BYTES = (X_BYTES + HEIGHT * W_SLOT + 1023) / 1024 * 1024;
};

// The strips of W shared out evenly over row tiles: tiles differ by one strip at most.
struct RowTiles {
    int tile_strips, taller_tiles;  // strips of a tile; tiles that have one more, which come first

    __device__ __forceinline__ RowTiles(int num_strips, int num_tiles)
        : tile_strips(num_strips / num_tiles), taller_tiles(num_strips % num_tiles) {}

    __device__ __forceinline__ int first_strip(int row_tile) const {
        return row_tile * tile_strips + min(row_tile, taller_tiles);
    }
};

// The stages in shared memory and their barriers: `full` when the copies have come, `empty` when wgmma has read them.
template <class Stage, int SLOTS>
struct StripRing {
    unsigned char* stages;
    u64 *full, *empty;
};

// Constants of a tile's tokens in a warp group's shared memory: the scale of x, and the sum of x, which is subtracted.
template <int TOKENS>
struct TokenConstants {
    float x_scale[TOKENS];
    int x_sum[TOKENS];
};

// Load the constants of tokens token0, ... of M from global memory to the registers of a warp group: one where x_scale,
// zero where x_sum is not used.
template <bool SCALED, bool SUMMED, int COUNT>
__device__ __forceinline__ void load_token_constants(float (&scale)[COUNT], int (&sum)[COUNT], const float* x_scale,
                                                     const int* x_sum, int token0, int M, int thread) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int token = min(token0 + i * 128 + thread, M - 1);
        scale[i] = SCALED ? x_scale[token] : 1, sum[i] = SUMMED ? x_sum[token] : 0;
    }
}

// Store a tile's token constants from registers to the shared memory of a warp group.
template <int TOKENS, int COUNT>
__device__ __forceinline__ void share_token_constants(TokenConstants<TOKENS>* constants, const float (&scale)[COUNT],
                                                      const int (&sum)[COUNT], int group, int thread) {
    sync_warp_group(group);  // the constants of the previous tile have been used
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (i * 128 + thread < TOKENS)
            constants->x_scale[i * 128 + thread] = scale[i], constants->x_sum[i * 128 + thread] = sum[i];
    sync_warp_group(group);
}

// acc += a x by wgmma, for weights w as s8; or as u8, w + 128 or q per channel.
template <bool AS_S8, int SUMS>
__device__ __forceinline__ void multiply_8bit(int (&acc)[SUMS], const u32 (&a)[4], u64 x) {
    if (AS_S8) wgmma_s8(acc, a, x);
    else wgmma_u8(acc, a, x);
}

// acc += the products of a warp group, MMAS of 64 rows x TOKENS, over every STEP-th stage from `first_stage` on. A slot
// is released when wgmma has read it, while the next stage is worked on. FILLED: past the end of K the copies bring any
// weights, as X is zero there; else a stage's first block serves for them, and every warp group has a stage. The caller
// declares the registers, or ptxas chooses others: a as [unit of 64 k][MMA of 64 rows][MMA of 32 k][register], `words`
// of this unit and the next, the strip's address in the ring's first slot.
template <class Stage, int STEP, bool AS_S8, bool FILLED, int MMAS, int SUMS, int SLOTS>
__device__ __forceinline__ void multiply_strips(int (&acc)[MMAS][SUMS], u32 (&a)[2][MMAS][2][4],
                                                const u32 (&strip_address)[MMAS], uint4 (&words)[2][MMAS],
                                                typename Stage::Constants (&constants)[MMAS],
                                                typename Stage::Constants (&next_constants)[MMAS],
                                                const unsigned char* stages, u64* full, u64* empty, Slot<SLOTS>& slot,
                                                int first_stage, int num_stages, int w_blocks,
                                                int lane TIMELINE_PARAMETER) {
    // The lane's words of a unit of 64 k; with the first unit of a block its constants.
    const auto load = [&](int slot_index, int stage, int k_unit) {
        const bool past_end = !FILLED && k_unit >= 2 && stage * Stage::BLOCKS + k_unit / 2 >= w_blocks;
        const int block = past_end ? 0 : k_unit / 2;
#pragma unroll
        for (int h = 0; h < MMAS; ++h) {
            const u32 w = strip_address[h] + slot_index * Stage::BYTES + block * Stage::BLOCK;
            words[k_unit % 2][h] = load_shared_16(w + k_unit % 2 * 512 + lane * 16);
            if (k_unit % 2 == 0)
#pragma unroll
                for (int i = 0; i < Stage::GROUPS; ++i)
                    next_constants[h][i] = load_shared_4(w + 1024 + i * 32 + lane / 4 * 4);
        }
    };
    const auto fetch = [&](int stage) {
        PHASE(WAIT_COPY);
        // A round ago the slot may have been another warp group's, which may still wait for its copies. A wait by parity
        // for the next ones would then be over at once, so wait first until that one has given the slot back.
        if (SLOTS % STEP != 0) mbarrier_wait(&empty[slot.index], slot.parity ^ 1);
        mbarrier_wait(&full[slot.index], slot.parity);
        PHASE(DEQUANTISE);
        load(slot.index, stage, 0);
    };
    int unreleased_slot = -1;  // wgmma may still read it
    if (!FILLED || first_stage < num_stages) fetch(first_stage);
#pragma unroll 1
    for (int stage = first_stage; stage < num_stages; stage += STEP) {
        const u64 x_tile = swizzled_128(stages + slot.index * Stage::BYTES);
        const int current_slot = slot.index;
#pragma unroll
        for (int k_unit = 0; k_unit < Stage::UNITS; ++k_unit) {
            if (k_unit % 2 == 0)
#pragma unroll
                for (int h = 0; h < MMAS; ++h)
#pragma unroll
                    for (int i = 0; i < Stage::GROUPS; ++i) constants[h][i] = next_constants[h][i];
            if (k_unit + 1 < Stage::UNITS) load(current_slot, stage, k_unit + 1);
            PHASE(WAIT_MMA, 1);
            wgmma_wait<1>();
            if (k_unit == 1 && unreleased_slot >= 0) mbarrier_arrive(&empty[unreleased_slot]);
            PHASE(DEQUANTISE);
#pragma unroll
            for (int h = 0; h < MMAS; ++h) {
                // Else ptxas dequantises ahead of the wait, into registers that the wgmma two units ago still reads ...
                pin(words[k_unit % 2][h]);
                dequant_strip<AS_S8, Stage::SIZE>(words[k_unit % 2][h], constants[h], k_unit % 2, a[k_unit % 2][h]);
                // ... or behind the fence, and then waits for every wgmma.
                if (Stage::SIZE == 0) pin(a[k_unit % 2][h][0]), pin(a[k_unit % 2][h][1]);
            }
            PHASE(ISSUE, MMAS * Stage::TOKENS);
            wgmma_fence();
            const u64 x_descriptor = x_tile + k_unit / 2 * (Stage::TOKENS * 128 / 16) + k_unit % 2 * 4;
#pragma unroll
            for (int h = 0; h < MMAS; ++h) {
                multiply_8bit<AS_S8>(acc[h], a[k_unit % 2][h][0], x_descriptor);
                multiply_8bit<AS_S8>(acc[h], a[k_unit % 2][h][1], x_descriptor + 2);
            }
            wgmma_commit();
        }
        unreleased_slot = current_slot;
#pragma unroll
        for (int i = 0; i < STEP; ++i) slot.advance();
        if (stage + STEP < num_stages) fetch(stage + STEP);
    }
    PHASE(WAIT_MMA, 0);
    wgmma_wait<0>();
#pragma unroll
    for (int h = 0; h < MMAS; ++h) pin(acc[h]);
    if (!FILLED || unreleased_slot >= 0) mbarrier_arrive(&empty[unreleased_slot]);
}

}  // namespace ptxlab
