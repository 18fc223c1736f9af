// Scores of attention in base 2: constants, and elements of the 16-bit words that they are made of.
#pragma once
#include <cuda_fp16.h>

namespace ptxlab {

constexpr float kLowestScore = -1e30f;  // below any score, yet finite
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// An element of a word of two, f16 or bf16.
template <bool BFLOAT16>
__device__ __forceinline__ float element(unsigned word, int half) {
    const unsigned bits = half ? word >> 16 : word & 0xffff;
    return BFLOAT16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(bits));
}

}  // namespace ptxlab
