// attention_kv4_mma_sm80: decode attention over a paged cache on tensor cores, from Ampere on: the whole contract.
//
// All queries that share a kv head (the heads of its group, times T) read its keys and values once: they are the
// columns of an MMA whose other operand are keys, and then values, dequantised by AND alone: a nibble under a mask is
// the FP16 subnormal v * 2^-24, which tensor cores take exactly. Units are split evenly over blocks (COMET section
// 3.2).
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
#include "kv_page.cuh"
#include "mma.cuh"
#include "mma_f16.cuh"
#include "parts.cuh"
#include "segments.cuh"
#include "timeline.cuh"
#include "vector_access.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128  // 64, 128, 256
#define PAGE 64       // tokens of a page: 16, 32, 64
#define BITS 4        // of a key or value: 4, or 8
#define CHANNEL 0     // scale and zero: 0 per token, in the page; 1 per channel
#define BF16 0        // queries and results: 0 f16, 1 bf16
#define COLUMNS 8     // queries of a unit, 8 or 16
#define WARPS 4
#define STAGES 3
#define TOKENS 32  // of a slice
#define SUM_PAD 4  // floats between rows of sums in shared memory
#define FUSED 0    // 1: the last block that has part of a unit puts it together, and no attention_merge is needed
#endif

#ifndef ROTATED
#define ROTATED 0  // 1: keys are rotated by a Hadamard matrix, so queries are too
#endif

namespace {

using ptxlab::u32;
using Page = ptxlab::KvPage<HEAD_DIM, PAGE, BITS, CHANNEL>;
using Row = ptxlab::Row<HEAD_DIM>;
using Segments = ptxlab::Segments<2, 4>;  // a unit costs its tiles, but two at least

constexpr int kThreads = 32 * WARPS, kTileSlices = ptxlab::TILE / TOKENS;
constexpr int kPages = TOKENS > PAGE ? TOKENS / PAGE : 1, kRows = TOKENS * Page::kRowBytes;     // of a slice; bytes
constexpr int kKeyWords = Page::kRowBytes / 16, kValueWords = Page::kRowBytes / 32;             // of a row, per lane
constexpr int kTokenTiles = TOKENS / 16, kQueryTiles = COLUMNS / 8, kDimTiles = HEAD_DIM / 16;  // of MMAs
constexpr int kVectorWords = kValueWords == 1 ? 1 : 2;                                          // of one load of values
constexpr int kPitch = HEAD_DIM + SUM_PAD;  // floats of a row of sums
constexpr u32 kOnes = 0x3c003c00;           // two zero points of 1
static_assert((COLUMNS == 8 || COLUMNS == 16) && TOKENS == 32 && SUM_PAD % 4 == 0);

using Scores = float[kTokenTiles][kQueryTiles][4];  // of tokens g (0, 1) and g + 8 (2, 3), queries 2 t, 2 t + 1

// Return where a byte of a stage's keys or values lies under the swizzle.
__device__ __forceinline__ int swizzled_offset(int byte) { return byte ^ ((byte >> 7 & 3 ^ byte >> 9 & 1) << 5); }

// Return the dim of half b of pair r of a word of keys, and the factor that integers of the pair count: 1, or 16.
__device__ __forceinline__ constexpr int dim_of(int r, int b) { return r / 2 * 4 + r % 2 + 2 * b; }
__device__ __forceinline__ constexpr float count_of(int r) { return r < 2 ? 1 : 16; }

// Position of a lane in fragments: lane 4 g + t. Passed on by value, since a role that read `threadIdx` itself would do
// so in every slice.
struct Lane {
    int g, t;
};

struct Arguments {
    const unsigned short* q;
    const unsigned char* pool;
    const int *table, *lengths;
    const float *k_scale, *k_zero, *v_scale, *v_zero;
    unsigned short* out;
    float *lse, *partial;
    float2* stats;
    int* segments;
    float softmax_scale;
    int B, T, Hq, Hkv, P, window;

    // Heads that share a KV head; units that these make; columns of a unit at most.
    int group = Hq / Hkv, splits = (group * T + COLUMNS - 1) / COLUMNS, columns = min(COLUMNS, group* T);
};

// A warp's slice of 32 tokens: keys and values, swizzled, then (scale, zero) of both unless these are per channel.
struct Stage {
    unsigned char keys[kRows], values[kRows + (CHANNEL ? 0 : 2 * TOKENS * 4)];

