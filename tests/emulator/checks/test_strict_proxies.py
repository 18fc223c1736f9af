"""The check "proxy": copies over what threads have read, and copies of what another launch of a chain has written."""

import numpy as np
import pytest

from ptxlab import emulator
from tests.support.axes import both_modes
from tests.support.small_kernels import HEADER, kernel_text, run_text

STRICT = emulator.CHECKS | {"proxy"}
FENCE, GLOBAL_FENCE = "fence.proxy.async.shared::cta;", "fence.proxy.async.global;"

# A copy brings 512 bytes, 32 threads load them, and a second copy brings others to the same place.
RELOAD = """
    mov.u32 %r0, %tid.x; mov.u32 %r5, bar; mov.u32 %r6, buf; ld.param.u64 %x3, [a]; setp.eq.u32 %q, %r0, 0;
    @!%q bra FIRST;
    mbarrier.init.shared.b64 [%r5], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%x3], 512, [%r5];
    FIRST: bar.sync 0;
    W0: mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0; @!%p bra W0;
    shl.b32 %r7, %r0, 4; add.u32 %r7, %r6, %r7; ld.shared.u32 %s, [%r7];
    BETWEEN
    @!%q bra SECOND;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 512; add.u64 %x3, %x3, 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%x3], 512, [%r5];
    SECOND:
    W1: mbarrier.try_wait.parity.shared.b64 %p, [%r5], 1; @!%p bra W1;
    ld.shared.u32 %r8, [%r7]; add.u32 %s, %s, %r8;
    mov.u32 %t, %tid.x; ld.param.u64 %y, [out]; mul.wide.u32 %x19, %t, 4; add.u64 %y, %y, %x19;
    st.global.u32 [%y], %s; ret;
"""
OUTSIDE = ".shared .align 128 .b8 buf[512]; .shared .align 8 .b64 bar[1];"


@both_modes
@pytest.mark.parametrize(
    ("between", "kinds"),
    [
        (FENCE + "bar.sync 0;", []),  # every reader
        ("bar.sync 0; @%q " + FENCE, []),  # the one that issues, which has heard of them all
        ("bar.sync 0;", ["war"]),
        ("@!%q " + FENCE + "bar.sync 0;", ["war"]),  # all but one
        (GLOBAL_FENCE + "bar.sync 0;", ["war"]),  # of another space
    ],
)
def test_a_copy_over_what_threads_have_read(between: str, kinds: list[str], mode: str) -> None:
    text = kernel_text(RELOAD.replace("BETWEEN", between), ".param .u64 out, .param .u64 a", OUTSIDE)
    a = np.arange(256, dtype=np.uint32)
    for checks, expected in ((STRICT, kinds), (["proxy"], kinds), (emulator.CHECKS, [])):
        out = np.zeros(32, np.uint32)
        findings = run_text(text, out, a, threads=32, mode=mode, checks=checks).findings
        assert [finding.kind for finding in findings] == expected
        assert np.array_equal(out, a[:128:4] + a[128::4])
    if kinds:
        (finding,) = run_text(text, out, a, threads=32, mode=mode, checks=STRICT).findings
        assert (
            "copies over byte 128 of shared memory of block 0 of the wave (buf + 0), which line 16" in finding.message
        )


PRODUCER = f"""{HEADER}
.visible .entry write(.param .u64 out) {{
    .reg .u64 %o, %x; .reg .u32 %t; .reg .pred %q;
    ld.param.u64 %o, [out]; mov.u32 %t, %tid.x; mul.wide.u32 %x, %t, 4; add.u64 %o, %o, %x; setp.eq.u32 %q, %t, 0;
    st.global.u32 [%o], %t;
    BEHIND
    griddepcontrol.launch_dependents; ret;
}}
"""
CONSUMER = f"""{HEADER}{OUTSIDE}
.visible .entry read(.param .u64 a, .param .u64 out) {{
    .reg .u64 %a, %o, %x; .reg .u32 %t, %s, %b; .reg .pred %q, %p;
    ld.param.u64 %a, [a]; ld.param.u64 %o, [out]; mov.u32 %t, %tid.x; mov.u32 %b, bar; mov.u32 %s, buf;
    setp.eq.u32 %q, %t, 0; mul.wide.u32 %x, %t, 4; add.u64 %o, %o, %x; mad.lo.u32 %s, %t, 4, %s;
    @%q mbarrier.init.shared.b64 [%b], 1;
    @%q fence.mbarrier_init.release.cluster;
    AHEAD
    griddepcontrol.wait;
    BEHIND
    @%q mbarrier.arrive.expect_tx.shared.b64 _, [%b], 256;
    @%q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%a], 256, [%b];
    bar.sync 0;
    W: mbarrier.try_wait.parity.shared.b64 %p, [%b], 0; @!%p bra W;
    ld.shared.u32 %t, [%s]; st.global.u32 [%o], %t; ret;
}}
"""


