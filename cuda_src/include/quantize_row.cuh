// What kernels share that quantise a row (a token) to INT8: its floats in chunks of 16, a thread each; numbers that all
// warps of the row find together, be they of one block or of a cluster's; IEEE quotients; and the orders that GEMMs
// read (notebooks/guide/kernels_quantize.md).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cluster.cuh"
#include "pack.cuh"
#include "reciprocal.cuh"
#include "reduce.cuh"

namespace ptxlab {

// --- 16 successive floats --------------------------------------------------------------------------------------------

// 16 successive floats as they are stored: f16, bf16 or f32 (KIND 0, 1, 2).
template <int KIND>
struct Chunk {
    static constexpr int VECTORS = KIND == 2 ? 4 : 2;  // of 16 bytes
    uint4 v[VECTORS];

    __device__ __forceinline__ float operator[](int i) const {
        const unsigned* words = reinterpret_cast<const unsigned*>(v);
        if (KIND == 2) return __uint_as_float(words[i]);
        const unsigned half = words[i / 2] >> (i % 2 * 16);
        return KIND == 1 ? __uint_as_float(half << 16)
                         : __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
    }
};

template <int KIND>
__device__ __forceinline__ Chunk<KIND> load_chunk(const uint4* row, int chunk, bool inside) {
    Chunk<KIND> c = {};
    const uint4* vectors = row + chunk * c.VECTORS;
    if (inside) {
#pragma unroll
        for (int i = 0; i < c.VECTORS; ++i) c.v[i] = vectors[i];
    }
    return c;
}

// 16 successive floats in registers.
struct Floats {
    float v[16];

    __device__ __forceinline__ float operator[](int i) const { return v[i]; }
};

// --- one number from all warps of a row ------------------------------------------------------------------------------

__device__ __forceinline__ unsigned warp_max(unsigned value) { return __reduce_max_sync(0xffffffffu, value); }
__device__ __forceinline__ int warp_sum(int value) { return __reduce_add_sync(0xffffffffu, value); }

// Add up a warp's floats in a fixed order: two runs give the same bits.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
    return value;
}

// Exchanges NUMBERS numbers of each warp of a row through shared memory: a row has BLOCKS blocks, a cluster if more
// than one, of WIDTH threads. To another block they go by st.async, which a barrier of that block counts: unlike a
// barrier of the cluster it does not wait for stores to global memory. Where threads have THREAD_CHUNKS chunks, a
// warp sends numbers of each of them, as so many warps would that have one.
template <int BLOCKS, int WIDTH, int NUMBERS, int THREAD_CHUNKS = 1>
struct Exchange {
    static_assert(BLOCKS == 1 || THREAD_CHUNKS == 1, "threads of a cluster have one chunk");
    static constexpr int WARPS = BLOCKS * WIDTH / 32 * THREAD_CHUNKS;
    unsigned numbers[NUMBERS][WARPS];  // in the order of blocks and warps, those of the next chunks behind them
    u64 barrier;

    __device__ __forceinline__ void open() {
        mbarrier_init(&barrier, 1);
        mbarrier_arrive_expect(&barrier, sizeof(numbers));
    }

    // Send number `which` of a warp's chunk to all blocks, or to the first `receivers`, each of which waits before it
    // ends. By all warps.
    __device__ __forceinline__ void send(int which, unsigned number, int receivers = BLOCKS, int chunk = 0) {
        const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if constexpr (BLOCKS == 1) {
            if (lane == 0) numbers[which][chunk * (WIDTH / 32) + warp] = number;
        } else if (lane < receivers) {
            const unsigned* own_number = numbers[which] + cluster_rank() * (WIDTH / 32) + warp;
            store_async(address_in_block(own_number, lane), number, address_in_block(&barrier, lane));
        }
    }

    __device__ __forceinline__ void wait() {
        if constexpr (BLOCKS == 1) __syncthreads();
        else mbarrier_wait(&barrier, 0);
    }

