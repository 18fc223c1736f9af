// The tiles of a grouped GEMM, found on the device from `offsets`, the first row of each expert. Order: expert by
// expert; within an expert one row tile of W after the other; within a row tile one tile of tokens after the other,
// which find its weights in the L2. An expert without rows has no tiles.
#pragma once

namespace ptxlab {

// A tile: rows token0 .. of X that are below end_token, TOKENS at most, times row tile `row_tile` of the weight of
// `expert`.
struct ExpertTile {
    int expert, token0, end_token, row_tile;
};

// Finds tiles by their number, in rising order. A whole warp calls; it looks at 32 experts at a time, an expert per
// lane.
template <int TOKENS>
class ExpertTiles {
    const int* offsets;  // [experts + 1]
    int experts, row_tiles, lane;
    int first_expert = 0, first_tile = 0;  // of the 32
    int begin, end, end_tile;              // rows of this lane's expert; the number of the first tile behind its own

    static __device__ __forceinline__ int tiles_of(int rows) { return (rows + TOKENS - 1) / TOKENS; }

    // Load the rows of the lane's expert, and find the number of the tile behind its last.
    __device__ __forceinline__ void look() {
        const int expert = first_expert + lane;
        begin = offsets[min(expert, experts)], end = offsets[min(expert + 1, experts)];
        end_tile = tiles_of(end - begin) * row_tiles;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int tiles_below = __shfl_up_sync(~0u, end_tile, step);
            if (lane >= step) end_tile += tiles_below;
        }
        end_tile += first_tile;
    }

public:
    // Look at the first 32 experts. Call it after the wait for the kernel that writes `offsets`.
    __device__ __forceinline__ ExpertTiles(const int* offsets, int experts, int row_tiles)
        : offsets(offsets), experts(experts), row_tiles(row_tiles), lane(threadIdx.x % 32) {
        look();
    }

    // Find tile `tile_index`; return false if there is none.
    __device__ __forceinline__ bool find(int tile_index, ExpertTile& tile) {
        for (int last; tile_index >= (last = __shfl_sync(~0u, end_tile, 31)); look()) {
            first_expert += 32, first_tile = last;
            if (first_expert >= experts) return false;
        }
        const int which = __popc(__ballot_sync(~0u, end_tile <= tile_index));
        const int preceding_tiles = __shfl_sync(~0u, end_tile, max(which - 1, 0)),
                  row0 = __shfl_sync(~0u, begin, which);
        tile.end_token = __shfl_sync(~0u, end, which);
        const int token_tiles = tiles_of(tile.end_token - row0),
                  tile_of_expert = tile_index - (which > 0 ? preceding_tiles : first_tile);
        tile.expert = first_expert + which;
        tile.row_tile = token_tiles == 1 ? tile_of_expert : tile_of_expert / token_tiles;  // a division takes its time
        tile.token0 = row0 + (tile_of_expert - tile.row_tile * token_tiles) * TOKENS;
        return true;
    }
};

}  // namespace ptxlab
