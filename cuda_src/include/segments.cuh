// Equal shares of ragged work: all tiles of all sequences, one after the other, in pieces that cost the same.
#pragma once

namespace ptxlab {

constexpr int TILE = 64;  // tokens

// Walks over the segments of one block: what of a unit (a sequence, a head of it) lies in the block's piece. Units are ordered by sequence, then
// head; each costs its tiles, but LEAST at least, since there is work beside them: what it has too few stands before them. Everything follows from
// `lengths`, on the device: nothing is planned on the host.
template <int LEAST_COST>
struct Segments {
    const int* lengths;
    int units, queries, window;  // heads of a sequence; queries at its end; 0: no window
    int piece, from, to;         // cost of a block; the block's range of costs
    int sequence = 0, unit = 0, length = 0;  // of this segment
    int start, begin = 0, tiles = 0, pad = 0;  // of its unit: where it lies among all costs; its first tile in the window; how many; what is before them

    static __device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

    __device__ __forceinline__ int first_tile(int length) const { return window > 0 ? max(0, length - queries + 1 - window) / TILE : 0; }
    __device__ __forceinline__ int tiles_of(int length) const { return length > 0 ? ceil_div(length, TILE) - first_tile(length) : 0; }
    __device__ __forceinline__ int cost_of(int length) const { return length > 0 ? max(tiles_of(length), LEAST_COST) : 0; }

    // All lanes of a warp together.
    __device__ __forceinline__ Segments(const int* lengths, int sequences, int units, int queries, int window)
        : lengths(lengths), units(units), queries(queries), window(window) {
        const int lane = threadIdx.x % 32;
        const int nearest = lane < sequences ? lengths[lane] : 0;            // one load for all there is, as a rule
        int sum = cost_of(nearest);
        for (int s = lane + 32; s < sequences; s += 32) sum += cost_of(lengths[s]);
        const int all = int(__reduce_add_sync(~0u, unsigned(sum))) * units;
        piece = max(1, ceil_div(all, int(gridDim.x)));
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
    __device__ __forceinline__ void set(int tokens) { length = tokens, tiles = tiles_of(tokens), pad = max(0, LEAST_COST - tiles), begin = first_tile(tokens); }
};

}  // namespace ptxlab
