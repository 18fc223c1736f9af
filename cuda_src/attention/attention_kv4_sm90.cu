// attention_kv4_sm90: decode attention over a paged 4-bit KV cache, at the speed of memory.
#include "griddep.cuh"
#include "mbarrier.cuh"
#include "parts.cuh"
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
#define CHAINS 4    // 16 tokens each whose scores are worked out together
#define LEAST 6     // tiles that a unit costs at least
#define FUSED 1     // units of several blocks: 1 merged by the last of them, 0 left to attention_merge
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
constexpr int THREADS = 32 * (WARPS + 2);
constexpr int PER_WORD = 32 / BITS, HALVES = PER_WORD / 2;     // integers of a word, and registers that they become
constexpr int WORDS = ROW / 16, VECTOR = WORDS < 4 ? WORDS : 4;  // of a token's keys per lane; of one load
constexpr int VALUES = ROW / 32;                               // words of a token's values per lane
constexpr int PITCH = D + 4;                                   // of sums in shared memory
constexpr int FRAGMENTS = NT * WORDS * HALVES * 128, QUERY = FRAGMENTS + COLUMNS * 4 + 16;  // bytes: operand B, sums of columns, factor
constexpr int UNITS = 4, SLOTS = 2;                            // units in flight; those whose sums are
constexpr int LANES = WARPS <= 4 ? 4 : WARPS <= 8 ? 8 : 16;    // a power of two, a lane for every warp
constexpr float LOWEST = -1e30f;                               // below any score, yet finite
constexpr u32 FLIP = BITS == 8 && CHANNEL ? 0x80808080u : 0;   // s8 as u8 with a zero of 128
static_assert(WARPS % SHARE == 0 && STAGES % GROUPS == 0 && WARPS <= 16);

__device__ __forceinline__ float low_half(u32 pair) { return __low2float(ptxlab::as_half2(pair)); }
__device__ __forceinline__ float high_half(u32 pair) { return __high2float(ptxlab::as_half2(pair)); }
__device__ __forceinline__ u32 half_pair(float a, float b) { return ptxlab::as_bits(__floats2half2_rn(a, b)); }

// Words from shared or global memory, in loads of up to 16 bytes.
template <int COUNT>
__device__ __forceinline__ void load_words(u32 (&w)[COUNT], const void* from) {
    if constexpr (COUNT == 1) {
        w[0] = *static_cast<const u32*>(from);
    } else if constexpr (COUNT == 2) {
        const uint2 v = *static_cast<const uint2*>(from);
        w[0] = v.x, w[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const uint4 v = static_cast<const uint4*>(from)[i / 4];
            w[i] = v.x, w[i + 1] = v.y, w[i + 2] = v.z, w[i + 3] = v.w;
        }
    }
}

// The integers of a word as operand halves: (e0, e2), (e1, e3), then 16 times (e4, e6), (e5, e7).
__device__ __forceinline__ void subnormals(u32 (&h)[HALVES], u32 word) {
    if constexpr (BITS == 4) {
        const uint4 v = ptxlab::subnormal_u4(word);
        h[0] = v.x, h[1] = v.y, h[2] = v.z, h[3] = v.w;
    } else {
        const uint2 v = ptxlab::subnormal_u8(word ^ FLIP);
        h[0] = v.x, h[1] = v.y;
    }
}

// Where the keys or values of a tile's token lie, and its scale and zero. 16 tokens from a multiple of 16 on are in one page.
__device__ __forceinline__ int row_at(int token) { return token / PAGE * PAGE_BYTES + token % PAGE * ROW; }
__device__ __forceinline__ int scale_at(int token) { return token / PAGE * PAGE_BYTES + PAGE * ROW + token % PAGE * 4; }

