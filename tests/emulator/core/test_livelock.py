"""Lanes that spin for ever: the emulator says where, soon, and does not take anything else for that."""

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.errors import ArgumentError, Deadlock, EmulationError
from tests.support.axes import both_modes
from tests.support.small_kernels import STORE, kernel_text, run_text

START = "ld.param.u64 %x1, [out]; mov.u32 %r0, %tid.x; mov.u32 %r5, buf;\n"
POLL = "ld.volatile.global.u32 %r1, [%x1];\nsetp.eq.u32 %p, %r1, 0;\n"


def outcome(body: str, threads: int = 32, blocks: int = 1, **options) -> emulator.Result:
    text = kernel_text(START + body + STORE, outside=".shared .align 8 .b8 buf[8];")
    return run_text(text, np.zeros(threads * blocks, np.uint32), threads=threads, blocks=blocks, **options)


def test_a_livelock_names_spinning_and_waiting_threads() -> None:
    body = f"setp.ne.u32 %p, %r0, 5;\n@%p bra B;\nL: {POLL}@%p bra L;\nB: bar.sync 0;\n"
    with pytest.raises(Deadlock) as raised:
        outcome(body)
    first, second, *further_lines = str(raised.value).split("\n")[1:]
    assert "k.ptx:11: `L: ld.volatile.global.u32" in first and first.endswith("thread (5,0,0) spins")
    assert "k.ptx:14: `B: bar.sync 0`" in second and second.endswith("all threads of its block at barrier 0")
    assert not further_lines


@pytest.mark.default_cases("branch-early", "store-early")
@both_modes
@pytest.mark.parametrize(
    "loop",
    ["L: bra L;", "L: bar.sync 0;\nbra L;", "L: mov.u32 %r3, 7;\nst.volatile.global.u32 [%x1+4], %r3;\nbra L;",
     "L: atom.global.cas.b32 %r1, [%x1], 5, 1;\nsetp.ne.u32 %p, %r1, 5;\n@%p bra L;"],
    ids=["branch", "barrier", "store", "lock"],
)  # fmt: skip
def test_loops_in_which_nothing_changes(loop: str, mode: str) -> None:
    with pytest.raises(Deadlock, match=r"threads spin on what no other will change\n  k.ptx:(9|10): .* spins$"):
        outcome(loop + "\nret;", threads=2, mode=mode)


def test_who_waits_at_an_mbarrier_is_asked_first() -> None:
    """It may take "not yet" for an answer, and end what the others spin on."""
    body = f"""setp.ne.u32 %q, %r0, 0; @!%q mbarrier.init.shared.b64 [%r5], 2;
    @%q bra L;
    mbarrier.try_wait.parity.shared.b64 %p, [%r5], 0;
    mov.u32 %s, 1; st.volatile.global.u32 [%x1], %s; ret;
    L: {POLL}@%p bra L;
    ret;
    """
    outcome(body)


def test_long_loops_run_to_their_end() -> None:
    """Though lanes stand at the same places: once with a counter in a register, once with one in memory."""
    assert outcome("mov.u32 %r1, 0;\nL: add.u32 %r1, %r1, 1; setp.lt.u32 %p, %r1, 12000;\n@%p bra L;\n").steps > 36_000
    body = "L: ld.shared.u32 %r1, [%r5]; add.u32 %r1, %r1, 1; st.shared.u32 [%r5], %r1;\n"
    body += "setp.lt.u32 %p, %r1, 4000; mov.u32 %r1, 0; @%p bra L;\n"
    start = "mov.u32 %r1, 0; st.shared.u32 [%r5], %r1;\n"
    assert outcome(start + body, threads=1).steps > 24_000


@pytest.mark.full
def test_a_flag_that_comes_late_is_waited_for() -> None:
    """The thread that sets it counts for long in registers of its own, and stands at higher code."""
    body = f"""setp.eq.u32 %q, %r0, 1; @%q bra COUNT;
    L: {POLL}@%p bra L;
    bra END;
    COUNT: add.u32 %r2, %r2, 1; setp.lt.u32 %p, %r2, 8000; @%p bra COUNT;
    mov.u32 %s, 1; st.volatile.global.u32 [%x1], %s;
    END: ret;
    """
    outcome("mov.u32 %r2, 0;\n" + body, threads=2)


def test_the_number_of_steps_is_of_a_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "mov.u32 %r1, 0;\nL: add.u32 %r1, %r1, 1; setp.lt.u32 %p, %r1, 100;\n@%p bra L;\n"
    monkeypatch.setattr("ptxlab.emulator.launch.WAVE_LANES", 32)
    assert outcome(body, blocks=4, max_steps=400).steps > 1200
    with pytest.raises(EmulationError, match=r"still running after 200 steps: k.ptx:10: .*; max_steps allows more"):
        outcome(body, blocks=4, max_steps=200)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "100"])
def test_max_steps_must_be_a_positive_integer(wrong) -> None:
    with pytest.raises(ArgumentError, match=r"max_steps: has to be a positive integer \(got "):
        outcome("", max_steps=wrong)
