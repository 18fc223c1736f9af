// rope_append_kv4: what follows the QKV projection in one launch: q rotated, keys rotated and quantised, values
// quantised, keys and values into their slots of a paged cache (QServe section 5.1).
//
// Contract   a token's row of qkv has `ratio` * heads heads of q, then `heads` of k, then as many of v. q is rotated as
//            k is (pairs (i, i + D/2), every multiplication and addition rounded to f32), rounded once and written to
//            [tokens, ratio * heads, D]; with KEYS so is k, to [tokens, heads, D]. Neither is rotated by the Hadamard
//            matrix. k and v leave the same bytes in the pool as append_kv4 does. Of a token with a negative slot (padding) nothing goes to the pool, but its q
//            and k are rotated like all others. A position outside the tables reads their last row: padding may have
//            any.
// PDL        slots, positions, tables and constants by channel are read at once, so that after the wait only qkv is
//            loaded: a kernel that may still run must not write these. qkv is read, and all is written, behind the wait.
// Guide      notebooks/guide/kernels_attention.md: lanes, rows of a thread, order of blocks, constants
// PTX ISA    as append_kv4; 9.7.13.13 griddepcontrol.
#include "griddep.cuh"
#include "kv_rows.cuh"
#include "output.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128  // 64, 128, 256
#define PAGE 64       // tokens: 16, 32, 64
#define BITS 4
#define CHANNEL 0
#define BF16 0
#define INDEX 0  // slots and positions are s32, or s64
#define ROWS 1   // 1, 2, 4
#define KEYS 0   // 1: rotated keys are wanted
#endif
#ifndef ROTATED
#define ROTATED 0  // 1: the cache's keys are rotated by a Hadamard matrix, behind RoPE
#endif

namespace {

using Rows = ptxlab::KvRows<HEAD_DIM, PAGE, BITS, CHANNEL, BF16, INDEX, true, ROWS, ROTATED>;
using Half = Rows::Half;
using Index = Rows::Index;

// Round a lane's values of a rotated row, and store them to the row at `row`.
__device__ __forceinline__ void write_row(Half* row, const Rows::FloatValues& x, int lane) {
    Rows::StoredValues y;
#pragma unroll
    for (int i = 0; i < Rows::kPairs; ++i)
        reinterpret_cast<unsigned*>(y.halves)[i] = ptxlab::rounded_pair<BF16>(x[2 * i], x[2 * i + 1]);
    Half* lane_values = row + lane;
    lane_values[0] = y.halves[0], lane_values[Rows::kLanes] = y.halves[1];
}

}  // namespace

// No input is __restrict__: a read-only load may be moved ahead of griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(256, Rows::kBlocks) rope_append_kv4(
    const Half* qkv,         // f16 or bf16 [tokens, ratio + 2, heads, D], `pitch` elements from one token to the next
    Half* q,                 // as qkv [tokens, ratio, heads, D]
    Half* keys,              // as qkv [tokens, heads, D]; written if KEYS
    unsigned char* pool,     // u8  [pages, 2, heads, PAGE_BYTES]: K, then V
    const Index* slots,      // s32 or s64 [tokens]
    const float* cos,        // f32 [positions, D/2]
    const float* sin,        // f32 [positions, D/2]
    const Index* positions,  // as slots [tokens], or null: token t is at position t
    const float* k_scale,    // f32 [heads, D]; read if CHANNEL
    const float* k_zero,     // f32 [heads, D]; read if CHANNEL and BITS == 4
    const float* v_scale, const float* v_zero, int tokens, int heads,
    int turns,  // positions in the tables
    int pitch) {
    ptxlab::launch_dependents();
    // A block has rows of one kind: heads `section` * heads .. of q, or those of k, or those of v.
    const int section = blockIdx.z, ratio = gridDim.z - 2;
    const Rows::RowLanes lanes;
    const int lane = lanes.lane, token = lanes.first_token(blockIdx.x), head = lanes.first_head();
    const bool is_q = section < ratio;
    const bool is_v = section > ratio;
    Index slot[Rows::kTokens];
    Rows::Rotation rotation[Rows::kTokens];
#pragma unroll
    for (int i = 0; i < Rows::kTokens; ++i) {
        const int t = token + i;
        slot[i] = t < tokens && !is_q ? slots[t] : -1;
        if (is_v) continue;
        const Index position = positions && t < tokens ? positions[t] : t;
        rotation[i].read(cos, sin, min(size_t(position), size_t(turns - 1)), lane);
    }
    Rows::Channels channels;
    // the head's first channel of [heads, D]; lanes beyond the last head take the last one's
    const size_t head_channel = size_t(min(head, heads - 1)) * HEAD_DIM;
    if (CHANNEL && !is_q)
        channels.read((is_v ? v_scale : k_scale) + head_channel, (is_v ? v_zero : k_zero) + head_channel, lane);
    ptxlab::wait_for_predecessors();
    Rows::StoredValues x[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int t = min(token + i % Rows::kTokens, tokens - 1), h = min(head + i / Rows::kTokens, heads - 1);
        x[i].load_from(qkv + size_t(t) * (pitch / Rows::kPairs) + (size_t(section) * heads + h) * (2 * Rows::kLanes) +
                       lane);
    }
    if (is_q || (KEYS && !is_v)) {
        Half* rotated = is_q ? q + size_t(section) * heads * (2 * Rows::kLanes) : keys;
        const size_t of_token = size_t(is_q ? ratio : 1) * heads;  // rows
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int t = token + i % Rows::kTokens, h = head + i / Rows::kTokens;
            if (t >= tokens || h >= heads) continue;
            write_row(rotated + (t * of_token + h) * (2 * Rows::kLanes), rotation[i % Rows::kTokens].of(x[i]), lane);
        }
    }
    if (is_q) return;
    Rows::Places places;
    places.of_rows(pool, slot, is_v, head, heads);
    places.of_constants(slot[0], head, heads, lane);
    if (is_v) {
        Rows::append(x, places, channels, lane);
    } else {
        Rows::FloatValues y[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) y[i] = Rows::prepare_key(x[i], rotation[i % Rows::kTokens], lane);
        Rows::append(y, places, channels, lane);
    }
}
