// attention_kv4_naive: the 8-bit kernel with 4-bit features put in, each multiplied out by itself (QServe section 5.3).
//
// Half the bytes, and yet no faster where arithmetic is dear: shift, mask, int -> float, subtract, multiply are five
// operations for each element before the one that uses it.
//
// Contract   out[b, h] = sum_t p[t] v[t] with p = softmax over t < lengths[b] of softmax_scale * q[b, h] . k[t], in
//            f32; zeros for length 0. k = (nibble - zero) * scale, scale and zero per token and head; head h reads kv
//            head h / (Hq / Hkv). Head dim 128, pages of 64 tokens: token t is in page table[b, t / 64], slot t % 64. P
//            is as long as the scores of P * 64 tokens fit shared memory.
// Guide      notebooks/guide/kernels_attention.md: pages, lanes, passes
// Measured   64 sequences of 1024 tokens, 32 heads, on an H200: 170 us, 0.37 of the speed of memory.
// PTX ISA    9.7.9 shfl.sync; 9.7.3 ex2.approx.
#include "timeline.cuh"
#include "token_by_token.cuh"

namespace {

// Features of 4 bits: a lane has 32 nibbles of a row.
struct Nibbles {
    static constexpr int ROW = 64, DIMS = 32;

    // Load a token's constants (scale, zero point).
    static __device__ __forceinline__ float2 constants_of(const unsigned char* page, int token) {
        return __half22float2(*reinterpret_cast<const __half2*>(page + 64 * ROW + token * 4));
    }

    // Dequantise element i: shift, mask, convert, subtract, multiply.
    static __device__ __forceinline__ float dequant(const uint4& nibbles, int i, float2 c) {
        const unsigned words[4] = {nibbles.x, nibbles.y, nibbles.z, nibbles.w};
        const int shift = 8 * (i % 4) + i % 8 / 4 * 4;
        return (float(words[i / 8] >> shift & 0xf) - c.y) * c.x;
    }

    static __device__ __forceinline__ void add_products(float& dot, const float (&query)[DIMS], const uint4& k,
                                                        float2 c) {
#pragma unroll
        for (int i = 0; i < DIMS; ++i) dot += query[i] * dequant(k, i, c);
    }
    static __device__ __forceinline__ void add_value(float (&acc)[DIMS], const float& weight, const uint4& v,
                                                     float2 c) {
#pragma unroll
        for (int i = 0; i < DIMS; ++i) acc[i] += weight * dequant(v, i, c);
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(256) attention_kv4_naive(
    const __half* __restrict__ q,            // f16 [B, Hq, 128]
    const unsigned char* __restrict__ pool,  // u8  [pages, 2, Hkv, PAGE_BYTES]
    const int* __restrict__ table,           // s32 [B, P]
    const int* __restrict__ lengths,         // s32 [B]
    __half* __restrict__ out,                // f16 [B, Hq, 128]
    float softmax_scale, int Hq, int Hkv, int P) {
    ptxlab::attend_token_by_token<Nibbles>(q, pool, table, lengths, out, softmax_scale, Hq, Hkv, P);
}
