// What GEMMs on mma.sync share (QServe section 5.2): the shape of a tile, and how operands come into a stage of the
// ring. The main loop, the dequantiser and the constants of groups are each kernel's own.
// NOTE The MMAs of a step and the sum of the warps that split K are alike in both kernels too, but as functions ptxas
// orders them otherwise: they stay where they are.
#pragma once
#include "mma.cuh"

namespace ptxlab {

// A matrix of weights, in 32-row strips and k32 steps, and one of activations.
struct QServeOperands {
    const uint4* qweight;  // [strips, k32 steps, 32 lanes]
    const signed char* x;  // [M, K]
    int M, K, strips, steps;
};

// A block: ROWS x COLUMNS tokens x CHANNELS of a stage; warps: SPLIT_N of 32 rows each, SPLIT_M along the tokens, SPLIT_K
// that take every SPLIT_K-th k32 step.
//   W  per k32 step and 32 rows 512 bytes in QServe's order: LDS.128 per lane is its 32 weights: word q = row g + 8 q,
//      low nibbles channels 4 t .. + 3, high ones 16 + 4 t .. + 3
//   X  row-major [COLUMNS][CHANNELS], 16-byte chunk c of token m at c ^ (m & 7): ldmatrix without conflicts
template <int ROWS, int COLUMNS, int CHANNELS, int SPLIT_N, int SPLIT_M, int SPLIT_K>
struct QServeTile {
    static constexpr int THREADS = 32 * SPLIT_N * SPLIT_M * SPLIT_K;
    static constexpr int STEPS = CHANNELS / 32;  // k32 steps of a stage
    static constexpr int STRIPS = ROWS / 32;     // 32-row strips of a block
    static constexpr int W_BYTES = STRIPS * STEPS * 512;
    static constexpr int X_BYTES = COLUMNS * CHANNELS;
    static constexpr int TOKENS = COLUMNS / SPLIT_M;  // of a warp
    using Sums = int[2][TOKENS / 8][4];
    static_assert(SPLIT_N == STRIPS && STEPS % SPLIT_K == 0 && (TOKENS == 8 || TOKENS % 16 == 0) && CHANNELS % 128 == 0,
                  "tile shape");

    // Bring W and X of stage `stage` into its slot; what lies outside the matrices becomes zero.
    static __device__ __forceinline__ void fetch(const QServeOperands& in, unsigned char* slot, int stage, int strip0,
                                                 int token0) {
        const int thread = threadIdx.x;
#pragma unroll
        for (int first_chunk = 0; first_chunk < W_BYTES / 16; first_chunk += THREADS) {
            const int i = first_chunk + thread;
            if (W_BYTES / 16 % THREADS && i >= W_BYTES / 16) break;
            const int strip = i / (STEPS * 32), step = i / 32 % STEPS, lane = i % 32;
            const int s = strip0 + strip, k = stage * STEPS + step;
            const bool inside = s < in.strips && k < in.steps;
            cp_async_16(slot + i * 16, inside ? in.qweight + (size_t(s) * in.steps + k) * 32 + lane : in.qweight,
                        inside);
        }
        unsigned char* xs = slot + W_BYTES;
#pragma unroll
        for (int first_chunk = 0; first_chunk < X_BYTES / 16; first_chunk += THREADS) {
            const int i = first_chunk + thread;
            if (X_BYTES / 16 % THREADS && i >= X_BYTES / 16) break;
            const int m = i / (CHANNELS / 16), c = i % (CHANNELS / 16);
            const int k = stage * CHANNELS + c * 16;
            const bool inside = token0 + m < in.M && k < in.K;
            cp_async_16(xs + m * CHANNELS + ((c ^ (m & 7)) * 16), inside ? in.x + size_t(token0 + m) * in.K + k : in.x,
                        inside);
        }
    }
};

// Constants of groups in the stages of such a tile: SIZE channels share a scale and an offset.
//   scales, offsets  per 32 rows and group 32 bytes each, byte 4 g + q = row g + 8 q: one LDS.32 per lane
template <class Tile, int CHANNELS, int SIZE>
struct QServeGroups {
    static constexpr int COUNT = CHANNELS / SIZE > 0 ? CHANNELS / SIZE : 1;  // groups that a stage touches
    static constexpr int BYTES = Tile::STRIPS * COUNT * 64;  // 32 scales, 32 offsets per strip and group
    static constexpr int STAGE_BYTES = Tile::W_BYTES + Tile::X_BYTES + BYTES;

    struct Operands : QServeOperands {
        const uint4* scale;   // u8 [strips, groups, 32] as 2 pieces of 16 bytes
        const uint4* offset;  // likewise
        int groups;
    };

    // Bring stage `stage` of the block's operands into its slot; what lies outside the matrices becomes zero.
    static __device__ __forceinline__ void fetch(const Operands& in, unsigned char* slot, int stage, int strip0,
                                                 int token0) {
        Tile::fetch(in, slot, stage, strip0, token0);
        unsigned char* cs = slot + Tile::W_BYTES + Tile::X_BYTES;
#pragma unroll
        for (int base = 0; base < BYTES / 16; base += Tile::THREADS) {
            const int i = base + threadIdx.x;
            if (BYTES / 16 % Tile::THREADS && i >= BYTES / 16) break;
            const int strip = i / (COUNT * 4), group = i / 4 % COUNT, piece = i % 4;
            const int s = strip0 + strip, g = (stage * CHANNELS) / SIZE + group;
            const bool inside = s < in.strips && g < in.groups;
            const uint4* constants = (piece < 2 ? in.scale : in.offset) + (size_t(s) * in.groups + g) * 2 + (piece & 1);
            cp_async_16(cs + i * 16, inside ? constants : in.scale, inside);
        }
        cp_async_commit();
    }
};

}  // namespace ptxlab
