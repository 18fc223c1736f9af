// attention_kv4_sm90: decode attention over a paged 4-bit KV cache, at the speed of memory.
#include "griddep.cuh"
#include "mbarrier.cuh"
#include "mma_f16.cuh"
#include "output.cuh"
#include "segments.cuh"

#ifndef D
#define D 128       // of a head: 64, 128, 256
#define PAGE 64     // tokens of a page: 16, 32, 64
#define BITS 4      // of a key or value: 4, or 8
#define CHANNEL 0   // scale and zero: 0 per token, in the page; 1 per channel
#define BF16 0      // queries and results: 0 f16, 1 bf16
#define COLUMNS 8   // queries of a unit, a multiple of 8
#define TOKENS 64   // of a tile that one warp takes: 16, 32, 64
#define WARPS 8     // that multiply
#define STAGES 12   // tiles in flight
#define SLOTS 2     // units in flight
#define RESIDENT 1  // blocks per SM
#endif

namespace {

using ptxlab::u32;
using ptxlab::u64;
using ptxlab::TILE;
constexpr int ROW = D * BITS / 8;                              // bytes of a token's keys or values
constexpr int PAGE_BYTES = PAGE * (ROW + (CHANNEL ? 0 : 4));
constexpr int PAGES = TILE / PAGE, STAGE = 2 * PAGES * PAGE_BYTES;  // of a tile: keys, then values
constexpr int SHARE = TILE / TOKENS, GROUPS = WARPS / SHARE;   // warps that share a tile; tiles multiplied at a time
constexpr int MT = TOKENS / 16, NT = COLUMNS / 8, DT = D / 16; // MMA tiles of tokens, of queries, of dims
constexpr int THREADS = 32 * (WARPS + 3);
constexpr int WORDS = ROW / 16, VECTOR = WORDS < 4 ? WORDS : 4, PER_WORD = 32 / BITS, REGISTERS = PER_WORD / 2;  // of a row, per lane
constexpr int VALUES = ROW / 32;                               // words of a token's values, per lane
constexpr int PITCH = D + 4;                                   // of sums in shared memory
constexpr int QUERY = NT * WORDS * REGISTERS * 128 + COLUMNS * 4 + 16;
constexpr float LOWEST = -1e30f;                               // below any score, yet finite
constexpr u32 FLIP = BITS == 8 && CHANNEL ? 0x80808080u : 0;   // s8 as u8 with a zero of 128
static_assert(GROUPS <= STAGES && WARPS % SHARE == 0 && COLUMNS <= 32);

// Where row `token` of a tile's keys or values lies, and its scale and zero.
__device__ __forceinline__ int row_at(int token) { return token / PAGE * PAGE_BYTES + token % PAGE * ROW; }
__device__ __forceinline__ int scale_at(int token) { return token / PAGE * PAGE_BYTES + PAGE * ROW + token % PAGE * 4; }

__device__ __forceinline__ float low_half(u32 pair) { return __low2float(ptxlab::as_half2(pair)); }
__device__ __forceinline__ float high_half(u32 pair) { return __high2float(ptxlab::as_half2(pair)); }
__device__ __forceinline__ u32 half_pair(float a, float b) { return ptxlab::as_bits(__floats2half2_rn(a, b)); }

// COUNT words from shared memory, in loads of up to 16 bytes.
template <int COUNT>
__device__ __forceinline__ void load_words(u32 (&w)[COUNT], const unsigned char* from) {
    if constexpr (COUNT == 1) {
        w[0] = *reinterpret_cast<const u32*>(from);
    } else if constexpr (COUNT == 2) {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        w[0] = v.x, w[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const uint4 v = *reinterpret_cast<const uint4*>(from + 4 * i);
            w[i] = v.x, w[i + 1] = v.y, w[i + 2] = v.z, w[i + 3] = v.w;
        }
    }
}

// Operand halves of the integers of a word: of each MMA two registers.
__device__ __forceinline__ void subnormals(u32 (&h)[REGISTERS], u32 word) {
    if constexpr (BITS == 4) {
        const uint4 v = ptxlab::subnormal_u4(word);
        h[0] = v.x, h[1] = v.y, h[2] = v.z, h[3] = v.w;
    } else {
        const uint2 v = ptxlab::subnormal_u8(word ^ FLIP);
        h[0] = v.x, h[1] = v.y;
    }
}

struct Shared {
    unsigned char *ring, *queries;
    float *sums;
    float4 *stats;
    int columns;
    __device__ __forceinline__ Shared(unsigned char* base, int columns) : columns(columns) {
        ring = base;
        queries = ring + STAGES * STAGE;
        stats = reinterpret_cast<float4*>(queries + SLOTS * QUERY);
        sums = reinterpret_cast<float*>(stats + SLOTS * WARPS * columns);
    }
    // [NT][WORDS][32][REGISTERS] halves, then the sum of each column, then the factor of the scores
    __device__ __forceinline__ unsigned char* query(int slot) const { return queries + slot * QUERY; }
    __device__ __forceinline__ float* column_sums(int slot) const { return reinterpret_cast<float*>(query(slot) + NT * WORDS * REGISTERS * 128); }
    __device__ __forceinline__ float4* stat(int slot, int warp) const { return stats + (slot * WARPS + warp) * columns; }  // max, sum, zeros
    __device__ __forceinline__ float* sum(int slot, int warp) const { return sums + (slot * WARPS + warp) * columns * PITCH; }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
attention_kv4_sm90(const unsigned short* q,     // f16 or bf16 [B, T, Hq, D]
                   const unsigned char* pool,   // u8 [pages, 2, Hkv, PAGE_BYTES]
                   const int* table,            // s32 [B, P]
                   const int* lengths,          // s32 [B]
                   const float* k_scale, const float* k_zero,  // f32 [Hkv, D] if CHANNEL, else null
                   const float* v_scale, const float* v_zero,
                   unsigned short* out,         // f16 or bf16 [B, T, Hq, D]
                   float* lse,                  // f32 [B, T, Hq], or null
                   float* partial,              // f32 [gridDim.x, 2, columns, D]: scratch
                   float2* stats,               // f32 [gridDim.x, 2, columns, 2]: scratch
                   int* segments,               // s32 [gridDim.x, 2]: scratch
                   float softmax_scale, int B, int T, int Hq, int Hkv, int P, int window) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ u64 full[STAGES], empty[STAGES], ready[SLOTS], summed[SLOTS], cleared[SLOTS];
    const int group = Hq / Hkv, splits = (group * T + COLUMNS - 1) / COLUMNS, columns = min(COLUMNS, group * T);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Shared shared(memory, columns);

