// attention_kv4_simple: simpler control flow (QServe section 5.3).
//
// The loops go page by page, without a branch. Addresses are a base per thread and an offset per page. The block table
// lies in shared memory, so that no load waits for another one, and several pages are on their way at once. Only the
// last page may have tokens past the end. These get a score of -infinity and constants of 0, so that they are added
// with a weight of 0.
//
// Contract   out[b, h] = sum_t p[t] v[t] with p = softmax over t < lengths[b] of softmax_scale * q[b, h] . k[t], in
//            f32; zeros for length 0. k = (nibble - zero) * scale, scale and zero per token and head; head h reads kv
//            head h / (Hq / Hkv). Head dim 128, pages of 64 tokens: token t is in page table[b, t / 64], slot t % 64.
//            The scores of P * 64 tokens must fit shared memory.
// Guide      notebooks/guide/kernels_attention.md: pages, lanes, passes
// Measured   64 sequences of 1024 tokens, 32 heads, on an H200: 126 us, 0.50 of the speed of memory.
// PTX ISA    9.7.9 shfl.sync; 9.7.3 ex2.approx; 9.7.4 sub.f16x2, fma.f16x2; 9.7.8 lop3.
#include <cuda_fp16.h>

#include "attention_out.cuh"
#include "kv4_features.cuh"
#include "reduce.cuh"
#include "timeline.cuh"

namespace {

constexpr int PAGE = 64, ROW = 64, PAGE_BYTES = PAGE * (ROW + 4);
constexpr int THREADS = 256, PARTS = 4, DIMS = 32;
static_assert(THREADS / PARTS == PAGE, "a page at a time");
constexpr float LOG2E = 1.4426950408889634f;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 3) attention_kv4_simple(
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
    float query[DIMS];
#pragma unroll
    for (int i = 0; i < DIMS; ++i) query[i] = __half2float(q[row + lane_part * DIMS + i]) * (softmax_scale * LOG2E);
    __syncthreads();

    PHASE(SCORES);
    float row_max = ptxlab::minus_infinity();
    const auto score = [&](int i, bool inside) {
        const unsigned char* page = keys + pages[i] * pitch;
        const uint4 k = *reinterpret_cast<const uint4*>(page + threadIdx.x * 16);
        const __half2 c = inside ? ptxlab::kv4_constants(page, slot) : __half2{};
        float x[DIMS], dot = 0;
        ptxlab::dequant_kv4(x, k, __high2half(c));
#pragma unroll
        for (int d = 0; d < DIMS; ++d) dot += query[d] * x[d];
        dot *= __low2float(c);
#pragma unroll
        for (int mask = 1; mask < PARTS; mask *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, mask);
        if (!inside) dot = ptxlab::minus_infinity();
        row_max = fmaxf(row_max, dot);
        if (lane_part == 0) scores[i * PAGE + slot] = dot;
    };
#pragma unroll 4
    for (int i = 0; i < full_pages; ++i) score(i, true);
    if (tail_tokens) score(full_pages, slot < tail_tokens);
    PHASE(SOFTMAX);
    row_max = ptxlab::block_max<THREADS>(row_max, partial);  // behind its barrier the scores are there for everyone

    float sum = 0;
    for (int t = threadIdx.x; t < num_pages * PAGE; t += THREADS) {
        scores[t] = exp2f(scores[t] - row_max);
        sum += scores[t];
    }
    sum = ptxlab::block_sum<THREADS>(sum, partial);

    PHASE(VALUES);
    float acc[DIMS] = {};
    const auto add = [&](int i, bool inside) {
        const unsigned char* page = values + pages[i] * pitch;
        const uint4 v = *reinterpret_cast<const uint4*>(page + threadIdx.x * 16);
        const __half2 c = inside ? ptxlab::kv4_constants(page, slot) : __half2{};
        const float weight = scores[i * PAGE + slot] * __low2float(c);
        float x[DIMS];
        ptxlab::dequant_kv4(x, v, __high2half(c));
#pragma unroll
        for (int d = 0; d < DIMS; ++d) acc[d] += weight * x[d];
    };
#pragma unroll 4
    for (int i = 0; i < full_pages; ++i) add(i, true);
    if (tail_tokens) add(full_pages, slot < tail_tokens);
    PHASE(EPILOGUE);
    ptxlab::store_slots<THREADS, DIMS>(acc, sum > 0 ? 1 / sum : 0, sums, out + row);
}
