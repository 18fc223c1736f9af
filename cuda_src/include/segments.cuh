// Equal shares of ragged work: all tiles of all sequences, one after the other, in pieces that cost the same; or, for
// sums that do not depend on the batch, in parts that depend on a sequence's own length alone.
#pragma once
#include "reciprocal.cuh"

namespace ptxlab {

constexpr int TILE = 64;               // tokens
constexpr int NO_WINDOW = 0x7fffff00;  // tokens: more than any sequence has, and yet far enough from the largest s32

// Of a unit that is cut: tiles of a part; of its tiles this segment's first, and behind the block's.
template <bool>
struct Cut {};
template <>
struct Cut<true> {
    int part, at, stop;
};

// Walks over the segments of one block: what of a unit (a sequence, a head of it) lies in the block's piece. Units are
// ordered by sequence, then head; each costs its tiles and, the fewer they are, up to PAD more, which stand before
// them: what is done once per unit hides behind many tiles alone. No piece is smaller than SMALLEST, nor than 8 tiles
// or an eighth of the largest unit: to put parts together costs more than it would save. A block may get SPARE tiles
// more than its share, so that no unit has to be put together. Everything follows from `lengths`, on the device:
// nothing is planned on the host.
//
// With CUT, a unit is cut every CUT tiles (of long ones so that there are CUTS parts), whatever lies in the other
// sequences and however many blocks there are. A part is the block's in whose piece its first tile lies, and is a
// segment by itself.
template <int PAD, int SPARE, int SMALLEST = 1, int CUT = 0, int CUTS = 0>
struct Segments : Cut<(CUT > 0)> {
    static_assert(CUT == 0 || CUTS > 0, "a unit that is cut has parts");
    const int* lengths;
    int units, queries, window;  // heads of a sequence; queries at its end; tokens that a query sees at most
    int piece, from, to;         // cost of a block; the block's range of costs
    int sequence, unit, length;  // of this segment
    // of its unit: where it lies among all costs; its first tile in the window; how many; what is before them
    int start, begin, tiles, pad;

    // a / b rounded up, for 0 <= a, 1 <= b and a + b < 2^31, in half the instructions of a division: from below, in
    // float.
    static __device__ __forceinline__ float reciprocal_below(int b) { return reciprocal_approx(float(b)) * 0.999999f; }
    static __device__ __forceinline__ int ceil_div(int a, int b) { return ceil_div(a, b, reciprocal_below(b)); }
    static __device__ __forceinline__ int ceil_div(int a, int b, float reciprocal) {
        int quotient = int(float(a) * reciprocal);
#pragma unroll 1
        while (quotient * b < a) ++quotient;
        return quotient;
    }

    // The same rounded down.
    static __device__ __forceinline__ int div(int a, int b) { return ceil_div(a + 1, b) - 1; }

    Segments() = default;

    // Every lane has equally many sequences, one after the other: the first one's length, to be on its way early.
    static __device__ __forceinline__ int share_of(int sequences) { return unsigned(sequences + 31) / 32; }
    static __device__ __forceinline__ int nearest_of(const int* lengths, int sequences) {
        const int first = threadIdx.x % 32 * share_of(sequences);
        return first < sequences ? lengths[first] : 0;
    }