    if (warp == WARPS) {
        if (ptxlab::elect()) {
            for (int s = 0; s < STAGES; ++s) ptxlab::mbarrier_init(&full[s], 1), ptxlab::mbarrier_init(&empty[s], SHARE);
            for (int s = 0; s < SLOTS; ++s) ptxlab::mbarrier_init(&ready[s], 1), ptxlab::mbarrier_init(&summed[s], WARPS), ptxlab::mbarrier_init(&cleared[s], 1);
            ptxlab::fence_mbarrier_init();
        }
        __syncwarp();
    }
    __syncthreads();
    ptxlab::launch_dependents();
    ptxlab::wait_for_predecessors();
    ptxlab::Segments walk(lengths, B, Hkv * splits, T, window);

    if (warp == WARPS) {  // asks for copies
        const bool elected = ptxlab::elect();
        ptxlab::Slot<STAGES> slot;
        for (; walk.more(); walk.advance()) {
            const int head = walk.unit / splits, page0 = (walk.begin + walk.first) * PAGES;
            const int pages = min(walk.count() * PAGES, (walk.length + PAGE - 1) / PAGE - page0);
            const unsigned char* of_head = pool + size_t(head) * PAGE_BYTES;
            const size_t pitch = size_t(Hkv) * PAGE_BYTES;
            for (int p = 0; p < pages; p += 32) {
                const int entry = table[size_t(walk.sequence) * P + page0 + min(p + lane, pages - 1)];  // what lacks of a tile: the last page again
                for (int i = 0; i < min(32, pages - p); i += PAGES, slot.advance()) {
                    ptxlab::mbarrier_wait(&empty[slot.index], slot.parity ^ 1);  // the first round finds them empty
                    unsigned char* stage = shared.ring + slot.index * STAGE;
                    if (elected) ptxlab::mbarrier_arrive_expect(&full[slot.index], STAGE);
#pragma unroll
                    for (int j = 0; j < PAGES; ++j) {
                        const unsigned char* from = of_head + size_t(__shfl_sync(~0u, entry, i + j)) * (2 * pitch);
                        if (elected) ptxlab::bulk_load(stage + j * PAGE_BYTES, from, PAGE_BYTES, &full[slot.index]);
                        if (elected) ptxlab::bulk_load(stage + (PAGES + j) * PAGE_BYTES, from + pitch, PAGE_BYTES, &full[slot.index]);
                    }
                }
            }
        }
        return;
    }

