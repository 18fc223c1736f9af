// Keys or values of the queries' own tokens, which are given in 16 bits beside a cache of 4 bits.
#pragma once
#include "hadamard.cuh"
#include "pack.cuh"
#include "prefill_rows.cuh"

namespace ptxlab {

// The own tokens of a block of keys: from `begin` to `end`, which is excluded. Tokens before them lie in the cache, and
// behind them is nothing.
struct OwnSpan {
    int begin, end;
};

// Own tokens' keys or values, f16 (KIND 0) or bf16 (1) [tokens, heads, DIM], tokens `pitch` elements apart. A lane has
// eight elements of a token, so that neighbouring lanes read and write 128 bytes in a row. With ROTATE rows are rotated
// as the cache's keys are.
template <int DIM, int KIND, int BLOCK_KEYS, int THREADS, bool ROTATE>
struct OwnTokens {
    static constexpr int kLanes = DIM / 8, kTokens = THREADS / kLanes;  // lanes of a token; tokens of all threads
    static constexpr int kBatch = ROTATE ? 1 : 2;                       // tokens that a lane loads at a time
    static_assert(BLOCK_KEYS % (kTokens * kBatch) == 0);
    const unsigned short* tokens;
    int pitch;

    // Store a block's own tokens as f16 in the order of restored words, and zeros behind them. `row`: the row of
    // `tokens` that the block's first token has, or would have.
    __device__ __forceinline__ void store(unsigned char* block, OwnSpan span, int row, int head) const {
        const int thread = threadIdx.x % THREADS, lane = thread % kLanes;
        const unsigned short* const head_row = tokens + ptrdiff_t(row) * pitch + head * DIM + lane * 8;
#pragma unroll 1
        for (int batch = span.begin / (kTokens * kBatch); batch < BLOCK_KEYS / (kTokens * kBatch); ++batch) {
            const int token = batch * (kTokens * kBatch) + thread / kLanes;
            uint4 x[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int lane_token = token + i * kTokens;
                x[i] = make_uint4(0, 0, 0, 0);
                if (lane_token >= span.begin && lane_token < span.end)
                    x[i] = *reinterpret_cast<const uint4*>(head_row + ptrdiff_t(lane_token) * pitch);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int lane_token = token + i * kTokens;
                const uint4 h = convert_eight(x[i], lane);
                if (lane_token >= span.begin)
                    *reinterpret_cast<uint4*>(block + swizzled_piece<BLOCK_KEYS>(lane_token, lane)) = h;
            }
        }
    }

    // Convert eight elements to f16, in the order 0, 2, 1, 3, 4, 6, 5, 7. All lanes of a warp take part.
    __device__ __forceinline__ static uint4 convert_eight(const uint4& x, int lane) {
        if constexpr (KIND == 0 && !ROTATE)
            return make_uint4(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632),
                              __byte_perm(x.z, x.w, 0x5410), __byte_perm(x.z, x.w, 0x7632));
        const unsigned words[4] = {x.x, x.y, x.z, x.w};
        float elements[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) elements[e] = HalfQuery<DIM, KIND>::element(words[e / 2], e % 2);
        if constexpr (ROTATE) rotate_head<8, kLanes>(elements, lane);
        unsigned h[4];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const int low = pair / 2 * 4 + pair % 2;
            h[pair] = as_bits(__floats2half2_rn(elements[low], elements[low + 2]));
        }
        return make_uint4(h[0], h[1], h[2], h[3]);
    }
};

}  // namespace ptxlab
