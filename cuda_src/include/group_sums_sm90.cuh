// Scale wgmma's sums over a group of channels, which begin at 1.5 * 2^23, into f32 totals; and the main loop of the
// warp group that loads for those that multiply.
#pragma once
#include <cuda_fp16.h>

#include "mbarrier.cuh"
#include "pack.cuh"
#include "tile_order.cuh"
#include "timeline.cuh"
#include "wgmma.cuh"

namespace ptxlab {

constexpr int ZERO = 0x4b400000;  // initial value of a sum: the bits of SHIFT, whose last bit counts 1

// Registers of a consumer's thread and of a producer's, by the number of warp groups that multiply; together what the
// block begins with. With one warp group they stay as they are.
constexpr int CONSUMER_REGISTERS[] = {0, 0, 232, 152, 104}, PRODUCER_REGISTERS[] = {0, 0, 40, 56, 64};

// Unpack a lane's weights of 64 channels into operand A of two wgmmas: each s4 in the upper half of a byte, so that it
// counts 16 times.
__device__ __forceinline__ void upper_halves(unsigned (*a)[4], uint4 packed) {
    const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        a[j / 2][j & 1] = words[j] & 0xf0f0f0f0u;             // k 4 t to 4 t + 3, t = lane % 4; j odd: row + 8
        a[j / 2][2 + (j & 1)] = words[j] << 4 & 0xf0f0f0f0u;  // k 16 + 4 t to 16 + 4 t + 3
    }
}

// Multiply `groups` groups of STEPS wgmmas, AT_ONCE groups at a time, and scale their sums. fetch(a, rows, i) loads the
// weights of group i and the scales of their rows, and returns the descriptor of X, FURTHER units on for every second
// step; finish(sum, rows, i) scales the sums. Meanwhile other warp groups multiply or scale. Several at once are for
// few sums, which take less time than a wgmma's latency.
template <int AT_ONCE, int STEPS, int FURTHER, int SUMS, class Fetch, class Finish>
__device__ __forceinline__ void scale_groups(int groups, const Fetch& fetch, const Finish& finish TIMELINE_PARAMETER) {
    int group = 0;
#pragma unroll 1
    for (; group + AT_ONCE <= groups; group += AT_ONCE) {
        int sum[AT_ONCE][SUMS];
        unsigned a[AT_ONCE][STEPS][4];
        unsigned rows[AT_ONCE];
        u64 x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            x[i] = fetch(a[i], rows[i], group + i);
#pragma unroll
            for (int k = 0; k < SUMS; ++k) sum[i][k] = ZERO;
            pin(sum[i]);
        }
        PHASE(ISSUE, AT_ONCE * STEPS * SUMS);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
                wgmma_s8(sum[i], a[i][step], x[i] + step / 2 * FURTHER + step % 2 * 2);
        wgmma_commit();
        PHASE(WAIT_MMA, 0);
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) pin(sum[i]);
        PHASE(MULTIPLY);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) finish(sum[i], rows[i], group + i);
    }
    if constexpr (AT_ONCE > 1)
        scale_groups<1, STEPS, FURTHER, SUMS>(
            groups - group, [&](unsigned (&a)[STEPS][4], unsigned& rows, int i) { return fetch(a, rows, group + i); },
            [&](const int (&sum)[SUMS], unsigned rows, int i) { finish(sum, rows, group + i); } TIMELINE_ARGUMENT);
}

// Convert the scales of a tile's tokens for one group, each the first of eight halves, to floats in the order in which
// `add_group` takes them: of sixteen tokens 8 j + 2 t + c those of a thread t of a quad are four neighbours, by j and
// c.
template <int TOKENS>
constexpr int SPREAD_BYTES = (TOKENS + 15) / 16 * 64;
template <int TOKENS, int THREADS>
__device__ __forceinline__ void spread_scales(float* spread, const __half* scales, int thread) {
#pragma unroll 1
    for (int m = thread; m < SPREAD_BYTES<TOKENS> / 4; m += THREADS)
        spread[m / 16 * 16 + m / 2 % 4 * 4 + m / 8 % 2 * 2 + m % 2] = m < TOKENS ? __half2float(scales[m * 8]) : 0.0f;
}

// total += sum * (x * w) for a warp's 16 rows, where `sum` counts from ZERO. `spread`: shared address of the scales
// that spread_scales has stored. A product counts UNIT times. INT4: both operands are, and their sums have 14 bits:
// times an f16, exact.
template <bool INT4, int UNIT, int SUMS>
__device__ __forceinline__ void add_group(float (&total)[SUMS], const int (&sum)[SUMS], unsigned row_scales,
                                          unsigned spread) {
    const __half2 rows = *reinterpret_cast<const __half2*>(&row_scales);
    const float counts = 1.0f / UNIT;
    const float row_scale[2] = {__low2float(rows) * counts, __high2float(rows) * counts};
    const float offset[2] = {-SHIFT * row_scale[0], -SHIFT * row_scale[1]};
#pragma unroll
    for (int i = 0; i < (SUMS + 7) / 8; ++i) {
        const uint4 four = load_shared_16(spread + i * 64);
        const float token_scales[4] = {__uint_as_float(four.x), __uint_as_float(four.y), __uint_as_float(four.z),
                                       __uint_as_float(four.w)};
#pragma unroll
        for (int e = 8 * i; e < min(8 * i + 8, SUMS); ++e) {
            const float shifted = __int_as_float(sum[e]), token_scale = token_scales[e / 4 % 2 * 2 + e % 2];
            const int row = e / 2 % 2;
            if (INT4) total[e] = __fmaf_rn(__fmaf_rn(shifted, row_scale[row], offset[row]), token_scale, total[e]);
            else total[e] = __fmaf_rn(__fadd_rn(shifted, -SHIFT), __fmul_rn(token_scale, row_scale[row]), total[e]);
        }
    }
}

// Load all stages of a block's tiles, by the four warps that load: an elected thread of warp 0 copies weights,
// load_w(row tile, stage, stage slot, barrier), one of warp 1 activations, load_x(first token, stage, stage slot,
// barrier); when both have arrived, warps 2 and 3 prepare(stage, stage slot, index of the slot).
template <int STAGE_BYTES, int SLOTS, class LoadW, class LoadX, class Prepare>
__device__ __forceinline__ void load_tiles(Slot<SLOTS>& slot, unsigned char* ring, u64* full, u64* empty, int tiles,
                                           int token_tiles, int row_tiles, int tokens, int stages, int warp,
                                           bool elected, const LoadW& load_w, const LoadX& load_x,
                                           const Prepare& prepare TIMELINE_PARAMETER) {
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const TileCoord coord = tile_coord(tile, token_tiles, row_tiles);
#pragma unroll 1
        for (int stage = 0; stage < stages; ++stage, slot.advance()) {
            unsigned char* stage_slot = ring + slot.index * STAGE_BYTES;
            if (warp < 2) {
                PHASE(WAIT_GROUP);
                mbarrier_wait(&empty[slot.index], slot.parity ^ 1);  // the first round finds them empty
                PHASE(LOAD);
                if (elected && warp == 0) load_w(coord.row_tile, stage, stage_slot, &full[slot.index]);
                if (elected && warp == 1) load_x(coord.token_tile * tokens, stage, stage_slot, &full[slot.index]);
            } else {
                PHASE(WAIT_COPY);
                mbarrier_wait(&full[slot.index], slot.parity);
                PHASE(DEQUANTISE);
                prepare(stage, stage_slot, slot.index);
            }
        }
    }
}

}  // namespace ptxlab
