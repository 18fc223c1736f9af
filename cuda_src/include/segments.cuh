// Equal shares of ragged work: all tiles of all sequences, one after the other, in pieces of the same number of tiles.
#pragma once

namespace ptxlab {

constexpr int TILE = 64;  // tokens

// Walks over the segments of one block: what of a unit (a sequence, a head of it) lies in the block's piece. Tiles are ordered by sequence, then
// head, then token. Everything follows from `lengths`, on the device: nothing is planned on the host.
struct Segments {
    const int* lengths;
    int units, queries, window;               // heads of a sequence; queries at its end; 0: no window
    int piece, at, left;                      // tiles of a block; where this segment begins among all tiles; tiles of this block from there on
    int sequence = 0, unit = 0, length = 0;   // of this segment
    int begin = 0, tiles = 0, first = 0;      // of its unit: the first tile that the window leaves, how many there are, the first of them here

    __device__ __forceinline__ static int ceil_div(int a, int b) { return (a + b - 1) / b; }

    __device__ __forceinline__ int first_tile(int length) const {
        return window > 0 ? max(0, length - queries + 1 - window) / TILE : 0;
    }
    __device__ __forceinline__ int tiles_of(int length) const { return length > 0 ? ceil_div(length, TILE) - first_tile(length) : 0; }

    // All lanes of a warp together.
    __device__ __forceinline__ Segments(const int* lengths, int sequences, int units, int queries, int window)
        : lengths(lengths), units(units), queries(queries), window(window) {
        const int lane = threadIdx.x % 32;
        const int nearest = lane < sequences ? tiles_of(lengths[lane]) : 0;  // one load for all there is, as a rule
        int sum = nearest;
        for (int s = lane + 32; s < sequences; s += 32) sum += tiles_of(lengths[s]);
        const int all = int(__reduce_add_sync(~0u, unsigned(sum))) * units;
        piece = max(1, ceil_div(all, int(gridDim.x)));
        at = min(int(blockIdx.x) * piece, all);
        left = min(piece, all - at);
        int before = 0;                                                      // tiles of a head in the sequences before these 32
        for (int s = 0; left > 0; s += 32) {
            const int mine = s == 0 ? nearest : s + lane < sequences ? tiles_of(lengths[s + lane]) : 0;
            int upto = mine;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(~0u, upto, step);
                if (lane >= step) upto += other;
            }
            const unsigned beyond = __ballot_sync(~0u, (before + upto) * units > at);
            if (beyond) {
                const int found = __ffs(beyond) - 1;
                sequence = s + found;
                tiles = __shfl_sync(~0u, mine, found);
                const int offset = at - (before + __shfl_sync(~0u, upto, found) - tiles) * units;
                unit = offset / tiles, first = offset % tiles;
                length = lengths[sequence], begin = first_tile(length);
                break;
            }
            before += __shfl_sync(~0u, upto, 31);
        }
    }

    __device__ __forceinline__ bool more() const { return left > 0; }
    __device__ __forceinline__ int count() const { return min(left, tiles - first); }
    // The blocks that have segments of this unit.
    __device__ __forceinline__ int first_block() const { return (at - first) / piece; }
    __device__ __forceinline__ int last_block() const { return (at - first + tiles - 1) / piece; }

    __device__ __forceinline__ void advance() {
        at += count(), left -= count();
        first = 0;
        if (left == 0 || ++unit < units) return;
        unit = 0;
        do length = lengths[++sequence], tiles = tiles_of(length);
        while (tiles == 0);
        begin = first_tile(length);
    }
};

}  // namespace ptxlab
