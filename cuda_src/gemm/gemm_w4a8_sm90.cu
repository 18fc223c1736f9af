// gemm_w4a8_sm90: Y = X W^T on Hopper's tensor cores, weights in strips, from a few tokens to thousands.
//
// The implicit pipeline (LiquidGEMM section 5.1: warp groups dequantise into registers under each other's wgmma) with
// unsigned weights, tiles whose height is a number of strips, and warp groups along K as well as along the rows.
//
// Contract   accumulators[m, n] = sum_k x[m, k] * (q4 * s1 + o1 - 128)[n, k], exact in int32; y = accumulators *
//            x_scale[m] * w_scale[n] + bias[n], each operation in f32 and then rounded to the output, or the
//            accumulators (OUT == 3). Any M >= 1, N a multiple of 8, K of the group. LiquidQuant: o1 = 128 + min; QoQ:
//            o1 = 128 - zero * s1. wgmma takes w + 128 as u8, and 128 times the token sum leaves at the end; SIGNED: w
//            as s8, no token sums. GROUP 0: weights per channel, (q4 - w_zero[n])[n, k], with token sums.
// PDL        the first weights do not wait for the kernel before; activations, scales and results do.
// Guide      notebooks/guide/kernels_gemm.md: strips, tile, ring, schedule, constants
// Measured   0.92, 0.92, 0.83, 0.78, 0.71, 0.61, 0.72, 0.79, 0.81, 0.70 of the floor on an H200 at M = 1, 4, 16, 32,
//            64, 128, 256, 512, 2048, 8192; 1.97, 1.92, 1.71, 1.56, 1.51, 1.22, 1.12, 1.16, 1.19, 1.04 times as fast as
//            cuBLAS FP8 (means of 1, 1, 6, 8, 8, 8, 8, 8, 8, 8 of LLaMA-2's matrices, on which it is launched; row-
//            major activations).
// PTX ISA    9.7.15 wgmma m64nNk32 (.u8.s8); 9.7.9.25-27 bulk and tensor copies; 9.7.13.15 mbarrier; 9.7.13.16 elect;
//            9.7.19.5 setmaxnreg; 9.7.14.5.16 stmatrix
#include "epilogue_sm90.cuh"
#include "fragments_out.cuh"
#include "griddep.cuh"
#include "named_barrier.cuh"
#include "strips_sm90.cuh"
#include "tile_order.cuh"
#include "timeline.cuh"

#ifndef BM
#define BM 64     // tokens of a tile
#define WN 2      // warp groups along the rows of W
#define WK 1      // warp groups along K
#define MN 1      // MMAs of 64 rows of each
#define STRIPS 8  // most strips of a tile
#define BK 128
#define STAGES 4
#define SPLIT 1    // blocks of a cluster, along K
#define GROUP 128  // weights of a level-2 scale; 0: constants per channel alone
#define OUT 0
#define ORDER 0   // of X: 0 row-major, 1 swizzled tiles of BM tokens
#define SIGNED 0  // 1: no token sums, so the MMA is given the weights as they are
#endif
#ifndef FUSED
#define FUSED 0  // 1: SiLU of the gate times up; 2: added to Y (output.cuh)
#endif

namespace {

using ptxlab::u32;
using ptxlab::u64;
static_assert(GROUP != 0 || !SIGNED, "a zero point leaves with the token sum");
using Stage = ptxlab::StripStage<BM, BK, STRIPS, GROUP>;
constexpr int BLOCK = Stage::BLOCK, W_SLOT = Stage::W_SLOT, X_BYTES = Stage::X_BYTES, STAGE_BYTES = Stage::BYTES;
constexpr int WGS = WN * WK, TILES = WN * MN;
static_assert(STRIPS <= TILES * 4, "a warp has MN strips");
static_assert(STAGES >= 2 * WK, "a slot is given back while the next stage is worked on");
using Sums = ptxlab::Epilogue<TILES, BM, SPLIT>;

constexpr int THREADS = 128 * (WGS + 1);
constexpr int MORE = WGS == 1 ? 240 : WGS == 2 ? 232 : WGS == 3 ? 152 : 112, FEWER = WGS == 1 ? 56 : WGS <= 3 ? 40 : 24;

// What a warp group needs to make numbers of its sums.
struct Scales {
    float x_scale[BM];
    int x_sum[BM];
};

}  // namespace

