// One row of attention results in a warp: D unnormalised sums, the largest score, and the sum of the weights relative
// to it.
#pragma once
#include "mailbox.cuh"
#include "mma_f16.cuh"
#include "output.cuh"
#include "reciprocal.cuh"

namespace ptxlab {

// Count a warp's arrival; return true in the last of `count` warps, which then sees what all of them wrote before. The
// counter has to be 0 at first.
__device__ __forceinline__ bool last_of(int* counter, int count) {
    int arrived = 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(arrived) : "l"(counter) : "memory");
    arrived = __shfl_sync(~0u, arrived, 0);
    __syncwarp();
    return arrived == count - 1;
}

// An unnormalised row: lane i has dims 4 i .. 4 i + 3 of each 128. Weights are 2^(score - largest), for scores in base
// 2.
template <int DIM>
struct Row {
    static constexpr int PIECES = (DIM + 127) / 128;
    float4 v[PIECES];
    float largest, sum;

    static __device__ __forceinline__ int dim(int piece) { return piece * 128 + threadIdx.x % 32 * 4; }
    static __device__ __forceinline__ bool has_piece(int piece) { return DIM % 128 == 0 || dim(piece) < DIM; }

    __device__ __forceinline__ void add(const float4 (&addend)[PIECES], float factor) {
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            v[p].x += factor * addend[p].x, v[p].y += factor * addend[p].y, v[p].z += factor * addend[p].z,
                v[p].w += factor * addend[p].w;
    }

    // Combine the statistics of the warps that share the row, one warp per lane of each LANES: (largest score, sum of
    // weights, sum of weights times zero points). Set `largest`, `sum` and `zero_sum`; return the factor that rescales
    // the sums of the lane's warp.
    template <int LANES>
    __device__ __forceinline__ float combine_stats(float4 stat, float& zero_sum) {
        largest = stat.x;
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
        const float factor = exp2_approx(stat.x - largest);
        zero_sum = stat.z * factor, sum = stat.y * factor;
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2)
            sum += __shfl_xor_sync(~0u, sum, step), zero_sum += __shfl_xor_sync(~0u, zero_sum, step);
        return factor;
    }

    // Add the rows of the active ones of WARP_COUNT warps, `stride` floats apart, times their factors. Bit i of
    // `active_warps` and the factor of lane i are of warp (first_warp + i) % WARP_COUNT; i gives the order of addition.
    template <int WARP_COUNT>
    __device__ __forceinline__ void add_warps(const float* rows, int stride, float factor, unsigned active_warps,
                                              int first_warp) {
#pragma unroll
        for (int w = 0; w < WARP_COUNT; ++w) {
            const float warp_factor = __shfl_sync(~0u, factor, w);
            const float* row = rows + (first_warp + w) % WARP_COUNT * stride;
            float4 addend[PIECES] = {};
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
                if ((active_warps >> w & 1) && has_piece(p)) addend[p] = *reinterpret_cast<const float4*>(row + dim(p));
            add(addend, warp_factor);
        }
    }

    // Write the row to the workspace: sums f32 [parts, columns, D], (largest, sum) f32 [parts, columns, 2].
    __device__ __forceinline__ void write(float* partial, float2* stats, size_t index) const {
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            if (has_piece(p)) *reinterpret_cast<float4*>(partial + index * DIM + dim(p)) = v[p];
        if (threadIdx.x % 32 == 0) stats[index] = make_float2(largest, sum);
    }

    // Read the parts of one row from the workspace and add them in order: of `count` blocks from `block` on, the first
    // has its part 1 of it, the others their part 0. Loads bypass the L1, since other blocks of the same grid may have
    // written the parts.
    static __device__ __forceinline__ Row merge(const float* partial, const float2* stats, int block, int count,
                                                int columns, int column) {
        const auto part_index = [&](int i) { return ((block + i) * 2 + (i == 0)) * size_t(columns) + column; };
        constexpr int AHEAD = 8;  // parts loaded at a time
        Row row = {};
        row.largest = -infinity();
        for (int first_part = 0; first_part < count; first_part += AHEAD) {
            float2 s[AHEAD];
            float4 addends[AHEAD][PIECES] = {};
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const size_t index = part_index(min(first_part + i, count - 1));
                s[i] = __ldcg(stats + index);
#pragma unroll
                for (int p = 0; p < PIECES; ++p)
                    if (has_piece(p))
                        addends[i][p] = __ldcg(reinterpret_cast<const float4*>(partial + index * DIM + dim(p)));
            }
            row.add_parts(s, addends, count - first_part);
        }
        return row;
    }

    // Add the first `count` of COUNT parts, or all of them: (largest, sum) `s` and sums `addends`.
    template <int COUNT>
    __device__ __forceinline__ void add_parts(const float2 (&s)[COUNT], const float4 (&addends)[COUNT][PIECES],
                                              int count) {
        float peak = largest;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) peak = fmaxf(peak, s[i].x);
        const float rescale = exp2_approx(largest - peak);
        largest = peak, sum *= rescale;
