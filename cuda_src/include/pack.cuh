// Helpers of quantisation: round floats to integers, pack their bytes into words, find the largest of numbers of which
// one may be a NaN.
#pragma once

namespace ptxlab {

// 1.5 * 2^23: a float added to it loses its fraction, and its integer is in the low bits of the sum
constexpr float SHIFT = 12582912.0f;

// Pack byte AT of each of four words into a word.
template <int AT>
__device__ __forceinline__ unsigned bytes_of(const int* x) {
    return __byte_perm(__byte_perm(x[0], x[1], AT | (AT + 4) << 4), __byte_perm(x[2], x[3], AT | (AT + 4) << 4),
                       0x5410);
}

// Return the larger number, or NaN if one of them is (PTX ISA 9.7.3 max.NaN).
__device__ __forceinline__ float max_nan(float a, float b) {
    float largest;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(a), "f"(b));
    return largest;
}

}  // namespace ptxlab
