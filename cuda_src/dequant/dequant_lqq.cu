// dequant_lqq: the CUDA C++ version of ptx/dequant/dequant_lqq.ptx, which states contract, word order and tile.
// LiquidQuant to s8 (LiquidGEMM section 4): one IMAD and one XOR dequantise four weights.
#include "dequant.cuh"

extern "C" __global__ void __launch_bounds__(256) dequant_lqq(
    const uint2* __restrict__ qweight,         // u32 [R, K/8]
    const unsigned char* __restrict__ scale,   // u8  [R, K/g]
    const unsigned char* __restrict__ offset,  // u8  [R, K/g]: 128 + min
    uint4* __restrict__ out,                   // s8  [R, K]
    unsigned int pairs,                        // R*K/16: one thread takes a pair of words, 16 weights
    unsigned int shift)                        // log2(g/16): pair -> group
{
    const unsigned int index = blockIdx.x * 256 + threadIdx.x;
    if (index >= pairs) return;
    const uint2 q = __ldcs(qweight + index);
    const unsigned int s = __ldg(scale + (index >> shift));
    const unsigned int a = __ldg(offset + (index >> shift)) * 0x01010101u;
    const uint2 first_eight = ptxlab::dequant_lqq(q.x, s, a);  // @word dequant_lqq(q, scale, offset) -> uint2
    const uint2 second_eight = ptxlab::dequant_lqq(q.y, s, a);
    __stcs(out + index, make_uint4(first_eight.x, first_eight.y, second_eight.x, second_eight.y));
}
