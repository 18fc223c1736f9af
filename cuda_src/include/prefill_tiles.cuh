// Tiles of causal attention over ragged chunks of queries, and their order. A row is a query of one head; the heads that
// share a KV head lie together, so that a tile's rows are those of ROWS / group tokens.
#pragma once

namespace ptxlab {

// A tile: ROWS rows of one sequence and one KV head, and the blocks of keys that some of them see, or a part of these
// blocks.
struct Tile {
    int sequence, head, first_row, queries;  // first_row: among the sequence's queries * group rows
    int start, context;                      // the sequence's first query in q; its tokens
    int begin, end;                          // blocks
    int item, part_index, parts;             // the work item; which part of the tile it is, and of how many

    // Return the number of tokens before the queries' own ones, negative if the sequence has fewer tokens than queries.
    __device__ __forceinline__ int old() const { return context - queries; }

    // Return the first token that a row of the sequence does not see. Rows beyond the last one count as that.
    __device__ __forceinline__ int visible_end(int row, int group) const {
        return context - queries + min(row / group, queries - 1) + 1;
    }

    // Return whether the sequence has this row.
    __device__ __forceinline__ bool has(int row, int group) const { return row < queries * group; }

    // Return the index of a row of the sequence among the rows [tokens, Hq] of q.
    __device__ __forceinline__ size_t q_row(int row, int group, int Hq) const {
        return size_t(start + row / group) * Hq + head * group + row % group;
    }

    // Leave own tokens out: what remains lies in the cache.
    template <int BLOCK_KEYS>
    __device__ __forceinline__ void keep_cached() {
        context -= queries;
        end = min(end, (context + BLOCK_KEYS - 1) / BLOCK_KEYS);
    }
};

// Deals work items to the blocks of the launch, in every other round in reverse, so that no block has the longest item
// of every round. The last tiles of a sequence, which see most keys, come first. All lanes of a warp call together.
// With MIN_PART_BLOCKS a tile has `parts` items; where it has few blocks of keys, only the first of them have any.
template <int ROWS, int BLOCK_KEYS, bool BY_LAST_TOKEN = false, int MIN_PART_BLOCKS = 0>
struct TileScheduler {
    const int *starts, *lengths;  // [sequences + 1], [sequences]
    int sequences, heads, group, window;
    int parts = 1;
    int round = 0, base = 0, passed = 0;  // rounds dealt; the first of 32 sequences; items of those before it

    // Find the block's next work item; return false after the last.
    __device__ __forceinline__ bool next(Tile& tile) {
        for (;;) {
            const int item = round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
            ++round;
            if (!find(tile, item)) return false;
            if constexpr (MIN_PART_BLOCKS == 0) return true;
            else if (take_part(tile)) return true;
        }
    }

    // Find the tile of a work item; return false beyond the last.
    __device__ __forceinline__ bool find(Tile& tile, int item) {
        const int lane = threadIdx.x % 32;
        for (;; base += 32) {
            const int sequence = base + lane;
            const int queries = sequence < sequences ? starts[sequence + 1] - starts[sequence] : 0;
            const int lane_items = (queries * group + ROWS - 1) / ROWS * heads * parts;
            int through_lane = lane_items;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int lower = __shfl_up_sync(~0u, through_lane, step);
                if (lane >= step) through_lane += lower;
            }
            const unsigned holders = __ballot_sync(~0u, item - passed < through_lane);
            if (holders) {
                const int holder = __ffs(holders) - 1;
                const int item_of_sequence = item - passed - __shfl_sync(~0u, through_lane - lane_items, holder);
                const int tile_of_sequence = item_of_sequence / parts;
                const int tiles = __shfl_sync(~0u, lane_items, holder) / parts / heads;
                if constexpr (BY_LAST_TOKEN) tile.item = item, tile.part_index = item_of_sequence % parts;
                tile.sequence = base + holder, tile.head = tile_of_sequence % heads;
                tile.first_row = (tiles - 1 - tile_of_sequence / heads) * ROWS;
                tile.queries = __shfl_sync(~0u, queries, holder);
                tile.start = starts[tile.sequence], tile.context = lengths[tile.sequence];
                find_blocks(tile);
                return true;
            }
            if (base + 32 >= sequences) return false;
            passed += __shfl_sync(~0u, through_lane, 31);
        }
    }

    // Find the blocks of keys that some row of a tile sees. Both branches find the same ones: each kernel keeps the
    // order of operations that its times were measured with.
    __device__ __forceinline__ void find_blocks(Tile& tile) const {
        if constexpr (BY_LAST_TOKEN) {
            const int first_token = tile.old() + tile.first_row / group;
            const int last_token = tile.old() + min(tile.queries - 1, (tile.first_row + ROWS - 1) / group);
            tile.begin = window > 0 ? max(0, first_token - window + 1) / BLOCK_KEYS : 0;
            tile.end = max(tile.begin, (last_token + BLOCK_KEYS) / BLOCK_KEYS);
            if (last_token < 0) tile.end = tile.begin;
        } else {
            const int first_end = tile.visible_end(tile.first_row, group);
            const int last_end = tile.visible_end(tile.first_row + ROWS - 1, group);
            tile.begin = window > 0 ? max(0, first_end - window) / BLOCK_KEYS : 0;
            tile.end = last_end > 0 ? max(tile.begin, (last_end + BLOCK_KEYS - 1) / BLOCK_KEYS) : tile.begin;
        }
    }

    // Cut a tile's blocks into even parts, of MIN_PART_BLOCKS or more, and keep this item's; return false if it has
    // none.
    __device__ __forceinline__ bool take_part(Tile& tile) const {
        const int blocks = tile.end - tile.begin;
        tile.parts = max(1, min(parts, blocks / MIN_PART_BLOCKS));
        tile.end = tile.begin + blocks * (tile.part_index + 1) / tile.parts;
        tile.begin += blocks * tile.part_index / tile.parts;
        return tile.part_index < tile.parts;
    }
};

}  // namespace ptxlab