    // All lanes of a warp together. A block runs through this once, with nothing to do meanwhile, and most of the time
    // waits for instructions: few of them matter more than fast ones.
    __device__ __forceinline__ Segments(const int* lengths, int nearest, int sequences, int units, int queries,
                                        int window)
        : lengths(lengths), units(units), queries(queries), window(window > 0 ? window : NO_WINDOW) {
        const int share = share_of(sequences), first = threadIdx.x % 32 * share;
        // of a block: worked out while lengths are on their way
        const int whole_units = ceil_div(sequences * units, gridDim.x);
        const float per_block = reciprocal_below(gridDim.x);
        set(nearest);
        int mine = first < sequences ? pad + tiles : 0, most = mine;
#pragma unroll 1
        for (int s = first + 1; s < min(first + share, sequences); ++s) {
            set(lengths[s]);
            mine += pad + tiles, most = max(most, pad + tiles);
        }
        const int sum = __reduce_add_sync(~0u, unsigned(mine)), all = sum * units;
        int upto = mine;  // costs of a head in the sequences up to this lane's
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(~0u, upto, step);
            if (threadIdx.x % 32 >= step) upto += before;
        }
        most = max(1, int(__reduce_max_sync(~0u, unsigned(most))));
        // units of up to 64 tiles: 8 parts or so
        piece = max(max(SMALLEST, min(most / 8, 8)), ceil_div(all, gridDim.x, per_block));
        const int whole = whole_units * most;
        if (sum == most * sequences && whole >= piece && whole <= piece + SPARE) piece = whole;  // units are all alike
        from = min(int(blockIdx.x) * piece, all);
        to = min(from + piece, all);
        start = to, sequence = unit = 0;
        if (from == to) return;
        const int found = __ffs(__ballot_sync(~0u, upto * units > from)) - 1;
        int before = __shfl_sync(~0u, upto - mine, found);  // costs of a head in the sequences before this one
        sequence = found * share;
        set(__shfl_sync(~0u, nearest, found));
#pragma unroll 1
        while ((before + pad + tiles) * units <= from) before += pad + tiles, set(lengths[++sequence]);
        start = before * units;
        for (int passed = 32; passed == 32; unit += passed, start += passed * (pad + tiles))  // 32 heads at a time
            passed = __popc(__ballot_sync(~0u, start + int(threadIdx.x % 32 + 1) * (pad + tiles) <= from));
        if constexpr (CUT > 0) enter();
        if (more() && count() <= 0) advance();
    }

    __device__ __forceinline__ bool more() const { return start < to; }
    // Of this unit's tiles, the first that is the block's, and how many are.
    __device__ __forceinline__ int first() const {
        if constexpr (CUT > 0) return this->at;
        else return max(0, from - start - pad);
    }
    __device__ __forceinline__ int count() const {
        if constexpr (CUT > 0) return min(this->part, this->stop - this->at);
        else return min(tiles, to - start - pad) - first();
    }
    // The blocks that have segments of this unit: the first, and how many.
    __device__ __forceinline__ int first_block() const { return div(start + pad, piece); }
    __device__ __forceinline__ int blocks() const { return ceil_div(start + pad + tiles, piece) - first_block(); }

    // With CUT: whether the unit begins in this block, and whether this is the block's last segment of it; the number of
    // the segment's part, and of parts.
    __device__ __forceinline__ bool is_begun_here() const { return start + pad >= from; }
    __device__ __forceinline__ bool is_last_here() const { return this->at + this->part >= this->stop; }
    __device__ __forceinline__ int number() const { return ceil_div(this->at, this->part); }
    __device__ __forceinline__ int parts() const { return ceil_div(tiles, this->part); }

    // On to the next segment that has a tile.
    __device__ __forceinline__ void advance() {
        if constexpr (CUT > 0)
            if ((this->at += this->part) < this->stop) return;
        do {
            start += pad + tiles;
            if (!more()) return;
            if (++unit == units) {
                unit = 0;
                do set(lengths[++sequence]);
                while (length == 0);
            }
            if constexpr (CUT > 0) enter();
        } while (count() <= 0);
    }

private:
    // Tiles of the unit in parts that begin before a cost.
    __device__ __forceinline__ int before(int cost) const {
        return min(tiles, ceil_div(max(0, cost - start - pad), this->part) * this->part);
    }
    __device__ __forceinline__ void enter() { this->at = before(from), this->stop = before(to); }

    __device__ __forceinline__ void set(int tokens) {
        // The condition changes no result: without it ptxas keeps fewer registers, and works out addresses in the loops
        // of both kernels.
        length = max(0, tokens),
        begin = window < NO_WINDOW ? unsigned(max(0, length - queries + 1 - window)) / TILE : 0;
        tiles = int(unsigned(length + TILE - 1) / TILE) - begin;
        pad = length > 0 ? max(0, PAD - int(unsigned(tiles) / 4)) : 0;
        if constexpr (CUT > 0) this->part = max(CUT, int(unsigned(tiles + CUTS - 1) / CUTS));
    }
};

}  // namespace ptxlab
