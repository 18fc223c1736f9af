// The gate of an FFN, act(g): SiLU (KIND 0), g / (1 + exp(-g)), or the tanh form of GELU (1), which is
// g / (1 + exp(-2 z)) with z = sqrt(2 / pi) (g + 0.044715 g^3). Relative error: 2^-20, and 2^-22 more per unit of a
// positive exponent; one above 87 makes it 0.
#pragma once
#include "mma_f16.cuh"
#include "reciprocal.cuh"

namespace ptxlab {

// g sigmoid(..): of an infinity of either sign the result is no number, or infinite.
template <int KIND>
__device__ __forceinline__ float activated(float g) {
    constexpr float LOG2_E = 1.44269504f;
    constexpr float GELU_LINEAR = 2.30220820f, GELU_CUBIC = 0.102943240f;  // of 2 z log2(e)
    const float turns = KIND ? g * fmaf(g * g, -GELU_CUBIC, -GELU_LINEAR) : g * -LOG2_E;
    return g * reciprocal_approx(1.0f + exp2_approx(turns));
}

}  // namespace ptxlab
