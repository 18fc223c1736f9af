// attention_kv4_prefetch: scales and zero points fetched ahead (QServe section 5.3), the last of QServe's steps.
//
// At the start, cp.async brings the constants of all keys, then those of all values, into shared memory: no load of
// features has one of constants beside it any more, and the values' constants arrive while scores are computed. The
// price is shared memory for each token. Products in half2 as in attention_kv4_fp16.
//
// Contract   out[b, h] = sum_t p[t] v[t] with p = softmax over t < lengths[b] of softmax_scale * q[b, h] . k[t]; zeros
//            for length 0. k = (nibble - zero) * scale, scale and zero per token and head; head h reads kv head h / (Hq
//            / Hkv). Head dim 128, pages of 64 tokens: token t is in page table[b, t / 64], slot t % 64. P is as long
//            as the scores and constants of P * 64 tokens fit shared memory.
// Guide      notebooks/guide/kernels_attention.md: pages, lanes, passes
// Measured   64 sequences of 1024 tokens, 32 heads, on an H200: 120 us, 0.52 of the speed of memory.
// PTX ISA    9.7.9 shfl.sync; 9.7.3 ex2.approx; 9.7.4 sub.f16x2, fma.f16x2; 9.7.8 lop3.
#include <cuda_fp16.h>

#include "attention_out.cuh"
#include "exponent.cuh"
#include "kv4_halves.cuh"
#include "mma.cuh"
#include "reduce.cuh"
#include "timeline.cuh"

namespace {

constexpr int PAGE = 64, ROW = 64, PAGE_BYTES = PAGE * (ROW + 4);
constexpr int THREADS = 256, PARTS = 4, DIMS = 32;
static_assert(THREADS / PARTS == PAGE, "a page at a time");
constexpr float LOG2E = 1.4426950408889634f;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 3) attention_kv4_prefetch(
    const __half* __restrict__ q,            // f16 [B, Hq, 128]
    const unsigned char* __restrict__ pool,  // u8  [pages, 2, Hkv, PAGE_BYTES]
    const int* __restrict__ table,           // s32 [B, P]
    const int* __restrict__ lengths,         // s32 [B]
    __half* __restrict__ out,                // f16 [B, Hq, 128]
    float softmax_scale, int Hq, int Hkv, int P) {
    extern __shared__ float scores[];  // [P * 64]; constants of keys and of values, the block table [P]
    __shared__ float partial[32];
    __shared__ __align__(16) float sums[THREADS / 32 * 128];
    __half2* key_constants = reinterpret_cast<__half2*>(scores + P * PAGE);
    __half2* value_constants = key_constants + P * PAGE;
    int* pages = reinterpret_cast<int*>(value_constants + P * PAGE);
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const int head = blockIdx.x, sequence = blockIdx.y, kv_head = head / (Hq / Hkv), length = lengths[sequence];
    const int full_pages = length / PAGE, tail_tokens = length % PAGE, num_pages = full_pages + (tail_tokens > 0);
    const int slot = threadIdx.x / PARTS, lane_part = threadIdx.x % PARTS;
    const size_t row = (size_t(sequence) * Hq + head) * 128, pitch = size_t(2) * Hkv * PAGE_BYTES;
    const unsigned char* keys = pool + size_t(kv_head) * PAGE_BYTES;
    const unsigned char* values = keys + size_t(Hkv) * PAGE_BYTES;

    for (int i = threadIdx.x; i < num_pages; i += THREADS) pages[i] = table[size_t(sequence) * P + i];
    __syncthreads();
    const auto prefetch = [&](__half2* constants, const unsigned char* base) {
        for (int i = threadIdx.x; i < num_pages * 16; i += THREADS)
            ptxlab::cp_async_16(constants + i * 4, base + pages[i / 16] * pitch + PAGE * ROW + i % 16 * 16, true);
        ptxlab::cp_async_commit();
    };
    PHASE(LOAD);
    prefetch(key_constants, keys);
    prefetch(value_constants, values);

    PHASE(SETUP);
    __half2 query[4][4];  // of a word, in the order of Halves
    const float scale = ptxlab::load_scaled<PARTS>(query, q + row + lane_part * DIMS) * softmax_scale * LOG2E;
    PHASE(WAIT_COPY);
    ptxlab::cp_async_wait<1>();  // the keys' are there, and behind the barrier everyone's
    __syncthreads();

    PHASE(SCORES);
    float row_max = ptxlab::minus_infinity();
    const auto score = [&](int i, bool inside) {
        const uint4 k = *reinterpret_cast<const uint4*>(keys + pages[i] * pitch + threadIdx.x * 16);
        const __half2 c = inside ? key_constants[i * PAGE + slot] : __half2{};
        float dot = ptxlab::multiply_halves(query, k, __high2half(c));
#pragma unroll
        for (int mask = 1; mask < PARTS; mask *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, mask);
        dot = inside ? dot * (__low2float(c) * scale) : ptxlab::minus_infinity();
        row_max = fmaxf(row_max, dot);
        if (lane_part == 0) scores[i * PAGE + slot] = dot;
    };
#pragma unroll 4
    for (int i = 0; i < full_pages; ++i) score(i, true);
    if (tail_tokens) score(full_pages, slot < tail_tokens);
    PHASE(WAIT_COPY);
    ptxlab::cp_async_wait<0>();
    PHASE(SOFTMAX);
    // After its barrier scores and constants are there for everyone.
    row_max = ptxlab::block_max<THREADS>(row_max, partial);

    float sum = 0, heaviest = 0;
    for (int t = threadIdx.x; t < num_pages * PAGE; t += THREADS) {
        const float p = exp2f(scores[t] - row_max);
        const __half2 c = t < length ? value_constants[t] : __half2{};
        sum += p;
        scores[t] = p * __low2float(c);
        heaviest = fmaxf(heaviest, scores[t]);
    }
    heaviest = ptxlab::block_max<THREADS>(heaviest, partial);
    sum = ptxlab::block_sum<THREADS>(sum, partial);
    const float weight_unit = ptxlab::leading_power(heaviest) / 512, per_weight = ptxlab::inverse_power(weight_unit);

    PHASE(VALUES);
    float acc[DIMS] = {};
    const auto add = [&](__half2(&sum4)[4][4], int i, bool inside) {
        const uint4 v = *reinterpret_cast<const uint4*>(values + pages[i] * pitch + threadIdx.x * 16);
        const __half2 c = inside ? value_constants[i * PAGE + slot] : __half2{};
        ptxlab::add_weighted(sum4, scores[i * PAGE + slot], per_weight, v, __high2half(c));
    };
    for (int first_page = 0; first_page < num_pages; first_page += 4) {
        __half2 sum4[4][4] = {};
        if (first_page + 4 <= full_pages) {
#pragma unroll 2
            for (int i = 0; i < 4; ++i) add(sum4, first_page + i, true);
        } else {
            for (int i = first_page; i < num_pages; ++i) add(sum4, i, i < full_pages || slot < tail_tokens);
        }
        ptxlab::add_halves(acc, sum4);
    }
    PHASE(EPILOGUE);
    ptxlab::store_slots<THREADS, DIMS>(acc, sum > 0 ? weight_unit / sum : 0, sums, out + row);
}
