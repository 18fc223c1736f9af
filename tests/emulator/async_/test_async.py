"""cp.async, cp.async.bulk and mbarrier: what they do, early and late, and what is found when a step is missing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import emulator
from ptxlab.errors import Deadlock, EmulationError, MemoryFault, SourceError, UnknownInstruction
from tests.support.axes import both_modes
from tests.support.small_kernels import COPY_PROLOGUE, STORE, kernel_text, line_of, run_text

TWO = ".param .u64 out, .param .u64 a"
SHARED = ".shared .align 128 .b8 buf[2048]; .shared .align 8 .b64 bar[4];"


def module(body: str) -> str:
    return kernel_text(COPY_PROLOGUE + body + STORE, TWO, SHARED)


def outcome(body: str, a: np.ndarray | None = None, threads: int = 32, mode: str = "late", **options):
    """Run a body; return what each thread has in %s, and the findings, as (kind, line in the body)."""
    out, a = np.zeros(threads, np.uint32), np.arange(1, 1025, dtype=np.uint32) if a is None else a
    text = module(body)
    launch = run_text(text, out, a, threads=threads, mode=mode, checks=emulator.CHECKS, **options)
    first = line_of(text, "ld.param.u64 %x3, [a];")
    return out, sorted({(f.kind, f.line - first) for f in launch.findings})


# cp.async


@both_modes
@pytest.mark.parametrize(
    ("copy", "words"),
    [
        ("cp.async.cg.shared.global [%r2], [%x1], 16;", [1, 2, 3, 4]),
        ("cp.async.ca.shared::cta.global.L2::128B [%r2], [%x1], 16;", [1, 2, 3, 4]),
        ("cp.async.ca.shared.global [%r2], [%x1], 8;", [1, 2, 77, 77]),
        ("cp.async.ca.shared.global [%r2+4], [%x1+4], 4;", [77, 2, 77, 77]),
        ("cp.async.cg.shared.global [%r2], [%x1], 16, 4;", [1, 0, 0, 0]),
        ("cp.async.cg.shared.global.L2::cache_hint [%r2], [%x1], 16, 8, %x9;", [1, 2, 0, 0]),
        ("mov.u32 %r8, 0; cp.async.cg.shared.global [%r2], [7], 16, %r8;", [0, 0, 0, 0]),
        ("setp.ge.u32 %p, %r0, 0; cp.async.cg.shared.global [%r2], [%x1], 16, %p;", [0, 0, 0, 0]),
    ],
)
def test_a_short_copy_fills_the_rest_with_zeros(copy, words, mode):
    fill = "mov.u32 %r9, 77; st.shared.v4.u32 [%r2], {%r9, %r9, %r9, %r9}; mov.u64 %x9, 0;\n"
    for i, word in enumerate(words):
        out, findings = outcome(f"{fill}{copy}\ncp.async.wait_all;\nld.shared.u32 %s, [%r2+{4 * i}];\n", mode=mode)
        assert not findings
        assert out.tolist() == [word + 4 * t if 0 < word < 77 else word for t in range(32)]


@pytest.mark.parametrize(
    ("copy", "error", "message"),
    [
        ("cp.async.cg.shared.global [%r2], [%x1], 8;", SourceError, "cp.async.cg copies 16 bytes"),
        ("cp.async.ca.shared.global [%r2+4], [%x1], 16;", MemoryFault, "not a multiple of the 16 bytes"),
        ("cp.async.ca.shared.global [%r2], [%x1+8], 16;", MemoryFault, "not a multiple of the 16 bytes"),
        ("cp.async.ca.shared.global [%r2+2048], [%x1], 16;", MemoryFault, "16 bytes at shared address 2080"),
        ("cp.async.ca.shared.global [%r2], [%x1+3600], 16;", MemoryFault, r"thread \(31,0,0\): 16 bytes at byte 4096"),
        ("cp.async.cg.shared.global [%r2], [%x1], 16, 17;", MemoryFault, "17 bytes to read, more than the 16"),
        ("cp.async.cg.shared.global.cluster [%r2], [%x1], 16;", UnknownInstruction, "does not know"),
        ("cp.async.bulk.wait_group %r1;", SourceError, "has to be a constant"),
        ("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%x1], 16, [%r5];", EmulationError,
         "no initialised mbarrier at byte 2048"),
        ("@%q cp.async.bulk.global.shared::cta.bulk_group [%x1], [%r2], 24;", MemoryFault, "a multiple of 16 bytes"),
        ("@%q cp.async.bulk.global.shared::cta.bulk_group [%x1+8], [%r2], 16;", MemoryFault, "not a multiple"),
        ("@%q cp.async.bulk.global.shared::cta.bulk_group [%x1], [%r2], 2096;", MemoryFault, "2096 bytes at shared"),
        ("cp.async.bulk.prefetch.L2.global [%x1], 24;", MemoryFault, "a multiple of 16 bytes, not 24"),
        ("cp.async.bulk.prefetch.L2.global [%x1+8], 16;", MemoryFault, "not a multiple of the 16 bytes"),
        ("cp.async.bulk.prefetch.L2.global [%x1], 4000;", MemoryFault, "past its end"),
        ("cp.async.bulk.prefetch.L2.shared [%x1], 16;", UnknownInstruction, "does not know"),
        *((f"cp.async.bulk.tensor.{n}d.global.shared::cta.bulk_group [%x1, {{%r0}}], [%r2];", UnknownInstruction,
           "does not know") for n in (0, 6)),
        ("prefetch.global.L2 [%x1+4000];", MemoryFault, "1 bytes at byte 4096 of argument 1"),
        ("cp.async.bulk.global.global.bulk_group [%x1], [%x2], 16;", UnknownInstruction, "does not know"),
    ],
)  # fmt: skip
def test_invalid_copies_are_refused(copy, error, message):
    with pytest.raises(error, match=message) as raised:
        outcome(copy + "\n")
    assert "k.ptx:" in str(raised.value)


GROUPS = """cp.async.ca.shared.global [%r2], [%x1], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r2+4], [%x1+4], 4;
    cp.async.commit_group;
    WAIT
    ld.shared.u32 %s, [%r2];
    ld.shared.u32 %r9, [%r2+4];
    mad.lo.u32 %s, %r9, 1000, %s;
