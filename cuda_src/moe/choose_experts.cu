// choose_experts: a router's logits, the best CHOSEN of EXPERTS and their softmax, without a sort (Mixtral).
//
// Contract   logit[m, e] = sum over h of x[m, h] router[e, h] in f32. chosen[m] are the experts of the CHOSEN largest
//            logits, the largest first; of equal logits the lower expert comes first, a NaN comes last. share[m] is the
//            softmax over all experts divided by its sum over the chosen ones, which is the softmax of the chosen
//            logits. x and router f16 or bf16 (IN 0, 1). The order in which a logit is added up depends on H alone, so
//            a token has the same bits in any batch, and choices are those of `kernels.moe.specs.router_logits`.
//            ex2.approx leaves shares a relative error of 2^-21, and 2^-22 more per unit of its argument.
// Shows      per token EXPERTS x PARTS dot products of 1024 values, each computed by one warp. If a block has a warp
//            for each, the warp loads its weights before griddepcontrol.wait and keeps them in registers for all tokens
//            of the block.
// Guide      notebooks/guide/kernels_moe.md: order of the sum, constants
// PTX ISA    9.7.3 fma, ex2; 9.7.13 vote.sync, redux.sync; 9.7.13.13 griddepcontrol.
#include "griddep.cuh"
#include "mma_f16.cuh"
#include "quantize_row.cuh"

#ifndef IN
#define IN 0       // x, router: 0 f16, 1 bf16
#define EXPERTS 8  // experts of the layer, at most 64
#define CHOSEN 2   // experts of a token
#define PARTS 4    // parts of 1024 values of a row: ceil(H / 1024)
#endif

namespace {

// Dot products of a token; warps of a block; experts whose keys a lane of `choose` holds.
constexpr int UNITS = EXPERTS * PARTS, WARPS = UNITS < 32 ? UNITS : 32, SETS = (EXPERTS + 31) / 32;
constexpr float LOG2_E = 1.44269504f;

// Part `index` of a row of H values, 1024 values: two chunks of 16 in each lane, zeros past H.
struct Part {
    ptxlab::Chunk<IN> chunk[2];

    __device__ __forceinline__ Part(const uint4* row, int index, int H) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int chunk_index = index * 64 + i * 32 + threadIdx.x % 32;
            chunk[i] = ptxlab::load_chunk<IN>(row, chunk_index, chunk_index < H / 16);
        }
    }

    // Return the dot product of two parts in every lane. For a whole warp.
    __device__ __forceinline__ float dot(const Part& other) const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 32; ++i) sum = fmaf(chunk[i / 16][i % 16], other.chunk[i / 16][i % 16], sum);
        return ptxlab::warp_sum(sum);
    }
};

// Map a float to an unsigned key of the same order: NaN to 1, all numbers to keys above 1.
__device__ __forceinline__ unsigned sort_key(float x) {
    const unsigned bits = __float_as_uint(x);
    return x == x ? bits ^ (bits >> 31 ? ~0u : 1u << 31) : 1;
}
// Invert sort_key.
__device__ __forceinline__ float key_to_float(unsigned key) {
    return __uint_as_float(key ^ (key >> 31 ? 1u << 31 : ~0u));
}

// Add up each logit's parts [EXPERTS][PARTS], then write the CHOSEN best experts and their softmax. For a whole warp.
__device__ __forceinline__ void choose(const float* parts, int* chosen, float* share) {
    const int lane = threadIdx.x % 32;
    unsigned key[SETS];  // of experts lane, 32 + lane; 0: no such expert, or already chosen
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
        const int expert = set * 32 + lane;
        float logit = 0;
        for (int index = 0; index < PARTS && expert < EXPERTS; ++index) logit += parts[expert * PARTS + index];
        key[set] = expert < EXPERTS ? sort_key(logit) : 0;
    }
    float largest = 0, own_logit = 0;  // the largest logit; that of the choice which this lane writes
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
        if (choice == 0) largest = key_to_float(largest_key);
        if (choice == lane) expert = best, own_logit = key_to_float(largest_key);
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
    __shared__ float parts[2][UNITS];  // two buffers, for tokens in turn: one barrier a token is enough
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
