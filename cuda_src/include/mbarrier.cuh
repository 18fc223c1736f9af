// One function per instruction: mbarriers, and the copies that complete on them; and the place in a ring that they
// guard (PTX ISA 9.7.13.15, 9.7.9.25, 9.7.9.27).
#pragma once
#include "mma.cuh"

namespace ptxlab {

using u64 = unsigned long long;

// A tensor map: a kernel takes it by value, `const __grid_constant__ TensorMap`, and has boxes of a matrix copied by
// it.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// A slot of a ring of COUNT slots, and the parity of its current round.
template <int COUNT>
struct Slot {
    int index = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++index == COUNT) index = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void mbarrier_init(u64* barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Make the initialisation of mbarriers visible to the other blocks of the cluster, after its next barrier.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrive, and let the phase wait for `bytes` more from the copy engine.
__device__ __forceinline__ void mbarrier_arrive_expect(u64* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Return true in one lane of a converged warp: the compiler knows that what follows runs once, and needs no loop over
// lanes.
__device__ __forceinline__ bool elect() {
    unsigned elected;
    asm volatile("{\n.reg .pred chosen;\nelect.sync _|chosen, 0xffffffff;\nselp.u32 %0, 1, 0, chosen;\n}"
                 : "=r"(elected));
    return elected;
}

// Wait until the phase of this parity is complete.
__device__ __forceinline__ void mbarrier_wait(u64* barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra WAIT;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Copy `bytes` (a multiple of 16) from global to shared memory; they count at an mbarrier. The first form takes
// addresses of shared memory, so that a loop can count them up.
__device__ __forceinline__ void bulk_load(unsigned destination, const void* source, unsigned bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void bulk_load(void* destination, const void* source, unsigned bytes, u64* barrier) {
    bulk_load(shared_address(destination), source, bytes, shared_address(barrier));
}

// Copy likewise what is read once: the L2 may forget it first (the policy is createpolicy's evict_first of everything).
__device__ __forceinline__ void bulk_load_once(void* destination, const void* source, unsigned bytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(destination)),
        "l"(source), "r"(bytes), "r"(shared_address(barrier)), "l"(0x12f0000000000000ull)
        : "memory");
}

// Copy the map's box from (row, column) on to shared memory; what lies outside the matrix comes as zeros, and counts as
// bytes all the same.
__device__ __forceinline__ void tensor_load(unsigned destination, const TensorMap* map, int column, int row,
                                            unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(destination),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void tensor_load(void* destination, const TensorMap* map, int column, int row,
                                            u64* barrier) {
    tensor_load(shared_address(destination), map, column, row, shared_address(barrier));
}

}  // namespace ptxlab
