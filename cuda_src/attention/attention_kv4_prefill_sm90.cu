// attention_kv4_prefill_sm90: causal attention of any number of queries over a paged cache of 4 bits (QServe section
// 5.3): prompts in chunks, prompts behind a cached prefix.
//
// PRODUCERS warp groups copy pages and restore keys and values to f16 in shared memory, once for 128 rows. Two other warp
// groups multiply on the tensor cores, 64 rows each, and take turns at issuing products. A row is a query of one head. The
// heads that share a KV head lie together, so a tile of 128 rows is 128 / (Hq / Hkv) tokens. Each block of the launch takes
// work items until none is left: tiles, or where these are few, parts of a tile's keys. The last part to end adds up all
// parts of its tile. Of a sequence the last tiles, which see most keys, come first.
//
// Contract   sequence b has queries starts[b] .. starts[b + 1], its last tokens; out[i, h] = sum_j p[j] v[j], p = softmax
//            of softmax_scale * q[i, h] . k[j] over the keys that token sees: j up to lengths[b] - starts[b + 1] + i, of
//            these the last `window` if that is not 0. lse: natural logarithm of the sum of exponentials. Nothing seen:
//            zeros, and lse -infinity. Head h reads kv head h / (Hq / Hkv). A key is f16((q4 - zero) * scale), a value
//            likewise; weights are rounded to f16; a query to f16 relative to a power of two of its largest element.
//            OWN: keys and values of the queries' own tokens come from own_k and own_v, rounded to f16, the others from
//            the cache.
// PDL        everything waits for the kernel before.
// Guide      notebooks/guide/kernels_attention.md: rows, restoring, scores, softmax
// PTX ISA    9.7.15.5 wgmma, 9.7.9.25 bulk copies, 9.7.13.15 mbarrier, 9.7.19.5 setmaxnreg, 9.7.3 ex2, lg2
#include "dequant.cuh"
#include "exponent.cuh"
#include "griddep.cuh"
#include "mbarrier.cuh"
#include "named_barrier.cuh"
#include "output.cuh"
#include "pack.cuh"
#include "parts.cuh"
#include "timeline.cuh"
#include "wgmma_f16.cuh"

#ifndef D
#define D 128          // of a head: 64, 128, 256
#define PAGE 64        // tokens of a page: 16, 32, 64
#define BF16 0         // queries and results: 0 f16, 1 bf16
#define KEYS 128       // of a block: 64, 128
#define STAGES 2       // blocks of keys, and as many of values, that are restored
#define PAGE_STAGES 3  // blocks that are copied
#define PRODUCERS 2    // warp groups that restore: one of keys and values, or one of each
#define HEADROOM 8     // a score exceeds what its row's weights are relative to by at most this, as a power of two
#define PART_BLOCKS 4  // blocks of keys that a part of a tile has at least
#define OWN 0          // 1: keys and values of the queries' own tokens are given in 16 bits
#endif

namespace {

using ptxlab::u32;
using ptxlab::u64;

constexpr int kGroupRows = 64, kGroups = 2, kRows = kGroups * kGroupRows;        // rows of a consumer group, of a tile
constexpr int kThreads = 128, kBlockThreads = (PRODUCERS + kGroups) * kThreads;  // of a warp group
constexpr int kTokenBytes = D / 2, kPageBytes = PAGE * (kTokenBytes + 4), kPages = KEYS / PAGE;
constexpr int kCopyBytes = kPages * kPageBytes;  // of a block's keys, or values
constexpr int kBlockBytes = KEYS * D * 2, kColumnBytes = KEYS * 128;
constexpr int kQueryBytes = kGroupRows * D * 2, kQueryColumnBytes = kGroupRows * 128;
constexpr int kProducerRegisters = PRODUCERS == 1 ? 64 : 56, kConsumerRegisters = PRODUCERS == 1 ? 224 : 200;
constexpr int kChunks = KEYS * kTokenBytes / 16 / kThreads;  // of 16 bytes of a block that a producer restores
constexpr float kLowest = -1e30f, kLog2E = 1.44269504f;      // kLowest: below any score, yet finite
constexpr float kHeadroom = HEADROOM;                        // weights are at most 2 to this
constexpr int kVectors = D / 8 + 1;  // of 16 bytes that a lane hands over: its sums, and what they are relative to
static_assert(KEYS % PAGE == 0 && (KEYS == 64 || KEYS == 128) && D % 64 == 0);

// Of keys or of values: pages that are copied, blocks that are restored.
struct Barriers {
    u64 copied[PAGE_STAGES], taken[PAGE_STAGES];
    u64 full[STAGES], empty[STAGES];