    ptxlab::Slot<SLOTS> unit;
    if (warp == WARPS + 1) {  // queries -> operand B, once per unit
        for (; walk.more(); walk.advance(), unit.advance()) {
            const int head = walk.unit / splits, column0 = walk.unit % splits * COLUMNS;
            const auto load = [&](int n, int w, float (&x)[PER_WORD], float (&zero)[PER_WORD]) {  // what meets word w of the lane's keys
                const int column = column0 + n * 8 + g, dim = w / VECTOR * VECTOR * 4 * PER_WORD + (t * VECTOR + w % VECTOR) * PER_WORD;
                const bool inside = column < group * T;
                const unsigned short* from = q + ((size_t(walk.sequence) * T + column / group) * Hq + head * group + column % group) * D + dim;
                u32 pairs[REGISTERS];
#pragma unroll
                for (int i = 0; i < REGISTERS; ++i) pairs[i] = inside ? reinterpret_cast<const u32*>(from)[i] : 0;
#pragma unroll
                for (int i = 0; i < PER_WORD; ++i) {
                    const u32 bits = i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2] & 0xffff;
                    x[i] = BF16 ? __uint_as_float(bits << 16) : low_half(bits);
                    zero[i] = 1;
                    if (CHANNEL) x[i] *= k_scale[head * D + dim + i], zero[i] = BITS == 8 ? 128 : k_zero[head * D + dim + i];
                }
            };
            float x[PER_WORD], zero[PER_WORD];
            u32 largest = 0;
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int w = 0; w < WORDS; ++w) {
                    load(n, w, x, zero);
#pragma unroll
                    for (int i = 0; i < PER_WORD; ++i) largest = max(largest, __float_as_uint(fabsf(x[i])));
                }
            const int exponent = 141 - max(15, int(__reduce_max_sync(~0u, largest) >> 23));  // brings the largest to 2^14 .. 2^15
            const float power = __int_as_float((exponent + 127) << 23), back = __int_as_float((127 - exponent) << 23);
            ptxlab::mbarrier_wait(&cleared[unit.index], unit.parity ^ 1);
            u32* to = reinterpret_cast<u32*>(shared.query(unit.index));
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float sum = 0;
#pragma unroll
                for (int w = 0; w < WORDS; ++w) {
                    load(n, w, x, zero);
                    u32 pair[REGISTERS];
#pragma unroll
                    for (int i = 0; i < REGISTERS; ++i) {
                        const int e = i / 2 * 4 + i % 2;                     // halves (e0, e2), (e1, e3), (e4, e6), (e5, e7)
                        const float part = i < 2 ? power : power / 16;       // the high nibbles count 16
                        pair[i] = half_pair(x[e] * part, x[e + 2] * part);
                        sum += (low_half(pair[i]) * zero[e] + high_half(pair[i]) * zero[e + 2]) * (i < 2 ? 1 : 16);
                    }
#pragma unroll
                    for (int i = 0; i < REGISTERS; ++i) to[((n * WORDS + w) * 32 + lane) * REGISTERS + i] = pair[i];
                }
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (t == 0) shared.column_sums(unit.index)[n * 8 + g] = sum * -0x1p-24f;
            }
            if (lane == 0) shared.column_sums(unit.index)[COLUMNS] = softmax_scale * 1.44269504f * 0x1p24f * back;
            __syncwarp();
            if (lane == 0) ptxlab::mbarrier_arrive(&ready[unit.index]);
        }
        return;
    }

    int turn = 0;                                                            // the group of warps that takes the segment's first tile
    if (warp == WARPS + 2) {  // the warps' sums -> results, or partial ones
        int begun = 0, begun_unit = 0;
        for (; walk.more(); walk.advance(), unit.advance()) {
            const int count = walk.count(), head = walk.unit / splits, column0 = walk.unit % splits * COLUMNS;
            const int here = min(columns, group * T - column0);
            const bool whole = count == walk.tiles;
            const size_t part = blockIdx.x * 2 + (walk.first == 0);
            if (!whole && walk.first == 0) begun = 1 + ptxlab::Segments::ceil_div(walk.tiles - count, walk.piece), begun_unit = walk.sequence * (Hkv * splits) + walk.unit;
            float4* stat = shared.stat(unit.index, 0);
            const auto active = [&](int w) { return (w / SHARE - turn + GROUPS) % GROUPS < count; };
            ptxlab::mbarrier_wait(&summed[unit.index], unit.parity);
            float largest = LOWEST, sum = 0, zeros = 0;
            if (lane < here) {
#pragma unroll
                for (int w = 0; w < WARPS; ++w)
                    if (active(w)) largest = fmaxf(largest, stat[w * columns + lane].x);
#pragma unroll
                for (int w = 0; w < WARPS; ++w)
                    if (active(w)) {
                        const float4 s = stat[w * columns + lane];
                        const float factor = ptxlab::exp2_approx(s.x - largest);
                        sum += s.y * factor, zeros += s.z * factor;
                        stat[w * columns + lane].x = factor;
                    }
            }
            __syncwarp();
            const float inverse = sum > 0 ? 1 / sum : 0;
#pragma unroll 2
            for (int c = 0; c < here; ++c) {
                const float z = __shfl_sync(~0u, zeros, c), inv = __shfl_sync(~0u, inverse, c);
                const int column = column0 + c;
                const size_t row = (size_t(walk.sequence) * T + column / group) * Hq + head * group + column % group;
#pragma unroll
                for (int d = lane * 4; d < D; d += 128) {
                    float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
                    for (int w = 0; w < WARPS; ++w)
                        if (active(w)) {
                            const float factor = stat[w * columns + c].x;
                            const float4 v = *reinterpret_cast<const float4*>(shared.sum(unit.index, w) + c * PITCH + d);
                            o.x += factor * v.x, o.y += factor * v.y, o.z += factor * v.z, o.w += factor * v.w;
                        }
                    if (CHANNEL) {
                        const float4 s = *reinterpret_cast<const float4*>(v_scale + head * D + d);
                        const float4 zero = BITS == 8 ? make_float4(128, 128, 128, 128) : *reinterpret_cast<const float4*>(v_zero + head * D + d);
                        o = make_float4((o.x - z * zero.x) * s.x, (o.y - z * zero.y) * s.y, (o.z - z * zero.z) * s.z, (o.w - z * zero.w) * s.w);
                    } else {
                        o = make_float4(o.x - z, o.y - z, o.z - z, o.w - z);
                    }
                    if (whole)
                        *reinterpret_cast<uint2*>(out + row * D + d) =
                            make_uint2(ptxlab::rounded_pair<BF16>(o.x * inv, o.y * inv), ptxlab::rounded_pair<BF16>(o.z * inv, o.w * inv));
                    else
                        *reinterpret_cast<float4*>(partial + (part * columns + c) * D + d) = o;
                }
            }
            if (lane < here) {
                const int column = column0 + lane;
                if (!whole) stats[part * columns + lane] = make_float2(largest, sum);
                else if (lse) lse[(size_t(walk.sequence) * T + column / group) * Hq + head * group + column % group] =
                    sum > 0 ? (largest + ptxlab::log2_approx(sum)) * 0.693147181f : -ptxlab::infinity();
            }
            __syncwarp();
            if (lane == 0) ptxlab::mbarrier_arrive(&cleared[unit.index]);
            turn = (turn + count) % GROUPS;
        }
        if (lane == 0) *reinterpret_cast<int2*>(segments + blockIdx.x * 2) = make_int2(begun_unit, begun);
        for (int s = blockIdx.x; s < B; s += gridDim.x)                      // nobody's: sequences of no tokens
            if (lengths[s] == 0) {
                for (size_t i = lane; i < size_t(T) * Hq * D / 2; i += 32) reinterpret_cast<u32*>(out)[size_t(s) * T * Hq * D / 2 + i] = 0;
                for (int i = lane; lse && i < T * Hq; i += 32) lse[size_t(s) * T * Hq + i] = -ptxlab::infinity();
            }
        return;
    }

    // Scores, probabilities, sums.
    const int mine = warp / SHARE, token0 = warp % SHARE * TOKENS;           // of the groups; of a tile
    const int odd = t % 2;
    const u32 lows = odd ? 0x1054 : 0x5410, highs = odd ? 0x3276 : 0x7632;   // pairs of tokens: odd lanes load the second first (banks)
    int stage = mine, parity = 0;
    for (; walk.more(); walk.advance(), unit.advance()) {
        const int count = walk.count(), skip = (mine - turn + GROUPS) % GROUPS;
        turn = (turn + count) % GROUPS;
        ptxlab::mbarrier_wait(&ready[unit.index], unit.parity);
        if (skip < count) {
            u32 query[NT][WORDS][REGISTERS];
            float column_sum[NT][2], m[NT][2], l[NT][2] = {}, o[DT][NT][4] = {}, zeros[NT][4] = {};
            int limit[NT][2];                                                // tokens from here on a query does not see
            const float factor = shared.column_sums(unit.index)[COLUMNS];
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int w = 0; w < WORDS; ++w)
                    load_words(query[n][w], shared.query(unit.index) + ((n * WORDS + w) * 32 + lane) * REGISTERS * 4);
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    const int column = n * 8 + 2 * t + b;
                    column_sum[n][b] = shared.column_sums(unit.index)[column];
                    limit[n][b] = walk.length - T + 1 + (walk.unit % splits * COLUMNS + column) / group;
                    m[n][b] = LOWEST;
                }
            }
            for (int i = skip; i < count; i += GROUPS) {
                const int position = (walk.begin + walk.first + i) * TILE + token0;
                const bool masked = position + TOKENS > walk.length - T + 1 || (window > 0 && position < walk.length - window);
                const unsigned char* keys = shared.ring + stage * STAGE;
                const unsigned char* values = keys + PAGES * PAGE_BYTES;
                ptxlab::mbarrier_wait(&full[stage], parity);

                // S = K Q^T: 16 tokens x 8 queries per MMA, lane 4 g + t rows g, g + 8, columns 2 t, 2 t + 1
                float s[MT][NT][4], k_factor[MT][2], v_factor[MT][2];
                u32 largest_scale = 0;
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    float zero[2] = {1, 1};
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int token = token0 + i * 16 + h * 8 + g;
                        k_factor[i][h] = factor, v_factor[i][h] = 1;
                        if (!CHANNEL) {
                            u32 k = *reinterpret_cast<const u32*>(keys + scale_at(token)), v = *reinterpret_cast<const u32*>(values + scale_at(token));
                            if (masked && position - token0 + token >= walk.length) k = v = 0;
                            k_factor[i][h] = low_half(k) * factor, zero[h] = high_half(k);
                            v_factor[i][h] = low_half(v);
                            largest_scale = max(largest_scale, v & 0x7fff);
                        }
                    }
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) s[i][n][e] = zero[e / 2] * column_sum[n][e % 2];
                }
