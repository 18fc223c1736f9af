// Features of a lane of the KV4 ladder's steps on CUDA cores (QServe section 5.3): 32 nibbles of a row of 64 bytes, in a
// page of 64 tokens, whose constants lie behind its rows.
#pragma once
#include <cuda_fp16.h>

#include "dequant.cuh"

namespace ptxlab {

// Load a token's constants (scale, zero point) from its page.
__device__ __forceinline__ __half2 kv4_constants(const unsigned char* page, int token) {
    return *reinterpret_cast<const __half2*>(page + 64 * 64 + token * 4);
}

// Convert a lane's 32 nibbles to f32 in order and subtract the zero point, exact; the scale is not yet applied.
__device__ __forceinline__ void dequant_kv4(float (&x)[32], const uint4& nibbles, __half zero) {
    const unsigned words[4] = {nibbles.x, nibbles.y, nibbles.z, nibbles.w};
    const uint2 bias = bias_u4_f16(zero);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const uint4 h = dequant_u4_f16_minus(words[w], bias);  // (e0, e2), (e1, e3), (e4, e6), (e5, e7)
        const float2 e02 = __half22float2(as_half2(h.x)), e13 = __half22float2(as_half2(h.y));
        const float2 e46 = __half22float2(as_half2(h.z)), e57 = __half22float2(as_half2(h.w));
        float* elements = x + 8 * w;
        elements[0] = e02.x, elements[1] = e13.x, elements[2] = e02.y, elements[3] = e13.y;
        elements[4] = e46.x, elements[5] = e57.x, elements[6] = e46.y, elements[7] = e57.y;
    }
}

}  // namespace ptxlab
