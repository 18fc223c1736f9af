// Rows of new keys and values, loaded, rotated, quantised and stored into their slots of a paged cache: what append_kv4
// and rope_append_kv4 share.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "hadamard.cuh"
#include "kv_page.cuh"
#include "pack.cuh"
#include "reciprocal.cuh"

namespace ptxlab {

// `Then` if CONDITION, else `Else`.
template <bool CONDITION, class Then, class Else>
struct Select {
    using type = Then;
};
template <class Then, class Else>
struct Select<false, Then, Else> {
    using type = Else;
};

// Largest value and negated smallest value of a row, or of one lane's values of it.
struct Extremes {
    float largest, minus_smallest;

    __device__ __forceinline__ void include(const Extremes& other) {
        largest = max_nan(largest, other.largest);
        minus_smallest = max_nan(minus_smallest, other.minus_smallest);
    }
};

// Load N f32 from an address aligned to 16 bytes.
template <int N>
__device__ __forceinline__ void load(float (&destination)[N], const float* source) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
        reinterpret_cast<float4*>(destination)[i] = reinterpret_cast<const float4*>(source)[i];
}

// Divides by an f16 scale s as IEEE rounds x / s, for quotients that are not tiny. high + low is 1 / s to a relative
// error of 2^-46. That is enough: a midpoint m of two floats has 25 bits and s has 11, so x differs from the product of
// m and s, of 36 bits, and x / s is at least 2^-36 of itself away from m.
struct Reciprocal {
    float high, low;

    __device__ __forceinline__ explicit Reciprocal(float s)
        : high(reciprocal(s)), low(__fmul_rn(fmaf(-s, high, 1.0f), high)) {}
    __device__ __forceinline__ Reciprocal(float high, float low) : high(high), low(low) {}
    // Return x / s as f32: not an integer yet.
    __device__ __forceinline__ float operator()(float x) const { return fmaf(x, high, __fmul_rn(x, low)); }
};

// Divides by any scale s as IEEE rounds x / s.
struct ExactQuotient {
    float s;

    __device__ __forceinline__ void by(float scale) { s = scale; }
    __device__ __forceinline__ float operator()(float x) const { return __fdiv_rn(x, s); }
};

// Divides by a scale s that `fit` admits: the quotient is x / s as IEEE rounds it, as far as a level depends on it.
// With r = RN(1/s) a product x * r is wrong by less than two units in the last place, and one correction makes it right
// (Markstein; every x and s of f32 close enough to a midpoint was tried). The remainder of a quotient above 1/4 does
// not underflow. A positive infinite product is clamped to 2^100, so that the correction leaves it positive; a negative
// one ends as NaN, which gets the lowest level as well.
struct CorrectedQuotient {
    float s, r;

    // Return whether every scale is in 2^-100 .. 2^100; false for NaN. Compares bits, which are ordered like numbers.
    template <int N>
    __device__ __forceinline__ static bool fit(const float (&scales)[N]) {
        const unsigned low = __float_as_int(0x1p-100f), high = __float_as_int(0x1p100f);
        unsigned largest_offset = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) largest_offset = max(largest_offset, __float_as_uint(scales[j]) - low);
        return largest_offset <= high - low;
    }

    __device__ __forceinline__ void by(float scale) { s = scale, r = reciprocal(scale); }

    // Return x / s as f32, or what ends in the same level.
    __device__ __forceinline__ float operator()(float x) const {
        const float near = fminf(__fmul_rn(x, r), 0x1p100f);
        return fmaf(fmaf(-near, s, x), r, near);
    }
};

// Round a quotient above -2^22 to the nearest integer.
__device__ __forceinline__ int round_to_level(float quotient) {
    return __float_as_int(__fadd_rn(quotient, SHIFT)) - __float_as_int(SHIFT);
}

// Loads, rotates, quantises and stores the rows of one variant: dims of a head; tokens of a page; bits of an integer;
// constants per channel, or per token and head; bf16 or f16; s64 or s32 slots and positions; keys rotated by RoPE; rows
// per thread; keys rotated by a Hadamard matrix after RoPE.
template <int DIMS, int PAGE_TOKENS, int BITS_PER_INTEGER, bool PER_CHANNEL, bool BFLOAT16, bool WIDE_INDEX,
          bool ROPE_KEYS, int ROWS_PER_THREAD, bool HADAMARD_KEYS>
struct KvRows {
    using Page = KvPage<DIMS, PAGE_TOKENS, BITS_PER_INTEGER, PER_CHANNEL>;
    using Index = typename Select<WIDE_INDEX, long long, int>::type;
    using Pair = typename Select<BFLOAT16, __nv_bfloat162, __half2>::type;
    using Half = typename Select<PER_CHANNEL, uint2, uint4>::type;  // half of a lane's values of a row, as stored

