// One function per instruction: wgmma m64nNk32 of 8-bit integers, and what orders it (PTX ISA 9.7.15). D [64, N] += A
// [64, 32] B [32, N]. Of D a thread holds, in d[4 j .. 4 j + 3], rows r, r, r + 8, r + 8 (r = 16 warp + lane / 4) and
// columns 8 j + 2 t, 8 j + 2 t + 1 (t = lane % 4), twice.
#pragma once
#include "mma.cuh"

namespace ptxlab {

using u64 = unsigned long long;

// Return the descriptor of a K-major matrix in rows of 128 bytes under the 128-byte swizzle, at an address that is a
// multiple of 1024; plus 2 for each 32 bytes further along K.
__device__ __forceinline__ u64 swizzled_128(const void* tile) {
    return u64(shared_address(tile) >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

// Return the same for rows of 64 bytes under the 64-byte swizzle, at a multiple of 512.
__device__ __forceinline__ u64 swizzled_64(const void* tile) {
    return u64(shared_address(tile) >> 4) | u64(1) << 16 | u64(512 >> 4) << 32 | u64(2) << 62;
}

// Call before the first wgmma that takes registers which other instructions wrote, accumulators included.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most PENDING groups still run.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Make what ordinary stores to shared memory wrote visible to wgmma and the copy engine.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Lower the registers per thread of a warp group to COUNT, for other warp groups to take (PTX ISA 9.7.19.5).
template <int COUNT>
__device__ __forceinline__ void lower_registers_to() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
// Raise the registers per thread of a warp group to COUNT: waits until others have given up as many.
template <int COUNT>
__device__ __forceinline__ void raise_registers_to() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Tell the compiler that a register may change here, so that it is not moved across an asynchronous instruction.
template <class Register, int COUNT>
__device__ __forceinline__ void pin(Register (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
__device__ __forceinline__ void pin(unsigned& v) { asm volatile("" : "+r"(v)::"memory"); }
__device__ __forceinline__ void pin(uint4& v) {
    asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory");
}

// clang-format off
// The operands of N / 2 accumulators, in the text and in the list of constraints: 4, 8, and then multiples of 8.
#define PTXLAB_D4 "%0, %1, %2, %3"
#define PTXLAB_R4 "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
#define PTXLAB_D8 PTXLAB_D4 ", %4, %5, %6, %7"
#define PTXLAB_D16 PTXLAB_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PTXLAB_D24 PTXLAB_D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define PTXLAB_D32 PTXLAB_D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define PTXLAB_D40 PTXLAB_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define PTXLAB_D48 PTXLAB_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define PTXLAB_D56 PTXLAB_D48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define PTXLAB_D64 PTXLAB_D56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define PTXLAB_D72 PTXLAB_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define PTXLAB_D80 PTXLAB_D72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define PTXLAB_D88 PTXLAB_D80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define PTXLAB_D96 PTXLAB_D88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define PTXLAB_D104 PTXLAB_D96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define PTXLAB_D112 PTXLAB_D104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define PTXLAB_D120 PTXLAB_D112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define PTXLAB_D128 PTXLAB_D120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define PTXLAB_MORE(i) \
    "+r"(d[(i)]), "+r"(d[(i) + 1]), "+r"(d[(i) + 2]), "+r"(d[(i) + 3]), \
    "+r"(d[(i) + 4]), "+r"(d[(i) + 5]), "+r"(d[(i) + 6]), "+r"(d[(i) + 7])
#define PTXLAB_R8 PTXLAB_MORE(0)
#define PTXLAB_R16 PTXLAB_R8, PTXLAB_MORE(8)
#define PTXLAB_R24 PTXLAB_R16, PTXLAB_MORE(16)
#define PTXLAB_R32 PTXLAB_R24, PTXLAB_MORE(24)
#define PTXLAB_R40 PTXLAB_R32, PTXLAB_MORE(32)
#define PTXLAB_R48 PTXLAB_R40, PTXLAB_MORE(40)
#define PTXLAB_R56 PTXLAB_R48, PTXLAB_MORE(48)
#define PTXLAB_R64 PTXLAB_R56, PTXLAB_MORE(56)
#define PTXLAB_R72 PTXLAB_R64, PTXLAB_MORE(64)
#define PTXLAB_R80 PTXLAB_R72, PTXLAB_MORE(72)
#define PTXLAB_R88 PTXLAB_R80, PTXLAB_MORE(80)
#define PTXLAB_R96 PTXLAB_R88, PTXLAB_MORE(88)
#define PTXLAB_R104 PTXLAB_R96, PTXLAB_MORE(96)
#define PTXLAB_R112 PTXLAB_R104, PTXLAB_MORE(104)
#define PTXLAB_R120 PTXLAB_R112, PTXLAB_MORE(112)
#define PTXLAB_R128 PTXLAB_R120, PTXLAB_MORE(120)

// wgmma_s8(d, a, b): A from four registers; with two descriptors: A from shared memory.
#define PTXLAB_WGMMA(NAME, TYPE, N, D, E0, E1, E2, E3, E4) \
    __device__ __forceinline__ void NAME(int(&d)[D], const unsigned(&a)[4], u64 b) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.s32." #TYPE ".s8 {" PTXLAB_D##D "}, {%" #E0 ", %" #E1 \
                     ", %" #E2 ", %" #E3 "}, %" #E4 ", 1;" \
                     : PTXLAB_R##D \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) \
                     : "memory"); \
    } \
    __device__ __forceinline__ void NAME(int(&d)[D], u64 a, u64 b) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.s32." #TYPE ".s8 {" PTXLAB_D##D "}, %" #E0 ", %" #E1 \
                     ", 1;" \
                     : PTXLAB_R##D \
                     : "l"(a), "l"(b) \
                     : "memory"); \
    }
#define PTXLAB_WGMMA_ALL(NAME, TYPE) \
    PTXLAB_WGMMA(NAME, TYPE, 8, 4, 4, 5, 6, 7, 8) \
    PTXLAB_WGMMA(NAME, TYPE, 16, 8, 8, 9, 10, 11, 12) \
    PTXLAB_WGMMA(NAME, TYPE, 32, 16, 16, 17, 18, 19, 20) \
    PTXLAB_WGMMA(NAME, TYPE, 48, 24, 24, 25, 26, 27, 28) \
    PTXLAB_WGMMA(NAME, TYPE, 64, 32, 32, 33, 34, 35, 36) \
    PTXLAB_WGMMA(NAME, TYPE, 80, 40, 40, 41, 42, 43, 44) \
    PTXLAB_WGMMA(NAME, TYPE, 96, 48, 48, 49, 50, 51, 52) \
    PTXLAB_WGMMA(NAME, TYPE, 112, 56, 56, 57, 58, 59, 60) \
    PTXLAB_WGMMA(NAME, TYPE, 128, 64, 64, 65, 66, 67, 68) \
    PTXLAB_WGMMA(NAME, TYPE, 144, 72, 72, 73, 74, 75, 76) \
    PTXLAB_WGMMA(NAME, TYPE, 160, 80, 80, 81, 82, 83, 84) \
    PTXLAB_WGMMA(NAME, TYPE, 176, 88, 88, 89, 90, 91, 92) \
    PTXLAB_WGMMA(NAME, TYPE, 192, 96, 96, 97, 98, 99, 100) \
    PTXLAB_WGMMA(NAME, TYPE, 208, 104, 104, 105, 106, 107, 108)\
    PTXLAB_WGMMA(NAME, TYPE, 224, 112, 112, 113, 114, 115, 116)\
    PTXLAB_WGMMA(NAME, TYPE, 240, 120, 120, 121, 122, 123, 124)\
    PTXLAB_WGMMA(NAME, TYPE, 256, 128, 128, 129, 130, 131, 132)
PTXLAB_WGMMA_ALL(wgmma_s8, s8)
PTXLAB_WGMMA_ALL(wgmma_u8, u8)  // A unsigned
// clang-format on
#undef PTXLAB_WGMMA_ALL
#undef PTXLAB_WGMMA

}  // namespace ptxlab
