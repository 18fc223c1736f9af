// Powers of two near a float: scaling by them is exact, so that FP16 can be given its range where it is needed.
#pragma once

namespace ptxlab {

// Return the largest power of two that is not above x, for x >= 2^-126; 0 for 0.
__device__ __forceinline__ float leading_power(float x) { return __int_as_float(__float_as_int(x) & 0x7f800000); }

// Return 1 / power for a power of two in 2^-126 .. 2^126; a large number for 0.
__device__ __forceinline__ float inverse_power(float power) {
    return __int_as_float(0x7f000000 - __float_as_int(power));
}

}  // namespace ptxlab
