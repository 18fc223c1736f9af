// gemm_w4a8_sm90
#include "dequant.cuh"
#include "epilogue_sm90.cuh"
#include "griddep.cuh"
#include "wgmma.cuh"

#ifndef BM
#define BM 64
#define WGS 2
#define HALVES 1
#define STRIPS 8
#define BK 128
#define STAGES 4
#define SPLIT 1
#define GROUP 128
#define OUT 0
#define ORDER 0
#endif
#ifndef EARLY
#define EARLY 1
#endif

namespace {

using ptxlab::u32;
using ptxlab::u64;
constexpr int GROUPS = 128 / GROUP;
constexpr int BLOCK = 1024 + GROUPS * 32;
constexpr int W_SLOT = (BK / 128 * BLOCK + 127) / 128 * 128;   // of a strip and a stage
constexpr int X_BYTES = BM * BK;
constexpr int STAGE_BYTES = (X_BYTES + STRIPS * W_SLOT + 1023) / 1024 * 1024;
constexpr int TILES = WGS * HALVES;                            // of 64 rows
static_assert(STRIPS <= TILES * 4, "a warp has HALVES strips");
using Epilogue = ptxlab::Epilogue<TILES, BM, SPLIT, WGS>;

// What a warp group needs to make numbers of its sums.
struct Scales {
    float x_scale[BM];
    int x_sum[BM];
    float w_scale[64 * HALVES], bias[64 * HALVES];
};

struct Staged {
    void* y;
    const Scales* scales;
    bool biased;
    int M, N, token0, n0, end;

