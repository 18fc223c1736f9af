// reorder_quantize: reorder channels; INT4 in groups and INT8 outliers (Atom section 4.1), or COMET's blocks.
//
// Contract   channel k of x moves to place[k] (s16, a permutation; with any other, some results are undefined and
//            nothing else is written). CODE 0, 1 (rules of Atom's paper, of its code): the first K places become INT4,
//            with a scale f16 per GROUP (64 or 128) from the group's largest magnitude times clip; the 0, 64 or 128
//            `outliers` behind them become INT8 with one scale. The bits are those of
//            `quant.quantize_atom_activations`, in the layout of gemm_w4a4_sm90 (PACKED 0) or gemm_w4a4_atom_sm80 (1).
//            CODE 2: the bits of `quant.quantize_blocks` (COMET section 3.2), for gemm_w4ax_sm90 (PACKED 2) or
//            gemm_w4ax_naive_sm80 (1); `outliers` counts channels of whole INT8 blocks of 128. A group with a NaN or an
//            infinity, or with a scale beyond f16, gets a scale that is not finite. x f16, bf16 or f32 (IN 0, 1, 2).
// Shows      places are loaded before the wait for the preceding kernel. Channels change places in shared memory, so
//            that global loads and stores are contiguous in any order. A thread has 16 channels; a row of more than 512
//            threads is shared by a cluster (CLUSTER blocks).
// Guide      notebooks/guide/kernels_quantize.md: the way through shared memory, tile, constants
// PTX ISA    9.7.3 fma; 9.7.9 shfl.sync, mapa, st.shared::cluster; 9.7.13 redux.sync; 9.7.13.3 barrier.cluster;
//            9.7.13.13 griddepcontrol.
#include "griddep.cuh"
#include "reorder_row.cuh"

#ifndef IN
#define IN 0         // x: 0 f16, 1 bf16, 2 f32
#define GROUP 128    // INT4 channels of a scale
#define PACKED 0     // layout of x_q: 0 a byte per channel; 1 two INT4 a byte, INT8 in x8; 2 both in one row
#define CODE 0       // rules: 0 Atom's paper, 1 its code, 2 COMET
#define THREADS 256  // of a block
#define CLUSTER 1    // blocks that share a row
#endif

// No input is __restrict__: a read-only load may be moved ahead of griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(THREADS) reorder_quantize(
    const uint4* x,      // [M, K + outliers], by IN
    const uint4* place,  // s16 [K + outliers]
    unsigned char* x_q,  // [M, bytes], by PACKED
    unsigned char* x8,   // s8  [M, outliers], if PACKED
    __half* x_scale,     // f16 [M, K/GROUP + 1 in whole eights]; of CODE 2 [M, (K + outliers)/128 in whole eights]
    int K, int outliers, float clip) {
    __shared__ ptxlab::RowInOrder<CLUSTER, THREADS> row;
    ptxlab::launch_dependents();
    row.open();
    const ptxlab::Channels channels{K, outliers};
    const int m = blockIdx.x / CLUSTER, chunk = blockIdx.x % CLUSTER * THREADS + threadIdx.x;
    const bool inside = chunk < channels.all() / 16;
    const ptxlab::Places places = ptxlab::load_places(place, chunk, inside);
    ptxlab::wait_for_predecessors();

    using Chunk = ptxlab::Chunk<IN>;
    const Chunk v = ptxlab::load_chunk<IN>(x + size_t(m) * (channels.all() / 16) * Chunk::VECTORS, chunk, inside);
    row.wait_for_open();
    row.send<GROUP>(v, places, channels, inside);
    row.wait();
    ptxlab::write_atom_row<GROUP, PACKED, CODE>(row, 1.0f, clip, channels, m, {x_q, x8, x_scale});
}
