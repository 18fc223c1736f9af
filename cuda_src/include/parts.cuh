// A query's result in a warp's hands: one row of D sums, unnormalised, with the largest score and the sum of the
// weights that they belong to.
#pragma once
#include "mailbox.cuh"
#include "mma_f16.cuh"
#include "output.cuh"
#include "reciprocal.cuh"

namespace ptxlab {

// True in the last of `count` warps that come here, which then sees what all of them wrote before. The counter has to
// be 0 at first.
__device__ __forceinline__ bool last_of(int* counter, int count) {
    int before = 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    before = __shfl_sync(~0u, before, 0);
    __syncwarp();
    return before == count - 1;
}

// Lane i has dims 4 i .. 4 i + 3 of each 128. Weights are 2^(score - largest), for scores in base 2.
template <int DIM>
struct Row {
    static constexpr int PIECES = (DIM + 127) / 128;
    float4 v[PIECES];
    float largest, sum;

    static __device__ __forceinline__ int dim(int piece) { return piece * 128 + threadIdx.x % 32 * 4; }
    static __device__ __forceinline__ bool mine(int piece) { return DIM % 128 == 0 || dim(piece) < DIM; }

    __device__ __forceinline__ void add(const float4 (&more)[PIECES], float factor) {
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            v[p].x += factor * more[p].x, v[p].y += factor * more[p].y, v[p].z += factor * more[p].z,
                v[p].w += factor * more[p].w;
    }

    // Workspace: sums f32 [parts, columns, D], (largest, sum) f32 [parts, columns, 2].
    __device__ __forceinline__ void write(float* partial, float2* stats, size_t at) const {
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            if (mine(p)) *reinterpret_cast<float4*>(partial + at * DIM + dim(p)) = v[p];
        if (threadIdx.x % 32 == 0) stats[at] = make_float2(largest, sum);
    }

    // The parts of one row, put together in their order: those of `count` blocks, of which the first has it as its part
    // 1, the others as part 0. Around the L1, since other blocks of the same grid may have written them.
    static __device__ __forceinline__ Row merged(const float* partial, const float2* stats, int block, int count,
                                                 int columns, int column) {
        const auto part = [&](int i) { return ((block + i) * 2 + (i == 0)) * size_t(columns) + column; };
        constexpr int AHEAD = 8;  // parts on their way at a time
        Row row = {};
        row.largest = -infinity();
        for (int first = 0; first < count; first += AHEAD) {
            float2 s[AHEAD];
            float4 more[AHEAD][PIECES] = {};
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const size_t at = part(min(first + i, count - 1));
                s[i] = __ldcg(stats + at);
#pragma unroll
                for (int p = 0; p < PIECES; ++p)
                    if (mine(p)) more[i][p] = __ldcg(reinterpret_cast<const float4*>(partial + at * DIM + dim(p)));
            }
            row.add_parts(s, more, count - first);
        }
        return row;
    }

    // `count` parts more, or as many as there are.
    template <int MOST>
    __device__ __forceinline__ void add_parts(const float2 (&s)[MOST], const float4 (&more)[MOST][PIECES], int count) {
        float most = largest;
#pragma unroll
        for (int i = 0; i < MOST; ++i) most = fmaxf(most, s[i].x);
        const float less = exp2_approx(largest - most);
        largest = most, sum *= less;
#pragma unroll
        for (int p = 0; p < PIECES; ++p) v[p].x *= less, v[p].y *= less, v[p].z *= less, v[p].w *= less;
#pragma unroll
        for (int i = 0; i < MOST; ++i) {
            const float factor = i < count ? exp2_approx(s[i].x - most) : 0;
            add(more[i], factor), sum += factor * s[i].y;
        }
    }

    // To the block where the row begins, which takes it: into part `at` of sums u32 [parts, D] and (largest, sum) u32
    // [parts, 2].
    __device__ __forceinline__ void hand_over(unsigned* partial, unsigned* stats, size_t at) const {
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            if (mine(p)) post(partial + at * DIM + dim(p), v[p]);
        if (threadIdx.x % 32 == 0) post(stats + at * 2, make_float2(largest, sum));
    }

