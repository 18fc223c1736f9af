// Products with features in half2: the KV4 ladder's steps fp16 and prefetch (QServe section 5.3).
#pragma once
#include "exponent.cuh"
#include "kv4_features.cuh"

namespace ptxlab {

// The nibbles of a word minus their zero point, exact: (e0, e2), (e1, e3), (e4, e6), (e5, e7).
struct Halves {
    __half2 pair[4];

    __device__ __forceinline__ Halves(unsigned word, uint2 bias) {
        const uint4 h = dequant_u4_f16_minus(word, bias);
        pair[0] = as_half2(h.x), pair[1] = as_half2(h.y), pair[2] = as_half2(h.z), pair[3] = as_half2(h.w);
    }
};

// Dims of the low and the high half of pair i, among the eight of a word.
__device__ __forceinline__ constexpr int low_of(int i) { return i / 2 * 4 + i % 2; }
__device__ __forceinline__ constexpr int high_of(int i) { return low_of(i) + 2; }

// Load a lane's part of a query in the order of Halves, scaled by a power of two so that the largest element of the
// row, which PARTS lanes share, is in [1, 2). Return that power.
template <int PARTS>
__device__ __forceinline__ float load_scaled(__half2 (&query)[4][4], const __half* elements) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) largest = fmaxf(largest, fabsf(__half2float(elements[i])));
#pragma unroll
    for (int mask = 1; mask < PARTS; mask *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
    const float power = leading_power(largest), inverse = inverse_power(power);
#pragma unroll
    for (int w = 0; w < 4; ++w)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            query[w][i] = __floats2half2_rn(__half2float(elements[w * 8 + low_of(i)]) * inverse,
                                            __half2float(elements[w * 8 + high_of(i)]) * inverse);
    return power;
}

// Return the dot product of a lane's parts of a query and a key, without the key's scale: two products per instruction,
// the four pairs of a word added up in f16.
__device__ __forceinline__ float multiply_halves(const __half2 (&query)[4][4], const uint4& key, __half zero) {
    const unsigned words[4] = {key.x, key.y, key.z, key.w};
    const uint2 bias = bias_u4_f16(zero);
    float dot = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const Halves x(words[w], bias);
        __half2 sum = __hmul2(query[w][0], x.pair[0]);
#pragma unroll
        for (int j = 1; j < 4; ++j) sum = __hfma2(query[w][j], x.pair[j], sum);
        dot += __low2float(sum) + __high2float(sum);
    }
    return dot;
}

// Add score * per_weight times a lane's part of a value to `sums`, in f16: per_weight brings weights into the range of
// f16. The score is loaded here: by value ptxas orders the loads otherwise.
__device__ __forceinline__ void add_weighted(__half2 (&sums)[4][4], const float& score, float per_weight,
                                             const uint4& value, __half zero) {
    const unsigned words[4] = {value.x, value.y, value.z, value.w};
    const uint2 bias = bias_u4_f16(zero);
    const __half2 both = __float2half2_rn(score * per_weight);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const Halves x(words[w], bias);
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[w][j] = __hfma2(both, x.pair[j], sums[w][j]);
    }
}

// Add the f16 sums of `add_weighted` to a lane's 32 f32 accumulators, in order.
__device__ __forceinline__ void add_halves(float (&acc)[32], const __half2 (&sums)[4][4]) {
#pragma unroll
    for (int w = 0; w < 4; ++w)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            acc[8 * w + low_of(j)] += __low2float(sums[w][j]);
            acc[8 * w + high_of(j)] += __high2float(sums[w][j]);
        }
}

}  // namespace ptxlab
