// Reductions over the threads of a block; every thread gets the result. `partial` is 32 words of shared memory.
#pragma once

namespace ptxlab {

// Return the sum of 16 signed bytes, plus `sum`.
__device__ __forceinline__ int sum_of_bytes(const uint4& q, int sum) {
    sum = __dp4a(int(q.x), 0x01010101, __dp4a(int(q.y), 0x01010101, sum));
    return __dp4a(int(q.z), 0x01010101, __dp4a(int(q.w), 0x01010101, sum));
}

// Return the sum of a block's integers.
template <int BLOCK>
__device__ __forceinline__ int block_sum(int value, unsigned* partial) {
    value = __reduce_add_sync(0xffffffffu, value);
    if (BLOCK == 32) return value;
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    const unsigned lane = threadIdx.x % 32;
    value = __reduce_add_sync(0xffffffffu, lane < BLOCK / 32 ? int(partial[lane]) : 0);
    __syncthreads();  // `partial` is free again
    return value;
}

// Return the identity of a maximum.
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// Return the maximum of a block's floats, NaN left out.
template <int BLOCK>
__device__ __forceinline__ float block_max(float value, float* partial) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, mask));
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < BLOCK / 32; ++warp) value = fmaxf(value, partial[warp]);
    __syncthreads();
    return value;
}

// Return the sum of a block's floats, in a fixed order: two runs give the same bits.
template <int BLOCK>
__device__ __forceinline__ float block_sum(float value, float* partial) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < BLOCK / 32; ++warp) sum += partial[warp];
    __syncthreads();
    return sum;
}

}  // namespace ptxlab
