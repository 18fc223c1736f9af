"""Launches as one sequence: each may begin while those before it still run."""

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.errors import ArgumentError

N = 64
WAIT, LOAD = "griddepcontrol.wait;", "ld.global.u32 %r2, [%rd1];"
LINES = (
    "ld.param.u64 %rd1, [source];",
    "ld.param.u64 %rd2, [target];",
    "mov.u32 %r1, %tid.x;",
    "mad.wide.u32 %rd1, %r1, 4, %rd1;",
    "mad.wide.u32 %rd2, %r1, 4, %rd2;",
    WAIT,
    LOAD,
    "add.u32 %r2, %r2, 1;",
    "st.global.u32 [%rd2], %r2;",
    "ret;",
)
HEADER = """.version 8.0
.target sm_90
.address_size 64
.visible .entry add1(.param .u64 source, .param .u64 target)
{
.reg .u32 %r<4>;
.reg .u64 %rd<4>;
"""
Lines = tuple[str, ...]
WITHOUT = tuple(line for line in LINES if line != WAIT)
LATE = (*WITHOUT[:6], WAIT, *WITHOUT[6:])  # the load is ahead of it
AHEAD = "read of byte 0 of argument 0 (source) ahead of griddepcontrol.wait: the kernel before may still write it,"


def launch(lines: Lines, source: np.ndarray, target: np.ndarray, *, programmatic: bool = True) -> None:
    """Launch a kernel that computes target = source + 1."""
    text = HEADER + "\n".join(lines) + "\n}\n"
    emulator.run(text, "add1", [source, target], grid=1, block=N, programmatic=programmatic, uninitialised=[1])


def buffers(number: int) -> list[np.ndarray]:
    """Make the buffers of a chain: the first is given, the others nobody has written."""
    return [np.arange(N, dtype=np.uint32), *(np.full(N, 0xCDCD, np.uint32) for _ in range(number - 1))]


def run(*links: Lines, begin: str = "early", programmatic: bool = True) -> tuple[emulator.Chain, list[np.ndarray]]:
    """Run kernels one after the other, each on what the one before has written; the first is launched plainly."""
    arrays = buffers(len(links) + 1)
    with emulator.chain(emulator.CHECKS, begin=begin) as chain:
        for i, lines in enumerate(links):
            launch(lines, arrays[i], arrays[i + 1], programmatic=programmatic and i > 0)
    return chain, arrays


def test_a_chain_that_waits_is_clean() -> None:
    chain, arrays = run(LINES, LINES, LINES)
    assert chain.findings == [] and chain.launches == ["add1"] * 3
    assert (arrays[3] == np.arange(N) + 3).all()


def test_what_is_read_ahead_of_a_wait_is_found_and_is_old() -> None:
    chain, arrays = run(LINES, LATE, LINES)
    (finding,) = chain.findings
    assert (finding.kind, finding.count, finding.message) == ("race", N, AHEAD)
    assert (arrays[2] == 0xCDCD + 1).all() and (arrays[3] == 0xCDCD + 2).all()


def test_a_launch_that_begins_late_sees_everything_and_is_found_all_the_same() -> None:
    chain, arrays = run(LINES, LATE, begin="late")
    assert [finding.message for finding in chain.findings] == [AHEAD]
    assert (arrays[2] == np.arange(N) + 2).all()


def test_a_missing_wait_is_found_twice() -> None:
    """The check finds the early accesses, and that the next kernel's wait would not be for those before it."""
    chain, _ = run(LINES, WITHOUT)
    first, *_, last = chain.findings
    assert first.message == AHEAD and "write to byte 0 of argument 1 (target) ahead" in chain.findings[1].message
    assert last.message.startswith("no thread executes griddepcontrol.wait: the next kernel would not wait for those")


def test_who_does_not_wait_lets_the_next_begin_too_soon() -> None:
    """The kernel between touches nothing of theirs: only that it does not wait is wrong."""
    arrays, unrelated = buffers(3), buffers(2)
    with emulator.chain({"race"}) as chain:
        launch(LINES, arrays[0], arrays[1], programmatic=False)
        launch(("ret;",), *unrelated)
        launch(LINES, arrays[1], arrays[2])
    assert len(chain.findings) == 1 and "no thread executes griddepcontrol.wait" in chain.findings[0].message


def test_a_buffer_of_two_kernels_before_is_behind_the_wait_too() -> None:
    arrays, unrelated = buffers(3), buffers(2)
    with emulator.chain({"race"}) as chain:
        launch(LINES, arrays[0], arrays[1], programmatic=False)
        launch(LINES, *unrelated)
        launch(LATE, arrays[1], arrays[2])
    assert [finding.message for finding in chain.findings] == [AHEAD]


def test_an_ordinary_launch_begins_when_all_before_it_have_ended() -> None:
    chain, arrays = run(LINES, WITHOUT, LATE, programmatic=False)
    assert chain.findings == [] and (arrays[3] == np.arange(N) + 3).all()


def test_views_of_a_buffer_are_that_buffer() -> None:
    whole, out = np.zeros(2 * N, np.uint32), np.zeros(N, np.uint32)
    with emulator.chain({"race"}) as chain:
        launch(LINES, np.arange(N, dtype=np.uint32), whole[N:], programmatic=False)
        launch(LATE, whole[:N], out)
        assert chain.findings == []
        launch(LATE, whole[N // 2 : N // 2 + N], out)
    assert len(chain.findings) == 1


@pytest.mark.parametrize("is_given", [False, True])
def test_what_nobody_has_written_stays_so(is_given: bool) -> None:
    """Half of the buffer is written by the first kernel; the second reads all of it."""
    source, between, target = buffers(3)
    half = (".reg .pred %p<2>;", *LINES[:3], "setp.ge.u32 %p1, %r1, 32;", "@%p1 ret;", *LINES[3:])
    with emulator.chain({"init"}, given=[between] if is_given else ()) as chain:
        launch(half, source, between, programmatic=False)
        launch(LINES, between, target)
    assert [(f.kind, f.count) for f in chain.findings] == ([] if is_given else [("uninitialised", N // 2)])


def test_outside_of_a_chain_nothing_is_remembered() -> None:
    source, between, target = buffers(3)
    launch(LINES, source, between)
    launch(LATE, between, target)
    assert (target == source + 2).all()


def test_bad_options_of_a_chain_are_refused() -> None:
    refused = r"begin: must be one of early, late \(got soon\)"
    with pytest.raises(ArgumentError, match=refused), emulator.chain((), begin="soon"):
        pass
    refused = "chain: must not begin inside of another"
    with emulator.chain(()), pytest.raises(ArgumentError, match=refused), emulator.chain(()):
        pass
    for name, bad in (("checks", {"nonsense"}), ("mode", "soon"), ("seed", -1)):
        keywords = {"checks": (), name: bad}
        with pytest.raises(ArgumentError, match=f"^{name}: "), emulator.chain(**keywords):
            pass
