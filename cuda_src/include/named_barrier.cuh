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

// The same of two warp groups, by barriers that are constants.
__device__ __forceinline__ void sync_one_of_two(int group) {
    if (group == 0) sync_threads(1, 128);
    else sync_threads(2, 128);
}

}  // namespace ptxlab
