// y[64, 8] = W X^T, W int4 [64, K] around 8, X int8 [8, K]: weights are unpacked into shared memory for the tensor cores.
// One block of 128 threads; K is a multiple of 32.
using u64 = unsigned long long;

// A matrix of 8-row, 16-byte core matrices in shared memory, K-major, no swizzle.
__device__ u64 descriptor(const void* tile, int leading, int stride) {
    return u64(__cvta_generic_to_shared(tile) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32;
}

__device__ void wgmma(int (&d)[4], u64 a, u64 b) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("{ .reg .pred add; setp.eq.u32 add, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%0, %1, %2, %3}, %4, %5, add; }"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(128) w4a8(const uint2* w, const uint4* x, int* y, int K) {
    __shared__ alignas(128) uint4 weights[2][64], tokens[2][8];        // [16 channels of K][row]
    const int t = threadIdx.x, row = t / 2, half = t % 2;
    int d[4] = {};

    for (int k = 0; k < K; k += 32) {
        const uint2 q = w[(row * K + k) / 16 + half];                  // nibble i of a word is channel i
        const unsigned even[2] = {q.x & 0x0f0f0f0f, q.y & 0x0f0f0f0f}, odd[2] = {q.x >> 4 & 0x0f0f0f0f, q.y >> 4 & 0x0f0f0f0f};
        uint4 bytes;
        bytes.x = __vsub4(__byte_perm(even[0], odd[0], 0x5140), 0x08080808);
        bytes.y = __vsub4(__byte_perm(even[0], odd[0], 0x7362), 0x08080808);
        bytes.z = __vsub4(__byte_perm(even[1], odd[1], 0x5140), 0x08080808);
        bytes.w = __vsub4(__byte_perm(even[1], odd[1], 0x7362), 0x08080808);
        weights[half][row] = bytes;
        if (t < 16) tokens[half][row] = x[(row * K + k) / 16 + half];
#ifdef FIXED
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
        __syncthreads();
        wgmma(d, descriptor(weights, 1024, 128), descriptor(tokens, 128, 128));
        __syncthreads();                                               // the tiles may be overwritten
    }

    const int n = t / 32 * 16 + t % 32 / 4, m = t % 4 * 2;
    y[n * 8 + m] = d[0], y[n * 8 + m + 1] = d[1], y[(n + 8) * 8 + m] = d[2], y[(n + 8) * 8 + m + 1] = d[3];
}
