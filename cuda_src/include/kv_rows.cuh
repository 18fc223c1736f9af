// Rows of new keys and values, loaded, rotated, quantised and stored into their slots of a paged cache: what append_kv4
// and rope_append_kv4 share. The kernel that includes this has defined HEAD_DIM, PAGE, BITS, CHANNEL, BF16, INDEX, ROPE, ROWS,
// ROTATED.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "hadamard.cuh"
#include "pack.cuh"
#include "reciprocal.cuh"

namespace ptxlab {

constexpr int VALUES = CHANNEL ? 8 : 16, PAIRS = VALUES / 2;  // of a lane
// of a row; of them, those that answer for the same row in the end
constexpr int LANES = HEAD_DIM / VALUES, OWNERS = LANES / ROWS;
constexpr int TOKENS = CHANNEL ? ROWS : 1;  // that a thread has rows of
constexpr int LEVELS = BITS == 4 ? 15 : 255;
constexpr int FEATURES = HEAD_DIM * BITS / 8;  // bytes of a row
constexpr int PAGE_BYTES = PAGE * (FEATURES + (CHANNEL ? 0 : 4));
constexpr int UNIT = 32;  // bytes, of which rows and pages are multiples
constexpr unsigned NOWHERE = ~0u;
static_assert(!(ROTATED && CHANNEL), "constants by channel are those of keys that are not rotated");
constexpr bool STREAMED = ROPE && ROWS > 1;             // rows are evicted first
constexpr int BLOCKS = ROWS < 4 ? 4 : CHANNEL ? 3 : 2;  // of a multiprocessor at least: 64, 80 or 128 registers

template <int>
struct Integer {
    using type = int;
};
template <>
struct Integer<1> {
    using type = long long;
};
using Index = Integer<INDEX>::type;

template <int>
struct Pair {
    using type = __half2;
};
template <>
struct Pair<1> {
    using type = __nv_bfloat162;
};
using Two = Pair<BF16>::type;

template <int>
struct Vector {
    using type = uint4;
};
template <>
struct Vector<8> {
    using type = uint2;
};
using Half = Vector<VALUES>::type;  // half of a lane's values of a row, as they come

// The extremes of a row, or of a part of it.
struct Extremes {
    float largest, minus_smallest;

    __device__ __forceinline__ void include(const Extremes& other) {
        largest = max_nan(largest, other.largest);
        minus_smallest = max_nan(minus_smallest, other.minus_smallest);
    }
};

// A lane's values of a row as they come.
struct Stored {
    Half halves[2];

    __device__ __forceinline__ Two pair(int i) const { return reinterpret_cast<const Two*>(halves)[i]; }
    __device__ __forceinline__ float operator[](int i) const {
        return i % 2 ? __high2float(pair(i / 2)) : __low2float(pair(i / 2));
    }

    __device__ __forceinline__ Extremes extremes() const {
        Two largest = pair(0), smallest = pair(0);
#pragma unroll
        for (int i = 1; i < PAIRS; ++i)
            largest = __hmax2_nan(largest, pair(i)), smallest = __hmin2_nan(smallest, pair(i));
        return {max_nan(__low2float(largest), __high2float(largest)),
                max_nan(-__low2float(smallest), -__high2float(smallest))};
    }
};

// A lane's values of a row in f32.
struct Rotated {
    float values[VALUES];

    __device__ __forceinline__ float operator[](int i) const { return values[i]; }

    __device__ __forceinline__ Extremes extremes() const {
        Extremes e = {values[0], -values[0]};
#pragma unroll
        for (int i = 1; i < VALUES; ++i) e.include({values[i], -values[i]});
        return e;
    }
};

// So many f32 from a place that is a multiple of 16 bytes.
template <int N>
__device__ __forceinline__ void load(float (&destination)[N], const float* source) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
        reinterpret_cast<float4*>(destination)[i] = reinterpret_cast<const float4*>(source)[i];
}