    // Reduce number `which` over all warps of the row. By a whole warp.
    __device__ __forceinline__ unsigned max_of(int which) const {
        unsigned largest = 0;
        for_each_number(which, [&](unsigned number) { largest = max(largest, number); });
        return warp_max(largest);
    }
    __device__ __forceinline__ int sum_of(int which) const {
        int sum = 0;
        for_each_number(which, [&](unsigned number) { sum += int(number); });
        return warp_sum(sum);
    }
    __device__ __forceinline__ float float_sum_of(int which) const {
        float sum = 0;
        for_each_number(which, [&](unsigned number) { sum += __uint_as_float(number); });
        return warp_sum(sum);
    }

private:
    // Call use(number) for number `which` of every warp of the row, lane l for those of warps l, l + 32 ..
    template <typename Function>
    __device__ __forceinline__ void for_each_number(int which, const Function& use) const {
#pragma unroll
        for (int i = 0; i < WARPS; i += 32)
            if (i + threadIdx.x % 32 < WARPS) use(numbers[which][i + threadIdx.x % 32]);
    }
};

// Initialise the barriers of two exchanges, and arrive at the cluster's barrier: another block may send to them only
// when they are initialised, so every block calls wait_for_open before its first `send`.
template <int BLOCKS, typename First, typename Second>
__device__ __forceinline__ void open(First& first_exchange, Second& second_exchange) {
    if (BLOCKS == 1) return;
    if (threadIdx.x == 0) {
        first_exchange.open();
        second_exchange.open();
        fence_mbarrier_init();
    }
    cluster_arrive();
}
// Wait until every block of the cluster has called `open`.
template <int BLOCKS>
__device__ __forceinline__ void wait_for_open() {
    if (BLOCKS > 1) cluster_wait();
}

// --- to INT8 ---------------------------------------------------------------------------------------------------------

// Return the largest magnitude of 16 values as bits, which are ordered like numbers; infinity and NaN lie above them
// all.
template <typename Values>
__device__ __forceinline__ unsigned magnitude(const Values& x) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = max_nan(largest, fabsf(x[i]));
    return __float_as_uint(largest);
}

// Return the scale of a row with this largest magnitude: 1 where it would be no normal f32.
__device__ __forceinline__ float scale_of(float extent) {
    const float quotient = __fdiv_rn(extent, 127.0f);
    return quotient < 0x1p-126f ? 1.0f : quotient;
}

// Return the factor that keeps the remainders of a row of small numbers from underflowing when they are divided by its
// scale.
__device__ __forceinline__ float lift_of(float scale) { return scale < 0x1p-64f ? 0x1p64f : 1.0f; }

// Divides by `scale` as IEEE rounds it, for a scale of 2^-64 or more, with one reciprocal for the whole row: the second
// correction starts within one unit in the last place, where the remainder is exact (Markstein).
struct Divider {
    float scale, reciprocal;

    __device__ __forceinline__ explicit Divider(float s) : Divider(s, ptxlab::reciprocal(s)) {}
    __device__ __forceinline__ Divider(float s, float r) : scale(s), reciprocal(r) {}  // r: 1 / s as IEEE rounds it

    // Return x / scale as f32: not an integer yet.
    __device__ __forceinline__ float operator()(float x) const {
        float q = x * reciprocal;
        q = fmaf(fmaf(-scale, q, x), reciprocal, q);
        return fmaf(fmaf(-scale, q, x), reciprocal, q);
    }
};

// Quantise a chunk's 16 values, lifted as the scale is. 1.5 * 2^23 leaves no bits behind the point: the low byte is the
// rounded quotient.
template <typename Values>
__device__ __forceinline__ uint4 quantized(const Values& x, const Divider& divide, float lift = 1) {
    unsigned words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        int q[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) q[i] = __float_as_int(divide(x[4 * w + i] * lift) + SHIFT);
        words[w] = bytes_of<0>(q);
    }
    return {words[0], words[1], words[2], words[3]};
}

// Quantise floats in registers by the row's scale.
__device__ __forceinline__ uint4 quantized(Floats& x, float scale) {
    const float lift = lift_of(scale);
    if (lift != 1) {
#pragma unroll
        for (int i = 0; i < 16; ++i) x.v[i] *= lift;
    }
    return quantized(x, Divider(scale * lift));
}

// --- to its place ----------------------------------------------------------------------------------------------------