    __device__ __forceinline__ void init() {
        for (int i = 0; i < PAGE_STAGES; ++i)
            ptxlab::mbarrier_init(&copied[i], 1), ptxlab::mbarrier_init(&taken[i], kThreads);
        for (int i = 0; i < STAGES; ++i)
            ptxlab::mbarrier_init(&full[i], kThreads), ptxlab::mbarrier_init(&empty[i], kGroups * 4);
    }
};

// 128 rows of one sequence and one KV head, and the blocks of keys that some of them see.
struct Tile {
    int sequence, head, row, queries;  // row: the first one's number among queries * (Hq / Hkv)
    int start, context;                // the sequence's first query in q; its tokens
    int begin, end;                    // blocks
    int item, part, parts;             // the work item; which part of the tile it is, and of how many

    __device__ __forceinline__ int first_own() const { return context - queries; }  // token

    // Blocks of the cache come first. With OWN, blocks of own tokens begin at the first of these.
    __device__ __forceinline__ int cached_blocks() const {
        return OWN ? (max(0, first_own()) + KEYS - 1) / KEYS : 0x7fffffff;
    }
    __device__ __forceinline__ bool is_own(int block) const { return OWN && block >= cached_blocks(); }
    __device__ __forceinline__ int block_of(int token) const {
        return OWN && token >= first_own() ? cached_blocks() + (token - first_own()) / KEYS : token / KEYS;
    }
    __device__ __forceinline__ int first_token(int block) const {
        return is_own(block) ? first_own() + (block - cached_blocks()) * KEYS : block * KEYS;
    }
    __device__ __forceinline__ int end_token(int block) const {  // the first one that blocks of its kind do not have
        return OWN && !is_own(block) ? first_own() : context;
    }
};

// Deals work items to blocks, in every other round in reverse, so that none has the longest of each. All lanes of a warp
// ask together. A tile has `parts` items; where it has few blocks of keys, only the first of them have any.
struct Scheduler {
    const int *starts, *lengths;
    int sequences, heads, group, window, parts;
    int round = 0, base = 0, passed = 0;  // rounds dealt; the first of 32 sequences; items of those ahead of it

    __device__ __forceinline__ bool next(Tile& tile) {
        do {
            tile.item = round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
            ++round;
            if (!find_tile(tile)) return false;
            find_blocks(tile);
        } while (!take_part(tile));
        return true;
    }

    // Finds the sequence of an item, and its tile there.
    __device__ __forceinline__ bool find_tile(Tile& tile) {
        const int lane = threadIdx.x % 32;
        for (;; base += 32) {
            const int sequence = base + lane;
            const int queries = sequence < sequences ? starts[sequence + 1] - starts[sequence] : 0;
            const int of_lane = (queries * group + kRows - 1) / kRows * heads * parts;
            int through_lane = of_lane;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int lower = __shfl_up_sync(~0u, through_lane, step);
                if (lane >= step) through_lane += lower;
            }
            const u32 holders = __ballot_sync(~0u, tile.item - passed < through_lane);
            if (holders) {
                const int holder = __ffs(holders) - 1;
                const int local = tile.item - passed - __shfl_sync(~0u, through_lane - of_lane, holder);
                const int tiles = __shfl_sync(~0u, of_lane, holder) / (heads * parts);
                tile.part = local % parts, tile.sequence = base + holder, tile.head = local / parts % heads;
                tile.row = (tiles - 1 - local / parts / heads) * kRows;
                tile.queries = __shfl_sync(~0u, queries, holder);
                tile.start = starts[tile.sequence], tile.context = lengths[tile.sequence];
                return true;
            }
            if (base + 32 >= sequences) return false;
            passed += __shfl_sync(~0u, through_lane, 31);
        }
    }

    __device__ __forceinline__ void find_blocks(Tile& tile) const {
        const int first_token = tile.first_own() + tile.row / group;
        const int last_token = tile.first_own() + min(tile.queries - 1, (tile.row + kRows - 1) / group);
        tile.begin = window > 0 ? tile.block_of(max(0, first_token - window + 1)) : 0;
        tile.end = last_token < 0 ? tile.begin : max(tile.begin, tile.block_of(last_token) + 1);
    }

    // Cuts a tile's blocks into even parts, of PART_BLOCKS or more; false if this part has none.
    __device__ __forceinline__ bool take_part(Tile& tile) const {
        const int blocks = tile.end - tile.begin;
        tile.parts = max(1, min(parts, blocks / PART_BLOCKS));
        tile.end = tile.begin + blocks * (tile.part + 1) / tile.parts;
        tile.begin += blocks * tile.part / tile.parts;
        return tile.part < tile.parts;
    }
};

