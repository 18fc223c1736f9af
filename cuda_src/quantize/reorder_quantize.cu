// reorder_quantize: channels in Atom's order, INT4 in groups and INT8 outliers (Atom section 4.1); or COMET's blocks.
//
// Contract   channel k of x goes to place[k]; then the bits of `quant.quantize_atom_activations`: of K INT4 channels a
//            scale f16 per GROUP (64 or 128), of their largest magnitude times clip, and one of the 0, 64 or 128
//            outliers behind them. CODE 1: rules of Atom's code, 0: of its paper. x f16, bf16 or f32 (IN 0, 1, 2);
//            place s16, a permutation; one that is none leaves channels undefined, and writes nowhere else. A group with
//            a NaN or an infinity, or a scale beyond f16, gets a scale that is no finite number. Results as gemm_w4a4_sm90
//            reads them (PACKED 0) or gemm_w4a4_atom_sm80 (1). CODE 2: the bits of `quant.quantize_blocks`
//            (COMET section 3.2), for gemm_w4ax_sm90 (PACKED 2) or _naive_sm80 (1): `outliers` counts channels of whole
//            INT8 blocks of 128.
// Shows      places are read ahead of the wait for the kernel before; channels meet in shared memory, so that global
//            loads and stores are contiguous whatever the order; a row of more than 512 threads is a cluster's.
// Guide      notebooks/guide/kernels_quantize.md: the way through shared memory, tile, constants
// PTX ISA    9.7.3 fma; 9.7.9 shfl.sync, mapa, st.shared::cluster; 9.7.13 redux.sync; 9.7.13.3 barrier.cluster; 9.7.13.13
//            griddepcontrol.
#include "griddep.cuh"
#include "reorder_row.cuh"

#ifndef IN
#define IN 0
#define GROUP 128
#define PACKED 0
#define CODE 0
#define THREADS 256
#define CLUSTER 1
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
