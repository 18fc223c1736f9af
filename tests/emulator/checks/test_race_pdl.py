"""griddepcontrol: what a kernel must not touch while the one before it may still run."""

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.emulator import Finding
from tests.support.axes import both_modes
from tests.support.small_kernels import kernel_text, line_of, run_text

PARAMS = ".param .u64 out, .param .u64 x, .param .u64 w"
SHARED = ".shared .align 128 .b8 buf[1024]; .shared .align 8 .b64 bar[2];"
WAIT = "griddepcontrol.wait;\n"
# Thread t has its words of x at %x1, of w at %x2, of out at %x0
START = """mov.u32 %r0, %tid.x; setp.eq.u32 %q, %r0, 0; mov.u32 %r8, bar; mov.u32 %r10, buf; shl.b32 %r4, %r0, 2;
    add.u32 %r4, %r4, %r10; ld.param.u64 %x5, [out]; ld.param.u64 %x6, [x]; ld.param.u64 %x7, [w];
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mad.lo.u32 %r1, %r1, %r2, %r0; mul.wide.u32 %x4, %r1, 4;
    add.u64 %x0, %x5, %x4; add.u64 %x1, %x6, %x4; add.u64 %x2, %x7, %x4;
"""
THREADS, CLUSTER = 64, 2


def outcome(body: str, mode: str = "late", after_wait=(1,), cluster: int = 1, checks=emulator.CHECKS) -> list[Finding]:
    """Run a body and list the findings; out has to be x + w if there are none."""
    out, x, w = np.zeros((3, 2 * THREADS), np.uint32)
    x[:], w[:] = np.arange(2 * THREADS), 1000
    text = kernel_text(f"{START}{body}ret;", PARAMS, SHARED)
    launch = run_text(text, out, x, w, threads=THREADS, blocks=2, mode=mode, cluster=cluster, checks=checks,
                 after_wait=after_wait)  # fmt: skip
    assert launch.findings or (out == x + w).all()
    return list(launch.findings)


def expect(findings: list[Finding], body: str, **lines: str) -> None:
    """Check that there is a finding for each of the lines named by what stands in them, in any order, and no other."""
    text = kernel_text(f"{START}{body}ret;", PARAMS, SHARED)
    assert sorted((f.line, f.kind) for f in findings) == sorted(
        (line_of(text, line), "race") for line in lines.values()
    )
    for finding in findings:
        (access,) = (access for access, line in lines.items() if line_of(text, line) == finding.line)
        consequence = "ahead of griddepcontrol.wait: the kernel before may still"
        message = {"read": rf"read of byte \d+ of argument 1 (x) {consequence} write it",
                   "write": rf"write to byte \d+ of argument 0 (out) {consequence} use it"}[access]  # fmt: skip
        assert message.replace(r"\d+", finding.message.split()[3]) in finding.message


EACH = f"""griddepcontrol.launch_dependents;
ld.global.u32 %r5, [%x2];
{WAIT}ld.global.u32 %r6, [%x1];
add.u32 %r5, %r5, %r6;
st.global.u32 [%x0], %r5;
"""


def test_each_thread_waits() -> None:
    assert outcome(EACH) == []
    early = EACH.replace(WAIT, "") + WAIT
    expect(outcome(early), early, read="%r6, [%x1]", write="[%x0], %r5")


def test_a_read_only_load_may_be_moved_ahead_of_the_wait() -> None:
    """A read-only load of what the predecessor makes is a race; that of w is as good as any."""
    constant = EACH.replace("ld.global.u32 %r5, [%x2]", "ld.global.nc.u32 %r5, [%x2]")
    assert outcome(constant) == []
    (finding,) = outcome(constant.replace("ld.global.u32 %r6, [%x1]", "ld.global.nc.u32 %r6, [%x1]"))
    assert (finding.kind, finding.count) == ("race", 2 * THREADS)
    assert "argument 1 (x) as read-only (.nc), which ptxas may move ahead of griddepcontrol.wait" in finding.message


def test_what_the_caller_names_is_the_predecessors() -> None:
    early = EACH.replace(WAIT, "") + WAIT
    expect(outcome(early, after_wait=()), early, write="[%x0], %r5")
    assert len(outcome(EACH, after_wait=(1, 2))) == 1  # w, which is read ahead of the wait


def test_a_kernel_that_never_waits_is_judged_if_something_is_its_predecessors() -> None:
    never = EACH.replace(WAIT, "")
    assert outcome(never, after_wait=()) == []
    expect(outcome(never), never, read="%r6, [%x1]", write="[%x0], %r5")


def test_it_is_part_of_the_check_for_races() -> None:
    early = EACH.replace(WAIT, "") + WAIT
    assert outcome(early, checks=["async", "init"]) == []
    expect(outcome(early, checks=["race"]), early, read="%r6, [%x1]", write="[%x0], %r5")


