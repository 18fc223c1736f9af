// Equal shares of ragged work: all tiles of all sequences, one after the other, in pieces that cost the same.
#pragma once

namespace ptxlab {

constexpr int TILE = 64;  // tokens
constexpr int SLACK = 4;  // tiles more than its share that a block may get, so that no unit has to be put together

// Walks over the segments of one block: what of a unit (a sequence, a head of it) lies in the block's piece. Units are ordered by sequence, then
// head; each costs its tiles and, the fewer they are, up to PAD more, which stand before them: what is done once per unit hides behind many tiles
// alone. No piece is smaller than SMALLEST: to put parts together costs more than it would save. Everything follows from `lengths`, on the device:
// nothing is planned on the host.
template <int PAD, int SMALLEST = 1>
struct Segments {
    const int* lengths;
    int units, queries, window;  // heads of a sequence; queries at its end; 0: no window
    int piece, from, to;         // cost of a block; the block's range of costs
    int sequence, unit, length;  // of this segment
    int start, begin, tiles, pad;  // of its unit: where it lies among all costs; its first tile in the window; how many; what is before them

    // Of what is not negative.
    static __device__ __forceinline__ int ceil_div(unsigned a, unsigned b) { return int((a + b - 1) / b); }

    __device__ __forceinline__ int first_tile(int length) const { return window > 0 ? unsigned(max(0, length - queries + 1 - window)) / TILE : 0; }
    __device__ __forceinline__ int tiles_of(int length) const { return length > 0 ? ceil_div(length, TILE) - first_tile(length) : 0; }
    static __device__ __forceinline__ int pad_of(int tiles) { return max(0, PAD - tiles / 4); }
    __device__ __forceinline__ int cost_of(int length) const { return length > 0 ? tiles_of(length) + pad_of(tiles_of(length)) : 0; }

    // Every lane has equally many sequences, one after the other: the first one's length, to be on its way early.
    static __device__ __forceinline__ int nearest_of(const int* lengths, int sequences) {
        const int first = threadIdx.x % 32 * ceil_div(sequences, 32);
        return first < sequences ? lengths[first] : 0;
    }

    Segments() = default;

    // All lanes of a warp together.
    __device__ __forceinline__ Segments(const int* lengths, int nearest, int sequences, int units, int queries, int window)
        : lengths(lengths), units(units), queries(queries), window(window) {
        const int share = ceil_div(sequences, 32), first = threadIdx.x % 32 * share;
        const int cost = cost_of(nearest);
        int mine = cost, most = cost;
#pragma unroll 4
        for (int s = first + 1; s < min(first + share, sequences); ++s) {
            const int more = cost_of(lengths[s]);
            mine += more, most = max(most, more);
        }
        int upto = mine;                                                     // costs of a head in the sequences up to this lane's
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(~0u, upto, step);
            if (threadIdx.x % 32 >= step) upto += before;
        }
        const int sum = __shfl_sync(~0u, upto, 31), all = sum * units;
        most = max(1, int(__reduce_max_sync(~0u, unsigned(most))));
        piece = max(SMALLEST, ceil_div(all, gridDim.x));
        const int whole = ceil_div(piece, most) * most;                      // of units that are all alike
        if (sum == most * sequences && whole <= piece + SLACK) piece = whole;
        from = min(int(blockIdx.x) * piece, all);
        to = min(from + piece, all);
        start = to, sequence = unit = 0, set(0);
        if (from == to) return;
        const int found = __ffs(__ballot_sync(~0u, upto * units > from)) - 1;
        int before = __shfl_sync(~0u, upto - mine, found);                   // costs of a head in the sequences before this one
        sequence = found * share;
        set(__shfl_sync(~0u, nearest, found));
        while ((before + pad + tiles) * units <= from) before += pad + tiles, set(lengths[++sequence]);
        const int of_sequence = before * units;
        unit = int(unsigned(from - of_sequence) / unsigned(pad + tiles));
        start = of_sequence + unit * (pad + tiles);
        if (more() && count() <= 0) advance();
    }

    __device__ __forceinline__ bool more() const { return start < to; }
    // Of this unit's tiles, the first that is the block's, and how many are.
    __device__ __forceinline__ int first() const { return max(0, from - start - pad); }
    __device__ __forceinline__ int count() const { return min(tiles, to - start - pad) - first(); }
    // The blocks that have segments of this unit: the first, and how many.
    __device__ __forceinline__ int first_block() const { return int(unsigned(start + pad) / unsigned(piece)); }
    __device__ __forceinline__ int blocks() const { return int(unsigned(start + pad + tiles - 1) / unsigned(piece)) - first_block() + 1; }

    // On to the next segment that has a tile.
    __device__ __forceinline__ void advance() {
        do {
            start += pad + tiles;
            if (!more()) return;
            if (++unit == units) {
                unit = 0;
                do set(lengths[++sequence]);
                while (length == 0);
            }
        } while (count() <= 0);
    }

  private:
    __device__ __forceinline__ void set(int tokens) { length = tokens, tiles = tiles_of(tokens), pad = tokens > 0 ? pad_of(tiles) : 0, begin = first_tile(tokens); }
};

}  // namespace ptxlab
