// gather_tokens: INT8 tokens copied to a row for each of their experts, rows in the order of experts, then of tokens.
//
// Contract   place[m, c] = the number of choices of lower experts + of the same expert by tokens before m; offsets[e] =
//            the number of choices of experts below e; row place[m, c] of the result is token m: x_q, scale, token_sum.
//            chosen in 0 .. EXPERTS - 1, a token's all different. K a multiple of 32, 32768 at most.
// Shows      a sort over all tokens without a barrier of the grid or an atomic: every block counts the choices anew, a
//            warp per expert, while its first token is on its way. At 512 choices that is 16 loads from the L2 a lane.
// Guide      notebooks/guide/kernels_moe.md: constants
// PTX ISA    9.7.13 redux.sync; 9.7.13.13 griddepcontrol.
#include "griddep.cuh"

#ifndef EXPERTS
#define EXPERTS 8
#define CHOSEN 2
#define THREADS 256
#define VECTORS 1
#endif

namespace {

// A token's row: VECTORS x 16 bytes of each thread.
struct Row {
    uint4 v[VECTORS];

    __device__ __forceinline__ void load(const uint4* source, int vectors) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (const int vector = i * THREADS + threadIdx.x; vector < vectors) v[i] = source[vector];
    }
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
    __shared__ int next[EXPERTS];  // row of an expert that the next token takes
    ptxlab::launch_dependents();
    const int each = (M + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * each, end = min(begin + each, M);
    const int vectors = K / 16, lane = threadIdx.x % 32;
    ptxlab::wait_for_predecessors();

    Row row;
    if (begin < end) row.load(x_q + size_t(begin) * vectors, vectors);
    for (int expert = threadIdx.x / 32; expert < EXPERTS; expert += THREADS / 32) {
        int lower = 0, preceding = 0;
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
