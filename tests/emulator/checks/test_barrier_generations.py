"""Named barriers: threads that come again while the generation before may be under way."""

import numpy as np
import pytest

from ptxlab.errors import Deadlock
from tests.support.small_kernels import STORE, kernel_text, line_of, run_text

START = "mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; setp.ge.u32 %p, %r0, 64; setp.eq.u32 %q, %r1, 0; mov.u32 %s, 1;\n"
GROUPS = "@%p bra SECOND;\n{}bra DONE;\nSECOND:\n{}DONE:\n"  # of two warps each
MEET = "bar.sync 1, 64;\n"
LOOP = "mov.u32 %r2, 0;\nL{0}: {1}add.u32 %r2, %r2, 1; setp.lt.u32 %q, %r2, 3;\n@%q bra L{0};\n"
FULL, EMPTY = "bar.{} 1, 128;\n", "bar.{} 2, 128;\n"


def arrivals(body: str) -> tuple[int, list[str]]:
    """Return how many arrivals are reported, and where."""
    outcome = run_text(kernel_text(START + body + STORE), np.zeros(128, np.uint32), threads=128, checks=["race"])
    assert all("comes to barrier" in finding.message for finding in outcome.findings)
    return sum(finding.count for finding in outcome.findings), [finding.text for finding in outcome.findings]


WAITS, ARRIVES = LOOP.format("A", FULL.format("sync")), LOOP.format("B", FULL.format("arrive"))


@pytest.mark.parametrize("waits", [WAITS, WAITS + "bar.sync 3, 64;\n"])
def test_an_arrival_that_counts_in_the_generation_before(waits: str) -> None:
    assert arrivals(GROUPS.format(waits, ARRIVES)) == (128, ["LB: bar.arrive 1, 128"])


def test_an_arrival_twice_in_one_generation() -> None:
    with pytest.raises(Deadlock, match=r"race: .*LB: bar.arrive 1, 128`: comes to barrier 1 twice before all"):
        arrivals(GROUPS.format(ARRIVES, WAITS))


def test_a_barrier_that_two_groups_use_at_once() -> None:
    assert arrivals(MEET) == (64, ["bar.sync 1, 64"])
    assert arrivals(GROUPS.format(MEET, MEET))[0] == 64


def test_more_threads_than_complete_it_come_in_turn() -> None:
    """The first group has one warp at the barrier when three come: its generation ends with one of these."""
    body = "@!%q bra OTHERS;\nbar.sync 1, 64;\nbra DONE;\nOTHERS: bar.sync 1, 64;\nDONE:\n"
    assert arrivals(body)[0] == 64


RIGHT = {
    "both wait": (LOOP.format("A", FULL.format("sync")), LOOP.format("B", FULL.format("sync"))),
    "a ring of two": (
        LOOP.format("A", EMPTY.format("sync") + FULL.format("arrive")),
        LOOP.format("B", EMPTY.format("arrive") + FULL.format("sync")),
    ),
    "one group behind the other": (MEET + "bar.sync 0;\n", "bar.sync 0;\n" + MEET),
    "one warp each": ("bar.sync 1, 32;\n" * 3, "bar.sync 1, 32;\n"),
    "learns of it at another barrier": ("bar.arrive 1, 128;\nbar.sync 0;\n" * 2, "bar.sync 1, 128;\nbar.sync 0;\n" * 2),
}


@pytest.mark.parametrize(("first", "second"), RIGHT.values(), ids=RIGHT)
def test_an_arrival_behind_the_generation_before(first: str, second: str) -> None:
    assert arrivals(GROUPS.format(first, second)) == (0, [])


def test_a_finding_names_both_threads_and_lines() -> None:
    text = kernel_text(START + GROUPS.format(WAITS, ARRIVES) + STORE)
    (finding,) = run_text(text, np.zeros(128, np.uint32), threads=128, checks=["race"]).findings
    assert finding.kind == "race" and finding.thread == (64, 0, 0)
    line = line_of(text, "LA: ")
    assert f"to which thread (0,0,0) came by line {line}, `LA: bar.sync 1, 128`: until" in finding.message
