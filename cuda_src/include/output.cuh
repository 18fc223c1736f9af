// The epilogue of every GEMM: eight neighbouring accumulators to f16 (OUT 0), bf16 (1), f32 (2) or as they are (3).
// With weights in strips two more, to f16 or bf16 (FUSED): SILU_MUL takes rows g and g + 8 of a strip, gate and up of a
// feature, to silu(gate) up in f32, rounded once; ADD adds the rounded results to what lies there, as `rmsnorm_quantize`
// would: the same bits.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "gate.cuh"

namespace ptxlab {

constexpr int SILU_MUL = 1, ADD = 2;  // FUSED; 0: neither

// Round two neighbours to f16 (KIND 0) or bf16 (1) and pack them into a word, the first in its low half.
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

// Round and pack eight neighbours likewise.
template <int KIND>
__device__ __forceinline__ uint4 rounded_8(const float* v) {
    return make_uint4(rounded_pair<KIND>(v[0], v[1]), rounded_pair<KIND>(v[2], v[3]), rounded_pair<KIND>(v[4], v[5]),
                      rounded_pair<KIND>(v[6], v[7]));
}

// Store eight neighbours, rounded to f16 (KIND 0) or bf16 (1), or as f32 (2).
template <int KIND>
__device__ __forceinline__ void store_8_floats(void* y, size_t index, const float (&v)[8]) {
    if constexpr (KIND == 2) {
        float4* destination = reinterpret_cast<float4*>(static_cast<float*>(y) + index);
        destination[0] = make_float4(v[0], v[1], v[2], v[3]);
        destination[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        *reinterpret_cast<uint4*>(static_cast<unsigned short*>(y) + index) = rounded_8<KIND>(v);
    }
}

// Store eight rounded results to Y, or with ADD add them to what lies there: by the L2, which rounds each sum, so that
// nothing is read and nobody waits.
template <int KIND, int WITH>
__device__ __forceinline__ void put_8(void* y, size_t index, const uint4& v) {
    uint4* destination = reinterpret_cast<uint4*>(static_cast<unsigned short*>(y) + index);
    if constexpr (WITH != ADD) *destination = v;
    else if constexpr (KIND == 1)
        asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(v.x),
                     "r"(v.y), "r"(v.z), "r"(v.w)
                     : "memory");
    else
        asm volatile("red.relaxed.gpu.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(destination), "r"(v.x),
                     "r"(v.y), "r"(v.z), "r"(v.w)
                     : "memory");
}

// Store y = acc * x_scale * w_scale + bias of eight neighbours, in f32, each operation rounded, then one rounding to
// the output; with KIND 3 store acc. SILU_MUL: sixteen accumulators, gates and then ups.
template <int KIND, int WITH = 0>
__device__ __forceinline__ void store_8(void* y, size_t index, const int* acc, float x_scale, const float* w_scale,
                                        const float* bias) {
    static_assert(WITH == 0 || KIND < 2, "to 16 bits each");
    if constexpr (KIND == 3) {
        int4* destination = reinterpret_cast<int4*>(static_cast<int*>(y) + index);
        destination[0] = make_int4(acc[0], acc[1], acc[2], acc[3]);
        destination[1] = make_int4(acc[4], acc[5], acc[6], acc[7]);
    } else {
        constexpr int COUNT = WITH == SILU_MUL ? 16 : 8;
        float v[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            v[i] = __fmul_rn(__fmul_rn(float(acc[i]), x_scale), w_scale[i]);
            if (bias) v[i] = __fadd_rn(v[i], bias[i]);
        }
        if constexpr (WITH == SILU_MUL) {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(activated<0>(v[i]), v[8 + i]);
        }
        if constexpr (WITH == 0) store_8_floats<KIND>(y, index, v);
        else put_8<KIND, WITH>(y, index, rounded_8<KIND>(v));
    }
}

}  // namespace ptxlab
