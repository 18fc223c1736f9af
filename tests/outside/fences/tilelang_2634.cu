// d[64, 8] f32 = A B^T, A f16 [64, 16], B f16 [8, 16]: threads lay the operands out in shared memory for wgmma.
// One block of 128 threads. (The original is the sparse wgmma; its operands take the same way.)
using u64 = unsigned long long;

// A matrix of 8-row, 16-byte core matrices in shared memory, K-major, no swizzle.
__device__ u64 descriptor(const void* tile, int leading, int stride) {
    return u64(__cvta_generic_to_shared(tile) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32;
}

extern "C" __global__ void __launch_bounds__(128) gemm(const uint4* a, const uint4* b, float* d) {
    __shared__ alignas(128) uint4 left[2][64], right[2][8];  // [8 channels of K][row]
    const int t = threadIdx.x;
    left[t % 2][t / 2] = a[t];
    if (t < 16) right[t % 2][t / 2] = b[t];
#ifdef FIXED
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    __syncthreads();

    float sum[4];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("{ .reg .pred add; setp.ne.b32 add, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, add, 1, 1, 0, 0; }"
                 : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
                 : "l"(descriptor(left, 1024, 128)), "l"(descriptor(right, 128, 128)));
    asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");

    const int m = t / 32 * 16 + t % 32 / 4, n = t % 4 * 2;
    d[m * 8 + n] = sum[0], d[m * 8 + n + 1] = sum[1], d[(m + 8) * 8 + n] = sum[2], d[(m + 8) * 8 + n + 1] = sum[3];
}
