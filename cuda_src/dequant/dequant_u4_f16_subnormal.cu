// dequant_u4_f16_subnormal: the CUDA C++ version of ptx/dequant/dequant_u4_f16_subnormal.ptx.
// UINT4 to FP16 by an AND alone: the nibble v becomes the FP16 subnormal v * 2^-24. The .ptx states contract, word
// order and tile.
#include "dequant.cuh"

extern "C" __global__ void __launch_bounds__(256) dequant_u4_f16_subnormal(
    const unsigned int* __restrict__ qweight,  // u32 [R, K/8]
    uint4* __restrict__ out,                   // f16 [R, K]
    unsigned int words)                        // R*K/8: one thread takes a word, 8 weights
{
    const unsigned int index = blockIdx.x * 256 + threadIdx.x;
    if (index >= words) return;
    // @word dequant_u4_f16_subnormal(q) -> uint4
    const uint4 halves = ptxlab::dequant_u4_f16_subnormal(__ldcs(qweight + index));
    __stcs(out + index, ptxlab::logical_order(halves));
}
