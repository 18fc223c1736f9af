// COMET's mixed tiles, divided among blocks: a part of Y is ROWS of W by COLUMNS tokens, and a tile is a part of Y over
// one block of 128 channels, whose activations are INT4 or INT8. Each kernel says which block of the grid has which
// tiles; here is how a tile is loaded and multiplied, and how a part of Y is computed from the sums of all its tiles.
#pragma once
#include "rows_sm80.cuh"

namespace ptxlab {

// A GEMM's operands; the blocks of channels of a part of Y are numbered, those of INT4 first.
struct MixedOperands {
    const unsigned char* w;   // u8  [N, (K4 + K8) / 2]: pairs; behind K4 / 2 bytes in COMET's order
    const __half* w_scale;    // f16 [N, blocks of channels in whole eights]
    const unsigned char* x4;  // u8  [M, K4 / 2], two s4 a byte
    const unsigned char* x8;  // s8  [M, K8]
    const __half* x_scale;    // f16 [M, blocks of channels in whole eights]
    int M, N, K4, K8;

    __device__ __forceinline__ int blocks4() const { return K4 / 128; }
    __device__ __forceinline__ int blocks() const { return (K4 + K8) / 128; }
};

// A tile by its number: the INT8 tiles of all parts of Y come first, then their INT4 tiles; those of a part one after
// the other, parts with the same tokens one after the other.
struct MixedTile {
    int part_index, block;

    __device__ __forceinline__ MixedTile(int number, int y_parts, const MixedOperands& operands) {
        const int blocks4 = operands.blocks4(), blocks8 = operands.K8 / 128, int8_tiles = y_parts * blocks8;
        if (number < int8_tiles) part_index = number / blocks8, block = blocks4 + number % blocks8;
        else part_index = (number - int8_tiles) / blocks4, block = (number - int8_tiles) % blocks4;
    }
};

// The tiles that a block of the grid works on, by number, if an INT8 tile takes as long as INT8_COST INT4 tiles: the
// next tile always goes to the block that is free first, of several to the lowest. So INT8 tiles go round; `early`
// blocks have none of the last round, and take the next INT8_COST * early INT4 tiles meanwhile; then INT4 tiles go
// round.
template <int INT8_COST>
struct RemappedTiles {
    const int blocks, me, int8_tiles, int4_tiles;  // blocks of the grid, this one; tiles of each kind
    // Blocks with an INT8 tile in the last round, if that is not full, and without; INT4 tiles that the latter take
    // then.
    const int late, early, meanwhile;
    const int own8, own_meanwhile, rest;

    __device__ __forceinline__ RemappedTiles(int int8_tiles, int int4_tiles)
        : blocks(gridDim.x), me(blockIdx.x), int8_tiles(int8_tiles), int4_tiles(int4_tiles), late(int8_tiles % blocks),
          early(late ? blocks - late : 0), meanwhile(min(INT8_COST * early, int4_tiles)),
          own8(share(int8_tiles, me, blocks)),
          own_meanwhile(early && me >= late ? share(meanwhile, me - late, early) : 0), rest(int4_tiles - meanwhile) {}

    // Return how many of `count` items number `number` of `among` gets when they are dealt in turn.
    static __device__ __forceinline__ int share(int count, int number, int among) {
        return (count - number + among - 1) / among;
    }

    __device__ __forceinline__ int count() const { return own8 + own_meanwhile + share(rest, me, blocks); }

