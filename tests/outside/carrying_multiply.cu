// Eight int8 weights (q - zero) * scale from every word of eight 4-bit ones: low nibbles to out.x, high ones to out.y.
// 16 words share a scale, 1 to 8, and a zero point, 0 to 15. One thread per word.

// Four products at once.
__device__ unsigned mul4(unsigned a, unsigned scale) {
    unsigned d;
    asm("mul.lo.u32 %0, %1, %2;  // @lanes d:s8x4 a:s8x4 b:u32" : "=r"(d) : "r"(a), "r"(scale));
    return d;
}

extern "C" __global__ void dequantize(const unsigned* q, const unsigned char* scale, const unsigned char* zero, uint2* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned s = scale[i / 16], z = zero[i / 16] * 0x01010101;
    const unsigned low = q[i] & 0x0f0f0f0f, high = q[i] >> 4 & 0x0f0f0f0f;
#ifndef FIXED
    out[i] = {mul4(__vsub4(low, z), s), mul4(__vsub4(high, z), s)};
#else
    out[i] = {__vsub4(mul4(low, s), z * s), __vsub4(mul4(high, s), z * s)};
#endif
}