// S += K Q^T: 16 tokens x 8 queries x 16 dims per MMA. Lane 4 g + t has rows g, g + 8 and columns 2 t, 2 t + 1 of S.
__device__ __forceinline__ void multiply_keys(float (&s)[MT][NT][4], const unsigned char* keys, int token0, const u32 (&query)[NT][WORDS][HALVES],
                                              int g, int t) {
#pragma unroll
    for (int c = 0; c < WORDS; c += VECTOR)
#pragma unroll
        for (int i0 = 0; i0 < MT; i0 += CHAINS) {
            u32 upper[CHAINS][VECTOR], lower[CHAINS][VECTOR];
#pragma unroll
            for (int i = 0; i < CHAINS; ++i) {
                const unsigned char* from = keys + row_at(token0 + (i0 + i) * 16) + g * ROW + (c * 4 + t * VECTOR) * 4;
                load_words(upper[i], from);
                load_words(lower[i], from + 8 * ROW);
            }
#pragma unroll
            for (int w = 0; w < VECTOR; ++w) {
#pragma unroll
                for (int r = 0; r < HALVES; r += 2)
#pragma unroll
                    for (int i = 0; i < CHAINS; ++i) {                       // tokens innermost: an MMA waits for the one before with its sums
                        u32 a[HALVES], b[HALVES];
                        subnormals(a, upper[i][w]);
                        subnormals(b, lower[i][w]);
#pragma unroll
                        for (int n = 0; n < NT; ++n)
                            ptxlab::mma_f16(s[i0 + i][n], a[r], b[r], a[r + 1], b[r + 1], query[n][c + w][r], query[n][c + w][r + 1]);
                    }
            }
        }
}

// O^T += V^T P^T: 16 dims x 8 queries x 16 tokens per MMA, for the lane dims g D / 8 on. Tokens are paired by PRMT; odd t load the second of a
// pair first, which halves the bank conflicts.
__device__ __forceinline__ void multiply_values(float (&o)[DT][NT][4], const unsigned char* rows, const u32 (&p)[NT][2], int g, int t) {
    const int odd = t % 2;
    const u32 select[2] = {odd ? 0x1054u : 0x5410u, odd ? 0x3276u : 0x7632u};  // low halves, high halves
    u32 first[2][VALUES], second[2][VALUES];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const unsigned char* from = rows + (h * 8 + t * 2) * ROW + g * VALUES * 4;
        load_words(first[h], from + odd * ROW);
        load_words(second[h], from + (1 - odd) * ROW);
    }
#pragma unroll
    for (int w = 0; w < VALUES; ++w)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            u32 a[HALVES], b[HALVES];
            subnormals(a, __byte_perm(first[0][w], second[0][w], select[k]));
            subnormals(b, __byte_perm(first[1][w], second[1][w], select[k]));
#pragma unroll
            for (int r = 0; r < HALVES; r += 2)
#pragma unroll
                for (int n = 0; n < NT; ++n) ptxlab::mma_f16(o[w * HALVES + k * (HALVES / 2) + r / 2][n], a[r], a[r + 1], b[r], b[r + 1], p[n][0], p[n][1]);
        }
}

