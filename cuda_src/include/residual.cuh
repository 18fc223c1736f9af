// A residual stream in chunks (quantize_row.cuh): add two chunks, round floats to 16 bits, each rounded once; and the
// first half of an RMSNorm.
#pragma once
#include "output.cuh"
#include "quantize_row.cuh"

namespace ptxlab {

// Add two words of two f16 (KIND 0) or bf16 (1) each.
template <int KIND>
__device__ __forceinline__ unsigned add_pairs(unsigned a, unsigned b) {
    if constexpr (KIND == 1) {
        const __nv_bfloat162 sum = __hadd2(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b));
        return reinterpret_cast<const unsigned&>(sum);
    } else {
        const __half2 sum = __hadd2(reinterpret_cast<__half2&>(a), reinterpret_cast<__half2&>(b));
        return reinterpret_cast<const unsigned&>(sum);
    }
}

// Add two chunks.
template <int KIND>
__device__ __forceinline__ Chunk<KIND> add_chunks(const Chunk<KIND>& a, const Chunk<KIND>& b) {
    Chunk<KIND> sum;
#pragma unroll
    for (int i = 0; i < sum.VECTORS; ++i)
        sum.v[i] = make_uint4(add_pairs<KIND>(a.v[i].x, b.v[i].x), add_pairs<KIND>(a.v[i].y, b.v[i].y),
                              add_pairs<KIND>(a.v[i].z, b.v[i].z), add_pairs<KIND>(a.v[i].w, b.v[i].w));
    return sum;
}

// Round 16 floats to a chunk of f16 (KIND 0) or bf16 (1).
template <int KIND>
__device__ __forceinline__ Chunk<KIND> rounded_chunk(const Floats& y) {
    Chunk<KIND> c;
    unsigned* words = reinterpret_cast<unsigned*>(c.v);
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = rounded_pair<KIND>(y[2 * i], y[2 * i + 1]);
    return c;
}

// Set y = v times the chunk's weights; return the sum of the squares of v. NOTE Both kernels that call this add the
// residual themselves: from a function ptxas orders one of them otherwise.
template <int KIND>
__device__ __forceinline__ float weigh(Floats& y, const Chunk<KIND>& v, const Chunk<KIND>& weight) {
    float square = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float element = v[i];
        square = fmaf(element, element, square);
        y.v[i] = __fmul_rn(element, weight[i]);
    }
    return square;
}

// Return 1 / sqrt(mean + eps), NaN for an infinite mean.
__device__ __forceinline__ float rms_factor(float mean, float eps) {
    return reciprocal(__fsqrt_rn(__fadd_rn(mean, eps)));
}

}  // namespace ptxlab
