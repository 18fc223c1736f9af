// What follows the main loop of every wgmma GEMM: the blocks of a cluster, each with a slice of K, add up their tiles, and
// the sums go to Y. A tile is 64 rows of W per warp group x TOKENS; a *piece* is 64 rows x 8 tokens: four accumulators of
// each of the 128 threads of a warp group.
//
// Sum      pieces are dealt to the blocks of the cluster; a block sends the pieces that it does not own to their owner,
//          registers -> remote shared memory as they are (st.async, 16 bytes per thread), and adds what it receives to its
//          own registers. Integers: the order does not matter. One mbarrier per block counts the bytes that come.
// Store    through shared memory, from which 8 neighbours in a row of Y go out at once: 32 tokens at a time, int32
//          [32][PITCH], written by fragment without bank conflicts (lane 4 g + t at bank 8 t + g), read by rows.
//          NARROW, f16 and bf16: rounded before that, 64 tokens at a time, [64][64] transposed by stmatrix; 16-byte columns
//          at their number xor the token's, without conflicts either way: a quarter of the traffic.
#pragma once
#include "cluster.cuh"
#include "output.cuh"

namespace ptxlab {

// Only the 128 threads of one of two warp groups; barrier 0 is the whole block's.
__device__ __forceinline__ void warp_group_sync(int group) {
    if (group == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
    else asm volatile("bar.sync 2, 128;" ::: "memory");
}

// Where the sums go, and what makes numbers of them.
struct Output {
    void* y;               // [M, N]
    const float* x_scale;  // [M]
    const float* w_scale;  // [N]
    const float* bias;     // [N], or null
    int M, N;
};

// NARROW: outputs of 16 bits are rounded before they go through shared memory, where there are 32 tokens and more.
template <int WARP_GROUPS, int TOKENS, int BLOCKS, bool NARROW = false>
struct Epilogue {
    static constexpr int PER_GROUP = TOKENS / 8, PIECES = WARP_GROUPS * PER_GROUP, OWNED = PIECES / BLOCKS;
    static constexpr int CHUNK = TOKENS < 32 ? TOKENS : 32, PITCH = 68;
    static constexpr int RECEIVE_BYTES = (BLOCKS - 1) * OWNED * 2048;
    static_assert(PIECES % BLOCKS == 0, "a piece has one owner");

    int4* received;  // [BLOCKS - 1][OWNED][128]
    int* tile;       // [WARP_GROUPS][CHUNK][PITCH], at a multiple of 16 bytes
    u64* arrived;    // completes when everything that this block is to receive is there
    int rank;

    // Whether the sums of piece `j` of a warp group come to be in this block.
    __device__ __forceinline__ bool owns(int group, int j) const {
        return (NARROW && BLOCKS == 1) || (group * PER_GROUP + j) / OWNED == rank;  // the compiler does not see the first
    }

    // By one thread, before the cluster's barrier.
    __device__ __forceinline__ void expect() const {
        if constexpr (BLOCKS > 1) {
            mbarrier_init(arrived, 1);
            mbarrier_arrive_expect(arrived, RECEIVE_BYTES);
        }
    }

    // By all 128 threads, after the cluster's barrier: the pieces of rows 64 * group .. that other blocks own.
    __device__ __forceinline__ void send(const int (&acc)[TOKENS / 2], int group, int thread) const {
        if constexpr (BLOCKS > 1) {
#pragma unroll
            for (int j = 0; j < PER_GROUP; ++j) {
                const int piece = group * PER_GROUP + j, owner = piece / OWNED;
                if (owner == rank) continue;
                const int4* slot = received + ((rank - (rank > owner)) * OWNED + piece % OWNED) * 128 + thread;
                store_async_16(address_in_block(slot, owner), acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3],
                               address_in_block(arrived, owner));
            }
        }
    }

    // By all 128 threads, when all pieces are sent: whole sums for those that this block owns.
    __device__ __forceinline__ void receive(int (&acc)[TOKENS / 2], int group, int thread) const {
        if constexpr (BLOCKS > 1) {
            mbarrier_wait(arrived, 0);
#pragma unroll
            for (int j = 0; j < PER_GROUP; ++j) {
                const int piece = group * PER_GROUP + j;
                if (!owns(group, j)) continue;
#pragma unroll
                for (int from = 0; from < BLOCKS - 1; ++from) {
                    const int4 more = received[(from * OWNED + piece % OWNED) * 128 + thread];
                    acc[4 * j] += more.x, acc[4 * j + 1] += more.y, acc[4 * j + 2] += more.z, acc[4 * j + 3] += more.w;
                }
            }
        }
    }

    // By all threads of warp group `group`, whose 64 rows begin at n0: the owned pieces become outputs.
    template <int KIND>
    __device__ __forceinline__ void store(const int (&acc)[TOKENS / 2], int group, int thread, const Output& out, int token0, int n0) const {
        if constexpr (NARROW && KIND < 2 && TOKENS >= 32) return store_16<KIND>(acc, group, thread, out, token0, n0);
        int* mine = tile + group * CHUNK * PITCH;
        const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
#pragma unroll
        for (int chunk = 0; chunk < TOKENS / CHUNK; ++chunk) {
            warp_group_sync(group);  // the chunk before has been read
#pragma unroll
            for (int i = 0; i < CHUNK / 8; ++i) {
                const int* d = acc + (chunk * CHUNK / 8 + i) * 4;
#pragma unroll
                for (int e = 0; e < 4; ++e) mine[(i * 8 + column + e % 2) * PITCH + row + e / 2 * 8] = d[e];
            }
            warp_group_sync(group);
#pragma unroll
            for (int i = thread; i < CHUNK * 8; i += 128) {
                const int token = chunk * CHUNK + i / 8, n = n0 + i % 8 * 8;
                if (owns(group, token / 8) && token0 + token < out.M && n < out.N)
                    store_8<KIND>(out.y, size_t(token0 + token) * out.N + n, mine + i / 8 * PITCH + i % 8 * 8,
                                 out.x_scale[token0 + token], out.w_scale + n, out.bias ? out.bias + n : nullptr);
            }
        }
    }

    // The same for outputs of 16 bits.
    template <int KIND>
    __device__ __forceinline__ void store_16(const int (&acc)[TOKENS / 2], int group, int thread, const Output& out, int token0,
                                             int n0) const {
        constexpr int TURN = TOKENS < 64 ? TOKENS : 64;
        char* mine = reinterpret_cast<char*>(tile + group * CHUNK * PITCH);  // [TURN][8] columns of 16 bytes
        const auto column = [&](int token, int number) { return mine + token * 128 + (number ^ token % 8) * 16; };
        const int lane = thread % 32, row = n0 + thread / 32 * 16 + lane / 4;
        float w_scale[2] = {}, bias[2] = {-0.0f, -0.0f};                     // of rows r, r + 8; adding -0 changes nothing
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (row + 8 * i < out.N) w_scale[i] = out.w_scale[row + 8 * i];
            if (out.bias && row + 8 * i < out.N) bias[i] = out.bias[row + 8 * i];
        }
#pragma unroll
        for (int turn = 0; turn < TOKENS / TURN; ++turn) {
            float x_scale[TURN / 8][2];
#pragma unroll
            for (int i = 0; i < TURN / 4; ++i) {
                const int token = token0 + turn * TURN + i / 2 * 8 + lane % 4 * 2 + i % 2;
                x_scale[i / 2][i % 2] = token < out.M ? out.x_scale[token] : 0;
            }
            warp_group_sync(group);  // the turn before has been read
#pragma unroll
            for (int i = 0; i < TURN / 8; ++i) {
                const int j = turn * TURN / 8 + i;
                if (!owns(group, j)) continue;
                unsigned pair[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float v[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        v[e] = __fadd_rn(__fmul_rn(__fmul_rn(float(acc[4 * j + 2 * r + e]), x_scale[i][e]), w_scale[r]), bias[r]);
                    pair[r] = rounded_pair<KIND>(v[0], v[1]);
                }
                stmatrix_x2_trans(column(i * 8 + lane % 8, thread / 32 * 2 + lane / 8 % 2), pair[0], pair[1]);
            }
            warp_group_sync(group);
            uint4 eight[TURN / 16];
#pragma unroll
            for (int i = 0; i < TURN / 16; ++i)
                if (owns(group, turn * TURN / 8 + i * 2 + thread / 64))
                    eight[i] = *reinterpret_cast<const uint4*>(column(i * 16 + thread / 8, thread % 8));
#pragma unroll
            for (int i = 0; i < TURN / 16; ++i) {
                const int token = token0 + turn * TURN + i * 16 + thread / 8, n = n0 + thread % 8 * 8;
                if (owns(group, turn * TURN / 8 + i * 2 + thread / 64) && token < out.M && n < out.N)
                    *reinterpret_cast<uint4*>(static_cast<unsigned short*>(out.y) + size_t(token) * out.N + n) = eight[i];
            }
        }
    }
};

}  // namespace ptxlab