// What the block does of a unit: of a sequence, up to COLUMNS queries of one of its heads.
struct Unit {
    int count, position, length;   // tiles, 0 behind the last unit; the first one's first token; tokens of the sequence
    int turn;                      // the group of warps that takes the first tile
    int sequence, head, column0, columns;
    int part, block, blocks;       // where in the workspace its part is, or -1 if that is all; the blocks that have parts
    int index;                     // of the unit among all
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
                   float* partial,              // f32 [blocks, 2, columns, D]: workspace
                   float2* stats,               // f32 [blocks, 2, columns, 2]: workspace
                   int* segments,               // s32 FUSED: [blocks, columns], zeros before and after; else [blocks, 2]
                   float softmax_scale, int B, int T, int Hq, int Hkv, int P, int window) {
    extern __shared__ __align__(128) unsigned char ring[];                   // [STAGES][STAGE]
    __shared__ u64 full[STAGES], empty[STAGES], ready[UNITS], summed[UNITS], cleared[UNITS];
    __shared__ Unit units[UNITS];
    const int group = Hq / Hkv, splits = (group * T + COLUMNS - 1) / COLUMNS, columns = min(COLUMNS, group * T);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    unsigned char* const queries = ring + STAGES * STAGE;                    // [UNITS][QUERY]
    float4* const warp_stats = reinterpret_cast<float4*>(queries + UNITS * QUERY);             // [SLOTS][WARPS][columns]: largest, sum, zeros
    float* const warp_sums = reinterpret_cast<float*>(warp_stats + SLOTS * WARPS * columns);   // [SLOTS][WARPS][columns][PITCH]

    if (warp == WARPS) {
        for (int s = lane; s < STAGES; s += 32) ptxlab::mbarrier_init(&full[s], 1), ptxlab::mbarrier_init(&empty[s], SHARE);
        if (lane < UNITS) ptxlab::mbarrier_init(&ready[lane], 1), ptxlab::mbarrier_init(&summed[lane], WARPS), ptxlab::mbarrier_init(&cleared[lane], WARPS);
        ptxlab::fence_mbarrier_init();
    }
    __syncthreads();
    ptxlab::launch_dependents();

    if (warp == WARPS) {  // asks for copies
        ptxlab::Segments<LEAST> walk(lengths, B, Hkv * splits, T, window);
        bool waited = false;
        const bool elected = ptxlab::elect();
        ptxlab::Slot<STAGES> slot;
        const size_t pitch = size_t(Hkv) * PAGE_BYTES;
        int page0, pages, next_entry = 0;
        const auto entries = [&](int p) {  // of the table, for pages p .. p + 31; what a tile lacks: the last page again
            page0 = (walk.begin + walk.first()) * PAGES, pages = min(walk.count() * PAGES, (walk.length + PAGE - 1) / PAGE - page0);
            return table[size_t(walk.sequence) * P + page0 + min(p + lane, pages - 1)];
        };
        if (walk.more()) next_entry = entries(0);
        while (walk.more()) {
            const unsigned char* of_head = pool + size_t(walk.unit / splits) * PAGE_BYTES;
            for (int p = 0, all = pages; p < all; p += 32) {
                const int entry = next_entry, here = min(32, all - p);
                if (p + 32 >= all) walk.advance();                           // what comes next is on its way while these are asked for
                if (walk.more()) next_entry = entries(p + 32 < all ? p + 32 : 0);
                if (!waited) ptxlab::wait_for_predecessors(), waited = true;
                for (int i = 0; i < here; i += PAGES, slot.advance()) {
                    unsigned char* stage = ring + slot.index * STAGE;
                    ptxlab::mbarrier_wait(&empty[slot.index], slot.parity ^ 1);  // the first round finds them empty
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

    if (warp == WARPS + 1) {  // queries -> operand B and what goes with it, once per unit
        ptxlab::Segments<LEAST> walk(lengths, B, Hkv * splits, T, window);
        ptxlab::Slot<UNITS> slot;
        int2 begun = make_int2(0, 0);                                        // the unit of several blocks that begins here, and how many
        int turn = 0;
        const auto dim = [&](int w) { return (w / VECTOR * VECTOR * 4 + t * VECTOR + w % VECTOR) * PER_WORD; };  // that meets word w of the lane's keys
        u32 next[NT][WORDS][HALVES];
        const auto load = [&] {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const int column = walk.unit % splits * COLUMNS + n * 8 + g;
                const unsigned short* from = q + ((size_t(walk.sequence) * T + column / group) * Hq + walk.unit / splits * group + column % group) * D;
#pragma unroll
                for (int w = 0; w < WORDS; ++w) {
#pragma unroll
                    for (int r = 0; r < HALVES; ++r) next[n][w][r] = 0;
                    if (column < group * T) load_words(next[n][w], from + dim(w));
                }
            }
        };
        ptxlab::wait_for_predecessors();
        if (walk.more()) load();
        for (; walk.more(); slot.advance()) {
            const int head = walk.unit / splits, column0 = walk.unit % splits * COLUMNS;
            u32 raw[NT][WORDS][HALVES];
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int w = 0; w < WORDS; ++w)
#pragma unroll
                    for (int r = 0; r < HALVES; ++r) raw[n][w][r] = next[n][w][r];
            const ptxlab::Segments<LEAST> here = walk;
            walk.advance();                                                  // what comes next is on its way while this is worked on
            if (walk.more()) load();
            const auto element = [&](int n, int w, int e) {
                const u32 bits = e % 2 ? raw[n][w][e / 2] >> 16 : raw[n][w][e / 2] & 0xffff;
                const float x = BF16 ? __uint_as_float(bits << 16) : low_half(bits);
                return CHANNEL ? x * k_scale[head * D + dim(w) + e] : x;
            };
            const auto zero = [&](int w, int e) { return !CHANNEL ? 1 : BITS == 8 ? 128 : k_zero[head * D + dim(w) + e]; };
            u32 largest = 0;
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int w = 0; w < WORDS; ++w)
#pragma unroll
                    for (int e = 0; e < PER_WORD; ++e) largest = max(largest, __float_as_uint(fabsf(element(n, w, e))));
            const int exponent = 141 - max(15, int(__reduce_max_sync(~0u, largest) >> 23));  // brings the largest to 2^14 .. 2^15
            const float power = __int_as_float((127 + exponent) << 23), back = __int_as_float((127 - exponent) << 23);
            ptxlab::mbarrier_wait(&cleared[slot.index], slot.parity ^ 1);    // the unit that was in this slot is done
            u32* to = reinterpret_cast<u32*>(queries + slot.index * QUERY);
            float* extra = reinterpret_cast<float*>(queries + slot.index * QUERY + FRAGMENTS);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float sum = 0;
#pragma unroll
                for (int w = 0; w < WORDS; ++w)
#pragma unroll
                    for (int r = 0; r < HALVES; ++r) {
                        const int e = r / 2 * 4 + r % 2, times = r < 2 ? 1 : 16;
                        const u32 pair = half_pair(element(n, w, e) * (power / times), element(n, w, e + 2) * (power / times));
                        sum += (low_half(pair) * zero(w, e) + high_half(pair) * zero(w, e + 2)) * times;
                        to[((n * WORDS + w) * 32 + lane) * HALVES + r] = pair;
                    }
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (t == 0) extra[n * 8 + g] = sum * -0x1p-24f;
            }
            if (lane == 0) {
                const int first = here.first(), count = here.count(), index = here.sequence * (Hkv * splits) + here.unit;
                const bool whole = count == here.tiles;
                extra[COLUMNS] = softmax_scale * 1.44269504f * 0x1p24f * back;
                units[slot.index] = {count, (here.begin + first) * TILE, here.length, turn, here.sequence, head, column0, min(columns, group * T - column0),
                                     whole ? -1 : int(blockIdx.x) * 2 + (first == 0), whole ? 0 : here.first_block(), whole ? 1 : here.blocks(), index};
                turn = (turn + count) % GROUPS;
                if (!whole && first == 0) begun = make_int2(index, here.blocks());
            }
            __syncwarp();
            if (lane == 0) ptxlab::mbarrier_arrive(&ready[slot.index]);
        }
        ptxlab::mbarrier_wait(&cleared[slot.index], slot.parity ^ 1);
        if (lane == 0) {
            units[slot.index].count = 0;
            ptxlab::mbarrier_arrive(&ready[slot.index]);
            if (!FUSED) reinterpret_cast<int2*>(segments)[blockIdx.x] = begun;
        }
        for (int s = blockIdx.x; s < B; s += gridDim.x)                      // nobody's: sequences of no tokens
            if (lengths[s] == 0) {
                for (size_t i = lane; i < size_t(T) * Hq * D / 2; i += 32) reinterpret_cast<u32*>(out)[size_t(s) * T * Hq * D / 2 + i] = 0;
                for (int i = lane; lse && i < T * Hq; i += 32) lse[size_t(s) * T * Hq + i] = -ptxlab::infinity();
            }
        return;
    }

    // The warps' sums of the unit before -> a result, or a part of one. A warp takes a column, each time another.
    const auto merge = [&](int number) {
        const Unit& unit = units[number % UNITS];
        const int sums = number % SLOTS * WARPS;
        const auto active = [&](int w) { return (w / SHARE - unit.turn + GROUPS) % GROUPS < unit.count; };
        ptxlab::mbarrier_wait(&summed[number % UNITS], number / UNITS % 2);
        for (int c = (warp + number) % WARPS; c < unit.columns; c += WARPS) {
            const int w = lane % LANES;
            const float4 mine = w < WARPS && active(w) ? warp_stats[(sums + w) * columns + c] : make_float4(LOWEST, 0, 0, 0);
            ptxlab::Row<D> row = {};
            row.largest = mine.x;
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2) row.largest = fmaxf(row.largest, __shfl_xor_sync(~0u, row.largest, step));
            const float factor = ptxlab::exp2_approx(mine.x - row.largest);
            float zeros = mine.z * factor;
            row.sum = mine.y * factor;
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2) row.sum += __shfl_xor_sync(~0u, row.sum, step), zeros += __shfl_xor_sync(~0u, zeros, step);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float times = __shfl_sync(~0u, factor, w);
                if (active(w))
#pragma unroll
                    for (int p = 0; p < row.PIECES; ++p)
                        if (row.mine(p)) {
                            const float4 v = *reinterpret_cast<const float4*>(warp_sums + ((sums + w) * columns + c) * PITCH + row.dim(p));
                            row.v[p].x += times * v.x, row.v[p].y += times * v.y, row.v[p].z += times * v.z, row.v[p].w += times * v.w;
                        }
            }
