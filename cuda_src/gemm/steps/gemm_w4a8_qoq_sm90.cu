// gemm_w4a8_qoq_sm90: Y = X W^T on wgmma, QoQ weights, loads alone overlap with work.
//
// The baseline of the ablation (LiquidGEMM section 7.3, Fig. 13): wgmma with weights from registers, dequantised by
// multiply and __vadd4 (QServe section 5.2.3). Only loads overlap: a warp group waits for a stage, dequantises all of
// it, multiplies, waits for the MMAs, and only then takes the next stage (serial_sm90.cuh).
//
// Contract   accumulators[m, n] = sum_k x[m, k] * ((q4 - z) * s1)[n, k], exact in int32; y = accumulators * x_scale[m]
//            * w_scale[n] + bias[n], each operation rounded in f32, the result then rounded to the output type, or the
//            accumulators themselves (OUT == 3). Groups of 64 or 128. What lies outside the matrices is loaded as
//            zeros.
// Tile       block: WN warp groups of 64 rows each x BM tokens x BK channels; ring of STAGES; W in the dual-MMA layout.
// Guide      notebooks/guide/kernels_gemm.md: operands, layout, schedule, constants
// Measured   0.60, 0.51, 0.51 of the floor at M = 16, 64, 256 on an H200; 1.03 times as fast as cuBLAS FP8 (means).
// PTX ISA    9.7.15 wgmma m64nNk32 (.s8.s8); 9.7.9.25-27 bulk and tensor copies; 9.7.13.15 mbarrier.
#include "dequant.cuh"
#include "serial_sm90.cuh"
#include "timeline.cuh"

#ifndef BM
#define WN 2             // warp groups, 64 rows of W each
#define BM 64            // tokens of a tile
#define BK 128           // channels of a stage
#define STAGES 4         // slots of the ring
#define CLUSTER 1        // blocks that share a tile, each with a slice of K
#define GROUP 128        // channels of a level-2 scale
#define OUT 0            // y as 0 f16, 1 bf16, 2 f32; 3 the int32 accumulators
#define STORE_TOKENS 32  // tokens whose results are stored at a time
#define STORE_PITCH 68   // int32 from one of these tokens to the next in shared memory
#endif

extern "C" __global__ void __launch_bounds__(128 * WN) gemm_w4a8_qoq_sm90(
    const unsigned char* __restrict__ blocks,     // u8  [N/64, K/max(64, g), bytes], dual-MMA layout
    const float* __restrict__ w_scale,            // f32 [N]
    const __grid_constant__ ptxlab::TensorMap x,  // s8  [M, K], boxes [BM][128] swizzled
    const float* __restrict__ x_scale,            // f32 [M]
    const float* __restrict__ bias,               // f32 [N], or null
    void* __restrict__ y,                         // [M, N], by OUT
    int M, int N, int K) {
    ptxlab::SerialGemm<WN, BM, BK, STAGES, CLUSTER, GROUP>::run<ptxlab::dequant_qoq_vadd4, OUT, STORE_TOKENS,
                                                                STORE_PITCH>(blocks, x,
                                                                             {y, x_scale, w_scale, bias, M, N}, K);
}
