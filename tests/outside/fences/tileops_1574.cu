// out[2][1024] f32 = x[2][1024] * 2: each of two warp groups stages its tile, then one of its threads has it copied out.
// One block of 256 threads.
extern "C" __global__ void __launch_bounds__(256) epilogue(const float* x, float* out) {
    __shared__ alignas(128) float staged[2][1024];
    const int group = threadIdx.x / 128, t = threadIdx.x % 128;
    for (int i = t; i < 1024; i += 128) staged[group][i] = 2 * x[group * 1024 + i];
#ifdef FIXED
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
#endif
    if (t == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 4096;"
                     ::"l"(out + group * 1024), "r"(unsigned(__cvta_generic_to_shared(staged[group]))) : "memory");
        asm volatile("cp.async.bulk.commit_group;\n cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
