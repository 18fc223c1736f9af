// out[4][512] f32 = x[4][512] + 1: an epilogue that stages one tile after the other in the same buffer.
// One block of 128 threads.
extern "C" __global__ void __launch_bounds__(128) epilogue(const float* x, float* out) {
    __shared__ alignas(128) float staged[512];
    const int t = threadIdx.x;
    for (int tile = 0; tile < 4; ++tile) {
        for (int i = t; i < 512; i += 128) staged[i] = x[tile * 512 + i] + 1;
#ifdef FIXED
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
        __syncthreads();
        if (t == 0) {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 2048;"
                         ::"l"(out + tile * 512), "r"(unsigned(__cvta_generic_to_shared(staged))) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#ifdef FIXED
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
        }
        __syncthreads();
    }
    if (t == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