// Restores a block's keys or values: f16 [KEYS][D] in columns of 64 elements under the 128-byte swizzle. The eight
// elements of a word stay in the order in which they come out, (0, 2, 1, 3, 4, 6, 5, 7): queries have the same, and
// results are put in order when they are stored.
__device__ __forceinline__ void restore(unsigned char* block, const unsigned char* pages, int tokens) {
    constexpr int kPerToken = kTokenBytes / 16;
    const int token = threadIdx.x % KEYS,
              share = threadIdx.x % kThreads / KEYS;  // of 64 keys two threads have one each half
    const unsigned char* page = pages + token / PAGE * kPageBytes;
    u32 pair = *reinterpret_cast<const u32*>(page + PAGE * kTokenBytes + token % PAGE * 4);
    if (token >= tokens) pair = 0;  // beyond the end there may be anything, and a weight of 0 times NaN is NaN
    const __half2 scale = __half2half2(__ushort_as_half(pair & 0xffff));
    const uint2 bias = ptxlab::bias_u4_f16(__ushort_as_half(pair >> 16));
    const unsigned char* row = page + token % PAGE * kTokenBytes;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
        const int chunk = share * kChunks + (i + token / 2) % kChunks;  // lanes of a row of banks take turns
        static_assert(kChunks * (kThreads / KEYS) == kPerToken);
        const uint4 words = *reinterpret_cast<const uint4*>(row + chunk * 16);
        const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            uint4 h = ptxlab::dequant_u4_f16_minus(word[w], bias);
            h.x = ptxlab::as_bits(__hmul2(ptxlab::as_half2(h.x), scale));
            h.y = ptxlab::as_bits(__hmul2(ptxlab::as_half2(h.y), scale));
            h.z = ptxlab::as_bits(__hmul2(ptxlab::as_half2(h.z), scale));
            h.w = ptxlab::as_bits(__hmul2(ptxlab::as_half2(h.w), scale));
            const int vector = chunk * 4 + w;  // of 16 bytes
            *reinterpret_cast<uint4*>(block + vector / 8 * kColumnBytes + token * 128 + (vector % 8 ^ token % 8) * 16) =
                h;
        }
    }
}

__device__ __forceinline__ float element(u32 word, int half) {
    const u32 bits = half ? word >> 16 : word & 0xffff;
    return BF16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(bits));
}

// Elements (0, 2) and (1, 3) of the four in two words, as f16.
__device__ __forceinline__ uint2 half_pairs(u32 low, u32 high) {
    if constexpr (!BF16) return make_uint2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
    return make_uint2(ptxlab::rounded_pair<0>(element(low, 0), element(high, 0)),
                      ptxlab::rounded_pair<0>(element(low, 1), element(high, 1)));
}

// The sequences' own keys or values: 16 bits [tokens, heads, D], tokens `pitch` elements apart.
struct OwnTokens {
    static constexpr int kPerToken = D / 8, kBatch = 4;  // vectors of 8 elements; those that a thread loads at a time
    static constexpr int kTokens = kThreads / kPerToken, kBatches = KEYS / kTokens / kBatch;
    static_assert(KEYS % (kTokens * kBatch) == 0);
    const unsigned short* tokens;
    int pitch;

    __device__ __forceinline__ void load(uint4 (&x)[kBatch], const Tile& tile, int first_token, int batch) const {
        const int last = tile.context - first_token - 1;  // of the sequence; what is behind has a weight of 0
        const unsigned short* first = tokens + size_t(tile.start + first_token - tile.first_own()) * pitch +
                                      tile.head * D + threadIdx.x % kPerToken * 8;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int token = (batch * kBatch + i) * kTokens + threadIdx.x % kThreads / kPerToken;
            x[i] = *reinterpret_cast<const uint4*>(first + size_t(min(token, last)) * pitch);
        }
    }

    // As `restore` stores them.
    __device__ __forceinline__ static void store(unsigned char* block, const uint4 (&x)[kBatch], int batch) {
        const int vector = threadIdx.x % kPerToken;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int token = (batch * kBatch + i) * kTokens + threadIdx.x % kThreads / kPerToken;
            const uint2 low = half_pairs(x[i].x, x[i].y), high = half_pairs(x[i].z, x[i].w);
            *reinterpret_cast<uint4*>(block + vector / 8 * kColumnBytes + token * 128 + (vector % 8 ^ token % 8) * 16) =
                make_uint4(low.x, low.y, high.x, high.y);
        }
    }
};

// Where a cache's pages lie.
struct Pages {
    const unsigned char* pool;
    const int* table;
    int heads, P;

    // Looks up a block's pages; what it lacks is the last page again.
    __device__ __forceinline__ void find(int (&numbers)[kPages], const Tile& tile, int block) const {
        const int last = (tile.context - 1) / PAGE;
#pragma unroll
        for (int i = 0; i < kPages; ++i) numbers[i] = table[size_t(tile.sequence) * P + min(block * kPages + i, last)];
    }

    // Keys (operand 0) or values (1) of a head.
    __device__ __forceinline__ void copy(unsigned char* stage, u64* copied, const int (&numbers)[kPages], int head,
                                         int operand) const {
        ptxlab::mbarrier_arrive_expect(copied, kCopyBytes);
        const size_t pitch = size_t(heads) * (2 * kPageBytes);
        const unsigned char* of_head = pool + size_t(operand * heads + head) * kPageBytes;
#pragma unroll
        for (int i = 0; i < kPages; ++i)
            ptxlab::bulk_load(stage + i * kPageBytes, of_head + numbers[i] * pitch, kPageBytes, copied);
    }
};