    static constexpr int kRows = ROWS_PER_THREAD;
    static constexpr int kValues = PER_CHANNEL ? 8 : 16, kPairs = kValues / 2;  // of a row, in a lane
    // Lanes of a row; lanes that own the same row after `reduce_over_lanes`.
    static constexpr int kLanes = DIMS / kValues, kOwners = kLanes / kRows;
    static constexpr int kTokens = PER_CHANNEL ? kRows : 1;  // whose rows a thread has
    static constexpr int kLevels = BITS_PER_INTEGER == 4 ? 15 : 255;
    static constexpr int kUnitBytes = 32;  // unit of offsets: rows and pages are multiples of it
    static constexpr unsigned kNowhere = ~0u;
    static constexpr bool kStreamed = ROPE_KEYS && kRows > 1;  // rows are loaded and stored evict-first
    // Minimum of blocks per SM, which leaves a thread 64, 80 or 128 registers.
    static constexpr int kBlocks = kRows < 4 ? 4 : PER_CHANNEL ? 3 : 2;
    static_assert(!(HADAMARD_KEYS && PER_CHANNEL), "constants by channel are those of keys that are not rotated");

    // Position of a thread: a lane of a group of kLanes lanes that shares kRows rows. With constants per channel these
    // are kRows tokens of one head; per token and head they are kRows heads of one token, so that kRows groups cover
    // kRows tokens. A block has one tile of kRows tokens.
    struct RowLanes {
        int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;

        __device__ __forceinline__ int first_token(int tile) const {
            return tile * kRows + (PER_CHANNEL ? 0 : group % kRows);
        }
        __device__ __forceinline__ int first_head() const {
            return blockIdx.y * (blockDim.x / kLanes) + (PER_CHANNEL ? group : group / kRows * kRows);
        }
    };

    // A lane's values of a row as stored: f16 or bf16.
    struct StoredValues {
        Half halves[2];

        // `lane_values`: address of the lane's first values of the row.
        __device__ __forceinline__ void load_from(const Half* lane_values) {
            halves[0] = read(lane_values), halves[1] = read(lane_values + kLanes);
        }

        __device__ __forceinline__ Pair pair(int i) const { return reinterpret_cast<const Pair*>(halves)[i]; }
        __device__ __forceinline__ float operator[](int i) const {
            return i % 2 ? __high2float(pair(i / 2)) : __low2float(pair(i / 2));
        }

        __device__ __forceinline__ Extremes extremes() const {
            Pair largest = pair(0), smallest = pair(0);
#pragma unroll
            for (int i = 1; i < kPairs; ++i)
                largest = __hmax2_nan(largest, pair(i)), smallest = __hmin2_nan(smallest, pair(i));
            return {max_nan(__low2float(largest), __high2float(largest)),
                    max_nan(-__low2float(smallest), -__high2float(smallest))};
        }
    };

    // A lane's kValues values of a row in f32.
    struct FloatValues {
        float values[kValues];

        __device__ __forceinline__ float operator[](int i) const { return values[i]; }

        __device__ __forceinline__ Extremes extremes() const {
            Extremes e = {values[0], -values[0]};
#pragma unroll
            for (int i = 1; i < kValues; ++i) e.include({values[i], -values[i]});
            return e;
        }
    };

    // Cosines and sines by which RoPE rotates a lane's pairs at a token's position.
    struct Rotation {
        float cos[kPairs], sin[kPairs];

        __device__ __forceinline__ void read(const float* cosines, const float* sines, size_t position, int lane) {
            load(cos, cosines + position * (DIMS / 2) + lane * kPairs);
            load(sin, sines + position * (DIMS / 2) + lane * kPairs);
        }

