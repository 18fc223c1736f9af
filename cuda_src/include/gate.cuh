// The activation of an FFN's gate: g sigmoid(..) by one ex2 and one rcp (PTX ISA 9.7.3).
#pragma once
#include "mma_f16.cuh"
#include "reciprocal.cuh"

namespace ptxlab {

constexpr float LOG2_E = 1.44269504f;
// Coefficients of g and g^3 in 2 log2(e) z, where GELU is g sigmoid(2 z).
constexpr float GELU_LINEAR = 2.30220820f, GELU_CUBIC = 0.102943240f;

// Return the activation of g: SiLU (KIND 0) or the tanh form of GELU (1). For an infinite g it is NaN or infinite.
template <int KIND>
__device__ __forceinline__ float activated(float g) {
    const float turns = KIND ? g * fmaf(g * g, -GELU_CUBIC, -GELU_LINEAR) : g * -LOG2_E;
    return g * reciprocal_approx(1.0f + exp2_approx(turns));
}

}  // namespace ptxlab
