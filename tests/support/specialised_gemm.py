"""A warp-specialised GEMM as Hopper wants it, for the tests: TMA, ring of mbarriers, wgmma, split K over a cluster.

Y[N, M] = W[N, K] X[M, K]ᵀ in int32. A cluster of two blocks treats 128 channels x 16 tokens, each block half of K; the
second sends its sums to the first, which adds its own and stores. Blocks are persistent. Warp group 0 produces: one
thread brings 16 x 128 bytes of X (a box, 128-byte swizzle) and 128 x 128 of W (in fragment order) per stage. Warp
groups 1 and 2 consume: 64 channels each, W from registers.
"""

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.hardware.fragments import mma_a
from ptxlab.lowbit.layout import TensorMap

BN, BM, BK, STAGES = 128, 16, 128, 2
THREADS = 384
ACC = BM // 2  # accumulators of a thread
D = ", ".join(f"%{i}" for i in range(ACC))
A = ", ".join(f"%{i}" for i in range(ACC, ACC + 4))

SOURCE = rf"""
struct alignas(64) TensorMap {{ unsigned char bytes[128]; }};
using u32 = unsigned; using u64 = unsigned long long;
constexpr int BN = {BN}, BM = {BM}, BK = {BK}, STAGES = {STAGES}, ACC = {ACC};

__device__ u32 at(const void* p) {{ return (u32)__cvta_generic_to_shared(p); }}
__device__ u32 of_block(u32 address, u32 rank) {{
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}}
__device__ void init(u32 bar, u32 count) {{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory");
}}
__device__ void wait(u32 bar, u32 parity) {{
    asm volatile("{{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;"
                 "@!done bra AGAIN; }}" :: "r"(bar), "r"(parity) : "memory");
}}
__device__ void arrive(u32 bar) {{
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
}}
__device__ void arrive_there(u32 bar) {{
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(bar) : "memory");
}}
__device__ void meet_cluster() {{
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}}
__device__ void multiply(int (&d)[ACC], uint4 a, u64 b, int adds) {{
    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{ACC + 5}, 0;"
                 "wgmma.mma_async.sync.aligned.m64n{BM}k32.s32.s8.s8 {{{D}}}, {{{A}}}, %{ACC + 4}, p; }}"
                 : {", ".join(f'"+r"(d[{i}])' for i in range(ACC))}
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(adds));
}}
// Keeps the compiler from moving writes and reads of accumulators over wgmma.fence and wait_group.
__device__ void keep(int (&d)[ACC]) {{ for (int i = 0; i < ACC; i++) asm volatile("" : "+r"(d[i]) :: "memory"); }}
__device__ u64 descriptor(u32 address) {{ return (address & 0x3FFFF) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62; }}

struct Shared {{
    alignas(1024) signed char x[STAGES][BM * BK];
    alignas(1024) uint4 w[STAGES][BN * BK / 16];
    alignas(128) int sums[ACC][256];  // of the other block
    alignas(128) int out[ACC][256];
    u64 full[STAGES], empty[STAGES], sent, taken;
}};

extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(2, 1, 1)
gemm(const __grid_constant__ TensorMap x, const uint4* __restrict__ w, int* __restrict__ y, int steps, int columns,
     int tiles) {{
    extern __shared__ __align__(1024) unsigned char raw[];
    Shared& s = *reinterpret_cast<Shared*>(raw);
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) {{
        for (int i = 0; i < STAGES; i++) {{ init(at(&s.full[i]), 1); init(at(&s.empty[i]), 256); }}
        init(at(&s.sent), 256);
        init(at(&s.taken), 256);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }}
    meet_cluster();
    const int group = threadIdx.x / 128, first = blockIdx.x / 2, stride = gridDim.x / 2;
    if (group == 0) {{
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {{
            int stage = 0, phase = 0;
            for (int tile = first; tile < tiles; tile += stride) {{
                const int row = tile % columns * BM, channel = tile / columns;
                for (int k = rank; k < steps; k += 2) {{
                    const u32 full = at(&s.full[stage]);
                    wait(at(&s.empty[stage]), phase ^ 1);
                    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                                 :: "r"(full), "r"(BM * BK + BN * BK) : "memory");
                    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                                 " [%0], [%1, {{%2, %3}}], [%4];"
                                 :: "r"(at(s.x[stage])), "l"(&x), "r"(k * BK), "r"(row), "r"(full) : "memory");
                    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                                 " [%0], [%1], %2, [%3];"
                                 :: "r"(at(s.w[stage])), "l"(w + ((long)channel * steps + k) * (BN * BK / 16)),
                                    "r"(BN * BK), "r"(full) : "memory");
                    if (++stage == STAGES) {{ stage = 0; phase ^= 1; }}
                }}
            }}
        }}
    }} else {{
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int thread = threadIdx.x - 128;
        int stage = 0, phase = 0, round = 0;
        for (int tile = first; tile < tiles; tile += stride, round ^= 1) {{
            int d[ACC];
            for (int i = 0; i < ACC; i++) d[i] = 0;
            for (int k = rank; k < steps; k += 2) {{
                wait(at(&s.full[stage]), phase);
                uint4 a[BK / 32];
                for (int j = 0; j < BK / 32; j++) a[j] = s.w[stage][(thread / 32 * (BK / 32) + j) * 32 + thread % 32];
                keep(d);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                for (int j = 0; j < BK / 32; j++) multiply(d, a[j], descriptor(at(s.x[stage]) + 32 * j), 1);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
                keep(d);
                arrive(at(&s.empty[stage]));
                if (++stage == STAGES) {{ stage = 0; phase ^= 1; }}
            }}
            if (rank == 1) {{
                wait(at(&s.taken), round ^ 1);
                for (int i = 0; i < ACC; i++)
                    asm volatile("st.shared::cluster.u32 [%0], %1;"
                                 :: "r"(of_block(at(&s.sums[i][thread]), 0)), "r"(d[i]) : "memory");
                arrive_there(of_block(at(&s.sent), 0));
            }} else {{
                wait(at(&s.sent), round);
                for (int i = 0; i < ACC; i++) s.out[i][thread] = d[i] + s.sums[i][thread];
                arrive_there(of_block(at(&s.taken), 1));
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                asm volatile("bar.sync 1, 256;" ::: "memory");
                if (thread == 0) {{
                    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                                 :: "l"(y + (long)tile * (BN * BM)), "r"(at(s.out)), "r"(BN * BM * 4) : "memory");
                    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
                    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                }}
                asm volatile("bar.sync 1, 256; // the tile has left" ::: "memory");
            }}
        }}
    }}
    __syncwarp();
    meet_cluster();
}}
"""
SHARED_BYTES = STAGES * (BM + BN) * BK + 2 * 4 * BN * BM + 8 * (2 * STAGES + 2)
ENTRY = "gemm"


