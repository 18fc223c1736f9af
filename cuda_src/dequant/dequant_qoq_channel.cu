// dequant_qoq_channel: the CUDA C++ version of ptx/dequant/dequant_qoq_channel.ptx.
// QoQ per channel (QServe section 5.2.2): unpack nibbles to u8 0..15; a GEMM subtracts the zero point in its epilogue.
// The .ptx states contract, word order and tile.
#include "dequant.cuh"

extern "C" __global__ void __launch_bounds__(256) dequant_qoq_channel(
    const uint2* __restrict__ qweight,  // u32 [R, K/8]
    uint4* __restrict__ out,            // u8  [R, K]
    unsigned int pairs)                 // R*K/16: one thread takes a pair of words, 16 weights
{
    const unsigned int index = blockIdx.x * 256 + threadIdx.x;
    if (index >= pairs) return;
    const uint2 q = __ldcs(qweight + index);
    const uint2 first_eight = ptxlab::dequant_qoq_channel(q.x);  // @word dequant_qoq_channel(q) -> uint2
    const uint2 second_eight = ptxlab::dequant_qoq_channel(q.y);
    __stcs(out + index, make_uint4(first_eight.x, first_eight.y, second_eight.x, second_eight.y));
}
