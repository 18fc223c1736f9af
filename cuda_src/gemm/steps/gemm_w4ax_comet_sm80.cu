// gemm_w4ax_comet_sm80: Y = X W^T, blocks of INT4 and INT8 activations, INT4 weights; tiles cut too (COMET section 4.4).
//
// Contract   that of gemm_w4ax_naive_sm80, bit for bit, with any number of blocks in the grid: y = sum over the blocks of
//            128 channels, K4 channels of INT4 and then K8 of INT8, of sum_b[m, n] * (x_scale[m, b] * w_scale[n, b]) +
//            bias, one fma after the other in f32 from 0 on, then rounded to the output (OUT 0 f16, 1 bf16, 2 f32).
// Shows      gemm_w4ax_remap_sm80, and tile decomposition: where the last round of tiles would leave SMs idle, these take
//            quarters, 64 x 64 of Y, of the tiles of that round. All warps of a block multiply a quarter together, so that it
//            takes a quarter of the time. Nothing is cut if too few INT4 tiles follow the last round of INT8 tiles to
//            fill it. Who takes which quarter is fixed beforehand, so that no queue is asked and every run is alike. In COMET
//            idle SMs steal at run time (COMET section 4.4, Fig. 8e): gemm_w4ax_steal_sm80.
// Guide      notebooks/guide/kernels_gemm.md: order of tiles, schedule, constants
// PTX ISA    9.7.14 mma.m16n8k64 (.s4), mma.m16n8k32 (.s8), ldmatrix; 9.7.9 cp.async with zero fill; 9.7.13.5 atom.acq_rel
#include "mixed_tiles.cuh"
#include "timeline.cuh"

#ifndef BN
#define BN 128
#define BM 128
#define WM 2
#define STAGES 3
#define RATIO 2
#define OUT 0  // y as 0 f16, 1 bf16, 2 f32
#endif

namespace {

using Tile = ptxlab::RowsTile<BN, BM, WM>;
using Quarter = ptxlab::RowsTile<BN / 2, BM / 2, 2 * WM>;
constexpr int STAGE_BYTES = Tile::W_BYTES + 2 * Tile::X_BYTES;  // of 128 channels; the second X of INT8 alone
constexpr int PIECES = 4;
static_assert(Quarter::THREADS == Tile::THREADS, "all warps multiply a quarter");

// The tile with a number, or its quarter of 0..3 (token half, row half).
struct Work {
    int number, quarter;
};
constexpr int WHOLE = -1;

// Of the last round's tiles, which `cut` blocks have, quarters go away: from the block that ends last to the one that
// ends first, of several the lowest, while it helps. So moved quarter k comes from block k mod cut, as the last quarter
// it has, and goes to the idle block k mod idle.
struct DecomposedTiles : ptxlab::RemappedTiles<RATIO> {
    const int cut, idle, moved_quarters, given_quarters, received_quarters, whole_tiles;

    __device__ __forceinline__ DecomposedTiles(int int8, int int4)
        : RemappedTiles(int8, int4), cut(int4 ? rest % blocks : late), idle(blocks - cut),
          moved_quarters(helpful(cut, idle)), given_quarters(me < cut ? share(moved_quarters, me, cut) : 0),
          received_quarters(me < cut ? 0 : share(moved_quarters, me - cut, idle)),
          whole_tiles(RemappedTiles::count() - (given_quarters > 0)) {}

    // Quarters to move until a block that gave a of them away and one that received b would end no further apart than a
    // quarter: a + b = 3.
    static __device__ __forceinline__ int helpful(int cut, int idle) {
        return min(min(3 * idle, max(cut, 2 * idle)), min(max(2 * cut, idle), 3 * cut));
    }

    __device__ __forceinline__ int count() const {
        return whole_tiles + (given_quarters ? PIECES - given_quarters : received_quarters);
    }

    __device__ __forceinline__ Work operator[](int i) const {
        if (i < whole_tiles) return {RemappedTiles::operator[](i), WHOLE};
        i -= whole_tiles;
        const int first_cut_tile = int8 + int4 - cut;
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
    unsigned* counted,  // u32 [M, N / 64]: quarters of a part that are done, at its first token and row; 0
    int* sums,          // s32 [M, (K4 + K8) / 128, N]
    int M, int N, int K4, int K8) {
    extern __shared__ __align__(128) unsigned char ring[];
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const ptxlab::MixedOperands operands{w, w_scale, x4, x8, x_scale, M, N, K4, K8};
    const int across = (N + BN - 1) / BN, parts = (M + BM - 1) / BM * across;
    const DecomposedTiles block_tiles(parts * (K8 / 128), parts * (K4 / 128));
    const int count = block_tiles.count();
    const auto output_tile_at = [&](int part_index) {
        return Tile(M, N, part_index / across * BM, part_index % across * BN);
    };
    const auto quarter_of = [&](const Tile& output_tile, int quarter) {
        return Quarter(M, N, output_tile.token0 + quarter / 2 * (BM / 2), output_tile.row0 + quarter % 2 * (BN / 2));
    };
    const auto fetch = [&](int i) {
        if (i < count) {
            const Work work = block_tiles[i];
            const ptxlab::MixedTile tile(work.number, parts, operands);
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
        const ptxlab::MixedTile tile(work.number, parts, operands);
        const Tile output_tile = output_tile_at(tile.part_index);
        const unsigned char* slot = ring + i % STAGES * STAGE_BYTES;
        if (work.quarter == WHOLE) ptxlab::multiply_mixed(output_tile, slot, operands, tile.block, sums);
        else ptxlab::multiply_mixed(quarter_of(output_tile, work.quarter), slot, operands, tile.block, sums);
        PHASE(EPILOGUE);
        unsigned* pieces = counted + size_t(output_tile.token0) * ((N + 63) / 64) + output_tile.row0 / 64;
        if (ptxlab::is_last(pieces, work.quarter == WHOLE ? PIECES : 1, PIECES * operands.blocks()))
            ptxlab::put_together<OUT>(output_tile, operands, sums, bias, y);
    }
}
