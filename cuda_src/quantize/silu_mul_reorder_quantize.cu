// silu_mul_reorder_quantize: SiLU (or GELU) of gate, times up, then reorder_quantize in one pass (Atom section 4.3).
//
// Contract   h = act(gate) * up, with the error that silu_mul_quantize has. Results are those of `reorder_quantize` of
//            this h, bit for bit. gate_up f16 or bf16 (IN 0, 1).
// Shows      a cluster shares a row of the FFN: each h is stored straight to its place in the shared memory of the
//            block that quantises it.
// Guide      notebooks/guide/kernels_quantize.md: error, the way through shared memory, constants
// PTX ISA    as reorder_quantize, and 9.7.3 ex2, rcp
#include "gate.cuh"
#include "griddep.cuh"
#include "reorder_row.cuh"

#ifndef IN
#define IN 0          // gate_up: 0 f16, 1 bf16
#define GROUP 128     // INT4 channels of a scale
#define PACKED 0      // layout of x_q, as in reorder_quantize
#define CODE 0        // rules, as in reorder_quantize
#define ACTIVATION 0  // of the gate: 0 SiLU, 1 GELU
#define THREADS 256   // of a block
#define CLUSTER 1     // blocks that share a row
#endif

// No input is __restrict__: a read-only load may be moved ahead of griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(THREADS) silu_mul_reorder_quantize(
    const uint4* gate_up,  // [M, 2 (K + outliers)], by IN: gate, then up
    const uint4* place,    // s16 [K + outliers]
    unsigned char* x_q,    // [M, bytes], by PACKED
    unsigned char* x8,     // s8  [M, outliers], if PACKED
    __half* x_scale,       // f16 [M, groups in whole eights], by CODE
    int K, int outliers, float clip) {
    __shared__ ptxlab::RowInOrder<CLUSTER, THREADS> row;
    ptxlab::launch_dependents();
    row.open();
    using Chunk = ptxlab::Chunk<IN>;
    const ptxlab::Channels channels{K, outliers};
    const int m = blockIdx.x / CLUSTER, chunk = blockIdx.x % CLUSTER * THREADS + threadIdx.x,
              chunks = channels.all() / 16;
    const bool inside = chunk < chunks;
    const uint4* gates = gate_up + size_t(m) * 2 * chunks * Chunk::VECTORS;
    const ptxlab::Places places = ptxlab::load_places(place, chunk, inside);
    ptxlab::wait_for_predecessors();

    const Chunk gate = ptxlab::load_chunk<IN>(gates, chunk, inside);
    const Chunk up = ptxlab::load_chunk<IN>(gates, chunks + chunk, inside);
    ptxlab::Floats h;
#pragma unroll
    for (int i = 0; i < 16; ++i) h.v[i] = ptxlab::activated<ACTIVATION>(gate[i]) * up[i];
    row.wait_for_open();
    row.send<GROUP>(h, places, channels, inside);
    row.wait();
    ptxlab::write_atom_row<GROUP, PACKED, CODE>(row, 1.0f, clip, channels, m, {x_q, x8, x_scale});
}
