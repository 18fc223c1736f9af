// out[1024] f32 = state[1024] bf16: a copy brings the state, threads widen it in shared memory, a copy takes it away.
// One block of 128 threads.
__device__ unsigned shared(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

extern "C" __global__ void __launch_bounds__(128) store_state(const unsigned short* state, float* out) {
    __shared__ alignas(128) unsigned short narrow[1024];
    __shared__ alignas(128) float wide[1024];
    __shared__ alignas(8) unsigned long long arrived;
    const int t = threadIdx.x;
    if (t == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared(&arrived)) : "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 2048;" ::"r"(shared(&arrived)) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 2048, [%2];"
                     ::"r"(shared(narrow)), "l"(state), "r"(shared(&arrived)) : "memory");
    }
    __syncthreads();
    asm volatile("{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared.b64 done, [%0], 0; @!done bra WAIT; }"
                 ::"r"(shared(&arrived)) : "memory");

    for (int i = t; i < 1024; i += 128) wide[i] = __uint_as_float(narrow[i] << 16);
#ifdef FIXED
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    __syncthreads();
    if (t == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 4096;" ::"l"(out), "r"(shared(wide)) : "memory");
        asm volatile("cp.async.bulk.commit_group;\n cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
