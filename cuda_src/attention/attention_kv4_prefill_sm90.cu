// attention_kv4_prefill_sm90: causal attention of any number of queries over a paged cache of 4 bits (QServe section
// 5.1): prompts in chunks, prompts behind a cached prefix.
//
// PRODUCERS warp groups copy pages and restore keys and values to f16 in shared memory, once for 128 rows. Two other warp
// groups multiply on the tensor cores, 64 rows each, and take turns at issuing products. A row is a query of one head. The
// heads that share a KV head lie together, so a tile of 128 rows is 128 / (Hq / Hkv) tokens. Each block of the launch takes
// work items until none is left: tiles, or with SPLIT parts of a tile's keys, of which the last to end adds up all. Of a
// sequence the last tiles, which see most keys, come first.
//
// Contract   sequence b has queries starts[b] .. starts[b + 1], its last tokens; out[i, h] = sum_j p[j] v[j], p = softmax
//            of softmax_scale * q[i, h] . k[j] over the keys that token sees: j up to lengths[b] - starts[b + 1] + i, of
//            these the last `window` if that is not 0. lse: natural logarithm of the sum of exponentials. Nothing seen:
//            zeros, and lse -infinity. Head h reads kv head h / (Hq / Hkv). A key is f16((q4 - zero) * scale), a value
//            likewise; weights are rounded to f16; a query to f16 relative to a power of two of its largest element.
//            OWN: keys and values of the queries' own tokens are those of own_k and own_v, rounded to f16, and the cache
//            has only those ahead of them.
// PDL        all warps wait for the kernel before.
// Guide      notebooks/guide/kernels_attention.md: rows, restoring, scores, softmax
// PTX ISA    9.7.15.5 wgmma, 9.7.9.25 bulk copies, 9.7.13.15 mbarrier, 9.7.19.5 setmaxnreg, 9.7.3 ex2, lg2
#include "griddep.cuh"
#include "mbarrier.cuh"
#include "named_barrier.cuh"
#include "own_tokens.cuh"
#include "parts.cuh"
#include "prefill_rows.cuh"
#include "prefill_tiles.cuh"
#include "timeline.cuh"
#include "wgmma_f16.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128   // 64, 128, 256
#define PAGE 64        // tokens of a page: 16, 32, 64
#define BF16 0         // queries and results: 0 f16, 1 bf16
#define KEYS 128       // of a block: 64, 128
#define STAGES 2       // blocks of keys, and as many of values, that are restored
#define PAGE_STAGES 3  // blocks that are copied
#define PRODUCERS 2    // warp groups that restore: one of keys and values, or one of each
#define HEADROOM 8     // a score exceeds what its row's weights are relative to by at most this, as a power of two
#endif
#ifndef SPLIT
#define SPLIT 0        // 1: tiles are cut into parts
#define PART_BLOCKS 4  // blocks of keys that a part has at least
#endif
#ifndef ROTATED
#define ROTATED 0  // 1: keys are rotated by a Hadamard matrix, so queries are too
#endif
#ifndef OWN
#define OWN 0  // 1: keys and values of the queries' own tokens are given in 16 bits, neither rotated
#endif

