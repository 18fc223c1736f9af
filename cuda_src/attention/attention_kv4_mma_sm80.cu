// attention_kv4_mma_sm80: decode attention over a paged cache on tensor cores, from Ampere on: the whole contract.
//
// All queries that share a kv head (the heads of its group, times T) read its keys and values once: they are the
// columns of an MMA whose other operand are keys, and then values, dequantised by AND alone: a nibble under a mask is
// the FP16 subnormal v * 2^-24, which tensor cores take exactly. Units are split evenly over blocks.
//
// Contract   out[b, t, h] = sum_i p[i] v[i], p = softmax of softmax_scale * q[b, t, h] . k[i] over the keys that query
//            t sees: i up to lengths[b] - T + t, of these the last `window` if that is not 0. lse: natural logarithm of
//            the sum of exponentials. Nothing seen: zeros, and lse -infinity. Head h reads kv head h / (Hq / Hkv). k =
//            (integer - zero) * scale per token and head, f16 in the page (CHANNEL 0), or per channel, f32 [Hkv, D]
//            (CHANNEL 1, where 8 bits are signed and have no zero). What one block has not seen all of goes to
//            `partial`; attention_merge, or the last of these blocks, puts it together.
// Guide      notebooks/guide/kernels_attention.md: work, warps, scores, values, stages, constants
// Measured   64 sequences of 1024 tokens, 32 heads, on an H200: 94 us, 0.66 of the speed of memory.
// PTX ISA    9.7.14.5.8 mma.m16n8k16; 9.7.14.5.17 movmatrix; 9.7.9.25 cp.async; 9.7.3 ex2, lg2, rcp; 9.7.13.5 atom.
#include "exponent.cuh"
#include "hadamard.cuh"
#include "mma.cuh"
#include "mma_f16.cuh"
#include "parts.cuh"
#include "segments.cuh"
#include "timeline.cuh"

#ifndef D
#define D 128      // of a head: 64, 128, 256
#define PAGE 64    // tokens of a page: 16, 32, 64
#define BITS 4     // of a key or value: 4, or 8
#define CHANNEL 0  // scale and zero: 0 per token, in the page; 1 per channel
#define BF16 0     // queries and results: 0 f16, 1 bf16
#define COLUMNS 8  // queries of a unit, 8 or 16
#define WARPS 4
#define STAGES 3
#define TOKENS 32  // of an item
#define SUM_PAD 4  // floats between rows of sums in shared memory
#define FUSED 0    // 1: the last block that has part of a unit puts it together, and no attention_merge is needed
#endif

#ifndef ROTATED
#define ROTATED 0  // 1: keys are rotated by a Hadamard matrix, so queries are too
#endif

namespace {

using ptxlab::u32;
using Segments = ptxlab::Segments<2, 4>;  // a unit costs its tiles, but two at least
constexpr int THREADS = 32 * WARPS, SHARE = ptxlab::TILE / TOKENS;
constexpr int ROW = D * BITS / 8, PAGE_BYTES = PAGE * (ROW + (CHANNEL ? 0 : 4)),
              PAGES = TOKENS > PAGE ? TOKENS / PAGE : 1;
constexpr int PART = TOKENS * ROW, STAGE = 2 * (PART + (CHANNEL ? 0 : TOKENS * 4));
constexpr int PER_WORD = 32 / BITS, HALVES = PER_WORD / 2;      // integers, and pairs of them, of a word
constexpr int K_WORDS = ROW / 16, V_WORDS = ROW / 32;           // of a row, per lane
constexpr int MT = TOKENS / 16, NT = COLUMNS / 8, DT = D / 16;  // MMA tiles of tokens, of queries, of dims
constexpr int PITCH = D + SUM_PAD;                              // of sums in shared memory
constexpr float LOWEST = -1e30f, LOG2E = 1.4426950408889634f;
constexpr u32 FLIP = BITS == 8 && CHANNEL ? 0x80808080u : 0;  // s8 as u8 with a zero of 128
constexpr u32 NEUTRAL = 0x00003c00;                           // scale 1, zero 0: of tokens that there are not
static_assert((COLUMNS == 8 || COLUMNS == 16) && TOKENS == 32 && SUM_PAD % 4 == 0);

__device__ __forceinline__ float low_half(u32 pair) { return __low2float(ptxlab::as_half2(pair)); }
__device__ __forceinline__ float high_half(u32 pair) { return __high2float(ptxlab::as_half2(pair)); }
__device__ __forceinline__ u32 half_pair(float a, float b) { return ptxlab::as_bits(__floats2half2_rn(a, b)); }

// Where byte `at` of a stage's keys or values lies.
__device__ __forceinline__ int swizzled(int at) { return at ^ ((at >> 7 & 3 ^ at >> 9 & 1) << 5); }

// The integers of a word, in pairs, as FP16 subnormals.
__device__ __forceinline__ void subnormals(u32 (&h)[HALVES], u32 word) {
    if constexpr (BITS == 4) {
        const uint4 v = ptxlab::subnormal_u4(word);
        h[0] = v.x, h[1] = v.y, h[2] = v.z, h[3] = v.w;
    } else {
        const uint2 v = ptxlab::subnormal_u8(word ^ FLIP);
        h[0] = v.x, h[1] = v.y;
    }
}

// Dim of half b of pair r of a word of keys, and what the pair counts.
__device__ __forceinline__ constexpr int dim_of(int r, int b) { return r / 2 * 4 + r % 2 + 2 * b; }
__device__ __forceinline__ constexpr float count_of(int r) { return r < 2 ? 1 : 16; }

// The items of one warp, segment after segment: as it multiplies them, and, as many items ahead as it has stages, as it
// asks for them.
struct Items {
    Segments walk;
    int item, items;  // of this segment: the warp's next one, and all