// Restores keys (operand 0), values (1), or both, block by block, from pages that are copied ahead; their numbers are
// looked up before that. Those of own tokens come straight from global memory. The first operand is a constant, so that
// addresses are.
template <int OPERAND>
struct Producer {
    static constexpr int kEnd = PRODUCERS == 1 ? 2 : OPERAND + 1;
    Scheduler scheduler;  // of what is copied next
    Pages pages;
    OwnTokens own_keys, own_values;
    unsigned char *ring, *blocks;
    Barriers* barriers;
    Tile tile;
    int block = 0, in_flight = 0, page_numbers[kPages];
    bool has_tile;
    ptxlab::Slot<PAGE_STAGES> asked, taken;
    ptxlab::Slot<STAGES> slot;

    __device__ __forceinline__ void begin() {
        has_tile = scheduler.next(tile);
        block = has_tile ? tile.begin : 0;
        look_ahead();
    }

    __device__ __forceinline__ void look_ahead() {
        while (has_tile && block >= min(tile.end, tile.cached_blocks())) {
            has_tile = scheduler.next(tile);
            block = has_tile ? tile.begin : 0;
        }
        if (has_tile) pages.find(page_numbers, tile, block);
    }

    __device__ __forceinline__ void copy_ahead() {
        for (; has_tile && in_flight < PAGE_STAGES; ++in_flight) {
#pragma unroll
            for (int x = OPERAND; x < kEnd; ++x) {
                ptxlab::mbarrier_wait(&barriers[x].taken[asked.index], asked.parity ^ 1);  // empty in the first round
                if (threadIdx.x % kThreads == 0)
                    pages.copy(ring + (x * PAGE_STAGES + asked.index) * kCopyBytes, &barriers[x].copied[asked.index],
                               page_numbers, tile.head, x);
            }
            asked.advance(), ++block;
            look_ahead();
        }
    }

    __device__ __forceinline__ void produce(const Tile& of, int of_block TIMELINE_PARAMETER) {
        const bool is_own = of.is_own(of_block);
        PHASE(LOAD);
        copy_ahead();
#pragma unroll
        for (int x = OPERAND; x < kEnd; ++x) {
            unsigned char* to = blocks + (x * STAGES + slot.index) * kBlockBytes;
            if (is_own) convert_own(x, to, of, of.first_token(of_block) TIMELINE_ARGUMENT);
            else restore_pages(x, to, of.end_token(of_block) - of_block * KEYS TIMELINE_ARGUMENT);
            ptxlab::fence_proxy_async();
            ptxlab::mbarrier_arrive(&barriers[x].full[slot.index]);
        }
        if (!is_own) taken.advance(), --in_flight;
        slot.advance();
    }

    // A block of the cache, of whose tokens so many are there.
    __device__ __forceinline__ void restore_pages(int x, unsigned char* to, int tokens TIMELINE_PARAMETER) {
        PHASE(WAIT_COPY);
        ptxlab::mbarrier_wait(&barriers[x].copied[taken.index], taken.parity);
        PHASE(WAIT_GROUP);
        ptxlab::mbarrier_wait(&barriers[x].empty[slot.index], slot.parity ^ 1);
        PHASE(DEQUANTISE);
        restore(to, ring + (x * PAGE_STAGES + taken.index) * kCopyBytes, tokens);
        ptxlab::mbarrier_arrive(&barriers[x].taken[taken.index]);
    }

    __device__ __forceinline__ void convert_own(int x, unsigned char* to, const Tile& of,
                                                int first_token TIMELINE_PARAMETER) {
        uint4 vectors[OwnTokens::kBatch];
        const OwnTokens own = x == 0 ? own_keys : own_values;
        own.load(vectors, of, first_token, 0);
        PHASE(WAIT_GROUP);
        ptxlab::mbarrier_wait(&barriers[x].empty[slot.index], slot.parity ^ 1);
        PHASE(DEQUANTISE);
#pragma unroll
        for (int batch = 0; batch < OwnTokens::kBatches; ++batch) {
            if (batch > 0) own.load(vectors, of, first_token, batch);
            OwnTokens::store(to, vectors, batch);
        }
    }
};

// Half a row of queries, of a tile's 64 rows from `first_row` on: two threads have one.
struct Query {
    static constexpr int kVectors = D / 16;
    uint4 x[kVectors];

    // Where it lies; null beyond the tile's last row.
    __device__ __forceinline__ static const uint4* place(const unsigned short* q, const Tile& tile, int group,
                                                         int first_row, int Hq) {
        const int number = first_row + threadIdx.x % kThreads / 2;
        if (number >= tile.queries * group) return nullptr;
        const size_t row = size_t(tile.start + number / group) * Hq + tile.head * group + number % group;
        return reinterpret_cast<const uint4*>(q + row * D) + threadIdx.x % 2 * kVectors;
    }

