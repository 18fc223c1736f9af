// attention_kv4_bittrick: nibbles to FP16 by bit tricks (QServe section 5.3, after Kim et al. 2022).
//
// Two nibbles at once are masked and put below the exponent of 1024 by one LOP3; one operation on the pair takes off
// 1024 and the zero point together, exactly. The scale is left to one multiplication per token. Only the conversion to
// f32 is still per element: the products are those of the step before.
//
// Contract   out[b, h] = sum_t p[t] v[t] with p = softmax over t < lengths[b] of softmax_scale * q[b, h] . k[t], in
//            f32; zeros for length 0. k = (nibble - zero) * scale, scale and zero per token and head; head h reads kv
//            head h / (Hq / Hkv). Head dim 128, pages of 64 tokens: token t is in page table[b, t / 64], slot t % 64. P
//            is as long as the scores of P * 64 tokens fit shared memory.
// NOTE       The passes are those of token_by_token.cuh. Called from there the compiler orders the values' pass otherwise.
// Guide      notebooks/guide/kernels_attention.md: pages, lanes, passes
// Measured   64 sequences of 1024 tokens, 32 heads, on an H200: 132 us, 0.47 of the speed of memory.
// PTX ISA    9.7.9 shfl.sync; 9.7.3 ex2.approx; 9.7.4 sub.f16x2, fma.f16x2; 9.7.8 lop3.
#include <cuda_fp16.h>

#include "attention_out.cuh"
#include "kv4_features.cuh"
#include "reduce.cuh"
#include "timeline.cuh"

namespace {

constexpr int PAGE = 64, ROW = 64, PAGE_BYTES = PAGE * (ROW + 4);
constexpr int THREADS = 256, PARTS = 4, DIMS = 32, TOKENS = THREADS / PARTS;
constexpr float LOG2E = 1.4426950408889634f;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) attention_kv4_bittrick(
    const __half* __restrict__ q,            // f16 [B, Hq, 128]
    const unsigned char* __restrict__ pool,  // u8  [pages, 2, Hkv, PAGE_BYTES]
    const int* __restrict__ table,           // s32 [B, P]
    const int* __restrict__ lengths,         // s32 [B]
    __half* __restrict__ out,                // f16 [B, Hq, 128]
    float softmax_scale, int Hq, int Hkv, int P) {
    extern __shared__ float scores[];  // [P * 64]
    __shared__ float partial[32];
    __shared__ __align__(16) float sums[THREADS / 32 * 128];
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const int head = blockIdx.x, sequence = blockIdx.y, kv_head = head / (Hq / Hkv), length = lengths[sequence];
    const int slot = threadIdx.x / PARTS, lane_part = threadIdx.x % PARTS;
    const size_t row = (size_t(sequence) * Hq + head) * 128;

    float query[DIMS];
#pragma unroll
    for (int i = 0; i < DIMS; ++i) query[i] = __half2float(q[row + lane_part * DIMS + i]) * (softmax_scale * LOG2E);

    PHASE(SCORES);
    float row_max = ptxlab::minus_infinity();
    for (int first_token = 0; first_token < length; first_token += TOKENS) {
        const int t = first_token + slot;
        float dot = 0;
        if (t < length) {
            const unsigned char* page =
                pool + (size_t(table[size_t(sequence) * P + t / PAGE]) * 2 * Hkv + kv_head) * PAGE_BYTES;
            const uint4 k = *reinterpret_cast<const uint4*>(page + t % PAGE * ROW + lane_part * 16);
            const __half2 c = ptxlab::kv4_constants(page, t % PAGE);
            float x[DIMS];
            ptxlab::dequant_kv4(x, k, __high2half(c));
#pragma unroll
            for (int i = 0; i < DIMS; ++i) dot += query[i] * x[i];
            dot *= __low2float(c);
        }
#pragma unroll
        for (int mask = 1; mask < PARTS; mask *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, mask);
        if (t < length) {
            row_max = fmaxf(row_max, dot);
            if (lane_part == 0) scores[t] = dot;
        }
    }
    PHASE(SOFTMAX);
    row_max = ptxlab::block_max<THREADS>(row_max, partial);  // behind its barrier the scores are there for everyone

    float sum = 0;
    for (int t = threadIdx.x; t < length; t += THREADS) {
        scores[t] = exp2f(scores[t] - row_max);
        sum += scores[t];
    }
    sum = ptxlab::block_sum<THREADS>(sum, partial);

    PHASE(VALUES);
    float acc[DIMS] = {};
    for (int first_token = 0; first_token < length; first_token += TOKENS) {
        const int t = first_token + slot;
        if (t >= length) continue;
        const unsigned char* page =
            pool + ((size_t(table[size_t(sequence) * P + t / PAGE]) * 2 + 1) * Hkv + kv_head) * PAGE_BYTES;
        const uint4 v = *reinterpret_cast<const uint4*>(page + t % PAGE * ROW + lane_part * 16);
        const __half2 c = ptxlab::kv4_constants(page, t % PAGE);
        const float weight = scores[t] * __low2float(c);
        float x[DIMS];
        ptxlab::dequant_kv4(x, v, __high2half(c));
#pragma unroll
        for (int i = 0; i < DIMS; ++i) acc[i] += weight * x[i];
    }
    PHASE(EPILOGUE);
    ptxlab::store_slots<THREADS, DIMS>(acc, sum > 0 ? 1 / sum : 0, sums, out + row);
}