def chain(producer: str, consumer: str, *, programmatic: bool = True, checks: frozenset[str] = STRICT) -> list[str]:
    """List the messages of two launches, the second of which reads what the first wrote; its result has to be right."""
    middle, out = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    with emulator.chain(checks) as launches:
        emulator.run(producer, None, [middle], grid=1, block=64)
        emulator.run(consumer, None, [middle, out], grid=1, block=64, programmatic=programmatic)
    assert np.array_equal(out, np.arange(64))
    assert all(finding.kind == "async-dirty" for finding in launches.findings)
    return [finding.message for finding in launches.findings]


def consumer(before_wait: str = "", after_wait: str = "") -> str:
    return CONSUMER.replace("AHEAD", before_wait).replace("BEHIND", after_wait)


@pytest.mark.parametrize(
    ("fence", "count"),
    [
        ("", 1),
        (GLOBAL_FENCE, 0),
        ("fence.proxy.async;", 0),
        ("bar.sync 0; @%q " + GLOBAL_FENCE, 0),  # one thread that has heard of the others
        ("@%q " + GLOBAL_FENCE + " bar.sync 0;", 1),  # one that has not
        (FENCE, 1),  # of another space
    ],
)
def test_the_producer_fences(fence: str, count: int) -> None:
    messages = chain(PRODUCER.replace("BEHIND", fence), consumer())
    assert len(messages) == count
    for message in messages:
        assert "which `st.global.u32 [%o], %t` of write (<ptx>:8), wrote without a fence.proxy.async" in message


@pytest.mark.parametrize(
    ("before_wait", "after_wait", "count"),
    [
        ("", GLOBAL_FENCE, 0),
        ("", "@%q " + GLOBAL_FENCE, 0),
        ("", "@!%q " + GLOBAL_FENCE, 1),  # not the thread that asks, and it has not heard of it
        ("", "@!%q " + GLOBAL_FENCE + " bar.sync 0;", 0),
        (GLOBAL_FENCE, "", 1),  # too early
    ],
)
def test_the_consumer_fences_behind_its_wait(before_wait: str, after_wait: str, count: int) -> None:
    assert len(chain(PRODUCER.replace("BEHIND", ""), consumer(before_wait, after_wait))) == count


def test_only_programmatic_launches_and_only_where_asked_for() -> None:
    producer = PRODUCER.replace("BEHIND", "")
    assert chain(producer, consumer(), programmatic=False) == []
    assert chain(producer, consumer(), checks=emulator.CHECKS) == []


def test_what_is_written_again_counts_anew() -> None:
    middle, out = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    fenced = PRODUCER.replace("BEHIND", GLOBAL_FENCE).replace("st.global", "griddepcontrol.wait; st.global", 1)
    with emulator.chain(STRICT) as launches:
        emulator.run(PRODUCER.replace("BEHIND", ""), None, [middle], grid=1, block=64)
        emulator.run(fenced, None, [middle], grid=1, block=64, programmatic=True)
        emulator.run(consumer(), None, [middle, out], grid=1, block=64, programmatic=True)
    assert launches.findings == []


def test_a_proxy_fence_in_a_kernel_that_copies_nothing() -> None:
    """It ended in a traceback: there was nothing to fence in the check's clocks."""
    out = np.zeros(64, np.uint32)
    text = PRODUCER.replace("BEHIND", GLOBAL_FENCE)
    assert run_text(text, out, threads=64, checks=emulator.CHECKS).findings == ()
    assert np.array_equal(out, np.arange(64))
