// rmsnorm_reorder_quantize: residual add, RMSNorm and reorder_quantize in one pass over a row (Atom section 4.3).
//
// Contract   y of rmsnorm_quantize, bit for bit, with the residual updated if RESIDUAL and y written, rounded to IN, if
//            NORMED. y in f32, not the rounded one, is then reordered and quantised as by `reorder_quantize`. x,
//            residual, gamma f16 or bf16 (IN 0, 1). K, outliers, clip, GROUP, PACKED and CODE as there; K and outliers,
//            each in whole blocks of 128 channels, are 32768 together at most. Columns of x_scale in whole eights: up
//            to the next multiple of 8, padded with ones.
// Shows      one barrier: v gamma is sent to its place in shared memory before 1 / rms is known, and is multiplied by
//            it when it is read back. The largest magnitude of a group takes no barrier: a group is one warp's.
// Guide      notebooks/guide/kernels_quantize.md: the order of the sum, the way through shared memory, constants
// PTX ISA    as reorder_quantize
#include "griddep.cuh"
#include "reorder_row.cuh"
#include "residual.cuh"

#ifndef IN
#define IN 0         // x, residual, gamma, normed: 0 f16, 1 bf16
#define GROUP 128    // INT4 channels of a scale: 64 or 128
#define PACKED 0     // layout of x_q: 0 a byte per channel; 1 two INT4 a byte, INT8 in x8; 2 both in one row
#define CODE 0       // rules: 0 Atom's paper, 1 its code, 2 COMET
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
    const uint4* place,  // s16 [K + outliers]: channel k moves to place[k]
    uint4* normed,       // [M, K + outliers], by IN; written if NORMED
    unsigned char* x_q,  // [M, K + outliers], [M, K/2] or [M, K/2 + outliers] bytes, by PACKED
    unsigned char* x8,   // s8  [M, outliers], if PACKED is 1
    __half* x_scale,     // f16 [M, K/GROUP + 1 in whole eights]; of CODE 2 [M, (K + outliers)/128 in whole eights]
    int K, int outliers, float eps, float clip) {
    __shared__ ptxlab::RowInOrder<CLUSTER, THREADS> row;
    ptxlab::launch_dependents();
    row.open();  // of a cluster: no block writes to another's shared memory before that one has begun
    using Chunk = ptxlab::Chunk<IN>;
    const ptxlab::Channels channels{K, outliers};
    // A block, or a cluster of them, has token m; a thread the 16 channels of one chunk of its row.
    const int m = blockIdx.x / CLUSTER, chunk = blockIdx.x % CLUSTER * THREADS + threadIdx.x;
    const bool inside = chunk < channels.all() / 16;
    const size_t row_offset = size_t(m) * (channels.all() / 16) * Chunk::VECTORS;  // in uint4
    // No preceding kernel writes gamma or place: both are loaded ahead of the wait.
    const Chunk weight = ptxlab::load_chunk<IN>(gamma, chunk, inside);
    const ptxlab::Places places = ptxlab::load_places(place, chunk, inside);
    const float inverse_width = ptxlab::reciprocal(float(channels.all()));
    ptxlab::wait_for_predecessors();

    Chunk v = ptxlab::load_chunk<IN>(x + row_offset, chunk, inside);
    if (RESIDUAL) {
        v = ptxlab::add_chunks(v, ptxlab::load_chunk<IN>(residual + row_offset, chunk, inside));
        __syncwarp();  // store_chunk: a pair of lanes writes halves of both chunks, so both must have read
        ptxlab::store_chunk(residual + row_offset, chunk, inside, v);
    }
    ptxlab::Floats y;  // v gamma, until it is multiplied by 1 / rms
    const float warp_squares = ptxlab::warp_sum(ptxlab::weigh(y, v, weight));  // sets y, returns the sum of v^2
    row.wait_for_open();
    row.send_word(__float_as_uint(warp_squares));  // to all blocks of the row
    row.send<GROUP>(y, places, channels, inside);  // each channel to the block that quantises it
    row.wait();

    const float mean_square = __fmul_rn(row.sum_warp_words(), inverse_width);
    const float factor = ptxlab::rms_factor(mean_square, eps);
    if (NORMED) {  // in registers alone: shared memory keeps v gamma, which write_atom_row multiplies by factor
#pragma unroll
        for (int i = 0; i < 16; ++i) y.v[i] *= factor;
        ptxlab::store_chunk(normed + row_offset, chunk, inside, ptxlab::rounded_chunk<IN>(y));
    }
    ptxlab::write_atom_row<GROUP, PACKED, CODE>(row, factor, clip, channels, m, {x_q, x8, x_scale});
}
