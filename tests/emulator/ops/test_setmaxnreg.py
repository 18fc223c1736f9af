"""setmaxnreg: what it may not be asked for. And instructions that change nothing here."""

import numpy as np
import pytest

from ptxlab.errors import EmulationError, SourceError
from tests.support.small_kernels import kernel_text, run_body, run_text


def execute(body: str, threads: int = 384, directives: str = "") -> None:
    start = "mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 7; setp.eq.u32 %p, %r1, 0; shr.u32 %r2, %r0, 5;\n"
    run_text(kernel_text(start + body + "\nret;", "", directives=directives), threads=threads, blocks=2)


SPLIT = """@!%p bra CONSUMER;
setmaxnreg.dec.sync.aligned.u32 {}; bra END;
CONSUMER: setmaxnreg.inc.sync.aligned.u32 {};
END:"""


@pytest.mark.parametrize("counts", [(24, 232), (24, 240), (40, 232)])
def test_a_split_that_fits(counts: tuple[int, int]) -> None:
    execute(SPLIT.format(*counts))


@pytest.mark.parametrize(
    ("body", "threads", "directives", "message"),
    [
        (SPLIT.format(24, 248), 384, "",
         r"the block's warps then have 66560 registers, more than the 64512, at most 168"),
        (SPLIT.format(48, 232), 384, ".maxntid 384",
         r"have 65536 registers, more than the 64512, at most 168 per thread"),
        (SPLIT.format(24, 120), 384, ".maxntid 384\n.minnctapersm 2", r"more than the 30720, at most 80 per thread"),
        ("setmaxnreg.inc.sync.aligned.u32 160;\nsetmaxnreg.inc.sync.aligned.u32 152;", 128, "",
         r"k\.ptx:.* the warp has 160 registers per thread, so this is no increase"),
        ("setmaxnreg.dec.sync.aligned.u32 176;", 128, ".maxnreg 168", "has 168 .* this is no decrease"),
        ("setp.eq.u32 %q, %r2, 2; @%q ret; setmaxnreg.dec.sync.aligned.u32 24;", 128, "",
         r"thread \(64,0,0\): not all warps of the warp group execute this"),
        ("setp.eq.u32 %q, %r2, 0; @%q bra A; setmaxnreg.dec.sync.aligned.u32 32; bra B;\n"
         "A: setmaxnreg.dec.sync.aligned.u32 32;\nB: setmaxnreg.inc.sync.aligned.u32 40;", 128, "",
         r"`?setmaxnreg\.dec\S* 32.*: not all warps of the warp group execute this"),
        ("setp.eq.u32 %q, %r0, 5; @%q ret; setmaxnreg.dec.sync.aligned.u32 24;", 128, "", "not all 32 threads"),
    ],
)  # fmt: skip
def test_a_split_that_does_not(body: str, threads: int, directives: str, message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        execute(body, threads, directives)


@pytest.mark.parametrize("count", ["16", "260", "100", "%r0"])
def test_invalid_numbers_of_registers_are_refused(count: str) -> None:
    with pytest.raises(SourceError, match="a multiple of 8 from 24 to 256"):
        execute(f"setmaxnreg.dec.sync.aligned.u32 {count};")


def test_waiting_for_other_grids_and_for_time_is_over_at_once() -> None:
    body = "griddepcontrol.wait; griddepcontrol.launch_dependents; nanosleep.u32 1000; mov.u32 %s, 7;"
    assert (run_body(body) == np.full(32, 7)).all()
