// Rows of a tile of attention, 16 to a warp: their queries in shared memory, and scores, weights and results as the
// tensor cores leave them, in registers. Lane 4 g + t has rows g and g + 8, of eight columns 2 t and 2 t + 1.
#pragma once
#include "exponent.cuh"
#include "hadamard.cuh"
#include "mma_f16.cuh"
#include "output.cuh"
#include "pack.cuh"
#include "scores.cuh"

namespace ptxlab {

// Return the offset of 16-byte piece `piece` of a row of 16-bit elements: columns of 64 elements, [ROWS] rows of 128
// bytes under the 128-byte swizzle, so that eight rows of a piece are in different banks.
template <int ROWS>
__device__ __forceinline__ int swizzled_piece(int row, int piece) {
    return piece / 8 * (ROWS * 128) + row * 128 + (piece % 8 ^ row % 8) * 16;
}

// Dequantiser of a token's 4-bit integers: its scale, and the biases that subtract its zero point.
struct TokenDequantiser {
    __half2 scale;
    uint2 bias;

    // `pair`: (scale, zero) f16.
    __device__ __forceinline__ explicit TokenDequantiser(u32 pair)
        : scale(__half2half2(__ushort_as_half(pair & 0xffff))), bias(bias_u4_f16(__ushort_as_half(pair >> 16))) {}

    // Dequantise the eight elements of a word, in the order in which they come out: 0, 2, 1, 3, 4, 6, 5, 7.
    __device__ __forceinline__ uint4 restore(u32 word) const {
        uint4 h = dequant_u4_f16_minus(word, bias);
        h.x = as_bits(__hmul2(as_half2(h.x), scale));
        h.y = as_bits(__hmul2(as_half2(h.y), scale));
        h.z = as_bits(__hmul2(as_half2(h.z), scale));
        h.w = as_bits(__hmul2(as_half2(h.w), scale));
        return h;
    }

    // Dequantise the 32 elements of chunk `chunk` of a token, and store them to a block of [BLOCK_KEYS] tokens.
    template <int BLOCK_KEYS>
    __device__ __forceinline__ void restore_chunk(unsigned char* block, int token, int chunk,
                                                  const uint4& integers) const {
        const u32 words[4] = {integers.x, integers.y, integers.z, integers.w};
#pragma unroll
        for (int w = 0; w < 4; ++w)
            *reinterpret_cast<uint4*>(block + swizzled_piece<BLOCK_KEYS>(token, chunk * 4 + w)) = restore(words[w]);
    }
};

// Half a query in a thread's registers: lanes 2 r and 2 r + 1 of a warp have row r, four pieces of 16 bytes by turns, which
// eight lanes store to different banks. f16 (KIND 0) or bf16 (1).
template <int DIM, int KIND>
struct HalfQuery {
    static constexpr int kPieces = DIM / 16;
    uint4 x[kPieces];

    // `row` is null beyond a tile's last row.
    __device__ __forceinline__ explicit HalfQuery(const unsigned short* row) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
            x[i] = row ? reinterpret_cast<const uint4*>(row)[piece(i)] : make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ static float element(unsigned word, int half) {
        const unsigned bits = half ? word >> 16 : word & 0xffff;
        return KIND == 1 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(bits));
    }

    __device__ __forceinline__ static int piece(int i) { return i / 4 * 8 + threadIdx.x % 2 * 4 + i % 4; }

    // Store it as f16, divided by the power of two that leads the row, eight elements in the order 0, 2, 1, 3, 4, 6, 5,
    // 7 of restored words; with ROTATE, rotated as the cache's keys are. Return that power. A row with an infinity
    // becomes NaN.
    template <int ROWS, bool ROTATE>
    __device__ __forceinline__ float store(unsigned char* queries, int row) const {
        float elements[kPieces][8], largest = 0;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const unsigned words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                elements[i][e] = element(words[e / 2], e % 2);
                largest = max_nan(largest, fabsf(elements[i][e]));
            }
        }
        if constexpr (ROTATE) largest = rotate_query<32, 2>(elements, threadIdx.x % 2);
        largest = max_nan(largest, __shfl_xor_sync(~0u, largest, 1));
        const float power = leading_power(fmaxf(largest, 0x1p-100f));
        const float inverse = inverse_power(power) + (largest - largest);  // NaN of infinity
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            unsigned h[4];
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const int low = pair / 2 * 4 + pair % 2;
                h[pair] = as_bits(__floats2half2_rn(elements[i][low] * inverse, elements[i][low + 2] * inverse));
            }
            *reinterpret_cast<uint4*>(queries + swizzled_piece<ROWS>(row, piece(i))) =
                make_uint4(h[0], h[1], h[2], h[3]);
        }
        return power;
    }
};

