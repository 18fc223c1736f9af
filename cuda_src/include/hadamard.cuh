// Rotation of queries and keys by a Hadamard matrix, for a cache whose keys are rotated.
#pragma once
#include "pack.cuh"

namespace ptxlab {

// Rotate a head in place: multiply each block of min(HEAD_DIM, 128) dims by the Hadamard matrix in Sylvester's order
// over the root of the block's size. LANES neighbouring lanes share the head. Element i of a lane is dim (i / RUN *
// LANES + lane) * RUN + i % RUN. First sums and differences of dims 1 apart, then 2, 4 .. apart, at last a product with
// the scale: each is rounded to f32, so that every kernel and `reference.rotate_heads` give the same bits. All lanes of
// the warp take part.
template <int RUN, int LANES, int COUNT>
__device__ __forceinline__ void rotate_head(float (&x)[COUNT], int lane) {
    constexpr int kDims = COUNT * LANES, kBlock = kDims < 128 ? kDims : 128;
    static_assert(kBlock == 64 || kBlock == 128, "heads of 64, 128 or 256 dims");
#pragma unroll
    for (int apart = 1; apart < kBlock; apart *= 2) {
        if (apart >= RUN && apart < RUN * LANES) {  // the other dim is in another lane
            const int mask = apart / RUN;
            const float sign = lane & mask ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) x[i] = fmaf(x[i], sign, __shfl_xor_sync(~0u, x[i], mask));
        } else {
            const int step = apart < RUN ? apart : apart / LANES;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                if (i & step) continue;
                const float sum = __fadd_rn(x[i], x[i + step]);
                x[i + step] = __fsub_rn(x[i], x[i + step]);
                x[i] = sum;
            }
        }
    }
    constexpr float kScale = kBlock == 64 ? 0.125f : 0.0883883461f;  // f32(1 / sqrt(block))
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x[i] = __fmul_rn(x[i], kScale);
}

// Rotate a lane's words of a query in place by `rotate_head`. Return the largest magnitude of the lane's elements, or
// NaN if one of them is.
template <int RUN, int LANES, int WORDS, int PER_WORD>
__device__ __forceinline__ float rotate_query(float (&x)[WORDS][PER_WORD], int lane) {
    float (&dims)[WORDS * PER_WORD] = reinterpret_cast<float (&)[WORDS * PER_WORD]>(x);
    rotate_head<RUN, LANES>(dims, lane);
    float largest = 0;
#pragma unroll
    for (int i = 0; i < WORDS * PER_WORD; ++i) largest = max_nan(largest, fabsf(dims[i]));
    return largest;
}

}  // namespace ptxlab
