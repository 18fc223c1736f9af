// attention_kv4_prefill_mma_sm80: causal attention of any number of queries over a paged cache of 4 bits (QServe section
// 5.1), from Ampere on: the contract of attention_kv4_prefill_sm90.
//
// A block of the launch restores keys and values to f16 in shared memory, once for its 16 * WARPS rows, and multiplies
// on the tensor cores, 16 rows to a warp. Between two barriers it does one and the other: it restores values while it
// computes scores, and the next keys while it adds up values; pages come by cp.async meanwhile. Blocks take tiles until
// none is left. BLOCKS of them share an SM, so that one multiplies where another waits.
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
// PTX ISA    9.7.14.5.8 mma.m16n8k16; 9.7.14.5.15 ldmatrix; 9.7.9.25 cp.async; 9.7.3 ex2, lg2
#include "dequant.cuh"
#include "griddep.cuh"
#include "mma.cuh"
#include "mma_f16.cuh"
#include "own_tokens.cuh"
#include "prefill_rows.cuh"
#include "prefill_tiles.cuh"
#include "timeline.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128  // 64, 128, 256
#define PAGE 64       // tokens of a page: 16, 32, 64
#define BF16 0        // queries and results: 0 f16, 1 bf16
#define KEYS 64       // of a block of keys: 32, 64
#define WARPS 4       // 16 rows each
#define BLOCKS 2      // of the launch that share an SM
#define HEADROOM 8    // a score exceeds what its row's weights are relative to by at most this, as a power of two
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
using Scheduler = ptxlab::TileScheduler<WARPS * 16, KEYS>;
using SoftmaxRows = ptxlab::SoftmaxRows<KEYS>;

constexpr int kThreads = WARPS * 32, kRows = WARPS * 16;
constexpr int kTokenBytes = HEAD_DIM / 2, kPageBytes = PAGE * (kTokenBytes + 4), kPages = KEYS > PAGE ? KEYS / PAGE : 1;
constexpr int kTokenChunks = kTokenBytes / 16, kChunks = KEYS * kTokenChunks;  // of 16 bytes
constexpr int kCopyBytes = KEYS * (kTokenBytes + 4);  // of a block's keys, or values: their integers, then constants
constexpr int kQueryBytes = kRows * HEAD_DIM * 2, kBlockBytes = KEYS * HEAD_DIM * 2;
#if OWN
using OwnKeys = ptxlab::OwnTokens<HEAD_DIM, BF16, KEYS, kThreads, ROTATED>;
using OwnValues = ptxlab::OwnTokens<HEAD_DIM, BF16, KEYS, kThreads, false>;
#else
struct OwnKeys {};
struct OwnValues {};
#endif
static_assert(HEAD_DIM % 64 == 0 && (KEYS == 32 || KEYS == 64) && kChunks % kThreads == 0 && kThreads >= 2 * KEYS);

// Looks up and copies a sequence's pages, keys and values alike.
struct Pages {
    const unsigned char* pool;
    const int* table;
    int Hkv, P;
    int entry = 0;  // of the block that is copied next: lane i has the number of its page i % kPages

    // Return how many tokens of the tile's sequence lie in the cache.
    __device__ __forceinline__ static int cached(const Tile& tile) { return OWN ? tile.old() : tile.context; }

    // Look up the pages of a block of keys; those that it lacks are the sequence's last page again.
    __device__ __forceinline__ void find(const Tile& tile, int block) {
        const int page = block * KEYS / PAGE + threadIdx.x % kPages, last = (cached(tile) - 1) / PAGE;
        entry = table[size_t(tile.sequence) * P + min(page, last)];
    }

    // Start to copy a block's keys (`kv` 0) or values (1), if any lie in the cache.
    __device__ __forceinline__ void copy(unsigned char* stage, int kv, const Tile& tile, int block) const {
        if (!OWN || block * KEYS < cached(tile)) copy_tokens(stage, kv, tile.head, block);
        ptxlab::cp_async_commit();
    }

    __device__ __forceinline__ void copy_tokens(unsigned char* stage, int kv, int head, int block) const {
        const int slot = block * KEYS % PAGE;
        const size_t offset = (size_t(kv) * Hkv + head) * kPageBytes, pitch = size_t(Hkv) * (2 * kPageBytes);
        const unsigned char* head_pages = pool + offset;
#pragma unroll
        for (int i = 0; i < kChunks; i += kThreads) {
            const int chunk = i + threadIdx.x, token = chunk / kTokenChunks;
            const unsigned char* page = head_pages + __shfl_sync(~0u, entry, token / PAGE) * pitch;
            ptxlab::cp_async_16(stage + chunk * 16,
                                page + (slot + token % PAGE) * kTokenBytes + chunk % kTokenChunks * 16, true);
        }
        const int token = threadIdx.x * 4 % KEYS;
        const unsigned char* page = head_pages + __shfl_sync(~0u, entry, token / PAGE) * pitch;
        if (threadIdx.x < KEYS / 4)
            ptxlab::cp_async_16(stage + KEYS * kTokenBytes + token * 4,
                                page + PAGE * kTokenBytes + (slot + token % PAGE) * 4, true);
    }
};

