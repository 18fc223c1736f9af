// One function per instruction: mbarriers, and the copies that complete on them; and the place in a ring that they guard (PTX ISA 9.7.13.15, 9.7.9.25, 9.7.9.27).
#pragma once
#include "mma.cuh"

namespace ptxlab {

using u64 = unsigned long long;

// What a kernel takes by value, `const __grid_constant__ TensorMap`, to have a box of a matrix copied.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// A place of a ring of COUNT, and the parity of its current round.
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

// Makes the initialisation visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrive, and have the phase wait for `bytes` more from the copy engine.
__device__ __forceinline__ void mbarrier_arrive_expect(u64* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// True in one lane of a warp that is all here: the compiler knows that what follows runs once, and needs no loop over lanes.
__device__ __forceinline__ bool elect() {
    unsigned elected;
    asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(elected));
    return elected;
}

// Until the phase of this parity is complete.
__device__ __forceinline__ void mbarrier_wait(u64* barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra WAIT;\n"
        "}" ::"r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

// Shared memory to registers, just here: the compiler does not move it.
__device__ __forceinline__ uint4 load_shared_16(const void* p) {
    uint4 q;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "r"(shared_address(p)) : "memory");
    return q;
}
__device__ __forceinline__ unsigned load_shared_4(const void* p) {
    unsigned q;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(q) : "r"(shared_address(p)) : "memory");
    return q;
}

// `bytes` (a multiple of 16) from global to shared memory.
__device__ __forceinline__ void bulk_load(void* to, const void* from, unsigned bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// The map's box from (row, column) on; what lies outside the matrix comes as zeros, and counts as bytes all the same.
__device__ __forceinline__ void tensor_load(void* to, const TensorMap* map, int column, int row, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     shared_address(to)),
                 "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
                 : "memory");
}

}  // namespace ptxlab
