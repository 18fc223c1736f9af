// gemm_w4a8_small_sm90
#include "dequant.cuh"
#include "griddep.cuh"
#include "mbarrier.cuh"
#include "output.cuh"

#ifndef BM
#define BM 16
#define ROWS 2     // strips at a time
#define SLICES 8   // warps that share the channels of a stage
#define STAGES 6
#define GROUP 128
#define OUT 0
#define ORDER 0    // of X: 0 row-major, 1 fragments
#endif
#ifndef RESIDENT
#define RESIDENT 1
#endif

namespace {

using ptxlab::u32;
using ptxlab::u64;
constexpr int GROUPS = 128 / GROUP;
constexpr int BLOCK = 1024 + GROUPS * 32;
constexpr int WARPS = ROWS * SLICES, THREADS = 32 * (WARPS + 2);
constexpr int W_BYTES = SLICES * BLOCK;              // of a strip and a stage
constexpr int STAGE_BYTES = ROWS * W_BYTES;
constexpr int MMAS = BM / 8;
constexpr int X_UNIT = BM * 64;                       // bytes of 64 channels of X, in fragment order
constexpr int PITCH = ROWS * 16 + 4, TILE = BM * PITCH;
constexpr int ITEMS = (BM * ROWS * 2 + 31) / 32;

// Row-major X to fragment order, and the sum of each token.
__device__ __forceinline__ void bring_row_major(unsigned char* xs, int* sums, const signed char* x, int tokens, int K, int units) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, j = lane % 4, turn = g / 2;
    for (int m = 0; m < MMAS; ++m) {
        const int token = m * 8 + g;
        int sum = 0;
#pragma unroll 4
        for (int unit = warp; unit < units; unit += WARPS) {
            const int k = unit * 64 + j * 16;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (token < tokens && k < K) v = *reinterpret_cast<const uint4*>(x + size_t(token) * K + k);
            sum = __dp4a(int(v.x), 0x01010101, sum), sum = __dp4a(int(v.y), 0x01010101, sum);
            sum = __dp4a(int(v.z), 0x01010101, sum), sum = __dp4a(int(v.w), 0x01010101, sum);
            // word t goes to lane 4 g + t; the lanes begin with different words, so that their banks differ
            if (turn & 1) v = make_uint4(v.y, v.z, v.w, v.x);
            if (turn & 2) v = make_uint4(v.z, v.w, v.x, v.y);
            u32* to = reinterpret_cast<u32*>(xs + unit * X_UNIT + m * 512 + g * 64) + j;
            to[(turn & 3) * 4] = v.x, to[(turn + 1 & 3) * 4] = v.y, to[(turn + 2 & 3) * 4] = v.z, to[(turn + 3 & 3) * 4] = v.w;
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (j == 0) atomicAdd(sums + token, sum);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
gemm_w4a8_small_sm90(const unsigned char* __restrict__ strips, const float* __restrict__ w_scale, const signed char* __restrict__ x,
                     const float* __restrict__ x_scale, const int* __restrict__ x_sum, const float* __restrict__ bias,
                     void* __restrict__ y, int M, int N, int K) {
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ u64 full[STAGES], empty[STAGES], summed[2], cleared[2];
    __shared__ int token_sum[BM];
    const int w_blocks = (K + 127) / 128, chunks = (w_blocks + SLICES - 1) / SLICES, units = 2 * w_blocks;
    const int all = (N + 15) / 16, least = all / int(gridDim.x), larger = all % int(gridDim.x);
    const int strip0 = int(blockIdx.x) * least + min(int(blockIdx.x), larger), strips_here = least + (int(blockIdx.x) < larger);
    const int x_units = (K + 63) / 64;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    unsigned char* xs = ring + STAGES * STAGE_BYTES;
    int* sums = reinterpret_cast<int*>(xs + units * X_UNIT);

    ptxlab::Slot<STAGES> slot;
    if (warp == WARPS) {  // asks for weights, and for activations in fragments
        const bool elected = ptxlab::elect();
        const size_t pitch = size_t(w_blocks) * BLOCK;
        const unsigned char* from = strips + strip0 * pitch;
        const auto load_w = [&](int row, int chunk, int slot_index) {
            const int bytes = min(SLICES, w_blocks - chunk * SLICES) * BLOCK, rows = min(ROWS, strips_here - row);
            const int x_bytes = ORDER == 1 && row == 0 ? min(SLICES * 2, x_units - chunk * SLICES * 2) * X_UNIT : 0;
            if (elected) ptxlab::mbarrier_arrive_expect(&full[slot_index], rows * bytes + x_bytes);
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                if (i < rows && elected)
                    ptxlab::bulk_load(ring + slot_index * STAGE_BYTES + i * W_BYTES, from + (row + i) * pitch + chunk * W_BYTES, bytes, &full[slot_index]);
        };
        const auto load_x = [&](int chunk, int slot_index) {
            const int first = chunk * SLICES * 2, count = min(SLICES * 2, x_units - first);
            if (elected) ptxlab::bulk_load(xs + first * X_UNIT, x + size_t(first) * X_UNIT, count * X_UNIT, &full[slot_index]);
        };
        if (elected) {
            for (int s = 0; s < STAGES; ++s) ptxlab::mbarrier_init(&full[s], 1), ptxlab::mbarrier_init(&empty[s], 32 * WARPS);
            for (int b = 0; b < 2; ++b) ptxlab::mbarrier_init(&summed[b], 32 * WARPS), ptxlab::mbarrier_init(&cleared[b], 32);
            ptxlab::fence_mbarrier_init();
        }
        __syncwarp();
        const int early = min(STAGES, chunks);
        load_w(0, 0, 0);
        __syncthreads();
        if (elected) ptxlab::launch_dependents();
        if (ORDER == 1) {
            ptxlab::wait_for_predecessors();
            load_x(0, 0);
        }
        for (int chunk = 1; chunk < early; ++chunk) {
            load_w(0, chunk, chunk);
            if (ORDER == 1) load_x(chunk, chunk);
        }
        for (int row = 0; row < strips_here; row += ROWS)
            for (int chunk = 0; chunk < chunks; ++chunk, slot.advance()) {
                if (row == 0 && chunk < early) continue;
                ptxlab::mbarrier_wait(&empty[slot.index], slot.parity ^ 1);
                load_w(row, chunk, slot.index);
                if (ORDER == 1 && row == 0) load_x(chunk, slot.index);
            }
        return;
    }
    for (int i = threadIdx.x; i < 2 * TILE; i += 32 * WARPS) sums[i] = 0;
    if (ORDER == 1 && x_units < units)  // K ends within a block: no channels, and no zeros from memory
        for (int i = threadIdx.x; i < X_UNIT / 4; i += 32 * WARPS) reinterpret_cast<u32*>(xs + x_units * X_UNIT)[i] = 0;
    if (threadIdx.x < BM) token_sum[threadIdx.x] = 0;
    __syncthreads();
    if (warp == WARPS + 1) {  // sums -> outputs
        const int part = lane % (ROWS * 2);
        float xs_of[ITEMS];
        int extra[ITEMS];
        int buffer = 0, parity = 0;
        for (int row = 0; row < strips_here; row += ROWS) {
            const int n = (strip0 + row) * 16 + part * 8;
            const bool inside = n < N && row + part / 2 < strips_here;
            float ws[8] = {}, b[8] = {};
            if (inside) {
#pragma unroll
                for (int i = 0; i < 8; ++i) ws[i] = w_scale[n + i], b[i] = bias ? bias[n + i] : 0;
            }
            if (row == 0) {
                ptxlab::wait_for_predecessors();
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) {
                    const int token = (i * 32 + lane) / (ROWS * 2);
                    xs_of[i] = token < M ? x_scale[token] : 0;
                    extra[i] = x_sum && token < M ? 128 * x_sum[token] : 0;
                }
            }
            ptxlab::mbarrier_wait(&summed[buffer], parity);
            int* tile = sums + buffer * TILE;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const int token = (i * 32 + lane) / (ROWS * 2);
                if (row == 0 && !x_sum && token < BM) extra[i] = 128 * token_sum[token];
                if (token >= BM) continue;
                int4* at = reinterpret_cast<int4*>(tile + token * PITCH + part * 8);
                const int4 lo = at[0], hi = at[1];
                at[0] = at[1] = make_int4(0, 0, 0, 0);
                const int v[8] = {lo.x - extra[i], lo.y - extra[i], lo.z - extra[i], lo.w - extra[i],
                                  hi.x - extra[i], hi.y - extra[i], hi.z - extra[i], hi.w - extra[i]};
                if (!inside || token >= M) continue;
                if (bias) ptxlab::store_8<OUT>(y, size_t(token) * N + n, v, xs_of[i], ws, b);
                else ptxlab::store_8<OUT>(y, size_t(token) * N + n, v, xs_of[i], ws, nullptr);
            }
            ptxlab::mbarrier_arrive(&cleared[buffer]);
            if ((buffer ^= 1) == 0) parity ^= 1;
        }
        return;
    }
    if (ORDER == 0) {
        ptxlab::wait_for_predecessors();
        bring_row_major(xs, token_sum, x, M, K, units);
        asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
    }
    const int strip = warp / SLICES, slice = warp % SLICES, g = lane / 4;
    int buffer = 0, parity = 0;
    for (int row = 0; row < strips_here; row += ROWS) {
        const bool mine = row + strip < strips_here;
        int acc[MMAS][4] = {};
        for (int chunk = 0; chunk < chunks; ++chunk, slot.advance()) {
            const int block = chunk * SLICES + slice;
            ptxlab::mbarrier_wait(&full[slot.index], slot.parity);
            if (mine && block < w_blocks) {
                const unsigned char* w = ring + slot.index * STAGE_BYTES + strip * W_BYTES + slice * BLOCK;
                const uint4 q[2] = {*reinterpret_cast<const uint4*>(w + lane * 16), *reinterpret_cast<const uint4*>(w + 512 + lane * 16)};
                u32 c[GROUPS];
#pragma unroll
                for (int i = 0; i < GROUPS; ++i) c[i] = *reinterpret_cast<const u32*>(w + 1024 + i * 32 + g * 4);
#pragma unroll
                for (int unit = 0; unit < 2; ++unit) {
                    uint4 b[MMAS];
#pragma unroll
                    for (int m = 0; m < MMAS; ++m) b[m] = *reinterpret_cast<const uint4*>(xs + (block * 2 + unit) * X_UNIT + m * 512 + lane * 16);
                    const u32 words[4] = {q[unit].x, q[unit].y, q[unit].z, q[unit].w};
                    uint2 a[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const u32 pair = c[(unit * 64 + j / 2 * 32) / GROUP] >> 16 * (j & 1);
                        a[j] = ptxlab::dequant_lqq_unsigned(words[j], pair & 0xff, __byte_perm(pair, 0, 0x1111));
                    }
#pragma unroll
                    for (int m = 0; m < MMAS; ++m) {
                        ptxlab::mma_u8(acc[m], a[0].x, a[1].x, a[0].y, a[1].y, b[m].x, b[m].y);
                        ptxlab::mma_u8(acc[m], a[2].x, a[3].x, a[2].y, a[3].y, b[m].z, b[m].w);
                    }
                }
            }
            ptxlab::mbarrier_arrive(&empty[slot.index]);
        }
        ptxlab::mbarrier_wait(&cleared[buffer], parity ^ 1);
        int* tile = sums + buffer * TILE + strip * 16 + g;
        if (mine) {
#pragma unroll
            for (int m = 0; m < MMAS; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int token = m * 8 + lane % 4 * 2 + e % 2;
                    if (token < M) atomicAdd(tile + token * PITCH + e / 2 * 8, acc[m][e]);
                }
        }
        ptxlab::mbarrier_arrive(&summed[buffer]);
        if ((buffer ^= 1) == 0) parity ^= 1;
    }
}
