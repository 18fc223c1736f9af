// choose_experts: a router's logits, the softmax of the best CHOSEN of EXPERTS, without a sort (Mixtral).
//
// Contract   logit[m, e] = sum over h of x[m, h] router[e, h] in f32; chosen[m] are the CHOSEN largest, the largest
//            first, of equal ones the lower expert first, a logit that is no number last; share[m] is the softmax over
//            all experts, divided by its sum over the chosen ones, which is the softmax of the chosen logits. x and
//            router f16 or bf16 (IN 0, 1). Logits are added in an order that H alone decides, so that a token has the
//            same bits in any batch and choices are those of `kernels.moe.specs.router_logits`; ex2.approx leaves
//            shares a relative error of 2^-21, and 2^-22 more per unit of its argument.
// Shows      EXPERTS x PARTS dot products of 1024 values, a warp each; where a block has as many warps, weights stay
//            in registers from before the wait for the kernel before, for all of the block's tokens.
// Guide      notebooks/guide/kernels_moe.md: order of the sum, constants
// PTX ISA    9.7.3 fma, ex2; 9.7.13 vote.sync, redux.sync; 9.7.13.13 griddepcontrol.
#include "griddep.cuh"
#include "mma_f16.cuh"
#include "quantize_row.cuh"

#ifndef IN
#define IN 0
#define EXPERTS 8
#define CHOSEN 2
#define PARTS 4
#endif

namespace {

constexpr int UNITS = EXPERTS * PARTS, WARPS = UNITS < 32 ? UNITS : 32, SETS = (EXPERTS + 31) / 32;
constexpr float LOG2_E = 1.44269504f;

// 1024 values of a row, 32 of each lane.
struct Part {
    ptxlab::Chunk<IN> chunk[2];

    __device__ __forceinline__ Part(const uint4* row, int index, int H) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int chunk_index = index * 64 + i * 32 + threadIdx.x % 32;
            chunk[i] = ptxlab::load_chunk<IN>(row, chunk_index, chunk_index < H / 16);
        }
    }

    // By a whole warp.
    __device__ __forceinline__ float dot(const Part& other) const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 32; ++i) sum = fmaf(chunk[i / 16][i % 16], other.chunk[i / 16][i % 16], sum);
        return ptxlab::warp_sum(sum);
    }
};

// Floats in the order of integers, all of them above 1, and 1 for what is no number.
__device__ __forceinline__ unsigned ordered(float x) {
    const unsigned bits = __float_as_uint(x);
    return x == x ? bits ^ (bits >> 31 ? ~0u : 1u << 31) : 1;
}
__device__ __forceinline__ float float_of(unsigned key) { return __uint_as_float(key ^ (key >> 31 ? 1u << 31 : ~0u)); }

// By a warp, of logits in parts [EXPERTS][PARTS].
__device__ __forceinline__ void choose(const float* parts, int* chosen, float* share) {
    const int lane = threadIdx.x % 32;
    unsigned key[SETS];  // of experts lane, 32 + lane; 0 where there is none, or none any more
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
        const int expert = set * 32 + lane;
        float logit = 0;
        for (int index = 0; index < PARTS && expert < EXPERTS; ++index) logit += parts[expert * PARTS + index];
        key[set] = expert < EXPERTS ? ordered(logit) : 0;
    }
    float largest = 0, own_logit = 0;  // logits: of all, of the choice that this lane writes
    int expert = 0;
#pragma unroll
    for (int choice = 0; choice < CHOSEN; ++choice) {
        unsigned largest_key = key[0];
        for (int set = 1; set < SETS; ++set) largest_key = max(largest_key, key[set]);
        largest_key = ptxlab::warp_max(largest_key);
        int best = EXPERTS;
#pragma unroll
        for (int set = SETS - 1; set >= 0; --set) {
            const unsigned equal = __ballot_sync(~0u, key[set] == largest_key);
            if (equal) best = set * 32 + __ffs(equal) - 1;
        }
#pragma unroll
        for (int set = 0; set < SETS; ++set)
            if (set * 32 + lane == best) key[set] = 0;
        if (choice == 0) largest = float_of(largest_key);
        if (choice == lane) expert = best, own_logit = float_of(largest_key);
    }
    const float weight = ptxlab::exp2_approx((own_logit - largest) * LOG2_E);
    float total = 0;
#pragma unroll
    for (int choice = 0; choice < CHOSEN; ++choice) total += __shfl_sync(~0u, weight, choice);
    if (lane < CHOSEN) {
        chosen[lane] = expert;
        share[lane] = weight * ptxlab::reciprocal(total);
    }
}

}  // namespace

// No input is __restrict__: ptxas moves read-only loads across griddepcontrol.wait, as it does in rmsnorm_quantize.
extern "C" __global__ void __launch_bounds__(32 * WARPS) choose_experts(const uint4* x,       // [M, H], by IN
                                                                        const uint4* router,  // [EXPERTS, H], by IN
                                                                        int* chosen,          // s32 [M, CHOSEN]
                                                                        float* share,         // f32 [M, CHOSEN]
                                                                        int M, int H) {
    __shared__ float parts[2][UNITS];  // of two tokens in turn, so that one barrier is enough
    ptxlab::launch_dependents();
    const int warp = threadIdx.x / 32, vectors = H / 8;
    Part router_part(router + warp / PARTS * vectors, warp % PARTS, H);
    ptxlab::wait_for_predecessors();

    for (int m = blockIdx.x, buffer = 0; m < M; m += gridDim.x, buffer ^= 1) {
        for (int dot_index = warp; dot_index < UNITS; dot_index += WARPS) {
            const float sum = router_part.dot(Part(x + size_t(m) * vectors, dot_index % PARTS, H));
            if (threadIdx.x % 32 == 0) parts[buffer][dot_index] = sum;
            if (UNITS > WARPS) {
                const int next = dot_index + WARPS < UNITS ? dot_index + WARPS : warp;
                router_part = Part(router + next / PARTS * vectors, next % PARTS, H);
            }
        }
        __syncthreads();
        if (warp == 0) choose(parts[buffer], chosen + size_t(m) * CHOSEN, share + size_t(m) * CHOSEN);
    }
}
