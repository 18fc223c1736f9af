// d[64, 8] f32 = (A B^T) C^T of small integers, A f16 [64, 16], B f16 [16, 16], C f16 [8, 16]: threads write the first
// product back to shared memory, where it is an operand of the second. One block of 128 threads.
// (The original chains tcgen05, Blackwell's; wgmma reads shared memory through the same proxy.)
#include <cuda_fp16.h>
using u64 = unsigned long long;

__device__ u64 descriptor(const void* tile, int leading, int stride) {
    return u64(__cvta_generic_to_shared(tile) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32;
}

__device__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

extern "C" __global__ void __launch_bounds__(128) chain(const uint4* a, const uint4* b, const uint4* c, float* d) {
    __shared__ alignas(128) uint4 left[2][64], right[2][16], last[2][8];  // [8 channels of K][row]
    const int t = threadIdx.x, m = t / 32 * 16 + t % 32 / 4, n = t % 4 * 2;
    left[t % 2][t / 2] = a[t];
    if (t < 32) right[t % 2][t / 2] = b[t];
    if (t < 16) last[t % 2][t / 2] = c[t];
    proxy_fence();
    __syncthreads();

    float x[8];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("{ .reg .pred add; setp.ne.b32 add, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, add, 1, 1, 0, 0; }"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]), "=f"(x[4]), "=f"(x[5]), "=f"(x[6]), "=f"(x[7])
                 : "l"(descriptor(left, 1024, 128)), "l"(descriptor(right, 256, 128)));
    asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
    __syncthreads();

    half* const product = reinterpret_cast<half*>(left);  // [2][64][8]
    for (int i = 0; i < 8; ++i) product[(i / 4 * 64 + m + i / 2 % 2 * 8) * 8 + n + i % 2] = __float2half(x[i]);
#ifdef FIXED
    proxy_fence();
#endif
    __syncthreads();

    float y[4];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("{ .reg .pred add; setp.ne.b32 add, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, add, 1, 1, 0, 0; }"
                 : "=f"(y[0]), "=f"(y[1]), "=f"(y[2]), "=f"(y[3])
                 : "l"(descriptor(left, 1024, 128)), "l"(descriptor(last, 128, 128)));
    asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; ++i) d[(m + i / 2 * 8) * 8 + n + i % 2] = y[i];
}