    __device__ __forceinline__ Items(const Segments& all) : walk(all), item(threadIdx.x / 32) { count(); }

    __device__ __forceinline__ void count() {
        items = !walk.has_segment()
                    ? 0
                    : min(walk.tile_count() * SHARE,
                          (walk.length - (walk.window_tile + walk.first_tile()) * ptxlab::TILE + TOKENS - 1) / TOKENS);
    }
    __device__ __forceinline__ void next_segment() {  // items of all segments are dealt out as if they were of one
        item -= items;
        walk.advance();
        count();
    }
    __device__ __forceinline__ int position() const {
        return (walk.window_tile + walk.first_tile()) * ptxlab::TILE + item * TOKENS;
    }
};

// Asks for a warp's items. The entry of the block table is loaded one item before it is needed.
struct Loader {
    Items at;
    const unsigned char *pool, *of_head;
    const int* table;
    size_t pitch;  // of the keys, or of the values, of all heads of a page
    int P, splits, entry;

    __device__ __forceinline__ Loader(const Items& from, const unsigned char* pool, const int* table, int Hkv, int P,
                                      int splits)
        : at(from), pool(pool), of_head(pool), table(table), pitch(size_t(Hkv) * PAGE_BYTES), P(P), splits(splits),
          entry(0) {
        enter();
        look_up();
    }

    __device__ __forceinline__ void enter() { of_head = pool + size_t(at.walk.unit_index / splits) * PAGE_BYTES; }

    __device__ __forceinline__ void look_up() {
        while (at.walk.has_segment() && at.item >= at.items) {
            at.next_segment();
            enter();
        }
        if (!at.walk.has_segment()) return;
        // instead of one that there is not, the last
        const int last = (at.walk.length - 1) / PAGE, page = at.position() / PAGE + threadIdx.x % PAGES;
        entry = table[size_t(at.walk.sequence) * P + min(page, last)];
    }

