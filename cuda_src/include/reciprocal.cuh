// 1 / x (PTX ISA 9.7.3 rcp).
#pragma once

namespace ptxlab {

// Return 1 / x to about one unit in the last place.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Return 1 / x as IEEE rounds it, for 2^-126 <= |x| <= 2^126 (a test tries every x); NaN of an infinity. Unlike
// __frcp_rn without a branch for all others.
__device__ __forceinline__ float reciprocal(float x) {
    const float near = reciprocal_approx(x);
    return fmaf(fmaf(-x, near, 1.0f), near, near);
}

}  // namespace ptxlab
