// attention_kv4_sm90: decode attention over a paged cache of 4 or 8 bits, at the speed of memory (QServe section 5.3).
//
// One warp asks for copies, one prepares queries, the others multiply, each tile by tile. Tiles of all units are dealt
// to the blocks in equal pieces; the block in which a unit begins puts its parts together, always in the same order.
// With PART a unit is cut by its own length, so that a sequence has the same bits whatever else is in the batch.
//
// Contract   out[b, t, h] = sum_i p[i] v[i], p = softmax of softmax_scale * q[b, t, h] . k[i] over the keys that query
//            t sees: i up to lengths[b] - T + t, of these the last `window` if that is not 0. lse: natural logarithm of
//            the sum of exponentials. Nothing seen: zeros, and lse -infinity. Head h reads kv head h / (Hq / Hkv). k =
//            (integer - zero) * scale per token and head, f16 in the page (CHANNEL 0), or per channel, f32 [Hkv, D]
//            (CHANNEL 1, where 8 bits are signed and have no zero). T queries of a sequence and all heads of a group
//            are one unit's columns, up to 8; more are several units.
// PDL        block table and lengths are read at once, queries and cache behind the wait.
// Guide      notebooks/guide/kernels_attention.md: work, barriers, scores in integers, values, promotion, constants
// Measured   64 sequences of 1024 tokens, 32 heads, on an H200: 69 us, 0.90 of the speed of memory.
//            What `attention_kv4` takes for a batch, plain launches:
//            heads         16 x 1024     64 x 1024     256 x 1024    1 x 4096      64 x 4096     1 x 32768
//            32 / 32       20.7 us 0.75  69.4 us 0.90  262 us 0.95   8.9 us 0.44   262 us 0.95   38.5 us 0.81
//            32 / 8        8.2 us 0.48   21.3 us 0.73  70.8 us 0.88  6.5 us 0.15   70.9 us 0.88  13.8 us 0.56
//            64 / 8        8.7 us 0.45   22.5 us 0.69  72.9 us 0.86  7.0 us 0.14   72.0 us 0.87  14.9 us 0.52
// PTX ISA    9.7.14.5.8, 9 mma.m16n8k16 (.f16), m16n8k32 (.u8.s8, .s8.s8); 9.7.14.5.17 movmatrix; 9.7.9.25 bulk copies;
//            9.7.13.15 mbarrier; 9.7.13.16 elect; 9.7.3 ex2, lg2, rcp; 9.7.1 dp4a; 9.7.13.13 griddepcontrol
#include "griddep.cuh"
#include "hadamard.cuh"
#include "mbarrier.cuh"
#include "pack.cuh"
#include "parts.cuh"
#include "reciprocal.cuh"
#include "segments.cuh"
#include "timeline.cuh"
#include "vector_access.cuh"

#ifndef D
#define D 128       // of a head: 64, 128, 256
#define PAGE 64     // tokens of a page: 16, 32, 64
#define BITS 4      // of a key or value: 4, or 8
#define CHANNEL 0   // scale and zero: 0 per token, in the page; 1 per channel
#define BF16 0      // queries and results: 0 f16, 1 bf16
#define COLUMNS 8   // queries of a unit at most: 4, 8
#define TOKENS 64   // of a tile that one warp takes: 16, 32, 64
#define WARPS 8     // that multiply
#define STAGES 16   // tiles in flight
#define SLOTS 2     // units whose sums are in shared memory
#define RESIDENT 1  // blocks per SM
#define PROMOTE 0   // tokens of a warp after which its MMAs' sums are promoted, a multiple of TOKENS; 0: never
// What the host counts with too, but does not choose
#define TILE_TOKENS 64  // of a tile
#define LARGEST 32512   // of a query's integers
#define SUM_PAD 4       // floats between rows of sums in shared memory
#define EXTRA 4         // cost of a unit of few tiles, in tiles, beside them
#define SLACK 4         // tiles more than its share that a block may get
#endif
#ifndef ROTATED
#define ROTATED 0  // 1: keys are rotated by a Hadamard matrix, so queries are too
#endif
#ifndef PART
#define PART 0        // tiles after which a unit is cut, whatever the batch; 0: so that all blocks have equally much
#define MOST_PARTS 1  // of a unit that is cut; with PART the host gives both
#endif
#ifndef MOST_PARTS
#error "-D PART needs -D MOST_PARTS: the parts that a unit has at most"
#endif

