// One function per instruction: mma.sync of 4-bit integers, and a copy of four bytes (PTX ISA 9.7.14.5, 9.7.9.25).
#pragma once
#include "mma.cuh"

namespace ptxlab {

// d += A B with A [16, 64] s4, B [64, 8] s4: the registers of m16n8k32 with two elements per byte, the low nibble first.
__device__ __forceinline__ void mma_s4(int (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                       unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 4 bytes, global -> shared; zeros instead where `inside` is false.
__device__ __forceinline__ void cp_async_4(void* to, const void* from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(inside ? 4 : 0)
                 : "memory");
}

}  // namespace ptxlab
