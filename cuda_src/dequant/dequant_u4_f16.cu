// dequant_u4_f16: the CUDA C++ version of ptx/dequant/dequant_u4_f16.ptx, which states contract, word order and tile.
// UINT4 to FP16 (QServe section 5.3): OR the nibble into the mantissa of FP16 1024, then subtract the bias.
#include "dequant.cuh"

extern "C" __global__ void __launch_bounds__(256) dequant_u4_f16(
    const unsigned int* __restrict__ qweight,  // u32 [R, K/8]
    uint4* __restrict__ out,                   // f16 [R, K]
    unsigned int words)                        // R*K/8: one thread takes a word, 8 weights
{
    const unsigned int index = blockIdx.x * 256 + threadIdx.x;
    if (index >= words) return;
    const uint4 halves = ptxlab::dequant_u4_f16(__ldcs(qweight + index));  // @word dequant_u4_f16(q) -> uint4
    __stcs(out + index, ptxlab::logical_order(halves));
}