    // Asks for the next item, if there is one; a group of copies in either case.
    __device__ __forceinline__ void fetch(unsigned char* stage) {
        if (at.walk.has_segment()) {
            const int lane = threadIdx.x % 32, offset = at.position() % PAGE;
            const unsigned char* page[PAGES];
#pragma unroll
            for (int j = 0; j < PAGES; ++j) page[j] = of_head + size_t(__shfl_sync(~0u, entry, j)) * (2 * pitch);
#pragma unroll
            for (int part = 0; part < 2; ++part) {
#pragma unroll
                for (int i = 0; i < PART / 512; ++i) {
                    const int j = i * 512 / ROW / PAGE, byte = i * 512 + lane * 16;
                    ptxlab::cp_async_16(stage + part * PART + swizzled(byte),
                                        page[j] + part * pitch + offset * ROW + byte - j * PAGE * ROW, true);
                }
            }
            if (!CHANNEL && lane < TOKENS / 2) {
                const int part = lane / (TOKENS / 4), byte = lane * 16 % (TOKENS * 4), j = byte / 4 / PAGE;
                const unsigned char* from = (j ? page[PAGES - 1] : page[0]) + part * pitch;
                ptxlab::cp_async_16(stage + 2 * PART + lane * 16, from + PAGE * ROW + (offset - j * PAGE) * 4 + byte,
                                    true);
            }
            at.item += WARPS;
            look_up();
        }
        ptxlab::cp_async_commit();
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_kv4_mma_sm80(
    const unsigned short* __restrict__ q,    // f16 or bf16 [B, T, Hq, D]
    const unsigned char* __restrict__ pool,  // u8 [pages, 2, Hkv, PAGE_BYTES]
    const int* __restrict__ table,           // s32 [B, P]
    const int* __restrict__ lengths,         // s32 [B]
    // f32 [Hkv, D] if CHANNEL, else null
    const float* __restrict__ k_scale, const float* __restrict__ k_zero, const float* __restrict__ v_scale,
    const float* __restrict__ v_zero,
    unsigned short* __restrict__ out,  // f16 or bf16 [B, T, Hq, D]
    float* __restrict__ lse,           // f32 [B, T, Hq], or null
    float* partial,                    // f32 [gridDim.x, 2, columns, D]: sums of 2^(score - largest) * value
    float2* stats,                     // f32 [gridDim.x, 2, columns, 2]: the largest score, the sum of 2^(..)
    // s32 FUSED: [gridDim.x, columns], zeros before and after; else [gridDim.x, 2]: the unit that
    // begins in part 1, and the blocks that have of it
    int* segments, float softmax_scale, int B, int T, int Hq, int Hkv, int P, int window) {
    // rings [WARPS][STAGES][STAGE], sums [WARPS][columns][PITCH], stats
    extern __shared__ __align__(128) unsigned char memory[];
    const int group = Hq / Hkv, splits = (group * T + COLUMNS - 1) / COLUMNS, columns = min(COLUMNS, group * T);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    TIMELINE_THREAD(lane == 0);
    unsigned char* ring = memory + warp * (STAGES * STAGE);
    float* sums = reinterpret_cast<float*>(memory + WARPS * STAGES * STAGE);
    float4* found = reinterpret_cast<float4*>(sums + WARPS * columns * PITCH);  // [WARPS][columns]: maximum, sum, zeros

    PHASE(LOAD);
    Items at(Segments(lengths, Segments::nearest_of(lengths, B), B, Hkv * splits, T, window));
    Loader loader(at, pool, table, Hkv, P, splits);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) loader.fetch(ring + s * STAGE);

    if (!FUSED && threadIdx.x == 0) reinterpret_cast<int2*>(segments)[blockIdx.x] = make_int2(0, 0);
    int slot = 0;
    for (; at.walk.has_segment(); at.next_segment()) {
        const int head = at.walk.unit_index / splits, column0 = at.walk.unit_index % splits * COLUMNS,
                  here = min(columns, group * T - column0);
        const auto row_of = [&](int column) {  // of out: query and head of a column
            return (size_t(at.walk.sequence) * T + (column0 + column) / group) * Hq + head * group +
                   (column0 + column) % group;
        };

        // Queries as operand B: of query g the dims of the words that the lane has of keys.
        PHASE(SETUP);
        u32 query[NT][K_WORDS][HALVES];
        float factor[NT][2], column_sum[NT][2];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const bool inside = n * 8 + g < here;
            const unsigned short* from = q + row_of(inside ? n * 8 + g : 0) * D;
            const auto dim = [&](int w) { return (w / 2 * 8 + 2 * t + w % 2) * PER_WORD; };
            u32 raw[K_WORDS][PER_WORD / 2];
#pragma unroll
            for (int w = 0; w < K_WORDS; ++w)
#pragma unroll
                for (int i = 0; i < PER_WORD / 2; i += 2) {
                    const uint2 both =
                        inside ? *reinterpret_cast<const uint2*>(from + dim(w) + 2 * i) : make_uint2(0, 0);
                    raw[w][i] = both.x, raw[w][i + 1] = both.y;
                }
            const auto loaded = [&](int w, int i) {
                const u32 bits = i % 2 ? raw[w][i / 2] >> 16 : raw[w][i / 2] & 0xffff;
                const float x = BF16 ? __uint_as_float(bits << 16) : low_half(bits);
                return CHANNEL ? x * k_scale[head * D + dim(w) + i] : x;
            };
            float rotated[K_WORDS][PER_WORD];
            if constexpr (ROTATED) {
#pragma unroll
                for (int w = 0; w < K_WORDS; ++w)
#pragma unroll
                    for (int i = 0; i < PER_WORD; ++i) rotated[w][i] = loaded(w, i);
                ptxlab::rotate_query<2 * PER_WORD, 4>(rotated, t);
            }
            const auto element = [&](int w, int i) { return ROTATED ? rotated[w][i] : loaded(w, i); };
            const auto zero = [&](int w, int i) {
                return !CHANNEL ? 1 : BITS == 8 ? 128 : k_zero[head * D + dim(w) + i];
            };
            float largest = 0, sum = 0;
#pragma unroll
            for (int w = 0; w < K_WORDS; ++w)
#pragma unroll
                for (int i = 0; i < PER_WORD; ++i) largest = fmaxf(largest, fabsf(element(w, i)));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            const float unit = ptxlab::leading_power(fmaxf(largest, 0x1p-100f)),
                        power = ptxlab::inverse_power(unit) * 0x1p14f;
#pragma unroll
            for (int w = 0; w < K_WORDS; ++w)
#pragma unroll
                for (int r = 0; r < HALVES; ++r) {
                    const int low = dim_of(r, 0), high = dim_of(r, 1);
                    const float scaled = power / count_of(r);
                    query[n][w][r] = half_pair(element(w, low) * scaled, element(w, high) * scaled);
                    sum += (low_half(query[n][w][r]) * zero(w, low) + high_half(query[n][w][r]) * zero(w, high)) *
                           count_of(r);
                }
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                // 2^24 / 2^14
                factor[n][b] = __shfl_sync(~0u, unit, 4 * (2 * t + b)) * (softmax_scale * LOG2E * 0x1p10f);
                column_sum[n][b] = __shfl_sync(~0u, sum, 4 * (2 * t + b)) * -0x1p-24f;
            }
        }

