// What kernels share that quantise a row (a token) in Atom's order or COMET's: every channel sent to its place through
// shared memory, then a scale per group, INT4 and behind it INT8, as the W4A4 and W4Ax GEMMs read them. A thread has 16
// channels before and 16 behind (notebooks/guide/kernels_quantize.md).
#pragma once
#include "quantize_row.cuh"

namespace ptxlab {

// Store a float or word to shared memory of any block of the cluster.
__device__ __forceinline__ void store_in_block(unsigned address, unsigned word) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// Positions that the 16 channels of a thread go to: s16 each.
struct Places {
    uint4 v[2];

    // Return position i; a negative one becomes one behind all channels.
    __device__ __forceinline__ unsigned operator[](int i) const {
        return reinterpret_cast<const unsigned*>(v)[i / 2] >> (i % 2 * 16) & 0xffff;
    }
};

__device__ __forceinline__ Places load_places(const uint4* places, int chunk, bool inside) {
    Places p = {};
    if (inside) p.v[0] = places[2 * chunk], p.v[1] = places[2 * chunk + 1];
    return p;
}

// Sizes of a row: K INT4 channels, padded to whole blocks of 128, then the INT8 ones: a block of Atom's outliers, or
// COMET's whole blocks.
struct Channels {
    int K, outliers;

    __device__ __forceinline__ int all() const { return K + outliers; }
    __device__ __forceinline__ int blocks4() const { return (K + 127) / 128; }
    __device__ __forceinline__ int blocks() const { return blocks4() + (outliers > 0); }
};

// A row in Atom's order, in shared memory, and a word of each warp of the row: a row has BLOCKS blocks, a cluster if
// more than one, of WIDTH threads, and each block 16 WIDTH channels of the order. A word of padding per 32 channels:
// where channels stay in order, neither loads nor stores have bank conflicts.
template <int BLOCKS, int WIDTH>
struct RowInOrder {
    static constexpr int HELD = 16 * WIDTH, WARPS = WIDTH / 32;
    unsigned y[HELD + HELD / 32];
    unsigned warp_words[BLOCKS * WARPS];

    // Arrive at the cluster's barrier, and wait at it: another block's shared memory may be written only once that
    // block has begun, so every block calls wait_for_open before its first `send`.
    static __device__ __forceinline__ void open() {
        if (BLOCKS > 1) cluster_arrive();
    }
    static __device__ __forceinline__ void wait_for_open() {
        if (BLOCKS > 1) cluster_wait();
    }

    // Store a thread's channels at their positions; a channel that does not exist is left out. SIZE: channels of a
    // group, of which the INT4 channels are a multiple.
    template <int SIZE, typename Values>
    __device__ __forceinline__ void send(const Values& x, const Places& places, const Channels& channels, bool inside) {
        const int gap = SIZE == 128 ? 0 : channels.blocks4() * 128 - channels.K;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int channel = places[i], position = channel < channels.K ? channel : channel + gap;
            const int local = BLOCKS == 1 ? position : position % HELD;
            if (!inside || channel >= channels.all()) continue;
            unsigned* destination = y + local + local / 32;
            if constexpr (BLOCKS == 1) *destination = __float_as_uint(x[i]);
            else store_in_block(address_in_block(destination, position / HELD), __float_as_uint(x[i]));
        }
    }

    // Send a word of this warp to all blocks.
    __device__ __forceinline__ void send_word(unsigned word) {
        const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if constexpr (BLOCKS == 1) {
            if (lane == 0) warp_words[warp] = word;
        } else if (lane < BLOCKS) {
            store_in_block(address_in_block(warp_words + cluster_rank() * WARPS + warp, lane), word);
        }
    }

    // Wait until all that was sent to this block is there.
    __device__ __forceinline__ void wait() const {
        if constexpr (BLOCKS == 1) {
            __syncthreads();
        } else {
            cluster_arrive();
            cluster_wait();
        }
    }

    // Add up the floats that all warps have sent as words, by a whole warp; in the order of `Exchange::float_sum_of`.
    __device__ __forceinline__ float sum_warp_words() const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < BLOCKS * WARPS; i += 32)
            if (i + threadIdx.x % 32 < BLOCKS * WARPS) sum += __uint_as_float(warp_words[i + threadIdx.x % 32]);
        return warp_sum(sum);
    }
};

// Destination of a token's integers and scales. PAIRS 0: x s8 [M, K + outliers]; 1: x u8 [M, K/2], two INT4 a byte, and
// x8 s8 [M, outliers]; 2: x u8 [M, K/2 + outliers], both of it. x_scale f16 [M, groups in whole eights]: of INT4, then
// of INT8, Atom's also if there are no outliers.
struct AtomRow {
    unsigned char *x, *x8;
    __half* scale;
};

// Round x, half away from zero, as C's round(); exact.
__device__ __forceinline__ float rounded_away(float x) {
    const float whole = truncf(x);
    return fabsf(__fsub_rn(x, whole)) >= 0.5f ? __fadd_rn(whole, copysignf(1.0f, x)) : whole;
}

// Quantiser of a group. RULES 0: of n bits, max / (2^(n-1) - 1/2) is the scale, by which values are divided, ties to
// even; 1: max / (2^(n-1) - 1), and values are multiplied by the reciprocal, ties away from zero (`quant.atom`); 2:
// that scale, and values are divided (COMET: `quant.fmpq`).
template <int RULES>
struct Grid {
    // extent / scale and its inverse; the least and the greatest integer (-8..7, -128..127); factor of the extent
    float steps, reciprocal, low, high, clip;