    __device__ __forceinline__ explicit Query(const uint4* half_row) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) x[i] = half_row ? half_row[i] : make_uint4(0, 0, 0, 0);
    }

    // To shared memory as f16, over the power of two that leads the row; by this and softmax_scale scores are multiplied.
    __device__ __forceinline__ void store(unsigned char* rows, float* factors, float softmax_scale) const {
        const int row = threadIdx.x % kThreads / 2, half = threadIdx.x % 2;
        float largest = 0;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const u32 words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
            for (int e = 0; e < 8; ++e) largest = ptxlab::max_nan(largest, fabsf(element(words[e / 2], e % 2)));
        }
        largest = ptxlab::max_nan(largest, __shfl_xor_sync(~0u, largest, 1));
        const float power = ptxlab::leading_power(fmaxf(largest, 0x1p-100f));
        const float inverse = ptxlab::inverse_power(power) + (largest - largest);  // NaN of infinity
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const u32 words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
            u32 h[4];
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {  // elements 0, 2; 1, 3; 4, 6; 5, 7
                const int low = pair / 2 * 4 + pair % 2;
                h[pair] = ptxlab::as_bits(__floats2half2_rn(element(words[low / 2], low % 2) * inverse,
                                                            element(words[low / 2 + 1], low % 2) * inverse));
            }
            const int chunk = half * kVectors + i;
            *reinterpret_cast<uint4*>(rows + chunk / 8 * kQueryColumnBytes + row * 128 + (chunk % 8 ^ row % 8) * 16) =
                make_uint4(h[0], h[1], h[2], h[3]);
        }
        if (half == 0) factors[row] = softmax_scale * kLog2E * power;
        ptxlab::fence_proxy_async();
    }
};

// What a thread keeps of its two rows of a tile.
struct Rows {
    float factor[2], largest[2], sum[2];
    int end[2];  // the first token that the row does not see

    // Scores of one block to weights 2^(score - largest). Where `rescale` is not 1, earlier sums are to be multiplied by
    // it: `largest` stays while no score exceeds it by more than kHeadroom, so that few blocks ask for that.
    __device__ __forceinline__ void weigh(float (&s)[KEYS / 2], float (&rescale)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = s[2 * r];
#pragma unroll
            for (int i = 0; i < KEYS / 2; i += 4) top = fmaxf(top, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float reference = largest[r];
            const float peak = top * factor[r];
            largest[r] = peak > reference + kHeadroom ? peak : reference;
            rescale[r] = ptxlab::exp2_approx(reference - largest[r]);
            float of_block = 0;
#pragma unroll
            for (int i = 0; i < KEYS / 2; i += 4)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    s[i + e] = ptxlab::exp2_approx(fmaf(s[i + e], factor[r], -largest[r]));
                    of_block += s[i + e];
                }
            sum[r] = fmaf(sum[r], rescale[r], of_block);
        }
    }

    // Adds another part's sum of weights to row r's.
    __device__ __forceinline__ void add_part(int r, float of_part, float weights) {
        const float reference = fmaxf(largest[r], of_part);
        sum[r] = fmaf(weights, ptxlab::exp2_approx(of_part - reference),
                      sum[r] * ptxlab::exp2_approx(largest[r] - reference));
        largest[r] = reference;
    }

    // Tokens from `limit` on are not in this block, whose first one is `position`.
    __device__ __forceinline__ void mask(float (&s)[KEYS / 2], int position, int limit, int window) const {
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) {
            const int key = position + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, r = i / 2 % 2;
            if (key >= min(end[r], limit) || (window > 0 && key < end[r] - window)) s[i] = -ptxlab::infinity();
        }
    }
};

__device__ __forceinline__ void multiply_keys(float (&s)[KEYS / 2], u64 queries, u64 keys) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        const u64 query = queries + (k / 4 * kQueryColumnBytes + k % 4 * 32) / 16;
        ptxlab::wgmma_scores(s, query, keys + (k / 4 * kColumnBytes + k % 4 * 32) / 16, k == 0);
    }
    ptxlab::wgmma_commit();
}

__device__ __forceinline__ void multiply_values(float (&o)[D / 2], const u32 (&weights)[KEYS / 16][4], u64 values) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) ptxlab::wgmma_values(o, weights[k], values + k * 2048 / 16);
    ptxlab::wgmma_commit();
}

__device__ __forceinline__ void round_weights(u32 (&weights)[KEYS / 16][4], const float (&s)[KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i)
        weights[i / 4][i % 4] = ptxlab::as_bits(__floats2half2_rn(s[2 * i], s[2 * i + 1]));
}

