// attention_merge: merge the parts of a unit (queries of one head of a sequence) in the order of its tokens.
#include "griddep.cuh"
#include "parts.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#define BF16 0
#define COLUMNS 8
#endif

extern "C" __global__ void __launch_bounds__(32 * COLUMNS) attention_merge(
    const float* partial,  // f32 [blocks, 2, columns, D]: sums of 2^(score - largest) * value
    // f32 [blocks, 2, columns, 2]: the largest score (base 2), and the sum of 2^(score - largest)
    const float2* stats,
    // s32 [blocks, 2]: the unit that begins in this block's part 1; how many blocks have parts of it, or 0
    const int2* segments,
    unsigned short* out,  // f16 or bf16 [B, T, Hq, D]
    float* lse,           // f32 [B, T, Hq], or null
    int T, int Hq, int Hkv) {
    ptxlab::launch_dependents();
    ptxlab::wait_for_predecessors();
    const int group = Hq / Hkv, splits = (group * T + COLUMNS - 1) / COLUMNS, columns = min(COLUMNS, group * T);
    const int2 segment = segments[blockIdx.x];
    const int warp = threadIdx.x / 32, column = segment.x % splits * COLUMNS + warp;
    if (segment.y == 0 || warp >= columns || column >= group * T) return;
    const int head = segment.x / splits % Hkv, sequence = segment.x / (splits * Hkv);
    ptxlab::Row<HEAD_DIM>::merge(partial, stats, blockIdx.x, segment.y, columns, warp)
        .store<BF16>(out, lse, (size_t(sequence) * T + column / group) * Hq + head * group + column % group);
}