namespace {

using ptxlab::TILE;
using ptxlab::u32;
using ptxlab::u64;
constexpr bool PAIRED = COLUMNS == 4;  // the two bytes of a query are neighbouring columns of one operand B
constexpr int SETS = PAIRED ? 1 : 2, OWN = PAIRED ? 1 : 2;  // operands B; columns of a lane
constexpr int NIBBLES = BITS == 4 ? 2 : 1;                  // of a byte
constexpr int ROW = D * BITS / 8;                           // bytes of a token's keys or values
constexpr int PAGE_BYTES = PAGE * (ROW + (CHANNEL ? 0 : 4)), PAGES = TILE / PAGE, STAGE = 2 * PAGES * PAGE_BYTES;
constexpr int SHARE = TILE / TOKENS, GROUPS = WARPS / SHARE;  // warps of a tile; tiles at a time
constexpr int MT = TOKENS / 16, DT = D / 16;                  // MMA tiles of tokens, of dims
constexpr int COPIES = WARPS, QUERIES = WARPS + 1, ALL_WARPS = WARPS + 2;
constexpr int LANES = WARPS <= 4 ? 4 : WARPS <= 8 ? 8 : 16;  // one for every warp
constexpr int PER_WORD = 32 / BITS, HALVES = PER_WORD / 2;   // integers of a word, and registers that they become
constexpr int K_WORDS = ROW / 16, V_WORDS = ROW / 32;        // of a token's keys, of its values, per lane
constexpr int VECTOR = K_WORDS < 4 ? K_WORDS : 4;            // words of one load
constexpr int PITCH = D + SUM_PAD;                           // of sums in shared memory
// bytes: operand B; of each column (sum, factor)
constexpr int FRAGMENTS = SETS * NIBBLES * K_WORDS * 128, QUERY = FRAGMENTS + COLUMNS * 8;
constexpr int UNITS = 2 * SLOTS, LAG = SLOTS - 1;      // units in flight; by how many the sums are put together later
constexpr float LOWEST = -1e30f, LOG2E = 1.44269504f;  // LOWEST: below any score, yet finite
constexpr bool SIGNED = BITS == 8 && CHANNEL;          // integers
constexpr u32 FLIP = SIGNED ? 0x80808080u : 0;         // values s8 as u8 with a zero of 128
// (scale 1, zero 0) of tokens that there are not; two zeros of 1
constexpr u32 NEUTRAL = 0x00003c00, ONES = 0x3c003c00;
static_assert(LARGEST == 127 * 256, "the high byte of a query's largest integer is a signed one");
static_assert(D * (BITS == 8 ? 255ll : 15ll * 16) * LARGEST < 1ll << 31);
static_assert(TILE_TOKENS == TILE && SUM_PAD % 4 == 0);
static_assert(PROMOTE % TOKENS == 0 && WARPS % SHARE == 0 && STAGES % GROUPS == 0 && WARPS <= 16 &&
              (COLUMNS == 4 || COLUMNS == 8));

using Segments = ptxlab::Segments<EXTRA, SLACK, (PART > GROUPS ? PART : GROUPS), PART, MOST_PARTS>;

// With PART, `Unit::blocks` is LEFT times the part's place in the workspace, where a unit has MOST_PARTS from its first
// block on, and how many parts of other blocks follow: NEXT where the block has the next one itself, ELSEWHERE where the
// unit begins in a block before.
constexpr int LEFT = 2 * MOST_PARTS, NEXT = LEFT - 2, ELSEWHERE = LEFT - 1;

template <class Walk>
[[maybe_unused]] __device__ __forceinline__ int part_of(const Walk& here) {
    const int number = here.number(), place = here.first_block() * MOST_PARTS + number;
    const int left = !here.is_begun_here() ? ELSEWHERE : here.is_last_here() ? here.parts() - number - 1 : NEXT;
    return place * LEFT + left;
}

// What the block does of a unit: of a sequence, up to COLUMNS queries of one of its heads.
struct Unit {
    int count, position, length;  // tiles, 0 behind the last unit; the first one's first token; tokens of the sequence
    int turn;                     // the group of warps that takes the first tile
    int head, columns;
    int blocks;                      // that have tiles of it, this one included; 0 where it begins in one before
    int row[COLUMNS], end[COLUMNS];  // of a column: its row of the results; the first token that it does not see
};

__device__ __forceinline__ float low_half(u32 pair) { return __low2float(ptxlab::as_half2(pair)); }
__device__ __forceinline__ float high_half(u32 pair) { return __high2float(ptxlab::as_half2(pair)); }
__device__ __forceinline__ u32 half_pair(float a, float b) { return ptxlab::as_bits(__floats2half2_rn(a, b)); }

// Where the keys or values of a tile's token lie, and its scale and zero. 16 tokens from a multiple of 16 on are in one
// page.
__device__ __forceinline__ int row_at(int token) { return token / PAGE * PAGE_BYTES + token % PAGE * ROW; }
__device__ __forceinline__ int scale_at(int token) { return token / PAGE * PAGE_BYTES + PAGE * ROW + token % PAGE * 4; }

// What the copies are asked for by: up to 32 pages, one per lane, while the next ones are looked up in the table.
struct Feed {
    Segments walk;
    const int* table;
    int P, page, pages;              // of the segment, the page that comes next, and how many it has
    int entry, entries, left, head;  // pages that come next, those now, how many; their kv head

