// Dequantisers of one micro-kernel word: eight 4-bit weights e0..e7 in a u32, the low nibbles of bytes 0..3 are e0..e3,
// the high nibbles e4..e7. One function each; `scale` is the group's level-2 scale, `offset` one byte repeated in all
// four. The packed 32-bit operations are PTX, so that the emulator's lane check can be asked for on the very
// instruction.
#pragma once
#include <cuda_fp16.h>

namespace ptxlab {

using u32 = unsigned int;

// Bytes e0..e3 in x, e4..e7 in y, each 0..15: 2 LOP3, 1 SHF.
__device__ __forceinline__ uint2 unpack_u4(u32 q) { return {q & 0x0f0f0f0fu, (q >> 4) & 0x0f0f0f0fu}; }

// Four bytes at once: a * scale + offset. No byte carries while every a * scale + offset <= 255.
__device__ __forceinline__ u32 mad_u8x4(u32 a, u32 scale, u32 offset) {
    u32 d;
    asm("mad.lo.u32 %0, %1, %2, %3; // @lanes d:u8x4 a:u8x4 b:u32 c:u8x4" : "=r"(d) : "r"(a), "r"(scale), "r"(offset));
    return d;
}

// Four bytes at once: a * scale. No byte carries while every a * scale <= 255.
__device__ __forceinline__ u32 mul_u8x4(u32 a, u32 scale) {
    u32 d;
    asm("mul.lo.u32 %0, %1, %2; // @lanes d:u8x4 a:u8x4 b:u32" : "=r"(d) : "r"(a), "r"(scale));
    return d;
}

// LiquidQuant (LiquidGEMM section 4): q * scale + (128 + min), then the top bits flipped: s8. 7 instructions.
__device__ __forceinline__ uint2 dequant_lqq(u32 q, u32 scale, u32 offset) {
    uint2 d = unpack_u4(q);
    return {mad_u8x4(d.x, scale, offset) ^ 0x80808080u, mad_u8x4(d.y, scale, offset) ^ 0x80808080u};
}

// LiquidQuant left unsigned: weight + 128 as u8; the epilogue subtracts 128 times the token sum. 5 instructions.
__device__ __forceinline__ uint2 dequant_lqq_unsigned(u32 q, u32 scale, u32 offset) {
    uint2 d = unpack_u4(q);
    return {mad_u8x4(d.x, scale, offset), mad_u8x4(d.y, scale, offset)};
}

// QoQ (QServe section 5.2.3): multiply, then add -z * scale (modulo 256) byte by byte. 13 instructions on Hopper.
__device__ __forceinline__ uint2 dequant_qoq_vadd4(u32 q, u32 scale, u32 offset) {
    uint2 d = unpack_u4(q);
    return {__vadd4(mul_u8x4(d.x, scale), offset), __vadd4(mul_u8x4(d.y, scale), offset)};
}

// QoQ per channel (QServe section 5.2.2): only unpack, the zero point is left to the epilogue. 3 instructions.
__device__ __forceinline__ uint2 dequant_qoq_channel(u32 q) { return unpack_u4(q); }

// Groups of SIZE channels in a block of a strip, which has 128 channels; 0 for constants per channel.
template <int SIZE>
constexpr int STRIP_GROUPS = 128 / SIZE;
template <>
constexpr int STRIP_GROUPS<0> = 0;

// Bytes of a block of a strip: 16 rows x 128 channels. LDS.128 at 512 * unit + 16 * lane loads the lane's 32 weights of
// 64 channels; behind these are 32 bytes of constants per group, 4 bytes at 4 * g: scale g, offset g, scale g + 8,
// offset g + 8.
template <int SIZE>
constexpr int STRIP_BLOCK = 1024 + STRIP_GROUPS<SIZE> * 32;

// A lane's constants of a block, a register per group; at least one register, unused without groups.
template <int SIZE>
using StripConstants = u32[SIZE == 0 ? 1 : STRIP_GROUPS<SIZE>];

// Dequantise the 32 weights of lane 4 g + t in 64 channels of a strip (layout `strips`), as operand A of two MMAs of 32
// channels: word j has row g + 8 (j & 1) of MMA j >> 1. `k_unit`: which half of the block, 0 or 1. Result: w + 128 as
// u8, or w as s8; without groups (SIZE 0) q as it is.
template <bool AS_S8, int SIZE>
__device__ __forceinline__ void dequant_strip(const uint4& weights, const StripConstants<SIZE>& constants, int k_unit,
                                              u32 (&a)[2][4]) {
    const u32 words[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        uint2 d;
        if constexpr (SIZE == 0) {
            d = dequant_qoq_channel(words[j]);
        } else {
            const u32 pair = constants[(k_unit * 64 + j / 2 * 32) / SIZE] >> 16 * (j & 1);
            const u32 scale = pair & 0xff, offset = __byte_perm(pair, 0, 0x1111);
            d = AS_S8 ? dequant_lqq(words[j], scale, offset) : dequant_lqq_unsigned(words[j], scale, offset);
        }
        a[j / 2][j & 1] = d.x;        // k 4 t to 4 t + 3, t = lane % 4; j odd: row + 8
        a[j / 2][2 + (j & 1)] = d.y;  // k 16 + 4 t to 16 + 4 t + 3
    }
}

// (a & mask) | magic in one LOP3.
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 magic) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(magic));
    return d;
}

