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
#include "kv_page.cuh"
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
#define TOKENS 32  // of a slice
#define SUM_PAD 4  // floats between rows of sums in shared memory
#define FUSED 0    // 1: the last block that has part of a unit puts it together, and no attention_merge is needed
#endif

#ifndef ROTATED
#define ROTATED 0  // 1: keys are rotated by a Hadamard matrix, so queries are too
#endif

namespace {

using ptxlab::u32;
using Page = ptxlab::KvPage<D, PAGE, BITS, CHANNEL>;
using Row = ptxlab::Row<D>;
using Segments = ptxlab::Segments<2, 4>;  // a unit costs its tiles, but two at least

constexpr int kThreads = 32 * WARPS, kTileSlices = ptxlab::TILE / TOKENS;
constexpr int kPages = TOKENS > PAGE ? TOKENS / PAGE : 1, kRows = TOKENS * Page::kRowBytes;  // of a slice; bytes
constexpr int kKeyWords = Page::kRowBytes / 16, kValueWords = Page::kRowBytes / 32;          // of a row, per lane
constexpr int kVectorWords = kValueWords == 1 ? 1 : 2;                                       // of one load of values
constexpr int kTokenTiles = TOKENS / 16, kQueryTiles = COLUMNS / 8, kDimTiles = D / 16;      // of MMAs
constexpr int kPitch = D + SUM_PAD;                                                          // floats of a row of sums
constexpr u32 kOnes = 0x3c003c00;                                                            // two zero points of 1
static_assert((COLUMNS == 8 || COLUMNS == 16) && TOKENS == 32 && SUM_PAD % 4 == 0);

// Where byte `at` of a stage's keys or values lies.
__device__ __forceinline__ int swizzled(int at) { return at ^ ((at >> 7 & 3 ^ at >> 9 & 1) << 5); }

// Dim of half b of pair r of a word of keys, and what the pair counts.
__device__ __forceinline__ constexpr int dim_of(int r, int b) { return r / 2 * 4 + r % 2 + 2 * b; }
__device__ __forceinline__ constexpr float count_of(int r) { return r < 2 ? 1 : 16; }

struct Arguments {
    const unsigned short* __restrict__ q;
    const unsigned char* __restrict__ pool;
    const int* __restrict__ table, * __restrict__ lengths;
    const float* __restrict__ k_scale, * __restrict__ k_zero, * __restrict__ v_scale, * __restrict__ v_zero;
    unsigned short* __restrict__ out;
    float* __restrict__ lse;
    float* partial;
    float2* stats;
    int* segments;
    float softmax_scale;
    int B, T, Hq, Hkv, P, window;

    // Heads that share a KV head; units that these make; columns of a unit at most.
    int group = Hq / Hkv, splits = (group * T + COLUMNS - 1) / COLUMNS, columns = min(COLUMNS, group* T);
};

// A stage of a warp's ring, in bytes from its beginning: keys and values, swizzled, then (scale, zero) of both unless
// these are per channel.
struct Stage {
    static constexpr int kValues = kRows, kConstants = 2 * kRows, kBytes = kConstants + (CHANNEL ? 0 : 2 * TOKENS * 4);
};

// The block's shared memory: the warps' rings; behind them their sums of a segment.
struct SharedMemory {
    static constexpr int kRingBytes = STAGES * Stage::kBytes;
    unsigned char* ring;  // of this warp
    float* sums;          // [WARPS][columns][kPitch]
    float4* stats;        // [WARPS][columns]: largest score, sum of weights, sum of weights times zero points
    int columns;

    __device__ __forceinline__ SharedMemory(unsigned char* memory, int columns)
        : ring(memory + threadIdx.x / 32 * kRingBytes), sums(reinterpret_cast<float*>(memory + WARPS * kRingBytes)),
          stats(reinterpret_cast<float4*>(sums + WARPS * columns * kPitch)), columns(columns) {}

