// silu_mul_quantize: SiLU (or GELU) of gate, times up, then INT8 with token sums in one pass (QServe Fig. 11).
//
// Contract   h[m, k] = act(gate[m, k]) up[m, k] in f32, where gate[m, k] = gate_up[m, k] and up[m, k] = gate_up[m, K +
//            k]; then quantised as by `quantize_activations_s8`. ACTIVATION 0: g / (1 + exp(-g)); 1: the tanh form of
//            GELU, which is g / (1 + exp(-2 z)) with z = sqrt(2 / pi) (g + 0.044715 g^3). Relative error of h: 2^-20,
//            and 2^-22 more per unit of a positive exponent; an exponent above 87 makes h 0. The quantisation of that h
//            is exact. A row with an h that is not finite gets a scale that is not finite. gate_up f16 or bf16 (IN 0,
//            1); K a multiple of 32, 32768 at most. The same bits for a row in any batch.
// Shows      one ex2 and one rcp per element hide behind the loads. A thread has CHUNKS chunks of 16 values; a row of
//            more than 512 threads is shared by a cluster.
// Guide      notebooks/guide/kernels_quantize.md: error, tile, constants
// PTX ISA    9.7.3 ex2, rcp, fma; 9.7.9 mapa, st.async; 9.7.13.3 barrier.cluster; 9.7.13.13 griddepcontrol.
#include "gate.cuh"
#include "griddep.cuh"
#include "quantize_row.cuh"

#ifndef IN
#define IN 0          // gate_up: 0 f16, 1 bf16
#define LAYOUT 0      // order of x_q, as in quantize_activations_s8
#define ACTIVATION 0  // of the gate: 0 SiLU, 1 GELU
#define THREADS 256   // of a block
#define CLUSTER 1     // blocks that share a row
#define CHUNKS 1      // of 16 values of a thread; in clusters 1
#endif

// No input is __restrict__: a read-only load may be moved ahead of griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(THREADS) silu_mul_quantize(
    const uint4* gate_up,      // [M, 2 K], by IN: gate, then up
    uint4* x_q,                // s8  [M, K], by LAYOUT
    float* scale,              // f32 [M]
    int* token_sum,            // s32 [M]
    int M, int K, int rows) {  // rows: tokens of a tile
    __shared__ ptxlab::Exchange<CLUSTER, THREADS, 1, CHUNKS> extents;
    __shared__ ptxlab::Exchange<CLUSTER, THREADS, 1> total;
    ptxlab::launch_dependents();
    ptxlab::open<CLUSTER>(extents, total);
    const ptxlab::Order<LAYOUT> order(K, gridDim.x / CLUSTER, rows);
    const int m = blockIdx.x / CLUSTER, chunk = blockIdx.x % CLUSTER * THREADS + threadIdx.x;
    const bool inside = chunk < K / 16 && m < M;
    using Chunk = ptxlab::Chunk<IN>;
    const uint4* row = gate_up + size_t(m) * (K / 8) * Chunk::VECTORS;
    ptxlab::wait_for_predecessors();

    ptxlab::Floats h[CHUNKS];
    unsigned magnitudes[CHUNKS];
    // Compute chunk c of h and its largest magnitude in the warp.
    const auto take = [&](int c, int chunk_c, bool inside) {
        const Chunk gate = ptxlab::load_chunk<IN>(row, chunk_c, inside);
        const Chunk up = ptxlab::load_chunk<IN>(row, K / 16 + chunk_c, inside);
#pragma unroll
        for (int i = 0; i < 16; ++i) h[c].v[i] = ptxlab::activated<ACTIVATION>(gate[i]) * up[i];
        magnitudes[c] = ptxlab::warp_max(ptxlab::magnitude(h[c]));
    };
    take(0, chunk, inside);
#pragma unroll
    for (int c = 1; c < CHUNKS; ++c) take(c, chunk + c * THREADS, chunk + c * THREADS < K / 16 && m < M);
    ptxlab::wait_for_open<CLUSTER>();
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) extents.send(0, magnitudes[c], CLUSTER, c);
    extents.wait();

    const float s = ptxlab::scale_of(__uint_as_float(extents.max_of(0)));
    ptxlab::write_row<CLUSTER, THREADS>(h, s, total, order, m, chunk, m < M, x_q, scale, token_sum);
}
