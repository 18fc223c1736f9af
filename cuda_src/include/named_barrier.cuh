// One function per instruction: a block's named barriers (PTX ISA 9.7.13.1). Barrier 0 is that of __syncthreads.
#pragma once

namespace ptxlab {

// Until so many threads, whole warps, have come to the barrier.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts as having come, and does not wait for the others.
__device__ __forceinline__ void arrive_threads(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The 128 threads of one warp group alone.
__device__ __forceinline__ void sync_warp_group(int group) { sync_threads(1 + group, 128); }

// The same of two warp groups, by constants: so the compiler keeps a barrier of each, where one with registers would do.
__device__ __forceinline__ void sync_one_of_two(int group) {
    if (group == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
    else asm volatile("bar.sync 2, 128;" ::: "memory");
}

}  // namespace ptxlab
