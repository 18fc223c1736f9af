// Equal shares of ragged work: all tiles of all sequences, one after the other, cut into pieces that cost the same; or,
// for sums that do not depend on the batch, into parts that depend on a sequence's own length alone.
#pragma once
#include "reciprocal.cuh"

namespace ptxlab {

constexpr int TILE = 64;               // tokens
constexpr int NO_WINDOW = 0x7fffff00;  // tokens: more than any sequence has, and yet far enough from the largest s32

// State of a unit that is cut: tiles of a part, this segment's first tile, the first tile behind the block's.
template <bool>
struct Cut {};
template <>
struct Cut<true> {
    int part_tiles, next_tile, end_tile;
};

// Walks over the segments of one block. A segment is what lies in the block's piece of a unit (one of `units` of a
// sequence: queries of one KV head). Units are ordered by sequence, then head. A unit costs its tiles and, the fewer
// they are, up to PAD more, which stand before them: what is done once per unit hides behind many tiles alone. No piece
// is smaller than SMALLEST, nor than 8 tiles or an eighth of the largest unit, whichever is less: to merge parts costs
// more than it would save. A block may get SPARE tiles more than its share, so that no unit has to be merged.
// Everything follows from `lengths`, on the device: nothing is planned on the host.
//
// With CUT, a unit is cut into parts of CUT tiles (long ones into larger parts, CUTS at most), whatever lies in the
// other sequences and however many blocks there are. A part belongs to the block in whose piece its first tile lies,
// and is a segment by itself.
template <int PAD, int SPARE, int SMALLEST = 1, int CUT = 0, int CUTS = 0>
struct Segments : Cut<(CUT > 0)> {
    static_assert(CUT == 0 || CUTS > 0, "a unit that is cut has parts");
    const int* lengths;
    int units, queries, window;            // heads of a sequence; queries at its end; tokens that a query sees at most
    int block_cost, cost_begin, cost_end;  // cost of a block; the block's range of costs
    int sequence, unit_index, length;      // of this segment
    // of its unit: where it begins among all costs; its first tile in the window; its tiles; cost of the padding before
    // them
    int start, window_tile, tiles, padding;

    // Return a number just below 1 / b.
    static __device__ __forceinline__ float reciprocal_below(int b) { return reciprocal_approx(float(b)) * 0.999999f; }
    // Return a / b rounded up, for 0 <= a, 1 <= b and a + b < 2^31, in half the instructions of a division: a float
    // quotient from below, then counted up. `reciprocal`: reciprocal_below(b).
    static __device__ __forceinline__ int ceil_div(int a, int b) { return ceil_div(a, b, reciprocal_below(b)); }
    static __device__ __forceinline__ int ceil_div(int a, int b, float reciprocal) {
        int quotient = int(float(a) * reciprocal);
#pragma unroll 1
        while (quotient * b < a) ++quotient;
        return quotient;
    }

    // Return a / b rounded down.
    static __device__ __forceinline__ int div(int a, int b) { return ceil_div(a + 1, b) - 1; }

    Segments() = default;

    // Return how many sequences a lane has, which are consecutive.
    static __device__ __forceinline__ int share_of(int sequences) { return unsigned(sequences + 31) / 32; }
    // Return the length of a lane's first sequence, loaded early.
    static __device__ __forceinline__ int first_length_of(const int* lengths, int sequences) {
        const int first_sequence = threadIdx.x % 32 * share_of(sequences);
        return first_sequence < sequences ? lengths[first_sequence] : 0;
    }