#pragma unroll
            for (int p = 0; p < row.PIECES; ++p)
                if (row.mine(p)) {
                    float4 zero = make_float4(1, 1, 1, 1), scale = zero;
                    if (CHANNEL) scale = *reinterpret_cast<const float4*>(v_scale + unit.head * D + row.dim(p));
                    if (CHANNEL) zero = BITS == 8 ? make_float4(128, 128, 128, 128) : *reinterpret_cast<const float4*>(v_zero + unit.head * D + row.dim(p));
                    float4& v = row.v[p];
                    v = make_float4((v.x - zeros * zero.x) * scale.x, (v.y - zeros * zero.y) * scale.y, (v.z - zeros * zero.z) * scale.z, (v.w - zeros * zero.w) * scale.w);
                }
            const int column = unit.column0 + c;
            const size_t at = (size_t(unit.sequence) * T + column / group) * Hq + unit.head * group + column % group;
            if (unit.part < 0) {
                row.store<BF16>(out, lse, at);
                continue;
            }
            row.write(partial, stats, unit.part * size_t(columns) + c);
            int* counter = segments + unit.block * columns + c;
            if (!FUSED || !ptxlab::last_of(counter, unit.blocks)) continue;
            if (lane == 0) *counter = 0;                                     // for the next launch
            ptxlab::Row<D>::merged(partial, stats, unit.block, unit.blocks, columns, c).store<BF16>(out, lse, at);
        }
        __syncwarp();
        if (lane == 0) ptxlab::mbarrier_arrive(&cleared[number % UNITS]);
    };

    // Scores, probabilities, sums.
    const int mine = warp / SHARE, token0 = warp % SHARE * TOKENS;           // of the groups; of a tile
    int stage = mine, parity = 0, number = 0;
    for (;; ++number) {
        const int slot = number % UNITS;
        ptxlab::mbarrier_wait(&ready[slot], number / UNITS % 2);
        const Unit& unit = units[slot];
        const int count = unit.count;
        if (count == 0) break;
        const int skip = (mine - unit.turn + GROUPS) % GROUPS;
        if (skip < count) {
            u32 query[NT][WORDS][HALVES];
            float column_sum[NT][2], m[NT][2], l[NT][2] = {}, o[DT][NT][4] = {}, zeros[NT][4] = {};
            const float* extra = reinterpret_cast<const float*>(queries + slot * QUERY + FRAGMENTS);
            const int length = unit.length, position0 = unit.position + token0, column0 = unit.column0;
            const float factor = extra[COLUMNS];
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int w = 0; w < WORDS; ++w) load_words(query[n][w], queries + slot * QUERY + ((n * WORDS + w) * 32 + lane) * HALVES * 4);
#pragma unroll
                for (int b = 0; b < 2; ++b) column_sum[n][b] = extra[n * 8 + 2 * t + b], m[n][b] = LOWEST;
            }
            for (int i = skip; i < count; i += GROUPS) {
                const int position = position0 + i * TILE;  // of this warp's first token
                const bool masked = position + TOKENS > length - T + 1 || (window > 0 && position < length - window);
                const unsigned char* keys = ring + stage * STAGE;
                const unsigned char* values = keys + PAGES * PAGE_BYTES;
                ptxlab::mbarrier_wait(&full[stage], parity);

                float s[MT][NT][4], k_factor[MT][2], v_factor[MT][2];
                u32 ones[MT][2], k_pair[MT][2], v_pair[MT][2], largest_scale = 0;  // (scale, zero) of tokens; pairs of zeros
#pragma unroll
                for (int i = 0; i < MT; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int token = token0 + i * 16 + h * 8;
                        ones[i][h] = 0x3c003c00u;
                        if (CHANNEL) continue;
                        k_pair[i][h] = *reinterpret_cast<const u32*>(keys + scale_at(token + g));
                        v_pair[i][h] = *reinterpret_cast<const u32*>(values + scale_at(token + g));
                        const uint2 pairs = *reinterpret_cast<const uint2*>(values + scale_at(token + 2 * t));
                        ones[i][h] = __byte_perm(pairs.x, pairs.y, 0x7632);
                    }
                if (!CHANNEL && masked) {                                    // beyond the end there may be anything
                    asm volatile("");
#pragma unroll
                    for (int i = 0; i < MT; ++i)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const int left = length - position - i * 16 - h * 8;
                            if (g >= left) k_pair[i][h] = v_pair[i][h] = 0;
                            if (2 * t >= left) ones[i][h] = 0;
                            else if (2 * t + 1 >= left) ones[i][h] &= 0xffff;
                        }
                }
