// The order in which the tiles of Y are worked on.
#pragma once

namespace ptxlab {

// Token tiles of a band. With eight, GEMMs of 4,096 tokens took 2% to 3% longer; without bands those of 8,192 take 5%
// longer (notebooks/guide/decisions/0028-tiles-in-bands.md).
constexpr int BAND = 16;

struct TileCoord {
    int row_tile, token_tile;
};

// Coordinates of tile `tile_index` of token_tiles x row_tiles. Within a band the token tiles of a row tile follow each
// other, so that blocks that run side by side read the same weights; then the next row tile; then the next band.
__device__ __forceinline__ TileCoord tile_coord(int tile_index, int token_tiles, int row_tiles) {
    if (token_tiles == 1) return {tile_index, 0};  // spares divisions, which the first copy would wait for
    int first_token_tile = 0;                      // of the band
    if (token_tiles > BAND) {
        const int band = tile_index / (BAND * row_tiles);
        first_token_tile = band * BAND, tile_index -= first_token_tile * row_tiles;
        token_tiles = min(BAND, token_tiles - first_token_tile);
    }
    const int row_tile = tile_index / token_tiles;
    return {row_tile, first_token_tile + tile_index - row_tile * token_tiles};
}

}  // namespace ptxlab