// How a token's position turns a lane's pairs.
struct Rotation {
    float cos[PAIRS], sin[PAIRS];

    __device__ __forceinline__ void read(const float* cosines, const float* sines, size_t position, int lane) {
        load(cos, cosines + position * (HEAD_DIM / 2) + lane * PAIRS);
        load(sin, sines + position * (HEAD_DIM / 2) + lane * PAIRS);
    }

    __device__ __forceinline__ Rotated of(const Stored& x) const {
        Rotated y;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            y.values[i] = __fsub_rn(__fmul_rn(x[i], cos[i]), __fmul_rn(x[PAIRS + i], sin[i]));
            y.values[PAIRS + i] = __fadd_rn(__fmul_rn(x[PAIRS + i], cos[i]), __fmul_rn(x[i], sin[i]));
        }
        return y;
    }
};

// A lane's values of a key as they are quantised: in f32, turned by the token's position if ROPE, rotated by the Hadamard
// matrix if ROTATED.
__device__ __forceinline__ Rotated prepare_key(const Stored& x, const Rotation& rotation, int lane) {
    Rotated y;
    if constexpr (ROPE) {
        y = rotation.of(x);
    } else {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) y.values[i] = x[i];
    }
    if constexpr (ROTATED) rotate_head<PAIRS, LANES>(y.values, lane);
    return y;
}

// x / s as IEEE rounds it, for an s of f16 (and a quotient that is not tiny). 1/s is known to 2^-46 of itself, and a
// quotient by 11 bits that is not a float keeps 2^-36 of itself from where the rounding turns: it is m * s that x is
// not, with m of 25 bits half-way between two floats.
struct Reciprocal {
    float high, low;

    __device__ __forceinline__ explicit Reciprocal(float s)
        : high(reciprocal(s)), low(__fmul_rn(fmaf(-s, high, 1.0f), high)) {}
    __device__ __forceinline__ Reciprocal(float high, float low) : high(high), low(low) {}
    __device__ __forceinline__ float operator()(float x) const { return fmaf(x, high, __fmul_rn(x, low)); }
};

// x / s as IEEE rounds it, of any s.
struct Divided {
    float s;

    __device__ __forceinline__ void by(float scale) { s = scale; }
    __device__ __forceinline__ float operator()(float x) const { return __fdiv_rn(x, s); }
};

// The same of an s that fits, in so far as a level depends on it. With r = RN(1/s) a quotient x * r, which is wrong by
// less than two units in the last place, is right after one correction (Markstein; every x and s of f32 that come close
// enough to where the rounding turns were tried). The remainder of a quotient beyond 1/4 does not underflow. A product
// that is infinite is cut off if positive, so that it stays so; if negative it ends as NaN, which gets the lowest level
// as well.
struct Corrected {
    float s, r;

    // 2^-100 <= s <= 2^100, as bits, which are ordered like numbers; never of a NaN.
    __device__ __forceinline__ static bool fit(const float (&scales)[VALUES]) {
        const unsigned low = __float_as_int(0x1p-100f), high = __float_as_int(0x1p100f);
        unsigned largest_offset = 0;
#pragma unroll
        for (int j = 0; j < VALUES; ++j) largest_offset = max(largest_offset, __float_as_uint(scales[j]) - low);
        return largest_offset <= high - low;
    }

    __device__ __forceinline__ void by(float scale) { s = scale, r = reciprocal(scale); }

    __device__ __forceinline__ float operator()(float x) const {
        const float near = fminf(__fmul_rn(x, r), 0x1p100f);
        return fmaf(fmaf(-near, s, x), r, near);
    }
};

// The integer next to a quotient of more than -2^22.
__device__ __forceinline__ int rounded(float quotient) {
    return __float_as_int(__fadd_rn(quotient, SHIFT)) - __float_as_int(SHIFT);
}

__device__ __forceinline__ int level(float quotient, int zero) { return max(min(rounded(quotient) + zero, LEVELS), 0); }

