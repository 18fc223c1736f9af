// A paged KV cache as the attention kernels read it: the layout of a head's keys or values of one page, and how the
// zero points and scales of its integers are applied to sums.
#pragma once
#include "parts.cuh"
#include "scores.cuh"

namespace ptxlab {

constexpr u32 kNeutralConstants = 0x00003c00;  // scale 1, zero 0: for tokens beyond the end

__device__ __forceinline__ float low_half(u32 pair) { return __low2float(as_half2(pair)); }
__device__ __forceinline__ float high_half(u32 pair) { return __high2float(as_half2(pair)); }
__device__ __forceinline__ u32 half_pair(float low, float high) { return as_bits(__floats2half2_rn(low, high)); }

// Convert half `half` of a word (0: the low one) to f32 from f16, or from bf16 if BFLOAT16.
template <bool BFLOAT16>
__device__ __forceinline__ float element(u32 word, int half) {
    const u32 bits = half ? word >> 16 : word & 0xffff;
    return BFLOAT16 ? __uint_as_float(bits << 16) : low_half(bits);
}

// Layout of a page: PAGE_TOKENS rows of DIMS integers, then (scale, zero) f16 of each token unless constants are per
// channel.
template <int DIMS, int PAGE_TOKENS, int BITS_PER_INTEGER, bool PER_CHANNEL>
struct KvPage {
    static constexpr int kRowBytes = DIMS * BITS_PER_INTEGER / 8;
    static constexpr int kBytes = PAGE_TOKENS * (kRowBytes + (PER_CHANNEL ? 0 : 4));
    static constexpr int kPerWord = 32 / BITS_PER_INTEGER, kPairs = kPerWord / 2;  // integers of a word, pairs of them
    static constexpr bool kSigned = BITS_PER_INTEGER == 8 && PER_CHANNEL;
    static constexpr u32 kSignBits = kSigned ? 0x80808080u : 0;  // turns s8 into u8 with a zero of 128

    // Byte offsets of a token's row and of its (scale, zero). Tokens of the next page lie kBytes further on.
    __device__ __forceinline__ static int row_offset(int token) {
        return token / PAGE_TOKENS * kBytes + token % PAGE_TOKENS * kRowBytes;
    }
    __device__ __forceinline__ static int constants_offset(int token) {
        return token / PAGE_TOKENS * kBytes + PAGE_TOKENS * kRowBytes + token % PAGE_TOKENS * 4;
    }

    // Turn a row's sums of weights times integers into sums of weights times values: multiply by `correction`, subtract
    // zero_sum times the zero points, multiply by the scales. `scales` and `zeros`: of the head's channels, read if
    // constants are per channel, `zeros` only with 4 bits: with 8 every zero point is 128 (kSignBits). Else the weights
    // have the scales in them, and zero_sum the zero points.
    __device__ __forceinline__ static void restore(Row<DIMS>& row, float zero_sum, float correction,
                                                   const float* scales, const float* zeros) {
#pragma unroll
        for (int p = 0; p < row.PIECES; ++p)
            if (row.has_piece(p)) {
                float4 zero = make_float4(1, 1, 1, 1), scale = zero;
                if (PER_CHANNEL) scale = *reinterpret_cast<const float4*>(scales + row.dim(p));
                if (PER_CHANNEL)
                    zero = BITS_PER_INTEGER == 8 ? make_float4(128, 128, 128, 128)
                                                 : *reinterpret_cast<const float4*>(zeros + row.dim(p));
                float4& v = row.v[p];
                v = make_float4(
                    (v.x * correction - zero_sum * zero.x) * scale.x, (v.y * correction - zero_sum * zero.y) * scale.y,
                    (v.z * correction - zero_sum * zero.z) * scale.z, (v.w * correction - zero_sum * zero.w) * scale.w);
            }
    }
};

// Store the results of sequences without tokens, which are no block's work: zeros, and lse -infinity.
__device__ __forceinline__ void store_empty_sequences(unsigned short* out, float* lse, const int* lengths,
                                                      int sequences, int rows, int dims, int thread, int threads) {
    for (int s = blockIdx.x; s < sequences; s += gridDim.x)
        if (lengths[s] <= 0) {
            for (size_t i = thread; i < size_t(rows) * dims / 2; i += threads)
                reinterpret_cast<u32*>(out)[size_t(s) * rows * dims / 2 + i] = 0;
            for (int i = thread; lse && i < rows; i += threads) lse[size_t(s) * rows + i] = -infinity();
        }
}

}  // namespace ptxlab