template <int COUNT>
__device__ __forceinline__ void pin(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Where results go: f16 or bf16, and their logarithms.
struct Results {
    unsigned short* out;
    float* lse;  // or null
    int Hq;

    // A lane's two rows: where its pairs of elements go, null beyond the tile's last row; what sums are multiplied by.
    struct Place {
        u32* pairs[2];
        float inverse[2];
    };

    __device__ __forceinline__ Place finish(const Rows& rows, const Tile& tile, int group, int first_row) const {
        const int lane = threadIdx.x % 32;
        Place place;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = rows.sum[r];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const int number = first_row + threadIdx.x % kThreads / 32 * 16 + r * 8 + lane / 4;
            place.pairs[r] = nullptr;
            if (number >= tile.queries * group) continue;
            const bool none = sum == 0;
            const size_t row = size_t(tile.start + number / group) * Hq + tile.head * group + number % group;
            place.inverse[r] = none ? 0 : 1 / sum;
            place.pairs[r] = reinterpret_cast<u32*>(out + row * D) + lane % 4;
            if (lse && lane % 4 == 0)
                lse[row] = none ? -ptxlab::infinity() : (rows.largest[r] + ptxlab::log2_approx(sum)) * 0.693147181f;
        }
        return place;
    }

    // Sums of elements from 8 * `first` on.
    template <int COUNT>
    __device__ __forceinline__ static void store(float (&o)[COUNT], const Place& place, int first) {
        const bool odd = threadIdx.x % 2;
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {  // elements (0, 2) and (1, 3) of two lanes become (0, 1) and (2, 3)
            const float neighbour = __shfl_xor_sync(~0u, odd ? o[i] : o[i + 1], 1);
            if (odd) o[i] = neighbour;
            else o[i + 1] = neighbour;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (!place.pairs[r]) continue;
            const float inverse = place.inverse[r];
#pragma unroll
            for (int i = 0; i < COUNT / 4; ++i)
                place.pairs[r][(first + i) * 4] =
                    ptxlab::rounded_pair<BF16>(o[4 * i + 2 * r] * inverse, o[4 * i + 2 * r + 1] * inverse);
        }
    }
};

// Where parts of tiles are handed over, as the accumulators of a warp's lanes lie: per item, warp and lane D / 8 vectors
// of sums, and one of (largest, largest, sum, sum) of two rows.
struct Workspace {
    static constexpr int kWarps = kGroups * 4, kPitch = kWarps * kVectors * 32, kBatch = 8;
    float4* partial;
    int* arrivals;  // [items][kWarps], 0 between launches; of a tile the first item's

    // A warp's part 0 of a tile.
    __device__ __forceinline__ float4* first_part(const Tile& tile) const {
        const int warp = threadIdx.x / 32 - PRODUCERS * 4;
        return partial + size_t(tile.item - tile.part) * kPitch + warp * (kVectors * 32) + threadIdx.x % 32;
    }

    // Hands over this part of 16 rows. True in the warp that comes last.
    __device__ __forceinline__ bool hand_over(const float (&o)[D / 2], const Rows& rows, const Tile& tile) const {
        float4* const to = first_part(tile) + size_t(tile.part) * kPitch;
#pragma unroll
        for (int v = 0; v < D / 8; ++v) to[v * 32] = make_float4(o[4 * v], o[4 * v + 1], o[4 * v + 2], o[4 * v + 3]);
        to[D / 8 * 32] = make_float4(rows.largest[0], rows.largest[1], rows.sum[0], rows.sum[1]);
        int* const count = arrivals + (tile.item - tile.part) * kWarps + threadIdx.x / 32 - PRODUCERS * 4;
        if (!ptxlab::last_of(count, tile.parts)) return false;
        if (threadIdx.x % 32 == 0) *count = 0;
        return true;
    }

    // Adds up the parts of 16 rows, always in the same order, and stores the results.
    __device__ __forceinline__ void merge(const Results& results, const Tile& tile, int group, int first_row) const {
        const float4* const parts = first_part(tile);
        Rows rows;
        rows.largest[0] = rows.largest[1] = kLowest, rows.sum[0] = rows.sum[1] = 0;
        for (int part = 0; part < tile.parts; ++part) {
            const float4 stats = __ldcg(parts + size_t(part) * kPitch + D / 8 * 32);
            rows.add_part(0, stats.x, stats.z), rows.add_part(1, stats.y, stats.w);
        }
        const Results::Place place = results.finish(rows, tile, group, first_row);
#pragma unroll 1
        for (int first = 0; first < D / 8; first += kBatch) {
            float o[4 * kBatch] = {};
#pragma unroll 2
            for (int part = 0; part < tile.parts; ++part) {
                const float4* const of_part = parts + size_t(part) * kPitch;
                const float4 stats = __ldcg(of_part + D / 8 * 32);
                const float factor[2] = {ptxlab::exp2_approx(stats.x - rows.largest[0]),
                                         ptxlab::exp2_approx(stats.y - rows.largest[1])};
#pragma unroll
                for (int v = 0; v < kBatch; ++v) {
                    const float4 x = __ldcg(of_part + (first + v) * 32);
                    o[4 * v] = fmaf(x.x, factor[0], o[4 * v]), o[4 * v + 1] = fmaf(x.y, factor[0], o[4 * v + 1]);
                    o[4 * v + 2] = fmaf(x.z, factor[1], o[4 * v + 2]),
                              o[4 * v + 3] = fmaf(x.w, factor[1], o[4 * v + 3]);
                }
            }
            Results::store(o, place, first);
        }
    }
};

