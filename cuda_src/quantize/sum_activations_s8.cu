// sum_activations_s8: sum each token's INT8 activations, for epilogues that subtract zero points.
//
// Contract   token_sum[m] = sum_k x_q[m, k], x_q s8 [M, K] row-major, K a multiple of 16. For activations that come
//            without token sums: an epilogue subtracts zero point times token sum (QServe section 5.2.2, which sums X
//            before it is quantised; with the sum of the integers the product is exact).
// Tile       one block per token; a thread loads 16 bytes per step and adds four of them by one dp4a.
// Guide      notebooks/guide/kernels_quantize.md
// PTX ISA    9.7.1 dp4a; 9.7.13 redux.sync.
#include "reduce.cuh"

#ifndef THREADS
#define THREADS 128  // of a block
#endif

extern "C" __global__ void __launch_bounds__(THREADS) sum_activations_s8(const uint4* __restrict__ x_q,  // s8  [M, K]
                                                                         int* __restrict__ token_sum,    // s32 [M]
                                                                         int K) {
    __shared__ unsigned partial[32];
    const uint4* row = x_q + size_t(blockIdx.x) * (K / 16);
    int sum = 0;
    for (int c = threadIdx.x; c < K / 16; c += THREADS) {
        const uint4 q = row[c];
        sum = ptxlab::sum_of_bytes(q, sum);
    }
    sum = ptxlab::block_sum<THREADS>(sum, partial);
    if (threadIdx.x == 0) token_sum[blockIdx.x] = sum;
}