namespace {

using ptxlab::Tile;
using ptxlab::u32;
using ptxlab::u64;

// Threads and rows
constexpr int kGroups = 2, kGroupRows = 64, kRows = kGroups * kGroupRows;  // consumer groups; rows of one, of a tile
constexpr int kThreads = 128, kBlockThreads = (PRODUCERS + kGroups) * kThreads;  // of a warp group; of a block
constexpr int kFirstTurnBarrier = 3;  // named barriers at which the consumer groups wait for their turn
// Bytes
constexpr int kTokenBytes = HEAD_DIM / 2, kPageBytes = PAGE * (kTokenBytes + 4);
constexpr int kPages = KEYS / PAGE, kCopyBytes = kPages * kPageBytes;  // of a block's keys, or values
constexpr int kQueryBytes = kGroupRows * HEAD_DIM * 2, kBlockBytes = KEYS * HEAD_DIM * 2;
constexpr int kQueryColumnBytes = kGroupRows * 128, kColumnBytes = KEYS * 128;  // of 64 elements of all rows
// Work of a producer's thread
constexpr int kPageLanes = kPages > 4 ? kPages : 1;  // that share a block's pages: there are no registers for eight
constexpr int kLanePages = kPages / kPageLanes;      // of a lane
constexpr int kTokenChunks = kTokenBytes / 16;       // of 16 bytes
constexpr int kChunks = KEYS * kTokenChunks / kThreads;
static_assert(kChunks * (kThreads / KEYS) == kTokenChunks);
// Registers that consumers give up for pages, and for own tokens.
constexpr int kPageRegisters = PRODUCERS == 2 && (PAGE == 16 || (PAGE == 32 && (SPLIT || OWN))) ? 8 : 0;
constexpr int kOwnRegisters = OWN && HEAD_DIM == 256 && PAGE == 16 ? 8 : 0;
constexpr int kProducerRegisters = (PRODUCERS == 1 ? 72 : 56) + kPageRegisters + kOwnRegisters;
constexpr int kConsumerRegisters = (PRODUCERS == 1 ? 216 : 200) - kPageRegisters - kOwnRegisters;
constexpr bool kTileInShared = SPLIT && HEAD_DIM == 256;  // registers have no room for it beside the sums
// Of 16 bytes that a lane hands over: its sums, and what they are relative to.
constexpr int kVectors = HEAD_DIM / 8 + 1;
static_assert(!SPLIT || (OWN ? HEAD_DIM == 64 : HEAD_DIM < 256 || PAGE == 64));  // registers would spill
static_assert(KEYS % PAGE == 0 && (KEYS == 64 || KEYS == 128) && HEAD_DIM % 64 == 0);

using Scheduler = ptxlab::TileScheduler<kRows, KEYS, true, SPLIT ? PART_BLOCKS : 0>;
using SoftmaxRows = ptxlab::SoftmaxRows<KEYS>;
using Scores = float[KEYS / 2];         // of a thread: of two rows
using Weights = u32[KEYS / 16][4];      // the same as operand A
using ValueSums = float[HEAD_DIM / 2];  // of two rows
#if OWN
using OwnKeys = ptxlab::OwnTokens<HEAD_DIM, BF16, KEYS, kThreads, ROTATED>;
using OwnValues = ptxlab::OwnTokens<HEAD_DIM, BF16, KEYS, kThreads, false>;
#else
struct OwnKeys {};
struct OwnValues {};
#endif

// Barriers of the keys, or of the values: `copied` and `taken` of pages, `full` and `empty` of restored blocks.
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

// Restore a block's keys or values to f16 [KEYS][D], in columns of 64 elements under the 128-byte swizzle: the first
// `tokens` are there, the others become zeros, or with OWN are left alone. The eight elements of a word stay in the
// order in which they come out, (0, 2, 1, 3, 4, 6, 5, 7): queries have the same, and results are put in order when they
// are stored. Spelt out here: through TokenDequantiser the machine code of some forms differs.
__device__ __forceinline__ void restore(unsigned char* block, const unsigned char* pages, int tokens) {
    const int token = threadIdx.x % KEYS,
              share = threadIdx.x % kThreads / KEYS;  // of 64 keys two threads have one each half
    if (OWN && token >= tokens) return;
    const unsigned char* page = pages + token / PAGE * kPageBytes;
    u32 pair = *reinterpret_cast<const u32*>(page + PAGE * kTokenBytes + token % PAGE * 4);
    if (token >= tokens) pair = 0;  // beyond the end there may be anything, and a weight of 0 times NaN is NaN
    const __half2 scale = __half2half2(__ushort_as_half(pair & 0xffff));
    const uint2 bias = ptxlab::bias_u4_f16(__ushort_as_half(pair >> 16));
    const unsigned char* row = page + token % PAGE * kTokenBytes;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
        const int chunk = share * kChunks + (i + token / 2) % kChunks;  // lanes of a row of banks take turns
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

// Pages of a cache, of its keys or its values: looks them up and copies them.
struct Pages {
    const unsigned char* pool;  // from the first head's keys, or values, on
    const int* table;
    int heads, P;

    __device__ __forceinline__ static int page_of_lane(int i) { return i * kPageLanes + threadIdx.x % kPageLanes; }

    // Look up a lane's pages of a block; those that it lacks are the last page again.
    __device__ __forceinline__ void find(int (&numbers)[kLanePages], const Tile& tile, int block) const {
        const int last = (tile.context - 1) / PAGE;
#pragma unroll
        for (int i = 0; i < kLanePages; ++i)
            numbers[i] = table[size_t(tile.sequence) * P + min(block * kPages + page_of_lane(i), last)];
    }

    // Start to copy a lane's pages; the first lane says how many bytes come in all.
    __device__ __forceinline__ void copy(unsigned char* stage, u64* copied, const int (&numbers)[kLanePages],
                                         int head) const {
        if (threadIdx.x % kPageLanes == 0) ptxlab::mbarrier_arrive_expect(copied, kCopyBytes);
        const size_t pitch = size_t(heads) * (2 * kPageBytes);
#pragma unroll
        for (int i = 0; i < kLanePages; ++i)
            ptxlab::bulk_load(stage + page_of_lane(i) * kPageBytes,
                              pool + numbers[i] * pitch + head * size_t(kPageBytes), kPageBytes, copied);
    }
};

// Restores keys, or values, block by block, from pages that are copied ahead; their numbers are looked up before that.
// Own tokens come straight from global memory.
template <typename Own>
struct Producer {
    Scheduler scheduler;  // of what is copied next
    Pages pages;
    Own own_tokens;
    unsigned char *ring, *blocks;
    Barriers& barriers;
    Tile tile;
    int block = 0, in_flight = 0, page_numbers[kLanePages];
    bool has_tile;
    ptxlab::Slot<PAGE_STAGES> asked, taken;
    ptxlab::Slot<STAGES> slot;

    __device__ __forceinline__ Producer(const Scheduler& scheduler, const Pages& pages, const Own& own_tokens,
                                        unsigned char* ring, unsigned char* blocks, Barriers& barriers)
        : scheduler(scheduler), pages(pages), own_tokens(own_tokens), ring(ring), blocks(blocks), barriers(barriers) {
        begin();
        look_ahead();
    }

    // Move on to the next tile.
    __device__ __forceinline__ void begin() {
        has_tile = scheduler.next(tile);
        block = has_tile ? tile.begin : 0;
        if constexpr (OWN) tile.keep_cached<KEYS>();
    }

    __device__ __forceinline__ void look_ahead() {
        while (has_tile && block >= tile.end) begin();
        if (has_tile) pages.find(page_numbers, tile, block);
    }

    // Start to copy pages of the next blocks, while stages are free.
    __device__ __forceinline__ void copy_ahead() {
        for (; has_tile && in_flight < PAGE_STAGES; ++in_flight) {
            ptxlab::mbarrier_wait(&barriers.taken[asked.index], asked.parity ^ 1);  // the first round finds them empty
            if (threadIdx.x % kThreads < kPageLanes)
                pages.copy(ring + asked.index * kCopyBytes, &barriers.copied[asked.index], page_numbers, tile.head);
            asked.advance(), ++block;
            look_ahead();
        }
    }

    // Produce the next block, of tile `of`, whose first `tokens` tokens are there.
    __device__ __forceinline__ void produce(const Tile& of, int tokens TIMELINE_PARAMETER) {
        const int cached = OWN ? tokens - of.queries : tokens;
        const bool has_pages = !OWN || cached > 0;
        PHASE(LOAD);
        copy_ahead();
        PHASE(WAIT_COPY);
        if (has_pages) ptxlab::mbarrier_wait(&barriers.copied[taken.index], taken.parity);
        PHASE(WAIT_GROUP);
        ptxlab::mbarrier_wait(&barriers.empty[slot.index], slot.parity ^ 1);
        PHASE(DEQUANTISE);
        if (has_pages) restore(blocks + slot.index * kBlockBytes, ring + taken.index * kCopyBytes, cached);
        if constexpr (OWN)
            own_tokens.store(blocks + slot.index * kBlockBytes, {max(0, cached), tokens}, of.start - cached, of.head);
        ptxlab::fence_proxy_async();
        if (has_pages) ptxlab::mbarrier_arrive(&barriers.taken[taken.index]);
        ptxlab::mbarrier_arrive(&barriers.full[slot.index]);
        if (has_pages) taken.advance(), --in_flight;
        slot.advance();
    }
};

// Restores keys, or values, of all tiles.
template <typename Own>
__device__ __forceinline__ void produce(Scheduler scheduler, Producer<Own> producer TIMELINE_PARAMETER) {
    Tile tile;
    while (scheduler.next(tile))
        for (int block = tile.begin; block < tile.end; ++block)
            producer.produce(tile, tile.context - block * KEYS TIMELINE_ARGUMENT);
}

// Half a row of queries of a consumer group, whose rows begin at `first_row`: two threads share a row.
struct HalfQuery {
    static constexpr int kPieces = HEAD_DIM / 16;
    uint4 x[kPieces];

    // Return the address of the thread's half row, null beyond the tile's last row.
    __device__ __forceinline__ static const uint4* find(const unsigned short* q, const Tile& tile, int group,
                                                        int first_row, int Hq) {
        const int query_row = first_row + threadIdx.x % kThreads / 2;
        if (query_row >= tile.queries * group) return nullptr;
        const size_t row = tile.q_row(query_row, group, Hq);
        return reinterpret_cast<const uint4*>(q + row * HEAD_DIM) + threadIdx.x % 2 * kPieces;
    }

    __device__ __forceinline__ explicit HalfQuery(const uint4* half_row) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) x[i] = half_row ? half_row[i] : make_uint4(0, 0, 0, 0);
    }