    __device__ __forceinline__ const u32* constants() const { return reinterpret_cast<const u32*>(values + kRows); }
};

// A warp's stages.
struct Ring {
    unsigned char* bytes;

    // The offset has 32 bits: an array's would have 64, which take other instructions in the loop.
    __device__ __forceinline__ Stage& stage(int slot) const {
        return *reinterpret_cast<Stage*>(bytes + slot * int(sizeof(Stage)));
    }
};

// The warps' sums of a segment, behind their rings.
struct WarpSums {
    float* rows;    // [WARPS][columns][kPitch]
    float4* stats;  // [WARPS][columns]: largest score, sum of weights, sum of weights times zero points
    int columns;

    __device__ __forceinline__ WarpSums(unsigned char* memory, int columns)
        : rows(reinterpret_cast<float*>(memory)), stats(reinterpret_cast<float4*>(rows + WARPS * columns * kPitch)),
          columns(columns) {}
    __device__ __forceinline__ float* row(int warp, int column) const {
        return rows + (warp * columns + column) * kPitch;
    }
    __device__ __forceinline__ float4* stat(int warp, int column) const { return stats + warp * columns + column; }
};

// Deals the slices of the block's segments to its warps as if they were of one segment. A warp has two: one for the
// slices that it multiplies, one, some stages ahead, for those that it copies.
struct Scheduler {
    Segments segment;
    int slice, slices;  // of this segment: the warp's next one, and all

    __device__ __forceinline__ explicit Scheduler(const Segments& segment) : segment(segment), slice(threadIdx.x / 32) {
        count();
    }
    __device__ __forceinline__ void count() {
        // `tokens` belongs to the branch: worked out before it, it costs the loop its registers for addresses.
        slices = !segment.has_segment() ? 0 : min(segment.tile_count() * kTileSlices, (tokens() + TOKENS - 1) / TOKENS);
    }
    __device__ __forceinline__ int tokens() const {
        return segment.length - (segment.window_tile + segment.first_tile()) * ptxlab::TILE;
    }
    __device__ __forceinline__ void next_segment() {
        slice -= slices;
        segment.advance();
        count();
    }
    __device__ __forceinline__ int position() const {
        return (segment.window_tile + segment.first_tile()) * ptxlab::TILE + slice * TOKENS;
    }
};

// Copies a warp's slices. The entry of the block table is loaded one slice before it is needed.
struct PageProducer {
    Scheduler scheduler;
    const unsigned char *pool, *head_pages;
    const int* table;
    size_t pitch;  // of the keys, or of the values, of all heads of a page
    int P, splits, entry = 0;

    __device__ __forceinline__ PageProducer(const Scheduler& scheduler, const Arguments& arguments)
        : scheduler(scheduler), pool(arguments.pool), head_pages(pool), table(arguments.table),
          pitch(size_t(arguments.Hkv) * Page::kBytes), P(arguments.P), splits(arguments.splits) {
        enter();
        look_up();
    }

    __device__ __forceinline__ void enter() {
        head_pages = pool + size_t(scheduler.segment.unit_index / splits) * Page::kBytes;
    }

    __device__ __forceinline__ void look_up() {
        while (scheduler.segment.has_segment() && scheduler.slice >= scheduler.slices) {
            scheduler.next_segment();
            enter();
        }
        if (!scheduler.segment.has_segment()) return;
        // a page that does not exist is replaced by the last one
        const int last_page = (scheduler.segment.length - 1) / PAGE,
                  page = scheduler.position() / PAGE + threadIdx.x % kPages;
        entry = table[size_t(scheduler.segment.sequence) * P + min(page, last_page)];
    }

    // Start to copy the next slice, if there is one; commit a group of copies in either case.
    __device__ __forceinline__ void fetch(unsigned char* stage) {
        if (scheduler.segment.has_segment()) {
            copy(stage);
            scheduler.slice += WARPS;
            look_up();
        }
        ptxlab::cp_async_commit();
    }