#pragma unroll
                for (int c = 0; c < WORDS / VECTOR; ++c)
#pragma unroll
                    for (int i = 0; i < MT; ++i) {
                        u32 low[VECTOR], high[VECTOR];
                        const unsigned char* from = keys + row_at(token0 + i * 16) + g * ROW + (c * 4 + t) * VECTOR * 4;
                        load_words(low, from);
                        load_words(high, from + 8 * ROW);
#pragma unroll
                        for (int w = 0; w < VECTOR; ++w) {
                            u32 a[REGISTERS], b[REGISTERS];
                            subnormals(a, low[w]);
                            subnormals(b, high[w]);
#pragma unroll
                            for (int r = 0; r < REGISTERS; r += 2)
#pragma unroll
                                for (int n = 0; n < NT; ++n)
                                    ptxlab::mma_f16(s[i][n], a[r], b[r], a[r + 1], b[r + 1], query[n][c * VECTOR + w][r], query[n][c * VECTOR + w][r + 1]);
                        }
                    }

                // Softmax in base 2, of probability times the value's scale: at most 1, whatever the scales are.
                const float log_scale = CHANNEL ? 0 : ptxlab::log2_approx(fmaxf(low_half(__reduce_max_sync(~0u, largest_scale)), 0x1p-24f));
                float before[NT][2];
                bool larger = false;
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int b = 0; b < 2; ++b) {
                        float most = LOWEST;
#pragma unroll
                        for (int i = 0; i < MT; ++i)
#pragma unroll
                            for (int h = 0; h < 2; ++h) {
                                float& x = s[i][n][h * 2 + b];
                                x *= k_factor[i][h];
                                if (masked) {
                                    const int at = position + i * 16 + h * 8 + g, end = limit[n][b];
                                    if (at >= end || (window > 0 && at < end - window)) x = -ptxlab::infinity();
                                }
                                most = fmaxf(most, x);
                            }
                        most = fmaxf(most, __shfl_xor_sync(~0u, most, 4));
                        most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
                        most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
                        before[n][b] = m[n][b];
                        m[n][b] = fmaxf(m[n][b], most + log_scale);
                        larger |= m[n][b] > before[n][b];
                    }
                if (__any_sync(~0u, larger)) {
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int b = 0; b < 2; ++b) {
                            const float less = ptxlab::exp2_approx(before[n][b] - m[n][b]);
                            l[n][b] *= less;
                            zeros[n][b] *= less;
#pragma unroll
                            for (int d = 0; d < DT; ++d) o[d][n][b] *= less, o[d][n][b + 2] *= less;
                        }
                }
                u32 p[MT][NT][2];