#pragma unroll
        for (int p = 0; p < PIECES; ++p) v[p].x *= rescale, v[p].y *= rescale, v[p].z *= rescale, v[p].w *= rescale;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float factor = i < count ? exp2_approx(s[i].x - peak) : 0;
            add(addends[i], factor), sum += factor * s[i].y;
        }
    }

    // Post the row for the block where its unit begins: as one part of sums u32 [parts, D] and (largest, sum) u32
    // [parts, 2].
    __device__ __forceinline__ void hand_over(unsigned* partial, unsigned* stats, size_t index) const {
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            if (has_piece(p)) post(partial + index * DIM + dim(p), v[p]);
        if (threadIdx.x % 32 == 0) post(stats + index * 2, make_float2(largest, sum));
    }

    // Wait for `count` parts that other blocks have posted or will post, without waiting themselves; add them in the
    // order of the tokens, from `first_part` on, `stride` apart, and clear them. With ONE_BY_ONE the sum does not
    // depend on how many parts others post.
    template <bool ONE_BY_ONE = false>
    __device__ __forceinline__ void take_over(unsigned* partial, unsigned* stats, size_t first_part, int stride,
                                              int count) {
        if (count <= 4) add_posted<4, ONE_BY_ONE>(partial, stats, first_part, stride, count);
        else add_posted<8, ONE_BY_ONE>(partial, stats, first_part, stride, count);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const size_t index = first_part + i * stride;
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
                if (has_piece(p)) clear<4>(partial + index * DIM + dim(p));
            if (threadIdx.x % 32 == 0) clear<2>(stats + index * 2);
        }
    }

    // Add posted parts, AHEAD at a time, as soon as all of these have arrived. A block runs this once and waits for its
    // instructions, so few parts have a version with fewer of them.
    template <int AHEAD, bool ONE_BY_ONE>
    __device__ __forceinline__ void add_posted(const unsigned* partial, const unsigned* stats, size_t first_part,
                                               int stride, int count) {
        for (int added_parts = 0; added_parts < count; added_parts += AHEAD) {
            float2 s[AHEAD];
            float4 addends[AHEAD][PIECES] = {};
            bool incomplete = true;
            // polls all of them: to wait for one after the other takes longer
            for (int looks = 0; incomplete && looks < PATIENCE; ++looks) {
                incomplete = false;
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    const size_t index = first_part + min(added_parts + i, count - 1) * stride;
                    incomplete |= !fetch(s[i], stats + index * 2);
#pragma unroll
                    for (int p = 0; p < PIECES; ++p)
                        if (has_piece(p)) incomplete |= !fetch(addends[i][p], partial + index * DIM + dim(p));
                }
                incomplete = __any_sync(~0u, incomplete);  // nobody clears what another lane has yet to see
            }
            if constexpr (ONE_BY_ONE) {
#pragma unroll
                for (int i = 0; i < AHEAD; ++i)
                    if (added_parts + i < count) add_part(s[i], addends[i]);
            } else {
                add_parts(s, addends, count - added_parts);
            }
        }
    }

    // Add one part. Each operation is spelt out: it must round alike wherever this is inlined.
    __device__ __forceinline__ void add_part(float2 s, const float4 (&addends)[PIECES]) {
        const float peak = fmaxf(largest, s.x), rescale = exp2_approx(largest - peak), factor = exp2_approx(s.x - peak);
        const auto add_scaled = [&](float a, float b) { return fmaf(factor, b, __fmul_rn(a, rescale)); };
        largest = peak, sum = add_scaled(sum, s.y);
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            v[p] = make_float4(add_scaled(v[p].x, addends[p].x), add_scaled(v[p].y, addends[p].y),
                               add_scaled(v[p].z, addends[p].z), add_scaled(v[p].w, addends[p].w));
    }

    // Read, and clear, the part that this warp has handed over.
    static __device__ __forceinline__ Row reclaim(unsigned* partial, unsigned* stats, size_t index) {
        Row row = {};
        float2 s;
        __syncwarp();
        fetch(s, stats + index * 2);
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            if (has_piece(p)) fetch(row.v[p], partial + index * DIM + dim(p)), clear<4>(partial + index * DIM + dim(p));
        row.largest = s.x, row.sum = s.y;
        __syncwarp();  // all have read the statistics
        if (threadIdx.x % 32 == 0) clear<2>(stats + index * 2);
        return row;
    }

    // Store the row divided by its sum of weights, f16 (KIND 0) or bf16 (1), and the natural logarithm of the sum of
    // e^score; without any weight 0 and -inf.
    template <int KIND>
    __device__ __forceinline__ void store(unsigned short* out, float* lse, size_t row_index) const {
        const float inverse = sum == 0 ? 0 : reciprocal_approx(sum);  // NaN stays so
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            if (has_piece(p))
                *reinterpret_cast<uint2*>(out + row_index * DIM + dim(p)) =
                    make_uint2(rounded_pair<KIND>(v[p].x * inverse, v[p].y * inverse),
                               rounded_pair<KIND>(v[p].z * inverse, v[p].w * inverse));
        if (lse && threadIdx.x % 32 == 0)
            lse[row_index] = sum == 0 ? -infinity() : (largest + log2_approx(sum)) * 0.693147181f;
    }
};

}  // namespace ptxlab