def test_one_thread_waits_for_those_behind_a_barrier() -> None:
    body = EACH.replace(WAIT, f"@%q {WAIT}bar.sync 0;\n")
    assert outcome(body) == []
    alone = body.replace("bar.sync 0;\n", "")
    findings = outcome(alone)
    expect(findings, alone, read="%r6, [%x1]", write="[%x0], %r5")
    assert [f.count for f in findings] == [2 * (THREADS - 1)] * 2 and {f.thread for f in findings} == {(1, 0, 0)}
    barrier_before_wait = body.replace("bar.sync 0;\n", "").replace(f"@%q {WAIT}", f"bar.sync 0;\n@%q {WAIT}")
    assert len(outcome(barrier_before_wait)) == 2


def test_a_read_that_acquires_lies_behind_the_wait_that_it_learns_of() -> None:
    """The check of the wait hears of an access after the clocks do (the order of `launch._watchers`)."""
    flag = "@%q st.release.gpu.global.u32 [%x6], 0;\nld.acquire.gpu.global.u32 %r6, [%x6];\n"
    body = EACH.replace(WAIT, f"@%q {WAIT}{flag}")
    for load, count in (("ld.acquire", 0), ("ld.relaxed", 3)):
        early = [f for f in outcome(body.replace("ld.acquire", load), "early") if "ahead of" in f.message]
        assert len(early) == count


def test_one_lane_waits_for_its_warp() -> None:
    body = EACH.replace(WAIT, f"and.b32 %r7, %r0, 31; setp.eq.u32 %p, %r7, 0;\n@%p {WAIT}bar.warp.sync -1;\n")
    assert outcome(body) == []
    assert len(outcome(body.replace("bar.warp.sync -1;\n", ""))) == 2


def test_one_block_waits_for_its_cluster() -> None:
    one = f"mov.u32 %r7, %ctaid.x; setp.eq.u32 %p, %r7, 0;\n@%p {WAIT}"
    meet = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n"
    body = EACH.replace(WAIT, one + meet)
    assert outcome(body, cluster=2) == []
    assert {f.block for f in outcome(body)} == {(1, 0, 0)}


@pytest.mark.parametrize("write", ["red.global.add.u32 [%x0], %r5;", "atom.global.add.u32 %r6, [%x0], %r5;"])
def test_atomics_write(write: str) -> None:
    body = EACH.replace("st.global.u32 [%x0], %r5;", write)
    assert outcome(body) == []
    early = body.replace(WAIT, "") + WAIT
    expect(outcome(early), early, read="%r6, [%x1]", write=write)


# Thread 0 has x copied to shared memory, and the others hear of that at an mbarrier. w is read ahead of the wait.
INIT = "@%q mbarrier.init.shared.b64 [%r8], 1;\n@%q fence.mbarrier_init.release.cluster;\nbar.sync 0;\n"
EXPECT = "@%q mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 256;\n"
COPY = "@%q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%x1], 256, [%r8];\n"
USE = """ld.global.u32 %r5, [%x2];
W: mbarrier.try_wait.parity.shared.b64 %p, [%r8], 0; @!%p bra W;
ld.shared.u32 %r6, [%r4];
add.u32 %r5, %r5, %r6;
st.global.u32 [%x0], %r5;
"""


@both_modes
@pytest.mark.parametrize("between", [f"@%q {WAIT}{EXPECT}", f"{EXPECT}@%q {WAIT}"], ids=["arrives", "copies"])
def test_one_thread_waits_and_has_copied(between: str, mode: str) -> None:
    """The threads that write know that the copy is done, so the wait before it is over, even if it told nobody else."""
    body = f"{INIT}{between}{COPY}{USE}"
    assert outcome(body, mode) == []
    late = f"{INIT}{EXPECT}{COPY}@%q {WAIT}{USE}"  # of which the others then know nothing
    expect(outcome(late, mode), late, read="cp.async.bulk.shared", write="[%x0], %r5")


@both_modes
def test_copies_to_global_memory_write(mode: str) -> None:
    body = f"""ld.global.u32 %r5, [%x2];
{WAIT}ld.global.u32 %r6, [%x1];
add.u32 %r5, %r5, %r6;
st.shared.u32 [%r4], %r5;
fence.proxy.async.shared::cta; bar.sync 0;
@%q cp.async.bulk.global.shared::cta.bulk_group [%x0], [%r10], 256;
@%q cp.async.bulk.commit_group;
@%q cp.async.bulk.wait_group 0;
"""
    assert outcome(body, mode) == []
    early = body.replace(WAIT, "") + WAIT
    expect(outcome(early, mode), early, read="%r6, [%x1]", write="[%x0], [%r10]")
