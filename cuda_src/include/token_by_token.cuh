// Decode attention on CUDA cores, token by token: the ladder's first three steps (QServe section 5.3), which differ in
// the features alone: how many a row has, what they are multiplied out with, and how. One block per sequence and query
// head; three passes: scores, softmax, values.
#pragma once
#include <cuda_fp16.h>

#include "attention_out.cuh"
#include "reduce.cuh"
#include "timeline.cuh"

namespace ptxlab {

// Run the kernel. Of a row of Features::ROW bytes a lane has 16 bytes, DIMS features, and PARTS lanes share the row.
template <class Features>
__device__ __forceinline__ void attend_token_by_token(const __half* q, const unsigned char* pool, const int* table,
                                                      const int* lengths, __half* out, float softmax_scale, int Hq,
                                                      int Hkv, int P) {
    constexpr int PAGE = 64, ROW = Features::ROW, PAGE_BYTES = PAGE * (ROW + 4);
    constexpr int THREADS = 256, PARTS = ROW / 16, DIMS = 128 / PARTS, TOKENS = THREADS / PARTS;
    constexpr float LOG2E = 1.4426950408889634f;
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
    float row_max = minus_infinity();
    for (int first_token = 0; first_token < length; first_token += TOKENS) {
        const int t = first_token + slot;
        float dot = 0;
        if (t < length) {
            const unsigned char* page =
                pool + (size_t(table[size_t(sequence) * P + t / PAGE]) * 2 * Hkv + kv_head) * PAGE_BYTES;
            const uint4 k = *reinterpret_cast<const uint4*>(page + t % PAGE * ROW + lane_part * 16);
            Features::add_products(dot, query, k, Features::constants_of(page, t % PAGE));
        }
#pragma unroll
        for (int mask = 1; mask < PARTS; mask *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, mask);
        if (t < length) {
            row_max = fmaxf(row_max, dot);
            if (lane_part == 0) scores[t] = dot;
        }
    }
    PHASE(SOFTMAX);
    row_max = block_max<THREADS>(row_max, partial);  // behind its barrier the scores are there for everyone

    float sum = 0;
    for (int t = threadIdx.x; t < length; t += THREADS) {
        scores[t] = exp2f(scores[t] - row_max);
        sum += scores[t];
    }
    sum = block_sum<THREADS>(sum, partial);

    PHASE(VALUES);
    float acc[DIMS] = {};
    for (int first_token = 0; first_token < length; first_token += TOKENS) {
        const int t = first_token + slot;
        if (t >= length) continue;
        const unsigned char* page =
            pool + ((size_t(table[size_t(sequence) * P + t / PAGE]) * 2 + 1) * Hkv + kv_head) * PAGE_BYTES;
        const uint4 v = *reinterpret_cast<const uint4*>(page + t % PAGE * ROW + lane_part * 16);
        Features::add_value(acc, scores[t], v, Features::constants_of(page, t % PAGE));
    }
    PHASE(EPILOGUE);
    store_slots<THREADS, DIMS>(acc, sum > 0 ? 1 / sum : 0, sums, out + row);
}

}  // namespace ptxlab
