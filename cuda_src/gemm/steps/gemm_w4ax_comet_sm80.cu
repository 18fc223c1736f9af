// gemm_w4ax_comet_sm80: Y = X W^T, INT4 weights, INT4 and INT8 activation blocks; tiles cut, too (COMET section 4.4).
//
// Contract   that of gemm_w4ax_naive_sm80, bit for bit, with any number of blocks in the grid: y = sum over the blocks
//            of 128 channels, K4 channels of INT4 and then K8 of INT8, of sum_b[m, n] * (x_scale[m, b] * w_scale[n, b])
//            + bias, one fma after the other in f32 from 0 on, then rounded to the output (OUT 0 f16, 1 bf16, 2 f32).
// Shows      gemm_w4ax_remap_sm80 with tile decomposition: where the last round of tiles would leave SMs idle, these
//            take quarters, 64 x 64 of Y, of the tiles of that round. All warps of a block multiply a quarter together,
//            so that it takes a quarter of the time. Nothing is cut if too few INT4 tiles follow the last round of INT8
//            tiles to fill it. Which SM takes which quarter is fixed beforehand, so there is no queue and every run is
//            alike. In COMET idle SMs steal at run time (COMET section 4.4, Fig. 8e): gemm_w4ax_steal_sm80.
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
using Quarter = ptxlab::RowsTile<BN / 2, BM / 2, 2 * WM>;
constexpr int STAGE_BYTES = Tile::W_BYTES + 2 * Tile::X_BYTES;  // bytes of 128 channels; only INT8 uses the second X
constexpr int PIECES = 4;                                       // quarters of a tile
static_assert(Quarter::THREADS == Tile::THREADS, "all warps multiply a quarter");

// A work item: the tile with a number, all of it (quarter WHOLE) or its quarter 0..3 (2 * token half + row half).
struct Work {
    int number, quarter;
};
constexpr int WHOLE = -1;

// This block's whole tiles, then its quarters. In the last round `cut` blocks have a tile and `idle` blocks have none.
// Quarters move one by one from the block that would end last to the one that would end first (of several the lowest),
// while that helps. So moved quarter k is the last one that block k mod cut still has, and goes to the idle block k mod
// idle.
struct DecomposedTiles : ptxlab::RemappedTiles<RATIO> {
    const int cut, idle, moved_quarters, given_quarters, received_quarters, whole_tiles;

    __device__ __forceinline__ DecomposedTiles(int int8_tiles, int int4_tiles)
        : RemappedTiles(int8_tiles, int4_tiles), cut(int4_tiles ? rest % blocks : late), idle(blocks - cut),
          moved_quarters(quarters_to_move(cut, idle)), given_quarters(me < cut ? share(moved_quarters, me, cut) : 0),
          received_quarters(me < cut ? 0 : share(moved_quarters, me - cut, idle)),
          whole_tiles(RemappedTiles::count() - (given_quarters > 0)) {}

    // Return how many quarters move: until a block that gave a of them away and one that received b would end no
    // further apart than a quarter, a + b = 3.
    static __device__ __forceinline__ int quarters_to_move(int cut, int idle) {
        return min(min(3 * idle, max(cut, 2 * idle)), min(max(2 * cut, idle), 3 * cut));
    }

    __device__ __forceinline__ int count() const {
        return whole_tiles + (given_quarters ? PIECES - given_quarters : received_quarters);
    }

    __device__ __forceinline__ Work operator[](int i) const {
        if (i < whole_tiles) return {RemappedTiles::operator[](i), WHOLE};
        i -= whole_tiles;
        const int first_cut_tile = int8_tiles + int4_tiles - cut;
        if (given_quarters) return {first_cut_tile + me, i};
        const int moved = me - cut + i * idle;
        return {first_cut_tile + moved % cut, PIECES - 1 - moved / cut};
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(BN* WM, 1) gemm_w4ax_comet_sm80(
    const unsigned char* __restrict__ w,   // u8  [N, (K4 + K8) / 2]: pairs; behind K4 / 2 bytes in COMET's order
    const __half* __restrict__ w_scale,    // f16 [N, (K4 + K8) / 128 in whole eights]
    const unsigned char* __restrict__ x4,  // u8  [M, K4/2], two s4 a byte
    const unsigned char* __restrict__ x8,  // s8  [M, K8]
    const __half* __restrict__ x_scale,    // f16 [M, (K4 + K8) / 128 in whole eights]
    const float* __restrict__ bias,        // f32 [N], or null
    void* __restrict__ y,                  // [M, N], by OUT
    unsigned* counted,  // u32 [M, N / 64]: quarters of a part that are done, at its first token and row; 0 at first
    int* sums,          // s32 [M, (K4 + K8) / 128, N]
    int M, int N, int K4, int K8) {
    extern __shared__ __align__(128) unsigned char ring[];
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const ptxlab::MixedOperands operands{w, w_scale, x4, x8, x_scale, M, N, K4, K8};
    const int across = (N + BN - 1) / BN, y_parts = (M + BM - 1) / BM * across;
    const DecomposedTiles block_tiles(y_parts * (K8 / 128), y_parts * (K4 / 128));
    const int count = block_tiles.count();
    // The tile of Y with an index: tiles with the same tokens are neighbours.
    const auto output_tile_at = [&](int part_index) {
        return Tile(M, N, part_index / across * BM, part_index % across * BN);
    };
    // Quarter 0..3 of a tile of Y: 2 * token half + row half.
    const auto quarter_of = [&](const Tile& output_tile, int quarter) {
        return Quarter(M, N, output_tile.token0 + quarter / 2 * (BM / 2), output_tile.row0 + quarter % 2 * (BN / 2));
    };
    // Issue the copies of this block's work item i into its slot, as one commit group.
    const auto fetch = [&](int i) {
        if (i < count) {
            const Work work = block_tiles[i];
            const ptxlab::MixedTile tile(work.number, y_parts, operands);
            const Tile output_tile = output_tile_at(tile.part_index);
            unsigned char* slot = ring + i % STAGES * STAGE_BYTES;
            if (work.quarter == WHOLE) ptxlab::fetch_mixed(output_tile, slot, operands, tile.block);
            else ptxlab::fetch_mixed(quarter_of(output_tile, work.quarter), slot, operands, tile.block);
        }
        ptxlab::cp_async_commit();
    };

    PHASE(LOAD);
    for (int i = 0; i < STAGES - 1; ++i) fetch(i);
    for (int i = 0; i < count; ++i) {
        PHASE(WAIT_COPY);
        ptxlab::cp_async_wait<STAGES - 2>();
        __syncthreads();  // the operands are there for everyone, and the oldest slot is free
        PHASE(LOAD);
        fetch(i + STAGES - 1);
        PHASE(MULTIPLY);
        const Work work = block_tiles[i];
        const ptxlab::MixedTile tile(work.number, y_parts, operands);
        const Tile output_tile = output_tile_at(tile.part_index);
        const unsigned char* slot = ring + i % STAGES * STAGE_BYTES;
        if (work.quarter == WHOLE) ptxlab::multiply_mixed(output_tile, slot, operands, tile.block, sums);
        else ptxlab::multiply_mixed(quarter_of(output_tile, work.quarter), slot, operands, tile.block, sums);
        PHASE(EPILOGUE);
        unsigned* pieces = counted + size_t(output_tile.token0) * ((N + 63) / 64) + output_tile.row0 / 64;
        if (ptxlab::is_last(pieces, work.quarter == WHOLE ? PIECES : 1, PIECES * operands.blocks()))
            ptxlab::scale_and_reduce<OUT>(output_tile, operands, sums, bias, y);
    }
}
