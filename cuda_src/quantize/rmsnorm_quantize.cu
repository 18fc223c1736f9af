// rmsnorm_quantize: residual add, RMSNorm and INT8 with the token sum in one pass over a row (QServe Fig. 11).
//
// Contract   v = x, or with RESIDUAL v = residual = round(x + residual); y = v gamma / sqrt(mean(v^2) + eps) in f32,
//            quantised as by `quantize_activations_s8` without being rounded before. With NORMED y is also written,
//            rounded to IN. Every operation is IEEE's, in an order that K alone decides: the same bits for a row in any
//            batch, and the same as `kernels.quantize.rmsnorm.normalize_rows`. A row whose squares add up to infinity
//            or NaN gets a scale of NaN. x, residual, gamma f16 or bf16 (IN 0, 1); K a multiple of 32, 32768 at most.
// Shows      a row stays in registers, CHUNKS chunks of 16 values per thread. One exchange between warps brings both
//            sum and maximum, as max |v gamma| / rms = max |y|. A row of more than 512 threads is shared by a cluster
//            (CLUSTER blocks), whose warps send each other words by st.async. gamma is loaded before the wait for the
//            preceding kernel.
// Guide      notebooks/guide/kernels_quantize.md: the order of the sum, tile, constants
// PTX ISA    9.7.3 fma; 9.7.9 shfl.sync, mapa, st.async; 9.7.13.3 barrier.cluster; 9.7.13.13 griddepcontrol.
#include "griddep.cuh"
#include "quantize_row.cuh"
#include "residual.cuh"

#ifndef IN
#define IN 0         // x, residual, gamma, normed: 0 f16, 1 bf16
#define LAYOUT 0     // order of x_q, as in quantize_activations_s8
#define RESIDUAL 0   // 1: add x to the residual first
#define NORMED 0     // 1: write y, too
#define THREADS 256  // of a block
#define CLUSTER 1    // blocks that share a row
#define CHUNKS 1     // of 16 values of a thread; in clusters 1
#endif

// No input is __restrict__: ptxas moves read-only loads across griddepcontrol.wait. It would load x too early, ahead of
// the wait, and gamma, which no preceding kernel writes, too late, behind it.
extern "C" __global__ void __launch_bounds__(THREADS) rmsnorm_quantize(
    const uint4* x,                       // [M, K], by IN
    uint4* residual,                      // likewise, updated in place; read if RESIDUAL
    const uint4* gamma,                   // [K], by IN
    uint4* normed,                        // [M, K], by IN; written if NORMED
    uint4* x_q,                           // s8  [M, K], by LAYOUT
    float* scale,                         // f32 [M]
    int* token_sum,                       // s32 [M]
    int M, int K, int rows, float eps) {  // rows: tokens of a tile
    using Chunk = ptxlab::Chunk<IN>;
    __shared__ ptxlab::Exchange<CLUSTER, THREADS, 2, CHUNKS> statistics;
    __shared__ ptxlab::Exchange<CLUSTER, THREADS, 1> total;
    ptxlab::launch_dependents();
    ptxlab::open<CLUSTER>(statistics, total);
    const ptxlab::Order<LAYOUT> order(K, gridDim.x / CLUSTER, rows);
    const int m = blockIdx.x / CLUSTER, chunk = blockIdx.x % CLUSTER * THREADS + threadIdx.x;
    bool within[CHUNKS], inside[CHUNKS];  // whether chunk c is in a row; and the row is a token's, not padding
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) within[c] = chunk + c * THREADS < K / 16, inside[c] = within[c] && m < M;
    const size_t row = size_t(m) * (K / 16) * Chunk::VECTORS;
    Chunk weight[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) weight[c] = ptxlab::load_chunk<IN>(gamma, chunk + c * THREADS, within[c]);
    const float share = ptxlab::reciprocal(float(K));
    ptxlab::wait_for_predecessors();

    ptxlab::Floats y[CHUNKS];
    float square[CHUNKS];
    unsigned magnitudes[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int chunk_c = chunk + c * THREADS;
        Chunk v = ptxlab::load_chunk<IN>(x + row, chunk_c, inside[c]);
        if (RESIDUAL) {
            v = ptxlab::add_chunks(v, ptxlab::load_chunk<IN>(residual + row, chunk_c, inside[c]));
            __syncwarp();  // store_chunk: a pair of lanes writes halves of both chunks, so both must have read
            ptxlab::store_chunk(residual + row, chunk_c, inside[c], v);
        }
        square[c] = ptxlab::warp_sum(ptxlab::weigh(y[c], v, weight[c]));
        magnitudes[c] = ptxlab::warp_max(ptxlab::magnitude(y[c]));
    }
    ptxlab::wait_for_open<CLUSTER>();
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        statistics.send(0, magnitudes[c], CLUSTER, c);
        statistics.send(1, __float_as_uint(square[c]), CLUSTER, c);
    }
    statistics.wait();

    const float mean = __fmul_rn(statistics.float_sum_of(1), share);
    const float factor = ptxlab::rms_factor(mean, eps);
    const float s = ptxlab::scale_of(__uint_as_float(statistics.max_of(0)) * factor);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int chunk_c = chunk + c * THREADS;
#pragma unroll
        for (int i = 0; i < 16; ++i) y[c].v[i] *= factor;
        if (NORMED) ptxlab::store_chunk(normed + row, chunk_c, inside[c], ptxlab::rounded_chunk<IN>(y[c]));
    }
    ptxlab::write_row<CLUSTER, THREADS>(y, s, total, order, m, chunk, m < M, x_q, scale, token_sum);
}
