// One function per instruction: cp.async, ldmatrix, stmatrix, mma.sync.
#pragma once

namespace ptxlab {

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Copy 16 bytes from global to shared memory, around the L1; zeros instead where `inside` is false (PTX ISA 9.7.9.25,
// src-size).
__device__ __forceinline__ void cp_async_16(void* destination, const void* source, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(destination)), "l"(source),
                 "r"(inside ? 16 : 0)
                 : "memory");
}

// Copy 4 bytes likewise, through the L1.
__device__ __forceinline__ void cp_async_4(void* destination, const void* source, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(destination)), "l"(source),
                 "r"(inside ? 4 : 0)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Load four 8 x 8 matrices of 16-bit elements; lane 8 i + j gives the address of row j of matrix i.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Load them transposed: a lane gets two elements of a column.
__device__ __forceinline__ void ldmatrix_x4_transposed(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Store four 8 x 8 matrices of 16-bit elements transposed: lane 8 i + j gives the address of column j of matrix i (PTX
// ISA 9.7.14.5.16).
__device__ __forceinline__ void store_matrices_transposed(unsigned column, const unsigned (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(column), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// Load 16 bytes of shared memory, in this place: the compiler does not move the load over other volatile instructions.
__device__ __forceinline__ uint4 load_shared_16(unsigned address) {
    uint4 q;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w)
                 : "r"(address)
                 : "memory");
    return q;
}
__device__ __forceinline__ unsigned load_shared_4(unsigned address) {
    unsigned q;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(q) : "r"(address) : "memory");
    return q;
}

// d += A B with A [16, k] and B [k, 8], where k elements fill 32 bytes; of two 4-bit elements in a byte the low nibble
// comes first.
#define PTXLAB_MMA(NAME, FORM)                                                                                         \
    __device__ __forceinline__ void NAME(int (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, \
                                         unsigned b1) {                                                                \
        asm volatile("mma.sync.aligned." FORM " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"       \
                     : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                                  \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                          \
    }
PTXLAB_MMA(mma_s8, "m16n8k32.row.col.s32.s8.s8.s32")
PTXLAB_MMA(mma_u8, "m16n8k32.row.col.s32.u8.s8.s32")
PTXLAB_MMA(mma_s4, "m16n8k64.row.col.s32.s4.s4.s32")
#undef PTXLAB_MMA

}  // namespace ptxlab