// Restore a block's keys or values to f16 [KEYS][D]: the first `tokens` are there, the others become zeros, or with OWN
// are left alone. The eight elements of a word stay in the order in which they come out, (0, 2, 1, 3, 4, 6, 5, 7):
// queries have the same, and results are put in order when they are stored.
__device__ __forceinline__ void restore(unsigned char* block, const unsigned char* stage, int tokens) {
    constexpr int kPairs = kTokenChunks / 2, kShare = kChunks / kThreads;
    const int token = threadIdx.x / 2 % KEYS, share = threadIdx.x / (2 * KEYS) * kShare;
    if (OWN && token >= tokens) return;
    u32 pair = reinterpret_cast<const u32*>(stage + KEYS * kTokenBytes)[token];
    if (token >= tokens) pair = 0;  // beyond the end there may be anything, and a weight of 0 times NaN is NaN
    const ptxlab::TokenDequantiser dequantiser(pair);
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
        // Eight lanes have two chunks of each of four tokens: these are in all banks, as read and as written.
        const int chunk = (share + i + token * kPairs / 4) % kPairs * 2 + threadIdx.x % 2;
        const uint4 integers = *reinterpret_cast<const uint4*>(stage + token * kTokenBytes + chunk * 16);
        dequantiser.restore_chunk<KEYS>(block, token, chunk, integers);
    }
}

// Restore a block whose first `tokens` are there, from the cache and, with OWN, from the own tokens given beside it.
template <typename Own>
__device__ __forceinline__ void restore(unsigned char* block, const unsigned char* stage, const Own& own_tokens,
                                        const Tile& tile, int tokens) {
    if constexpr (OWN) {
        const int cached = tokens - tile.queries;
        if (cached > 0) restore(block, stage, cached);
        own_tokens.store(block, {max(0, cached), tokens}, tile.start - cached, tile.head);
    } else restore(block, stage, tokens);
}

// Return the address of 16-byte piece 2 k + `half` of a lane's row: the XOR of the swizzle is that of piece `half`,
// moved by k.
template <int ROWS>
__device__ __forceinline__ const unsigned char* piece_pair(const unsigned char* rows, int row, int half, int k) {
    return rows + k / 4 * (ROWS * 128) + (ptxlab::swizzled_piece<ROWS>(row, half) ^ k % 4 * 32);
}

// View four accumulators from d on as those of one MMA.
__device__ __forceinline__ float (&tile_of(float* d))[4] { return *reinterpret_cast<float (*)[4]>(d); }

// Compute the scores of 16 rows, in s[8 n ..] those of 16 keys: queries as operand A, keys, by rows, as operand B.
__device__ __forceinline__ void multiply_keys(float (&s)[KEYS / 2], const unsigned char* queries,
                                              const unsigned char* keys, int first_row) {
    const int lane = threadIdx.x % 32, row = first_row + lane % 16, key = lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) s[i] = 0;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
        u32 a[4], b[4];
        ptxlab::ldmatrix_x4(a, piece_pair<kRows>(queries, row, lane / 16, k));
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) {
            ptxlab::ldmatrix_x4(b, piece_pair<KEYS>(keys, key, lane / 8 % 2, k) + n * 16 * 128);
            ptxlab::mma_f16(tile_of(s + n * 8), a[0], a[1], a[2], a[3], b[0], b[1]);
            ptxlab::mma_f16(tile_of(s + n * 8 + 4), a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
}

// Add weights times values of 16 rows, to o[8 n ..] those of 16 elements: weights as operand A, values, by columns, as
// operand B.
__device__ __forceinline__ void multiply_values(float (&o)[HEAD_DIM / 2], const u32 (&weights)[KEYS / 16][4],
                                                const unsigned char* values) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k)
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; ++n) {
            u32 b[4];
            ptxlab::ldmatrix_x4_transposed(b, piece_pair<KEYS>(values, lane % 16, lane / 16, n) + k * 16 * 128);
            ptxlab::mma_f16(tile_of(o + n * 8), weights[k][0], weights[k][1], weights[k][2], weights[k][3], b[0], b[1]);
            ptxlab::mma_f16(tile_of(o + n * 8 + 4), weights[k][0], weights[k][1], weights[k][2], weights[k][3], b[2],
                            b[3]);
        }
}