    __device__ __forceinline__ Feed(const Segments& walk, const int* table, int P)
        : walk(walk), table(table), P(P), page(0), pages(0), entry(0) {
        look_up();
    }
    __device__ __forceinline__ void look_up() {  // what a tile lacks is the last page again
        if (!walk.more()) return;
        const int first = (walk.begin + walk.first()) * PAGES;
        pages = min(walk.count() * PAGES, (walk.length + PAGE - 1) / PAGE - first);
        entry = table[size_t(walk.sequence) * P + first + min(page + int(threadIdx.x % 32), pages - 1)];
    }
    __device__ __forceinline__ bool take(int splits) {
        if (!walk.more()) return false;
        entries = entry, left = min(32, pages - page),
        head = splits == 1 ? walk.unit : Segments::div(walk.unit, splits);
        return true;
    }
    __device__ __forceinline__ void look_ahead() {
        page += 32;
        if (page >= pages) page = 0, walk.advance();
        look_up();
    }
};

// The integers of a word of values as operand halves: (e0, e2), (e1, e3), then 16 times (e4, e6), (e5, e7), which have
// the first two in them.
__device__ __forceinline__ void subnormals(u32 (&h)[HALVES], u32 word) {
    if constexpr (BITS == 4) {
        const uint4 v = ptxlab::subnormal_u4_bytes(word);
        h[0] = v.x, h[1] = v.y, h[2] = v.z, h[3] = v.w;
    } else {
        const uint2 v = ptxlab::subnormal_u8(word ^ FLIP);
        h[0] = v.x, h[1] = v.y;
    }
}

// Bytes of a word of keys: its low nibbles, or 16 times its high ones.
__device__ __forceinline__ u32 key_bytes(u32 word, int nibble) {
    return BITS == 8 ? word : nibble ? word & 0xf0f0f0f0u : word & 0x0f0f0f0fu;
}

// S = K Q^T of a warp's tokens from token0 on, times 16 where there are nibbles: no sum of bytes, nor what they are put
// together to, exceeds an s32.
__device__ __forceinline__ void multiply_keys(float (&s)[MT][2 * OWN], const unsigned char* keys, int token0,
                                              const u32 (&query)[SETS][NIBBLES][K_WORDS], int g, int t) {
    int sums[MT][SETS][NIBBLES][4] = {};
#pragma unroll
    for (int c = 0; c < K_WORDS; c += VECTOR) {
        u32 upper[MT][VECTOR], lower[MT][VECTOR];  // rows g, rows g + 8
#pragma unroll
        for (int i = 0; i < MT; ++i) {
            const unsigned char* from = keys + row_at(token0 + i * 16) + g * ROW + (c * 4 + t * VECTOR) * 4;
            ptxlab::load_words(upper[i], from);
            ptxlab::load_words(lower[i], from + 8 * ROW);
        }
#pragma unroll
        for (int w = 0; w < VECTOR; w += 2)
#pragma unroll
            for (int n = 0; n < NIBBLES; ++n)
#pragma unroll
                for (int i = 0; i < MT; ++i) {  // tokens innermost: an MMA waits for the one before with its sums
                    const u32 a0 = key_bytes(upper[i][w], n), a1 = key_bytes(lower[i][w], n);
                    const u32 a2 = key_bytes(upper[i][w + 1], n), a3 = key_bytes(lower[i][w + 1], n);
#pragma unroll
                    for (int b = 0; b < SETS; ++b)
                        (SIGNED ? ptxlab::mma_s8 : ptxlab::mma_u8)(sums[i][b][n], a0, a1, a2, a3, query[b][n][c + w],
                                                                   query[b][n][c + w + 1]);
                }
    }
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int e = 0; e < 2 * OWN; ++e) {
            const auto with_byte = [&](int byte) {  // of the query: its high one, its low one
                const int set = PAIRED ? 0 : byte, at = PAIRED ? e * 2 + byte : e;
                return BITS == 8 ? sums[i][set][0][at] : sums[i][set][0][at] * 16 + sums[i][set][NIBBLES - 1][at];
            };
            s[i][e] = float(with_byte(0) * 256 + with_byte(1));
        }
}

// O^T += V^T P^T, 16 tokens whose values begin at `rows`. Of a pair of tokens odd t load the second first, which halves
// the bank conflicts.
__device__ __forceinline__ void multiply_values(float (&o)[DT][4], const unsigned char* rows, const u32 (&p)[2], int g,
                                                int t) {
    const int odd = t % 2;
    const u32 select[2] = {odd ? 0x1054u : 0x5410u, odd ? 0x3276u : 0x7632u};  // low halves, high halves
    u32 first[2][V_WORDS], second[2][V_WORDS];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const unsigned char* from = rows + (h * 8 + t * 2) * ROW + g * V_WORDS * 4;
        ptxlab::load_words(first[h], from + odd * ROW);
        ptxlab::load_words(second[h], from + (1 - odd) * ROW);
    }
#pragma unroll
    for (int w = 0; w < V_WORDS; ++w)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            u32 a[HALVES], b[HALVES];
            subnormals(a, __byte_perm(first[0][w], second[0][w], select[k]));
            subnormals(b, __byte_perm(first[1][w], second[1][w], select[k]));
