// gemm_w4ax_steal_sm80: Y = X W^T, INT4 weights, INT4 and INT8 activation blocks; SMs steal (COMET section 4.4).
//
// Contract   that of gemm_w4ax_naive_sm80, bit for bit, with any number of blocks in the grid: y = sum over the blocks
//            of 128 channels, K4 channels of INT4 and then K8 of INT8, of sum_b[m, n] * (x_scale[m, b] * w_scale[n, b])
//            + bias, one fma after the other in f32 from 0 on, then rounded to the output (OUT 0 f16, 1 bf16, 2 f32).
// Shows      gemm_w4ax_remap_sm80 with tile decomposition at run time (COMET section 4.4, Fig. 8e): the tiles of the
//            last round, if it leaves SMs idle, are cut into quarters, 64 x 64 of Y. A block takes those of its own
//            tile one after the other; a block that has none left steals quarters of other blocks' tiles. A block that
//            is early does more, so the SMs need not be alike. An atomic add takes a quarter when its operands are
//            fetched. All warps of a block multiply a quarter together. Which block computes which quarter differs from
//            run to run; results do not.
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
// NOTHING: no work is left.
struct Work {
    int number, quarter;
};
constexpr int WHOLE = -1;
constexpr Work NOTHING = {-1, 0};

// This block's whole tiles, then quarters of the last round's tiles, which `cut` blocks have, while any are left.
struct StolenTiles : ptxlab::RemappedTiles<RATIO> {
    // Tiles of the last round, if that is not full; this block's other tiles; number of the last round's first tile.
    const int cut, whole_tiles, first_cut_tile;
    unsigned* taken;  // u32 [cut]: of each tile of the last round, how many quarters blocks have asked for

    __device__ __forceinline__ StolenTiles(int int8_tiles, int int4_tiles, unsigned* taken)
        : RemappedTiles(int8_tiles, int4_tiles), cut(int4_tiles ? rest % blocks : late),
          whole_tiles(RemappedTiles::count() - (me < cut)), first_cut_tile(int8_tiles + int4_tiles - cut),
          taken(taken) {}

    // Take a quarter of this block's own tile, or, if none is left, of the next blocks' tiles in turn. For one thread.
    __device__ __forceinline__ Work take() const {
        for (int i = 0; i < cut; ++i) {
            const int victim = (me + i) % cut;
            const unsigned quarter = atomicAdd(taken + victim, 1u);
            if (quarter < PIECES) return {first_cut_tile + victim, int(quarter)};
        }
        return NOTHING;
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(BN* WM, 1) gemm_w4ax_steal_sm80(
    const unsigned char* __restrict__ w,   // u8  [N, (K4 + K8) / 2]: pairs; behind K4 / 2 bytes in COMET's order
    const __half* __restrict__ w_scale,    // f16 [N, (K4 + K8) / 128 in whole eights]
    const unsigned char* __restrict__ x4,  // u8  [M, K4/2], two s4 a byte
    const unsigned char* __restrict__ x8,  // s8  [M, K8]
    const __half* __restrict__ x_scale,    // f16 [M, (K4 + K8) / 128 in whole eights]
    const float* __restrict__ bias,        // f32 [N], or null
    void* __restrict__ y,                  // [M, N], by OUT
    unsigned* counted,  // u32 [M, N / 64]: quarters of a part that are done, at its first token and row; 0 at first
    int* sums,          // s32 [M, (K4 + K8) / 128, N]
    unsigned* taken,    // u32 [blocks of the grid]: quarters taken of each cut tile; last, finished blocks; 0 at first
    int M, int N, int K4, int K8) {
    extern __shared__ __align__(128) unsigned char ring[];
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const ptxlab::MixedOperands operands{w, w_scale, x4, x8, x_scale, M, N, K4, K8};
    const int across = (N + BN - 1) / BN, y_parts = (M + BM - 1) / BM * across;
    const StolenTiles work_list(y_parts * (K8 / 128), y_parts * (K4 / 128), taken);
    // The work item of each slot of the ring, and one more: the oldest is still read while the newest is written.
    __shared__ Work works[STAGES + 1];
    const auto y_tile_of = [&](const ptxlab::MixedTile& tile) {  // the part of Y that a tile adds to
        return Tile(M, N, tile.part_index / across * BM, tile.part_index % across * BN);
    };
    // Quarter 0..3 of a tile of Y: 2 * token half + row half.
    const auto quarter_of = [&](const Tile& y_tile, int quarter) {
        return Quarter(M, N, y_tile.token0 + quarter / 2 * (BM / 2), y_tile.row0 + quarter % 2 * (BN / 2));
    };
    // Choose work item i of this block: its next whole tile, or a quarter that it takes.
    const auto choose = [&](int i) {
        if (threadIdx.x == 0)
            works[i % (STAGES + 1)] = i < work_list.whole_tiles ? Work{work_list[i], WHOLE} : work_list.take();
    };
    // Issue the copies of this block's work item i into its slot, as one commit group.
    const auto fetch = [&](int i) {
        const Work work = works[i % (STAGES + 1)];
        if (work.number >= 0) {
            const ptxlab::MixedTile tile(work.number, y_parts, operands);
            const Tile y_tile = y_tile_of(tile);
            unsigned char* slot = ring + i % STAGES * STAGE_BYTES;
            if (work.quarter == WHOLE) ptxlab::fetch_mixed(y_tile, slot, operands, tile.block);
            else ptxlab::fetch_mixed(quarter_of(y_tile, work.quarter), slot, operands, tile.block);
        }
        ptxlab::cp_async_commit();
    };

    PHASE(LOAD);
    for (int i = 0; i < STAGES - 1; ++i) choose(i);
    __syncthreads();
    for (int i = 0; i < STAGES - 1; ++i) fetch(i);
    for (int i = 0;; ++i) {
        PHASE(WAIT_COPY);
        choose(i + STAGES - 1);
        ptxlab::cp_async_wait<STAGES - 2>();
        __syncthreads();  // the operands are there for everyone, what comes next is chosen, and the oldest slot is free
        const Work work = works[i % (STAGES + 1)];
        if (work.number < 0) break;  // no work is left
        PHASE(LOAD);
        fetch(i + STAGES - 1);
        PHASE(MULTIPLY);
        const ptxlab::MixedTile tile(work.number, y_parts, operands);
        const Tile y_tile = y_tile_of(tile);
        const unsigned char* slot = ring + i % STAGES * STAGE_BYTES;
        if (work.quarter == WHOLE) ptxlab::multiply_mixed(y_tile, slot, operands, tile.block, sums);
        else ptxlab::multiply_mixed(quarter_of(y_tile, work.quarter), slot, operands, tile.block, sums);
        PHASE(EPILOGUE);
        unsigned* pieces = counted + size_t(y_tile.token0) * ((N + 63) / 64) + y_tile.row0 / 64;
        if (ptxlab::is_last(pieces, work.quarter == WHOLE ? PIECES : 1, PIECES * operands.blocks()))
            ptxlab::scale_and_reduce<OUT>(y_tile, operands, sums, bias, y);
    }
    // Thread 0 of every block took the quarters; that of the last block to end zeroes the counters for the next launch.
    if (threadIdx.x == 0) {
        __threadfence();  // what this block has taken comes before its end
        if (atomicAdd(taken + work_list.blocks - 1, 1u) == work_list.blocks - 1) {
            __threadfence();  // and every block's end before the zeros
            for (int i = 0; i < work_list.blocks; ++i) taken[i] = 0;
        }
    }
}