// Store a warp's queries for `multiply_keys`; return what softmax begins with.
__device__ __forceinline__ SoftmaxRows load_queries(unsigned char* queries, const unsigned short* q, const Tile& tile,
                                                    int group, int Hq, float softmax_scale) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 2, query_row = tile.first_row + row;
    const unsigned short* elements =
        tile.has(query_row, group) ? q + tile.q_row(query_row, group, Hq) * HEAD_DIM : nullptr;
    const float power = ptxlab::HalfQuery<HEAD_DIM, BF16>(elements).store<kRows, ROTATED>(queries, row);
    __syncwarp();
    SoftmaxRows rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int of_warp = r * 8 + lane / 4;
        rows.factor[r] = softmax_scale * ptxlab::kLog2E * __shfl_sync(~0u, power, of_warp * 2);
        rows.largest[r] = ptxlab::kLowestScore;
        rows.end[r] = tile.visible_end(tile.first_row + threadIdx.x / 32 * 16 + of_warp, group);
    }
    return rows;
}

// Store the results of a warp's rows, f16 or bf16, and their logarithms.
__device__ __forceinline__ void store(unsigned short* out, float* lse, float (&o)[HEAD_DIM / 2],
                                      const SoftmaxRows& rows, const Tile& tile, int group, int Hq) {
    const int lane = threadIdx.x % 32;
    ptxlab::put_in_order(o);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = rows.total(r);
        const int query_row = tile.first_row + threadIdx.x / 32 * 16 + r * 8 + lane / 4;
        if (tile.has(query_row, group)) {
            const bool sees_none = sum == 0;
            const size_t row = tile.q_row(query_row, group, Hq);
            ptxlab::store_row<BF16>(reinterpret_cast<u32*>(out + row * HEAD_DIM) + lane % 4, o, r,
                                    sees_none ? 0 : 1 / sum);
            if (lse && lane % 4 == 0) lse[row] = sees_none ? -ptxlab::infinity() : rows.lse(r, sum);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) attention_kv4_prefill_mma_sm80(
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
    float softmax_scale, int B, int Hq, int Hkv, int P, int window
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
    extern __shared__ __align__(128) unsigned char shared[];
    unsigned char* const queries = shared;
    unsigned char* const keys = queries + kQueryBytes;
    unsigned char* const values = keys + kBlockBytes;
    unsigned char* const copied_keys = values + kBlockBytes;
    unsigned char* const copied_values = copied_keys + kCopyBytes;
    const int group = Hq / Hkv, first_row = threadIdx.x / 32 * 16;
    TIMELINE_THREAD(threadIdx.x % 32 == 0);
    ptxlab::launch_dependents();
    ptxlab::wait_for_predecessors();
    Scheduler scheduler = {starts, lengths, B, Hkv, group, window};
    Pages pages = {pool, table, Hkv, P};
    Tile tile;
    while (scheduler.next(tile)) {
        const int first_end = tile.visible_end(tile.first_row + first_row, group);
        const int last_end = tile.visible_end(tile.first_row + first_row + 15, group);
        const bool sees = tile.begin < tile.end;
        PHASE(LOAD);
        if (sees) {
            pages.find(tile, tile.begin);
            pages.copy(copied_keys, 0, tile, tile.begin);
            pages.copy(copied_values, 1, tile, tile.begin);
            pages.find(tile, tile.begin + 1);
        }
        PHASE(SETUP);
        SoftmaxRows rows = load_queries(queries, q, tile, group, Hq, softmax_scale);
        float o[HEAD_DIM / 2] = {};
        if (sees) {
            PHASE(WAIT_COPY);
            ptxlab::cp_async_wait<1>();
            __syncthreads();
            PHASE(DEQUANTISE);
            restore(keys, copied_keys, own_keys, tile, tile.context - tile.begin * KEYS);
        }
        for (int block = tile.begin; block < tile.end; ++block) {
            const int position = block * KEYS;
            const bool has_next = block + 1 < tile.end;
            float s[KEYS / 2], rescale[2];
            u32 weights[KEYS / 16][4];
            PHASE(WAIT_COPY);
            ptxlab::cp_async_wait<0>();
            __syncthreads();  // the keys are restored, the values copied; those before have been read
            PHASE(DEQUANTISE);
            if (has_next) pages.copy(copied_keys, 0, tile, block + 1);
            restore(values, copied_values, own_values, tile, tile.context - position);
            PHASE(SCORES);
            multiply_keys(s, queries, keys, first_row);
            PHASE(SOFTMAX);
            if (position + KEYS > first_end || (window > 0 && position < last_end - window))
                rows.mask(s, position, window);
            rows.weigh(s, rescale, HEADROOM);
            if (__any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] *= rescale[i / 2 % 2];
            }
            ptxlab::round_weights<KEYS>(weights, s);
            PHASE(WAIT_COPY);
            ptxlab::cp_async_wait<0>();
            __syncthreads();  // the values are restored, the next keys copied; these keys have been read
            PHASE(DEQUANTISE);
            if (has_next) {
                pages.copy(copied_values, 1, tile, block + 1);
                pages.find(tile, block + 2);
                restore(keys, copied_keys, own_keys, tile, tile.context - position - KEYS);
            }
            PHASE(VALUES);
            multiply_values(o, weights, values);
        }
        PHASE(EPILOGUE);
        store(out, lse, o, rows, tile, group, Hq);
        __syncwarp();  // lanes without a row wait for those that store one
    }
}