// What the kernel before may be writing is not __restrict__: ptxas moves a read-only load ahead of griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_w4a8_sm90(
    const unsigned char* __restrict__ strips,  // u8  [N/16, K/128, 1024 + 32 * 128 / g]
    const float* __restrict__ w_scale,         // f32 [N]
    const unsigned char* __restrict__ w_zero,  // u8  [N]; null unless GROUP == 0
    // s8  [M, K], boxes [tokens of a tile][128] swizzled; or tiles
    const __grid_constant__ ptxlab::TensorMap x,
    const float* x_scale,            // f32 [M]; null if OUT == 3
    const int* x_sum,                // s32 [M]; null if SIGNED
    const float* __restrict__ bias,  // f32 [N], or null
    void* __restrict__ y,            // [M, N], by OUT; [M, N / 2] if FUSED == 1
    int M, int N, int K) {
    extern __shared__ __align__(1024) unsigned char ring[];
    __shared__ u64 full[STAGES], empty[STAGES], arrived;
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    if (threadIdx.x == 128) {  // not a warp that asks for copies: it has divisions to do
        for (int s = 0; s < STAGES; ++s) {
            ptxlab::mbarrier_init(&full[s], 4);
            ptxlab::mbarrier_init(&empty[s], 128 * WN);
        }
        if (SPLIT > 1) Sums{nullptr, nullptr, &arrived, int(ptxlab::cluster_rank())}.expect();
        ptxlab::fence_mbarrier_init();
    }
    const int slice = SPLIT > 1 ? ptxlab::cluster_rank() : 0;
    const int w_blocks = (K + 127) / 128, all_strips = (N + 15) / 16;
    const int token_tiles = (M + BM - 1) / BM, row_tiles = (all_strips + STRIPS - 1) / STRIPS,
              tiles = token_tiles * row_tiles;
    // of a tile; one spares a division, which the first copy would wait for
    const int tokens = ORDER == 1 ? BM : ((token_tiles == 1 ? M : (M + token_tiles - 1) / token_tiles) + 7) / 8 * 8;
    const int all = (K + BK - 1) / BK, first = all * slice / SPLIT, stages = all * (slice + 1) / SPLIT - first;
    // strips of a row tile; tiles that have one more
    const int least = all_strips / row_tiles, larger = all_strips % row_tiles;
    const auto strip_of = [&](int row_tile) { return row_tile * least + min(row_tile, larger); };

    unsigned char* behind = ring + STAGES * STAGE_BYTES;
    const Sums sums{reinterpret_cast<int4*>(behind), nullptr, &arrived, slice};
    unsigned char* buffers = behind + Sums::RECEIVE_BYTES;  // 512 bytes of each warp
    Scales* all_scales = reinterpret_cast<Scales*>(buffers + WN * 4 * 512);

    if (tokens < BM) {                          // what wgmma reads behind the copies' rows
        const int missing = (BM - tokens) * 8;  // 16 bytes each, of 128 channels
        for (int tile = threadIdx.x / 32; tile < STAGES * (BK / 128); tile += THREADS / 32) {
            unsigned char* x_tile = ring + tile / (BK / 128) * STAGE_BYTES + tile % (BK / 128) * (BM * 128);
            for (int i = threadIdx.x % 32; i < missing; i += 32)
                *reinterpret_cast<int4*>(x_tile + tokens * 128 + i * 16) = make_int4(0, 0, 0, 0);
        }
        ptxlab::fence_proxy_async();
    }
    __syncthreads();
    if (SPLIT > 1) ptxlab::cluster_arrive();

    ptxlab::Slot<STAGES> slot;
    if (threadIdx.x < 128) {  // the warp group that loads: one thread of each warp asks, the copy engine does
        const bool elected = ptxlab::elect();
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        const u32 pitch = w_blocks * BLOCK, ring_at = ptxlab::shared_address(ring),
                  full_at = ptxlab::shared_address(full);
        int tile = blockIdx.x / SPLIT, height = 0, token_tile = 0;
        const unsigned char* from = nullptr;  // this warp's weights of the next stage
        const auto begin = [&] {
            const ptxlab::TilePlace place = ptxlab::tile_place(tile, token_tiles, row_tiles);
            const int strip0 = strip_of(place.row_tile) + warp;
            height = strip_of(place.row_tile + 1) - strip0;
            from = strips + size_t(strip0) * pitch + first * (BK / 128 * BLOCK);
            token_tile = place.token_tile;
        };
        const auto load_w = [&](int stage, int slot_index) {  // every fourth strip
            // blocks; behind the end of K any will do, as X is zero
            const int there = min(BK / 128, w_blocks - stage * (BK / 128));
            const u32 barrier = full_at + slot_index * 8,
                      bytes = (warp == 3 ? tokens * BK : 0) + max(0, height + 3) / 4 * (BK / 128 * BLOCK);
            const u32 to = ring_at + slot_index * STAGE_BYTES + X_BYTES + warp * W_SLOT;
            if (elected) {
                ptxlab::mbarrier_arrive_expect(&full[slot_index], bytes);
#pragma unroll
                for (int i = 0; i < (STRIPS + 3) / 4; ++i)
                    if (4 * i < height)
                        ptxlab::bulk_load(to + 4 * i * W_SLOT, from + size_t(4 * i * pitch), there * BLOCK, barrier);
            }
#pragma unroll 1
            for (int b = there; b < BK / 128; ++b)
                for (int i = 0; i < height; i += 4)
                    if (elected)
                        ptxlab::bulk_load(to + i * W_SLOT + b * BLOCK, from + size_t(i * pitch), BLOCK, barrier);
            from += BK / 128 * BLOCK;
        };
        const auto load_x = [&](int stage, int slot_index) {  // by the last warp, which has the fewest strips
            const u32 to = ring_at + slot_index * STAGE_BYTES, barrier = full_at + slot_index * 8;
#pragma unroll
            for (int i = 0; i < BK / 128; ++i) {
                const int k_tile = stage * (BK / 128) + i;
                const int column = ORDER == 0 ? k_tile * 128 : 0;
                const int row = ORDER == 0          ? token_tile * tokens
                                : k_tile < w_blocks ? (token_tile * w_blocks + k_tile) * BM
                                                    : -BM;
                if (elected && warp == 3) ptxlab::tensor_load(to + i * BM * 128, &x, column, row, barrier);
            }
        };
        ptxlab::fewer_registers<FEWER>();
        bool begun = stages > 0;
        PHASE(LOAD);
        if (begun) begin(), load_w(first, 0);  // weights do not wait for the kernel before
        if (elected) ptxlab::launch_dependents();
        ptxlab::wait_for_predecessors();
        for (; tile < tiles; tile += gridDim.x / SPLIT) {
            if (!begun) begin();
            for (int stage = first; stage < first + stages; ++stage, slot.advance()) {
                if (!begun) {
                    PHASE(WAIT_GROUP);
                    ptxlab::mbarrier_wait(&empty[slot.index], slot.parity ^ 1);
                    PHASE(LOAD);
                    load_w(stage, slot.index);
                }
                load_x(stage, slot.index);
                begun = false;
            }
        }
        PHASE(WAIT_GROUP);
        __syncwarp();
        if (SPLIT > 1) ptxlab::cluster_wait();
        return;
    }
    ptxlab::more_registers<MORE>();
    const int group = threadIdx.x / 128 - 1, wn = group % WN, wk = group / WN;
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    Scales* scales = all_scales + wn;
    if (WK > 1)
        for (int i = 0; i < wk; ++i) slot.advance();
    for (int tile = blockIdx.x / SPLIT; tile < tiles; tile += gridDim.x / SPLIT) {
        const ptxlab::TilePlace place = ptxlab::tile_place(tile, token_tiles, row_tiles);
        const int token0 = place.token_tile * tokens, strip0 = strip_of(place.row_tile),
                  end = strip_of(place.row_tile + 1), height = end - strip0;
        PHASE(SETUP);
        int acc[MN][BM / 2] = {};
        u32 a[2][MN][2][4];
        u32 at[MN];
        float ws[MN][2], b[MN][2];
        int zero[MN][2];
#pragma unroll
        for (int h = 0; h < MN; ++h) {
            const int strip = (wn * MN + h) * 4 + warp, n = (strip0 + strip) * 16 + lane / 4;
            at[h] = ptxlab::shared_address(ring) + X_BYTES + max(0, min(strip, height - 1)) * W_SLOT;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                ws[h][r] = w_scale[min(n + 8 * r, N - 1)];
                zero[h][r] = GROUP == 0 ? w_zero[min(n + 8 * r, N - 1)] : 128;
                b[h][r] = bias ? bias[min(n + 8 * r, N - 1)] : -0.0f;
            }
        }
        float xs[(BM + 127) / 128];
        int xsum[(BM + 127) / 128];
        ptxlab::wait_for_predecessors();
#pragma unroll
        for (int i = 0; i < (BM + 127) / 128; ++i) {
            const int token = min(token0 + i * 128 + thread, M - 1);
            xs[i] = OUT == 3 ? 1 : x_scale[token], xsum[i] = SIGNED ? 0 : x_sum[token];
        }
        uint4 q[2][MN];
        Stage::Constants c[MN], c_next[MN];
        ptxlab::multiply_strips<Stage, WK, SIGNED, true>(acc, a, at, q, c, c_next, ring, full, empty, slot, wk, stages,
                                                         w_blocks, lane TIMELINE_ARGUMENT);

        PHASE(REDUCE);
        if (WK > 1) {  // one tile per block: the ring is free
            int4* partial = reinterpret_cast<int4*>(ring) + thread;
            ptxlab::sync_threads(8, 128 * WGS);
            if (wk > 0) {
#pragma unroll
                for (int h = 0; h < MN; ++h)
#pragma unroll
                    for (int j = 0; j < BM / 8; ++j)
                        partial[(((wk - 1) * TILES + wn * MN + h) * (BM / 8) + j) * 128] =
                            make_int4(acc[h][4 * j], acc[h][4 * j + 1], acc[h][4 * j + 2], acc[h][4 * j + 3]);
            }
            ptxlab::sync_threads(8, 128 * WGS);
            if (wk > 0) {
                if (SPLIT > 1) ptxlab::cluster_wait();
                return;
            }
#pragma unroll
            for (int h = 0; h < MN; ++h)
#pragma unroll
                for (int j = 0; j < BM / 8; ++j)
#pragma unroll
                    for (int k = 0; k < WK - 1; ++k) {
                        const int4 more = partial[((k * TILES + wn * MN + h) * (BM / 8) + j) * 128];
                        acc[h][4 * j] += more.x, acc[h][4 * j + 1] += more.y, acc[h][4 * j + 2] += more.z,
                            acc[h][4 * j + 3] += more.w;
                    }
        }
        if (SPLIT > 1) ptxlab::cluster_wait();
#pragma unroll
        for (int h = 0; h < MN; ++h) sums.send(acc[h], wn * MN + h, thread);
        ptxlab::sync_warp_group(wn);  // the scales of the tile before have been used
#pragma unroll
        for (int i = 0; i < (BM + 127) / 128; ++i)
            if (i * 128 + thread < BM)
                scales->x_scale[i * 128 + thread] = xs[i], scales->x_sum[i * 128 + thread] = xsum[i];
        ptxlab::sync_warp_group(wn);
#pragma unroll
        for (int h = 0; h < MN; ++h) {
            const int tile_row = wn * MN + h;
            PHASE(REDUCE);
            sums.receive(acc[h], tile_row, thread);
            PHASE(EPILOGUE);
            const ptxlab::Scaling scaling{scales->x_scale,
                                          SIGNED ? nullptr : scales->x_sum,
                                          {zero[h][0], zero[h][1]},
                                          {ws[h][0], ws[h][1]},
                                          {b[h][0], b[h][1]}};
            ptxlab::store_fragments<OUT, BM, FUSED>(acc[h], scaling, y, buffers + (wn * 4 + warp) * 512, lane, token0,
                                                    (strip0 + tile_row * 4 + warp) * 16, min(M, token0 + tokens), N,
                                                    min(N, end * 16),
                                                    [&](int piece) { return Sums::owner(tile_row, piece) == slice; });
        }
    }
}