    static __device__ __forceinline__ Grid of(bool int4, float clip) {
        constexpr float FEW = RULES ? 7.0f : 7.5f, MANY = RULES ? 127.0f : 127.5f;
        return int4 ? Grid{FEW, 1 / FEW, -8, 7, clip} : Grid{MANY, 1 / MANY, -128, 127, 1};
    }

    // Quantise four values of a group, of which `extent` is the largest magnitude, to the low bytes of q: integers
    // clamped to `low`..`high`. Return the scale: `clip` times `extent`, divided by `steps`, rounded to f16, at least
    // the smallest f16; 1 if `clip` times `extent` is 0.
    __device__ __forceinline__ __half operator()(const float (&y)[4], float extent, int (&q)[4]) const {
        constexpr float LEAST = 0x1p-24f;  // the smallest f16
        const float largest = __fmul_rn(extent, clip);
        __half scale = __float2half_rn(Divider(steps, reciprocal)(largest));
        if (__half2float(scale) < LEAST) scale = __ushort_as_half(1);
        if (largest == 0) scale = __ushort_as_half(0x3c00);  // 1
        const Divider divide(__half2float(scale));
        const float factor = RULES == 1 ? Divider(fmaxf(largest, steps * LEAST))(steps) : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float quotient = RULES == 1 ? rounded_away(__fmul_rn(y[i], factor)) : divide(y[i]);
            q[i] = __float_as_int(__fadd_rn(fminf(fmaxf(quotient, low), high), SHIFT));
        }
        return scale;
    }
};

// Quantise the row times `factor` and store integers and scales of token m: a warp has four blocks of 128 channels, a
// lane four neighbours of each. The last that a block does.
template <int SIZE, int PAIRS, int RULES, int BLOCKS, int WIDTH>
__device__ __forceinline__ void write_atom_row(const RowInOrder<BLOCKS, WIDTH>& row, float factor, float clip,
                                               const Channels& channels, int m, const AtomRow& outputs) {
    constexpr int WARPS = WIDTH / 32;
    constexpr bool COMET = RULES == 2;  // of INT8, too, every block has a scale
    static_assert(!COMET || (SIZE == 128 && PAIRS), "COMET has blocks of 128, and INT4 in pairs");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = blockIdx.x % BLOCKS;
    const int groups = COMET ? channels.all() / SIZE : channels.K / SIZE, columns = (groups + (COMET ? 7 : 8)) / 8 * 8;
    const auto block_of = [&](int j) { return (rank * 4 + j) * WARPS + warp; };
    const auto is_int4 = [&](int j) { return block_of(j) < channels.blocks4(); };
    const auto inside = [&](int j) {
        if (COMET) return block_of(j) < groups;
        return is_int4(j) ? SIZE == 128 || block_of(j) * 128 + 4 * lane < channels.K
                          : block_of(j) < channels.blocks() && 4 * lane < channels.outliers;
    };
    float y[4][4];
    unsigned extent[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int index = (j * WARPS + warp) * 132 + 4 * lane + lane / 8 + i;
            y[j][i] = inside(j) ? __fmul_rn(__uint_as_float(row.y[index]), factor) : 0;
            largest = max_nan(largest, fabsf(y[j][i]));
        }
        extent[j] = __float_as_uint(largest);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (SIZE == 128) {
            extent[j] = warp_max(extent[j]);
        } else {
#pragma unroll
            for (int mask = 1; mask < 16; mask *= 2) extent[j] = max(extent[j], __shfl_xor_sync(~0u, extent[j], mask));
            const unsigned other_half = __shfl_xor_sync(~0u, extent[j], 16);
            if (!is_int4(j)) extent[j] = max(extent[j], other_half);  // outliers are one group
        }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const bool int4 = is_int4(j);
        const int behind4 = COMET ? (block_of(j) - channels.blocks4()) * 128 : 0;
        const int first_channel = (int4 ? block_of(j) * 128 : behind4) + 4 * lane;
        int q[4];
        const __half scale = Grid<RULES>::of(int4, clip)(y[j], __uint_as_float(extent[j]), q);
        if (!inside(j)) continue;
        const unsigned word = bytes_of<0>(q);
        if (PAIRS && int4) {
            const unsigned pairs = (word & 0x000f000f) | (word >> 4 & 0x00f000f0);  // in bytes 0 and 2
            const unsigned short both = static_cast<unsigned short>(__byte_perm(pairs, 0, 0x4420));
            const int bytes = channels.K / 2 + (PAIRS == 2 ? channels.outliers : 0);
            *reinterpret_cast<unsigned short*>(outputs.x + size_t(m) * bytes + first_channel / 2) = both;
        } else {
            const size_t index = PAIRS == 2
                                     ? size_t(m) * (channels.K / 2 + channels.outliers) + channels.K / 2 + first_channel
                                 : PAIRS ? size_t(m) * channels.outliers + first_channel
                                         : size_t(m) * channels.all() + first_channel + (int4 ? 0 : channels.K);
            *reinterpret_cast<unsigned*>((PAIRS == 1 ? outputs.x8 : outputs.x) + index) = word;
        }
        if (lane % (SIZE / 4) == 0 && (int4 || lane == 0))
            outputs.scale[size_t(m) * columns + (COMET ? block_of(j) : int4 ? first_channel / SIZE : groups)] = scale;
    }
    // Ones up to a whole number of eights.
    const int column = groups + (!COMET && channels.outliers > 0) + threadIdx.x;
    if (rank == 0 && column < columns) outputs.scale[size_t(m) * columns + column] = __ushort_as_half(0x3c00);
}

}  // namespace ptxlab
