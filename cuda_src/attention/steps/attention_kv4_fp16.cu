// attention_kv4_fp16: products of queries with keys and of weights with values in half2 (QServe section 5.3).
//
// Two products per instruction, and no conversion of features at all. What FP16 would lose is kept out of it: queries
// are scaled so that the largest is in [1, 2), weights (times the values' scales) so that the largest is in [512,
// 1024), by powers of two, so that nothing overflows whatever the scores are; and sums go over to f32 after four
// products (of a word of keys, of four values).
//
// Contract   out[b, h] = sum_t p[t] v[t] with p = softmax over t < lengths[b] of softmax_scale * q[b, h] . k[t]; zeros
//            for length 0. k = (nibble - zero) * scale, scale and zero per token and head; head h reads kv head h / (Hq
//            / Hkv). Head dim 128, pages of 64 tokens: token t is in page table[b, t / 64], slot t % 64. P is as long
//            as the scores of P * 64 tokens fit shared memory.
// Guide      notebooks/guide/kernels_attention.md: pages, lanes, passes
// Measured   64 sequences of 1024 tokens, 32 heads, on an H200: 127 us, 0.49 of the speed of memory.
// PTX ISA    9.7.9 shfl.sync; 9.7.3 ex2.approx; 9.7.4 sub.f16x2, fma.f16x2; 9.7.8 lop3.
#include <cuda_fp16.h>

#include "attention_out.cuh"
#include "exponent.cuh"
#include "kv4_halves.cuh"
#include "reduce.cuh"
#include "timeline.cuh"

namespace {

constexpr int PAGE = 64, ROW = 64, PAGE_BYTES = PAGE * (ROW + 4);
constexpr int THREADS = 256, PARTS = 4, DIMS = 32;
static_assert(THREADS / PARTS == PAGE, "a page at a time");
constexpr float LOG2E = 1.4426950408889634f;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 3) attention_kv4_fp16(
    const __half* __restrict__ q,            // f16 [B, Hq, 128]
    const unsigned char* __restrict__ pool,  // u8  [pages, 2, Hkv, PAGE_BYTES]
    const int* __restrict__ table,           // s32 [B, P]
    const int* __restrict__ lengths,         // s32 [B]
    __half* __restrict__ out,                // f16 [B, Hq, 128]
    float softmax_scale, int Hq, int Hkv, int P) {
    extern __shared__ float scores[];  // [P * 64], and the block table [P]
    __shared__ float partial[32];
    __shared__ __align__(16) float sums[THREADS / 32 * 128];
    int* pages = reinterpret_cast<int*>(scores + P * PAGE);
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const int head = blockIdx.x, sequence = blockIdx.y, kv_head = head / (Hq / Hkv), length = lengths[sequence];
    const int full_pages = length / PAGE, tail_tokens = length % PAGE, num_pages = full_pages + (tail_tokens > 0);
    const int slot = threadIdx.x / PARTS, lane_part = threadIdx.x % PARTS;
    const size_t row = (size_t(sequence) * Hq + head) * 128, pitch = size_t(2) * Hkv * PAGE_BYTES;
    const unsigned char* keys = pool + size_t(kv_head) * PAGE_BYTES;
    const unsigned char* values = keys + size_t(Hkv) * PAGE_BYTES;

    for (int i = threadIdx.x; i < num_pages; i += THREADS) pages[i] = table[size_t(sequence) * P + i];
    __half2 query[4][4];  // of a word, in the order of Halves
    const float scale = ptxlab::load_scaled<PARTS>(query, q + row + lane_part * DIMS) * softmax_scale * LOG2E;
    __syncthreads();

    PHASE(SCORES);
    float row_max = ptxlab::minus_infinity();
    const auto score = [&](int i, bool inside) {
        const unsigned char* page = keys + pages[i] * pitch;
        const uint4 k = *reinterpret_cast<const uint4*>(page + threadIdx.x * 16);
        const __half2 c = inside ? ptxlab::kv4_constants(page, slot) : __half2{};
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
    PHASE(SOFTMAX);
    row_max = ptxlab::block_max<THREADS>(row_max, partial);  // behind its barrier the scores are there for everyone

    float sum = 0, heaviest = 0;
    for (int t = threadIdx.x; t < num_pages * PAGE; t += THREADS) {
        const float p = exp2f(scores[t] - row_max);
        const __half2 c = t < length ? ptxlab::kv4_constants(values + pages[t / PAGE] * pitch, t % PAGE) : __half2{};
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
        const unsigned char* page = values + pages[i] * pitch;
        const uint4 v = *reinterpret_cast<const uint4*>(page + threadIdx.x * 16);
        const __half2 c = inside ? ptxlab::kv4_constants(page, slot) : __half2{};
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