"""


@both_modes
@pytest.mark.parametrize(
    ("wait", "expected"),
    [
        ("cp.async.wait_group 0;", []),
        ("cp.async.wait_all;", []),
        ("cp.async.wait_group 1;", [("async", 7)]),
        ("cp.async.wait_group 2;", [("async", 6), ("async", 7)]),
        ("", [("async", 6), ("async", 7)]),
    ],
)
def test_groups_are_waited_for_oldest_first(wait, expected, mode):
    out, findings = outcome(GROUPS.replace("WAIT", wait), mode=mode)
    assert findings == expected
    right = [1 + 4 * t + 1000 * (2 + 4 * t) for t in range(32)]
    assert (out.tolist() == right) == (mode == "early" or not expected)


def test_wait_group_ignores_copies_that_are_not_committed():
    body = GROUPS.replace("WAIT", "cp.async.wait_group 0;")
    head, _, tail = body.rpartition("cp.async.commit_group;")
    assert outcome(head + tail)[1] == [("async", 7)]
    assert outcome((head + tail).replace("wait_group 0", "wait_all"))[1] == []


@pytest.mark.parametrize(
    "touch",
    ["st.shared.u32 [%r2], 5;", "st.global.u32 [%x1], 5;", "cp.async.ca.shared.global [%r2], [%x1+4], 4;",
     "cp.async.cg.shared.global [%r2], [%x1], 16, 0;", "atom.shared.add.u32 %r9, [%r2], 1;"],
)  # fmt: skip
@both_modes
def test_bytes_in_flight_are_not_to_be_touched(touch, mode):
    copy, wait = "cp.async.ca.shared.global [%r2], [%x1], 4;", "cp.async.wait_all;"
    assert outcome(f"{copy}\n{touch}\n{wait}\n", mode=mode)[1] == [("async", 2)]
    assert outcome(f"{copy}{wait}\n{touch}\n{wait}\n", mode=mode)[1] == []


@both_modes
def test_a_copy_over_what_an_older_copy_has_written_races_with_it(mode):
    """The check of races sees a copy before its own bytes count as in flight (the order of `launch._watchers`)."""
    body = """setp.eq.u32 %p, %r0, 0; setp.eq.u32 %q, %r0, 32;