    __device__ __forceinline__ void copy(unsigned char* stage) const {
        const int lane = threadIdx.x % 32, offset = scheduler.position() % PAGE;
        const unsigned char* page[kPages];
#pragma unroll
        for (int j = 0; j < kPages; ++j) page[j] = head_pages + size_t(__shfl_sync(~0u, entry, j)) * (2 * pitch);
#pragma unroll
        for (int half = 0; half < 2; ++half)  // keys, values
#pragma unroll
            for (int i = 0; i < kRows / 512; ++i) {
                const int j = i * 512 / Page::kRowBytes / PAGE, byte = i * 512 + lane * 16;
                ptxlab::cp_async_16(
                    stage + half * kRows + swizzled_offset(byte),
                    page[j] + half * pitch + offset * Page::kRowBytes + byte - j * PAGE * Page::kRowBytes, true);
            }
        if (!CHANNEL && lane < TOKENS / 2) {
            const int half = lane / (TOKENS / 4), byte = lane * 16 % (TOKENS * 4), j = byte / 4 / PAGE;
            const unsigned char* rows = (j ? page[kPages - 1] : page[0]) + half * pitch;
            ptxlab::cp_async_16(stage + 2 * kRows + lane * 16,
                                rows + PAGE * Page::kRowBytes + (offset - j * PAGE) * 4 + byte, true);
        }
    }
};

// A segment's columns: which queries they are, and where their results go.
struct Columns {
    const Arguments& arguments;
    int sequence, head, first_column, count;

    __device__ __forceinline__ Columns(const Segments& segment, const Arguments& arguments)
        : arguments(arguments), sequence(segment.sequence), head(segment.unit_index / arguments.splits),
          first_column(segment.unit_index % arguments.splits * COLUMNS),
          count(min(arguments.columns, arguments.group * arguments.T - first_column)) {}

    __device__ __forceinline__ int token(int column) const { return (first_column + column) / arguments.group; }
    __device__ __forceinline__ size_t row(int column) const {  // of q and of the results
        return (size_t(sequence) * arguments.T + token(column)) * arguments.Hq + head * arguments.group +
               (first_column + column) % arguments.group;
    }
};

// Queries as operand B: a lane has of query g the dims of its words of keys.
struct Query {
    u32 words[kQueryTiles][kKeyWords][Page::kPairs];
    float factor[kQueryTiles][2], column_sum[kQueryTiles][2];

    __device__ __forceinline__ Query(const Columns& columns, Lane lane) {
#pragma unroll
        for (int n = 0; n < kQueryTiles; ++n) {
            float x[kKeyWords][Page::kPerWord];
            load(x, columns, n, lane);
            quantise(x, columns, n, lane);
        }
    }

    __device__ __forceinline__ static int dim(int w, Lane lane) {
        return (w / 2 * 8 + 2 * lane.t + w % 2) * Page::kPerWord;
    }

    // Load a lane's dims of a query, times the keys' scales if these are per channel, and rotate them if keys are.
    __device__ __forceinline__ static void load(float (&x)[kKeyWords][Page::kPerWord], const Columns& columns, int n,
                                                Lane lane) {
        const bool inside = n * 8 + lane.g < columns.count;
        const unsigned short* elements = columns.arguments.q + columns.row(inside ? n * 8 + lane.g : 0) * HEAD_DIM;
        const float* scales = columns.arguments.k_scale + columns.head * HEAD_DIM;
#pragma unroll
        for (int w = 0; w < kKeyWords; ++w)
#pragma unroll
            for (int i = 0; i < Page::kPerWord; i += 4) {
                const uint2 four =
                    inside ? *reinterpret_cast<const uint2*>(elements + dim(w, lane) + i) : make_uint2(0, 0);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    x[w][i + e] = ptxlab::element<BF16>(e < 2 ? four.x : four.y, e % 2);
                    if (CHANNEL) x[w][i + e] *= scales[dim(w, lane) + i + e];
                }
            }
        if constexpr (ROTATED) ptxlab::rotate_query<2 * Page::kPerWord, 4>(x, lane.t);
    }

