// append_kv4: new keys and values, rotated and quantised, into their slots of a paged cache (QServe sections 4.2 and 5.3).
//
// Contract   token t goes to page slots[t] / PAGE, offset slots[t] % PAGE; of a negative slot (padding) nothing is written.
//            With tables, k is rotated first: pairs (i, i + D/2), every multiplication and addition rounded to f32.
//            By head and token (CHANNEL 0), L = 2^BITS - 1: s = f16((max - min) / L), 1 if that is 0, the range extended to
//            include 0; z = rint(-min / s) in 0..L; q = rint(x / s) + z in 0..L; s and z go into the page as f16.
//            By channel (CHANNEL 1), s and z given: 4 bits the same q; 8 bits q = rint(x / s) in -127..127, signed, no zero.
//            Every division is IEEE's: the same bytes as `quant.quantize_kv`. A token with a NaN or an infinity gets a scale
//            that is no finite number either, so that it shows.
// Page       of a head, K or V: [PAGE][D * BITS/8] features (4 bits: micro-kernel words), then [PAGE][2] f16 scale and zero
// Lanes      D/16 lanes have a row, the values of one token and head. Lane l: values 8 l .. + 7 and D/2 + 8 l .. + 7, so both
//            of each rotated pair; two loads of 16 bytes, two stores of BITS bytes.
// Tile       a row's lanes keep TOKENS rows of one head and find their extremes together: each exchange halves the rows that
//            a lane answers for. Each finds slot and constants of its one row, and hands them to the others.
// PDL        everything waits for the kernel before: it makes k and v, and may read the pool.
// PTX ISA    9.7.3 max.NaN, div.rn, rcp.rn; 9.7.4 max.NaN.f16x2; 9.7.9 shfl.sync.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "griddep.cuh"

#ifndef D
#define D 128      // of a head: 64, 128, 256
#define PAGE 64    // tokens: 16, 32, 64
#define BITS 4
#define CHANNEL 0
#define BF16 0
#define INDEX 0    // slots and positions are s32, or s64
#define ROPE 0
#define TOKENS 4   // 1, 2, 4
#endif

namespace {

constexpr int LANES = D / 16, OWNERS = LANES / TOKENS;  // of a row; of them, those that answer for the same row in the end
constexpr int LEVELS = BITS == 4 ? 15 : 255;
constexpr int FEATURES = D * BITS / 8;                  // bytes of a row
constexpr int PAGE_BYTES = PAGE * (FEATURES + (CHANNEL ? 0 : 4));
constexpr int UNIT = 32;                                // bytes, of which rows and pages are multiples
constexpr unsigned NOWHERE = ~0u;
constexpr float SHIFT = 12582912.0f;                    // 1.5 * 2^23 leaves no bits behind the point

template <int> struct Integer { using type = int; };
template <> struct Integer<1> { using type = long long; };
using Index = Integer<INDEX>::type;

template <int> struct Pair { using type = __half2; };
template <> struct Pair<1> { using type = __nv_bfloat162; };
using Two = Pair<BF16>::type;

__device__ __forceinline__ float max_nan(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}

// The extremes of a row, or of a part of it.
struct Extremes {
    float most, minus_least;

    __device__ __forceinline__ void include(const Extremes& other) {
        most = max_nan(most, other.most);
        minus_least = max_nan(minus_least, other.minus_least);
    }
};

// A lane's values of a row as they come.
struct Stored {
    uint4 words[2];

    __device__ __forceinline__ Two pair(int i) const { return reinterpret_cast<const Two*>(words)[i]; }
    __device__ __forceinline__ float operator[](int i) const { return i % 2 ? __high2float(pair(i / 2)) : __low2float(pair(i / 2)); }

    __device__ __forceinline__ Extremes extremes() const {
        Two most = pair(0), least = pair(0);
#pragma unroll
        for (int i = 1; i < 8; ++i) most = __hmax2_nan(most, pair(i)), least = __hmin2_nan(least, pair(i));
        return {max_nan(__low2float(most), __high2float(most)), max_nan(-__low2float(least), -__high2float(least))};
    }
};

// A lane's values of a row in f32.
struct Rotated {
    float values[16];

    __device__ __forceinline__ float operator[](int i) const { return values[i]; }

