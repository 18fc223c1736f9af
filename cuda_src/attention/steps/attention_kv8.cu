// attention_kv8: decode attention on CUDA cores over an 8-bit cache, the baseline of the ladder (QServe section 5.3).
//
// One block per sequence and query head, as TensorRT-LLM and QServe have it: a head that shares its keys and values
// with others (GQA) reads them all the same. Three passes: scores, softmax, values.
//
// Contract   out[b, h] = sum_t p[t] v[t] with p = softmax over t < lengths[b] of softmax_scale * q[b, h] . k[t], in
//            f32; zeros for length 0. k = (byte - zero) * scale, scale and zero per token and head; head h reads kv
//            head h / (Hq / Hkv). Head dim 128, pages of 64 tokens: token t is in page table[b, t / 64], slot t % 64. P
//            is as long as the scores of P * 64 tokens fit shared memory.
// Guide      notebooks/guide/kernels_attention.md: pages, lanes, passes
// Measured   64 sequences of 1024 tokens, 32 heads, on an H200: 191 us, 0.63 of the speed of memory.
// PTX ISA    9.7.9 shfl.sync; 9.7.3 ex2.approx.
#include "timeline.cuh"
#include "token_by_token.cuh"

namespace {

// Features of 8 bits: a lane has 16 bytes of a row.
struct Bytes {
    static constexpr int ROW = 128, DIMS = 16;

    // Load a token's constants (scale, zero point).
    static __device__ __forceinline__ float2 constants_of(const unsigned char* page, int token) {
        return __half22float2(*reinterpret_cast<const __half2*>(page + 64 * ROW + token * 4));
    }

    static __device__ __forceinline__ float dequant(const uint4& bytes, int i, float2 c) {
        const unsigned words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
        return (float(words[i / 4] >> 8 * (i % 4) & 0xff) - c.y) * c.x;
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

extern "C" __global__ void __launch_bounds__(256) attention_kv8(
    const __half* __restrict__ q,            // f16 [B, Hq, 128]
    const unsigned char* __restrict__ pool,  // u8  [pages, 2, Hkv, PAGE_BYTES]
    const int* __restrict__ table,           // s32 [B, P]
    const int* __restrict__ lengths,         // s32 [B]
    __half* __restrict__ out,                // f16 [B, Hq, 128]
    float softmax_scale, int Hq, int Hkv, int P) {
    ptxlab::attend_token_by_token<Bytes>(q, pool, table, lengths, out, softmax_scale, Hq, Hkv, P);
}
