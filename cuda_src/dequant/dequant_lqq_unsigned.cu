// dequant_lqq_unsigned: the CUDA C++ version of ptx/dequant/dequant_lqq_unsigned.ptx.
// LiquidQuant without the XOR: one IMAD dequantises four weights to weight + 128 as u8. The .ptx states contract, word
// order and tile.
#include "dequant.cuh"

extern "C" __global__ void __launch_bounds__(256) dequant_lqq_unsigned(
    const uint2* __restrict__ qweight,         // u32 [R, K/8]
    const unsigned char* __restrict__ scale,   // u8  [R, K/g]
    const unsigned char* __restrict__ offset,  // u8  [R, K/g]: 128 + min
    uint4* __restrict__ out,                   // u8  [R, K]
    unsigned int pairs,                        // R*K/16: one thread takes a pair of words, 16 weights
    unsigned int shift)                        // log2(g/16): pair -> group
{
    const unsigned int index = blockIdx.x * 256 + threadIdx.x;
    if (index >= pairs) return;
    const uint2 q = __ldcs(qweight + index);
    const unsigned int s = __ldg(scale + (index >> shift));
    const unsigned int a = __ldg(offset + (index >> shift)) * 0x01010101u;
    // @word dequant_lqq_unsigned(q, scale, offset) -> uint2
    const uint2 first_eight = ptxlab::dequant_lqq_unsigned(q.x, s, a);
    const uint2 second_eight = ptxlab::dequant_lqq_unsigned(q.y, s, a);
    __stcs(out + index, make_uint4(first_eight.x, first_eight.y, second_eight.x, second_eight.y));
}
