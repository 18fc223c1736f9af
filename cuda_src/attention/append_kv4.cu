// append_kv4: new keys and values, rotated and quantised, into their slots of a paged cache (QServe section 5.1).
//
// Contract   token t goes to page slots[t] / PAGE, offset slots[t] % PAGE; of a negative slot (padding) nothing is
//            written. With tables, k is rotated first: pairs (i, i + D/2), every multiplication and addition rounded to
//            f32. A position beyond the tables reads their last row: padding may have any. With ROTATED k is then rotated
//            by a Hadamard matrix (hadamard.cuh). By head and token (CHANNEL 0), L = 2^BITS - 1: s = f16((max - min) /
//            L), 1 if that is 0, the range extended to include 0; z = rint(-min / s) in 0..L; q = rint(x / s) + z in
//            0..L; s and z go into the page as f16. By channel (CHANNEL 1), s and z given: 4 bits the same q; 8 bits q =
//            rint(x / s) in -127..127, no zero. Every division is IEEE's: the same bytes as `quant.quantize_kv`. A token
//            with a NaN or an infinity gets a scale that is no finite number either, so that it shows.
// PDL        all warps wait for the kernel before: it makes k and v, and may read the pool.
// Guide      notebooks/guide/kernels_attention.md: page, lanes, tile, order of blocks, constants
// Measured   4096 tokens of 32 heads on an H200, beside the speed of a copy: kv4, rotated 26.2 us, 0.78; kv4 22.1 us,
//            0.90; kv8, rotated 29.0 us, 0.84; kv4 channel, rotated 33.0 us, 0.61; kv8 channel, rotated 34.5 us, 0.70.
// PTX ISA    9.7.3 max.NaN, div.rn, rcp; 9.7.4 max.NaN.f16x2; 9.7.9 shfl.sync; 9.7.9.1 cache operators.
#include "griddep.cuh"
#include "kv_rows.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128  // 64, 128, 256
#define PAGE 64       // tokens: 16, 32, 64
#define BITS 4
#define CHANNEL 0
#define BF16 0
#define INDEX 0  // slots and positions are s32, or s64
#define ROPE 0
#define ROWS 2  // 1, 2, 4
#endif
#ifndef ROTATED
#define ROTATED 0  // 1: the cache's keys are rotated by a Hadamard matrix, behind RoPE
#endif

namespace {

using Rows = ptxlab::KvRows<HEAD_DIM, PAGE, BITS, CHANNEL, BF16, INDEX, ROPE, ROWS, ROTATED>;
using Half = Rows::Half;
using Index = Rows::Index;

}  // namespace

// No input is __restrict__: a read-only load may be moved ahead of griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(256, Rows::kBlocks) append_kv4(
    const Half* k,           // f16 or bf16 [tokens, heads, D], k_pitch elements from one token to the next
    const Half* v,           // as k, v_pitch elements
    unsigned char* pool,     // u8  [pages, 2, heads, PAGE_BYTES]: K, then V
    const Index* slots,      // s32 or s64 [tokens]
    const float* cos,        // f32 [positions, D/2]; read if ROPE
    const float* sin,        // f32 [positions, D/2]
    const Index* positions,  // as slots [tokens], or null: token t is at position t
    const float* k_scale,    // f32 [heads, D]; read if CHANNEL
    const float* k_zero,     // f32 [heads, D]; read if CHANNEL and BITS == 4
    const float* v_scale, const float* v_zero, int tokens, int heads,
    int turns,  // positions in the tables
    int k_pitch, int v_pitch) {
    ptxlab::launch_dependents();
    ptxlab::wait_for_predecessors();
    const Rows::RowLanes lanes;
    const int tile = blockIdx.x / 2, lane = lanes.lane;
    const bool is_v = blockIdx.x % 2;
    const int token = lanes.first_token(tile), head = lanes.first_head();
    const bool turned = ROPE && !is_v;
    Index slot[Rows::kTokens], position[Rows::kTokens];
#pragma unroll
    for (int i = 0; i < Rows::kTokens; ++i) {
        const int t = token + i;
        position[i] = turned && positions && t < tokens ? positions[t] : t;
        slot[i] = t < tokens ? slots[t] : -1;
    }
    Rows::StoredValues x[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int t = min(token + i % Rows::kTokens, tokens - 1), h = min(head + i / Rows::kTokens, heads - 1);
        const Half* row = is_v ? v + size_t(t) * (v_pitch / Rows::kPairs) : k + size_t(t) * (k_pitch / Rows::kPairs);
        x[i].load_from(row + size_t(h) * (2 * Rows::kLanes) + lane);
    }
    Rows::Channels channels;
    // the head's first channel of [heads, D]; lanes beyond the last head take the last one's
    const size_t head_channel = size_t(min(head, heads - 1)) * HEAD_DIM;
    if (CHANNEL)
        channels.read((is_v ? v_scale : k_scale) + head_channel, (is_v ? v_zero : k_zero) + head_channel, lane);
    Rows::Rotation rotation[Rows::kTokens];
    if (turned) {
#pragma unroll
        for (int i = 0; i < Rows::kTokens; ++i) {
            rotation[i].read(cos, sin, min(size_t(position[i]), size_t(turns - 1)), lane);
        }
    }
    Rows::Places places;
    places.of_rows(pool, slot, is_v, head, heads);
    places.of_constants(slot[0], head, heads, lane);
    if (turned || (ROTATED && !is_v)) {
        Rows::FloatValues y[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) y[i] = Rows::prepare_key(x[i], rotation[i % Rows::kTokens], lane);
        Rows::append(y, places, channels, lane);
    } else {
        Rows::append(x, places, channels, lane);
    }
}
