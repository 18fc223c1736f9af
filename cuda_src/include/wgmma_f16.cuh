// One function per instruction: wgmma m64nNk16 of f16 operands into f32 (PTX ISA 9.7.15.5). D [64, N] += A [64, 16] B
// [16, N]; of D a thread holds what wgmma.cuh says. wgmma_scores begins sums (D = A B) where `begins`; B is K-major, rows
// of B^T. wgmma_values takes A from registers and an MN-major B, its rows as they lie.
#pragma once
#include "wgmma.cuh"

namespace ptxlab {

// Return the descriptor of an MN-major matrix [K, 64 m] of f16 in columns of 64 elements, 128 bytes a row, under the
// 128-byte swizzle: `columns` bytes from 64 elements to the next 64; plus 2048 bytes for each 16 rows further along K.
__device__ __forceinline__ u64 swizzled_128_rows(const void* tile, unsigned columns) {
    return u64(shared_address(tile) >> 4) | u64(columns >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

// clang-format off
#define PTXLAB_F8(i) \
    "+f"(d[(i)]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), \
    "+f"(d[(i) + 4]), "+f"(d[(i) + 5]), "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define PTXLAB_F32 PTXLAB_F8(0), PTXLAB_F8(8), PTXLAB_F8(16), PTXLAB_F8(24)
#define PTXLAB_F64 PTXLAB_F32, PTXLAB_F8(32), PTXLAB_F8(40), PTXLAB_F8(48), PTXLAB_F8(56)
#define PTXLAB_F128 PTXLAB_F64, PTXLAB_F8(64), PTXLAB_F8(72), PTXLAB_F8(80), PTXLAB_F8(88), PTXLAB_F8(96), \
    PTXLAB_F8(104), PTXLAB_F8(112), PTXLAB_F8(120)
#define PTXLAB_WGMMA_F16(N, D, E0, E1, E2, E3, E4) \
    __device__ __forceinline__ void wgmma_scores(float(&d)[D], u64 a, u64 b, int begins) { \
        asm volatile("{\n.reg .pred add;\nsetp.eq.s32 add, %" #E2 ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" PTXLAB_D##D "}, %" #E0 ", %" #E1 \
                     ", add, 1, 1, 0, 0;\n}" \
                     : PTXLAB_F##D \
                     : "l"(a), "l"(b), "r"(begins) \
                     : "memory"); \
    } \
    __device__ __forceinline__ void wgmma_values(float(&d)[D], const unsigned(&a)[4], u64 b) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" PTXLAB_D##D "}, {%" #E0 ", %" #E1 \
                     ", %" #E2 ", %" #E3 "}, %" #E4 ", 1, 1, 1, 1;" \
                     : PTXLAB_F##D \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) \
                     : "memory"); \
    }
PTXLAB_WGMMA_F16(64, 32, 32, 33, 34, 35, 36)
PTXLAB_WGMMA_F16(128, 64, 64, 65, 66, 67, 68)
PTXLAB_WGMMA_F16(256, 128, 128, 129, 130, 131, 132)
// clang-format on
#undef PTXLAB_WGMMA_F16

}  // namespace ptxlab