def fragments(weight: np.ndarray) -> np.ndarray:
    """Reorder W int8 [N, K] to words in the order in which the threads load them.

    They are [N / BN, K / BK, warp, K / 32 of BK, lane, 4].
    """
    n, k = weight.shape
    tiles = weight.reshape(n // BN, BN // 16, 16, k // BK, BK // 32, 32).transpose(0, 3, 1, 4, 2, 5)
    return np.ascontiguousarray(mma_a(32).scatter(np.ascontiguousarray(tiles)))


def problem(seed: int, tokens: int, channels: int, depth: int) -> tuple[list, np.ndarray, int]:
    """Make the arguments, the right result [tiles of channels, tiles of tokens, BN, BM], and the number of tiles."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-128, 128, (tokens, depth)).astype(np.int8)
    w = rng.integers(-128, 128, (channels, depth)).astype(np.int8)
    columns, rows = ceil_div(tokens, BM), channels // BN
    padded = np.zeros((columns * BM, depth), np.int64)
    padded[:tokens] = x
    right = (w.astype(np.int64) @ padded.T).astype(np.int32)
    right = right.reshape(rows, BN, columns, BM).transpose(0, 2, 1, 3)
    y = np.zeros((rows * columns, ACC, 256), np.uint32)
    numbers = (np.int32(depth // BK), np.int32(columns), np.int32(rows * columns))
    return [TensorMap(x, (BM, BK), 128), fragments(w).reshape(-1), y, *numbers], right, rows * columns