    __device__ __forceinline__ unsigned char* stage(int slot) const { return ring + slot * Stage::kBytes; }
    __device__ __forceinline__ float* row(int warp, int column) const {
        return sums + (warp * columns + column) * kPitch;
    }
    __device__ __forceinline__ float4& stat(int warp, int column) const { return stats[warp * columns + column]; }
};

// Deals the slices of the block's segments to its warps as if they were of one: as a warp multiplies them, and, as many
// slices ahead as it has stages, as it asks for them.
struct Scheduler {
    Segments segment;
    int slice, slices;  // of this segment: the warp's next one, and all

    __device__ __forceinline__ explicit Scheduler(const Segments& segment) : segment(segment), slice(threadIdx.x / 32) {
        count();
    }
    __device__ __forceinline__ void count() {
        // One expression: where the subtraction stands before the condition, ptxas keeps 60 registers fewer and works out
        // addresses in the main loop.
        slices = !segment.has_segment()
                     ? 0
                     : min(segment.tile_count() * kTileSlices,
                           (segment.length - (segment.window_tile + segment.first_tile()) * ptxlab::TILE + TOKENS - 1) /
                               TOKENS);
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

// Asks for a warp's slices. The entry of the block table is loaded one slice before it is needed.
struct PageProducer {
    const Arguments& arguments;
    Scheduler scheduler;
    const unsigned char* head_pages;
    size_t pitch;  // of the keys, or of the values, of all heads of a page
    int entry = 0;

    __device__ __forceinline__ PageProducer(const Scheduler& scheduler, const Arguments& arguments)
        : arguments(arguments), scheduler(scheduler), pitch(size_t(arguments.Hkv) * Page::kBytes) {
        enter();
        look_up();
    }

    __device__ __forceinline__ void enter() {
        head_pages = arguments.pool + size_t(scheduler.segment.unit_index / arguments.splits) * Page::kBytes;
    }

    __device__ __forceinline__ void look_up() {
        while (scheduler.segment.has_segment() && scheduler.slice >= scheduler.slices) {
            scheduler.next_segment();
            enter();
        }
        if (!scheduler.segment.has_segment()) return;
        // instead of one that there is not, the last
        const int last = (scheduler.segment.length - 1) / PAGE,
                  page = scheduler.position() / PAGE + threadIdx.x % kPages;
        entry = arguments.table[size_t(scheduler.segment.sequence) * arguments.P + min(page, last)];
    }

    // Asks for the next slice, if there is one; a group of copies in either case.
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
        for (int is_value = 0; is_value < 2; ++is_value)
#pragma unroll
            for (int i = 0; i < kRows / 512; ++i) {
                const int j = i * 512 / Page::kRowBytes / PAGE, byte = i * 512 + lane * 16;
                ptxlab::cp_async_16(
                    stage + is_value * Stage::kValues + swizzled(byte),
                    page[j] + is_value * pitch + offset * Page::kRowBytes + byte - j * PAGE * Page::kRowBytes, true);
            }
        if (!CHANNEL && lane < TOKENS / 2) {
            const int is_value = lane / (TOKENS / 4), byte = lane * 16 % (TOKENS * 4), j = byte / 4 / PAGE;
            const unsigned char* rows = (j ? page[kPages - 1] : page[0]) + is_value * pitch;
            ptxlab::cp_async_16(stage + Stage::kConstants + lane * 16,
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
    // s32 FUSED: [gridDim.x, columns], zeros before and after; else [gridDim.x, 2]: the unit that
    // begins in part 1, and the blocks that have of it
    int* segments, float softmax_scale, int B, int T, int Hq, int Hkv, int P, int window) {
    extern __shared__ __align__(128) unsigned char memory[];  // SharedMemory, WarpSums
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    TIMELINE_THREAD(lane == 0);
    PHASE(LOAD);
    const Arguments arguments = {q,      pool, table, lengths, k_scale, k_zero,   v_scale,
                                 v_zero, out,  lse,   partial, stats,   segments, softmax_scale,
                                 B,      T,    Hq,    Hkv,     P,       window};
    const int group = arguments.group, splits = arguments.splits, columns = arguments.columns;
    const SharedMemory shared(memory, columns);

    Scheduler scheduler(Segments(lengths, Segments::nearest_of(lengths, B), B, Hkv * splits, T, window));
    PageProducer producer(scheduler, arguments);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) producer.fetch(shared.stage(s));

    if (!FUSED && threadIdx.x == 0) reinterpret_cast<int2*>(segments)[blockIdx.x] = make_int2(0, 0);
    int slot = 0;
    for (; scheduler.segment.has_segment(); scheduler.next_segment()) {
        const Columns segment_columns(scheduler.segment, arguments);
        const int head = segment_columns.head, column0 = segment_columns.first_column, here = segment_columns.count;
        const auto row_of = [&](int column) { return segment_columns.row(column); };
        // Queries as operand B: of query g the dims of the words that the lane has of keys.
        PHASE(SETUP);
        u32 query[kQueryTiles][kKeyWords][Page::kPairs];
        float factor[kQueryTiles][2], column_sum[kQueryTiles][2];
#pragma unroll
        for (int n = 0; n < kQueryTiles; ++n) {
            const bool inside = n * 8 + g < here;
            const unsigned short* from = q + row_of(inside ? n * 8 + g : 0) * D;
            const auto dim = [&](int w) { return (w / 2 * 8 + 2 * t + w % 2) * Page::kPerWord; };
            u32 raw[kKeyWords][Page::kPerWord / 2];
#pragma unroll
            for (int w = 0; w < kKeyWords; ++w)
#pragma unroll
                for (int i = 0; i < Page::kPerWord / 2; i += 2) {
                    const uint2 both =
                        inside ? *reinterpret_cast<const uint2*>(from + dim(w) + 2 * i) : make_uint2(0, 0);
                    raw[w][i] = both.x, raw[w][i + 1] = both.y;
                }
            const auto loaded = [&](int w, int i) {
                const u32 bits = i % 2 ? raw[w][i / 2] >> 16 : raw[w][i / 2] & 0xffff;
                const float x = BF16 ? __uint_as_float(bits << 16) : ptxlab::low_half(bits);
                return CHANNEL ? x * k_scale[head * D + dim(w) + i] : x;
            };
            float rotated[kKeyWords][Page::kPerWord];
            if constexpr (ROTATED) {
#pragma unroll
                for (int w = 0; w < kKeyWords; ++w)
#pragma unroll
                    for (int i = 0; i < Page::kPerWord; ++i) rotated[w][i] = loaded(w, i);
                ptxlab::rotate_query<2 * Page::kPerWord, 4>(rotated, t);
            }
            const auto element = [&](int w, int i) { return ROTATED ? rotated[w][i] : loaded(w, i); };
            const auto zero = [&](int w, int i) {
                return !CHANNEL ? 1 : BITS == 8 ? 128 : k_zero[head * D + dim(w) + i];
            };
            float largest = 0, sum = 0;
#pragma unroll
            for (int w = 0; w < kKeyWords; ++w)
#pragma unroll
                for (int i = 0; i < Page::kPerWord; ++i) largest = fmaxf(largest, fabsf(element(w, i)));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            const float unit = ptxlab::leading_power(fmaxf(largest, 0x1p-100f)),
                        power = ptxlab::inverse_power(unit) * 0x1p14f;
#pragma unroll
            for (int w = 0; w < kKeyWords; ++w)
#pragma unroll
                for (int r = 0; r < Page::kPairs; ++r) {
                    const int low = dim_of(r, 0), high = dim_of(r, 1);
                    const float scaled = power / count_of(r);
                    query[n][w][r] = ptxlab::half_pair(element(w, low) * scaled, element(w, high) * scaled);
                    sum += (ptxlab::low_half(query[n][w][r]) * zero(w, low) +
                            ptxlab::high_half(query[n][w][r]) * zero(w, high)) *
                           count_of(r);
                }
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                // 2^24 / 2^14
                factor[n][b] = __shfl_sync(~0u, unit, 4 * (2 * t + b)) * (softmax_scale * ptxlab::kLog2E * 0x1p10f);
                column_sum[n][b] = __shfl_sync(~0u, sum, 4 * (2 * t + b)) * -0x1p-24f;
            }
        }

        int end[kQueryTiles][2];  // tokens from here on a query does not see
        float m[kQueryTiles][2], l[kQueryTiles][2] = {}, o[kDimTiles][kQueryTiles][4] = {}, zeros[kQueryTiles][4] = {};
#pragma unroll
        for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                end[n][b] = scheduler.segment.length - T + 1 + (column0 + n * 8 + 2 * t + b) / group;
                m[n][b] = ptxlab::kLowestScore;
            }

        for (; scheduler.slice < scheduler.slices; scheduler.slice += WARPS) {
            const int position = scheduler.position();
            const int inside = scheduler.segment.length - position;  // tokens that there are
            const bool masked = position + TOKENS > scheduler.segment.length - T + 1 ||
                                (window > 0 && position < scheduler.segment.length - window);
            PHASE(WAIT_COPY);
            ptxlab::cp_async_wait<STAGES - 2>();
            __syncwarp();  // the slice is there for all lanes, and all are done with the one before
            PHASE(LOAD);
            producer.fetch(shared.stage((slot + STAGES - 1) % STAGES));
            const unsigned char* keys = shared.stage(slot);
            const unsigned char* values = keys + Stage::kValues;
            const u32* constants = reinterpret_cast<const u32*>(keys + Stage::kConstants);
            slot = slot + 1 == STAGES ? 0 : slot + 1;

            PHASE(SCORES);
            float s[kTokenTiles][kQueryTiles][4], k_factor[kTokenTiles][2], v_log[kTokenTiles][2],
                v_inverse[kTokenTiles][2];
#pragma unroll
            for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int token = i * 16 + h * 8 + g;
                    float zero = 1;
                    k_factor[i][h] = v_inverse[i][h] = 1, v_log[i][h] = 0;
                    if (!CHANNEL) {
                        u32 k = constants[token], v = constants[TOKENS + token];
                        if (token >= inside) k = v = ptxlab::kNeutralConstants;
                        k_factor[i][h] = ptxlab::low_half(k), zero = ptxlab::high_half(k);
                        v_log[i][h] = ptxlab::log2_approx(ptxlab::low_half(v)),
                        v_inverse[i][h] = __fdividef(1, ptxlab::low_half(v));
                    }
#pragma unroll
                    for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
                        for (int b = 0; b < 2; ++b) s[i][n][h * 2 + b] = zero * column_sum[n][b];
                }
#pragma unroll
            for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
                for (int j = 0; j < kKeyWords / 2; ++j) {
                    const int at_row = (i * 16 + g) * Page::kRowBytes + j * 32 + t * 8;
                    const uint2 top = *reinterpret_cast<const uint2*>(keys + swizzled(at_row));
                    const uint2 bottom = *reinterpret_cast<const uint2*>(keys + swizzled(at_row + 8 * Page::kRowBytes));
#pragma unroll
                    for (int w = 0; w < 2; ++w) {
                        u32 a[Page::kPairs], b[Page::kPairs];
                        ptxlab::subnormals<BITS>(a, (w ? top.y : top.x) ^ Page::kSignBits);
                        ptxlab::subnormals<BITS>(b, (w ? bottom.y : bottom.x) ^ Page::kSignBits);
#pragma unroll
                        for (int r = 0; r < Page::kPairs; r += 2)
#pragma unroll
                            for (int n = 0; n < kQueryTiles; ++n)
                                ptxlab::mma_f16(s[i][n], a[r], b[r], a[r + 1], b[r + 1], query[n][2 * j + w][r],
                                                query[n][2 * j + w][r + 1]);
                    }
                }

            PHASE(SOFTMAX);
#pragma unroll
            for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
                for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        s[i][n][e] = s[i][n][e] * (k_factor[i][e / 2] * factor[n][e % 2]) + v_log[i][e / 2];
            if (masked) {
#pragma unroll
                for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
                    for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const int token = position + i * 16 + e / 2 * 8 + g, limit = end[n][e % 2];
                            if (token >= limit || (window > 0 && token < limit - window))
                                s[i][n][e] = -ptxlab::infinity();
                        }
            }
            bool larger = false;
            float less[kQueryTiles][2];
#pragma unroll
            for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    float most = ptxlab::kLowestScore;
#pragma unroll
                    for (int i = 0; i < kTokenTiles; ++i) most = fmaxf(most, fmaxf(s[i][n][b], s[i][n][b + 2]));
#pragma unroll
                    for (int mask = 4; mask < 32; mask *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
                    larger |= most > m[n][b];
                    less[n][b] = ptxlab::exp2_approx(m[n][b] - fmaxf(m[n][b], most));
                    m[n][b] = fmaxf(m[n][b], most);
                }
            if (__any_sync(~0u, larger)) {
#pragma unroll
                for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
                    for (int b = 0; b < 2; ++b) {
                        l[n][b] *= less[n][b], zeros[n][b] *= less[n][b];
#pragma unroll
                        for (int d = 0; d < kDimTiles; ++d) o[d][n][b] *= less[n][b], o[d][n][b + 2] *= less[n][b];
                    }
            }

            PHASE(VALUES);
#pragma unroll
            for (int i = 0; i < kTokenTiles; ++i) {
                u32 p[kQueryTiles][2],
                    zero[2] = {0x3c003c00u, 0x3c003c00u};  // operand B; by channel the plain sum of weights
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#pragma unroll
                    for (int n = 0; n < kQueryTiles; ++n) {
                        const float p0 = ptxlab::exp2_approx(s[i][n][h * 2] - m[n][0]),
                                    p1 = ptxlab::exp2_approx(s[i][n][h * 2 + 1] - m[n][1]);
                        l[n][0] += p0 * v_inverse[i][h], l[n][1] += p1 * v_inverse[i][h];
                        p[n][h] = ptxlab::transposed(ptxlab::half_pair(p0, p1));
                    }
                    if (!CHANNEL) {
                        const int token = i * 16 + h * 8 + 2 * t;
                        u32 first = constants[TOKENS + token], second = constants[TOKENS + token + 1];
                        if (token >= inside) first = ptxlab::kNeutralConstants;
                        if (token + 1 >= inside) second = ptxlab::kNeutralConstants;
                        zero[h] = __byte_perm(first, second, 0x7632);
                    }
                }
#pragma unroll
                for (int n = 0; n < kQueryTiles; ++n)
                    ptxlab::mma_f16(zeros[n], zero[0], zero[0], zero[1], zero[1], p[n][0], p[n][1]);
#pragma unroll
                for (int j = 0; j < kValueWords; j += 2) {
                    u32 word[4][2];  // of tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        const int row = (i * 16 + k / 2 * 8 + 2 * t + k % 2) * Page::kRowBytes;
                        if (kValueWords == 1) {
                            word[k][0] = *reinterpret_cast<const u32*>(values + swizzled(row + g * 4));
                        } else {
                            const uint2 both = *reinterpret_cast<const uint2*>(values + swizzled(row + j * 32 + g * 8));
                            word[k][0] = both.x, word[k][1] = both.y;
                        }
                    }
#pragma unroll
                    for (int w = 0; w < (kVectorWords); ++w)
#pragma unroll
                        for (int up = 0; up < 2; ++up) {  // low and high halves of the words
                            u32 a[Page::kPairs], b[Page::kPairs];
                            ptxlab::subnormals<BITS>(
                                a, (__byte_perm(word[0][w], word[1][w], up ? 0x7632 : 0x5410)) ^ Page::kSignBits);
                            ptxlab::subnormals<BITS>(
                                b, (__byte_perm(word[2][w], word[3][w], up ? 0x7632 : 0x5410)) ^ Page::kSignBits);
#pragma unroll
                            for (int r = 0; r < Page::kPairs; r += 2)
#pragma unroll
                                for (int n = 0; n < kQueryTiles; ++n)
                                    ptxlab::mma_f16(o[(j + w) * Page::kPairs + r + up][n], a[r], a[r + 1], b[r],
                                                    b[r + 1], p[n][0], p[n][1]);
                        }
                }
            }
        }

        PHASE(REDUCE);
        // The warps' sums, put together: tile Page::kPairs w + r + up has dims 4 .. of the lane's word w: 2 up + (0, 1) + 4
        // (r > 0), of row g and g + 8.
