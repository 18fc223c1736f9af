// Stores by all threads, a copy of them by the copy engine, and a proxy fence in different places: does the engine see
// every byte? Each round writes other values, so that a byte that comes too late differs. `order` says where the fence
// stands; `stale` [4] counts, for each order, words that were copied before they were written.
using u32 = unsigned;

constexpr int WORDS = 16;                                      // of 4 bytes that each thread writes, 1 KiB apart

enum Order { BY_WRITERS, BY_ISSUER, NOWHERE, BY_ISSUER_TOO_EARLY };

__device__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

extern "C" __global__ void __launch_bounds__(256) send(u32* out, u32* stale, int order, int rounds) {
    extern __shared__ __align__(128) u32 tile[];               // [WORDS][blockDim.x]
    const u32 t = threadIdx.x, words = WORDS * blockDim.x;
    u32* mine = out + blockIdx.x * words;
    u32 wrong = 0;

    for (int round = 0; round < rounds; round++) {
        const u32 value = (round * gridDim.x + blockIdx.x) * 256 + t;
        for (int i = 0; i < WORDS; i++) tile[i * blockDim.x + t] = value * WORDS + i;
        if (order == BY_WRITERS || (order == BY_ISSUER_TOO_EARLY && t == 0)) proxy_fence();
        __syncthreads();
        if (t == 0) {
            if (order == BY_ISSUER) proxy_fence();
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                         :: "l"(mine), "r"(u32(__cvta_generic_to_shared(tile))), "r"(words * 4) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        }
        __syncthreads();
        for (int i = 0; i < WORDS; i++) wrong += __ldcg(&mine[i * blockDim.x + t]) != value * WORDS + i;
        __syncthreads();
    }
    if (wrong) atomicAdd(&stale[order], wrong);
}
