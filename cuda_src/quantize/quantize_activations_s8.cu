// quantize_activations_s8: quantise activations to symmetric INT8 per token, with token sums (QServe section 5.1).
//
// Contract   scale[m] = max_k |x[m, k]| / 127, or 1 where that is no normal f32 (a row of zeros, or of less than
//            1.5e-36); x_q[m, k] = x[m, k] / scale[m] rounded half to even; token_sum[m] = sum_k x_q[m, k]. Both
//            divisions round as IEEE does: the same bits as `quant.quantize_activations`. A row with a NaN or an
//            infinity gets a scale that is not finite, which shows in whatever is computed from it. x f16, bf16 or f32
//            (IN 0, 1, 2); K a multiple of 32. Order of x_q by LAYOUT, padded with zeros to whole tiles: 0 row-major; 1
//            fragment order [K/64][M/8][512]; 2 swizzled tiles [M/rows][K/128][rows][128], for wgmma.
// Tile       one block per token, padding tokens too. A thread keeps CHUNKS chunks of 16 values in registers between
//            the maximum and the rounding; chunks of a row longer than 16 THREADS CHUNKS are read twice.
// Guide      notebooks/guide/kernels_quantize.md: layouts, tile, constants
// PTX ISA    9.7.3 fma; 9.7.9 shfl.sync; 9.7.13 redux.sync; 9.7.1 dp4a; 9.7.13.13 griddepcontrol.
#include "griddep.cuh"
#include "quantize_row.cuh"

#ifndef IN
#define IN 0         // x: 0 f16, 1 bf16, 2 f32
#define LAYOUT 0     // order of x_q: 0 row-major, 1 fragments, 2 swizzled tiles
#define THREADS 256  // of a block
#define CHUNKS 1     // of 16 values that a thread keeps in registers
#endif

// No input is __restrict__: a read-only load may be moved ahead of griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(THREADS) quantize_activations_s8(const uint4* x,  // [M, K], by IN
                                                                              uint4* x_q,      // s8  [M, K], by LAYOUT
                                                                              float* scale,    // f32 [M]
                                                                              int* token_sum,  // s32 [M]
                                                                              int M, int K,
                                                                              int rows) {  // rows: tokens of a tile
    __shared__ ptxlab::Exchange<1, THREADS, 1> extents, total;
    ptxlab::launch_dependents();
    ptxlab::wait_for_predecessors();
    const ptxlab::Order<LAYOUT> order(K, gridDim.x, rows);
    const int m = blockIdx.x, inside = m < M ? K / 16 : 0;
    const uint4* row = x + size_t(m) * (K / 16) * ptxlab::Chunk<IN>::VECTORS;
    const int first_chunk = threadIdx.x;

    ptxlab::Chunk<IN> chunks[CHUNKS];
    unsigned extent = 0;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        const int chunk = first_chunk + i * THREADS;
        chunks[i] = ptxlab::load_chunk<IN>(row, chunk, chunk < inside);
        extent = max(extent, ptxlab::magnitude(chunks[i]));
    }
#pragma unroll 1
    for (int chunk = first_chunk + CHUNKS * THREADS; chunk < inside; chunk += THREADS)
        extent = max(extent, ptxlab::magnitude(ptxlab::load_chunk<IN>(row, chunk, true)));
    extents.send(0, ptxlab::warp_max(extent));
    extents.wait();

    const float row_scale = ptxlab::scale_of(__uint_as_float(extents.max_of(0)));
    const float lift = IN == 0 ? 1 : ptxlab::lift_of(row_scale);  // f16 has no numbers that small
    const ptxlab::Divider divide(row_scale * lift);
    int sum = 0;
    const auto finish = [&](const ptxlab::Chunk<IN>& values, int chunk) {
        const uint4 q = ptxlab::quantized(values, divide, lift);
        sum = ptxlab::sum_of_bytes(q, sum);
        order.store(x_q, m, chunk, q);
    };
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) finish(chunks[i], first_chunk + i * THREADS);
#pragma unroll 1
    for (int c = CHUNKS * THREADS; c < order.chunks; c += THREADS)
        finish(ptxlab::load_chunk<IN>(row, first_chunk + c, first_chunk + c < inside), first_chunk + c);

    total.send(0, ptxlab::warp_sum(sum));
    total.wait();
    sum = total.sum_of(0);
    if (threadIdx.x == 0 && m < M) {
        scale[m] = row_scale;
        token_sum[m] = sum;
    }
}
