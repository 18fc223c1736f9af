// gemm_w4a8_chain_sm90: the products of a decoder layer from attention to attention, in one persistent launch.
//
// Between two products of a few tokens lies little work and much waiting: a launch, a row that every token needs whole,
// the first weights. Here the blocks stay, and the warp that asks for weights does not wait for anybody: those of the
// next product fill the ring while the results of this one are put together, so that the memory never rests.
//
// Contract   stream += attended O^T; gate_up = RMSNorm(stream; gamma) G^T; stream += (silu(gate) up) D^T; and with
//            PRODUCTS 4 qkv = RMSNorm(stream; gamma_next) Q^T + bias. Each product is that of `quantize_activations`,
//            `rmsnorm_quantize` or `silu_mul_quantize` and gemm_w4a8_small_sm90, bit for bit; weights LiquidQuant or QoQ
//            in strips, w + 128 as u8. IN: f16 or bf16 (0, 1). 1 <= M <= 8, as far as X fits shared memory.
// Shows      every block quantises all tokens for itself, straight into its shared memory; a barrier of the grid is a
//            counter that the last warp of a block adds to when its results are written.
// PDL        weights do not wait for the kernel before; all else does.
// Guide      notebooks/guide/kernels_gemm.md: chain, roles of the warps, barriers, constants
// PTX ISA    9.7.14.5.9 mma.m16n8k32 (.u8.s8); 9.7.9.25 bulk copies; 9.7.13.15 mbarrier; 8.7, 9.7.13.6 red.release
#include "dequant.cuh"
#include "griddep.cuh"
#include "mbarrier.cuh"
#include "named_barrier.cuh"
#include "output.cuh"
#include "parts.cuh"
#include "quantize_row.cuh"
#include "timeline.cuh"

#ifndef IN
#define IN 0
#define PRODUCTS 4  // 3: without the last
#define STAGES 10
#define GROUP 128
#endif

namespace {

using ptxlab::u32;
using ptxlab::u64;
constexpr int ROWS = 2, SLICES = 8;  // strips of a stage; blocks of 128 channels
constexpr int WARPS = ROWS * SLICES, THREADS = 32 * (WARPS + 2), MULTIPLYING = 32 * WARPS;
constexpr int BLOCK = ptxlab::STRIP_BLOCK<GROUP>, W_BYTES = SLICES * BLOCK;
constexpr int PITCH = ROWS * 16 + 4, TILE = 8 * PITCH;  // of sums: lane 4 g + t at bank 8 t + g
constexpr int PARTS = 2 * ROWS;                         // of 8 rows, per token
constexpr int PIECE = 512, HELD = 2;     // channels of a row that a warp looks at; pieces it keeps between two looks
constexpr int ALL = 0, MULTIPLIERS = 1;  // named barriers
enum { O, GATE_UP, DOWN, QKV };

struct Product {
    const unsigned char* strips;  // u8 [N/16, K/128, BLOCK]
    const float *w_scale, *bias;  // f32 [N]; bias or null
    void* y;                      // [M, N], added to where `adds`
    int N, K;
    bool adds;
};

// A lane's 16 channels of a piece, before they are normalised, and the sum of the squares of what they were.
struct Values {
    ptxlab::Floats x;
    float square;
};

// Operand B of 64 channels: token g of lane 4 g + t; one behind the last is the last again, and nobody looks.
__device__ __forceinline__ uint4 fragment(const unsigned char* x, int M, int block, int unit, int lane) {
    const int m = min(lane / 4, M - 1), t = lane % 4;
    const unsigned char* row = x + (block * M + m) * 128 + t * 4;
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = *reinterpret_cast<const u32*>(row + ((unit * 4 + i) ^ m) * 16);
    return make_uint4(word[0], word[1], word[2], word[3]);
}

}  // namespace

