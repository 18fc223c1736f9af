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
    int sequence = 0, unit = 0, length = 0;  // of this segment
    int start, begin = 0, tiles = 0, pad = 0;  // of its unit: where it lies among all costs; its first tile in the window; how many; what is before them

    static __device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

    __device__ __forceinline__ int first_tile(int length) const { return window > 0 ? max(0, length - queries + 1 - window) / TILE : 0; }
    __device__ __forceinline__ int tiles_of(int length) const { return length > 0 ? ceil_div(length, TILE) - first_tile(length) : 0; }
    static __device__ __forceinline__ int pad_of(int tiles) { return max(0, PAD - tiles / 4); }
    __device__ __forceinline__ int cost_of(int length) const { return length > 0 ? tiles_of(length) + pad_of(tiles_of(length)) : 0; }

    // All lanes of a warp together.
    __device__ __forceinline__ Segments(const int* lengths, int sequences, int units, int queries, int window)
        : lengths(lengths), units(units), queries(queries), window(window) {
        const int lane = threadIdx.x % 32;
        const int nearest = lane < sequences ? lengths[lane] : 0;            // one load for all there is, as a rule
        int sum = cost_of(nearest), most = sum;
        for (int s = lane + 32; s < sequences; s += 32) {
            const int cost = cost_of(lengths[s]);
            sum += cost, most = max(most, cost);
        }
        sum = int(__reduce_add_sync(~0u, unsigned(sum))), most = max(1, int(__reduce_max_sync(~0u, unsigned(most))));
        const int all = sum * units;
        piece = max(SMALLEST, ceil_div(all, int(gridDim.x)));
        const int whole = ceil_div(piece, most) * most;                      // of units that are all alike
        if (sum == most * sequences && whole <= piece + SLACK) piece = whole;
        from = min(int(blockIdx.x) * piece, all);
        to = min(from + piece, all);
        start = to;
        if (from == to) return;
        for (int s = 0, before = 0;; s += 32) {                              // `before`: costs of a head in the sequences before these 32
            const int mine = s == 0 ? nearest : s + lane < sequences ? lengths[s + lane] : 0;
            int upto = cost_of(mine);
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(~0u, upto, step);
                if (lane >= step) upto += other;
            }
            const unsigned beyond = __ballot_sync(~0u, (before + upto) * units > from);
            if (beyond) {
                const int found = __ffs(beyond) - 1;
                sequence = s + found;
                set(__shfl_sync(~0u, mine, found));
                const int of_sequence = (before + __shfl_sync(~0u, upto, found) - pad - tiles) * units;
                unit = (from - of_sequence) / (pad + tiles);
                start = of_sequence + unit * (pad + tiles);
                break;
            }
            before += __shfl_sync(~0u, upto, 31);
        }
        if (more() && count() <= 0) advance();
    }

    __device__ __forceinline__ bool more() const { return start < to; }
    // Of this unit's tiles, the first that is the block's, and how many are.
    __device__ __forceinline__ int first() const { return max(0, from - start - pad); }
    __device__ __forceinline__ int count() const { return min(tiles, to - start - pad) - first(); }
    // The blocks that have segments of this unit: the first, and how many.
    __device__ __forceinline__ int first_block() const { return (start + pad) / piece; }
    __device__ __forceinline__ int blocks() const { return (start + pad + tiles - 1) / piece - first_block() + 1; }

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
    __device__ __forceinline__ void set(int tokens) { length = tokens, tiles = tiles_of(tokens), pad = pad_of(tiles), begin = first_tile(tokens); }
};

}  // namespace ptxlab
