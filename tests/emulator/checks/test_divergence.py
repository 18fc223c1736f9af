"""The check "divergence": `.aligned` instructions that not all threads of a warp execute together."""

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.errors import Deadlock
from tests.support.small_kernels import STORE, cuda_to_ptx, kernel_text, run_text

START = "mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 31; mov.u32 %r5, buf; ld.param.u64 %x1, [out]; mov.u32 %s, 1;\n"
HALF = "setp.lt.u32 %p, %r1, 16;\n"


def module(body: str) -> str:
    return kernel_text(START + body + STORE, outside=".shared .align 16 .b8 buf[128];")


def findings_of(body: str, threads: int = 64) -> list[tuple[str, int]]:
    """List kind and line of the findings; the first line of the body is 1."""
    text = module(body)
    first = text[: text.index(START)].count("\n") + 1
    launch = run_text(text, np.zeros(threads, np.uint32), threads=threads, checks=emulator.CHECKS)
    return [(finding.kind, finding.line - first) for finding in launch.findings]


MATRIX = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r5];"
APART = {
    "two instructions": (HALF + "@%p bra A;\nbar.sync 0;\nbra B;\nA: bar.sync 0;\nB: bar.sync 0;\n", 5),
    "past it": (HALF + "@!%p bra B;\nbar.sync 0;\nB: add.u32 %s, %s, 1;\n", 3),
    "a guard": (HALF + "@%p bar.sync 0;\n", 2),
    "barrier": (HALF + "@%p bra B;\nbarrier.sync.aligned 0;\nB: mov.u32 %s, 2;\n", 3),
    "arrive": (HALF + "@%p bra B;\nbar.arrive 1, 64;\nB: mov.u32 %s, 2;\n", 3),
    "cluster": (HALF + "@%p barrier.cluster.arrive.aligned;\n@!%p barrier.cluster.arrive.aligned;\n"
                "barrier.cluster.wait.aligned;\n", 3),
    "turns of a loop": ("mov.u32 %r2, 0;\nL: setp.ne.u32 %p, %r2, %r1;\n@%p bra N;\nbar.sync 0;\n"
                        "N: add.u32 %r2, %r2, 1;\nsetp.lt.u32 %p, %r2, 32;\n@%p bra L;\n", 4),
    "other numbers of turns": ("mov.u32 %r2, 0;\nL: bar.sync 0;\nadd.u32 %r2, %r2, 1;\n"
                               "setp.lt.u32 %p, %r2, %r1;\n@%p bra L;\n", 2),
}  # fmt: skip


@pytest.mark.parametrize(("body", "line"), APART.values(), ids=APART)
def test_a_warp_apart_is_reported_by_line(body: str, line: int) -> None:
    assert findings_of(body) == [("divergence", line)]


def test_a_finding_names_both_threads_and_lines() -> None:
    (finding,) = run_text(module(APART["two instructions"][0]), np.zeros(32, np.uint32), checks=["divergence"]).findings
    assert "but thread (16,0,0) executes line 11, `bar.sync 0`, instead" in finding.message
    assert finding.line == 13 and finding.thread == (0, 0, 0) and finding.count == 16


def test_a_deadlock_of_a_warp_tells_of_it() -> None:
    body = HALF + f"@%p bra A;\n{MATRIX}\nbra B;\nA: {MATRIX}\nB:"
    with pytest.raises(Deadlock, match=r"found before that: divergence: k.ptx:13: `A: ldmatrix"):
        run_text(module(body), np.zeros(32, np.uint32), checks=["divergence"])