    // Round to FP16 relative to a power of two, so that the largest reaches the top of its range.
    __device__ __forceinline__ void quantise(const float (&x)[kKeyWords][Page::kPerWord], const Columns& columns, int n,
                                             Lane lane) {
        const float* zeros = columns.arguments.k_zero + columns.head * HEAD_DIM;
        const auto zero = [&](int w, int i) { return !CHANNEL ? 1 : BITS == 8 ? 128 : zeros[dim(w, lane) + i]; };
        float largest = 0, sum = 0;
#pragma unroll
        for (int w = 0; w < kKeyWords; ++w)
#pragma unroll
            for (int i = 0; i < Page::kPerWord; ++i) largest = fmaxf(largest, fabsf(x[w][i]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const float power = ptxlab::leading_power(fmaxf(largest, 0x1p-100f)),
                    inverse = ptxlab::inverse_power(power) * 0x1p14f;
#pragma unroll
        for (int w = 0; w < kKeyWords; ++w)
#pragma unroll
            for (int r = 0; r < Page::kPairs; ++r) {
                const int low = dim_of(r, 0), high = dim_of(r, 1);
                const float scaled = inverse / count_of(r);
                const u32 pair = ptxlab::half_pair(x[w][low] * scaled, x[w][high] * scaled);
                words[n][w][r] = pair;
                sum += (ptxlab::low_half(pair) * zero(w, low) + ptxlab::high_half(pair) * zero(w, high)) * count_of(r);
            }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const int source = 4 * (2 * lane.t + b);  // the column's first lane
            factor[n][b] = __shfl_sync(~0u, power, source) *
                           (columns.arguments.softmax_scale * ptxlab::kLog2E * 0x1p10f);  // 2^24 / 2^14
            column_sum[n][b] = __shfl_sync(~0u, sum, source) * -0x1p-24f;
        }
    }
};

// Constants of tokens g and g + 8 of each MMA tile: scale and zero point of the keys, logarithm and inverse of the
// values' scales.
struct TokenConstants {
    float key_scale[kTokenTiles][2], key_zero[kTokenTiles][2];
    float value_log[kTokenTiles][2], value_inverse[kTokenTiles][2];

    // Load the lane's constants of a stage, of which the first `tokens` tokens are in the sequence; tokens behind them
    // get scale 1 and zero point 0. With CHANNEL all are 1, zero points too: column_sum holds the channels'.
    __device__ __forceinline__ TokenConstants(const Stage& stage, int tokens, Lane lane) {
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int token = i * 16 + h * 8 + lane.g;
                key_scale[i][h] = key_zero[i][h] = value_inverse[i][h] = 1, value_log[i][h] = 0;
                if (CHANNEL) continue;
                u32 key = stage.constants()[token], value = stage.constants()[TOKENS + token];
                if (token >= tokens) key = value = ptxlab::kNeutralConstants;
                key_scale[i][h] = ptxlab::low_half(key), key_zero[i][h] = ptxlab::high_half(key);
                value_log[i][h] = ptxlab::log2_approx(ptxlab::low_half(value));
                value_inverse[i][h] = __fdividef(1, ptxlab::low_half(value));
            }
    }
};

// Compute S = K Q^T of a slice; sums begin with the zero points' part.
__device__ __forceinline__ void multiply_keys(Scores& s, const unsigned char* keys, const Query& query,
                                              const TokenConstants& constants, Lane lane) {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
        for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[i][n][e] = constants.key_zero[i][e / 2] * query.column_sum[n][e % 2];
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
        for (int j = 0; j < kKeyWords / 2; ++j) {
            const int row = (i * 16 + lane.g) * Page::kRowBytes + j * 32 + lane.t * 8;
            const uint2 upper = *reinterpret_cast<const uint2*>(keys + swizzled_offset(row));
            const uint2 lower = *reinterpret_cast<const uint2*>(keys + swizzled_offset(row + 8 * Page::kRowBytes));
#pragma unroll
            for (int w = 0; w < 2; ++w) {
                u32 a[Page::kPairs], b[Page::kPairs];
                ptxlab::subnormals<BITS>(a, (w ? upper.y : upper.x) ^ Page::kSignBits);
                ptxlab::subnormals<BITS>(b, (w ? lower.y : lower.x) ^ Page::kSignBits);
#pragma unroll
                for (int r = 0; r < Page::kPairs; r += 2)
#pragma unroll
                    for (int n = 0; n < kQueryTiles; ++n) {
                        const u32(&word)[Page::kPairs] = query.words[n][2 * j + w];
                        ptxlab::mma_f16(s[i][n], a[r], b[r], a[r + 1], b[r + 1], word[r], word[r + 1]);
                    }
            }
        }
}

// Scale products to scores in base 2, and add the logarithm of the value's scale.
__device__ __forceinline__ void scale_scores(Scores& s, const Query& query, const TokenConstants& constants) {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
        for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                s[i][n][e] = s[i][n][e] * (constants.key_scale[i][e / 2] * query.factor[n][e % 2]) +
                             constants.value_log[i][e / 2];
}