    template <int KIND>
    __device__ __forceinline__ void put(int token, int n, const int* acc) const {
        if (token >= M || n >= end) return;
        const int extra = 128 * scales->x_sum[token - token0];
        int v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = acc[i] - extra;
        ptxlab::store_8<KIND>(y, size_t(token) * N + n, v, scales->x_scale[token - token0], scales->w_scale + n - n0,
                             biased ? scales->bias + n - n0 : nullptr);
    }
};

constexpr int THREADS = 128 * (WGS + 1);
constexpr int MORE = WGS <= 2 ? 232 : WGS == 3 ? 152 : 112, FEWER = WGS <= 2 ? 40 : WGS == 3 ? 40 : 24;

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gemm_w4a8_sm90(const unsigned char* __restrict__ strips, const float* __restrict__ w_scale,
               const __grid_constant__ ptxlab::TensorMap x, const float* __restrict__ x_scale, const int* __restrict__ x_sum,
               const float* __restrict__ bias, void* __restrict__ y, int M, int N, int K) {
    extern __shared__ __align__(1024) unsigned char ring[];
    __shared__ u64 full[STAGES], empty[STAGES], arrived;
    const int slice = SPLIT > 1 ? ptxlab::cluster_rank() : 0;
    const int w_blocks = (K + 127) / 128, all_strips = (N + 15) / 16;
    const int token_tiles = (M + BM - 1) / BM, row_tiles = (all_strips + STRIPS - 1) / STRIPS, tiles = token_tiles * row_tiles;
    const int all = (K + BK - 1) / BK, first = all * slice / SPLIT, stages = all * (slice + 1) / SPLIT - first;

    unsigned char* behind = ring + STAGES * STAGE_BYTES;
    const Epilogue epilogue{reinterpret_cast<int4*>(behind), reinterpret_cast<int*>(behind + Epilogue::RECEIVE_BYTES), &arrived, slice};
    Scales* all_scales = reinterpret_cast<Scales*>(behind + Epilogue::RECEIVE_BYTES + WGS * Epilogue::CHUNK * Epilogue::PITCH * 4);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            ptxlab::mbarrier_init(&full[s], 1);
            ptxlab::mbarrier_init(&empty[s], 128 * WGS);
        }
        epilogue.expect();
        ptxlab::fence_mbarrier_init();
    }
    __syncthreads();
    if (SPLIT > 1) ptxlab::cluster_arrive();

    ptxlab::Slot<STAGES> slot;
    const int least = all_strips / row_tiles, larger = all_strips % row_tiles;  // strips of a row tile; tiles that have one more
    const auto strip_of = [&](int row_tile) { return row_tile * least + min(row_tile, larger); };
    if (threadIdx.x < 128) {
        ptxlab::fewer_registers<FEWER>();
        if (threadIdx.x < 32) {
            const bool elected = ptxlab::elect();
            if (elected) ptxlab::launch_dependents();
            for (int tile = blockIdx.x / SPLIT; tile < tiles; tile += gridDim.x / SPLIT) {
                const int token_tile = tile % token_tiles, strip0 = strip_of(tile / token_tiles), height = strip_of(tile / token_tiles + 1) - strip0;
                const size_t pitch = size_t(w_blocks) * BLOCK;
                const unsigned char* from = strips + strip0 * pitch;
                const auto load_w = [&](int stage, int slot_index) {
                    const int bytes = min(BK / 128, w_blocks - stage * (BK / 128)) * BLOCK;
                    unsigned char* to = ring + slot_index * STAGE_BYTES + X_BYTES;
                    const unsigned char* w = from + stage * (BK / 128 * BLOCK);
                    if (elected) ptxlab::mbarrier_arrive_expect(&full[slot_index], X_BYTES + height * bytes);
#pragma unroll
                    for (int i = 0; i < STRIPS; ++i)
                        if (i < height && elected) ptxlab::bulk_load(to + i * W_SLOT, w + i * pitch, bytes, &full[slot_index]);
                };
                const auto load_x = [&](int stage, int slot_index) {
#pragma unroll
                    for (int i = 0; i < BK / 128; ++i) {
                        const int k_tile = stage * (BK / 128) + i;
                        const int column = ORDER == 0 ? k_tile * 128 : 0;
                        const int row = ORDER == 0 ? token_tile * BM : k_tile < w_blocks ? (token_tile * w_blocks + k_tile) * BM : -BM;
                        if (elected) ptxlab::tensor_load(ring + slot_index * STAGE_BYTES + i * BM * 128, &x, column, row, &full[slot_index]);
                    }
                };
                int stage = first;
                if (tile == blockIdx.x / SPLIT) {  // the first weights do not wait for the kernel before
                    const int early = min(EARLY, stages);
                    for (int s = 0; s < early; ++s) load_w(first + s, s);
                    ptxlab::wait_for_predecessors();
                    for (int s = 0; s < early; ++s, ++stage, slot.advance()) load_x(stage, s);
                }
                for (; stage < first + stages; ++stage, slot.advance()) {
                    ptxlab::mbarrier_wait(&empty[slot.index], slot.parity ^ 1);
                    load_w(stage, slot.index);
                    load_x(stage, slot.index);
                }
            }
        }
        __syncwarp();
        if (SPLIT > 1) ptxlab::cluster_wait();
    } else {
        ptxlab::more_registers<MORE>();
        const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
        Scales* scales = all_scales + group;
        for (int tile = blockIdx.x / SPLIT; tile < tiles; tile += gridDim.x / SPLIT) {
            const int token0 = tile % token_tiles * BM;
            const int strip0 = strip_of(tile / token_tiles), end = strip_of(tile / token_tiles + 1), height = end - strip0;
            const int n0 = (strip0 + group * HALVES * 4) * 16;
            float ws = 0, b = 0, xs[(BM + 127) / 128];
            int xsum[(BM + 127) / 128];
            if (thread < 64 * HALVES) {
                ws = w_scale[min(n0 + thread, N - 1)];
                if (bias) b = bias[min(n0 + thread, N - 1)];
            }
            ptxlab::wait_for_predecessors();
#pragma unroll
            for (int i = 0; i < (BM + 127) / 128; ++i) {
                const int token = min(token0 + i * 128 + thread, M - 1);
                xs[i] = x_scale[token], xsum[i] = x_sum[token];
            }
            int acc[HALVES][BM / 2] = {};
            u32 a[2][HALVES][2][4];
            int before = -1;                                   // the slot that wgmma may still read
            const unsigned char* at[HALVES];
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
                at[h] = ring + X_BYTES + max(0, min((group * HALVES + h) * 4 + warp, height - 1)) * W_SLOT + lane * 16;
            uint4 q[HALVES];
            u32 c[HALVES][GROUPS];
            // The lane's words of a unit of 64 k, and the constants with the first unit of a block.
            const auto load = [&](int slot_index, int unit) {
#pragma unroll
                for (int h = 0; h < HALVES; ++h) {
                    const unsigned char* w = at[h] + slot_index * STAGE_BYTES + unit / 2 * BLOCK;
                    q[h] = ptxlab::load_shared_16(w + unit % 2 * 512);
                    if (unit % 2 == 0)
#pragma unroll
                        for (int i = 0; i < GROUPS; ++i) c[h][i] = ptxlab::load_shared_4(w - lane * 16 + 1024 + i * 32 + lane / 4 * 4);
                }
            };
            if (stages > 0) {
                ptxlab::mbarrier_wait(&full[slot.index], slot.parity);
                load(slot.index, 0);
            }
            for (int stage = 0; stage < stages; ++stage) {
                const u64 x_tile = ptxlab::swizzled_128(ring + slot.index * STAGE_BYTES);
                const int current = slot.index;
#pragma unroll
                for (int unit = 0; unit < BK / 64; ++unit) {
                    ptxlab::wgmma_wait<1>();
                    if (unit == 1 && before >= 0) ptxlab::mbarrier_arrive(&empty[before]);
#pragma unroll
                    for (int h = 0; h < HALVES; ++h) {
                        const u32 words[4] = {q[h].x, q[h].y, q[h].z, q[h].w};
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            const u32 pair = c[h][(unit % 2 * 64 + j / 2 * 32) / GROUP] >> 16 * (j & 1);
                            const uint2 d = ptxlab::dequant_lqq_unsigned(words[j], pair & 0xff, __byte_perm(pair, 0, 0x1111));
                            a[unit & 1][h][j / 2][j & 1] = d.x;
                            a[unit & 1][h][j / 2][2 + (j & 1)] = d.y;
                        }
                    }
                    ptxlab::wgmma_fence();
                    const u64 x_unit = x_tile + unit / 2 * (BM * 128 / 16) + unit % 2 * 4;
#pragma unroll
                    for (int h = 0; h < HALVES; ++h) {
                        ptxlab::wgmma_u8(acc[h], a[unit & 1][h][0], x_unit);
                        ptxlab::wgmma_u8(acc[h], a[unit & 1][h][1], x_unit + 2);
                    }
                    ptxlab::wgmma_commit();
                    if (unit + 1 < BK / 64) load(current, unit + 1);
                }
                before = current;
                slot.advance();
                if (stage + 1 < stages) {
                    ptxlab::mbarrier_wait(&full[slot.index], slot.parity);
                    load(slot.index, 0);
                }
            }
            ptxlab::wgmma_wait<0>();
#pragma unroll
            for (int h = 0; h < HALVES; ++h) ptxlab::pin(acc[h]);
            if (before >= 0) ptxlab::mbarrier_arrive(&empty[before]);

            if (SPLIT > 1) ptxlab::cluster_wait();
#pragma unroll
            for (int h = 0; h < HALVES; ++h) epilogue.send(acc[h], group * HALVES + h, thread);
            ptxlab::warp_group_sync(group);
            if (thread < 64 * HALVES) scales->w_scale[thread] = ws, scales->bias[thread] = b;
#pragma unroll
            for (int i = 0; i < (BM + 127) / 128; ++i)
                if (i * 128 + thread < BM) scales->x_scale[i * 128 + thread] = xs[i], scales->x_sum[i * 128 + thread] = xsum[i];
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                epilogue.receive(acc[h], group * HALVES + h, thread);
                epilogue.store<OUT>(acc[h], group * HALVES + h, thread, Staged{y, scales, bias != nullptr, M, N, token0, n0, min(N, end * 16)},
                                    token0, n0 + h * 64);
            }
        }
    }
}
