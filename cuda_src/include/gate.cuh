// The activation of an FFN's gate: g sigmoid(..) by one ex2 and one rcp (PTX ISA 9.7.3).
#pragma once
#include "mma_f16.cuh"
#include "reciprocal.cuh"

namespace ptxlab {

constexpr float LOG2_E = 1.44269504f;
constexpr float GELU_LINEAR = 2.30220820f, GELU_CUBIC = 0.102943240f;  // of 2 z log2(e)

// KIND 0: SiLU; 1: the tanh form of GELU. Of an infinity of either sign the result is no number, or infinite.
template <int KIND>
__device__ __forceinline__ float activated(float g) {
    const float turns = KIND ? g * fmaf(g * g, -GELU_CUBIC, -GELU_LINEAR) : g * -LOG2_E;
    return g * reciprocal_approx(1.0f + exp2_approx(turns));
}

}  // namespace ptxlab