    __device__ __forceinline__ Extremes extremes() const {
        Extremes e = {values[0], -values[0]};
#pragma unroll
        for (int i = 1; i < 16; ++i) e.include({values[i], -values[i]});
        return e;
    }
};

// `cos` and `sin` are those of the lane's eight pairs.
__device__ __forceinline__ Rotated rotated(const Stored& x, const float4* cos, const float4* sin) {
    float c[8], s[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        reinterpret_cast<float4*>(c)[half] = cos[half];
        reinterpret_cast<float4*>(s)[half] = sin[half];
    }
    Rotated y;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        y.values[i] = __fsub_rn(__fmul_rn(x[i], c[i]), __fmul_rn(x[8 + i], s[i]));
        y.values[8 + i] = __fadd_rn(__fmul_rn(x[8 + i], c[i]), __fmul_rn(x[i], s[i]));
    }
    return y;
}

// x / s as IEEE rounds it, for an s of f16 (and a quotient that is not tiny). 1/s is known to 2^-46 of itself, and a quotient
// by 11 bits that is not a float keeps 2^-36 of itself from where the rounding turns: it is m * s that x is not, with m of 25
// bits half-way between two floats.
struct Reciprocal {
    float high, low;

    __device__ __forceinline__ explicit Reciprocal(float s) : high(__frcp_rn(s)), low(__fmul_rn(fmaf(-s, high, 1.0f), high)) {}
    __device__ __forceinline__ Reciprocal(float high, float low) : high(high), low(low) {}
    __device__ __forceinline__ float operator()(float x) const { return fmaf(x, high, __fmul_rn(x, low)); }
};

// rint(quotient) + zero in 0..LEVELS, for a quotient of less than 2^22.
__device__ __forceinline__ int level(float quotient, int zero) {
    const int rounded = __float_as_int(__fadd_rn(quotient, SHIFT)) - __float_as_int(SHIFT);
    return max(min(rounded + zero, LEVELS), 0);
}

// A lane's levels to their places in a row.
__device__ __forceinline__ void store(unsigned char* row, int lane, const int (&q)[16]) {
    const auto bytes = [](int a, int b, int c, int d) { return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410); };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int* of = q + half * 8;
        const unsigned first = bytes(of[0], of[1], of[2], of[3]), second = bytes(of[4], of[5], of[6], of[7]);
        unsigned char* to = row + half * (FEATURES / 2) + lane * BITS;
        if (BITS == 4) *reinterpret_cast<unsigned*>(to) = first | second << 4;
        else *reinterpret_cast<uint2*>(to) = make_uint2(first, second);
    }
}

// What the owner of row i says.
template <class T>
__device__ __forceinline__ T handed(T value, int i) { return __shfl_sync(~0u, value, i * OWNERS, LANES); }

// The extremes of the row that the lane answers for, of the parts that the row's lanes have.
__device__ __forceinline__ Extremes reduced(Extremes (&e)[TOKENS], int lane) {
    int left = TOKENS;  // rows that a lane answers for
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) {
        const bool divided = left > 1, upper = lane & mask;
        if (divided) left /= 2;
#pragma unroll
        for (int i = 0; i < left; ++i) {
            const Extremes given = divided && !upper ? e[i + left] : e[i];
            if (divided && upper) e[i] = e[i + left];
            e[i].include({__shfl_xor_sync(~0u, given.most, mask), __shfl_xor_sync(~0u, given.minus_least, mask)});
        }
    }
    return e[0];
}

// Rows with constants of their own, which go to `constants` if that is not null. `place`, in units from `pages` on, is of the
// lane's own row.
template <class Row>
__device__ __forceinline__ void append_by_token(const Row (&rows)[TOKENS], unsigned char* pages, unsigned place, unsigned* constants, int lane) {
    Extremes e[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) e[i] = rows[i].extremes();
    Extremes range = reduced(e, lane);
    range.include({0, 0});
    const __half rounded = __float2half_rn(__fdiv_rn(__fadd_rn(range.most, range.minus_least), float(LEVELS)));
    const __half scale = __half2float(rounded) == 0 ? __float2half_rn(1.0f) : rounded;
    const Reciprocal own(__half2float(scale));
    const int own_zero = level(own(range.minus_least), 0);
    if (constants) *constants = __half_as_ushort(scale) | unsigned(__half_as_ushort(__int2half_rn(own_zero))) << 16;
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        const Reciprocal quotient(handed(own.high, i), handed(own.low, i));
        const int zero = handed(own_zero, i);
        const unsigned to = handed(place, i);
        int q[16];
#pragma unroll
        for (int j = 0; j < 16; ++j) q[j] = level(quotient(rows[i][j]), zero);
        if (to != NOWHERE) store(pages + size_t(to) * UNIT, lane, q);
    }
}