// Nothing that another kernel or block writes is __restrict__: a read-only load may be moved ahead of a wait.
extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_w4a8_chain_sm90(
    const uint4* attended,                                                               // [M, A], by IN
    uint4* stream,                                                                       // [M, H], by IN
    const uint4* gamma,                                                                  // [H], by IN
    const uint4* gamma_next,                                                             // [H], by IN; of PRODUCTS 4
    const unsigned char* __restrict__ o, const float* __restrict__ o_scale,              // [H, A]
    const unsigned char* __restrict__ gate_up, const float* __restrict__ gate_up_scale,  // [2 F, H]
    const unsigned char* __restrict__ down, const float* __restrict__ down_scale,        // [H, F]
    const unsigned char* __restrict__ qkv, const float* __restrict__ qkv_scale,          // [Q, H]
    const float* __restrict__ qkv_bias,                                                  // f32 [Q], or null
    uint4* between,  // [M, 2 F], by IN: gate, then up
    uint4* y,        // [M, Q], by IN
    u32* arrived,    // u32 [4]: blocks that have written a product; 0 before and after
    int M, int H, int A, int F, int Q, float eps) {
    extern __shared__ __align__(128) unsigned char x_tile[];  // [widest K / 128][M][128], swizzled
    __shared__ u64 full[STAGES], empty[STAGES], summed[2], cleared[2];
    __shared__ float x_scale[8];
    __shared__ int x_sum[8];
    const int blocks = gridDim.x, first = blockIdx.x, widest = max(max(A, H), F);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    TIMELINE_THREAD(lane == 0 && (warp == 0 || warp >= WARPS));
    unsigned char* ring = x_tile + widest * M;
    int* sums = reinterpret_cast<int*>(ring + STAGES * ROWS * W_BYTES);  // [2][8][PITCH]
    // of the pieces of all rows: largest magnitude, sum of squares, sum of integers
    u32* said = reinterpret_cast<u32*>(sums + 2 * TILE);  // [3][M][pieces of the widest]

    const auto product = [&](int p) -> Product {
        if (p == O) return {o, o_scale, nullptr, stream, H, A, true};
        if (p == GATE_UP) return {gate_up, gate_up_scale, nullptr, between, 2 * F, H, false};
        if (p == DOWN) return {down, down_scale, nullptr, stream, H, F, true};
        return {qkv, qkv_scale, qkv_bias, y, Q, H, false};
    };
    ptxlab::Slot<STAGES> slot;
    if (warp == WARPS) {  // asks for the weights of all products, one after the other
        const bool elected = ptxlab::elect();
        if (elected) {
            for (int s = 0; s < STAGES; ++s) {
                ptxlab::mbarrier_init(&full[s], 1);
                ptxlab::mbarrier_init(&empty[s], MULTIPLYING);
            }
            for (int b = 0; b < 2; ++b) {
                ptxlab::mbarrier_init(&summed[b], MULTIPLYING);
                ptxlab::mbarrier_init(&cleared[b], 32);
            }
            ptxlab::fence_mbarrier_init();
        }
        __syncwarp();
        ptxlab::arrive_threads(ALL, THREADS);
        for (int p = 0; p < PRODUCTS; ++p) {
            const Product w = product(p);
            const int w_blocks = w.K / 128, all = w.N / 16;
            for (int strip0 = first; strip0 < all; strip0 += ROWS * blocks)
                for (int block = 0; block < w_blocks; block += SLICES, slot.advance()) {
                    const u32 bytes = min(SLICES, w_blocks - block) * BLOCK;
                    u32 expected = 0;
#pragma unroll
                    for (int i = 0; i < ROWS; ++i) expected += strip0 + i * blocks < all ? bytes : 0;
                    PHASE(WAIT_GROUP);
                    ptxlab::mbarrier_wait(&empty[slot.index], slot.parity ^ 1);  // the first round finds them empty
                    PHASE(LOAD);
                    if (elected) ptxlab::mbarrier_arrive_expect(&full[slot.index], expected);
#pragma unroll
                    for (int i = 0; i < ROWS; ++i)
                        if (strip0 + i * blocks < all && elected)
                            ptxlab::bulk_load(ring + (slot.index * ROWS + i) * W_BYTES,
                                              w.strips + (size_t(strip0 + i * blocks) * w_blocks + block) * BLOCK,
                                              bytes, &full[slot.index]);
                }
        }
        if (elected) ptxlab::launch_dependents();  // its loads would come between these
        return;
    }
    for (int i = threadIdx.x; i < 2 * TILE; i += MULTIPLYING) sums[i] = 0;
    ptxlab::sync_threads(ALL, THREADS);
    ptxlab::wait_for_predecessors();
    int buffer = 0, parity = 0;  // of the tiles of sums
    if (warp == WARPS + 1) {     // sums -> results
        const int part = lane % PARTS, token = lane / PARTS;
        for (int p = 0; p < PRODUCTS; ++p) {
            const Product w = product(p);
            const int all = w.N / 16;
            for (int strip0 = first; strip0 < all; strip0 += ROWS * blocks) {
                const int strip = strip0 + part / 2 * blocks, n = strip * 16 + part % 2 * 8;
                const bool mine = strip < all && token < M;
                float ws[8] = {}, b[8] = {};
                if (mine) {
#pragma unroll
                    for (int i = 0; i < 8; ++i) ws[i] = w.w_scale[n + i], b[i] = w.bias ? w.bias[n + i] : 0;
                }
                PHASE(WAIT_GROUP);
                ptxlab::mbarrier_wait(&summed[buffer], parity);
                PHASE(EPILOGUE);
                if (mine) {
                    int4* at = reinterpret_cast<int4*>(sums + buffer * TILE + token * PITCH + part * 8);
                    const int4 low = at[0], high = at[1];
                    at[0] = at[1] = make_int4(0, 0, 0, 0);
                    const int less = 128 * x_sum[token];
                    const int v[8] = {low.x - less,  low.y - less,  low.z - less,  low.w - less,
                                      high.x - less, high.y - less, high.z - less, high.w - less};
                    const size_t to = size_t(token) * w.N + n;
                    if (w.adds) ptxlab::store_8<IN, ptxlab::ADD>(w.y, to, v, x_scale[token], ws, nullptr);
                    else if (w.bias) ptxlab::store_8<IN>(w.y, to, v, x_scale[token], ws, b);
                    else ptxlab::store_8<IN>(w.y, to, v, x_scale[token], ws, nullptr);
                }
                ptxlab::mbarrier_arrive(&cleared[buffer]);
                if ((buffer ^= 1) == 0) parity ^= 1;
            }
            if (p + 1 < PRODUCTS) {
                __syncwarp();
                if (lane == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived + p) : "memory");
            } else if (ptxlab::last_of(reinterpret_cast<int*>(arrived + p), blocks) && lane < PRODUCTS) {
                arrived[lane] = 0;  // as they were
            }
        }
        return;
    }
    const int strip = warp / SLICES, slice = warp % SLICES, g = lane / 4;
    for (int p = 0; p < PRODUCTS; ++p) {
        const Product w = product(p);
        const int w_blocks = w.K / 128, all = w.N / 16, pieces = (w.K + PIECE - 1) / PIECE;
        const bool norms = p == GATE_UP || p == QKV;
        if (first >= all) continue;  // nor does its last warp wait: what it read, others might write
        PHASE(WAIT_GROUP);
        if (p > 0 && warp == 0) {  // until all blocks have written the product before
            u32 seen = 0;
            for (int looks = 0; seen < blocks && looks < PATIENCE; ++looks)
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrived + p - 1) : "memory");
        }
        ptxlab::sync_threads(MULTIPLIERS, MULTIPLYING);

        // To INT8, as the kernels do that each have a launch of their own: pieces of all rows, dealt to the warps.
        u32 *magnitudes = said, *squares = said + M * pieces, *integers = said + 2 * M * pieces;
        const auto look = [&](int at) -> Values {
            const int m = at / pieces, chunk = at % pieces * 32 + lane;
            const bool inside = chunk < w.K / 16;
            const uint4* row = p == O      ? attended + size_t(m) * (A / 8)
                               : p == DOWN ? between + size_t(m) * (F / 4)
                                           : stream + size_t(m) * (H / 8);
            const ptxlab::Chunk<IN> v = ptxlab::load_chunk<IN>(row, chunk, inside);
            ptxlab::Chunk<IN> other = {};
            if (p == DOWN) other = ptxlab::load_chunk<IN>(row, F / 16 + chunk, inside);
            else if (norms) other = ptxlab::load_chunk<IN>(p == GATE_UP ? gamma : gamma_next, chunk, inside);
            Values found = {};
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                found.square = fmaf(v[j], v[j], found.square);
                found.x.v[j] = p == O      ? v[j]
                               : p == DOWN ? ptxlab::activated<0>(v[j]) * other[j]
                                           : __fmul_rn(v[j], other[j]);
            }
            return found;
        };
        const auto say = [&](const Values& found, int at) {
            const u32 most = ptxlab::warp_max(ptxlab::magnitude(found.x));
            const float square = ptxlab::warp_sum(found.square);
            if (lane == 0) magnitudes[at] = most, squares[at] = __float_as_uint(square);
        };
        const auto finish = [&](Values& found, int at) {
            const int m = at / pieces, piece = at % pieces, chunk = piece * 32 + lane;
            u32 most = 0;
            for (int i = lane; i < pieces; i += 32) most = max(most, magnitudes[m * pieces + i]);
            float extent = __uint_as_float(ptxlab::warp_max(most));
            if (norms) {
                const float square = lane < pieces ? __uint_as_float(squares[m * pieces + lane]) : 0;
                const float mean = __fmul_rn(ptxlab::warp_sum(square), ptxlab::reciprocal(float(H)));
                const float factor = ptxlab::reciprocal(__fsqrt_rn(__fadd_rn(mean, eps)));
                extent *= factor;
#pragma unroll
                for (int j = 0; j < 16; ++j) found.x.v[j] *= factor;
            }
            const float s = ptxlab::scale_of(extent);
            const uint4 q = ptxlab::quantized(found.x, s);
            if (chunk < w.K / 16) reinterpret_cast<uint4*>(x_tile)[(chunk / 8 * M + m) * 8 + (chunk % 8 ^ m)] = q;
            const int sum = ptxlab::warp_sum(ptxlab::sum_of_bytes(q, 0));
            if (lane == 0) integers[at] = sum;
            if (lane == 0 && piece == 0) x_scale[m] = s;
        };
        PHASE(SETUP);
        Values held[HELD];
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int at = i * WARPS + warp;
            held[i] = {};
            if (at < M * pieces) held[i] = look(at), say(held[i], at);
        }
        for (int at = HELD * WARPS + warp; at < M * pieces; at += WARPS) say(look(at), at);
        ptxlab::sync_threads(MULTIPLIERS, MULTIPLYING);
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (i * WARPS + warp < M * pieces) finish(held[i], i * WARPS + warp);
        for (int at = HELD * WARPS + warp; at < M * pieces; at += WARPS) {
            Values again = look(at);
            finish(again, at);
        }
        ptxlab::sync_threads(MULTIPLIERS, MULTIPLYING);
        if (warp < M) {  // the last warp sees it behind the sums
            int sum = 0;
            for (int i = lane; i < pieces; i += 32) sum += int(integers[warp * pieces + i]);
            sum = ptxlab::warp_sum(sum);
            if (lane == 0) x_sum[warp] = sum;
        }

        for (int strip0 = first; strip0 < all; strip0 += ROWS * blocks) {
            const bool mine = strip0 + strip * blocks < all;
            int acc[4] = {};
            for (int block0 = 0; block0 < w_blocks; block0 += SLICES, slot.advance()) {
                const int block = block0 + slice;
                PHASE(WAIT_COPY);
                ptxlab::mbarrier_wait(&full[slot.index], slot.parity);
                if (mine && block < w_blocks) {
                    const unsigned char* of = ring + (slot.index * ROWS + strip) * W_BYTES + slice * BLOCK;
                    const uint4 q[2] = {*reinterpret_cast<const uint4*>(of + lane * 16),
                                        *reinterpret_cast<const uint4*>(of + 512 + lane * 16)};
                    ptxlab::StripConstants<GROUP> c;
#pragma unroll
                    for (int i = 0; i < ptxlab::STRIP_GROUPS<GROUP>; ++i)
                        c[i] = *reinterpret_cast<const u32*>(of + 1024 + i * 32 + g * 4);
#pragma unroll
                    for (int unit = 0; unit < 2; ++unit) {
                        PHASE(DEQUANTISE);
                        u32 a[2][4];
                        ptxlab::dequant_strip<false, GROUP>(q[unit], c, unit, a);
                        PHASE(MULTIPLY);
                        const uint4 b = fragment(x_tile, M, block, unit, lane);
                        ptxlab::mma_u8(acc, a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
                        ptxlab::mma_u8(acc, a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
                    }
                }
                ptxlab::mbarrier_arrive(&empty[slot.index]);
            }
            PHASE(REDUCE);
            ptxlab::mbarrier_wait(&cleared[buffer], parity ^ 1);  // the first two tiles are clear
            if (mine) {
                int* tile = sums + buffer * TILE + strip * 16 + g;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int token = lane % 4 * 2 + e % 2;
                    if (token < M) atomicAdd(tile + token * PITCH + e / 2 * 8, acc[e]);
                }
            }
            ptxlab::mbarrier_arrive(&summed[buffer]);
            if ((buffer ^= 1) == 0) parity ^= 1;
        }
    }
}