// Softmax of a thread's two rows, block by block of keys.
template <int BLOCK_KEYS>
struct SoftmaxRows {
    float factor[2];        // of dot products, to scores in base 2
    float largest[2];       // score that weights are relative to
    float sum[2] = {0, 0};  // of the thread's weights
    int end[2];             // the first token that the row does not see

    // Turn the dot products of one block, which `factor` makes scores, into weights 2^(score - largest), and add these
    // to `sum`. Where `rescale` is not 1, earlier sums are to be multiplied by it: `largest` stays while no score
    // exceeds it by more than `headroom`, so that few blocks ask for that.
    __device__ __forceinline__ void weigh(float (&s)[BLOCK_KEYS / 2], float (&rescale)[2], float headroom) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = s[2 * r];  // largest dot product
#pragma unroll
            for (int i = 0; i < BLOCK_KEYS / 2; i += 4) top = fmaxf(top, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float previous = largest[r], peak = top * factor[r];
            largest[r] = peak > previous + headroom ? peak : previous;
            rescale[r] = exp2_approx(previous - largest[r]);
            float block_sum = 0;
#pragma unroll
            for (int i = 0; i < BLOCK_KEYS / 2; i += 4)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    s[i + e] = exp2_approx(fmaf(s[i + e], factor[r], -largest[r]));
                    block_sum += s[i + e];
                }
            sum[r] = fmaf(sum[r], rescale[r], block_sum);
        }
    }

    // Add to row g + 8 r the sum of weights of another part of the tile (`Tile::parts`), relative to `part_largest`.
    __device__ __forceinline__ void add_part(int r, float part_largest, float weights) {
        const float peak = fmaxf(largest[r], part_largest);
        sum[r] = fmaf(weights, exp2_approx(part_largest - peak), sum[r] * exp2_approx(largest[r] - peak));
        largest[r] = peak;
    }

    // Set scores of keys that a row does not see to -infinity; `position` is the block's first key.
    __device__ __forceinline__ void mask(float (&s)[BLOCK_KEYS / 2], int position, int window) const {
#pragma unroll
        for (int i = 0; i < BLOCK_KEYS / 2; ++i) {
            const int key = position + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, r = i / 2 % 2;
            if (key >= end[r] || (window > 0 && key < end[r] - window)) s[i] = -infinity();
        }
    }

    // Return the sum of all weights of row g + 8 r.
    __device__ __forceinline__ float total(int r) const {
        float of_row = sum[r];
        of_row += __shfl_xor_sync(~0u, of_row, 1);
        of_row += __shfl_xor_sync(~0u, of_row, 2);
        return of_row;
    }

    // Return the natural logarithm of the sum of exponentials of row g + 8 r, of its weights' total.
    __device__ __forceinline__ float lse(int r, float row_total) const {
        return (largest[r] + log2_approx(row_total)) * kLn2;
    }
};

// Round weights to f16 as operand A, 16 keys per MMA.
template <int BLOCK_KEYS>
__device__ __forceinline__ void round_weights(unsigned (&weights)[BLOCK_KEYS / 16][4],
                                              const float (&s)[BLOCK_KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < BLOCK_KEYS / 4; ++i) weights[i / 4][i % 4] = as_bits(__floats2half2_rn(s[2 * i], s[2 * i + 1]));
}

// Reorder sums over values from the order of restored words: (0, 2) and (1, 3) of two lanes become (0, 1) and (2, 3).
template <int COUNT>
__device__ __forceinline__ void put_in_order(float (&o)[COUNT]) {
    const bool odd = threadIdx.x % 2;
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
        const float neighbour = __shfl_xor_sync(~0u, odd ? o[i] : o[i + 1], 1);
        if (odd) o[i] = neighbour;
        else o[i + 1] = neighbour;
    }
}

// Store row g + 8 r times `inverse`, one over its sum of weights: f16 (KIND 0) or bf16 (1). `lane_row` begins at the
// lane's elements.
template <int KIND, int COUNT>
__device__ __forceinline__ void store_row(unsigned* lane_row, const float (&o)[COUNT], int r, float inverse) {
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i)
        lane_row[i * 4] = rounded_pair<KIND>(o[4 * i + 2 * r] * inverse, o[4 * i + 2 * r + 1] * inverse);
}

}  // namespace ptxlab
