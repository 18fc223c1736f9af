// Sums of a group of channels under wgmma, which begin at 1.5 * 2^23, scaled into f32 totals under the next group's.
#pragma once
#include <cuda_fp16.h>

#include "pack.cuh"
#include "timeline.cuh"
#include "wgmma.cuh"

namespace ptxlab {

constexpr int ZERO = 0x4b400000;  // what a sum begins at: as bits SHIFT, whose last bit counts 1

// The words of 64 channels as the operands of two wgmmas: s4 in the upper halves of bytes, so that they count 16 times.
__device__ __forceinline__ void upper_halves(unsigned (*a)[4], uint4 packed) {
    const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        a[j / 2][j & 1] = words[j] & 0xf0f0f0f0u;             // k 4 t .. of row g or g + 8
        a[j / 2][2 + (j & 1)] = words[j] << 4 & 0xf0f0f0f0u;  // k 16 + 4 t ..
    }
}

// Before a group's first wgmma.
template <int SUMS>
__device__ __forceinline__ void begin_sums(int (&sum)[SUMS]) {
#pragma unroll
    for (int k = 0; k < SUMS; ++k) sum[k] = ZERO;
    pin(sum);
    wgmma_fence();
}

// All groups of a tile, one scaled while the next one's wgmmas run. fetch(i) reads the next group's words, begin(sum, i)
// starts its wgmmas, finish(sum, i, last) scales the oldest group's sums; i: 0 and 1 in turn.
template <int SUMS, class Fetch, class Begin, class Finish>
__device__ __forceinline__ void scale_behind(int groups, const Fetch& fetch, const Begin& begin,
                                             const Finish& finish TIMELINE_PARAMETER) {
    int sum[2][SUMS];
    const auto settle = [&](int i) {
        PHASE(WAIT_MMA, 0);
        wgmma_wait<0>();
        pin(sum[i]);
    };
    fetch(0);
    begin(sum[0], 0);
#pragma unroll 1
    for (; groups > 2; groups -= 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            fetch(1 - i);
            settle(i);
            begin(sum[1 - i], 1 - i);
            finish(sum[i], i, false);
        }
    }
    if (groups == 2) {
        fetch(1);
        settle(0);
        begin(sum[1], 1);
        finish(sum[0], 0, false);
        settle(1);
        finish(sum[1], 1, true);
    } else {
        settle(0);
        finish(sum[0], 0, true);
    }
}

// The scales of a tile's tokens for one group, each the first of eight halves, as floats in the order in which
// `add_group` takes them: sixteen tokens 8 j + 2 t + c are four times t, one for each thread of a quad, of j and c.
template <int TOKENS>
constexpr int SPREAD_BYTES = (TOKENS + 15) / 16 * 64;
template <int TOKENS, int THREADS>
__device__ __forceinline__ void spread_scales(float* to, const __half* from, int thread) {
#pragma unroll 1
    for (int m = thread; m < SPREAD_BYTES<TOKENS> / 4; m += THREADS)
        to[m / 16 * 16 + m / 2 % 4 * 4 + m / 8 % 2 * 2 + m % 2] = m < TOKENS ? __half2float(from[m * 8]) : 0.0f;
}

// total += sum * (x * w) for a warp's 16 rows sum from ZERO on; `scales` are those of the tokens, spread. A product
// counts UNIT times. INT4: both operands are, and their sums have 14 bits: times an f16, exact.
template <bool INT4, int UNIT, int SUMS>
__device__ __forceinline__ void add_group(float (&total)[SUMS], const int (&sum)[SUMS], __half2 rows, unsigned scales,
                                          int lane) {
    const float counts = 1.0f / UNIT;
    const float w[2] = {__low2float(rows) * counts, __high2float(rows) * counts};
    const float off[2] = {-SHIFT * w[0], -SHIFT * w[1]};
#pragma unroll
    for (int i = 0; i < (SUMS + 7) / 8; ++i) {
        const uint4 four = load_shared_16(scales + (i * 4 + lane % 4) * 16);
        const float x[4] = {__uint_as_float(four.x), __uint_as_float(four.y), __uint_as_float(four.z),
                            __uint_as_float(four.w)};
#pragma unroll
        for (int e = 8 * i; e < min(8 * i + 8, SUMS); ++e) {
            const float shifted = __int_as_float(sum[e]), of_token = x[e / 4 % 2 * 2 + e % 2];
            const int row = e / 2 % 2;
            if (INT4) total[e] = __fmaf_rn(__fmaf_rn(shifted, w[row], off[row]), of_token, total[e]);
            else total[e] = __fmaf_rn(__fadd_rn(shifted, -SHIFT), __fmul_rn(of_token, w[row]), total[e]);
        }
    }
}

}  // namespace ptxlab
