// In which order the tiles of Y are worked on.
#pragma once

namespace ptxlab {

// Token tiles of a band. With eight, GEMMs of 4,096 tokens took 2% to 3% longer; without bands those of 8,192 take 5%
// longer (notebooks/guide/decisions/0028-tiles-in-bands.md).
constexpr int BAND = 16;

struct TilePlace {
    int row_tile, token_tile;
};

// Tile `tile` of token_tiles x row_tiles. Within a band the token tiles of a row tile follow each other, so that blocks
// that run side by side read the same weights; then the next row tile; then the next band.
__device__ __forceinline__ TilePlace tile_place(int tile, int token_tiles, int row_tiles) {
    if (token_tiles == 1) return {tile, 0};  // spares divisions, which the first copy would wait for
    int before = 0;                          // token tiles
    if (token_tiles > BAND) {
        const int band = tile / (BAND * row_tiles);
        before = band * BAND, tile -= before * row_tiles, token_tiles = min(BAND, token_tiles - before);
    }
    const int row_tile = tile / token_tiles;
    return {row_tile, before + tile - row_tile * token_tiles};
}

}  // namespace ptxlab