    // Return the number of this block's tile i.
    __device__ __forceinline__ int operator[](int i) const {
        if (i < own8) return me + i * blocks;
        i -= own8;
        if (i < own_meanwhile) return int8_tiles + (me - late) + i * early;
        return int8_tiles + meanwhile + me + (i - own_meanwhile) * blocks;
    }
};

// Copy a tile's operands into a slot: 64 bytes of every row of W, and of every row of X 64 (INT4) or 128 (INT8).
template <class Tile>
__device__ __forceinline__ void fetch_mixed(const Tile& tile, unsigned char* slot, const MixedOperands& operands,
                                            int block) {
    unsigned char* x = slot + Tile::W_BYTES;
    tile.fetch_w(slot, operands.w, block * ROW_BYTES, (operands.K4 + operands.K8) / 2);
    if (block < operands.blocks4()) {
        tile.fetch_x(x, operands.x4, block * ROW_BYTES, operands.K4 / 2);
    } else {
        const int first_byte = (block - operands.blocks4()) * 128;
        tile.fetch_x(x, operands.x8, first_byte, operands.K8);
        tile.fetch_x(x + Tile::X_BYTES, operands.x8, first_byte + ROW_BYTES, operands.K8);
    }
}

// Multiply a tile and store its sums s32 [token][block][n]; those of an INT8 tile are times 16.
template <class Tile>
__device__ __forceinline__ void multiply_mixed(const Tile& tile, const unsigned char* slot,
                                               const MixedOperands& operands, int block, int* sums) {
    const unsigned char *w = slot + tile.w_at(), *x = slot + Tile::W_BYTES + tile.x_at();
    typename Tile::Sums acc = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (block < operands.blocks4()) tile.template multiply_half<true>(acc, w, x, half);
        else tile.multiply_switched(acc, w, x + half * Tile::X_BYTES, half);
    tile.for_each_sum(acc, [&](int token, int n, int sum) {
        sums[(size_t(token) * operands.blocks() + block) * operands.N + n] = sum;
    });
}

// Count `pieces` more of the `total` pieces of a part of Y; return true if these are the last: then all of the part's
// sums are there. `counted` is 0 before the first piece and after the last.
__device__ __forceinline__ bool is_last(unsigned* counted, unsigned pieces, unsigned total) {
    __syncthreads();  // the sums of all threads
    bool last = false;
    if (threadIdx.x == 0) {
        unsigned previous;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                     : "=r"(previous)
                     : "l"(counted), "r"(pieces)
                     : "memory");
        last = previous + pieces == total;
        if (last) *counted = 0;
    }
    return __syncthreads_or(last);
}

// Compute a part of Y from the sums of its tiles: scale them and add them up in the order of the channels, whichever
// block made them; a thread has eight neighbours.
template <int KIND, class Tile>
__device__ __forceinline__ void scale_and_reduce(const Tile& tile, const MixedOperands& operands, const int* sums,
                                                 const float* bias, void* y) {
    constexpr int EIGHTS = Tile::ROWS / 8;
    const int blocks = operands.blocks(), columns = (blocks + 7) / 8 * 8;  // scales of a row
    for (int i = threadIdx.x; i < Tile::COLUMNS * EIGHTS; i += Tile::THREADS) {
        const int token = tile.token0 + i / EIGHTS, n = tile.row0 + i % EIGHTS * 8;
        if (token >= operands.M || n >= operands.N) continue;
        float total[8] = {};
        for (int block = 0; block < blocks; ++block) {
            const int4* tile_sums =
                reinterpret_cast<const int4*>(sums + (size_t(token) * blocks + block) * operands.N + n);
            const int4 low = tile_sums[0], high = tile_sums[1];
            const int sum[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            const float counts = block < operands.blocks4() ? 1 : 1 / 16.0f;
            const float x = __half2float(operands.x_scale[size_t(token) * columns + block]) * counts;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float w = __half2float(operands.w_scale[size_t(n + j) * columns + block]);
                total[j] = __fmaf_rn(float(sum[j]), __fmul_rn(x, w), total[j]);
            }
        }
        if (bias)
#pragma unroll
            for (int j = 0; j < 8; ++j) total[j] = __fadd_rn(total[j], bias[n + j]);
        store_8_floats<KIND>(y, size_t(token) * operands.N + n, total);
    }
}

}  // namespace ptxlab