    // Store it to shared memory as f16, divided by the power of two that leads the row; set the row's factor, which
    // turns its dot products into scores in base 2.
    __device__ __forceinline__ void store(unsigned char* rows, float* factors, float softmax_scale) const {
        const int row = threadIdx.x % kThreads / 2, half = threadIdx.x % 2;
        float elements[kPieces][8], largest = 0;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const u32 words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                elements[i][e] = ptxlab::HalfQuery<HEAD_DIM, BF16>::element(words[e / 2], e % 2);
                largest = ptxlab::max_nan(largest, fabsf(elements[i][e]));
            }
        }
        if constexpr (ROTATED) largest = ptxlab::rotate_query<HEAD_DIM / 2, 2>(elements, half);
        largest = ptxlab::max_nan(largest, __shfl_xor_sync(~0u, largest, 1));
        const float power = ptxlab::leading_power(fmaxf(largest, 0x1p-100f));
        const float inverse = ptxlab::inverse_power(power) + (largest - largest);  // NaN of infinity
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            u32 h[4];
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {  // in the order of restored words
                const int low = pair / 2 * 4 + pair % 2;
                h[pair] =
                    ptxlab::as_bits(__floats2half2_rn(elements[i][low] * inverse, elements[i][low + 2] * inverse));
            }
            *reinterpret_cast<uint4*>(rows + ptxlab::swizzled_piece<kGroupRows>(row, half * kPieces + i)) =
                make_uint4(h[0], h[1], h[2], h[3]);
        }
        if (half == 0) factors[row] = softmax_scale * ptxlab::kLog2E * power;
        ptxlab::fence_proxy_async();
    }
};