#pragma unroll
                for (int i = 0; i < MT; ++i)
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const float p0 = ptxlab::exp2_approx(s[i][n][h * 2] - m[n][0]), p1 = ptxlab::exp2_approx(s[i][n][h * 2 + 1] - m[n][1]);
                            l[n][0] += p0, l[n][1] += p1;
                            p[i][n][h] = ptxlab::transposed(half_pair(p0 * v_factor[i][h], p1 * v_factor[i][h]));
                        }

                // O^T += V^T P^T: 16 dims x 8 queries per MMA; the zeros are one more row of V
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    u32 pair[2] = {0x3c003c00u, 0x3c003c00u}, word[2][2][VALUES];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int token = token0 + i * 16 + h * 8 + 2 * t;
                        if (!CHANNEL) {
                            uint2 z = *reinterpret_cast<const uint2*>(values + scale_at(token));
                            if (masked) {
                                const int at = position - token0 + token;
                                z = make_uint2(at < walk.length ? z.x : 0, at + 1 < walk.length ? z.y : 0);
                            }
                            pair[h] = __byte_perm(z.x, z.y, 0x7632);
                        }
                        const unsigned char* from = values + row_at(token0 + i * 16) + (h * 8 + 2 * t) * ROW + g * VALUES * 4;
                        load_words(word[h][0], from + odd * ROW);
                        load_words(word[h][1], from + (1 - odd) * ROW);
                    }
