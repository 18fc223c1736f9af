// gather_tokens: copy each INT8 token to one row per chosen expert, rows sorted by expert, then by token.
//
// Contract   place[m, c] = choices of lower experts by all tokens + choices of the same expert by tokens before m.
//            offsets[e] = choices of experts below e; offsets[EXPERTS] = M CHOSEN. Row place[m, c] of the results is a
//            copy of token m: x_q, scale, token_sum. chosen in 0 .. EXPERTS - 1, a token's all different. K a multiple
//            of 32, 32768 at most.
// Shows      a counting sort over all tokens without a barrier of the grid or an atomic: every block counts all choices
//            anew, a warp per expert, while the load of its first token is in flight. At 512 choices that is 16 loads
//            from the L2 per lane.
// Guide      notebooks/guide/kernels_moe.md: constants
// PTX ISA    9.7.13 redux.sync; 9.7.13.13 griddepcontrol.
#include "griddep.cuh"

#ifndef EXPERTS
#define EXPERTS 8    // experts of the layer
#define CHOSEN 2     // experts of a token
#define THREADS 256  // of a block
#define VECTORS 1    // 16-byte vectors of a row that a thread copies
#endif

namespace {

// A token's row in the registers of a block: thread t has the 16-byte vectors t, t + THREADS, ..., VECTORS in all.
struct Row {
    uint4 v[VECTORS];

    // Load the thread's vectors of a row of `vectors` vectors.
    __device__ __forceinline__ void load(const uint4* source, int vectors) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (const int vector = i * THREADS + threadIdx.x; vector < vectors) v[i] = source[vector];
    }
    // Store the thread's vectors to a row of `vectors` vectors.
    __device__ __forceinline__ void store(uint4* destination, int vectors) const {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (const int vector = i * THREADS + threadIdx.x; vector < vectors) destination[vector] = v[i];
    }
};

}  // namespace

// No input is __restrict__: a read-only load may be moved ahead of griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(THREADS) gather_tokens(const uint4* x_q,      // s8  [M, K]
                                                                    const float* scale,    // f32 [M]
                                                                    const int* token_sum,  // s32 [M]
                                                                    const int* chosen,     // s32 [M, CHOSEN]
                                                                    int* offsets,          // s32 [EXPERTS + 1]
                                                                    int* place,            // s32 [M, CHOSEN]
                                                                    uint4* row_x_q,        // s8  [M CHOSEN, K]
                                                                    float* row_scale,      // f32 [M CHOSEN]
                                                                    int* row_sum,          // s32 [M CHOSEN]
                                                                    int M, int K) {
    __shared__ int next[EXPERTS];  // the next free row of each expert
    ptxlab::launch_dependents();
    const int block_tokens = (M + gridDim.x - 1) / gridDim.x;
    const int begin = blockIdx.x * block_tokens, end = min(begin + block_tokens, M);
    const int vectors = K / 16, lane = threadIdx.x % 32;
    ptxlab::wait_for_predecessors();

    Row row;
    if (begin < end) row.load(x_q + size_t(begin) * vectors, vectors);
    for (int expert = threadIdx.x / 32; expert < EXPERTS; expert += THREADS / 32) {
        int lower = 0, preceding = 0;  // choices of lower experts; of this expert by tokens before `begin`
#pragma unroll 8
        for (int i = lane; i < M * CHOSEN; i += 32) {
            const int chosen_expert = chosen[i];
            lower += chosen_expert < expert;
            preceding += chosen_expert == expert && i < begin * CHOSEN;
        }
        lower = __reduce_add_sync(~0u, lower), preceding = __reduce_add_sync(~0u, preceding);
        if (lane == 0) next[expert] = lower + preceding;
        if (lane == 0 && blockIdx.x == 0) offsets[expert] = lower;
    }
    if (threadIdx.x == 0 && blockIdx.x == 0) offsets[EXPERTS] = M * CHOSEN;

    for (int m = begin; m < end; ++m) {
        const int* experts = chosen + size_t(m) * CHOSEN;
        __syncthreads();
#pragma unroll
        for (int c = 0; c < CHOSEN; ++c) row.store(row_x_q + size_t(next[experts[c]]) * vectors, vectors);
        if (m + 1 < end) row.load(x_q + size_t(m + 1) * vectors, vectors);
        __syncthreads();
        if (threadIdx.x < CHOSEN) {
            const int row_index = next[experts[threadIdx.x]]++;
            place[size_t(m) * CHOSEN + threadIdx.x] = row_index;
            row_scale[row_index] = scale[m];
            row_sum[row_index] = token_sum[m];
        }
    }
}
