// One function per instruction: a block's named barriers (PTX ISA 9.7.13.1). Barrier 0 is that of __syncthreads.
#pragma once

namespace ptxlab {

// Wait until `threads` threads, whole warps, have come to the barrier.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrive at the barrier without waiting for the others.
__device__ __forceinline__ void arrive_threads(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Synchronise the 128 threads of one warp group.
__device__ __forceinline__ void sync_warp_group(int group) { sync_threads(1 + group, 128); }

// Synchronise warp group 0 or 1 by an instruction with constants for each, so that the compiler keeps two instructions
// where one with registers would do.
__device__ __forceinline__ void sync_one_of_two(int group) {
    if (group == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
    else asm volatile("bar.sync 2, 128;" ::: "memory");
}

}  // namespace ptxlab