@%p cp.async.cg.shared.global [%r6], [%x3], 16;
cp.async.wait_all;
BARRIER
@%q cp.async.cg.shared.global [%r6], [%x3], 16;
cp.async.wait_all;
"""
    assert outcome(body.replace("BARRIER", ""), threads=64, mode=mode)[1] == [("race", 5)]
    assert outcome(body.replace("BARRIER", "bar.sync 0;"), threads=64, mode=mode)[1] == []


@both_modes
def test_others_see_a_copy_behind_a_barrier_only(mode):
    body = """xor.b32 %r7, %r2, 512;
    cp.async.cg.shared.global [%r2], [%x1], 16;
    cp.async.wait_all;
    BARRIER
    ld.shared.u32 %s, [%r7];
    """
    out, findings = outcome(body.replace("BARRIER", "bar.sync 0;"), threads=64, mode=mode)
    assert not findings and out.tolist() == [1 + 4 * (t ^ 32) for t in range(64)]
    assert outcome(body.replace("BARRIER", ""), threads=64, mode=mode)[1] == [("race", 5)]


# mbarrier


@both_modes
def test_phases_tokens_and_counts(mode):
    """A thread takes a barrier of three arrivals through two phases, in every way to arrive and to ask."""
    body = """@!%q bra END;
    mbarrier.init.shared.b64 [%r5], 3;
    mbarrier.arrive.shared.b64 %x5, [%r5];
    mbarrier.pending_count.b64 %r8, %x5;
    mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %x6, [%r5], 1;
    mbarrier.try_wait.parity.shared.b64 %p, [%r5], 1;
    selp.u32 %r9, 1, 0, %p; add.u32 %s, %s, %r9;
    mbarrier.arrive_drop.shared.b64 %x6, [%r5];
    mbarrier.test_wait.shared.b64 %p, [%r5], %x5;
    selp.u32 %r9, 10, 0, %p; add.u32 %s, %s, %r9;
    mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %x5, [%r5], 64;
    mbarrier.pending_count.b64 %r7, %x5;
    mad.lo.u32 %s, %r7, 10000, %s;
    mbarrier.test_wait.shared.b64 %p, [%r5], %x5;
    selp.u32 %r9, 100000, 0, %p; add.u32 %s, %s, %r9;
    mbarrier.arrive.shared::cluster.b64 _, [%r5];
    mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%r5], 64;
    mbarrier.try_wait.acquire.cta.shared.b64 %p, [%r5], %x5, 1000;
    selp.u32 %r9, 100, 0, %p; add.u32 %s, %s, %r9;
    mad.lo.u32 %s, %r8, 1000, %s;
    mbarrier.inval.shared.b64 [%r5];
    mbarrier.init.shared.b64 [%r5], 1;
    END:
    """
    out, findings = outcome(body, mode=mode)
    assert out[0] == 23111 and not findings


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@%q mbarrier.init.shared.b64 [%r5], 0;", "expects 1 to 1048575 arrivals, not 0"),
        ("@%q mbarrier.init.shared.b64 [%r5], 1048576;", "expects 1 to 1048575 arrivals, not 1048576"),
        ("mbarrier.init.shared.b64 [%r5], 1;", r"thread \(1,0,0\): the mbarrier at byte 2048 .* initialised already"),
        ("mbarrier.arrive.shared.b64 _, [%r5];", r"thread \(0,0,0\): there is no initialised mbarrier"),
        ("@%q mbarrier.init.shared.b64 [%r5], 2; @%q mbarrier.arrive.shared.b64 _, [%r5], 3;", "expects 2 more"),
        ("@%q mbarrier.init.shared.b64 [%r5], 2; @%q mbarrier.arrive.shared.b64 _, [%r5], 0;", "0 arrivals, but"),
        ("@%q mbarrier.init.shared.b64 [%r5], 2; @%q mbarrier.arrive.noComplete.shared.b64 %x5, [%r5], 2;",
         "would complete a phase"),
        ("@%q mbarrier.init.shared.b64 [%r5], 2; @%q st.shared.u32 [%r5], 3; @%q mbarrier.arrive.shared.b64 _, [%r5];",
         r"thread \(0,0,0\): something has written over the mbarrier"),
        ("@%q mbarrier.init.shared.b64 [%r5], 2; @%q mbarrier.inval.shared.b64 [%r5]; "
         "@%q mbarrier.expect_tx.shared.b64 [%r5], 16;", "no initialised mbarrier"),
        ("@%q mbarrier.init.shared.b64 [%r5], 2; @%q mbarrier.expect_tx.shared.b64 [%r5], 0x200000;", "beyond 1048575"),
    ],
)  # fmt: skip
def test_misused_mbarriers(body, message):
    with pytest.raises(EmulationError, match=message):
        outcome(body + "\n")


def test_an_mbarrier_may_expect_the_most_arrivals():
    body = """@!%q bra END; mbarrier.init.shared.b64 [%r5], 1048575; mbarrier.arrive.shared.b64 %x5, [%r5];
    mbarrier.pending_count.b64 %s, %x5;
    END:
    """
    assert outcome(body)[0][0] == 1048575


def test_a_deadlock_names_waiter_barrier_and_phase_at_once():
    body = """@%q mbarrier.init.shared.b64 [%r5+8], 5;
    bar.sync 0;
    mbarrier.arrive.shared.b64 _, [%r5+8], 1;
    W: mbarrier.WAIT.parity.shared.b64 %p, [%r5+8], 0;
    @!%p bra W;
    """
    for wait in ("try_wait", "test_wait"):
        text = module(body.replace("WAIT", wait))
        with pytest.raises(
            Deadlock, match=r"phase 0 of the mbarrier at byte 2056 .*: 3 of 5 arrivals are missing$"
        ) as raised:
            run_text(text, np.zeros(2, np.uint32), np.zeros(32, np.uint32), threads=2, max_steps=1000)
        assert f"k.ptx:{line_of(text, 'W: ')}: " in str(raised.value) and "and 1 more" in str(raised.value)


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("mbarrier.expect_tx.shared.b64 [%r5], 32;", "1 of 1 arrivals are missing, and 32 bytes"),
        (
            "mbarrier.complete_tx.shared.b64 [%r5], 16;",
            "1 of 1 arrivals are missing; 16 bytes came that nobody expected",
        ),
    ],
)
def test_a_deadlock_says_what_is_missing(instruction, message):
    body = f"@!%q bra END; mbarrier.init.shared.b64 [%r5], 1; {instruction}\n"
    with pytest.raises(Deadlock, match=message):
        outcome(body + "W: mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0; @!%p bra W;\nEND:\n")


def test_a_deadlock_says_who_completed_several_phases_at_once():
    body = """@%q mbarrier.init.shared.b64 [%r5], 1;
    bar.sync 0;
    mbarrier.arrive.shared.b64 _, [%r5];
    """
    message = (
        r"1 of 1 arrivals are missing; 32 threads that arrived at once, in line \d+, `mbarrier.arrive.\S+ _, \[%r5\]`, "
    )
    with pytest.raises(Deadlock, match=message + "completed 32 phases"):
        outcome(body + "W: mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0; @!%p bra W;\n")


def test_polling_lanes_may_do_other_things():
    """Lane 0 polls, and arrives itself between its polls."""
    body = """@!%q bra END;
    mbarrier.init.shared.b64 [%r5], 9;
    L: mbarrier.arrive.shared.b64 _, [%r5]; add.u32 %s, %s, 1;
    mbarrier.test_wait.parity.shared.b64 %p, [%r5], 0;
    @!%p bra L;
    END:
    """
    assert outcome(body)[0][0] == 9


@both_modes
def test_lanes_may_spin_while_others_wait_for_what_is_late(mode):
    """The lower warp polls a flag that the upper one raises when its seven copies have come, one after the other."""
    body = """@%q mbarrier.init.shared.b64 [%r5], 1;
    @%q fence.mbarrier_init.release.cluster;
    bar.sync 0; mov.u32 %r10, 0; mov.u32 %r11, 0;
    setp.lt.u32 %p, %r0, 32; @%p bra SPIN;
    NEXT: setp.ne.u32 %p, %r0, 32; @%p bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%x3], 512, [%r5];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p, [%r5], %r11; @!%p bra WAIT;
    bar.warp.sync -1;
    xor.b32 %r11, %r11, 1; add.u32 %r10, %r10, 1; setp.lt.u32 %p, %r10, 7; @%p bra NEXT;
    ld.shared.u32 %s, [%r6]; st.release.gpu.global.u32 [%x3+2048], %s; bra END;
    SPIN: nanosleep.u32 20; ld.acquire.gpu.global.u32 %r9, [%x3+2048]; setp.ne.u32 %p, %r9, 1; @%p bra SPIN;
    mov.u32 %s, 9;
    END:
    """
    out, findings = outcome(body, threads=64, mode=mode, max_steps=10_000)
    assert not findings and out.tolist() == [9] * 32 + [1] * 32


@both_modes
@pytest.mark.parametrize("order", ["relaxed.cta", "release.cta"])
def test_arrivals_hand_knowledge_on(order, mode):
    """The upper warp writes and arrives; the lower one waits and reads."""
    body = f"""@%q mbarrier.init.shared.b64 [%r5], 32;
    bar.sync 0;
    setp.ge.u32 %p, %r0, 32; @!%p bra W;
    st.shared.u32 [%r2], %r0;
    mbarrier.arrive.{order}.shared.b64 _, [%r5];
    bra END;
    W: mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0;
    @!%p bra W;
    ld.shared.u32 %s, [%r2+512];
    END:
    """
    out, findings = outcome(body, threads=64, mode=mode)
    assert out[:32].tolist() == list(range(32, 64))
    assert findings == ([] if order == "release.cta" else [("race", 9)])


@both_modes
@pytest.mark.parametrize(
    ("fence", "clean"),
    [
        ("", False),
        ("fence.acquire.cta;", True),
        ("bar.sync 0;", True),
        ("fence.release.cta;", False),
        ("mbarrier.arrive.release.cta.shared.b64 _, [%r5+8];", False),
    ],
)
def test_a_relaxed_wait_acquires_a_copy_behind_a_fence(fence: str, clean: bool, mode: str) -> None:
    body = f"""@%q mbarrier.init.shared.b64 [%r5], 1; @%q mbarrier.init.shared.b64 [%r5+8], 32;
    bar.sync 0;
    @%q mbarrier.arrive.expect_tx.relaxed.cta.shared.b64 _, [%r5], 512;
    @%q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%x3], 512, [%r5];
    W: mbarrier.try_wait.parity.relaxed.cta.shared.b64 %p, [%r5], 0; @!%p bra W;
    {fence}
    ld.shared.u32 %s, [%r2];
    """
    out, findings = outcome(body, mode=mode)
    assert out.tolist() == [1 + 4 * t for t in range(32)]
    assert findings == ([] if clean else [("race", 7)])


HANDOVER = """@%q mbarrier.init.shared.b64 [%r5], COUNT;
    bar.sync 0;
    and.b32 %r7, %r0, 31; setp.ge.u32 %p, %r0, 32; @!%p bra READ;
    st.shared.u32 [%r2], %r0;
    WROTE
    ARRIVE
    bra END;
    READ: setp.ge.u32 %p, %r7, WAITERS; @%p bra MET;
    W: mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0;
    @!%p bra W;
    MET: WAITED
    ld.shared.u32 %s, [%r2+512];
    END:
"""
ONE_ARRIVES = "setp.eq.u32 %p, %r7, 0; @%p mbarrier.arrive.shared.b64 _, [%r5];"
ALL_ARRIVE = "mbarrier.arrive.shared.b64 _, [%r5];"
MEET = "bar.warp.sync -1;"


@both_modes
@pytest.mark.parametrize(
    ("count", "arrive", "wrote", "waiters", "waited", "clean"),
    [
        (1, ONE_ARRIVES, MEET, 32, "", True),
        (1, ONE_ARRIVES, "", 32, "", False),
        (1, ONE_ARRIVES, "fence.acq_rel.cta;", 32, "", False),
        (1, ONE_ARRIVES, "vote.sync.any.pred %p, %p, -1;", 32, "", False),
        (1, ONE_ARRIVES, "bar.sync 1, 32;", 32, "", True),
        (32, ALL_ARRIVE, "", 32, "", True),
        (1, ONE_ARRIVES, MEET, 1, MEET, True),
        (1, ONE_ARRIVES, MEET, 1, "", False),
        (1, ONE_ARRIVES, MEET, 1, "vote.sync.any.pred %p, %p, -1;", False),
    ],
)
def test_a_lane_arrives_and_waits_for_itself(count, arrive, wrote, waiters, waited, clean, mode):
    """Lanes of the upper warp write, those of the lower one read; only where a warp meets do others count too."""
    body = HANDOVER.replace("COUNT", str(count)).replace("ARRIVE", arrive).replace("WROTE", wrote)
    body = body.replace("WAITERS", str(waiters)).replace("WAITED", waited)
    _, findings = outcome(body, threads=64, mode=mode)
    assert findings == ([] if clean else [("race", 12)])


@both_modes
@pytest.mark.parametrize("meet", [MEET, ""])
@pytest.mark.parametrize("access", ["ld.shared.u32 %s, [%r2+-512];", "st.shared.u32 [%r2+-512], %s;"])
def test_a_slot_is_free_when_all_lanes_have_done_with_it(access, meet, mode):
    """The lower warp copies, the upper one uses it, and its lane 0 says so; then comes the next copy."""
    body = f"""@%q mbarrier.init.shared.b64 [%r5], 1; @%q mbarrier.init.shared.b64 [%r5+8], 1;
    @%q fence.mbarrier_init.release.cluster;
    bar.sync 0;
    and.b32 %r7, %r0, 31; setp.ge.u32 %p, %r0, 32; @%p bra USE;
    @!%q bra END;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%x3], 512, [%r5];
    EMPTY: mbarrier.try_wait.parity.shared.b64 %p, [%r5+8], 0; @!%p bra EMPTY;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%x3], 512, [%r5];
    LAST: mbarrier.try_wait.parity.shared.b64 %p, [%r5], 1; @!%p bra LAST;
    bra END;
    USE: mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0; @!%p bra USE;
    {access}
    fence.proxy.async.shared::cta;
    {meet}
    setp.eq.u32 %p, %r7, 0; @%p mbarrier.arrive.shared.b64 _, [%r5+8];
    END:
    """
    _, findings = outcome(body, threads=64, mode=mode)
    assert findings == ([] if meet else [("race", 10)])


@both_modes
@pytest.mark.parametrize("meet", [MEET, ""])
def test_each_lane_waits_for_its_own_copies(meet, mode):
    """A lane reads what its neighbour has copied and waited for."""
    body = f"""cp.async.cg.shared.global [%r2], [%x1], 16;
    cp.async.wait_all;
    {meet}
    xor.b32 %r7, %r2, 16;
    ld.shared.u32 %s, [%r7];
    """
    assert outcome(body, mode=mode)[1] == ([] if meet else [("race", 5)])


@both_modes
def test_cp_async_arrives_at_an_mbarrier(mode):
    """The copy arrives with and without an arrival of its own; who waits may read what the other warp has copied."""
    body = """@%q mbarrier.init.shared.b64 [%r5], 64;
    bar.sync 0; xor.b32 %r7, %r2, 512;
    cp.async.cg.shared.global [%r2], [%x1], 16;
    cp.async.mbarrier.arrive.KIND [%r5];
    ALSO
    W: mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0;
    @!%p bra W;
    ld.shared.u32 %s, [%r7];
    """
    for kind, also in (("noinc.shared.b64", ""), ("shared::cta.b64", "mbarrier.arrive.shared.b64 _, [%r5];")):
        text = body.replace("KIND", kind).replace("ALSO", also)
        out, findings = outcome(text, threads=64, mode=mode)
        assert not findings and out.tolist() == [1 + 4 * (t ^ 32) for t in range(64)]
        head, _, tail = text.partition("W:")
        assert outcome(head + tail.partition("bra W;")[2], threads=64, mode=mode)[1] == [("async", 7)]


# The copy engine

RING = """setp.ge.u32 %p, %r0, 32; mov.u32 %r10, 0; mov.u32 %r11, 0;
    @!%q bra READY;
    mbarrier.init.shared.b64 [%r5], 1;
    mbarrier.init.shared.b64 [%r5+8], 32;
    fence.mbarrier_init.release.cluster;
    READY:
    bar.sync 0;
    @%p bra CONSUME;
    @!%q bra END;
    xor.b32 %r12, %r11, 1;
    mov.u32 %r13, 512;
    PRODUCE:
    mbarrier.try_wait.parity.shared.b64 %p, [%r5+8], %r12;
    @!%p bra PRODUCE;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r5], %r13;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%x3], %r13, [%r5];
    add.u64 %x3, %x3, 512; xor.b32 %r12, %r12, 1; add.u32 %r10, %r10, 1;
    setp.lt.u32 %p, %r10, 5; @%p bra PRODUCE;
    bra END;
    CONSUME:
    mbarrier.try_wait.parity.shared.b64 %p, [%r5], %r11;
    @!%p bra CONSUME;
    ld.shared.u32 %r9, [%r2-512]; mad.lo.u32 %s, %s, 3, %r9;
    mbarrier.arrive.shared.b64 _, [%r5+8];
    xor.b32 %r11, %r11, 1; add.u32 %r10, %r10, 1;
    setp.lt.u32 %p, %r10, 5; @%p bra CONSUME;
    END:
"""


@both_modes
def test_a_producer_and_its_consumers(mode):
    for seed in range(4):
        out, findings = outcome(RING, threads=64, mode=mode, seed=seed)
        expected = np.zeros(32, np.int64)
        for stage in range(5):
            expected = expected * 3 + np.arange(1, 129, 4) + 128 * stage
        assert not findings and out[32:].tolist() == expected.tolist()


@both_modes
@pytest.mark.parametrize(
    ("gone", "expected"),
    [
        ("mbarrier.try_wait.parity.shared.b64 %p, [%r5+8], %r12;\n    @!%p bra PRODUCE;", None),
        ("mbarrier.try_wait.parity.shared.b64 %p, [%r5], %r11;\n    @!%p bra CONSUME;", None),
        ("mbarrier.arrive.shared.b64 _, [%r5+8];", None),
    ],
)
def test_a_missing_step_of_the_ring_is_found(gone, expected, mode):
    try:
        got = outcome(RING.replace(gone, "\n" * gone.count("\n")), threads=64, mode=mode)[1]
    except EmulationError as error:
        got = str(error)
    assert got == expected if expected else got


SEND = """add.u32 %r7, %r0, 100; mov.u32 %r8, buf; shl.b32 %r9, %r0, 2; add.u32 %r8, %r8, %r9;
    st.shared.u32 [%r8], %r7;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @!%q bra WRITTEN;
    cp.async.bulk.global.shared::cta.bulk_group [%x3], [%r6], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    WRITTEN:
    bar.sync 0;
    st.shared.u32 [%r8], 7;