// Attends to a tile's blocks with 64 of its rows. The other group's turn at issuing products follows on this one's.
struct Consumer {
    int group, window, number;  // heads of a KV head; tokens that a query sees, or 0; 0 or 1
    float softmax_scale;
    unsigned char* queries;
    float* factors;
    const unsigned char *keys, *values;
    Barriers &of_keys, &of_values;
    ptxlab::Slot<STAGES> key_slot, value_slot;
    Rows rows;
    int first_end, last_end;  // ends of the group's first row and of its last
    float o[D / 2], s[KEYS / 2], rescale[2];
    u32 weights[KEYS / 16][4];

    __device__ __forceinline__ void begin_tile(const Tile& tile, const Query& query, int first_row) {
        ptxlab::sync_warp_group(number);  // all have read the queries of the tile before
        query.store(queries, factors, softmax_scale);
        ptxlab::sync_warp_group(number);
        const auto end_of = [&](int row) { return tile.first_own() + min(row / group, tile.queries - 1) + 1; };
        first_end = end_of(first_row), last_end = end_of(first_row + kGroupRows - 1);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = threadIdx.x % kThreads / 32 * 16 + r * 8 + threadIdx.x % 32 / 4;
            rows.factor[r] = factors[row], rows.largest[r] = kLowest, rows.sum[r] = 0;
            rows.end[r] = end_of(first_row + row);
        }
#pragma unroll
        for (int i = 0; i < D / 2; ++i) o[i] = 0;
    }

    __device__ __forceinline__ void issue_scores() {
        ptxlab::sync_threads(3 + number, kGroups * kThreads);
        ptxlab::wgmma_fence();
        multiply_keys(s, ptxlab::swizzled_128(queries), ptxlab::swizzled_128(keys + key_slot.index * kBlockBytes));
    }

    __device__ __forceinline__ void issue_values() {
        multiply_values(o, weights, ptxlab::swizzled_128_rows(values + value_slot.index * kBlockBytes, kColumnBytes));
    }

    __device__ __forceinline__ void pass_turn() const { ptxlab::arrive_threads(3 + (number ^ 1), kGroups * kThreads); }

    __device__ __forceinline__ static void release(Barriers& barriers, ptxlab::Slot<STAGES>& slot) {
        if (threadIdx.x % 32 == 0) ptxlab::mbarrier_arrive(&barriers.empty[slot.index]);
        slot.advance();
    }

    __device__ __forceinline__ void end_scores() {
        pin(s);
        release(of_keys, key_slot);
    }

    __device__ __forceinline__ void end_values() {
        ptxlab::wgmma_wait<0>();
        pin(o);
        release(of_values, value_slot);
    }

    __device__ __forceinline__ void weigh(const Tile& tile, int block) {
        const int position = tile.first_token(block), limit = tile.end_token(block);
        if (position + KEYS > min(first_end, limit) || (window > 0 && position < last_end - window))
            rows.mask(s, position, limit, window);
        rows.weigh(s, rescale);
    }

    __device__ __forceinline__ void rescale_sums() {
        if (!__any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) return;
#pragma unroll
        for (int i = 0; i < D / 2; ++i) o[i] *= rescale[i / 2 % 2];
    }

    // Scores of the next block are issued before the values of this one, so that these are multiplied beside the softmax.
    __device__ __forceinline__ void attend(const Tile& tile TIMELINE_PARAMETER) {
        if (tile.begin == tile.end) return;
        PHASE(WAIT_GROUP);
        ptxlab::mbarrier_wait(&of_keys.full[key_slot.index], key_slot.parity);
        PHASE(ISSUE, KEYS * D / 64);
        issue_scores();
        pass_turn();
        PHASE(WAIT_MMA, 0);
        ptxlab::wgmma_wait<0>();
        end_scores();
        PHASE(SOFTMAX);
        weigh(tile, tile.begin);
        round_weights(weights, s);
        for (int block = tile.begin + 1; block < tile.end; ++block) {
            PHASE(WAIT_GROUP);
            ptxlab::mbarrier_wait(&of_keys.full[key_slot.index], key_slot.parity);
            PHASE(ISSUE, KEYS * D / 64);
            issue_scores();
            PHASE(WAIT_GROUP);
            ptxlab::mbarrier_wait(&of_values.full[value_slot.index], value_slot.parity);
            PHASE(ISSUE, KEYS * D / 64);
            issue_values();
            pass_turn();
            PHASE(WAIT_MMA, 1);
            ptxlab::wgmma_wait<1>();
            end_scores();
            PHASE(SOFTMAX);
            weigh(tile, block);
            PHASE(WAIT_MMA, 0);
            end_values();
            rescale_sums();
            round_weights(weights, s);
        }
        PHASE(WAIT_GROUP);
        ptxlab::mbarrier_wait(&of_values.full[value_slot.index], value_slot.parity);
        PHASE(ISSUE, KEYS * D / 64);
        ptxlab::wgmma_fence();
        issue_values();
        PHASE(WAIT_MMA, 0);
        end_values();
    }
};