    // What others hand over, or will, and go on without: `count` parts, in the order of the tokens, the first at
    // `first`, the next `stride` on. ONE_BY_ONE their sum does not depend on how many others there are.
    template <bool ONE_BY_ONE = false>
    __device__ __forceinline__ void take_over(unsigned* partial, unsigned* stats, size_t first, int stride, int count) {
        if (count <= 4) add_posted<4, ONE_BY_ONE>(partial, stats, first, stride, count);
        else add_posted<8, ONE_BY_ONE>(partial, stats, first, stride, count);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const size_t at = first + i * stride;
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
                if (mine(p)) clear<4>(partial + at * DIM + dim(p));
            if (threadIdx.x % 32 == 0) clear<2>(stats + at * 2);
        }
    }

    // Of these AHEAD at a time, as soon as they have come. A block does this once, and waits for its instructions: for
    // few parts there are fewer.
    template <int AHEAD, bool ONE_BY_ONE>
    __device__ __forceinline__ void add_posted(const unsigned* partial, const unsigned* stats, size_t first, int stride,
                                               int count) {
        for (int done = 0; done < count; done += AHEAD) {
            float2 s[AHEAD];
            float4 more[AHEAD][PIECES] = {};
            bool missing = true;
            // at all of them: to wait for one after the other takes longer
            for (int looks = 0; missing && looks < PATIENCE; ++looks) {
                missing = false;
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    const size_t at = first + min(done + i, count - 1) * stride;
                    missing |= !fetch(s[i], stats + at * 2);
#pragma unroll
                    for (int p = 0; p < PIECES; ++p)
                        if (mine(p)) missing |= !fetch(more[i][p], partial + at * DIM + dim(p));
                }
                missing = __any_sync(~0u, missing);  // nobody clears what another lane has yet to see
            }
            if constexpr (ONE_BY_ONE) {
#pragma unroll
                for (int i = 0; i < AHEAD; ++i)
                    if (done + i < count) add_part(s[i], more[i]);
            } else {
                add_parts(s, more, count - done);
            }
        }
    }

    // One part more. Each operation is spelt out: it must round alike wherever this is inlined.
    __device__ __forceinline__ void add_part(float2 s, const float4 (&more)[PIECES]) {
        const float most = fmaxf(largest, s.x), less = exp2_approx(largest - most), factor = exp2_approx(s.x - most);
        const auto added = [&](float a, float b) { return fmaf(factor, b, __fmul_rn(a, less)); };
        largest = most, sum = added(sum, s.y);
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            v[p] = make_float4(added(v[p].x, more[p].x), added(v[p].y, more[p].y), added(v[p].z, more[p].z),
                               added(v[p].w, more[p].w));
    }

    // What this warp has handed over at `at`, and is there no more.
    static __device__ __forceinline__ Row taken_back(unsigned* partial, unsigned* stats, size_t at) {
        Row row = {};
        float2 s;
        __syncwarp();
        fetch(s, stats + at * 2);
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            if (mine(p)) fetch(row.v[p], partial + at * DIM + dim(p)), clear<4>(partial + at * DIM + dim(p));
        row.largest = s.x, row.sum = s.y;
        __syncwarp();  // all have read the statistics
        if (threadIdx.x % 32 == 0) clear<2>(stats + at * 2);
        return row;
    }

    // Divided by the sum of weights, and the natural logarithm of the sum of e^score; of no weights 0 and -inf. f16
    // (KIND 0) or bf16 (1).
    template <int KIND>
    __device__ __forceinline__ void store(unsigned short* out, float* lse, size_t at) const {
        const float inverse = sum == 0 ? 0 : reciprocal_approx(sum);  // NaN stays so
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            if (mine(p))
                *reinterpret_cast<uint2*>(out + at * DIM + dim(p)) =
                    make_uint2(rounded_pair<KIND>(v[p].x * inverse, v[p].y * inverse),
                               rounded_pair<KIND>(v[p].z * inverse, v[p].w * inverse));
        if (lse && threadIdx.x % 32 == 0)
            lse[at] = sum == 0 ? -infinity() : (largest + log2_approx(sum)) * 0.693147181f;
    }
};

}  // namespace ptxlab