    // Find the block's first segment. All lanes of a warp call together. A block runs through this once, with nothing
    // to do meanwhile, and most of the time waits for instructions: few of them matter more than fast ones.
    __device__ __forceinline__ Segments(const int* lengths, int first_length, int sequences, int units, int queries,
                                        int window)
        : lengths(lengths), units(units), queries(queries), window(window > 0 ? window : NO_WINDOW) {
        const int share = share_of(sequences), first_sequence = threadIdx.x % 32 * share;
        // of a block: worked out while lengths are on their way
        const int units_per_block = ceil_div(sequences * units, gridDim.x);
        const float per_block = reciprocal_below(gridDim.x);
        enter_sequence(first_length);
        int lane_cost = first_sequence < sequences ? padding + tiles : 0, largest_cost = lane_cost;
#pragma unroll 1
        for (int s = first_sequence + 1; s < min(first_sequence + share, sequences); ++s) {
            enter_sequence(lengths[s]);
            lane_cost += padding + tiles, largest_cost = max(largest_cost, padding + tiles);
        }
        const int cost_sum = __reduce_add_sync(~0u, unsigned(lane_cost)), total_cost = cost_sum * units;
        int cost_through_lane = lane_cost;  // costs of a head in the sequences up to this lane's
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int cost_before = __shfl_up_sync(~0u, cost_through_lane, step);
            if (threadIdx.x % 32 >= step) cost_through_lane += cost_before;
        }
        largest_cost = max(1, int(__reduce_max_sync(~0u, unsigned(largest_cost))));
        // units of up to 64 tiles: 8 parts or so
        block_cost = max(max(SMALLEST, min(largest_cost / 8, 8)), ceil_div(total_cost, gridDim.x, per_block));
        const int whole_cost = units_per_block * largest_cost;
        if (cost_sum == largest_cost * sequences && whole_cost >= block_cost && whole_cost <= block_cost + SPARE)
            block_cost = whole_cost;  // units are all alike
        cost_begin = min(int(blockIdx.x) * block_cost, total_cost);
        cost_end = min(cost_begin + block_cost, total_cost);
        start = cost_end, sequence = unit_index = 0;
        if (cost_begin == cost_end) return;
        const int holder = __ffs(__ballot_sync(~0u, cost_through_lane * units > cost_begin)) - 1;
        // costs of a head in the sequences before this one
        int cost_before = __shfl_sync(~0u, cost_through_lane - lane_cost, holder);
        sequence = holder * share;
        enter_sequence(__shfl_sync(~0u, first_length, holder));
#pragma unroll 1
        while ((cost_before + padding + tiles) * units <= cost_begin)
            cost_before += padding + tiles, enter_sequence(lengths[++sequence]);
        start = cost_before * units;
        // 32 heads at a time
        for (int skipped = 32; skipped == 32; unit_index += skipped, start += skipped * (padding + tiles))
            skipped = __popc(__ballot_sync(~0u, start + int(threadIdx.x % 32 + 1) * (padding + tiles) <= cost_begin));
        if constexpr (CUT > 0) enter_unit();
        if (has_segment() && tile_count() <= 0) advance();
    }

    __device__ __forceinline__ bool has_segment() const { return start < cost_end; }
    // The first of this unit's tiles that is the block's.
    __device__ __forceinline__ int first_tile() const {
        if constexpr (CUT > 0) return this->next_tile;
        else return max(0, cost_begin - start - padding);
    }
    // The number of this unit's tiles that are the block's.
    __device__ __forceinline__ int tile_count() const {
        if constexpr (CUT > 0) return min(this->part_tiles, this->end_tile - this->next_tile);
        else return min(tiles, cost_end - start - padding) - first_tile();
    }
    // The first block that has tiles of this segment's unit.
    __device__ __forceinline__ int first_block() const { return div(start + padding, block_cost); }
    // The number of blocks that have tiles of this segment's unit.
    __device__ __forceinline__ int block_count() const {
        return ceil_div(start + padding + tiles, block_cost) - first_block();
    }

    // With CUT: whether the unit begins in this block, and whether this is the block's last segment of it; the number of
    // the segment's part, and of parts.
    __device__ __forceinline__ bool begins_here() const { return start + padding >= cost_begin; }
    __device__ __forceinline__ bool ends_here() const { return this->next_tile + this->part_tiles >= this->end_tile; }
    __device__ __forceinline__ int part_index() const { return ceil_div(this->next_tile, this->part_tiles); }
    __device__ __forceinline__ int part_count() const { return ceil_div(tiles, this->part_tiles); }

    // Move on to the next segment that has a tile.
    __device__ __forceinline__ void advance() {
        if constexpr (CUT > 0)
            if ((this->next_tile += this->part_tiles) < this->end_tile) return;
        do {
            start += padding + tiles;
            if (!has_segment()) return;
            if (++unit_index == units) {
                unit_index = 0;
                do enter_sequence(lengths[++sequence]);
                while (length == 0);
            }
            if constexpr (CUT > 0) enter_unit();
        } while (tile_count() <= 0);
    }

private:
    // Return the number of the unit's tiles in parts that begin before a cost.
    __device__ __forceinline__ int tiles_before(int cost) const {
        return min(tiles, ceil_div(max(0, cost - start - padding), this->part_tiles) * this->part_tiles);
    }
    __device__ __forceinline__ void enter_unit() {
        this->next_tile = tiles_before(cost_begin), this->end_tile = tiles_before(cost_end);
    }

    __device__ __forceinline__ void enter_sequence(int tokens) {
        // The condition changes no result: without it ptxas keeps fewer registers, and works out addresses in the loops
        // of both kernels.
        length = max(0, tokens),
        window_tile = window < NO_WINDOW ? unsigned(max(0, length - queries + 1 - window)) / TILE : 0;
        tiles = int(unsigned(length + TILE - 1) / TILE) - window_tile;
        padding = length > 0 ? max(0, PAD - int(unsigned(tiles) / 4)) : 0;
        if constexpr (CUT > 0) this->part_tiles = max(CUT, int(unsigned(tiles + CUTS - 1) / CUTS));
    }
};

}  // namespace ptxlab