// Issue S = Q K^T of a block of keys, given descriptors.
__device__ __forceinline__ void multiply_keys(Scores& s, u64 queries, u64 keys) {
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
        const u64 query = queries + (k / 4 * kQueryColumnBytes + k % 4 * 32) / 16;
        ptxlab::wgmma_scores(s, query, keys + (k / 4 * kColumnBytes + k % 4 * 32) / 16, k == 0);
    }
    ptxlab::wgmma_commit();
}

// Issue O += P V of a block of values, given its descriptor.
__device__ __forceinline__ void multiply_values(ValueSums& o, const Weights& weights, u64 values) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) ptxlab::wgmma_values(o, weights[k], values + k * 2048 / 16);
    ptxlab::wgmma_commit();
}

// Tell the compiler that registers may change here, so that they are not moved across a wgmma.
template <int COUNT>
__device__ __forceinline__ void pin(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Destination of results: rows in f16 or bf16, and their logarithms.
struct Results {
    unsigned short* out;
    float* lse;  // or null
    int Hq;

    // A lane's two rows: where its pairs of elements are stored, null beyond the tile's last row; what sums are
    // multiplied by.
    struct LaneRows {
        u32* pairs[2];
        float inverse[2];
    };

    // Store the logarithms of a consumer group's rows from `first_row` on; return where their sums go.
    __device__ __forceinline__ LaneRows finish(const SoftmaxRows& rows, const Tile& tile, int group,
                                               int first_row) const {
        const int lane = threadIdx.x % 32;
        LaneRows lane_rows;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = rows.total(r);
            const int query_row = first_row + threadIdx.x % kThreads / 32 * 16 + r * 8 + lane / 4;
            lane_rows.pairs[r] = nullptr, lane_rows.inverse[r] = 0;
            if (query_row >= tile.queries * group) continue;
            const bool sees_none = sum == 0;
            const size_t row = tile.q_row(query_row, group, Hq);
            lane_rows.inverse[r] = sees_none ? 0 : 1 / sum;
            lane_rows.pairs[r] = reinterpret_cast<u32*>(out + row * HEAD_DIM) + lane % 4;
            if (lse && lane % 4 == 0) lse[row] = sees_none ? -ptxlab::infinity() : rows.lse(r, sum);
        }
        return lane_rows;
    }

    // Store sums of elements from 8 * `first_vector` on. Spelt out here: through `store_row` the machine code of parts
    // differs.
    template <int COUNT>
    __device__ __forceinline__ static void store(float (&o)[COUNT], const LaneRows& lane_rows, int first_vector) {
        const bool odd = threadIdx.x % 2;
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {  // elements (0, 2) and (1, 3) of two lanes become (0, 1) and (2, 3)
            const float neighbour = __shfl_xor_sync(~0u, odd ? o[i] : o[i + 1], 1);
            if (odd) o[i] = neighbour;
            else o[i + 1] = neighbour;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (!lane_rows.pairs[r]) continue;
            const float inverse = lane_rows.inverse[r];
#pragma unroll
            for (int i = 0; i < COUNT / 4; ++i)
                lane_rows.pairs[r][(first_vector + i) * 4] =
                    ptxlab::rounded_pair<BF16>(o[4 * i + 2 * r] * inverse, o[4 * i + 2 * r + 1] * inverse);
        }
    }
};

