"""Which fences and waits runs need: each is left out in turn."""

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.emulator import CHECKS, Ran, needs_of, statements_of
from ptxlab.errors import EmulationError
from tests.support.small_kernels import COPY_PROLOGUE, STORE, cuda_to_ptx, kernel_text, line_of, run_text

OUTSIDE = ".shared .align 128 .b8 buf[2048]; .shared .align 8 .b64 bar[4];"
PREPARE = "shl.b32 %r7, %r0, 3; add.u32 %r7, %r6, %r7; mov.u64 %x9, 5;\n"
# 64 threads write 512 bytes, thread 0 has them copied to global memory
SEND = """st.shared.u64 [%r7], %x9;
fence.proxy.async.shared::cta;
bar.sync 0;
@%q fence.proxy.async;
bar.warp.sync 0xffffffff;
@!%q bra SENT;
cp.async.bulk.global.shared::cta.bulk_group [%x3], [%r6], 512;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
SENT:
barrier.cluster.arrive; barrier.cluster.wait;
"""
RECEIVE = """@!%q bra READY;
mbarrier.init.shared.b64 [%r5], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 %y, [%r5], 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%x3], 256, [%r5];
READY:
bar.sync 0;
WAIT:
mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0;
@!%p bra WAIT;
ld.shared.u32 %s, [%r6];
bar.sync 1;
"""


def needs(body: str, seeds: int = 2) -> dict[str, tuple[str, bool]]:
    """Return (why, whether another one does its work) of each statement that was tried, by its source line."""
    text = kernel_text(COPY_PROLOGUE + PREPARE + body + STORE, ".param .u64 out, .param .u64 a", OUTSIDE)
    module = emulator.parse(text, "k.ptx")

    def attempt(mode, seed, without) -> Ran:
        out, a = np.zeros(64, np.uint32), np.arange(1, 1025, dtype=np.uint32)
        options = {"checks": CHECKS, "mode": mode, "seed": seed, "without": without}
        findings = emulator.run(module, "k", [out, a], grid=1, block=64, **options).findings
        return Ran(tuple(f"{f.kind} at {f.line}" for f in findings), out.tobytes() + a.tobytes())

    lines = text.split("\n")
    needs_found = needs_of(statements_of(module.entries["k"]), attempt, seeds)
    return {lines[need.statement.line - 1]: (need.why, need.stands_in) for need in needs_found}


def test_two_fences_of_which_one_will_do():
    needs_by_line = needs(SEND)
    unneeded_lines = {line for line, (why, _) in needs_by_line.items() if not why}
    assert unneeded_lines == {"fence.proxy.async.shared::cta;", "@%q fence.proxy.async;", "bar.warp.sync 0xffffffff;"}
    assert [line for line, (_, stands_in) in needs_by_line.items() if stands_in] == ["@%q fence.proxy.async;"]
    assert (
        needs_by_line["bar.sync 0;"][0].startswith("early: async-dirty at") or "race" in needs_by_line["bar.sync 0;"][0]
    )
    assert "async at" in needs_by_line["cp.async.bulk.wait_group.read 0;"][0]
    assert not any("cluster" in line for line in needs_by_line)


def test_what_is_needed():
    """The wait for an mbarrier, and the barrier behind its initialisation; neither fence nor the last barrier."""
    needs_by_line = needs(RECEIVE)
    unneeded_lines = [line for line, (why, _) in needs_by_line.items() if not why]
    assert unneeded_lines == ["fence.mbarrier_init.release.cluster;", "bar.sync 1;"]
    assert needs_by_line["mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0;"][0].startswith("early: async at")
    assert len(needs_by_line) == 4


def test_one_line_of_cuda_is_one_statement():
    """An unrolled loop has its barriers many times, from one line each."""
    source = """extern "C" __global__ void k(float* y) {
        __shared__ float s[64];
        s[threadIdx.x] = threadIdx.x;
        float sum = 0;
        #pragma unroll
        for (int i = 0; i < 3; i++) {
            __syncthreads();
            sum += s[threadIdx.x ^ 32];
            __syncthreads();
            s[threadIdx.x] = sum;
        }
        y[threadIdx.x] = sum;
    }"""
    module = emulator.parse(cuda_to_ptx(source, "compute_80"), "k.ptx")
    (entry,) = module.entries.values()
    barriers = [i for i in entry.instructions if i.opcode.startswith("bar")]
    assert len(barriers) >= 5 and len(statements_of(entry)) == len({(i.path, i.line) for i in barriers})


def test_the_kernel_itself_has_to_be_right():
    with pytest.raises(EmulationError, match=r"a finding with all fences and waits in place: async-dirty at \d+"):
        needs(SEND.replace("fence.proxy.async.shared::cta;", "").replace("@%q fence.proxy.async;", ""))


def test_an_error_is_a_need():
    """An error, and another result; the first schedule that shows it ends the search."""
    text = kernel_text("mov.u32 %s, 1;\nbar.sync 0;\n" + STORE)
    (barrier,) = statements_of(emulator.parse(text, "k.ptx").entries["k"])
    assert (barrier.line, barrier.is_tried, str(barrier)) == (line_of(text, "bar"), True, "k.ptx:9: `bar.sync`")
    out = np.zeros(32, np.uint32)
    assert run_text(text, out, without=[barrier]).steps == run_text(text, out).steps and (out == 1).all()

    def attempt(mode, seed, without) -> Ran:
        if without:
            raise EmulationError("k.ptx:7: deadlock\nmore")
        return Ran((), b"")

    (need,) = needs_of([barrier], attempt)
    assert need.why == "early: k.ptx:7: deadlock"
    last = lambda mode, seed, without: Ran((), bytes([bool(without) and seed == 2]))  # noqa: E731
    assert [n.why for n in needs_of([barrier], last, 2)] == ["late, seed 2: another result"]
    assert [n.why for n in needs_of([barrier], last, 1)] == [""]
