// y[64, 8] = W X^T, W int4 [64, K] around 8, X int8 [8, K]: weights go from memory to registers to the tensor cores.
// One block of 128 threads; K is a multiple of 32 up to 1024. w holds, per step of 32 channels and thread, the 16 weights of
// its wgmma fragment: low nibbles of w.x, high ones of w.x, the same of w.y are registers 0 to 3.
using u64 = unsigned long long;

// A matrix of 8-row, 16-byte core matrices in shared memory, K-major, no swizzle.
__device__ u64 descriptor(const void* tile, int leading, int stride) {
    return u64(__cvta_generic_to_shared(tile) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32;
}

__device__ void wgmma(int (&d)[4], const unsigned (&a)[4], u64 b) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("{ .reg .pred add; setp.eq.u32 add, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, add; }"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

extern "C" __global__ void __launch_bounds__(128) w4a8(const uint2* w, const uint4* x, int* y, int K) {
    __shared__ alignas(128) uint4 tokens[64][8];                       // [16 channels of K][token]
    const int t = threadIdx.x;
    for (int i = t; i < K / 2; i += 128) tokens[i / 8][i % 8] = x[i % 8 * (K / 16) + i / 8];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    int d[4] = {};
    unsigned a[4];
#pragma unroll 1
    for (int step = 0; step < K / 32; ++step) {
        const uint2 q = w[step * 128 + t];
        a[0] = __vsub4(q.x & 0x0f0f0f0f, 0x08080808);
        a[1] = __vsub4(q.x >> 4 & 0x0f0f0f0f, 0x08080808);
        a[2] = __vsub4(q.y & 0x0f0f0f0f, 0x08080808);
        a[3] = __vsub4(q.y >> 4 & 0x0f0f0f0f, 0x08080808);
        wgmma(d, a, descriptor(tokens[2 * step], 128, 128));
#ifdef FIXED
        wgmma_wait<0>();
#endif
    }
    wgmma_wait<0>();

    const int n = t / 32 * 16 + t % 32 / 4, m = t % 4 * 2;
    y[n * 8 + m] = d[0], y[n * 8 + m + 1] = d[1], y[(n + 8) * 8 + m] = d[2], y[(n + 8) * 8 + m + 1] = d[3];
}