        int end[NT][2];  // tokens from here on a query does not see
        float m[NT][2], l[NT][2] = {}, o[DT][NT][4] = {}, zeros[NT][4] = {};
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                end[n][b] = at.walk.length - T + 1 + (column0 + n * 8 + 2 * t + b) / group;
                m[n][b] = LOWEST;
            }

        for (; at.item < at.items; at.item += WARPS) {
            const int position = at.position();
            const int inside = at.walk.length - position;  // tokens that there are
            const bool masked =
                position + TOKENS > at.walk.length - T + 1 || (window > 0 && position < at.walk.length - window);
            PHASE(WAIT_COPY);
            ptxlab::cp_async_wait<STAGES - 2>();
            __syncwarp();  // the item is there for all lanes, and all are done with the one before
            PHASE(LOAD);
            loader.fetch(ring + (slot + STAGES - 1) % STAGES * STAGE);
            const unsigned char* keys = ring + slot * STAGE;
            const unsigned char* values = keys + PART;
            const u32* constants = reinterpret_cast<const u32*>(keys + 2 * PART);
            slot = slot + 1 == STAGES ? 0 : slot + 1;

            PHASE(SCORES);
            float s[MT][NT][4], k_factor[MT][2], v_log[MT][2], v_inverse[MT][2];
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int token = i * 16 + h * 8 + g;
                    float zero = 1;
                    k_factor[i][h] = v_inverse[i][h] = 1, v_log[i][h] = 0;
                    if (!CHANNEL) {
                        u32 k = constants[token], v = constants[TOKENS + token];
                        if (token >= inside) k = v = NEUTRAL;
                        k_factor[i][h] = low_half(k), zero = high_half(k);
                        v_log[i][h] = ptxlab::log2_approx(low_half(v)), v_inverse[i][h] = __fdividef(1, low_half(v));
                    }
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int b = 0; b < 2; ++b) s[i][n][h * 2 + b] = zero * column_sum[n][b];
                }
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int j = 0; j < K_WORDS / 2; ++j) {
                    const int at_row = (i * 16 + g) * ROW + j * 32 + t * 8;
                    const uint2 top = *reinterpret_cast<const uint2*>(keys + swizzled(at_row));
                    const uint2 bottom = *reinterpret_cast<const uint2*>(keys + swizzled(at_row + 8 * ROW));
#pragma unroll
                    for (int w = 0; w < 2; ++w) {
                        u32 a[HALVES], b[HALVES];
                        subnormals(a, w ? top.y : top.x);
                        subnormals(b, w ? bottom.y : bottom.x);
#pragma unroll
                        for (int r = 0; r < HALVES; r += 2)
#pragma unroll
                            for (int n = 0; n < NT; ++n)
                                ptxlab::mma_f16(s[i][n], a[r], b[r], a[r + 1], b[r + 1], query[n][2 * j + w][r],
                                                query[n][2 * j + w][r + 1]);
                    }
                }

            PHASE(SOFTMAX);
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        s[i][n][e] = s[i][n][e] * (k_factor[i][e / 2] * factor[n][e % 2]) + v_log[i][e / 2];
            if (masked) {
#pragma unroll
                for (int i = 0; i < MT; ++i)
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const int token = position + i * 16 + e / 2 * 8 + g, limit = end[n][e % 2];
                            if (token >= limit || (window > 0 && token < limit - window))
                                s[i][n][e] = -ptxlab::infinity();
                        }
            }
            bool larger = false;
            float less[NT][2];
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    float most = LOWEST;
#pragma unroll
                    for (int i = 0; i < MT; ++i) most = fmaxf(most, fmaxf(s[i][n][b], s[i][n][b + 2]));