template <class T>
__device__ __forceinline__ T read(const T* source) {
    return STREAMED ? __ldcs(source) : *source;
}

template <class T>
__device__ __forceinline__ void write(void* destination, T value) {
    if (STREAMED) __stcs(static_cast<T*>(destination), value);
    else *static_cast<T*>(destination) = value;
}

// Where a thread's rows go, in units from `pages` on, or NOWHERE. By head and token also where the first token's
// constants of the row that the lane answers for begin, unless another lane stores them, and the token's offset in the
// page.
struct Places {
    unsigned char* pages;
    unsigned rows[ROWS], constants, offset;

    // Of heads from `head` on (by head and token) or of tokens (by channel), by their slots.
    __device__ __forceinline__ void of_rows(unsigned char* pool, const Index (&slot)[TOKENS], bool is_v, int head,
                                            int heads) {
        const unsigned pitch = 2 * heads * PAGE_BYTES;
        pages = pool + (size_t(is_v) * heads + head) * PAGE_BYTES;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const Index row_slot = slot[i % TOKENS];
            const unsigned page = unsigned(row_slot / PAGE) * (pitch / UNIT) + i / TOKENS * (PAGE_BYTES / UNIT);
            rows[i] = row_slot < 0 || head + i / TOKENS >= heads ? NOWHERE
                                                                 : page + unsigned(row_slot) % PAGE * (FEATURES / UNIT);
        }
    }

    __device__ __forceinline__ void of_constants(Index slot, int head, int heads, int lane) {
        const unsigned pitch = 2 * heads * PAGE_BYTES;
        const int answered_row = lane / OWNERS;
        const bool answers = lane % OWNERS == 0 && slot >= 0 && head + answered_row < heads;
        const unsigned constants_offset =
            unsigned(slot / PAGE) * (pitch / UNIT) + answered_row * (PAGE_BYTES / UNIT) + PAGE * FEATURES / UNIT;
        constants = answers ? constants_offset : NOWHERE;
        offset = unsigned(slot) % PAGE;
    }
};

// A lane's levels to their places in row i.
[[maybe_unused]] __device__ __forceinline__ void store(const Places& places, int i, int lane, const int (&q)[16]) {
    if (places.rows[i] == NOWHERE) return;
    unsigned char* row = places.pages + size_t(places.rows[i]) * UNIT;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned first_word = bytes_of<0>(q + half * 8), second_word = bytes_of<0>(q + half * 8 + 4);
        unsigned char* destination = row + half * (FEATURES / 2) + lane * BITS;
        if (BITS == 4) write(destination, first_word | second_word << 4);
        else write(destination, make_uint2(first_word, second_word));
    }
}

// The same of 8 values. Of 4 bits they are half of a word in each half of the row: two neighbours exchange one of these
// each.
[[maybe_unused]] __device__ __forceinline__ void store(const Places& places, int i, int lane, const int (&q)[8]) {
    const unsigned first_word = bytes_of<0>(q), second_word = bytes_of<0>(q + 4);
    const bool odd = lane % 2;
    const unsigned neighbour_word = BITS == 4 ? __shfl_xor_sync(~0u, odd ? first_word : second_word, 1) : 0;
    if (places.rows[i] == NOWHERE) return;
    unsigned char* row = places.pages + size_t(places.rows[i]) * UNIT;
    if (BITS == 4) {
        write(row + odd * (FEATURES / 2) + lane / 2 * 4,
              odd ? neighbour_word | second_word << 4 : first_word | neighbour_word << 4);
    } else {
        write(row + lane * 4, first_word);
        write(row + FEATURES / 2 + lane * 4, second_word);
    }
}

// What the owner of row i says.
template <class T>
__device__ __forceinline__ T handed(T value, int i) {
    return __shfl_sync(~0u, value, i * OWNERS, LANES);
}

