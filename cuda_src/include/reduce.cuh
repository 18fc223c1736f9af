// One number from all threads of a block; every thread gets it. `partial` is 32 words of shared memory.
#pragma once

namespace ptxlab {

template <int BLOCK>
__device__ __forceinline__ unsigned block_max(unsigned value, unsigned* partial) {
    value = __reduce_max_sync(0xffffffffu, value);
    if (BLOCK == 32) return value;
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    const unsigned lane = threadIdx.x % 32;
    value = __reduce_max_sync(0xffffffffu, lane < BLOCK / 32 ? partial[lane] : 0u);
    __syncthreads();  // `partial` is free again
    return value;
}

template <int BLOCK>
__device__ __forceinline__ int block_sum(int value, unsigned* partial) {
    value = __reduce_add_sync(0xffffffffu, value);
    if (BLOCK == 32) return value;
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    const unsigned lane = threadIdx.x % 32;
    value = __reduce_add_sync(0xffffffffu, lane < BLOCK / 32 ? int(partial[lane]) : 0);
    __syncthreads();
    return value;
}

}  // namespace ptxlab