#pragma unroll
                    for (int mask = 4; mask < 32; mask *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
                    larger |= most > m[n][b];
                    less[n][b] = ptxlab::exp2_approx(m[n][b] - fmaxf(m[n][b], most));
                    m[n][b] = fmaxf(m[n][b], most);
                }
            if (__any_sync(~0u, larger)) {
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int b = 0; b < 2; ++b) {
                        l[n][b] *= less[n][b], zeros[n][b] *= less[n][b];
#pragma unroll
                        for (int d = 0; d < DT; ++d) o[d][n][b] *= less[n][b], o[d][n][b + 2] *= less[n][b];
                    }
            }

            PHASE(VALUES);
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                u32 p[NT][2], zero[2] = {0x3c003c00u, 0x3c003c00u};  // operand B; by channel the plain sum of weights
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        const float p0 = ptxlab::exp2_approx(s[i][n][h * 2] - m[n][0]),
                                    p1 = ptxlab::exp2_approx(s[i][n][h * 2 + 1] - m[n][1]);
                        l[n][0] += p0 * v_inverse[i][h], l[n][1] += p1 * v_inverse[i][h];
                        p[n][h] = ptxlab::transposed(half_pair(p0, p1));
                    }
                    if (!CHANNEL) {
                        const int token = i * 16 + h * 8 + 2 * t;
                        u32 first = constants[TOKENS + token], second = constants[TOKENS + token + 1];
                        if (token >= inside) first = NEUTRAL;
                        if (token + 1 >= inside) second = NEUTRAL;
                        zero[h] = __byte_perm(first, second, 0x7632);
                    }
                }
#pragma unroll
                for (int n = 0; n < NT; ++n)
                    ptxlab::mma_f16(zeros[n], zero[0], zero[0], zero[1], zero[1], p[n][0], p[n][1]);
#pragma unroll
                for (int j = 0; j < V_WORDS; j += 2) {
                    u32 word[4][2];  // of tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        const int row = (i * 16 + k / 2 * 8 + 2 * t + k % 2) * ROW;
                        if (V_WORDS == 1) {
                            word[k][0] = *reinterpret_cast<const u32*>(values + swizzled(row + g * 4));
                        } else {
                            const uint2 both = *reinterpret_cast<const uint2*>(values + swizzled(row + j * 32 + g * 8));
                            word[k][0] = both.x, word[k][1] = both.y;
                        }
                    }
#pragma unroll
                    for (int w = 0; w < (V_WORDS == 1 ? 1 : 2); ++w)
#pragma unroll
                        for (int up = 0; up < 2; ++up) {  // low and high halves of the words
                            u32 a[HALVES], b[HALVES];
                            subnormals(a, __byte_perm(word[0][w], word[1][w], up ? 0x7632 : 0x5410));
                            subnormals(b, __byte_perm(word[2][w], word[3][w], up ? 0x7632 : 0x5410));
#pragma unroll
                            for (int r = 0; r < HALVES; r += 2)
#pragma unroll
                                for (int n = 0; n < NT; ++n)
                                    ptxlab::mma_f16(o[(j + w) * HALVES + r + up][n], a[r], a[r + 1], b[r], b[r + 1],
                                                    p[n][0], p[n][1]);
                        }
                }
            }
        }

        PHASE(REDUCE);
        // The warps' sums, put together: tile HALVES w + r + up has dims 4 .. of the lane's word w: 2 up + (0, 1) + 4
        // (r > 0), of row g and g + 8.
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int b = 0; b < 2; ++b) {
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) l[n][b] += __shfl_xor_sync(~0u, l[n][b], mask);
                const int column = n * 8 + 2 * t + b;
                if (column >= here) continue;
                if (g == 0)
                    found[warp * columns + column] =
                        make_float4(m[n][b], CHANNEL ? zeros[n][b] : l[n][b], zeros[n][b], 0);
                float* to = sums + (warp * columns + column) * PITCH;