#pragma unroll
                    for (int n = 0; n < NT; ++n) ptxlab::mma_f16(zeros[n], pair[0], pair[0], pair[1], pair[1], p[i][n][0], p[i][n][1]);
#pragma unroll
                    for (int w = 0; w < VALUES; ++w)
#pragma unroll
                        for (int k = 0; k < 2; ++k) {                        // low and high halves of the word
                            u32 a[REGISTERS], b[REGISTERS];
                            subnormals(a, __byte_perm(word[0][0][w], word[0][1][w], k ? highs : lows));
                            subnormals(b, __byte_perm(word[1][0][w], word[1][1][w], k ? highs : lows));
#pragma unroll
                            for (int r = 0; r < REGISTERS; r += 2)
#pragma unroll
                                for (int n = 0; n < NT; ++n)
                                    ptxlab::mma_f16(o[(w * 2 + k) * (REGISTERS / 2) + r / 2][n], a[r], a[r + 1], b[r], b[r + 1], p[i][n][0], p[i][n][1]);
                        }
                }
                __syncwarp();
                if (lane == 0) ptxlab::mbarrier_arrive(&empty[stage]);
                if ((stage += GROUPS) >= STAGES) stage -= STAGES, parity ^= 1;
            }

            // The lane's dims g D / 8 ... of columns 2 t, 2 t + 1
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    l[n][b] += __shfl_xor_sync(~0u, l[n][b], 4);
                    l[n][b] += __shfl_xor_sync(~0u, l[n][b], 8);
                    l[n][b] += __shfl_xor_sync(~0u, l[n][b], 16);
                    const int column = n * 8 + 2 * t + b;
                    if (column >= columns) continue;
                    if (g == 0) shared.stat(unit.index, warp)[column] = make_float4(m[n][b], l[n][b], zeros[n][b], 0);
                    float* to = shared.sum(unit.index, warp) + column * PITCH + g * (D / 8);
#pragma unroll
                    for (int e = 0; e < D / 8; e += 4) {                     // four dims: of tiles r (low halves of a word) and r + REGISTERS / 2 (high)
                        const int r = e / PER_WORD * REGISTERS + e % PER_WORD / 4, up = r + REGISTERS / 2;
                        const float back = e % PER_WORD < 4 ? 0x1p24f : 0x1p20f;
                        *reinterpret_cast<float4*>(to + e) = make_float4(o[r][n][b] * back, o[r][n][b + 2] * back, o[up][n][b] * back, o[up][n][b + 2] * back);
                    }
                }
        }
        __syncwarp();
        if (lane == 0) ptxlab::mbarrier_arrive(&summed[unit.index]);
    }
}