// Rows with the constants of their channels, f32 [D] of a head, which may be any: a quotient is clipped before it is rounded
// (the bounds are integers). Of 8 bits there are no zeros.
template <class Row>
__device__ __forceinline__ void append_by_channel(const Row (&rows)[TOKENS], unsigned char* pages, unsigned place, const float4* scales,
                                                  const float4* zeros, int lane) {
    constexpr int LOW = BITS == 4 ? 0 : -127, HIGH = BITS == 4 ? 15 : 127;
    float scale[16], zero[16] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int at = i / 2 * (D / 8) + lane * 2 + i % 2;
        reinterpret_cast<float4*>(scale)[i] = scales[at];
        if (BITS == 4) reinterpret_cast<float4*>(zero)[i] = zeros[at];
    }
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        const unsigned to = handed(place, i);
        int q[16];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const float quotient = fminf(fmaxf(__fdiv_rn(rows[i][j], scale[j]), LOW - zero[j]), HIGH - zero[j]);
            q[j] = __float_as_int(__fadd_rn(__fadd_rn(quotient, SHIFT), zero[j])) - __float_as_int(SHIFT);
        }
        if (to != NOWHERE) store(pages + size_t(to) * UNIT, lane, q);
    }
}

// A function, not a lambda with an `auto` parameter: some versions of NVRTC take the latter for a host function.
template <class Row>
__device__ __forceinline__ void append(const Row (&rows)[TOKENS], unsigned char* pages, unsigned place, unsigned* constants, const float4* scales,
                                       const float4* zeros, int lane) {
    if constexpr (CHANNEL) append_by_channel(rows, pages, place, scales, zeros, lane);
    else append_by_token(rows, pages, place, constants, lane);
}

}  // namespace

// No input is __restrict__: a read-only load may be moved ahead of griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(256)
append_kv4(const uint4* k,            // f16 or bf16 [tokens, heads, D]
           const uint4* v,            // as k
           unsigned char* pool,       // u8  [pages, 2, heads, PAGE_BYTES]: K, then V
           const Index* slots,        // s32 or s64 [tokens]
           const float4* cos,         // f32 [positions, D/2]; read if ROPE
           const float4* sin,         // f32 [positions, D/2]
           const Index* positions,    // as slots [tokens], or null: token t is at position t
           const float4* k_scale,     // f32 [heads, D]; read if CHANNEL
           const float4* k_zero,      // f32 [heads, D]; read if CHANNEL and BITS == 4
           const float4* v_scale,
           const float4* v_zero,
           int tokens, int heads) {
    ptxlab::launch_dependents();
    ptxlab::wait_for_predecessors();
    const int lane = threadIdx.x % LANES, row = blockIdx.y * (blockDim.x / LANES) + threadIdx.x / LANES;
    const int first = blockIdx.x * TOKENS, last = tokens - 1, own = first + lane / OWNERS;
    const int head = min(row, heads - 1);  // the last rows are there again where others are missing, and not stored
    const bool is_v = blockIdx.z;
    Stored x[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        const uint4* from = (is_v ? v : k) + (size_t(min(first + i, last)) * heads + head) * (D / 8) + lane;
        x[i].words[0] = from[0], x[i].words[1] = from[D / 16];
    }
    const Index slot = row < heads && own <= last ? slots[own] : -1;
    const Index named = ROPE && !is_v && positions && own <= last ? positions[own] : own;  // on its way beside the slot
    const unsigned page = unsigned(slot / PAGE), offset = unsigned(slot) % PAGE, pitch = 2 * heads * PAGE_BYTES;
    const unsigned place = slot < 0 ? NOWHERE : page * (pitch / UNIT) + offset * (FEATURES / UNIT);
    unsigned char* pages = pool + (size_t(is_v) * heads + head) * PAGE_BYTES;
    unsigned char* own_constants = pages + size_t(page) * pitch + PAGE * FEATURES + offset * 4;
    unsigned* constants = lane % OWNERS == 0 && slot >= 0 ? reinterpret_cast<unsigned*>(own_constants) : nullptr;
    const float4 *scales = (is_v ? v_scale : k_scale) + head * (D / 4), *zeros = (is_v ? v_zero : k_zero) + head * (D / 4);
    if (!ROPE || is_v) return append(x, pages, place, constants, scales, zeros, lane);
    const Index position = slot < 0 ? 0 : named;                             // of padding it may be any
    Rotated y[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        const size_t at = size_t(handed(unsigned(position), i)) * (D / 8) + lane * 2;
        y[i] = rotated(x[i], cos + at, sin + at);
    }
    append(y, pages, place, constants, scales, zeros, lane);
}
