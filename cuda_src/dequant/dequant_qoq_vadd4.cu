// dequant_qoq_vadd4: the CUDA C++ version of ptx/dequant/dequant_qoq_vadd4.ptx.
// QoQ in groups to s8 (QServe section 5.2.3): multiply four weights by the scale at once, then add the offset to each
// by __vadd4. The .ptx states contract, word order and tile.
#include "dequant.cuh"

extern "C" __global__ void __launch_bounds__(256) dequant_qoq_vadd4(
    const uint2* __restrict__ qweight,         // u32 [R, K/8]
    const unsigned char* __restrict__ scale,   // u8  [R, K/g]
    const unsigned char* __restrict__ offset,  // s8  [R, K/g]: -z * scale modulo 256
    uint4* __restrict__ out,                   // s8  [R, K]
    unsigned int pairs,                        // R*K/16: one thread takes a pair of words, 16 weights
    unsigned int shift)                        // log2(g/16): pair -> group
{
    const unsigned int index = blockIdx.x * 256 + threadIdx.x;
    if (index >= pairs) return;
    const uint2 q = __ldcs(qweight + index);
    const unsigned int s = __ldg(scale + (index >> shift));
    const unsigned int a = __ldg(offset + (index >> shift)) * 0x01010101u;
    // @word dequant_qoq_vadd4(q, scale, offset) -> uint2
    const uint2 first_eight = ptxlab::dequant_qoq_vadd4(q.x, s, a);
    const uint2 second_eight = ptxlab::dequant_qoq_vadd4(q.y, s, a);
    __stcs(out + index, make_uint4(first_eight.x, first_eight.y, second_eight.x, second_eight.y));
}
