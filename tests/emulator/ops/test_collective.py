"""What a warp's lanes and a block's warps may ask of each other: refused or found by line where it cannot be."""

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.errors import EmulationError, PtxlabError, SourceError, UnknownInstruction
from tests.support.small_kernels import STORE, cuda_to_ptx, kernel_text, run_text

START = "mov.u32 %r0, %tid.x; setp.lt.u32 %p, %r0, 32;\n"


def outcome(body: str, threads: int = 64) -> emulator.Result:
    return run_text(kernel_text(START + body + STORE), np.zeros(threads, np.uint32), threads=threads, checks=["init"])


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("bar.sync 16;", r"a block has barriers 0 to 15 \(got 16\)"),
        ("bar.red.popc.u32 %s, 31, %p;", r"a block has barriers 0 to 15 \(got 31\)"),
        ("bar.sync 1, 50;", r"the number of threads has to be a multiple of 32 \(got 50\)"),
        ("bar.arrive 1, 0;", r"the number of threads has to be a multiple of 32 \(got 0\)"),
        ("bar.arrive 1;", "bar.arrive takes a barrier and a number of threads"),
        ("barrier.sync 1, 64, 64;", "barrier.sync takes a barrier and, maybe, a number of threads"),
    ],
)
def test_invalid_barrier_operands_are_refused(body: str, problem: str) -> None:
    with pytest.raises(SourceError, match=rf"k.ptx:9: {problem}: `bar"):
        outcome(body)


@pytest.mark.parametrize(
    ("body", "thread", "problem"),
    [
        ("add.u32 %r1, %r0, 16;\nbar.sync %r1;", 0, r"a block has barriers 0 to 15 \(got 79\)"),
        ("mov.u32 %r1, 50;\nbar.sync 1, %r1;", 0, r"the number of threads has to be a multiple of 32 \(got 50\)"),
        ("@%p bar.sync 1, 64;\n@!%p bar.sync 1, 96;", 32, "96 threads are to meet at barrier 1, but 64 at line 9,"),
        ("@%p bar.arrive 1, 96;\n@!%p bar.sync 1;", 32, "all threads are to meet at barrier 1, but 96 at line 9,"),
        ("selp.u32 %r1, 64, 96, %p;\nbar.sync 1, %r1;", 32, "96 threads are to meet at barrier 1, but 64 at line 10"),
    ],
)  # fmt: skip
def test_contradicting_barrier_operands_are_refused(body: str, thread: int, problem: str) -> None:
    place = rf"^k.ptx:10: `.*`: block \(0,0,0\) thread \({thread},0,0\) .*: "
    with pytest.raises(EmulationError, match=place + problem):
        outcome(body)


def test_all_threads_are_as_many_as_there_are() -> None:
    outcome("@%p bar.sync 1;\n@!%p bar.sync 1, 64;\nbar.sync 15, 64;")


# Lanes 0 to 15 alone, the others have ended; a mask, offset and segments of 32 or 16
ALONE = "setp.ge.u32 %q, %r0, 16;\n@%q ret;\nshfl.sync.down.b32 %s, %r0, 8, SEGMENTS, MASK;"


@pytest.mark.parametrize(("segments", "mask", "lanes"), [(0x1F, "0xffff", 8), (0x1F, "-1", 8), (0x100F, "0xffff", 0)])
def test_a_shuffle_from_a_lane_that_does_not_take_part(segments: int, mask: str, lanes: int) -> None:
    findings = outcome(ALONE.replace("SEGMENTS", str(segments)).replace("MASK", mask), threads=32).findings
    expected = [("uninitialised", 11, (8, 0, 0), lanes)] * (lanes > 0)
    assert [(f.kind, f.line, f.thread, f.count) for f in findings] == expected
    assert all(
        "takes the value of lane 16, which does not take part (members 0x0000ffff)" in f.message for f in findings
    )


def test_a_shuffle_by_a_lane_outside_its_mask() -> None:
    with pytest.raises(EmulationError, match=r"k.ptx:9: .*thread \(16,0,0\) and 15 more: the lane is not in its own"):
        outcome("shfl.sync.idx.b32 %s, %r0, 0, 31, 0xffff;", threads=32)


REDUCTION = """extern "C" __global__ void k(float* y, const float* x) {
    __shared__ volatile float s[64];
    int i = threadIdx.x;
    s[i] = x[i];
    __syncthreads();
    if (i < 32) { STEPS }
    if (i == 0) y[0] = s[0];
}"""
IN_STEP = "s[i] += s[i + {0}]; "
MET = "{{ float other = s[i + {0}]; __syncwarp(); s[i] += other; __syncwarp(); }} "


@pytest.mark.parametrize(("step", "accesses"), [(IN_STEP, ["ld.volatile", "st.volatile"] * 5), (MET, [])])
def test_a_volatile_reduction_relies_on_running_in_step(step: str, accesses: list[str]) -> None:
    """Five of its six steps rely on it: the first reads what lies behind the barrier of the block."""
    source = REDUCTION.replace("STEPS", "".join(step.format(32 >> i) for i in range(6)))
    x, y = np.arange(64, dtype=np.float32), np.zeros(1, np.float32)
    findings = run_text(cuda_to_ptx(source), y, x, threads=64, checks=emulator.CHECKS).findings
    assert y[0] == x.sum() and {f.kind for f in findings} <= {"race"}
    assert [f.text.split(".shared")[0] for f in sorted(findings, key=lambda f: f.line)] == accesses


WRONG = """
vote.sync %p, %q, -1;
vote.sync.pred %p, %q, -1;
vote.sync.any.pred %p, %q;
vote %p, %q;
vote.sync.any.b32 %p, %q, -1;
vote.sync.ballot.b32 %p, %q, -1;
shfl.sync %s, %r0, 1, 31, -1;
shfl.sync.b32 %s, %r0, 1, 31, -1;
shfl.sync.bfly.b32 %s, %r0, 1;
shfl.sync.bfly.b32 {%s, %r1, %r2}, %r0, 1, 31, -1;
shfl.sync.bfly.b32 [%x1], %r0, 1, 31, -1;
shfl.sync.bfly.b32 %s, %r0, 1, 31, -1, -1;
elect.sync %p;
elect.sync _|%p;
match.any.sync.b32 %s, %r0;
redux.sync.add.s32 %s, %r0;
redux.sync.add.u64 %x1, %x2, -1;
activemask %s;
activemask.b32;
bar.sync;
bar.sync {%r1, %r2};
bar.sync [%r1];
bar.warp.sync;
bar.warp.sync %p;
bar.red.popc.u32 %s, 1;
"""


@pytest.mark.parametrize("text", WRONG.strip().splitlines())
def test_operands_and_modifiers_that_cannot_be(text: str) -> None:
    with pytest.raises(PtxlabError, match=r"^k.ptx:9: [^\n]*$") as raised:
        outcome(text)
    assert isinstance(raised.value, SourceError | UnknownInstruction)
    assert "unpack" not in str(raised.value)
