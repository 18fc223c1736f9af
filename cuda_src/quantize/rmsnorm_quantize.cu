// rmsnorm_quantize: residual add, RMSNorm and INT8 with the token sum in one pass over a row (QServe Fig. 11).
//
// Contract   v = x, or with RESIDUAL v = residual = round(x + residual); y = v gamma / sqrt(mean(v^2) + eps) in f32.
//            With NORMED y is also written, rounded to IN. y in f32, not the rounded one, is quantised as by
//            `quantize_activations_s8`; token_sum is the sum of a token's x_q. Every operation is IEEE's, in an order
//            that K alone decides: the same bits for a row in any batch, and the same as
//            `kernels.quantize.rmsnorm.normalize_rows`. A row whose squares add up to infinity or NaN gets a scale of
//            NaN. x, residual, gamma f16 or bf16 (IN 0, 1); K a multiple of 32, 32768 at most.
// Shows      a row stays in registers, CHUNKS chunks of 16 values per thread. One exchange between warps brings both
//            sum and maximum: rounding keeps the order of numbers, so max |v gamma| times 1 / rms has the bits of
//            max |y|. A row of more than 512 chunks (8192 values) is shared by a cluster (CLUSTER blocks), whose warps
//            send each other words by st.async; before Hopper it is one block's. gamma is loaded before the wait for
//            the preceding kernel.
// Guide      notebooks/guide/kernels_quantize.md: the order of the sum, tile, constants
// PTX ISA    9.7.3 fma; 9.7.9 shfl.sync, mapa, st.async; 9.7.13.3 barrier.cluster; 9.7.13.13 griddepcontrol.
#include "griddep.cuh"
#include "quantize_row.cuh"
#include "residual.cuh"

#ifndef IN
#define IN 0         // x, residual, gamma, normed: 0 f16, 1 bf16
#define LAYOUT 0     // order of x_q: 0 row-major, 1 fragments, 2 swizzled tiles
#define RESIDUAL 0   // 1: add x to the residual first
#define NORMED 0     // 1: write y, too
#define THREADS 256  // of a block
#define CLUSTER 1    // blocks that share a row
#define CHUNKS 1     // of 16 values each that a thread has; 1 where CLUSTER > 1
#endif

// No input is __restrict__: ptxas moves read-only loads across griddepcontrol.wait. It would move x, which a preceding
// kernel may write, ahead of the wait, and gamma, which none writes, behind it.
extern "C" __global__ void __launch_bounds__(THREADS) rmsnorm_quantize(
    const uint4* x,                       // [M, K], by IN
    uint4* residual,                      // likewise, updated in place; read if RESIDUAL
    const uint4* gamma,                   // [K], by IN
    uint4* normed,                        // [M, K], by IN; written if NORMED
    uint4* x_q,                           // s8  [M, K], by LAYOUT
    float* scale,                         // f32 [M]
    int* token_sum,                       // s32 [M]
    int M, int K, int rows, float eps) {  // rows: tokens of a tile of x_q
    using Chunk = ptxlab::Chunk<IN>;
    constexpr int MAXIMUM = 0, SQUARES = 1;  // numbers of a warp's chunk: max |v gamma| and the sum of v^2
    __shared__ ptxlab::Exchange<CLUSTER, THREADS, 2, CHUNKS> statistics;
    __shared__ ptxlab::Exchange<CLUSTER, THREADS, 1> total;  // the sum of the row's x_q
    ptxlab::launch_dependents();
    ptxlab::open<CLUSTER>(statistics, total);
    // The grid has CLUSTER blocks per token. Tokens m >= M are padding: zeros, up to whole tiles of x_q.
    const ptxlab::Order<LAYOUT> order(K, gridDim.x / CLUSTER, rows);
    const int m = blockIdx.x / CLUSTER, chunk = blockIdx.x % CLUSTER * THREADS + threadIdx.x;
    bool in_row[CHUNKS], inside[CHUNKS];  // whether a row has chunk c; and token m is no padding
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) in_row[c] = chunk + c * THREADS < K / 16, inside[c] = in_row[c] && m < M;
    const size_t row_offset = size_t(m) * (K / 16) * Chunk::VECTORS;  // in uint4
    Chunk weight[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) weight[c] = ptxlab::load_chunk<IN>(gamma, chunk + c * THREADS, in_row[c]);
    const float inverse_width = ptxlab::reciprocal(float(K));
    ptxlab::wait_for_predecessors();

    ptxlab::Floats y[CHUNKS];  // v gamma, until it is multiplied by 1 / rms
    float squares[CHUNKS];     // the warp's sum of v^2 over its chunks c
    unsigned maxima[CHUNKS];   // the warp's max |v gamma|, as bits, which unsigned comparison orders like numbers
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int chunk_c = chunk + c * THREADS;
        Chunk v = ptxlab::load_chunk<IN>(x + row_offset, chunk_c, inside[c]);
        if (RESIDUAL) {
            v = ptxlab::add_chunks(v, ptxlab::load_chunk<IN>(residual + row_offset, chunk_c, inside[c]));
            __syncwarp();  // store_chunk: a pair of lanes writes halves of both chunks, so both must have read
            ptxlab::store_chunk(residual + row_offset, chunk_c, inside[c], v);
        }
        squares[c] = ptxlab::warp_sum(ptxlab::weigh(y[c], v, weight[c]));  // sets y, returns the sum of v^2
        maxima[c] = ptxlab::warp_max(ptxlab::magnitude(y[c]));
    }
    ptxlab::wait_for_open<CLUSTER>();
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        statistics.send(MAXIMUM, maxima[c], CLUSTER, c);  // to all CLUSTER blocks
        statistics.send(SQUARES, __float_as_uint(squares[c]), CLUSTER, c);
    }
    statistics.wait();

    const float mean_square = __fmul_rn(statistics.float_sum_of(SQUARES), inverse_width);
    const float factor = ptxlab::rms_factor(mean_square, eps);
    const float row_scale = ptxlab::scale_of(__uint_as_float(statistics.max_of(MAXIMUM)) * factor);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int chunk_c = chunk + c * THREADS;
#pragma unroll
        for (int i = 0; i < 16; ++i) y[c].v[i] *= factor;
        if (NORMED) ptxlab::store_chunk(normed + row_offset, chunk_c, inside[c], ptxlab::rounded_chunk<IN>(y[c]));
    }
    ptxlab::write_row<CLUSTER, THREADS>(y, row_scale, total, order, m, chunk, m < M, x_q, scale, token_sum);
}
