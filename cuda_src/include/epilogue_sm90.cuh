// What follows the main loop of every wgmma GEMM: the blocks of a cluster, each with a slice of K, add up their tiles, and
// the sums go to Y. A tile is 64 rows of W per warp group x TOKENS; a *piece* is 64 rows x 8 tokens: four accumulators of
// each of the 128 threads of a warp group.
//
// Sum      pieces are dealt to the blocks of the cluster; a block sends the pieces that it does not own to their owner,
//          registers -> remote shared memory as they are (st.async, 16 bytes per thread), and adds what it receives to
//          its own registers. Integers: the order does not matter. One mbarrier per block counts the bytes that come.
// Store    AT_A_TIME tokens at a time through shared memory, int32 [tokens][PITCH]: written by fragment without bank
//          conflicts (lane 4 g + t at bank 8 t + g), read by rows, 8 neighbours per thread, 16 bytes of f16 at least.
#pragma once
#include "cluster.cuh"
#include "named_barrier.cuh"
#include "output.cuh"

namespace ptxlab {

// Destination of the sums, and what scales them.
struct Output {
    void* y;               // [M, N]
    const float* x_scale;  // [M]
    const float* w_scale;  // [N]
    const float* bias;     // [N], or null
    int M, N;
};

template <int WARP_GROUPS, int TOKENS, int BLOCKS>
struct Epilogue {
    static constexpr int PER_GROUP = TOKENS / 8, PIECES = WARP_GROUPS * PER_GROUP,
                         OWNED = (PIECES + BLOCKS - 1) / BLOCKS;
    static constexpr int RECEIVE_BYTES = (BLOCKS - 1) * OWNED * 2048;
    // a block owns pieces of every warp group, so that all groups store equally much
    static constexpr bool SHARED_OUT = PER_GROUP % BLOCKS == 0;

    // Rank of the block that adds up and stores piece `j` of a warp group, and the piece's index among that block's.
    static __device__ __forceinline__ int owner(int group, int j) {
        return SHARED_OUT ? j / (PER_GROUP / BLOCKS) : (group * PER_GROUP + j) / OWNED;
    }
    static __device__ __forceinline__ int owned_index(int group, int j) {
        return SHARED_OUT ? group * (PER_GROUP / BLOCKS) + j % (PER_GROUP / BLOCKS) : (group * PER_GROUP + j) % OWNED;
    }

    int4* received;  // [BLOCKS - 1][OWNED][128]
    int* tile;       // [WARP_GROUPS][CHUNK][PITCH] of `store`
    u64* arrived;    // completes when all pieces that this block receives are there
    int rank;

    // Initialise `arrived` for the bytes that this block receives. By one thread, before the cluster's barrier.
    __device__ __forceinline__ void expect() const {
        if constexpr (BLOCKS > 1) {
            mbarrier_init(arrived, 1);
            const int owned_pieces = SHARED_OUT ? OWNED : max(0, min(OWNED, PIECES - rank * OWNED));
            mbarrier_arrive_expect(arrived, (BLOCKS - 1) * owned_pieces * 2048);
        }
    }

    // Send the pieces of rows 64 * group .. that other blocks own to their owners. By all 128 threads, after the
    // cluster's barrier.
    __device__ __forceinline__ void send(const int (&acc)[TOKENS / 2], int group, int thread) const {
        if constexpr (BLOCKS > 1) {
#pragma unroll
            for (int j = 0; j < PER_GROUP; ++j) {
                const int owner_rank = owner(group, j);
                if (owner_rank == rank) continue;
                const int4* slot =
                    received + ((rank - (rank > owner_rank)) * OWNED + owned_index(group, j)) * 128 + thread;
                store_async_16(address_in_block(slot, owner_rank), acc[4 * j], acc[4 * j + 1], acc[4 * j + 2],
                               acc[4 * j + 3], address_in_block(arrived, owner_rank));
            }
        }
    }

    // Add the other blocks' pieces to those that this block owns. By all 128 threads, after `send`.
    __device__ __forceinline__ void receive(int (&acc)[TOKENS / 2], int group, int thread) const {
        if constexpr (BLOCKS > 1) {
            mbarrier_wait(arrived, 0);
#pragma unroll
            for (int j = 0; j < PER_GROUP; ++j) {
                if (owner(group, j) != rank) continue;
#pragma unroll
                for (int sender = 0; sender < BLOCKS - 1; ++sender) {
                    const int4 addend = received[(sender * OWNED + owned_index(group, j)) * 128 + thread];
                    acc[4 * j] += addend.x, acc[4 * j + 1] += addend.y, acc[4 * j + 2] += addend.z,
                        acc[4 * j + 3] += addend.w;
                }
            }
        }
    }

    // Scale and store the owned pieces of warp group `group`, whose 64 rows begin at n0, AT_A_TIME tokens at a time
    // through shared memory. By all threads of the group.
    template <int KIND, int AT_A_TIME, int PITCH>
    __device__ __forceinline__ void store(const int (&acc)[TOKENS / 2], int group, int thread, const Output& out,
                                          int token0, int n0) const {
        static_assert(AT_A_TIME % 8 == 0 && PITCH >= 64 && PITCH % 32 == 4, "no bank conflicts");
        constexpr int CHUNK = TOKENS < AT_A_TIME ? TOKENS : AT_A_TIME;
        int* group_tile = tile + group * CHUNK * PITCH;
        const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
#pragma unroll
        for (int chunk = 0; chunk < TOKENS / CHUNK; ++chunk) {
            sync_one_of_two(group);  // the chunk before has been read
#pragma unroll
            for (int i = 0; i < CHUNK / 8; ++i) {
                const int* d = acc + (chunk * CHUNK / 8 + i) * 4;
#pragma unroll
                for (int e = 0; e < 4; ++e) group_tile[(i * 8 + column + e % 2) * PITCH + row + e / 2 * 8] = d[e];
            }
            sync_one_of_two(group);
#pragma unroll
            for (int i = thread; i < CHUNK * 8; i += 128) {
                const int token = chunk * CHUNK + i / 8, n = n0 + i % 8 * 8;
                const bool owned = owner(group, token / 8) == rank;
                if (owned && token0 + token < out.M && n < out.N)
                    store_8<KIND>(out.y, size_t(token0 + token) * out.N + n, group_tile + i / 8 * PITCH + i % 8 * 8,
                                  out.x_scale[token0 + token], out.w_scale + n, out.bias ? out.bias + n : nullptr);
            }
        }
    }
};

}  // namespace ptxlab
