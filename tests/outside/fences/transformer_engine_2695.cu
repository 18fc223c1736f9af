// out = the largest of |x[rounds][512]|: two stages of copies, each loaded by all threads and then filled again.
// One block of 128 threads.
__device__ unsigned shared(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

__device__ void bring(void* to, const void* from, void* arrived) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 2048;" ::"r"(shared(arrived)) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 2048, [%2];"
                 ::"r"(shared(to)), "l"(from), "r"(shared(arrived)) : "memory");
}

extern "C" __global__ void __launch_bounds__(128) amax(const int* x, int* out, int rounds) {
    __shared__ alignas(128) int stage[2][512];
    __shared__ alignas(8) unsigned long long arrived[2];
    const int t = threadIdx.x;
    if (t == 0) {
        for (auto& each : arrived) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared(&each)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (int i = 0; i < 2; ++i) bring(stage[i], x + i * 512, &arrived[i]);
    }
    __syncthreads();
    int most = 0;
    for (int round = 0; round < rounds; ++round) {
        const int at = round % 2;
        asm volatile("{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra WAIT; }"
                     ::"r"(shared(&arrived[at])), "r"(round / 2 % 2) : "memory");
        for (int i = t; i < 512; i += 128) most = max(most, abs(stage[at][i]));
#ifdef FIXED
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
        __syncthreads();
        if (t == 0 && round + 2 < rounds) bring(stage[at], x + (round + 2) * 512, &arrived[at]);
    }
    atomicMax(out, most);
}
