// attention_merge: what several blocks found of one unit (a sequence, queries of one of its heads), put together in the order of its tokens.
#include "griddep.cuh"
#include "mma_f16.cuh"
#include "output.cuh"

#ifndef D
#define D 128
#define BF16 0
#define COLUMNS 8
#endif

extern "C" __global__ void __launch_bounds__(32 * COLUMNS)
attention_merge(const float* partial,   // f32 [blocks, 2, columns, D]: sums of 2^(score - largest) * value
                const float2* stats,    // f32 [blocks, 2, columns, 2]: the largest score (base 2), and the sum of 2^(score - largest)
                const int* segments,    // s32 [blocks, 2]: the unit that begins in this block's part 1, and how many blocks have parts of it, or 0
                unsigned short* out,    // f16 or bf16 [B, T, Hq, D]
                float* lse,             // f32 [B, T, Hq], or null
                int T, int Hq, int Hkv) {
    ptxlab::launch_dependents();
    ptxlab::wait_for_predecessors();
    const int group = Hq / Hkv, splits = (group * T + COLUMNS - 1) / COLUMNS, columns = min(COLUMNS, group * T);
    const int2 segment = reinterpret_cast<const int2*>(segments)[blockIdx.x];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head = segment.x / splits % Hkv, sequence = segment.x / (splits * Hkv), column = segment.x % splits * COLUMNS + warp;
    if (segment.y == 0 || warp >= columns || column >= group * T) return;
    const auto part = [&](int i) { return ((blockIdx.x + i) * 2 + (i == 0)) * size_t(columns) + warp; };
    float largest = -ptxlab::infinity(), sum = 0;
    for (int i = lane; i < segment.y; i += 32) largest = fmaxf(largest, stats[part(i)].x);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    constexpr int PIECES = (D + 127) / 128;
    float4 o[PIECES] = {};
#pragma unroll 8
    for (int i = 0; i < segment.y; ++i) {
        const float2 s = stats[part(i)];
        const float factor = ptxlab::exp2_approx(s.x - largest);
        sum += s.y * factor;
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            if (D >= 128 || lane < D / 4) {
                const float4 v = *reinterpret_cast<const float4*>(partial + part(i) * D + p * 128 + lane * 4);
                o[p].x += factor * v.x, o[p].y += factor * v.y, o[p].z += factor * v.z, o[p].w += factor * v.w;
            }
    }
    const size_t row = (size_t(sequence) * T + column / group) * Hq + head * group + column % group;
    const float inverse = sum > 0 ? 1 / sum : 0;
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
        if (D >= 128 || lane < D / 4)
            *reinterpret_cast<uint2*>(out + row * D + p * 128 + lane * 4) =
                make_uint2(ptxlab::rounded_pair<BF16>(o[p].x * inverse, o[p].y * inverse), ptxlab::rounded_pair<BF16>(o[p].z * inverse, o[p].w * inverse));
    if (lse && lane == 0) lse[row] = sum > 0 ? (largest + ptxlab::log2_approx(sum)) * 0.693147181f : -ptxlab::infinity();
}
