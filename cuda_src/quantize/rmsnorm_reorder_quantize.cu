// rmsnorm_reorder_quantize: residual add, RMSNorm and reorder_quantize in one pass over a row (Atom section 4.3).
//
// Contract   y of rmsnorm_quantize, bit for bit, with the residual updated if RESIDUAL and y written if NORMED; then
//            quantised as by `reorder_quantize` without being rounded before. x, residual, gamma f16 or bf16 (IN 0, 1).
// Shows      one barrier: v gamma is sent to its place in shared memory while the squares are added up, and multiplied
//            by 1 / rms when it is read back.
// Guide      notebooks/guide/kernels_quantize.md: the order of the sum, the way through shared memory, constants
// PTX ISA    as reorder_quantize
#include "griddep.cuh"
#include "reorder_row.cuh"
#include "residual.cuh"

#ifndef IN
#define IN 0         // x, residual, gamma, normed: 0 f16, 1 bf16
#define GROUP 128    // INT4 channels of a scale
#define PACKED 0     // layout of x_q, as in reorder_quantize
#define CODE 0       // rules, as in reorder_quantize
#define RESIDUAL 0   // 1: add x to the residual first
#define NORMED 0     // 1: write y, too
#define THREADS 256  // of a block
#define CLUSTER 1    // blocks that share a row
#endif

// No input is __restrict__: ptxas moves read-only loads across griddepcontrol.wait (see rmsnorm_quantize).
extern "C" __global__ void __launch_bounds__(THREADS) rmsnorm_reorder_quantize(
    const uint4* x,      // [M, K + outliers], by IN
    uint4* residual,     // likewise, updated in place; read if RESIDUAL
    const uint4* gamma,  // [K + outliers], by IN
    const uint4* place,  // s16 [K + outliers]
    uint4* normed,       // [M, K + outliers], by IN; written if NORMED
    unsigned char* x_q,  // [M, bytes], by PACKED
    unsigned char* x8,   // s8  [M, outliers], if PACKED
    __half* x_scale,     // f16 [M, groups in whole eights], by CODE
    int K, int outliers, float eps, float clip) {
    __shared__ ptxlab::RowInOrder<CLUSTER, THREADS> row;
    ptxlab::launch_dependents();
    row.open();
    using Chunk = ptxlab::Chunk<IN>;
    const ptxlab::Channels channels{K, outliers};
    const int m = blockIdx.x / CLUSTER, chunk = blockIdx.x % CLUSTER * THREADS + threadIdx.x;
    const bool inside = chunk < channels.all() / 16;
    const size_t row_offset = size_t(m) * (channels.all() / 16) * Chunk::VECTORS;
    const Chunk weight = ptxlab::load_chunk<IN>(gamma, chunk, inside);
    const ptxlab::Places places = ptxlab::load_places(place, chunk, inside);
    const float share = ptxlab::reciprocal(float(channels.all()));
    ptxlab::wait_for_predecessors();

    Chunk v = ptxlab::load_chunk<IN>(x + row_offset, chunk, inside);
    if (RESIDUAL) {
        v = ptxlab::add_chunks(v, ptxlab::load_chunk<IN>(residual + row_offset, chunk, inside));
        __syncwarp();  // store_chunk: a pair of lanes writes halves of both chunks, so both must have read
        ptxlab::store_chunk(residual + row_offset, chunk, inside, v);
    }
    ptxlab::Floats y;
    const float square = ptxlab::warp_sum(ptxlab::weigh(y, v, weight));
    row.wait_for_open();
    row.send_word(__float_as_uint(square));
    row.send<GROUP>(y, places, channels, inside);
    row.wait();

    const float mean = __fmul_rn(row.sum_warp_words(), share);
    const float factor = ptxlab::rms_factor(mean, eps);
    if (NORMED) {
#pragma unroll
        for (int i = 0; i < 16; ++i) y.v[i] *= factor;
        ptxlab::store_chunk(normed + row_offset, chunk, inside, ptxlab::rounded_chunk<IN>(y));
    }
    ptxlab::write_atom_row<GROUP, PACKED, CODE>(row, factor, clip, channels, m, {x_q, x8, x_scale});
}
