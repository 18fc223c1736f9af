// Tiles of causal attention over ragged chunks of queries. A row is a query of one head; the heads that share a KV head
// lie together, so that a tile's rows are those of ROWS / group tokens.
#pragma once

namespace ptxlab {

// ROWS rows of one sequence and one KV head, and the blocks of keys that some of them see.
struct Tile {
    int sequence, head, row, queries;  // row: the first one's number among queries * group
    int start, context;                // the sequence's first query in q; its tokens
    int begin, end;                    // blocks

    // Tokens ahead of the queries' own ones. Negative if the sequence has fewer tokens than queries.
    __device__ __forceinline__ int old() const { return context - queries; }

    // The first token that a row of the sequence does not see. Rows beyond the last one count as that.
    __device__ __forceinline__ int visible_end(int number, int group) const {
        return context - queries + min(number / group, queries - 1) + 1;
    }

    __device__ __forceinline__ bool has(int number, int group) const { return number < queries * group; }

    // Where a row of the sequence lies among the rows [tokens, Hq] of q.
    __device__ __forceinline__ size_t place(int number, int group, int Hq) const {
        return size_t(start + number / group) * Hq + head * group + number % group;
    }
};

// Deals tiles to the blocks of the launch, in every other round in reverse, so that none has the longest of each. Of a
// sequence the last tiles, which see most keys, come first. All lanes of a warp ask together.
template <int ROWS, int BLOCK_KEYS>
struct TileScheduler {
    const int *starts, *lengths;  // [sequences + 1], [sequences]
    int sequences, heads, group, window;
    int round = 0, base = 0, passed = 0;  // rounds dealt; the first of 32 sequences; tiles of those ahead of it

    __device__ __forceinline__ bool next(Tile& tile) {
        const int lane = threadIdx.x % 32;
        const int number = round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        ++round;
        for (;; base += 32) {
            const int sequence = base + lane;
            const int queries = sequence < sequences ? starts[sequence + 1] - starts[sequence] : 0;
            const int of_lane = (queries * group + ROWS - 1) / ROWS * heads;
            int through_lane = of_lane;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int lower = __shfl_up_sync(~0u, through_lane, step);
                if (lane >= step) through_lane += lower;
            }
            const unsigned holders = __ballot_sync(~0u, number - passed < through_lane);
            if (holders) {
                const int holder = __ffs(holders) - 1;
                const int local = number - passed - __shfl_sync(~0u, through_lane - of_lane, holder);
                const int tiles = __shfl_sync(~0u, of_lane, holder) / heads;
                tile.sequence = base + holder, tile.head = local % heads;
                tile.row = (tiles - 1 - local / heads) * ROWS;
                tile.queries = __shfl_sync(~0u, queries, holder);
                tile.start = starts[tile.sequence], tile.context = lengths[tile.sequence];
                const int first_end = tile.visible_end(tile.row, group);
                const int last_end = tile.visible_end(tile.row + ROWS - 1, group);
                tile.begin = window > 0 ? max(0, first_end - window) / BLOCK_KEYS : 0;
                tile.end = last_end > 0 ? max(tile.begin, (last_end + BLOCK_KEYS - 1) / BLOCK_KEYS) : tile.begin;
                return true;
            }
            if (base + 32 >= sequences) return false;
            passed += __shfl_sync(~0u, through_lane, 31);
        }
    }
};

}  // namespace ptxlab
