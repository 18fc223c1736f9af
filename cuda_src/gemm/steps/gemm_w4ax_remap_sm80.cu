// gemm_w4ax_remap_sm80: Y = X W^T, INT4 weights, INT4 and INT8 activation blocks; tiles remapped (COMET section 4.4).
//
// Contract   that of gemm_w4ax_naive_sm80, bit for bit, with any number of blocks in the grid: y = sum over the blocks
//            of 128 channels, K4 channels of INT4 and then K8 of INT8, of sum_b[m, n] * (x_scale[m, b] * w_scale[n, b])
//            + bias, one fma after the other in f32 from 0 on, then rounded to the output (OUT 0 f16, 1 bf16, 2 f32).
// Shows      tiles of 128 x 128 x 128 that are not bound to a thread block. Those of one part of Y go to different SMs,
//            INT8 tiles first, each to the SM that is free first, so that INT4 tiles fill up what INT8 tiles leave.
//            RATIO says how many INT4 tiles take as long as an INT8 tile; from that alone follows which SM has which
//            tiles, without a queue. Integer sums go to memory; the block that finishes the last tile of a part of Y
//            scales and adds up the part's sums. SMs synchronise for nothing else: there is no barrier between rounds
//            of tiles.
// Guide      notebooks/guide/kernels_gemm.md: order of tiles, schedule, constants
// PTX ISA    9.7.14 mma.m16n8k64 (.s4), mma.m16n8k32 (.s8), ldmatrix; 9.7.9 cp.async with zero fill; 9.7.13.5
//            atom.acq_rel
#include "mixed_tiles.cuh"
#include "timeline.cuh"

#ifndef BN
#define BN 128    // rows of W in a tile
#define BM 128    // tokens
#define WM 2      // warps along the tokens
#define STAGES 3  // slots of the ring
#define RATIO 2   // INT4 tiles that take as long as an INT8 tile
#define OUT 0     // y as 0 f16, 1 bf16, 2 f32
#endif

namespace {

using Tile = ptxlab::RowsTile<BN, BM, WM>;
constexpr int STAGE_BYTES = Tile::W_BYTES + 2 * Tile::X_BYTES;  // bytes of 128 channels; only INT8 uses the second X

}  // namespace

extern "C" __global__ void __launch_bounds__(BN* WM, 1) gemm_w4ax_remap_sm80(
    const unsigned char* __restrict__ w,   // u8  [N, (K4 + K8) / 2]: pairs; behind K4 / 2 bytes in COMET's order
    const __half* __restrict__ w_scale,    // f16 [N, (K4 + K8) / 128 in whole eights]
    const unsigned char* __restrict__ x4,  // u8  [M, K4/2], two s4 a byte
    const unsigned char* __restrict__ x8,  // s8  [M, K8]
    const __half* __restrict__ x_scale,    // f16 [M, (K4 + K8) / 128 in whole eights]
    const float* __restrict__ bias,        // f32 [N], or null
    void* __restrict__ y,                  // [M, N], by OUT
    unsigned* counted,  // u32 [M, N / 64]: tiles of a part that are done, at its first token and row; 0 at first
    int* sums,          // s32 [M, (K4 + K8) / 128, N]
    int M, int N, int K4, int K8) {
    extern __shared__ __align__(128) unsigned char ring[];
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const ptxlab::MixedOperands operands{w, w_scale, x4, x8, x_scale, M, N, K4, K8};
    const int across = (N + BN - 1) / BN, y_parts = (M + BM - 1) / BM * across;
    const ptxlab::RemappedTiles<RATIO> block_tiles(y_parts * (K8 / 128), y_parts * (K4 / 128));
    const int count = block_tiles.count();
    // The tile of Y with an index: tiles with the same tokens are neighbours.
    const auto output_tile_at = [&](int part_index) {
        return Tile(M, N, part_index / across * BM, part_index % across * BN);
    };
    // Issue the copies of this block's work item i into its slot, as one commit group.
    const auto fetch = [&](int i) {
        if (i < count) {
            const ptxlab::MixedTile tile(block_tiles[i], y_parts, operands);
            ptxlab::fetch_mixed(output_tile_at(tile.part_index), ring + i % STAGES * STAGE_BYTES, operands, tile.block);
        }
        ptxlab::cp_async_commit();
    };

    PHASE(LOAD);
    for (int i = 0; i < STAGES - 1; ++i) fetch(i);
    for (int i = 0; i < count; ++i) {
        PHASE(WAIT_COPY);
        ptxlab::cp_async_wait<STAGES - 2>();
        __syncthreads();  // the tile's operands are there for everyone, and the oldest slot is free
        PHASE(LOAD);
        fetch(i + STAGES - 1);
        PHASE(MULTIPLY);
        const ptxlab::MixedTile tile(block_tiles[i], y_parts, operands);
        const Tile output_tile = output_tile_at(tile.part_index);
        ptxlab::multiply_mixed(output_tile, ring + i % STAGES * STAGE_BYTES, operands, tile.block, sums);
        PHASE(EPILOGUE);
        unsigned* tiles = counted + size_t(output_tile.token0) * ((N + 63) / 64) + output_tile.row0 / 64;
        if (ptxlab::is_last(tiles, 1, operands.blocks()))
            ptxlab::scale_and_reduce<OUT>(output_tile, operands, sums, bias, y);
    }
}
