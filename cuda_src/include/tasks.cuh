// One function per instruction: a counter of tasks in shared memory, and whether a task's operands are there (PTX ISA
// 9.7.9.8, 9.7.13.5, 9.7.13.15).
#pragma once
#include "mbarrier.cuh"

namespace ptxlab {

// Load a counter: its reader sees what the thread that wrote it by `compare_and_swap` saw and did before.
__device__ __forceinline__ int load_acquire(const int* counter) {
    int value;
    asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(value) : "r"(shared_address(counter)) : "memory");
    return value;
}

// Write `value` if the counter is `expected`; returns what it was.
__device__ __forceinline__ int compare_and_swap(int* counter, int expected, int value) {
    int previous;
    asm volatile("atom.acq_rel.cta.shared.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(previous)
                 : "r"(shared_address(counter)), "r"(expected), "r"(value)
                 : "memory");
    return previous;
}

// Return whether the phase of this parity is complete.
__device__ __forceinline__ bool mbarrier_test(u64* barrier, unsigned parity) {
    unsigned done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done;
}

}  // namespace ptxlab
