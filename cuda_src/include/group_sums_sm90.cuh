// Sums of a group of channels under wgmma, which begin at 1.5 * 2^23, scaled into f32 totals.
#pragma once
#include <cuda_fp16.h>

#include "pack.cuh"

namespace ptxlab {

constexpr int ZERO = 0x4b400000;  // what a sum begins at: as bits SHIFT, whose last bit counts 1

// total += sum * (x * w) for a warp's 16 rows sum from ZERO on; `scales` are those of the tokens,
// eight halves each. A product counts UNIT times. INT4: both operands are, and their sums have 14 bits: times an
// f16, exact.
template <bool INT4, int UNIT, int SUMS>
__device__ __forceinline__ void add_group(float (&total)[SUMS], const int (&sum)[SUMS], __half2 rows,
                                          const __half* scales, int lane) {
    const float counts = 1.0f / UNIT;
    const float w[2] = {__low2float(rows) * counts, __high2float(rows) * counts};
    const float off[2] = {-SHIFT * w[0], -SHIFT * w[1]};
#pragma unroll
    for (int j = 0; j < SUMS / 4; ++j) {
        float x[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) x[c] = __half2float(scales[(j * 8 + lane % 4 * 2 + c) * 8]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float shifted = __int_as_float(sum[4 * j + e]);
            float& to = total[4 * j + e];
            if (INT4) to = __fmaf_rn(__fmaf_rn(shifted, w[e / 2], off[e / 2]), x[e % 2], to);
            else to = __fmaf_rn(__fadd_rn(shifted, -SHIFT), __fmul_rn(x[e % 2], w[e / 2]), to);
        }
    }
}

}  // namespace ptxlab
