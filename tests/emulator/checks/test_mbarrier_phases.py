"""Waits by parity: over too early where nothing says that the phase before is over."""

import numpy as np
import pytest

from ptxlab import emulator
from tests.support.small_kernels import COPY_PROLOGUE, STORE, kernel_text, run_text

OUTSIDE = ".shared .align 128 .b8 buf[2048]; .shared .align 8 .b64 bar[4];"
BEGIN = "@%q mbarrier.init.shared.b64 [%r5], 1;\nfence.mbarrier_init.release.cluster;\nbar.sync 0;\n"
ARRIVE = "@%q mbarrier.arrive.shared.b64 %y, [%r5];\n"
COPY = (
    "@%q mbarrier.arrive.expect_tx.shared.b64 %y, [%r5], 256;\n"
    "@%q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%x3], 256, [%r5];\n"
)
MEET = "bar.sync 0;\n"
LAST = "LAST: mbarrier.try_wait.parity.shared.b64 %p, [%r5], 1;\n"
END = LAST + "@!%p bra LAST;\n"
ALL_WAIT = "FIRST: mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0;\n@!%p bra FIRST;\n"
ONE_WAITS = "@!%q bra DONE;\n" + ALL_WAIT + "DONE:\n"
AGAIN = ONE_WAITS.replace("FIRST", "SECOND").replace("DONE", "GONE")
FIFTH_WAITS = "setp.eq.u32 %p, %r0, 5;\n" + ONE_WAITS.replace("%q", "%p")
LATER = (BEGIN + COPY + ALL_WAIT.replace("FIRST", "OTHER")).replace("[%r5]", "[%r5+8]")
RELAXED = ALL_WAIT.replace("parity.", "parity.relaxed.cluster.")


@pytest.mark.parametrize(
    ("body", "lanes"),
    [
        (COPY + ONE_WAITS + COPY + END, 63),
        (COPY + ALL_WAIT + COPY + END, 0),
        (COPY + RELAXED + COPY + END, 0),
        (COPY + ONE_WAITS + MEET + COPY + END, 0),  # one has waited, and all know of that
        (COPY + ONE_WAITS + COPY + MEET + END, 0),
        (COPY + ONE_WAITS + MEET + AGAIN + COPY + END, 0),
        (ARRIVE + ARRIVE + END, 63),
        (ARRIVE + ARRIVE + MEET + END, 0),  # all know of all arrivals
        ((ARRIVE + ARRIVE).replace("arrive.", "arrive.relaxed.cluster.") + MEET + END, 64),  # which tell nothing
        (COPY + COPY + MEET + END, 64),  # nobody has waited for the copy
        (COPY + LATER + COPY + END, 64),  # which may come after one that was asked for later
        (COPY + LATER + ONE_WAITS + COPY + END, 63),
        (COPY + LATER + FIFTH_WAITS + COPY + END, 63),
        (ARRIVE + MEET + END.replace("], 1", "], 0"), 0),  # there is none before
    ],
)
@pytest.mark.parametrize("checks", [emulator.CHECKS, {"async"}], ids=["all", "async"])
def test_a_wait_by_parity_needs_the_phase_before(checks: set[str], body: str, lanes: int) -> None:
    text = kernel_text(COPY_PROLOGUE + BEGIN + body + STORE, ".param .u64 out, .param .u64 a", OUTSIDE)
    a = np.arange(1, 1025, dtype=np.uint32)
    launch = run_text(text, np.zeros(64, np.uint32), a, threads=64, checks=checks)
    findings = [f for f in launch.findings if "by parity" in f.message]
    assert sum(f.count for f in findings) == lanes
    for finding in findings:
        assert (finding.kind, text.split("\n")[finding.line - 1]) == ("async", LAST.strip())
        assert "for phase 1 of the mbarrier at byte" in finding.message and "phase 0 is over" in finding.message
