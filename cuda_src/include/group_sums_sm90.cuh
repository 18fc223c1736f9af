// Sums of a group of channels under wgmma, which begin at 1.5 * 2^23, scaled into f32 totals.
#pragma once
#include <cuda_fp16.h>

#include "pack.cuh"

namespace ptxlab {

constexpr int ZERO = 0x4b400000;  // what a sum begins at: as bits SHIFT, whose last bit counts 1

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