#pragma unroll
                for (int i = 0; i < MT; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        k_factor[i][h] = CHANNEL ? 1 : low_half(k_pair[i][h]);
                        v_factor[i][h] = CHANNEL ? 1 : low_half(v_pair[i][h]);
                        if (!CHANNEL) largest_scale = max(largest_scale, v_pair[i][h] & 0x7fff);
#pragma unroll
                        for (int n = 0; n < NT; ++n)
#pragma unroll
                            for (int b = 0; b < 2; ++b) s[i][n][h * 2 + b] = CHANNEL ? column_sum[n][b] : high_half(k_pair[i][h]) * column_sum[n][b];
                    }
                multiply_keys(s, keys, token0, query, g, t);
#pragma unroll
                for (int i = 0; i < MT; ++i)
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            if (!CHANNEL) s[i][n][e] *= k_factor[i][e / 2];
                if (masked) {
                    asm volatile("");
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int b = 0; b < 2; ++b) {
                            const int end = length - T + 1 + (column0 + n * 8 + 2 * t + b) / group;  // what a query does not see
#pragma unroll
                            for (int i = 0; i < MT; ++i)
#pragma unroll
                                for (int h = 0; h < 2; ++h) {
                                    const int at = position + i * 16 + h * 8 + g;
                                    if (at >= end || (window > 0 && at < end - window)) s[i][n][h * 2 + b] = -ptxlab::infinity();
                                }
                        }
                }

                // Softmax in base 2, of weight times the value's scale: at most 1, so that FP16 holds it whatever the scales are.
                const float log_scale = CHANNEL ? 0 : ptxlab::log2_approx(fmaxf(low_half(__reduce_max_sync(~0u, largest_scale)), 0x1p-24f));
                float before[NT][2];
                bool larger = false;
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int b = 0; b < 2; ++b) {
                        float most = LOWEST;
#pragma unroll
                        for (int i = 0; i < MT; ++i) most = fmaxf(most, fmaxf(s[i][n][b], s[i][n][2 + b]));
                        most = fmaxf(most, __shfl_xor_sync(~0u, most, 4));
                        most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
                        most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
                        before[n][b] = m[n][b];
                        m[n][b] = fmaxf(m[n][b], most * factor + log_scale);
                        larger |= m[n][b] > before[n][b];
                    }
                if (__any_sync(~0u, larger)) {
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int b = 0; b < 2; ++b) {
                            const float less = ptxlab::exp2_approx(before[n][b] - m[n][b]);
                            l[n][b] *= less, zeros[n][b] *= less;
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
                            const float p0 = ptxlab::exp2_approx(s[i][n][h * 2] * factor - m[n][0]), p1 = ptxlab::exp2_approx(s[i][n][h * 2 + 1] * factor - m[n][1]);
                            l[n][0] += p0, l[n][1] += p1;
                            p[i][n][h] = ptxlab::transposed(half_pair(p0 * v_factor[i][h], p1 * v_factor[i][h]));
                        }
