// The main loop of the wgmma GEMMs whose weights lie in strips, for one warp group: its words of a stage out of shared
// memory, dequantised into registers under the wgmma before, and multiplied with all tokens of the tile.
#pragma once
#include "dequant.cuh"
#include "mbarrier.cuh"
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

// By weights w as s8; or as u8, w + 128 or q per channel.
template <bool AS_S8, int SUMS>
__device__ __forceinline__ void multiply_8bit(int (&acc)[SUMS], const u32 (&a)[4], u64 x) {
    if (AS_S8) wgmma_s8(acc, a, x);
    else wgmma_u8(acc, a, x);
}

// acc += the products of a warp group, MMAS of 64 rows x TOKENS: warp v of MMA h takes the strip that lies at[h] in the
// ring's first slot. Every STEP-th stage from `first` on; a slot is given back when wgmma has read it, while the next
// stage is worked on. FILLED: behind the end of K the copies bring any weights, as X is zero there; else a stage's
// first block serves for them, and every warp group has a stage. The registers in between are the caller's, which
// leaves ptxas's choice of registers as it was: a as [unit of 64 k][MMA of 64 rows][MMA of 32 k][register], q words of
// this unit and the next, c and c_next their constants.
template <class Stage, int STEP, bool AS_S8, bool FILLED, int MMAS, int SUMS, int SLOTS>
__device__ __forceinline__ void multiply_strips(int (&acc)[MMAS][SUMS], u32 (&a)[2][MMAS][2][4], const u32 (&at)[MMAS],
                                                uint4 (&q)[2][MMAS], typename Stage::Constants (&c)[MMAS],
                                                typename Stage::Constants (&c_next)[MMAS], const unsigned char* ring,
                                                u64* full, u64* empty, Slot<SLOTS>& slot, int first, int stages,
                                                int blocks, int lane TIMELINE_PARAMETER) {
    // The lane's words of a unit of 64 k; with the first of a block its constants.
    const auto load = [&](int slot_index, int stage, int unit) {
        const int block = !FILLED && unit >= 2 && stage * Stage::BLOCKS + unit / 2 >= blocks ? 0 : unit / 2;
#pragma unroll
        for (int h = 0; h < MMAS; ++h) {
            const u32 w = at[h] + slot_index * Stage::BYTES + block * Stage::BLOCK;
            q[unit % 2][h] = load_shared_16(w + unit % 2 * 512 + lane * 16);
            if (unit % 2 == 0)
#pragma unroll
                for (int i = 0; i < Stage::GROUPS; ++i) c_next[h][i] = load_shared_4(w + 1024 + i * 32 + lane / 4 * 4);
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
    int before = -1;  // the slot that wgmma may still read
    if (!FILLED || first < stages) fetch(first);
#pragma unroll 1
    for (int stage = first; stage < stages; stage += STEP) {
        const u64 x_tile = swizzled_128(ring + slot.index * Stage::BYTES);
        const int current = slot.index;
#pragma unroll
        for (int unit = 0; unit < Stage::UNITS; ++unit) {
            if (unit % 2 == 0)
#pragma unroll
                for (int h = 0; h < MMAS; ++h)
#pragma unroll
                    for (int i = 0; i < Stage::GROUPS; ++i) c[h][i] = c_next[h][i];
            if (unit + 1 < Stage::UNITS) load(current, stage, unit + 1);
            PHASE(WAIT_MMA, 1);
            wgmma_wait<1>();
            if (unit == 1 && before >= 0) mbarrier_arrive(&empty[before]);
            PHASE(DEQUANTISE);
#pragma unroll
            for (int h = 0; h < MMAS; ++h) {
                // Else ptxas dequantises ahead of the wait, into registers that the wgmma two units ago still reads ...
                pin(q[unit % 2][h]);
                dequant_strip<AS_S8, Stage::SIZE>(q[unit % 2][h], c[h], unit % 2, a[unit % 2][h]);
                // ... or behind the fence, and then waits for every wgmma.
                if (Stage::SIZE == 0) pin(a[unit % 2][h][0]), pin(a[unit % 2][h][1]);
            }
            PHASE(ISSUE, MMAS * Stage::TOKENS);
            wgmma_fence();
            const u64 x_unit = x_tile + unit / 2 * (Stage::TOKENS * 128 / 16) + unit % 2 * 4;
#pragma unroll
            for (int h = 0; h < MMAS; ++h) {
                multiply_8bit<AS_S8>(acc[h], a[unit % 2][h][0], x_unit);
                multiply_8bit<AS_S8>(acc[h], a[unit % 2][h][1], x_unit + 2);
            }
            wgmma_commit();
        }
        before = current;
#pragma unroll
        for (int i = 0; i < STEP; ++i) slot.advance();
        if (stage + STEP < stages) fetch(stage + STEP);
    }
    PHASE(WAIT_MMA, 0);
    wgmma_wait<0>();
#pragma unroll
    for (int h = 0; h < MMAS; ++h) pin(acc[h]);
    if (!FILLED || before >= 0) mbarrier_arrive(&empty[before]);
}

}  // namespace ptxlab
