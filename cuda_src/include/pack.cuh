// What goes with quantising: integers out of floats, their bytes into words, the largest of numbers of which one may be
// a NaN.
#pragma once

namespace ptxlab {

// 1.5 * 2^23: what is added to it loses the bits behind the point, and is an integer in the low bits
constexpr float SHIFT = 12582912.0f;

// Byte AT of each of four words.
template <int AT>
__device__ __forceinline__ unsigned bytes_of(const int* x) {
    return __byte_perm(__byte_perm(x[0], x[1], AT | (AT + 4) << 4), __byte_perm(x[2], x[3], AT | (AT + 4) << 4),
                       0x5410);
}

// The larger one, or NaN if one of them is (PTX ISA 9.7.3 max.NaN).
__device__ __forceinline__ float max_nan(float a, float b) {
    float largest;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(a), "f"(b));
    return largest;
}

}  // namespace ptxlab