#pragma unroll
                for (int i = 0; i < MT; ++i) {
#pragma unroll
                    for (int n = 0; n < NT; ++n)                             // the zeros are one more row of V
                        ptxlab::mma_f16(zeros[n], ones[i][0], ones[i][0], ones[i][1], ones[i][1], p[i][n][0], p[i][n][1]);
                    multiply_values(o, values + row_at(token0 + i * 16), p[i], g, t);
                }
                __syncwarp();
                if (lane == 0) ptxlab::mbarrier_arrive(&empty[stage]);
                if ((stage += GROUPS) >= STAGES) stage -= STAGES, parity ^= 1;
            }

            // The lane's dims g D / 8 ... of columns 2 t, 2 t + 1
            ptxlab::mbarrier_wait(&cleared[(number + UNITS - SLOTS) % UNITS], ((number + UNITS - SLOTS) / UNITS + 1) % 2);  // at first there is none before
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int b = 0; b < 2; ++b) {
#pragma unroll
                    for (int step = 4; step < 32; step *= 2) l[n][b] += __shfl_xor_sync(~0u, l[n][b], step);
                    const int column = n * 8 + 2 * t + b, row = (number % SLOTS * WARPS + warp) * columns + column;
                    if (column >= columns) continue;
                    if (g == 0) warp_stats[row] = make_float4(m[n][b], l[n][b], zeros[n][b], 0);
#pragma unroll
                    for (int e = 0; e < D / 8; e += 4) {                     // two dims of a tile of low halves, two of one of high halves
                        const int low = e / PER_WORD * HALVES + e % PER_WORD / 4, high = low + HALVES / 2;
                        const float back = e % PER_WORD < 4 ? 0x1p24f : 0x1p20f;
                        *reinterpret_cast<float4*>(warp_sums + row * PITCH + g * (D / 8) + e) =
                            make_float4(o[low][n][b] * back, o[low][n][b + 2] * back, o[high][n][b] * back, o[high][n][b + 2] * back);
                    }
                }
        }
        __syncwarp();
        if (lane == 0) ptxlab::mbarrier_arrive(&summed[slot]);
        if (number > 0) merge(number - 1);                                   // one unit behind, so that nobody waits
    }
    if (number > 0) merge(number - 1);
}
