// gemm_w4a4_atom_sm80: Atom's whole GEMM: INT4 in groups, outlier channels in INT8 (Atom section 4.2, Fig. 8).
//
// Contract   y = sum over the K / g groups, then the outliers, of sum_i[m, n] * (x_scale[m, i] * w_scale[n, i]) + bias,
//            one fma after the other in f32 from 0 on, then rounded to the output (OUT 0 f16, 1 bf16, 2 f32); the
//            integer sums are exact in int32. Any M >= 1, N a multiple of 8, K a multiple of g (64 or 128); 0, 64 or
//            128 outliers. What lies outside the matrices is loaded as zeros.
// Shows      fused group dequantisation: every g channels the integer sums leave the tensor cores, are converted and
//            scaled, and are added to an f32 total, which costs CUDA cores instructions beside the MMAs. HALVES: the
//            product of two scales is rounded to f16, as in Atom's code, where small ones become subnormal. Atom's
//            Fig. 8 adds in FP16; here it is f32, as QServe section 3.2 describes Atom: long sums lose less.
// Guide      notebooks/guide/kernels_gemm.md: operands, schedule, constants
// PTX ISA    9.7.14 mma.m16n8k64 (.s4), mma.m16n8k32 (.s8), ldmatrix; 9.7.9 cp.async with zero fill.
#include "rows_sm80.cuh"
#include "timeline.cuh"

#ifndef BN
#define BN 128     // rows of W in a tile
#define BM 128     // tokens
#define WM 2       // warps along the tokens
#define STAGES 4   // slots of the ring
#define GROUP 128  // channels of a scale: 64 or 128
#define HALVES 0   // 1: scales are multiplied in f16, as Atom's code does
#define OUT 0      // y as 0 f16, 1 bf16, 2 f32
#define SUM_PAD 4  // numbers between rows of results in shared memory
#endif

namespace {

using Tile = ptxlab::RowsTile<BN, BM, WM>;
// Bytes of W and X in a stage; and of their scales, too.
constexpr int OPERANDS = Tile::W_BYTES + Tile::X_BYTES, STAGE_BYTES = OPERANDS + Tile::SCALE_BYTES;
static_assert(GROUP == 64 || GROUP == 128, "a stage has one group or two");

}  // namespace

extern "C" __global__ void __launch_bounds__(BN* WM) gemm_w4a4_atom_sm80(
    const unsigned char* __restrict__ w4,  // u8  [N, K/2], two s4 a byte
    const unsigned char* __restrict__ w8,  // s8  [N, outliers]
    const __half* __restrict__ w_scale,    // f16 [N, K/g + 1 in whole eights], the last one of the outliers
    const unsigned char* __restrict__ x4,  // u8  [M, K/2], two s4 a byte
    const unsigned char* __restrict__ x8,  // s8  [M, outliers]
    const __half* __restrict__ x_scale,    // f16 [M, K/g + 1 in whole eights]
    const float* __restrict__ bias,        // f32 [N], or null
    void* __restrict__ y,                  // [M, N], by OUT
    int M, int N, int K, int outliers) {
    extern __shared__ __align__(128) unsigned char ring[];
    TIMELINE_THREAD(threadIdx.x % 128 == 0);
    const Tile tile(M, N);
    const int groups = K / GROUP, columns = (groups + 8) / 8 * 8;  // scales of a row
    const int stages4 = (K + 127) / 128, stages = stages4 + outliers / 64;
    const auto fetch = [&](int stage) {
        unsigned char* slot = ring + stage % STAGES * STAGE_BYTES;
        if (stage < stages) {
            const bool int4 = stage < stages4;
            const int first_byte = (int4 ? stage : stage - stages4) * ptxlab::ROW_BYTES,
                      bytes = int4 ? K / 2 : outliers;
            tile.fetch_w(slot, int4 ? w4 : w8, first_byte, bytes);
            tile.fetch_x(slot + Tile::W_BYTES, int4 ? x4 : x8, first_byte, bytes);
            const int pair = int4 ? stage * 128 / GROUP / 2 : groups / 2;
            tile.fetch_scales(slot + OPERANDS, w_scale, x_scale, pair, columns);
        }
        ptxlab::cp_async_commit();
    };

    Tile::Sums acc = {};
    Tile::Totals total = {};
    PHASE(LOAD);
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage);
    for (int stage = 0; stage < stages; ++stage) {
        PHASE(WAIT_COPY);
        ptxlab::cp_async_wait<STAGES - 2>();
        __syncthreads();  // the stage is there for everyone, and the oldest slot is free
        PHASE(LOAD);
        fetch(stage + STAGES - 1);
        PHASE(MULTIPLY);
        const unsigned char *slot = ring + stage % STAGES * STAGE_BYTES, *w = slot + tile.w_at(),
                            *x = slot + (Tile::W_BYTES + tile.x_at());
        const unsigned char* scales = slot + OPERANDS;
        // Scale the sums of the group with an even or odd index into the totals, and zero them.
        const auto add = [&](int odd) { tile.add_group<HALVES>(total, acc, scales, odd); };
        if (stage < stages4) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                tile.multiply_half<true>(acc, w, x, half);
                if (GROUP == 64) add(half);  // past the end of K sums are zero
            }
            if (GROUP == 128) add(stage & 1);
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) tile.multiply_half<false>(acc, w, x, half);
            if (stage == stages - 1) add(groups & 1);
        }
    }

    PHASE(EPILOGUE);
    ptxlab::cp_async_wait<0>();
    tile.store_totals<OUT, SUM_PAD>(ring, total, y, bias);
}
