// The end of decode attention on CUDA cores: add up the sums of a block's slots, divide by the sum of weights, store.
#pragma once
#include <cuda_fp16.h>

namespace ptxlab {

// Add up 2 HALF dims over lanes by recursive halving. A lane sends one half of its dims to its partner and adds the
// partner's sums of the half that it keeps, until four dims are left, of which `dim` is the first: a quarter of the
// shuffles that sums of all dims in all lanes would take.
template <int HALF, int MASK, int DIMS>
__device__ __forceinline__ void sum_lanes(float (&acc)[DIMS], int& dim) {
    const bool upper = threadIdx.x & MASK;
    dim += upper ? HALF : 0;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        const float other = __shfl_xor_sync(0xffffffffu, upper ? acc[i] : acc[i + HALF], MASK);
        acc[i] = (upper ? acc[i + HALF] : acc[i]) + other;
    }
    if constexpr (HALF > 4) sum_lanes<HALF / 2, MASK / 2>(acc, dim);
}

// Store out[d] = (sum over slots of acc) * factor, f16 [128], always added in the same order. A slot is 128 / DIMS
// threads of the block, whose thread `part` has dims DIMS part ..; `sums`: 128 floats of shared memory per warp,
// aligned to 16 bytes.
template <int THREADS, int DIMS>
__device__ __forceinline__ void store_slots(float (&acc)[DIMS], float factor, float* sums, __half* out) {
    constexpr int PARTS = 128 / DIMS;
    const int lane = threadIdx.x % 32;
    int dim = lane % PARTS * DIMS;
    sum_lanes<DIMS / 2, 16>(acc, dim);
    *reinterpret_cast<float4*>(sums + threadIdx.x / 32 * 128 + dim) = make_float4(acc[0], acc[1], acc[2], acc[3]);
    __syncthreads();
    if (threadIdx.x < 128) {
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < THREADS / 32; ++warp) sum += sums[warp * 128 + threadIdx.x];
        out[threadIdx.x] = __float2half_rn(sum * factor);
    }
}

}  // namespace ptxlab