// Takes work items until none is left.
__device__ __forceinline__ void consume(Consumer& consumer, Scheduler scheduler, const unsigned short* q,
                                        const Results& results, const Workspace& workspace TIMELINE_PARAMETER) {
    const int group = consumer.group, of_group = consumer.number * kGroupRows;
    Tile tile, following;
    bool has_tile = scheduler.next(tile);
    if (consumer.number == 1) ptxlab::arrive_threads(3, kGroups * kThreads);  // the first group begins
    for (; has_tile; tile = following) {
        const int first_row = tile.row + of_group;
        PHASE(SETUP);
        consumer.begin_tile(tile, Query(Query::place(q, tile, group, first_row, results.Hq)), first_row);
        consumer.attend(tile TIMELINE_ARGUMENT);
        PHASE(EPILOGUE);
        has_tile = scheduler.next(following);
        if (has_tile)  // the next queries come to the L2 while results are stored
            if (const uint4* half_row = Query::place(q, following, group, following.row + of_group, results.Hq))
                for (int i = 0; i < D; i += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(half_row + i / 16));
        if (tile.parts == 1) Results::store(consumer.o, results.finish(consumer.rows, tile, group, first_row), 0);
        else if (workspace.hand_over(consumer.o, consumer.rows, tile)) workspace.merge(results, tile, group, first_row);
    }
}

// Restores the blocks of every work item.
template <int OPERAND>
__device__ __forceinline__ void produce(Producer<OPERAND> producer, Scheduler scheduler TIMELINE_PARAMETER) {
    Tile tile;
    producer.begin();
    while (scheduler.next(tile))
        for (int block = tile.begin; block < tile.end; ++block) producer.produce(tile, block TIMELINE_ARGUMENT);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1) attention_kv4_prefill_sm90(
    const unsigned short* q,      // f16 or bf16 [tokens, Hq, D]
    const unsigned char* pool,    // u8 [pages, 2, Hkv, kPageBytes]: K, then V
    const int* table,             // s32 [B, P]
    const int* lengths,           // s32 [B]
    const int* starts,            // s32 [B + 1]
    const unsigned short* own_k,  // as q [tokens, Hkv, D], tokens k_pitch elements apart; without OWN null
    const unsigned short* own_v,  // likewise, v_pitch
    unsigned short* out,          // as q
    float* lse,                   // f32 [tokens, Hq], or null
    float4* partial,              // f32 [items, 8, kVectors, 32, 4]; null if there is one part
    int* arrivals,                // s32 [items, 8], zeros before and after; null if there is one part
    float softmax_scale, int B, int Hq, int Hkv, int P, int window, int parts, int k_pitch, int v_pitch) {
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned char* const queries = shared;  // [kGroups][kQueryBytes]
    unsigned char* const keys = queries + kGroups * kQueryBytes;
    unsigned char* const values = keys + STAGES * kBlockBytes;
    unsigned char* const ring = values + STAGES * kBlockBytes;
    __shared__ Barriers barriers[2];  // of keys, of values
    __shared__ float factors[kRows];
    TIMELINE_THREAD(threadIdx.x % kThreads == 0);
    const int warp_group = __shfl_sync(~0u, threadIdx.x / kThreads, 0);
    if (threadIdx.x == 0) barriers[0].init(), barriers[1].init(), ptxlab::fence_mbarrier_init();
    __syncthreads();
    ptxlab::launch_dependents();
    ptxlab::wait_for_predecessors();
    const Scheduler scheduler = {starts, lengths, B, Hkv, Hq / Hkv, window, parts};
    if (warp_group < PRODUCERS) {
        ptxlab::fewer_registers<kProducerRegisters>();
        const Pages pages = {pool, table, Hkv, P};
        const OwnTokens own_keys = {own_k, k_pitch}, own_values = {own_v, v_pitch};
        if (warp_group == 0)
            produce<0>({scheduler, pages, own_keys, own_values, ring, keys, barriers}, scheduler TIMELINE_ARGUMENT);
        else produce<1>({scheduler, pages, own_keys, own_values, ring, keys, barriers}, scheduler TIMELINE_ARGUMENT);
    } else {
        ptxlab::more_registers<kConsumerRegisters>();
        const int number = warp_group - PRODUCERS;
        Consumer consumer = {
            Hq / Hkv, window, number,      softmax_scale, queries + number * kQueryBytes, factors + number * kGroupRows,
            keys,     values, barriers[0], barriers[1]};
        consume(consumer, scheduler, q, {out, lse, Hq}, {partial, arrivals} TIMELINE_ARGUMENT);
    }
}
