// out[32] = sums over rounds of x[rounds][32][4]: a warp waits for a copy, loads the row, and lets the next copy overwrite it.
// One warp.
__device__ unsigned shared(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

__device__ void bring(void* to, const void* from, void* arrived) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 512;" ::"r"(shared(arrived)) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 512, [%2];"
                 ::"r"(shared(to)), "l"(from), "r"(shared(arrived)) : "memory");
}

extern "C" __global__ void __launch_bounds__(32) combine(const int4* x, int* out, int rounds) {
    __shared__ alignas(128) int4 row[32];
    __shared__ alignas(8) unsigned long long arrived;
    const int t = threadIdx.x;
    if (t == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;\n fence.mbarrier_init.release.cluster;" ::"r"(shared(&arrived)) : "memory");
        bring(row, x, &arrived);
    }
    __syncwarp();
    int sum = 0;
    for (int round = 0; round < rounds; ++round) {
        asm volatile("{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra WAIT; }"
                     ::"r"(shared(&arrived)), "r"(round % 2) : "memory");
        const int4 v = row[t];
        sum += v.x + v.y + v.z + v.w;
#ifdef FIXED
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
        __syncwarp();
        if (t == 0 && round + 1 < rounds) bring(row, x + (round + 1) * 32, &arrived);
    }
    out[t] = sum;
}