"""


@both_modes
def test_a_tile_is_sent(mode):
    a = np.zeros(64, np.uint32)
    assert outcome(SEND, a, threads=64, mode=mode)[1] == []
    assert a.tolist() == list(range(100, 164))


@both_modes
@pytest.mark.parametrize(
    ("gone", "expected"),
    [
        ("fence.proxy.async.shared::cta;", [("async-dirty", 6)]),
        ("cp.async.bulk.wait_group.read 0;", [("async", 6), ("async", 11)]),
        ("cp.async.bulk.commit_group;", [("async", 6), ("async", 11)]),
    ],
)
def test_a_tile_is_sent_badly(gone, expected, mode):
    assert outcome(SEND.replace(gone, ""), np.zeros(64, np.uint32), threads=64, mode=mode)[1] == expected


def test_reading_is_done_before_writing():
    """After wait_group.read the tile may change, but where it goes to may not be read yet."""
    body = SEND + "@%q ld.global.u32 %s, [%x3];\n"
    assert outcome(body, np.zeros(64, np.uint32), threads=64)[1] == [("async", 12)]
    out, findings = outcome(body.replace("group.read", "group"), np.zeros(64, np.uint32), threads=64)
    assert not findings and out[0] == 100


def test_prefetches_move_nothing():
    body = """prefetch.global.L2 [%x1];
    cp.async.bulk.prefetch.L2.global [%x3], 4096;
    cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%x3, {%r0, %r0}];
    ld.global.u32 %s, [%x1];
    """
    assert outcome(body)[1] == []


def test_late_copies_happen_even_if_nobody_waits():
    a = np.zeros(64, np.uint32)
    outcome(SEND.replace("cp.async.bulk.wait_group.read 0;", ""), a, threads=64)
    assert set(a) == {7}


ORDERS = {
    # two copies of words 0 and 1 to one place, in whose order nothing puts them: waited for together ...
    "of a group": """cp.async.ca.shared.global [%r2], [%x3], 4;
        cp.async.ca.shared.global [%r2], [%x3+4], 4;
        cp.async.wait_all; ld.shared.u32 %s, [%r2];
    """,
    # ... at an mbarrier, where nobody else can run ...
    "at an mbarrier": """@%q mbarrier.init.shared.b64 [%r5], 1; @%q fence.mbarrier_init.release.cluster; bar.sync 0;
        @!%q bra W;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 32;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%x3], 16, [%r5];
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%x3+16], 16, [%r5];
        W: mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0; @!%p bra W; ld.shared.u32 %s, [%r6];
    """,
    # ... and by nobody
    "at the end": """mov.u64 %x9, 1; st.shared.v2.u64 [%r2], {%x9, %x9};
        mov.u64 %x9, 5; st.shared.v2.u64 [%r2+16], {%x9, %x9};
        fence.proxy.async; @!%q bra END; add.u64 %x4, %x3, 64;
        cp.async.bulk.global.shared::cta.bulk_group [%x4], [%r6], 16;
        cp.async.bulk.global.shared::cta.bulk_group [%x4], [%r6+16], 16;
        cp.async.bulk.commit_group;
        END:
    """,
}


@pytest.mark.parametrize("name", ORDERS)
def test_what_nothing_orders_happens_in_an_order_drawn_from_the_seed(name):
    """Every seed has its own, the same each time; so a kernel that depends on it shows, early or by its seeds."""
    text, threads = module(ORDERS[name]), 1

    def result(mode: str, seed: int) -> int:
        out, a = np.zeros(threads, np.uint32), np.arange(1, 1025, dtype=np.uint32)
        run_text(text, out, a, threads=threads, mode=mode, seed=seed)
        return int(a[16] if name == "at the end" else out[0])

    late = [result("late", seed) for seed in range(12)]
    assert late == [result("late", seed) for seed in range(12)]
    assert len(set(late)) == 2 and len({result("early", seed) for seed in range(3)}) == 1
    assert {kind for kind, _ in outcome(ORDERS[name], threads=threads)[1]} == {"async"}


STEPS = {
    "copy": "cp.async.ca.shared.global [%r2+{0}], [%x1+{1}], 4;",
    "zero": "cp.async.ca.shared.global [%r2+{0}], [%x1+{1}], 4, 0;",
    "store": "st.shared.u32 [%r2+{0}], {1};",
    "load": "ld.shared.u32 %r9, [%r2+{0}]; mad.lo.u32 %s, %s, 31, %r9;",
    "give": "st.global.u32 [%x1+{0}], {1};",
    "commit": "cp.async.commit_group;",
    "wait": "cp.async.wait_group {2};",
    "all": "cp.async.wait_all;",
}
steps = st.tuples(st.sampled_from(list(STEPS)), *[st.integers(0, 3)] * 3)


@pytest.mark.full
@given(st.lists(steps, max_size=14), st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_programs_without_findings_mean_the_same_early_and_late(program, seed):
    """And what is found does not depend on when copies happen."""
    zeros = "mov.u32 %r9, 0; st.shared.v4.u32 [%r2], {%r9, %r9, %r9, %r9};\n"
    lines = [STEPS[name].format(4 * first, 4 * second, third) for name, first, second, third in program]
    outcomes = []
    for mode, drawn in (("early", 0), ("late", 0), ("late", seed)):
        a = np.arange(1, 1025, dtype=np.uint32)
        out, findings = outcome(zeros + "\n".join(lines) + "\n", a, mode=mode, seed=drawn)
        outcomes.append((findings, [] if findings else out.tolist(), [] if findings else a.tolist()))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_findings_survive_a_fault():
    body = "cp.async.ca.shared.global [%r2], [%x1], 4;\nld.shared.u32 %s, [%r2];\nst.shared.u32 [%r2+4096], %s;\n"
    with pytest.raises(MemoryFault, match=r"(?s)out of bounds.*found before that: async: k\.ptx"):
        outcome(body)