// Workspace for parts of tiles, laid out as the accumulators of a warp's lanes: per item, warp and lane D / 8 vectors
// of sums, and one of (largest, largest, sum, sum) of two rows.
struct Workspace {
    static constexpr int kWarps = kGroups * 4, kPitch = kWarps * kVectors * 32, kBatch = 8;
    float4* partial;
    int* arrivals;  // [items][kWarps], 0 between launches; of a tile the first item's

    // Return the address of the lane's vectors of part 0 of a tile.
    __device__ __forceinline__ float4* first_part(const Tile& tile) const {
        const int warp = threadIdx.x / 32 - PRODUCERS * 4;
        return partial + size_t(tile.item - tile.part_index) * kPitch + warp * (kVectors * 32) + threadIdx.x % 32;
    }

    // Hand over this part of 16 rows; return true in the warp that comes last.
    __device__ __forceinline__ bool hand_over(const ValueSums& o, const SoftmaxRows& rows, const Tile& tile) const {
        float4* const lane_part = first_part(tile) + size_t(tile.part_index) * kPitch;
#pragma unroll
        for (int v = 0; v < HEAD_DIM / 8; ++v)
            lane_part[v * 32] = make_float4(o[4 * v], o[4 * v + 1], o[4 * v + 2], o[4 * v + 3]);
        lane_part[HEAD_DIM / 8 * 32] = make_float4(rows.largest[0], rows.largest[1], rows.sum[0], rows.sum[1]);
        int* const count = arrivals + (tile.item - tile.part_index) * kWarps + threadIdx.x / 32 - PRODUCERS * 4;
        if (!ptxlab::last_of(count, tile.parts)) return false;
        if (threadIdx.x % 32 == 0) *count = 0;
        return true;
    }