// Load the zero points of the values of a lane's two tokens of eight.
__device__ __forceinline__ u32 value_zeros(const Stage& stage, int first_token, int tokens, Lane lane) {
    const int token = first_token + 2 * lane.t;
    u32 even = stage.constants()[TOKENS + token], odd = stage.constants()[TOKENS + token + 1];
    if (token >= tokens) even = ptxlab::kNeutralConstants;
    if (token + 1 >= tokens) odd = ptxlab::kNeutralConstants;
    return __byte_perm(even, odd, 0x7632);
}

// Load words of the values of tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9, from word `j` of a lane's row on.
__device__ __forceinline__ void load_values(u32 (&words)[4][kVectorWords], const unsigned char* values, int first_token,
                                            int j, Lane lane) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const int row = (first_token + k / 2 * 8 + 2 * lane.t + k % 2) * Page::kRowBytes;
        ptxlab::load_words(words[k], values + swizzled_offset(row + j * 32 + lane.g * kVectorWords * 4));
    }
}

// O^T += V^T P^T for 16 tokens.
__device__ __forceinline__ void multiply_values(float (&o)[kDimTiles][kQueryTiles][4], const unsigned char* values,
                                                const u32 (&p)[kQueryTiles][2], int first_token, Lane lane) {
#pragma unroll
    for (int j = 0; j < kValueWords; j += 2) {
        u32 words[4][kVectorWords];
        load_values(words, values, first_token, j, lane);
#pragma unroll
        for (int w = 0; w < kVectorWords; ++w)
#pragma unroll
            for (int k = 0; k < 2; ++k) {  // low and high halves of the words
                const u32 select = k ? 0x7632 : 0x5410;
                u32 a[Page::kPairs], b[Page::kPairs];
                ptxlab::subnormals<BITS>(a, __byte_perm(words[0][w], words[1][w], select) ^ Page::kSignBits);
                ptxlab::subnormals<BITS>(b, __byte_perm(words[2][w], words[3][w], select) ^ Page::kSignBits);
#pragma unroll
                for (int r = 0; r < Page::kPairs; r += 2)
#pragma unroll
                    for (int n = 0; n < kQueryTiles; ++n)
                        ptxlab::mma_f16(o[(j + w) * Page::kPairs + r + k][n], a[r], a[r + 1], b[r], b[r + 1], p[n][0],
                                        p[n][1]);
            }
    }
}

// Softmax of a segment: a warp's sums, of its lane's columns. The accumulators come first: the order of the members
// decides how registers are allocated, and behind others the accumulators are cleared twice.
struct Softmax {
    float zeros[kQueryTiles][4] = {}, o[kDimTiles][kQueryTiles][4] = {};
    // Score that weights are relative to, at first kLowestScore; sum of the lane's weights.
    float largest[kQueryTiles][2], weights[kQueryTiles][2] = {};
    int end[kQueryTiles][2];  // the first token that a column does not see

    __device__ __forceinline__ Softmax(const Columns& columns, int length, Lane lane) {
#pragma unroll
        for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                end[n][b] = length - columns.arguments.T + 1 + columns.token(n * 8 + 2 * lane.t + b);
                largest[n][b] = ptxlab::kLowestScore;
            }
    }

    // Set scores of tokens that a column does not see to -infinity.
    __device__ __forceinline__ void mask(Scores& s, int position, int window, Lane lane) const {
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
            for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int token = position + i * 16 + e / 2 * 8 + lane.g, limit = end[n][e % 2];
                    if (token >= limit || (window > 0 && token < limit - window)) s[i][n][e] = -ptxlab::infinity();
                }
    }

    // Raise the columns' largest scores to those of a slice, and scale the sums down to them.
    __device__ __forceinline__ void raise(const Scores& s) {
        bool raised = false;
        float rescale[kQueryTiles][2];
#pragma unroll
        for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                float peak = ptxlab::kLowestScore;
#pragma unroll
                for (int i = 0; i < kTokenTiles; ++i) peak = fmaxf(peak, fmaxf(s[i][n][b], s[i][n][b + 2]));
#pragma unroll
                for (int lane_distance = 4; lane_distance < 32; lane_distance *= 2)
                    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, lane_distance));
                raised |= peak > largest[n][b];
                rescale[n][b] = ptxlab::exp2_approx(largest[n][b] - fmaxf(largest[n][b], peak));
                largest[n][b] = fmaxf(largest[n][b], peak);
            }
        if (!__any_sync(~0u, raised)) return;
