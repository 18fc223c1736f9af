"""mbarriers: their memory is theirs until they are invalidated, and their bytes have to add up."""

import numpy as np
import pytest

from ptxlab import emulator
from tests.support.axes import both_modes
from tests.support.small_kernels import COPY_PROLOGUE, STORE, kernel_text, run_text

OUTSIDE = ".shared .align 128 .b8 buf[2048]; .shared .align 8 .b64 bar[4];"
BEGIN = """@!%q bra READY;
mbarrier.init.shared.b64 [%r5], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 %y, [%r5], EXPECTED;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%x3], 256, [%r5];
READY:
bar.sync 0;
"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0;\n@!%p bra WAIT;\n"
INVALIDATE = "@%q mbarrier.inval.shared.b64 [%r5];\n"


def findings_of(body: str, mode: str, expected: int = 256) -> list[tuple[str, str, str]]:
    """List kind, source line and message of each finding."""
    text = kernel_text(
        COPY_PROLOGUE + body.replace("EXPECTED", str(expected)) + STORE, ".param .u64 out, .param .u64 a", OUTSIDE
    )
    a = np.arange(1, 1025, dtype=np.uint32)
    launch = run_text(text, np.zeros(64, np.uint32), a, threads=64, mode=mode, checks=emulator.CHECKS)
    return [(f.kind, text.split("\n")[f.line - 1].strip(), f.message) for f in launch.findings]


@both_modes
@pytest.mark.parametrize(
    ("write", "wrong"),
    [
        ("@%q st.shared.u64 [%r5], %x9;", True),
        ("@%q st.shared.v4.u32 [%r5], {%r1, %r1, %r1, %r1};", True),
        ("@%q st.shared.u64 [%r5+8], %x9;", False),  # beside it
        ("@%q red.shared.add.u32 [%r5+4], 1;", True),
        ("@%q cp.async.ca.shared.global [%r5], [%x3], 8; cp.async.wait_all;", True),
    ],
)
def test_memory_of_an_mbarrier(write, wrong, mode):
    """Nobody comes back to the mbarrier, so that no error tells."""
    begin = BEGIN + WAIT + "bar.sync 0; mov.u64 %x9, 5;\n"
    findings = findings_of(f"{begin}{write}\n", mode)
    assert [(kind, line) for kind, line, _ in findings] == ([("async", write)] if wrong else [])
    assert all(
        "writes over the mbarrier at byte" in message and "nobody has invalidated" in message
        for *_, message in findings
    )
    assert not findings_of(f"{begin}{INVALIDATE}{write}\n", mode)


@both_modes
def test_an_mbarrier_is_invalidated_behind_all_that_wait(mode):
    findings = findings_of(BEGIN + WAIT + INVALIDATE, mode)
    assert [(kind, line) for kind, line, _ in findings] == [("race", INVALIDATE.strip())]
    assert not findings_of(BEGIN + WAIT + "bar.sync 0;\n" + INVALIDATE, mode)
    assert not findings_of(
        BEGIN + WAIT + "bar.sync 0;\n" + INVALIDATE + "@%q mbarrier.init.shared.b64 [%r5], 1;\n", mode
    )


@both_modes
@pytest.mark.parametrize(
    ("expected", "text"),
    [
        (256, ""),
        (512, "expects 256 bytes more than copies have brought"),
        (128, "has got 128 bytes that nobody expected"),
    ],
)
def test_bytes_that_do_not_add_up(expected, text, mode):
    """Nobody waits for the phase, so that there is no deadlock: the copy is waited for by the end of the kernel."""
    at_the_end = [finding for finding in findings_of(BEGIN, mode, expected) if "at the end" in finding[2]]
    assert len(at_the_end) == bool(text)
    for kind, line, message in at_the_end:
        assert (kind, line) == (
            "async",
            f"mbarrier.arrive.expect_tx.shared.b64 %y, [%r5], {expected};",
        ) and text in message


@both_modes
def test_a_phase_that_nobody_feeds(mode):
    """A block may expect what others send to some blocks only, and not wait."""
    copy = next(line for line in BEGIN.split("\n") if line.startswith("cp.async.bulk"))
    assert not findings_of(BEGIN.replace(copy + "\n", ""), mode, 256)
