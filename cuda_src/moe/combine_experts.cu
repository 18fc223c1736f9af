// combine_experts: add up the results of each token's experts, weighted by the router's shares.
//
// Contract   hidden[m] = sum over c of share[m, c] results[place[m, c]] in f32, products and sums rounded one by one,
//            in the order of c; rounded once to IN. results and hidden f16 or bf16 (IN 0, 1); H a multiple of 32. The
//            same bits for a token in any batch.
// Shows      a thread has 8 columns of a token, and the loads of all CHOSEN rows are in flight at once.
// Guide      notebooks/guide/kernels_moe.md: constants
// PTX ISA    9.7.13.13 griddepcontrol.
#include "griddep.cuh"
#include "output.cuh"

#ifndef IN
#define IN 0         // results, hidden: 0 f16, 1 bf16
#define CHOSEN 2     // experts of a token
#define THREADS 128  // of a block, 8 columns each
#endif

namespace {

// Convert element i of 8 packed f16 or bf16 (IN) to f32.
__device__ __forceinline__ float to_float(const uint4& v, int i) {
    const unsigned half = reinterpret_cast<const unsigned*>(&v)[i / 2] >> (i % 2 * 16);
    return IN == 1 ? __uint_as_float(half << 16) : __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
}

}  // namespace

// No input is __restrict__: a read-only load may be moved ahead of griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(THREADS) combine_experts(const uint4* results,  // [rows, H], by IN
                                                                      const int* place,      // s32 [M, CHOSEN]
                                                                      const float* share,    // f32 [M, CHOSEN]
                                                                      uint4* hidden,         // [M, H], by IN
                                                                      int M, int H) {
    ptxlab::launch_dependents();
    const int m = blockIdx.x, vectors = H / 8, vector = blockIdx.y * THREADS + threadIdx.x;
    ptxlab::wait_for_predecessors();
    if (vector >= vectors) return;

    uint4 row[CHOSEN];
    float weight[CHOSEN];
#pragma unroll
    for (int c = 0; c < CHOSEN; ++c) {
        row[c] = results[size_t(place[size_t(m) * CHOSEN + c]) * vectors + vector];
        weight[c] = share[size_t(m) * CHOSEN + c];
    }
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sum[i] = __fmul_rn(to_float(row[0], i), weight[0]);
#pragma unroll
        for (int c = 1; c < CHOSEN; ++c) sum[i] = __fadd_rn(sum[i], __fmul_rn(to_float(row[c], i), weight[c]));
    }
    hidden[size_t(m) * vectors + vector] =
        make_uint4(ptxlab::rounded_pair<IN>(sum[0], sum[1]), ptxlab::rounded_pair<IN>(sum[2], sum[3]),
                   ptxlab::rounded_pair<IN>(sum[4], sum[5]), ptxlab::rounded_pair<IN>(sum[6], sum[7]));
}