#pragma unroll
        for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                weights[n][b] *= rescale[n][b], zeros[n][b] *= rescale[n][b];
#pragma unroll
                for (int d = 0; d < kDimTiles; ++d) o[d][n][b] *= rescale[n][b], o[d][n][b + 2] *= rescale[n][b];
            }
    }

    // Compute the weights of eight tokens as operand B, and add them to the sums.
    __device__ __forceinline__ void weigh(u32 (&p)[kQueryTiles][2], const Scores& s, const TokenConstants& constants,
                                          int i, int h) {
        const float inverse = constants.value_inverse[i][h];
#pragma unroll
        for (int n = 0; n < kQueryTiles; ++n) {
            const float p0 = ptxlab::exp2_approx(s[i][n][h * 2] - largest[n][0]),
                        p1 = ptxlab::exp2_approx(s[i][n][h * 2 + 1] - largest[n][1]);
            weights[n][0] += p0 * inverse, weights[n][1] += p1 * inverse;
            p[n][h] = ptxlab::transpose_8x8(ptxlab::half_pair(p0, p1));
        }
    }

    // Add a slice's values: of each 16 tokens the weights, times zero points, times rows.
    __device__ __forceinline__ void add_values(const Scores& s, const Stage& stage, const TokenConstants& constants,
                                               int tokens, Lane lane) {
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i) {
            u32 p[kQueryTiles][2], zero[2] = {kOnes, kOnes};  // operand B; by channel the plain sum of weights
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                weigh(p, s, constants, i, h);
                if (!CHANNEL) zero[h] = value_zeros(stage, i * 16 + h * 8, tokens, lane);
            }
#pragma unroll
            for (int n = 0; n < kQueryTiles; ++n)
                ptxlab::mma_f16(zeros[n], zero[0], zero[0], zero[1], zero[1], p[n][0], p[n][1]);
            multiply_values(o, stage.values, p, i * 16, lane);
        }
    }

    // Write the warp's sums to shared memory: tile kPairs w + r + k has dims 4 .. of the lane's word w: 2 k + (0, 1) +
    // 4 (r > 0), of row g and g + 8.
    __device__ __forceinline__ void store(const WarpSums& warp_sums, int columns, int warp, Lane lane) {
#pragma unroll
        for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
            for (int b = 0; b < 2; ++b) {
#pragma unroll
                for (int lane_distance = 4; lane_distance < 32; lane_distance *= 2)
                    weights[n][b] += __shfl_xor_sync(~0u, weights[n][b], lane_distance);
                const int column = n * 8 + 2 * lane.t + b;
                if (column >= columns) continue;
                if (lane.g == 0)
                    *warp_sums.stat(warp, column) =
                        make_float4(largest[n][b], CHANNEL ? zeros[n][b] : weights[n][b], zeros[n][b], 0);
                float* row = warp_sums.row(warp, column);
#pragma unroll
                for (int d = 0; d < kDimTiles; ++d) {
                    const int w = d / Page::kPairs, r = d % Page::kPairs / 2 * 2, k = d % 2;
                    const int word = kVectorWords == 1 ? lane.g : w / 2 * 16 + 2 * lane.g + w % 2;
                    const float correction = 0x1p24f / count_of(r);  // integers were subnormals
                    *reinterpret_cast<float2*>(row + word * Page::kPerWord + 2 * r + 2 * k) =
                        make_float2(o[d][n][b] * correction, o[d][n][b + 2] * correction);
                }
            }
    }
};

