// A residual stream in chunks (quantize_row.cuh): sums of two, and floats back to 16 bits, each rounded once.
#pragma once
#include "output.cuh"
#include "quantize_row.cuh"

namespace ptxlab {

template <int KIND>
__device__ __forceinline__ Chunk<KIND> added(const Chunk<KIND>& a, const Chunk<KIND>& b) {
    Chunk<KIND> sum;
#pragma unroll
    for (int i = 0; i < sum.VECTORS; ++i) sum.v[i] = added<KIND>(a.v[i], b.v[i]);
    return sum;
}

template <int KIND>
__device__ __forceinline__ Chunk<KIND> rounded(const Floats& y) {
    Chunk<KIND> c;
    unsigned* words = reinterpret_cast<unsigned*>(c.v);
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = rounded_pair<KIND>(y[2 * i], y[2 * i + 1]);
    return c;
}

}  // namespace ptxlab
