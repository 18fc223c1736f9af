// The epilogue of every GEMM: eight neighbouring accumulators to f16 (OUT 0), bf16 (1), f32 (2) or as they are (3).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace ptxlab {

// Two neighbours, rounded to f16 (KIND 0) or bf16 (1).
template <int KIND>
__device__ __forceinline__ unsigned rounded_pair(float a, float b) {
    static_assert(KIND < 2, "16 bits each");
    if constexpr (KIND == 1) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
        return *reinterpret_cast<const unsigned*>(&pair);
    } else {
        const __half2 pair = __floats2half2_rn(a, b);
        return *reinterpret_cast<const unsigned*>(&pair);
    }
}

// Eight neighbours, rounded to f16 (KIND 0) or bf16 (1), or as they are (2).
template <int KIND>
__device__ __forceinline__ void store_8_floats(void* y, size_t at, const float (&v)[8]) {
    if constexpr (KIND == 2) {
        float4* to = reinterpret_cast<float4*>(static_cast<float*>(y) + at);
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        *reinterpret_cast<uint4*>(static_cast<unsigned short*>(y) + at) =
            make_uint4(rounded_pair<KIND>(v[0], v[1]), rounded_pair<KIND>(v[2], v[3]), rounded_pair<KIND>(v[4], v[5]),
                       rounded_pair<KIND>(v[6], v[7]));
    }
}

// y = acc * x_scale * w_scale + bias in f32, each operation rounded, then one rounding to the output.
template <int KIND>
__device__ __forceinline__ void store_8(void* y, size_t at, const int* acc, float x_scale, const float* w_scale,
                                        const float* bias) {
    if constexpr (KIND == 3) {
        int4* to = reinterpret_cast<int4*>(static_cast<int*>(y) + at);
        to[0] = make_int4(acc[0], acc[1], acc[2], acc[3]);
        to[1] = make_int4(acc[4], acc[5], acc[6], acc[7]);
    } else {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            v[i] = __fmul_rn(__fmul_rn(float(acc[i]), x_scale), w_scale[i]);
            if (bias) v[i] = __fadd_rn(v[i], bias[i]);
        }
        store_8_floats<KIND>(y, at, v);
    }
}

}  // namespace ptxlab