        __device__ __forceinline__ FloatValues of(const StoredValues& x) const {
            FloatValues y;
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                y.values[i] = __fsub_rn(__fmul_rn(x[i], cos[i]), __fmul_rn(x[kPairs + i], sin[i]));
                y.values[kPairs + i] = __fadd_rn(__fmul_rn(x[kPairs + i], cos[i]), __fmul_rn(x[i], sin[i]));
            }
            return y;
        }
    };

    // Convert a lane's values of a key to f32; rotate them by RoPE if ROPE_KEYS, then by the Hadamard matrix if
    // HADAMARD_KEYS.
    static __device__ __forceinline__ FloatValues prepare_key(const StoredValues& x, const Rotation& rotation,
                                                              int lane) {
        FloatValues y;
        if constexpr (ROPE_KEYS) {
            y = rotation.of(x);
        } else {
#pragma unroll
            for (int i = 0; i < kValues; ++i) y.values[i] = x[i];
        }
        if constexpr (HADAMARD_KEYS) rotate_head<kPairs, kLanes>(y.values, lane);
        return y;
    }

    static __device__ __forceinline__ int level(float quotient, int zero) {
        return max(min(round_to_level(quotient) + zero, kLevels), 0);
    }

    template <class T>
    static __device__ __forceinline__ T read(const T* source) {
        return kStreamed ? __ldcs(source) : *source;
    }

    template <class T>
    static __device__ __forceinline__ void write(void* destination, T value) {
        if (kStreamed) __stcs(static_cast<T*>(destination), value);
        else *static_cast<T*>(destination) = value;
    }

    // Offsets of a thread's rows in the pool, in units of kUnitBytes from `pages` on, or kNowhere for rows that are not
    // stored. With constants per token and head also `constants`, where the constants of the page of the owned row
    // begin (kNowhere unless this lane stores them), and `offset`, the token's index in the page.
    struct Places {
        unsigned char* pages;
        unsigned rows[kRows], constants, offset;

        // Compute `pages` and `rows` from slots: rows of heads from `head` on (constants per token and head) or of
        // tokens (per channel).
        __device__ __forceinline__ void of_rows(unsigned char* pool, const Index (&slot)[kTokens], bool is_v, int head,
                                                int heads) {
            const unsigned pitch = 2 * heads * Page::kBytes;
            pages = pool + (size_t(is_v) * heads + head) * Page::kBytes;
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const Index row_slot = slot[i % kTokens];
                const unsigned page =
                    unsigned(row_slot / PAGE_TOKENS) * (pitch / kUnitBytes) + i / kTokens * (Page::kBytes / kUnitBytes);
                rows[i] = row_slot < 0 || head + i / kTokens >= heads
                              ? kNowhere
                              : page + unsigned(row_slot) % PAGE_TOKENS * (Page::kRowBytes / kUnitBytes);
            }
        }

        // Compute `constants` and `offset` of the row that the lane owns.
        __device__ __forceinline__ void of_constants(Index slot, int head, int heads, int lane) {
            const unsigned pitch = 2 * heads * Page::kBytes;
            const int answered_row = lane / kOwners;
            const bool answers = lane % kOwners == 0 && slot >= 0 && head + answered_row < heads;
            const unsigned constants_offset = unsigned(slot / PAGE_TOKENS) * (pitch / kUnitBytes) +
                                              answered_row * (Page::kBytes / kUnitBytes) +
                                              PAGE_TOKENS * Page::kRowBytes / kUnitBytes;
            constants = answers ? constants_offset : kNowhere;
            offset = unsigned(slot) % PAGE_TOKENS;
        }
    };

    // Store a lane's 16 levels of row i.
    static __device__ __forceinline__ void store(const Places& places, int i, int lane, const int (&q)[16]) {
        if (places.rows[i] == kNowhere) return;
        unsigned char* row = places.pages + size_t(places.rows[i]) * kUnitBytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned first_word = bytes_of<0>(q + half * 8), second_word = bytes_of<0>(q + half * 8 + 4);
            unsigned char* destination = row + half * (Page::kRowBytes / 2) + lane * BITS_PER_INTEGER;
            if (BITS_PER_INTEGER == 4) write(destination, first_word | second_word << 4);
            else write(destination, make_uint2(first_word, second_word));
        }
    }

    // Store a lane's 8 levels of row i, four of each half of the row. With 4 bits two neighbours share a word of each
    // half: its bytes have the even lane's levels low and the odd lane's high. They exchange four levels each, so that
    // the even lane stores the word of the first half and the odd lane that of the second.
    static __device__ __forceinline__ void store(const Places& places, int i, int lane, const int (&q)[8]) {
        const unsigned first_word = bytes_of<0>(q), second_word = bytes_of<0>(q + 4);
        const bool odd = lane % 2;
        const unsigned neighbour_word =
            BITS_PER_INTEGER == 4 ? __shfl_xor_sync(~0u, odd ? first_word : second_word, 1) : 0;
        if (places.rows[i] == kNowhere) return;
        unsigned char* row = places.pages + size_t(places.rows[i]) * kUnitBytes;
        if (BITS_PER_INTEGER == 4) {
            write(row + odd * (Page::kRowBytes / 2) + lane / 2 * 4,
                  odd ? neighbour_word | second_word << 4 : first_word | neighbour_word << 4);
        } else {
            write(row + lane * 4, first_word);
            write(row + Page::kRowBytes / 2 + lane * 4, second_word);
        }
    }

    // Broadcast the value of the first lane that owns row i to all lanes of the group.
    template <class T>
    static __device__ __forceinline__ T take_from_owner(T value, int i) {
        return __shfl_sync(~0u, value, i * kOwners, kLanes);
    }

    // Reduce the extremes of kRows rows over the lanes of a group; return those of the row that the lane owns.
    static __device__ __forceinline__ Extremes reduce_over_lanes(Extremes (&e)[kRows], int lane) {
        int rows_left = kRows;  // rows that a lane still holds
#pragma unroll
        for (int mask = kLanes / 2; mask > 0; mask /= 2) {
            const bool divided = rows_left > 1, upper = lane & mask;
            if (divided) rows_left /= 2;
#pragma unroll
            for (int i = 0; i < rows_left; ++i) {
                const Extremes sent = divided && !upper ? e[i + rows_left] : e[i];
                if (divided && upper) e[i] = e[i + rows_left];
                e[i].include(
                    {__shfl_xor_sync(~0u, sent.largest, mask), __shfl_xor_sync(~0u, sent.minus_smallest, mask)});
            }
        }
        return e[0];
    }

    // Quantise and store rows with a scale and a zero point per row, which are computed here.
    template <class Row>
    static __device__ __forceinline__ void append_by_token(const Row (&rows)[kRows], const Places& places, int lane) {
        Extremes e[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) e[i] = rows[i].extremes();
        Extremes range = reduce_over_lanes(e, lane);
        range.include({0, 0});
        const __half rounded_scale =
            __float2half_rn(__fdiv_rn(__fadd_rn(range.largest, range.minus_smallest), float(kLevels)));
        const __half scale = __half2float(rounded_scale) == 0 ? __float2half_rn(1.0f) : rounded_scale;
        const Reciprocal row_quotient(__half2float(scale));
        const int row_zero = level(row_quotient(range.minus_smallest), 0);
        if (places.constants != kNowhere) {
            unsigned* row_constants =
                reinterpret_cast<unsigned*>(places.pages + size_t(places.constants) * kUnitBytes) + places.offset;
            *row_constants = __half_as_ushort(scale) | unsigned(__half_as_ushort(__int2half_rn(row_zero))) << 16;
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const Reciprocal quotient(take_from_owner(row_quotient.high, i), take_from_owner(row_quotient.low, i));
            const int zero = take_from_owner(row_zero, i);
            int q[kValues];
#pragma unroll
            for (int j = 0; j < kValues; ++j) q[j] = level(quotient(rows[i][j]), zero);
            store(places, i, lane, q);
        }
    }

    // Scales and zero points of a lane's channels, half of them in each half of the head; with 8 bits there are no zero
    // points.
    struct Channels {
        float scale[kValues], zero[kValues];

        __device__ __forceinline__ void read(const float* scales, const float* zeros, int lane) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int channel = half * (DIMS / 2) + lane * kPairs;
                load(reinterpret_cast<float (&)[kPairs]>(scale[half * kPairs]), scales + channel);
                if (BITS_PER_INTEGER == 4)
                    load(reinterpret_cast<float (&)[kPairs]>(zero[half * kPairs]), zeros + channel);
            }
        }
    };

    // Quantise and store rows with given constants per channel: any scales, zero points in 0..kLevels. Values below the
    // lowest level, and NaN, get the lowest level.
    template <class Quotient, class Row>
    static __device__ __forceinline__ void append_by_channel(const Row (&rows)[kRows], const Places& places,
                                                             const Channels& channels, int lane) {
        Quotient quotient[kValues];
        int zero[kValues];
#pragma unroll
        for (int j = 0; j < kValues; ++j)
            quotient[j].by(channels.scale[j]), zero[j] = BITS_PER_INTEGER == 4 ? round_to_level(channels.zero[j]) : 0;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            int q[kValues];
#pragma unroll
            for (int j = 0; j < kValues; ++j) {
                const float above = fmaxf(quotient[j](rows[i][j]), -127.0f);
                q[j] = BITS_PER_INTEGER == 4 ? level(above, zero[j]) : min(round_to_level(above), 127);
            }
            store(places, i, lane, q);
        }
    }

    // Quantise and store rows with the variant's kind of constants; those per channel by CorrectedQuotient, unless it
    // does not admit the scales of all lanes of the warp. A function, not a lambda with an `auto` parameter: some
    // versions of NVRTC take the latter for a host function.
    template <class Row>
    static __device__ __forceinline__ void append(const Row (&rows)[kRows], const Places& places,
                                                  const Channels& channels, int lane) {
        if (!PER_CHANNEL) append_by_token(rows, places, lane);
        else if (__all_sync(~0u, CorrectedQuotient::fit(channels.scale)))
            append_by_channel<CorrectedQuotient>(rows, places, channels, lane);
        else append_by_channel<ExactQuotient>(rows, places, channels, lane);
    }
};

}  // namespace ptxlab
