// The epilogue of every GEMM: eight neighbouring accumulators to f16 (OUT 0), bf16 (1), f32 (2) or as they are (3).
// Of weights in strips two more, to f16 or bf16 (FUSED): SILU_MUL takes rows g and g + 8 of a strip, gate and up of a
// feature, to silu(gate) up; ADD adds to what lies there. Both in f32, rounded once.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "activation.cuh"

namespace ptxlab {

constexpr int SILU_MUL = 1, ADD = 2;  // FUSED; 0: neither

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

// What two such neighbours stand for.
template <int KIND>
__device__ __forceinline__ float2 unpacked_pair(unsigned pair) {
    if constexpr (KIND == 1) return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    else return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// Eight results as they lie in Y, read in this place: a plain load of what is __restrict__ might move ahead of
// griddepcontrol.wait.
__device__ __forceinline__ uint4 load_results_8(const void* y, size_t at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(static_cast<const unsigned short*>(y) + at)
                 : "memory");
    return v;
}

// y = acc * x_scale * w_scale + bias in f32, each operation rounded, then one rounding to the output. SILU_MUL: sixteen
// accumulators, gates and then ups; ADD: `residual` is what is added.
template <int KIND, int WITH = 0>
__device__ __forceinline__ void store_8(void* y, size_t at, const int* acc, float x_scale, const float* w_scale,
                                        const float* bias, uint4 residual = {}) {
    static_assert(WITH == 0 || KIND < 2, "to 16 bits each");
    if constexpr (KIND == 3) {
        int4* to = reinterpret_cast<int4*>(static_cast<int*>(y) + at);
        to[0] = make_int4(acc[0], acc[1], acc[2], acc[3]);
        to[1] = make_int4(acc[4], acc[5], acc[6], acc[7]);
    } else {
        float v[WITH == SILU_MUL ? 16 : 8];
#pragma unroll
        for (int i = 0; i < (WITH == SILU_MUL ? 16 : 8); ++i) {
            v[i] = __fmul_rn(__fmul_rn(float(acc[i]), x_scale), w_scale[i]);
            if (bias) v[i] = __fadd_rn(v[i], bias[i]);
        }
        if constexpr (WITH == SILU_MUL) {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(activated<0>(v[i]), v[8 + i]);
        } else if constexpr (WITH == ADD) {
            const unsigned pairs[4] = {residual.x, residual.y, residual.z, residual.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 more = unpacked_pair<KIND>(pairs[i]);
                v[2 * i] = __fadd_rn(v[2 * i], more.x), v[2 * i + 1] = __fadd_rn(v[2 * i + 1], more.y);
            }
        }
        if constexpr (KIND == 2) {
            float4* to = reinterpret_cast<float4*>(static_cast<float*>(y) + at);
            to[0] = make_float4(v[0], v[1], v[2], v[3]);
            to[1] = make_float4(v[4], v[5], v[6], v[7]);
        } else {
            *reinterpret_cast<uint4*>(static_cast<unsigned short*>(y) + at) =
                make_uint4(rounded_pair<KIND>(v[0], v[1]), rounded_pair<KIND>(v[2], v[3]),
                           rounded_pair<KIND>(v[4], v[5]), rounded_pair<KIND>(v[6], v[7]));
        }
    }
}

}  // namespace ptxlab
