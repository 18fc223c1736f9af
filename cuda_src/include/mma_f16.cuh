// Tensor cores on 16-bit elements, and 4- or 8-bit integers as FP16 subnormals: one function per instruction or
// dequantiser.
#pragma once
#include "dequant.cuh"

namespace ptxlab {

// d += A B with A [16, 16] f16, B [16, 8] f16, d f32 (PTX ISA 9.7.14.5.8). Not volatile: it may be scheduled freely.
__device__ __forceinline__ void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Transpose an 8 x 8 matrix of 16-bit elements, row g in lanes 4 g .. 4 g + 3 (PTX ISA 9.7.14.5.17).
__device__ __forceinline__ u32 transpose_8x8(u32 row) {
    u32 column;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
    return column;
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Return 2^x, 0 at -inf, and log2 x, both approximate.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Convert four unsigned bytes v of a word to FP16 subnormals v * 2^-24, which tensor cores take exactly and at their
// full rate: halves (e0, e2), (e1, e3). An MMA does not mind the order of what it sums up. 2 instructions.
__device__ __forceinline__ uint2 subnormal_u8(u32 q) { return {q & 0x00ff00ffu, __byte_perm(q, 0, 0x4341)}; }
// Convert eight nibbles likewise: halves (e0, e2), (e1, e3), then 16 times (e4, e6), (e5, e7); the 16 is folded into
// the other operand. 5 instructions, one of them not the ALU's, which has the most to do.
__device__ __forceinline__ uint4 subnormal_u4(u32 q) {
    const u32 up = __byte_perm(q, 0, 0x4341), high = up & 0x00f000f0u;
    return {q & 0x000f000fu, as_bits(__hsub2(as_half2(up), as_half2(high))), q & 0x00f000f0u, high};
}
// Convert likewise, but leave the high nibbles in their bytes: the sums of the low ones have to be subtracted from the
// bytes' sums. 4 instructions.
__device__ __forceinline__ uint4 subnormal_u4_bytes(u32 q) {
    const uint2 bytes = subnormal_u8(q);
    return {bytes.x & 0x000f000fu, bytes.y & 0x000f000fu, bytes.x, bytes.y};
}

// Convert a word's integers of 4 or 8 bits to pairs of operand halves; `subnormals_in_bytes` leaves high nibbles in
// their bytes.
template <int BITS_PER_INTEGER>
__device__ __forceinline__ void subnormals(u32 (&h)[16 / BITS_PER_INTEGER], u32 word) {
    if constexpr (BITS_PER_INTEGER == 4) {
        const uint4 v = subnormal_u4(word);
        h[0] = v.x, h[1] = v.y, h[2] = v.z, h[3] = v.w;
    } else {
        const uint2 v = subnormal_u8(word);
        h[0] = v.x, h[1] = v.y;
    }
}
template <int BITS_PER_INTEGER>
__device__ __forceinline__ void subnormals_in_bytes(u32 (&h)[16 / BITS_PER_INTEGER], u32 word) {
    if constexpr (BITS_PER_INTEGER == 4) {
        const uint4 v = subnormal_u4_bytes(word);
        h[0] = v.x, h[1] = v.y, h[2] = v.z, h[3] = v.w;
    } else {
        subnormals<8>(h, word);
    }
}

}  // namespace ptxlab