#pragma unroll
            for (int r = 0; r < HALVES; r += 2)
                ptxlab::mma_f16(o[w * HALVES + k * (HALVES / 2) + r / 2], a[r], a[r + 1], b[r], b[r + 1], p[0], p[1]);
        }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * ALL_WARPS, RESIDENT) attention_kv4_sm90(
    const unsigned short* q,                    // f16 or bf16 [B, T, Hq, D]
    const unsigned char* pool,                  // u8 [pages, 2, Hkv, PAGE_BYTES]
    const int* table,                           // s32 [B, P]
    const int* lengths,                         // s32 [B]
    const float* k_scale, const float* k_zero,  // f32 [Hkv, D] if CHANNEL, else null
    const float* v_scale, const float* v_zero,
    unsigned short* out,  // f16 or bf16 [B, T, Hq, D]
    float* lse,           // f32 [B, T, Hq], or null
    // u32 [gridDim.x, columns, D]: sums of 2^(score - largest) * value that a block hands over
    u32* partial,
    // u32 [gridDim.x, columns, 2]: their largest score, sum of 2^(..); both 0 before and after
    u32* stats, float softmax_scale, int B, int T, int Hq, int Hkv, int P, int window) {
    extern __shared__ __align__(128) unsigned char ring[];  // [STAGES][STAGE]
    __shared__ u64 full[STAGES], empty[STAGES], ready[UNITS], summed[UNITS], cleared[UNITS];
    __shared__ Unit units[UNITS];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    TIMELINE_THREAD(lane == 0);
    const int nearest = warp >= WARPS ? Segments::nearest_of(lengths, B) : 0;
    const int group = int(float(Hq) * ptxlab::reciprocal_approx(float(Hkv)) + 0.5f),
              splits = unsigned(group * T + COLUMNS - 1) / COLUMNS, columns = min(COLUMNS, group * T);
    Segments walk;
    if (warp >= WARPS) {
        walk = Segments(lengths, nearest, B, Hkv * splits, T, window);
    } else if (ptxlab::elect()) {  // every warp some: one lane makes one after the other
#pragma unroll
        for (int i = 0; i < STAGES; i += WARPS)
            if (i + warp < STAGES)
                ptxlab::mbarrier_init(&full[i + warp], 1), ptxlab::mbarrier_init(&empty[i + warp], SHARE * 32);
#pragma unroll
        for (int i = 0; i < UNITS; i += WARPS)
            if (i + warp < UNITS) {
                ptxlab::mbarrier_init(&ready[i + warp], 32);
                ptxlab::mbarrier_init(&summed[i + warp], WARPS * 32);
                ptxlab::mbarrier_init(&cleared[i + warp], WARPS * 32);
            }
        ptxlab::fence_mbarrier_init();
    }
    __syncthreads();
    ptxlab::launch_dependents();

    if (warp == COPIES) {  // asks for copies
        const bool elected = ptxlab::elect();
        const size_t pitch = size_t(Hkv) * PAGE_BYTES;
        ptxlab::Slot<STAGES> slot;
        Feed feed(walk, table, P);
        ptxlab::wait_for_predecessors();
        while (feed.take(splits)) {
            const unsigned char* const of_head = pool + feed.head * size_t(PAGE_BYTES);
            for (int at = 0; at < feed.left; at += PAGES, slot.advance()) {
                unsigned char* stage = ring + slot.index * STAGE;
                PHASE(WAIT_GROUP);
                ptxlab::mbarrier_wait(&empty[slot.index], slot.parity ^ 1);  // the first round finds them empty
                PHASE(LOAD);
                if (elected) ptxlab::mbarrier_arrive_expect(&full[slot.index], STAGE);
#pragma unroll
                for (int j = 0; j < PAGES; ++j) {
                    const unsigned char* from = of_head + size_t(__shfl_sync(~0u, feed.entries, at + j)) * (2 * pitch);
                    if (elected) ptxlab::bulk_load_once(stage + j * PAGE_BYTES, from, PAGE_BYTES, &full[slot.index]);
                    if (elected)
                        ptxlab::bulk_load_once(stage + (PAGES + j) * PAGE_BYTES, from + pitch, PAGE_BYTES,
                                               &full[slot.index]);
                }
                if (at == 0) feed.look_ahead();  // when the first tile has been asked for
            }
        }
        return;
    }

    unsigned char* const queries = ring + STAGES * STAGE;  // [UNITS][QUERY]
    // [SLOTS][columns][WARPS]: largest, sum, zeros
    float4* const warp_stats = reinterpret_cast<float4*>(queries + UNITS * QUERY);
    // [SLOTS][WARPS][columns][PITCH]
    float* const warp_sums = reinterpret_cast<float*>(warp_stats + SLOTS * WARPS * columns);
    // of columns, so that lanes of D 128 store to all banks
    const auto place_of = [&](int column) { return column % OWN * ((columns + 1) / 2) + column / OWN; };

    if (warp == QUERIES) {  // records of units; queries -> operand B
        ptxlab::Slot<UNITS> slot;
        int turn = 0;
        // that meets word w of the lane's keys
        const auto dim = [&](int w) { return (w / VECTOR * VECTOR * 4 + t * VECTOR + w % VECTOR) * PER_WORD; };
        const int mine = PAIRED ? g / 2 : g;
        u32 next[K_WORDS][PER_WORD / 2];
        int head = 0, column0 = 0;  // of the unit: its kv head, which of the head's queries is the first
        int token = 0, row = 0;     // of the lane's column: the query of the sequence, the row of q
        const auto load = [&] {
            head = splits == 1 ? walk.unit : Segments::div(walk.unit, splits),
            column0 = (walk.unit - head * splits) * COLUMNS;
            const int column = column0 + mine;
            token = T == 1 ? 0 : Segments::div(column, group);
            row = (walk.sequence * T + token) * Hq + head * group + column - token * group;
            const unsigned short* from = q + size_t(row) * D;
#pragma unroll
            for (int w = 0; w < K_WORDS; ++w) {
#pragma unroll
                for (int r = 0; r < PER_WORD / 2; ++r) next[w][r] = 0;
                if (column < group * T) ptxlab::load_words(next[w], from + dim(w));
            }
        };
        ptxlab::wait_for_predecessors();
        if (walk.more()) load();
        for (; walk.more(); slot.advance()) {
            const Segments here = walk;
            const int head_here = head, row_here = row, columns_here = min(columns, group * T - column0),
                      end = here.length - T + 1 + token;
            float x[K_WORDS][PER_WORD], largest = 0;
#pragma unroll
            for (int w = 0; w < K_WORDS; ++w)
#pragma unroll
                for (int e = 0; e < PER_WORD; ++e) {
                    const u32 bits = e % 2 ? next[w][e / 2] >> 16 : next[w][e / 2] & 0xffff;
                    x[w][e] = BF16 ? __uint_as_float(bits << 16) : low_half(bits);
                    if (CHANNEL) x[w][e] *= k_scale[head_here * D + dim(w) + e];
                    largest = ptxlab::max_nan(largest, fabsf(x[w][e]));
                }
            if constexpr (ROTATED) largest = ptxlab::rotate_query<VECTOR * PER_WORD, 4>(x, t);
            walk.advance();  // what comes next is on its way while this is worked on
            if (walk.more()) load();
            largest = ptxlab::max_nan(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = ptxlab::max_nan(largest, __shfl_xor_sync(~0u, largest, 2));
            largest = ptxlab::max_nan(largest, 0x1p-100f);
            // NaN of infinity too
            const float unit = largest * (1.0f / LARGEST) + (largest - largest),
                        power = ptxlab::reciprocal_approx(unit);
            PHASE(WAIT_GROUP);
            ptxlab::mbarrier_wait(&cleared[slot.index], slot.parity ^ 1);  // the unit that was in this slot is done
            PHASE(SETUP);
            u32 query[SETS][NIBBLES][K_WORDS];
            float sum = 0;
            int sums[2] = {};  // of high bytes, of low ones
#pragma unroll
            for (int w = 0; w < K_WORDS; ++w)
#pragma unroll
                for (int n = 0; n < NIBBLES; ++n) {
                    int bits[4], upper[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float value = fmaf(x[w][n * 4 + i], power, ptxlab::SHIFT);
                        if (CHANNEL && !SIGNED)
                            sum += (value - ptxlab::SHIFT) * k_zero[head_here * D + dim(w) + n * 4 + i];
                        bits[i] = __float_as_int(value), upper[i] = bits[i] + 128;
                    }
                    const u32 bytes[2] = {ptxlab::bytes_of<1>(upper), ptxlab::bytes_of<0>(bits)};
#pragma unroll
                    for (int i = 0; i < 2; ++i) sums[i] = __dp4a(int(bytes[i]), 0x01010101, sums[i]);
                    if (PAIRED) query[0][n][w] = g % 2 ? bytes[1] : bytes[0];
                    else query[0][n][w] = bytes[0], query[SETS - 1][n][w] = bytes[1];
                }
#pragma unroll
            for (int i = 0; i < SETS * NIBBLES; ++i)
                ptxlab::store_words(queries + slot.index * QUERY + (i * 32 + lane) * K_WORDS * 4,
                                    query[i / NIBBLES][i % NIBBLES]);
            if (!CHANNEL) sum = float(sums[0] * 256 + sums[1]);
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (t == 0 && (!PAIRED || g % 2 == 0)) {
                constexpr float TIMES = BITS == 4 ? 16 : 1;
                reinterpret_cast<float2*>(queries + slot.index * QUERY + FRAGMENTS)[mine] =
                    make_float2(sum * -TIMES, unit * (softmax_scale * LOG2E / TIMES));
                units[slot.index].row[mine] = row_here, units[slot.index].end[mine] = end;
            }
            if (lane == 0) {
                const int first = here.first(), count = here.count();
                Unit& unit = units[slot.index];
                unit.count = count, unit.position = (here.begin + first) * TILE, unit.length = here.length,
                unit.turn = turn;
                unit.head = head_here, unit.columns = columns_here;
                unit.blocks = first > 0 ? 0 : count == here.tiles ? 1 : here.blocks();
                if constexpr (PART > 0) unit.blocks = part_of(here);
                turn = (turn + count) % GROUPS;
            }
            ptxlab::mbarrier_arrive(&ready[slot.index]);
        }
        ptxlab::mbarrier_wait(&cleared[slot.index], slot.parity ^ 1);
        if (lane == 0) units[slot.index].count = 0;
        ptxlab::mbarrier_arrive(&ready[slot.index]);
        for (int s = blockIdx.x; s < B; s += gridDim.x)  // nobody's: sequences of no tokens
            if (lengths[s] <= 0) {
                for (size_t i = lane; i < size_t(T) * Hq * D / 2; i += 32)
                    reinterpret_cast<u32*>(out)[size_t(s) * T * Hq * D / 2 + i] = 0;
                for (int i = lane; lse && i < T * Hq; i += 32) lse[size_t(s) * T * Hq + i] = -ptxlab::infinity();
            }
        return;
    }

    // The warps' sums of a unit -> results, or parts of them. A warp takes a column, in every unit another.
    const auto merge = [&](int number) {
        const Unit& unit = units[number % UNITS];
        const int sums = number % SLOTS * WARPS;
        PHASE(WAIT_GROUP);
        ptxlab::mbarrier_wait(&summed[number % UNITS], number / UNITS % 2);
        PHASE(EPILOGUE);
        // With PART sums are added up from the warps of the first tile on, and a column's are always the same warp's,
        // which finds what it has left in the workspace.
        const int ahead = PART ? unit.turn * SHARE : 0;
        for (int c = PART ? warp : (warp + number) % WARPS; c < unit.columns; c += WARPS) {
            const int from = PART && lane % LANES < WARPS ? (lane % LANES + ahead) % WARPS : lane % LANES;
            const bool active = from < WARPS && (from / SHARE - unit.turn + GROUPS) % GROUPS < unit.count;
            const u32 all_active = __ballot_sync(~0u, active);
            const float4 mine =
                active ? warp_stats[(number % SLOTS * columns + c) * WARPS + from] : make_float4(LOWEST, 0, 0, 0);
            ptxlab::Row<D> row = {};
            row.largest = mine.x;
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2)
                row.largest = fmaxf(row.largest, __shfl_xor_sync(~0u, row.largest, step));
            const float factor = ptxlab::exp2_approx(mine.x - row.largest);
            float zeros = mine.z * factor;
            const float back = BITS == 8 || lane % 2 == 0 ? 0x1p24f : 0x1p20f;  // integers were subnormals
            row.sum = mine.y * factor;
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2)
                row.sum += __shfl_xor_sync(~0u, row.sum, step), zeros += __shfl_xor_sync(~0u, zeros, step);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float times = __shfl_sync(~0u, factor, w);
                float4 more[row.PIECES] = {};
#pragma unroll
                for (int p = 0; p < row.PIECES; ++p)
                    if ((all_active >> w & 1) && row.mine(p))
                        more[p] = *reinterpret_cast<const float4*>(
                            warp_sums + ((sums + (PART ? (w + ahead) % WARPS : w)) * columns + place_of(c)) * PITCH +
                            row.dim(p));
                row.add(more, times);
            }
#pragma unroll
            for (int p = 0; p < row.PIECES; ++p)
                if (row.mine(p)) {
                    float4 zero = make_float4(1, 1, 1, 1), scale = zero;
                    if (CHANNEL) scale = *reinterpret_cast<const float4*>(v_scale + unit.head * D + row.dim(p));
                    if (CHANNEL)
                        zero = BITS == 8 ? make_float4(128, 128, 128, 128)
                                         : *reinterpret_cast<const float4*>(v_zero + unit.head * D + row.dim(p));
                    float4& v = row.v[p];
                    v = make_float4((v.x * back - zeros * zero.x) * scale.x, (v.y * back - zeros * zero.y) * scale.y,
                                    (v.z * back - zeros * zero.z) * scale.z, (v.w * back - zeros * zero.w) * scale.w);
                }
            if constexpr (PART > 0) {  // from the first part on, one by one
                const int place = unit.blocks / LEFT, left = unit.blocks % LEFT;
                const size_t own = size_t(place) * columns + c,
                             first = size_t(place / MOST_PARTS * MOST_PARTS) * columns + c;
                if (left != ELSEWHERE && own != first) {
                    ptxlab::Row<D> sum = ptxlab::Row<D>::taken_back(partial, stats, first);
                    sum.add_part(make_float2(row.largest, row.sum), row.v), row = sum;
                }
                if (left >= NEXT) {
                    row.hand_over(partial, stats, left == NEXT ? first : own);
                    continue;
                }
                if (left > 0) row.take_over<true>(partial, stats, own + columns, columns, left);
                row.store<BF16>(out, lse, unit.row[c]);
                continue;
            }
            if (unit.blocks == 0) {
                row.hand_over(partial, stats, size_t(blockIdx.x) * columns + c);
                continue;
            }
            if (unit.blocks > 1)
                row.take_over(partial, stats, (size_t(blockIdx.x) + 1) * columns + c, columns, unit.blocks - 1);
            row.store<BF16>(out, lse, unit.row[c]);
        }
        ptxlab::mbarrier_arrive(&cleared[number % UNITS]);
    };

    const int mine = warp / SHARE, token0 = warp % SHARE * TOKENS;  // of the groups; of a tile
    int stage = mine, parity = 0, merged = 0;
    for (int number = 0;; ++number) {
        const int slot = number % UNITS;
        PHASE(WAIT_GROUP);
        ptxlab::mbarrier_wait(&ready[slot], number / UNITS % 2);
        const int count = units[slot].count, skip = count > 0 ? (mine - units[slot].turn + GROUPS) % GROUPS : 0;
        if (skip < count) {
            const int length = units[slot].length, position0 = units[slot].position + token0;
            PHASE(SETUP);
            u32 query[SETS][NIBBLES][K_WORDS];
            float column_sum[OWN], factor[OWN], m[OWN], l[OWN] = {};
#pragma unroll
            for (int b = 0; b < OWN; ++b) m[b] = LOWEST;
#pragma unroll
            for (int i = 0; i < SETS * NIBBLES; ++i)
                ptxlab::load_words(query[i / NIBBLES][i % NIBBLES],
                                   queries + slot * QUERY + (i * 32 + lane) * K_WORDS * 4);
#pragma unroll
            for (int b = 0; b < OWN; ++b) {
                const float2 extra = reinterpret_cast<const float2*>(queries + slot * QUERY + FRAGMENTS)[OWN * t + b];
                column_sum[b] = extra.x, factor[b] = extra.y;
            }
            for (int turn = skip; turn < count;) {
                const bool first = PROMOTE == 0 || turn == skip;
                float o[DT][4] = {}, zeros[4] = {};
                for (const int upto = PROMOTE == 0 ? count : min(count, turn + PROMOTE / TOKENS * GROUPS); turn < upto;
                     turn += GROUPS) {
                    const int position = position0 + turn * TILE;  // of this warp's first token
                    const bool masked =
                        position + TOKENS > length - T + 1 || (window > 0 && position < length - window);
                    const unsigned char* keys = ring + stage * STAGE;
                    const unsigned char* values = keys + PAGES * PAGE_BYTES;
                    PHASE(WAIT_COPY);
                    ptxlab::mbarrier_wait(&full[stage], parity);

                    PHASE(SCORES);
                    u32 k_pair[MT][2], v_pair[MT][2], v_zeros[MT][2];  // (scale, zero) of tokens; zeros of two tokens
#pragma unroll
                    for (int i = 0; i < MT; ++i)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const int token = token0 + i * 16 + h * 8;
                            k_pair[i][h] = v_pair[i][h] = NEUTRAL, v_zeros[i][h] = ONES;
                            if (CHANNEL) continue;
                            k_pair[i][h] = *reinterpret_cast<const u32*>(keys + scale_at(token + g));
                            v_pair[i][h] = *reinterpret_cast<const u32*>(values + scale_at(token + g));
                            const uint2 pairs = *reinterpret_cast<const uint2*>(values + scale_at(token + 2 * t));
                            v_zeros[i][h] = __byte_perm(pairs.x, pairs.y, 0x7632);
                        }
                    if (!CHANNEL && masked) {  // beyond the end there may be anything
                        asm volatile("");      // keeps it a branch: few tiles need it
#pragma unroll
                        for (int i = 0; i < MT; ++i)
#pragma unroll
                            for (int h = 0; h < 2; ++h) {
                                const int left = length - position - i * 16 - h * 8;
                                if (g >= left) k_pair[i][h] = v_pair[i][h] = NEUTRAL;
                                if (2 * t >= left) v_zeros[i][h] = 0;
                                else if (2 * t + 1 >= left) v_zeros[i][h] &= 0xffff;
                            }
                    }

                    float s[MT][2 * OWN];
                    multiply_keys(s, keys, token0, query, g, t);
                    PHASE(SOFTMAX);
                    float v_inverse[MT][2];
#pragma unroll
                    for (int i = 0; i < MT; ++i)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const float scale = low_half(v_pair[i][h]),
                                        v_log = CHANNEL ? 0 : ptxlab::log2_approx(scale);
                            v_inverse[i][h] = CHANNEL ? 1 : ptxlab::reciprocal_approx(scale);
#pragma unroll
                            for (int b = 0; b < OWN; ++b) {
                                float& x = s[i][h * OWN + b];
                                x += CHANNEL ? column_sum[b] : high_half(k_pair[i][h]) * column_sum[b];
                                x = (CHANNEL ? x : x * low_half(k_pair[i][h])) * factor[b] + v_log;
                            }
                        }
                    if (masked) {
                        asm volatile("");
#pragma unroll
                        for (int b = 0; b < OWN; ++b) {
                            const int end = units[slot].end[OWN * t + b];
#pragma unroll
                            for (int i = 0; i < MT; ++i)
#pragma unroll
                                for (int h = 0; h < 2; ++h) {
                                    const int at = position + i * 16 + h * 8 + g;
                                    if (at >= end || (window > 0 && at < end - window))
                                        s[i][h * OWN + b] = -ptxlab::infinity();
                                }
                        }
                    }

                    float before[OWN];
                    bool larger = false;
#pragma unroll
                    for (int b = 0; b < OWN; ++b) {
                        float most = LOWEST;
#pragma unroll
                        for (int i = 0; i < MT; ++i) most = fmaxf(most, fmaxf(s[i][b], s[i][OWN + b]));
#pragma unroll
                        for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
                        before[b] = m[b], m[b] = fmaxf(m[b], most), larger |= m[b] > before[b];
                    }
                    if (__any_sync(~0u, larger)) {
#pragma unroll
                        for (int b = 0; b < OWN; ++b) {
                            const float less = ptxlab::exp2_approx(before[b] - m[b]);
                            l[b] *= less, zeros[b] *= less;
#pragma unroll
                            for (int d = 0; d < DT; ++d) o[d][b] *= less, o[d][b + 2] *= less;
                        }
                    }
                    PHASE(VALUES);
#pragma unroll
                    for (int i = 0; i < MT; ++i) {
                        u32 p[2];
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            float weight[2] = {};
#pragma unroll
                            for (int b = 0; b < OWN; ++b)
                                weight[b] = ptxlab::exp2_approx(s[i][h * OWN + b] - m[b]),
                                l[b] += weight[b] * v_inverse[i][h];
                            p[h] = ptxlab::transposed(half_pair(weight[0], weight[1]));
                        }
                        ptxlab::mma_f16(zeros, v_zeros[i][0], v_zeros[i][0], v_zeros[i][1], v_zeros[i][1], p[0], p[1]);
                        multiply_values(o, values + row_at(token0 + i * 16), p, g, t);
                    }
                    ptxlab::mbarrier_arrive(&empty[stage]);
                    if ((stage += GROUPS) >= STAGES) stage -= STAGES, parity ^= 1;
                }

                PHASE(REDUCE);
                // At first there is none before. A warp does not wait here in units that have no tile for it, and need
                // not: `ready` of a unit says that all older phases of this barrier are over.
                ptxlab::mbarrier_wait(&cleared[(number + UNITS - SLOTS) % UNITS],
                                      ((number + UNITS - SLOTS) / UNITS + 1) % 2);
