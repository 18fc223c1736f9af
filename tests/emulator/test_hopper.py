"""A warp-specialised Hopper kernel as NVRTC compiles it: bulk copies, mbarriers, wgmma; and what each step is for."""

import re

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.hardware.fragments import wgmma_d
from tests.support.axes import both_modes
from tests.support.small_kernels import cuda_to_ptx, findings_or_error, run_text
from tests.support.wgmma import cores

STEPS, N = 7, 16
COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
D = ", ".join(f"%{i}" for i in range(N // 2))
OUTPUTS = ", ".join(f'"+r"(d[{i}])' for i in range(N // 2))
SOURCE = f"""
__device__ unsigned at(const void* p) {{ return (unsigned)__cvta_generic_to_shared(p); }}
__device__ void wait(unsigned bar, int parity) {{
    asm volatile("{{ .reg .pred P1; LAB_WAIT: mbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1;"
                 "@P1 bra DONE; bra LAB_WAIT; DONE: }}" :: "r"(bar), "r"(parity) : "memory");
}}
__device__ unsigned long long descriptor(unsigned at) {{ return at >> 4 | 128ull >> 4 << 16 | 256ull >> 4 << 32; }}

// D[64, N] = A[64, 32 steps] B[N, 32 steps]^T, as core matrices step by step; warps 0-3 multiply, thread 128 copies.
extern "C" __global__ void gemm(const char* a, const char* b, int* out, int steps) {{
    __shared__ __align__(1024) char tile[2][2048 + 32 * {N}];
    __shared__ __align__(8) unsigned long long full[2], empty[2];
    if (threadIdx.x == 0) {{
        for (int s = 0; s < 2; s++) {{
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at(&full[s])));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 128;" :: "r"(at(&empty[s])));
        }}
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }}
    __syncthreads();
    if (threadIdx.x >= 128) {{
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x > 128) return;
        for (int k = 0; k < steps; k++) {{
            int s = k % 2, bytes = 2048 + 32 * {N};
            wait(at(&empty[s]), k / 2 % 2 ^ 1);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(&full[s])), "r"(bytes));
            asm volatile("{COPY}" :: "r"(at(tile[s])), "l"(a + 2048 * k), "r"(2048), "r"(at(&full[s])) : "memory");
            asm volatile("{COPY}" :: "r"(at(tile[s] + 2048)), "l"(b + 32 * {N} * k), "r"(32 * {N}), "r"(at(&full[s])));
        }}
        return;
    }}
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    int d[{N // 2}] = {{}};
    #pragma unroll 1
    for (int k = 0; k < steps; k++) {{
        int s = k % 2;
        wait(at(&full[s]), k / 2 % 2);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{N // 2 + 2}, 0;"
                     "wgmma.mma_async.sync.aligned.m64n{N}k32.s32.s8.s8 {{{D}}}, %{N // 2}, %{N // 2 + 1}, p; }}"
                     : {OUTPUTS} : "l"(descriptor(at(tile[s]))), "l"(descriptor(at(tile[s] + 2048))), "r"(k));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(&empty[s])) : "memory");
    }}
    for (int i = 0; i < {N // 2}; i++) out[threadIdx.x * {N // 2} + i] = d[i];
}}
"""
RNG = np.random.default_rng(0)
A, B = (RNG.integers(-128, 128, (STEPS, rows, 32)).astype(np.int8) for rows in (64, N))
TRUTH = sum(a.astype(np.int64) @ b.T.astype(np.int64) for a, b in zip(A, B, strict=True))


def outcome(source: str, mode: str, seed: int = 0) -> tuple[bool, list[str]]:
    """Run the kernel; return whether the product is right, and the findings."""
    out = np.zeros((128, N // 2), np.uint32)
    images = [np.concatenate([cores(step) for step in matrix]) for matrix in (A, B)]
    run = run_text(
        cuda_to_ptx(source, "compute_90a"),
        *images,
        out,
        np.int32(STEPS),
        threads=160,
        checks=emulator.CHECKS,
        mode=mode,
        seed=seed,
        max_steps=100_000,
    )
    return np.array_equal(wgmma_d(N).gather(out, np.int32), TRUTH), [str(finding) for finding in run.findings]


@pytest.mark.smoke
@both_modes
def test_the_kernel_has_the_right_result_and_no_findings(mode):
    for seed in range(3):
        assert outcome(SOURCE, mode, seed) == (True, [])


@pytest.mark.full_cases("early-_*", "late-wgmma.f*", "late-wgmma.c*", "late-wgmma.w*", "late-m*")
@pytest.mark.parametrize(
    ("step", "pattern"),
    [
        ("wgmma.fence.sync.aligned;", r"async: .*wgmma\.mma_async.*: no wgmma\.fence since the kernel began"),
        ("wgmma.commit_group.sync.aligned;", r"async: .*copies to .* still being read by line .*wgmma\.mma_async"),
        ("wgmma.wait_group.sync.aligned 0;", r"async: .*copies to .* still being read by line .*wgmma\.mma_async"),
        (
            "wait(at(&full[s]), k / 2 % 2);",
            r"async: .*wgmma\.mma_async.* still being written by line .*cp\.async\.bulk",
        ),
        ("wait(at(&empty[s]), k / 2 % 2 ^ 1);", r"cp\.async\.bulk.* still being (written|read)|expects 0 more in this"),
        ("__syncthreads();", r"race: .*mbarrier\..* races with line .*mbarrier\.init"),
        ("mbarrier.arrive.shared::cta.b64 _, [%0];", r"deadlock: (?s:.)*128 of 128 arrivals are missing"),
    ],
)
@both_modes
def test_no_step_can_be_left_out(step, pattern, mode):
    assert SOURCE.count(step) == 1
    findings = findings_or_error(lambda: outcome(SOURCE.replace(step, ""), mode)[1])
    assert re.search(pattern, findings)