__device__ __forceinline__ __half2 as_half2(u32 bits) { return *reinterpret_cast<__half2*>(&bits); }
__device__ __forceinline__ u32 as_bits(__half2 h) { return *reinterpret_cast<u32*>(&h); }

// Convert nibbles to FP16 through the magic number 1024 (QServe section 5.3); halves (e0, e2), (e1, e3), (e4, e6), (e5,
// e7). 9 instructions: a nibble in bits 4..7 counts 16, and (1024 + 16 v) / 16 - 64 = v without a rounding.
__device__ __forceinline__ uint4 dequant_u4_f16(u32 q) {
    const u32 up = q >> 8;
    const __half2 bias = as_half2(0x64006400u), sixteenth = as_half2(0x2c002c00u), minus64 = as_half2(0xd400d400u);
    return {as_bits(__hsub2(as_half2(and_or(q, 0x000f000fu, 0x64006400u)), bias)),
            as_bits(__hsub2(as_half2(and_or(up, 0x000f000fu, 0x64006400u)), bias)),
            as_bits(__hfma2(as_half2(and_or(q, 0x00f000f0u, 0x64006400u)), sixteenth, minus64)),
            as_bits(__hfma2(as_half2(and_or(up, 0x00f000f0u, 0x64006400u)), sixteenth, minus64))};
}

// Return the biases that dequant_u4_f16_minus subtracts for a zero point 0..15, each in both halves: 1024 + zero for
// nibbles that count 1, and -(64 + zero) for nibbles that count 16. Exact.
__device__ __forceinline__ uint2 bias_u4_f16(__half zero) {
    return {as_bits(__half2half2(__hadd(__ushort_as_half(0x6400), zero))),
            as_bits(__half2half2(__hsub(__ushort_as_half(0xd400), zero)))};
}

// Convert likewise and subtract the zero point by the instruction that subtracts the bias: v - zero, exact, in no more
// instructions. `bias`: of bias_u4_f16.
__device__ __forceinline__ uint4 dequant_u4_f16_minus(u32 q, uint2 bias) {
    const u32 up = q >> 8;
    const __half2 sixteenth = as_half2(0x2c002c00u);
    return {as_bits(__hsub2(as_half2(and_or(q, 0x000f000fu, 0x64006400u)), as_half2(bias.x))),
            as_bits(__hsub2(as_half2(and_or(up, 0x000f000fu, 0x64006400u)), as_half2(bias.x))),
            as_bits(__hfma2(as_half2(and_or(q, 0x00f000f0u, 0x64006400u)), sixteenth, as_half2(bias.y))),
            as_bits(__hfma2(as_half2(and_or(up, 0x00f000f0u, 0x64006400u)), sixteenth, as_half2(bias.y)))};
}

// Convert nibbles to FP16 subnormals v * 2^-24 by AND alone; halves in the same order. 7 instructions.
__device__ __forceinline__ uint4 dequant_u4_f16_subnormal(u32 q) {
    return {q & 0x000f000fu, (q >> 8) & 0x000f000fu, (q >> 4) & 0x000f000fu, (q >> 12) & 0x000f000fu};
}

// Put halves (e0, e2), (e1, e3), (e4, e6), (e5, e7) in logical order: 4 PRMT. An MMA does not need it.
__device__ __forceinline__ uint4 logical_order(uint4 h) {
    return {__byte_perm(h.x, h.y, 0x5410), __byte_perm(h.x, h.y, 0x7632), __byte_perm(h.z, h.w, 0x5410),
            __byte_perm(h.z, h.w, 0x7632)};
}

}  // namespace ptxlab