// The extremes of the row that the lane answers for, of the parts that the row's lanes have.
__device__ __forceinline__ Extremes reduced(Extremes (&e)[ROWS], int lane) {
    int rows_left = ROWS;  // rows that a lane answers for
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) {
        const bool divided = rows_left > 1, upper = lane & mask;
        if (divided) rows_left /= 2;
#pragma unroll
        for (int i = 0; i < rows_left; ++i) {
            const Extremes sent = divided && !upper ? e[i + rows_left] : e[i];
            if (divided && upper) e[i] = e[i + rows_left];
            e[i].include({__shfl_xor_sync(~0u, sent.largest, mask), __shfl_xor_sync(~0u, sent.minus_smallest, mask)});
        }
    }
    return e[0];
}

// Rows with constants of their own.
template <class Row>
__device__ __forceinline__ void append_by_token(const Row (&rows)[ROWS], const Places& places, int lane) {
    Extremes e[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) e[i] = rows[i].extremes();
    Extremes range = reduced(e, lane);
    range.include({0, 0});
    const __half rounded = __float2half_rn(__fdiv_rn(__fadd_rn(range.largest, range.minus_smallest), float(LEVELS)));
    const __half scale = __half2float(rounded) == 0 ? __float2half_rn(1.0f) : rounded;
    const Reciprocal row_quotient(__half2float(scale));
    const int row_zero = level(row_quotient(range.minus_smallest), 0);
    if (places.constants != NOWHERE) {
        unsigned* row_constants =
            reinterpret_cast<unsigned*>(places.pages + size_t(places.constants) * UNIT) + places.offset;
        *row_constants = __half_as_ushort(scale) | unsigned(__half_as_ushort(__int2half_rn(row_zero))) << 16;
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const Reciprocal quotient(handed(row_quotient.high, i), handed(row_quotient.low, i));
        const int zero = handed(row_zero, i);
        int q[VALUES];
#pragma unroll
        for (int j = 0; j < VALUES; ++j) q[j] = level(quotient(rows[i][j]), zero);
        store(places, i, lane, q);
    }
}

// The constants of a lane's channels. Of 8 bits there are no zeros.
struct Channels {
    float scale[VALUES], zero[VALUES];

    __device__ __forceinline__ void read(const float* scales, const float* zeros, int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int channel = half * (HEAD_DIM / 2) + lane * PAIRS;
            load(reinterpret_cast<float (&)[PAIRS]>(scale[half * PAIRS]), scales + channel);
            if (BITS == 4) load(reinterpret_cast<float (&)[PAIRS]>(zero[half * PAIRS]), zeros + channel);
        }
    }
};

// Rows with the constants of their channels: any scales, zeros in 0..LEVELS. What is below the levels, or no number,
// becomes the lowest.
template <class Quotient, class Row>
__device__ __forceinline__ void append_by_channel(const Row (&rows)[ROWS], const Places& places,
                                                  const Channels& channels, int lane) {
    Quotient quotient[VALUES];
    int zero[VALUES];
#pragma unroll
    for (int j = 0; j < VALUES; ++j)
        quotient[j].by(channels.scale[j]), zero[j] = BITS == 4 ? rounded(channels.zero[j]) : 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        int q[VALUES];
#pragma unroll
        for (int j = 0; j < VALUES; ++j) {
            const float above = fmaxf(quotient[j](rows[i][j]), -127.0f);
            q[j] = BITS == 4 ? level(above, zero[j]) : min(rounded(above), 127);
        }
        store(places, i, lane, q);
    }
}

// A function, not a lambda with an `auto` parameter: some versions of NVRTC take the latter for a host function.
template <class Row>
__device__ __forceinline__ void append(const Row (&rows)[ROWS], const Places& places, const Channels& channels,
                                       int lane) {
    if (!CHANNEL) append_by_token(rows, places, lane);
    else if (__all_sync(~0u, Corrected::fit(channels.scale)))
        append_by_channel<Corrected>(rows, places, channels, lane);
    else append_by_channel<Divided>(rows, places, channels, lane);
}

}  // namespace ptxlab