    // Add up the parts of 16 rows, always in the same order, and store the results.
    __device__ __forceinline__ void merge(const Results& results, const Tile& tile, int group, int first_row) const {
        const float4* const parts = first_part(tile);
        SoftmaxRows rows;
        rows.largest[0] = rows.largest[1] = ptxlab::kLowestScore;
        for (int part_index = 0; part_index < tile.parts; ++part_index) {
            const float4 stats = __ldcg(parts + size_t(part_index) * kPitch + HEAD_DIM / 8 * 32);
            rows.add_part(0, stats.x, stats.z), rows.add_part(1, stats.y, stats.w);
        }
        const Results::LaneRows lane_rows = results.finish(rows, tile, group, first_row);
#pragma unroll 1
        for (int first_vector = 0; first_vector < HEAD_DIM / 8; first_vector += kBatch) {
            float o[4 * kBatch] = {};
#pragma unroll 2
            for (int part_index = 0; part_index < tile.parts; ++part_index) {
                const float4* const lane_part = parts + size_t(part_index) * kPitch;
                const float4 stats = __ldcg(lane_part + HEAD_DIM / 8 * 32);
                const float factor[2] = {ptxlab::exp2_approx(stats.x - rows.largest[0]),
                                         ptxlab::exp2_approx(stats.y - rows.largest[1])};
#pragma unroll
                for (int v = 0; v < kBatch; ++v) {
                    const float4 x = __ldcg(lane_part + (first_vector + v) * 32);
                    o[4 * v] = fmaf(x.x, factor[0], o[4 * v]), o[4 * v + 1] = fmaf(x.y, factor[0], o[4 * v + 1]);
                    o[4 * v + 2] = fmaf(x.z, factor[1], o[4 * v + 2]),
                              o[4 * v + 3] = fmaf(x.w, factor[1], o[4 * v + 3]);
                }
            }
            Results::store(o, lane_rows, first_vector);
        }
    }
};

// One of two warp groups: multiplies 64 rows of a tile, block by block. Products of a block's keys are issued together
// with those of the values of the block before, in the group's turn; in the other group's turn comes the softmax.
struct Consumer {
    const unsigned short* q;
    const Results& results;
    const Workspace& workspace;
    unsigned char* queries;  // of the group, in shared memory
    float* factors;          // of its rows
    const unsigned char *keys, *values;
    Barriers &of_keys, &of_values;
    int Hq, group, window;  // heads; of a KV head; tokens that a query sees at most, or 0
    float softmax_scale;
    Tile& shared_tile;
    int index;  // of the group
    ptxlab::Slot<STAGES> key_slot, value_slot;

    __device__ __forceinline__ int first_row_of(const Tile& tile) const { return tile.first_row + index * kGroupRows; }
    __device__ __forceinline__ void pass_turn() const {
        ptxlab::arrive_threads(kFirstTurnBarrier + (index ^ 1), kGroups * kThreads);
    }
    __device__ __forceinline__ static void release(u64* barrier) {
        if (threadIdx.x % 32 == 0) ptxlab::mbarrier_arrive(barrier);
    }

