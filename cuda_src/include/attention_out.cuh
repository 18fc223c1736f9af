// The end of decode attention on CUDA cores: what the slots of a block have summed up, divided by the sum of the weights.
#pragma once
#include <cuda_fp16.h>

namespace ptxlab {

// out[d] = (sum over slots of acc) * factor, f16 [128], always in the same order. A block is slots of 128 / DIMS threads each, and thread
// `part` of a slot has dims DIMS part ..; `sums` is 128 floats per warp.
template <int THREADS, int DIMS>
__device__ __forceinline__ void store_slots(float (&acc)[DIMS], float factor, float* sums, __half* out) {
    constexpr int PARTS = 128 / DIMS;
#pragma unroll
    for (int i = 0; i < DIMS; ++i)
#pragma unroll
        for (int mask = PARTS; mask < 32; mask *= 2) acc[i] += __shfl_xor_sync(0xffffffffu, acc[i], mask);
    const int lane = threadIdx.x % 32;
    if (lane < PARTS) {
#pragma unroll
        for (int i = 0; i < DIMS; ++i) sums[threadIdx.x / 32 * 128 + lane * DIMS + i] = acc[i];
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < THREADS / 32; ++warp) sum += sums[warp * 128 + threadIdx.x];
        out[threadIdx.x] = __float2half_rn(sum * factor);
    }
}

}  // namespace ptxlab