// Swap `b` of the lower lane with `a` of the upper lane of each pair of lanes that differ in `mask`.
__device__ __forceinline__ void exchange(unsigned& a, unsigned& b, int mask) {
    const bool upper = threadIdx.x & mask;
    const unsigned received = __shfl_xor_sync(0xffffffffu, upper ? a : b, mask);
    (upper ? a : b) = received;
}

// Transpose a quad's words: word j of lane i becomes word i of lane j.
__device__ __forceinline__ void transpose_in_quad(uint4& w) {
    exchange(w.x, w.y, 1);
    exchange(w.z, w.w, 1);
    exchange(w.x, w.z, 2);
    exchange(w.y, w.w, 2);
}

// Store a chunk. By all lanes, of which two neighbours have chunks 2n and 2n + 1, both inside or neither: they exchange
// halves, so that each of their two stores fills a sector of 32 bytes, which the L2 would otherwise be sent by halves.
template <int KIND>
__device__ __forceinline__ void store_chunk(uint4* row, int chunk, bool inside, Chunk<KIND> c) {
    static_assert(c.VECTORS == 2, "f16 or bf16");
    exchange(c.v[0].x, c.v[1].x, 1);
    exchange(c.v[0].y, c.v[1].y, 1);
    exchange(c.v[0].z, c.v[1].z, 1);
    exchange(c.v[0].w, c.v[1].w, 1);
    // An even lane has the first halves of both chunks, an odd one the second.
    uint4* destination = row + 2 * chunk - threadIdx.x % 2;
    if (inside) destination[0] = c.v[0], destination[2] = c.v[1];
}

// An order of quantised activations: row-major, fragments, swizzled tiles of `rows` tokens (ORDER 0, 1, 2), padded to
// whole tiles.
template <int ORDER>
struct Order {
    static constexpr int SPAN = ORDER == 2 ? 128 : ORDER == 1 ? 64 : 32;  // channels of a tile
    int chunks, tokens, rows;                                             // of a token; with the padding; of a tile

    __device__ __forceinline__ Order(int K, int tokens, int rows)
        : chunks((K + SPAN - 1) / SPAN * (SPAN / 16)), tokens(tokens), rows(rows) {}

    // Return where a chunk of token m goes, in 16-byte units.
    __device__ __forceinline__ size_t index_of(int m, int chunk) const {
        if (ORDER == 1) return (size_t(chunk / 4) * (tokens / 8) + m / 8) * 32 + m % 8 * 4 + chunk % 4;
        if (ORDER == 2)
            return (size_t(m / rows * (chunks / 8) + chunk / 8) * rows + m % rows) * 8 + (chunk % 8 ^ (m % rows & 7));
        return size_t(m) * chunks + chunk;
    }

    // Store a chunk: thread t of a warp has the chunk 32 n + t of some n; all lanes call, whether they have one to
    // store or not.
    __device__ __forceinline__ void store(uint4* x_q, int m, int chunk, uint4 q) const {
        if (ORDER == 1) transpose_in_quad(q);
        if (chunk < chunks) x_q[index_of(m, chunk)] = q;
    }
};

// Quantise and store a thread's chunks of a row, WIDTH apart from `chunk` on; the block's first thread stores the row's
// scale and sum. The last that a block does: those of a cluster but the first only send their sums to it and return.
// `row_exists`: whether there is such a row.
template <int BLOCKS, int WIDTH, int THREAD_CHUNKS, int ORDER, typename Total>
__device__ __forceinline__ void write_row(Floats (&x)[THREAD_CHUNKS], float s, Total& total, const Order<ORDER>& order,
                                          int m, int chunk, bool row_exists, uint4* x_q, float* scale, int* token_sum) {
    int thread_sum = 0;
#pragma unroll
    for (int i = 0; i < THREAD_CHUNKS; ++i) {
        const uint4 q = quantized(x[i], s);
        order.store(x_q, m, chunk + i * WIDTH, q);
        thread_sum = sum_of_bytes(q, thread_sum);
    }
    total.send(0, warp_sum(thread_sum), 1);
    if (blockIdx.x % BLOCKS) return;
    total.wait();
    const int sum = total.sum_of(0);
    if (threadIdx.x == 0 && row_exists) {
        scale[m] = s;
        token_sum[m] = sum;
    }
}

}  // namespace ptxlab