#pragma unroll
        for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
            for (int b = 0; b < 2; ++b) {
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) l[n][b] += __shfl_xor_sync(~0u, l[n][b], mask);
                const int column = n * 8 + 2 * t + b;
                if (column >= here) continue;
                if (g == 0)
                    shared.stat(warp, column) = make_float4(m[n][b], CHANNEL ? zeros[n][b] : l[n][b], zeros[n][b], 0);
                float* to = shared.row(warp, column);
#pragma unroll
                for (int d = 0; d < kDimTiles; ++d) {
                    const int w = d / Page::kPairs, r = d % Page::kPairs / 2 * 2, up = d % 2;
                    const int word = kValueWords == 1 ? g : w / 2 * 16 + 2 * g + w % 2;
                    const float back = 0x1p24f / count_of(r);
                    *reinterpret_cast<float2*>(to + word * Page::kPerWord + 2 * r + 2 * up) =
                        make_float2(o[d][n][b] * back, o[d][n][b + 2] * back);
                }
            }
        __syncthreads();
#pragma unroll 1
        for (int c = warp; c < here; c += WARPS) {
            const float4 of = lane < WARPS ? shared.stat(lane, c) : make_float4(ptxlab::kLowestScore, 0, 0, 0);
            Row row = {};
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
                        const float4 v = *reinterpret_cast<const float4*>(shared.row(w, c) + row.dim(i));
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
            if (scheduler.segment.tile_count() == scheduler.segment.tiles) {
                row.store<BF16>(out, lse, row_of(c));
                continue;
            }
            const int block = scheduler.segment.first_block(), blocks = scheduler.segment.blocks();
            row.write(partial, stats, (size_t(blockIdx.x) * 2 + (scheduler.segment.first_tile() == 0)) * columns + c);
            if (!FUSED) {
                if (scheduler.segment.first_tile() == 0 && c == 0 && lane == 0)
                    reinterpret_cast<int2*>(segments)[blockIdx.x] =
                        make_int2(scheduler.segment.sequence * (Hkv * splits) + scheduler.segment.unit_index, blocks);
                continue;
            }
            if (!ptxlab::last_of(segments + block * columns + c, blocks)) continue;
            if (lane == 0) segments[block * columns + c] = 0;  // for the next launch
            Row::merged(partial, stats, block, blocks, columns, c).store<BF16>(out, lse, row_of(c));
        }
        __syncthreads();  // the sums are free again
    }
    for (int b = blockIdx.x; b < B; b += gridDim.x)  // nobody's: sequences of no tokens
        if (lengths[b] == 0) {
            for (size_t i = threadIdx.x; i < size_t(T) * Hq * D / 2; i += kThreads)
                reinterpret_cast<u32*>(out)[size_t(b) * T * Hq * D / 2 + i] = 0;
            for (int i = threadIdx.x; lse && i < T * Hq; i += kThreads)
                lse[size_t(b) * T * Hq + i] = -ptxlab::infinity();
        }
}
