// One function per instruction: blocks of a cluster and their shared memory (PTX ISA 9.7.13.3, 9.7.9.23, 9.7.9.12).
#pragma once
#include "mbarrier.cuh"

namespace ptxlab {

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Arrive at the cluster's barrier, and wait at it: every thread of every block does each once; work may lie between the
// two.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Return the address that `p` of this block's shared memory has in block `rank` of the cluster.
__device__ __forceinline__ unsigned address_in_block(const void* p, unsigned rank) {
    unsigned remote_address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_address) : "r"(shared_address(p)), "r"(rank));
    return remote_address;
}

// Store a word to another block's shared memory; its bytes count at an mbarrier of that block.
__device__ __forceinline__ void store_async(unsigned address, unsigned word, unsigned barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address),
                 "r"(word), "r"(barrier)
                 : "memory");
}

// Store 16 bytes to another block's shared memory; they count at an mbarrier of that block.
__device__ __forceinline__ void store_async_16(unsigned address, int a, int b, int c, int d, unsigned barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            address),
        "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier)
        : "memory");
}

}  // namespace ptxlab