// Combine the warps' sums of a column, by one warp: into the result, or into a part in the workspace where the unit is
// in several blocks.
__device__ __forceinline__ void combine(const WarpSums& warp_sums, const Segments& segment, const Columns& columns,
                                        int column) {
    const Arguments& arguments = columns.arguments;
    const int lane = threadIdx.x % 32;
    const float4 stat = lane < WARPS ? *warp_sums.stat(lane, column) : make_float4(ptxlab::kLowestScore, 0, 0, 0);
    Row row = {};
    float zero_sum;
    const float factor = row.combine_stats<32>(stat, zero_sum);
    row.add_warps<WARPS>(warp_sums.row(0, column), warp_sums.columns * kPitch, factor, ~0u, 0);
    Page::restore(row, zero_sum, 1, arguments.v_scale + columns.head * HEAD_DIM,
                  arguments.v_zero + columns.head * HEAD_DIM);
    if (segment.tile_count() == segment.tiles) {
        row.store<BF16>(arguments.out, arguments.lse, columns.row(column));
        return;
    }
    const bool begins_here = segment.first_tile() == 0;
    const int block = segment.first_block(), blocks = segment.block_count();
    row.write(arguments.partial, arguments.stats, (size_t(blockIdx.x) * 2 + begins_here) * arguments.columns + column);
    if (FUSED) {
        int* const counter = arguments.segments + block * arguments.columns + column;
        if (!ptxlab::last_of(counter, blocks)) return;
        if (lane == 0) *counter = 0;  // for the next launch
        Row::merge(arguments.partial, arguments.stats, block, blocks, arguments.columns, column)
            .store<BF16>(arguments.out, arguments.lse, columns.row(column));
    } else if (begins_here && column == 0 && lane == 0) {
        reinterpret_cast<int2*>(arguments.segments)[blockIdx.x] =
            make_int2(segment.sequence * (arguments.Hkv * arguments.splits) + segment.unit_index, blocks);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) attention_kv4_mma_sm80(
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
    // s32 FUSED: [gridDim.x, columns], zeros before and after; else [gridDim.x, 2]: the unit that begins in
    // part 1, and the blocks that have of it
    int* segments, float softmax_scale, int B, int T, int Hq, int Hkv, int P, int window) {
    extern __shared__ __align__(128) unsigned char memory[];  // rings, sums
    const int warp = threadIdx.x / 32, index = threadIdx.x % 32;
    const Lane lane = {index / 4, index % 4};
    TIMELINE_THREAD(index == 0);
    const Arguments arguments = {q,      pool, table, lengths, k_scale, k_zero,   v_scale,
                                 v_zero, out,  lse,   partial, stats,   segments, softmax_scale,
                                 B,      T,    Hq,    Hkv,     P,       window};
    const Ring ring = {memory + warp * (STAGES * int(sizeof(Stage)))};
    const WarpSums warp_sums(memory + WARPS * STAGES * sizeof(Stage), arguments.columns);
    PHASE(LOAD);
    Scheduler scheduler(Segments(lengths, Segments::first_length_of(lengths, B), B, Hkv * arguments.splits, T, window));
    PageProducer producer(scheduler, arguments);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) producer.fetch(ring.stage(s).keys);
    if (!FUSED && threadIdx.x == 0) reinterpret_cast<int2*>(segments)[blockIdx.x] = make_int2(0, 0);
    int slot = 0;
    for (; scheduler.segment.has_segment(); scheduler.next_segment()) {
        PHASE(SETUP);
        const Columns columns(scheduler.segment, arguments);
        const Query query(columns, lane);
        Softmax softmax(columns, scheduler.segment.length, lane);
        for (; scheduler.slice < scheduler.slices; scheduler.slice += WARPS) {
            const int position = scheduler.position(), length = scheduler.segment.length;
            const bool masked = position + TOKENS > length - T + 1 || (window > 0 && position < length - window);
            PHASE(WAIT_COPY);
            ptxlab::cp_async_wait<STAGES - 2>();
            __syncwarp();  // the slice is there for all lanes, and all are done with the one before
            PHASE(LOAD);
            producer.fetch(ring.stage((slot + STAGES - 1) % STAGES).keys);
            const Stage& stage = ring.stage(slot);
            slot = slot + 1 == STAGES ? 0 : slot + 1;
            PHASE(SCORES);
            const TokenConstants constants(stage, length - position, lane);
            Scores s;
            multiply_keys(s, stage.keys, query, constants, lane);
            PHASE(SOFTMAX);
            scale_scores(s, query, constants);
            if (masked) softmax.mask(s, position, window, lane);
            softmax.raise(s);
            PHASE(VALUES);
            softmax.add_values(s, stage, constants, length - position, lane);
        }
        PHASE(REDUCE);
        softmax.store(warp_sums, columns.count, warp, lane);
        __syncthreads();
#pragma unroll 1
        for (int column = warp; column < columns.count; column += WARPS)
            combine(warp_sums, scheduler.segment, columns, column);
        __syncthreads();  // the sums are free again
    }
    ptxlab::store_empty_sequences(out, lse, lengths, B, T * Hq, HEAD_DIM, threadIdx.x, kThreads);
}