#pragma unroll
                for (int d = 0; d < DT; ++d) {
                    const int w = d / HALVES, r = d % HALVES / 2 * 2, up = d % 2;
                    const int word = V_WORDS == 1 ? g : w / 2 * 16 + 2 * g + w % 2;
                    const float back = 0x1p24f / count_of(r);
                    *reinterpret_cast<float2*>(to + word * PER_WORD + 2 * r + 2 * up) =
                        make_float2(o[d][n][b] * back, o[d][n][b + 2] * back);
                }
            }
        __syncthreads();
#pragma unroll 1
        for (int c = warp; c < here; c += WARPS) {
            const float4 of = lane < WARPS ? found[lane * columns + c] : make_float4(LOWEST, 0, 0, 0);
            ptxlab::Row<D> row = {};
            row.largest = of.x;
#pragma unroll
            for (int mask = 16; mask > 0; mask /= 2)
                row.largest = fmaxf(row.largest, __shfl_xor_sync(~0u, row.largest, mask));
            const float factor_here = ptxlab::exp2_approx(of.x - row.largest);
            float zero_sum = of.z * factor_here;
            row.sum = of.y * factor_here;
#pragma unroll
            for (int mask = 16; mask > 0; mask /= 2) {
                row.sum += __shfl_xor_sync(~0u, row.sum, mask);
                zero_sum += __shfl_xor_sync(~0u, zero_sum, mask);
            }
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float times = __shfl_sync(~0u, factor_here, w);
#pragma unroll
                for (int i = 0; i < row.PIECES; ++i)
                    if (row.has_piece(i)) {
                        const float4 v =
                            *reinterpret_cast<const float4*>(sums + (w * columns + c) * PITCH + row.dim(i));
                        row.v[i].x += times * v.x, row.v[i].y += times * v.y, row.v[i].z += times * v.z,
                            row.v[i].w += times * v.w;
                    }
            }
#pragma unroll
            for (int i = 0; i < row.PIECES; ++i)
                if (row.has_piece(i)) {
                    float4 zero = make_float4(1, 1, 1, 1), scale = zero;
                    if (CHANNEL) scale = *reinterpret_cast<const float4*>(v_scale + head * D + row.dim(i));
                    if (CHANNEL)
                        zero = BITS == 8 ? make_float4(128, 128, 128, 128)
                                         : *reinterpret_cast<const float4*>(v_zero + head * D + row.dim(i));
                    float4& v = row.v[i];
                    v = make_float4((v.x - zero_sum * zero.x) * scale.x, (v.y - zero_sum * zero.y) * scale.y,
                                    (v.z - zero_sum * zero.z) * scale.z, (v.w - zero_sum * zero.w) * scale.w);
                }
            if (at.walk.tile_count() == at.walk.tiles) {
                row.store<BF16>(out, lse, row_of(c));
                continue;
            }
            const int block = at.walk.first_block(), blocks = at.walk.blocks();
            row.write(partial, stats, (size_t(blockIdx.x) * 2 + (at.walk.first_tile() == 0)) * columns + c);
            if (!FUSED) {
                if (at.walk.first_tile() == 0 && c == 0 && lane == 0)
                    reinterpret_cast<int2*>(segments)[blockIdx.x] =
                        make_int2(at.walk.sequence * (Hkv * splits) + at.walk.unit_index, blocks);
                continue;
            }
            if (!ptxlab::last_of(segments + block * columns + c, blocks)) continue;
            if (lane == 0) segments[block * columns + c] = 0;  // for the next launch
            ptxlab::Row<D>::merged(partial, stats, block, blocks, columns, c).store<BF16>(out, lse, row_of(c));
        }
        __syncthreads();  // the sums are free again
    }
    for (int b = blockIdx.x; b < B; b += gridDim.x)  // nobody's: sequences of no tokens
        if (lengths[b] == 0) {
            for (size_t i = threadIdx.x; i < size_t(T) * Hq * D / 2; i += THREADS)
                reinterpret_cast<u32*>(out)[size_t(b) * T * Hq * D / 2 + i] = 0;
            for (int i = threadIdx.x; lse && i < T * Hq; i += THREADS)
                lse[size_t(b) * T * Hq + i] = -ptxlab::infinity();
        }
}