    // Store the tile's queries to shared memory, and set what its rows' softmax begins with.
    __device__ __forceinline__ void load_queries(SoftmaxRows& rows, const Tile& tile TIMELINE_PARAMETER) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x % kThreads / 32, first_row = first_row_of(tile);
        PHASE(SETUP);
        ptxlab::sync_warp_group(index);  // all have read the queries of the tile before
        if (kTileInShared && threadIdx.x % kThreads == 0) shared_tile = tile;
        HalfQuery(HalfQuery::find(q, tile, group, first_row, Hq)).store(queries, factors, softmax_scale);
        ptxlab::sync_warp_group(index);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = warp * 16 + r * 8 + lane / 4, token = min((first_row + row) / group, tile.queries - 1);
            rows.factor[r] = factors[row], rows.largest[r] = ptxlab::kLowestScore;
            rows.end[r] = tile.context - tile.queries + token + 1;
        }
    }

    // Wait for the next block of keys and for the group's turn, and issue the products of scores.
    __device__ __forceinline__ void begin_scores(Scores& s TIMELINE_PARAMETER) const {
        PHASE(WAIT_GROUP);
        ptxlab::mbarrier_wait(&of_keys.full[key_slot.index], key_slot.parity);
        PHASE(ISSUE, KEYS * HEAD_DIM / 64);
        ptxlab::sync_threads(kFirstTurnBarrier + index, kGroups * kThreads);
        ptxlab::wgmma_fence();
        multiply_keys(s, ptxlab::swizzled_128(queries), ptxlab::swizzled_128(keys + key_slot.index * kBlockBytes));
    }

    // Wait for the next block of values, and issue their products.
    __device__ __forceinline__ void begin_values(ValueSums& o, const Weights& weights TIMELINE_PARAMETER) const {
        PHASE(WAIT_GROUP);
        ptxlab::mbarrier_wait(&of_values.full[value_slot.index], value_slot.parity);
        PHASE(ISSUE, KEYS * HEAD_DIM / 64);
        multiply_values(o, weights, ptxlab::swizzled_128_rows(values + value_slot.index * kBlockBytes, kColumnBytes));
    }

    // Wait for scores, while BEHIND later groups of products may still run, and turn them into weights.
    template <int BEHIND>
    __device__ __forceinline__ void finish_scores(Scores& s, SoftmaxRows& rows, float (&rescale)[2], const Tile& tile,
                                                  int block TIMELINE_PARAMETER) {
        PHASE(WAIT_MMA, BEHIND);
        ptxlab::wgmma_wait<BEHIND>();
        pin(s);
        release(&of_keys.empty[key_slot.index]), key_slot.advance();
        PHASE(SOFTMAX);
        const int position = block * KEYS, first_row = first_row_of(tile), first_query = tile.context - tile.queries;
        const int first_end = first_query + min(first_row / group, tile.queries - 1) + 1;
        const int last_end = first_query + min((first_row + kGroupRows - 1) / group, tile.queries - 1) + 1;
        if (position + KEYS > first_end || (window > 0 && position < last_end - window)) rows.mask(s, position, window);
        rows.weigh(s, rescale, HEADROOM);
    }

    // Wait for the products of values, and release their block.
    __device__ __forceinline__ void finish_values(ValueSums& o TIMELINE_PARAMETER) {
        PHASE(WAIT_MMA, 0);
        ptxlab::wgmma_wait<0>();
        pin(o);
        release(&of_values.empty[value_slot.index]), value_slot.advance();
    }

    // Add up weights times values over the tile's blocks.
    __device__ __forceinline__ void attend(ValueSums& o, SoftmaxRows& rows, const Tile& tile TIMELINE_PARAMETER) {
        Scores s;
        float rescale[2];
        Weights weights;
        begin_scores(s TIMELINE_ARGUMENT);
        pass_turn();
        finish_scores<0>(s, rows, rescale, tile, tile.begin TIMELINE_ARGUMENT);
        ptxlab::round_weights<KEYS>(weights, s);
        for (int block = tile.begin + 1; block < tile.end; ++block) {
            begin_scores(s TIMELINE_ARGUMENT);
            begin_values(o, weights TIMELINE_ARGUMENT);
            pass_turn();
            finish_scores<1>(s, rows, rescale, tile, block TIMELINE_ARGUMENT);
            finish_values(o TIMELINE_ARGUMENT);
            if (__any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] *= rescale[i / 2 % 2];
            }
            ptxlab::round_weights<KEYS>(weights, s);
        }
        ptxlab::wgmma_fence();
        begin_values(o, weights TIMELINE_ARGUMENT);
        finish_values(o TIMELINE_ARGUMENT);
    }

    // Prefetch the next tile's queries to the L2 while results are stored.
    __device__ __forceinline__ void prefetch_queries(const Tile& tile) const {
        if (const uint4* half_row = HalfQuery::find(q, tile, group, first_row_of(tile), Hq))
            for (int i = 0; i < HEAD_DIM; i += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(half_row + i / 16));
    }

    // Store a whole tile's results, or hand over a part of them.
    __device__ __forceinline__ void deliver(ValueSums& o, const SoftmaxRows& rows, const Tile& tile) const {
        const int first_row = first_row_of(tile);
        if (!SPLIT || tile.parts == 1) Results::store(o, results.finish(rows, tile, group, first_row), 0);
        else if (workspace.hand_over(o, rows, tile)) workspace.merge(results, tile, group, first_row);
    }

    // Compute the group's rows of every tile that the scheduler gives to the block.
    __device__ __forceinline__ void run(Scheduler scheduler TIMELINE_PARAMETER) {
        Tile tile, following = {};
        bool has_tile = scheduler.next(tile);
        if (index == 1) ptxlab::arrive_threads(kFirstTurnBarrier, kGroups * kThreads);  // the first group begins
        while (has_tile) {
            SoftmaxRows rows;
            load_queries(rows, tile TIMELINE_ARGUMENT);
            ValueSums o = {};
            if (tile.begin < tile.end) attend(o, rows, tile TIMELINE_ARGUMENT);
            PHASE(EPILOGUE);
            if constexpr (kTileInShared) {
                tile = shared_tile;  // there is no room for the next one yet, whose queries are not fetched ahead
                deliver(o, rows, tile);
                has_tile = scheduler.next(tile);
            } else {
                has_tile = scheduler.next(following);
                if (has_tile) prefetch_queries(following);
                deliver(o, rows, tile);
                tile = following;
            }
        }
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1) attention_kv4_prefill_sm90(
    const unsigned short* q,    // f16 or bf16 [tokens, Hq, D]
    const unsigned char* pool,  // u8 [pages, 2, Hkv, kPageBytes]: K, then V
    const int* table,           // s32 [B, P]
    const int* lengths,         // s32 [B]
    const int* starts,          // s32 [B + 1]
#if OWN
    const unsigned short* own_k,  // as q [tokens, Hkv, D], tokens k_pitch elements apart
    const unsigned short* own_v,  // likewise, v_pitch
#endif
    unsigned short* out,  // as q
    float* lse,           // f32 [tokens, Hq], or null
    float4* partial,      // SPLIT: f32 [items, 8, kVectors, 32, 4]
    int* arrivals,        // SPLIT: s32 [items, 8], zeros before and after
    float softmax_scale, int B, int Hq, int Hkv, int P, int window, int parts
#if OWN
    ,
    int k_pitch, int v_pitch
#endif
) {
#if OWN
    const OwnKeys own_keys = {own_k, k_pitch};
    const OwnValues own_values = {own_v, v_pitch};
#else
    const OwnKeys own_keys = {};
    const OwnValues own_values = {};
#endif
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned char* const queries = shared;  // [kGroups][kQueryBytes]
    unsigned char* const keys = queries + kGroups * kQueryBytes;
    unsigned char* const values = keys + STAGES * kBlockBytes;
    unsigned char* const ring = values + STAGES * kBlockBytes;
    __shared__ Barriers key_barriers, value_barriers;
    __shared__ float factors[kRows];
    __shared__ Tile shared_tile[kGroups];  // of each consumer group, if kTileInShared
    TIMELINE_THREAD(threadIdx.x % kThreads == 0);
    const int warp_group = __shfl_sync(~0u, threadIdx.x / kThreads, 0);
    if (threadIdx.x == 0) key_barriers.init(), value_barriers.init(), ptxlab::fence_mbarrier_init();
    __syncthreads();
    ptxlab::launch_dependents();
    ptxlab::wait_for_predecessors();
    const Scheduler scheduler = {starts, lengths, B, Hkv, Hq / Hkv, window, SPLIT ? parts : 1};
    if (warp_group < PRODUCERS) {
        ptxlab::lower_registers_to<kProducerRegisters>();
        const unsigned char* of_values = pool + size_t(Hkv) * kPageBytes;
        const Pages key_pages = {pool, table, Hkv, P}, value_pages = {of_values, table, Hkv, P};
        unsigned char* const value_ring = ring + PAGE_STAGES * kCopyBytes;
        if constexpr (OWN && PRODUCERS == 2) {
            if (warp_group == 0)
                produce(scheduler,
                        Producer<OwnKeys>(scheduler, key_pages, own_keys, ring, keys, key_barriers) TIMELINE_ARGUMENT);
            else
                produce(scheduler, Producer<OwnValues>(scheduler, value_pages, own_values, value_ring, values,
                                                       value_barriers) TIMELINE_ARGUMENT);
        } else {
            Producer<OwnKeys> keys_of(scheduler, key_pages, own_keys, ring, keys, key_barriers);
            Producer<OwnValues> values_of(scheduler, value_pages, own_values, value_ring, values, value_barriers);
            Scheduler tiles = scheduler;
            Tile tile;
            while (tiles.next(tile))
                for (int block = tile.begin; block < tile.end; ++block) {
                    const int tokens = tile.context - block * KEYS;
                    if (warp_group == 0) keys_of.produce(tile, tokens TIMELINE_ARGUMENT);
                    if (warp_group == PRODUCERS - 1) values_of.produce(tile, tokens TIMELINE_ARGUMENT);
                }
        }
    } else {
        ptxlab::raise_registers_to<kConsumerRegisters>();
        const int index = warp_group - PRODUCERS;
        const Results results = {out, lse, Hq};
        const Workspace workspace = {partial, arrivals};
        Consumer consumer = {q,
                             results,
                             workspace,
                             queries + index * kQueryBytes,
                             factors + index * kGroupRows,
                             keys,
                             values,
                             key_barriers,
                             value_barriers,
                             Hq,
                             scheduler.group,
                             window,
                             softmax_scale,
                             shared_tile[index],
                             index};
        consumer.run(scheduler TIMELINE_ARGUMENT);
    }
}
