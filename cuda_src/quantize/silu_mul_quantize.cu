// silu_mul_quantize: SiLU (or GELU) of the gate times up, and INT8 with the token sum in one pass (QServe Fig. 11).
//
// Contract   h[m, k] = act(gate[m, k]) up[m, k] in f32, of gate_up[m, k] and gate_up[m, K + k]; then
//            `quantize_activations_s8` of h. ACTIVATION 0: g / (1 + exp(-g)); 1: the tanh form of GELU, which is
//            g / (1 + exp(-2 z)) with z = sqrt(2 / pi) (g + 0.044715 g^3). Relative error of h: 2^-20, and 2^-22 more
//            per unit of a positive exponent; one above 87 makes h 0. What follows is exact for that h. A row where h
//            is no number gets a scale that is none. gate_up f16 or bf16 (IN 0, 1); K a multiple of 32, 32768 at most.
//            The same bits for a row in any batch.
// Shows      one ex2 and one rcp per element hide behind the loads; a row of more than 512 threads is a cluster's.
// Guide      notebooks/guide/kernels_quantize.md: error, tile, constants
// PTX ISA    9.7.3 ex2, rcp, fma; 9.7.9 mapa, st.async; 9.7.13.3 barrier.cluster; 9.7.13.13 griddepcontrol.
#include "activation.cuh"
#include "griddep.cuh"
#include "quantize_row.cuh"

#ifndef IN
#define IN 0
#define LAYOUT 0
#define ACTIVATION 0
#define THREADS 256
#define CLUSTER 1
#endif

// No input is __restrict__: a read-only load may be moved ahead of griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(THREADS) silu_mul_quantize(
    const uint4* gate_up,      // [M, 2 K], by IN: gate, then up
    uint4* x_q,                // s8  [M, K], by LAYOUT
    float* scale,              // f32 [M]
    int* token_sum,            // s32 [M]
    int M, int K, int rows) {  // rows: tokens of a tile
    __shared__ ptxlab::Exchange<CLUSTER, THREADS, 1> found, total;
    ptxlab::launch_dependents();
    ptxlab::open<CLUSTER>(found, total);
    const ptxlab::Order<LAYOUT> order(K, gridDim.x / CLUSTER, rows);
    const int m = blockIdx.x / CLUSTER, chunk = blockIdx.x % CLUSTER * THREADS + threadIdx.x;
    const bool inside = chunk < K / 16 && m < M;
    using Chunk = ptxlab::Chunk<IN>;
    const uint4* row = gate_up + size_t(m) * (K / 8) * Chunk::VECTORS;
    ptxlab::wait_for_predecessors();

    const Chunk gate = ptxlab::load_chunk<IN>(row, chunk, inside);
    const Chunk up = ptxlab::load_chunk<IN>(row, K / 16 + chunk, inside);
    ptxlab::Floats h;
#pragma unroll
    for (int i = 0; i < 16; ++i) h.v[i] = ptxlab::activated<ACTIVATION>(gate[i]) * up[i];
    const unsigned most = ptxlab::warp_max(ptxlab::magnitude(h));
    ptxlab::wait_for_open<CLUSTER>();
    found.say(0, most);
    found.wait();

    const float s = ptxlab::scale_of(__uint_as_float(found.max_of(0)));
    const uint4 q = ptxlab::quantized(h, s);
    order.store(x_q, m, chunk, q);

    total.say(0, ptxlab::warp_sum(ptxlab::sum_of_bytes(q, 0)), 1);
    if (blockIdx.x % CLUSTER) return;
    total.wait();
    const int sum = total.sum_of(0);
    if (threadIdx.x == 0 && m < M) {
        scale[m] = s;
        token_sum[m] = sum;
    }
}