TOGETHER = {
    "whole warps": "setp.lt.u32 %p, %r0, 32;\n@%p bra A;\nbar.sync 0;\nbra B;\nA: bar.sync 0;\nB:",
    "after the branches": HALF + "@%p bra A;\nadd.u32 %s, %s, 1;\nbra B;\nA: add.u32 %s, %s, 2;\nB: bar.sync 0;\n",
    "inner loop": "mov.u32 %r3, 0;\nO: mov.u32 %r2, 0;\nL: add.u32 %r2, %r2, 1;\nsetp.lt.u32 %p, %r2, %r1;\n"
    "@%p bra L;\nbar.sync 0;\nadd.u32 %r3, %r3, 1;\nsetp.lt.u32 %p, %r3, 4;\n@%p bra O;\n",
    "two ways back": HALF + "mov.u32 %r2, 0;\nbra H;\nT: add.u32 %s, %s, 1;\nH: bar.sync 0;\nadd.u32 %r2, %r2, 1;\n"
    "setp.ge.u32 %q, %r2, 3;\n@%q bra E;\n@%p bra H;\nbra T;\nE:",
    "ended": HALF + "@%p ret;\nbar.sync 0;\n",
    "ended in a loop": "mov.u32 %r2, 0;\nL: setp.ge.u32 %p, %r2, %r1;\n@%p bra E;\nbar.sync 0;\n"
    "add.u32 %r2, %r2, 1;\nbra L;\nE: ret;\n",
    "not aligned": HALF + "@%p bra A;\nbarrier.sync 0;\nbra B;\nA: barrier.sync 0;\nB:",
    "of the warp": HALF + "@%p bar.warp.sync 0xffff;\nbar.sync 0;\n",
    "waiting while others end": "setp.ge.u32 %q, %r0, 32;\n@%q bra OUT;\n" + HALF + f"@!%p bra DETOUR;\nA: {MATRIX}\n"
    f"{MATRIX}\nbra B;\nOUT: ret;\nDETOUR: nanosleep.u32 1;\nbra A;\nB: bar.sync 0;\n",
}  # fmt: skip


@pytest.mark.parametrize("body", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize("threads", [64, 50])
def test_a_warp_together_is_not(body: str, threads: int) -> None:
    assert [finding for finding in findings_of(body, threads) if finding[0] != "uninitialised"] == []


KERNELS = {  # CUDA, and a part of the line that is reported
    "early": ("if (i >= n) return; s[i] = x[i]; __syncthreads(); y[i] = s[n - 1 - i];", None),
    "early, after work": ("if (i >= n) { y[i] = 0; return; } s[i] = x[i]; __syncthreads(); y[i] = s[n - 1 - i];", None),
    "early in an arm": ("float v = x[i]; if (v > 0.5f) { v = sqrtf(v); if (i >= n) return; v += 1; } "
                        "else if (i >= n) return; s[i] = v; __syncthreads(); y[i] = s[n - 1 - i];", None),
    "break": ("float v = x[i]; for (int r = 0; r < n; r++) { if (v > 0.5f) { v *= 0.7f; if (n < 0) break; y[i] = v; } "
              "s[i] = v; __syncthreads(); v += s[63 - i]; __syncthreads(); } y[i] = v;", None),
    "switch": ("float v = x[i]; for (int r = 0; r < n; r++) { switch (i % 5) { case 0: v *= 2; break; case 1: v -= 1; "
               "case 2: v = sinf(v); break; case 3: y[i] = v; break; default: v *= 0.3f; } "
               "s[i] = v; __syncthreads(); v += s[63 - i]; __syncthreads(); } y[i] = v;", None),
    "one arm": ("if (i < 16) __syncthreads(); y[i] = x[i] + n;", "bar.sync"),
    "both arms": ("s[i] = x[i]; if (i % 32 < 16) { __syncthreads(); y[i] = s[63 - i]; } "
                  "else { __syncthreads(); y[i] = s[63 - i] * 2; }", "bar.sync"),
}  # fmt: skip


@pytest.mark.default_cases("both arms", "early, after work", "one arm", "early", "early in an arm")
@pytest.mark.parametrize(("body", "line"), KERNELS.values(), ids=KERNELS)
def test_divergence_in_code_of_nvrtc(body: str, line: str | None) -> None:
    head = (
        'extern "C" __global__ void k(float* y, const float* x, int n) { __shared__ float s[64]; int i = threadIdx.x;'
    )
    x = np.linspace(0, 1, 64, dtype=np.float32)
    launch = run_text(
        cuda_to_ptx(head + body + " }"), np.zeros(64, np.float32), x, np.int32(40), threads=64, checks=["divergence"]
    )
    assert [(f.kind, f.text.split()[0]) for f in launch.findings] == ([("divergence", line)] if line else [])