#pragma unroll
                for (int b = 0; b < OWN; ++b) {
                    float weights = l[b], sums[D / 8];
#pragma unroll
                    for (int step = 4; step < 32; step *= 2) weights += __shfl_xor_sync(~0u, weights, step);
#pragma unroll
                    // of four, two of a tile of low halves, two of one of high halves
                    for (int e = 0; e < D / 8; ++e) {
                        const int tile = e / PER_WORD * HALVES + e % PER_WORD / 4 + e % 4 / 2 * (HALVES / 2),
                                  i = b + e % 2 * 2;
                        // their sums have those of the tile before in them
                        const bool bytes = BITS == 4 && e % PER_WORD >= 4;
                        sums[e] = bytes ? o[tile][i] - o[tile - 1][i] : o[tile][i];
                    }
                    const int column = OWN * t + b, row = (number % SLOTS * WARPS + warp) * columns + place_of(column);
                    float4* const stat = warp_stats + (number % SLOTS * columns + column) * WARPS + warp;
                    float* const to = warp_sums + row * PITCH + g * (D / 8);
                    if (!first) {
                        asm volatile("");  // keeps it a branch: few units need it
                        __syncwarp();      // a lane of row 0 has written the statistics
                        if (column < columns) {
                            const float less = ptxlab::exp2_approx(stat->x - m[b]);
                            zeros[b] += stat->z * less;
#pragma unroll
                            for (int e = 0; e < D / 8; ++e) sums[e] += to[e] * less;
                        }
                        __syncwarp();  // all have read them
                    }
                    if (column >= columns) continue;
                    if (g == 0) *stat = make_float4(m[b], CHANNEL ? zeros[b] : weights, zeros[b], 0);
#pragma unroll
                    for (int e = 0; e < D / 8; e += 4) {
                        const u32 four[4] = {__float_as_uint(sums[e]), __float_as_uint(sums[e + 1]),
                                             __float_as_uint(sums[e + 2]), __float_as_uint(sums[e + 3])};
                        ptxlab::store_words(to + e, four);
                    }
                }
            }
        }
        if (count > 0) ptxlab::mbarrier_arrive(&summed[slot]);
        for (const int upto = count > 0 ? number - LAG : number - 1; merged <= upto; ++merged) merge(merged);
        if (count == 0) break;
    }
}
