"""ldmatrix, stmatrix, movmatrix: what they refuse, and what the checks see of them. (Results: tests/golden.)"""

import numpy as np
import pytest

from ptxlab.errors import Deadlock, EmulationError, MemoryFault
from tests.support.small_kernels import STORE, kernel_text, line_of, run_body, run_text

SHARED = ".shared .align 16 .b8 tile[512];"
ROWS = "mov.u32 %r0, %laneid; shl.b32 %r1, %r0, 4; mov.u32 %r2, tile; add.u32 %r2, %r2, %r1;\n"
FILL = "st.shared.v4.u32 [%r2], {%r0, %r0, %r0, %r0};\n"
LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%s, %r4, %r5, %r6}, [%r2];\n"


def module(body: str) -> str:
    return kernel_text(ROWS + body + STORE, outside=SHARED)


def test_every_lane_gets_its_pair_of_its_row():
    out = np.zeros(64, np.uint32)
    text = module("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r2];\n".join([FILL, "mov.u32 %s, %r3;\n"]))
    assert not run_text(text, out, threads=64, checks=["init"]).findings
    assert out.tolist() == [lane // 4 for lane in range(32)] * 2


def test_only_the_lanes_that_give_rows_need_addresses():
    body = FILL + "setp.ge.u32 %p, %r0, 8; @%p mov.u32 %r2, 7;\nldmatrix.sync.aligned.m8n8.x1.shared.b16 {%s}, [%r2];\n"
    run_text(module(body), np.zeros(32, np.uint32))
    with pytest.raises(MemoryFault, match=r"thread \(8,0,0\): address 0x7 is not a multiple of the 16 bytes"):
        run_text(module(body.replace("x1", "x2").replace("{%s}", "{%s, %r3}")), np.zeros(32, np.uint32))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("add.u32 %r2, %r2, 16;\n", MemoryFault, r"thread \(31,0,0\): 16 bytes at shared address 512"),
        ("setp.eq.u32 %p, %r0, 5; @%p ret;\n", EmulationError, "not all 32 threads of the warp are there"),
        ("setp.eq.u32 %p, %r0, 5; @%p bar.sync 1;\n", Deadlock, "waits for the rest of its warp"),
    ],
)
def test_ldmatrix_out_of_bounds_or_of_part_of_a_warp_is_refused(change, error, message):
    text = module(FILL + change + LOAD)
    with pytest.raises(error, match=message) as raised:
        run_text(text, np.zeros(32, np.uint32))
    assert f"k.ptx:{line_of(text, 'ldmatrix')}: " in str(raised.value)


def test_store_is_checked_like_a_store():
    store = "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r2], {%r0, %r1};\n"
    text = module(FILL + store)
    (finding,) = run_text(text, np.zeros(64, np.uint32), threads=64, checks=["race"]).findings
    assert finding.line == line_of(text, "stmatrix")
    with pytest.raises(MemoryFault, match="out of bounds"):
        run_text(module("add.u32 %r2, %r2, 256;\n" + store.replace("x2", "x4").replace("r1}", "r1, %r0, %r1}")),
            np.zeros(32, np.uint32))  # fmt: skip


def test_rows_of_another_warp_need_a_barrier():
    """Warp w fills rows 16 w ... for the other."""
    body = """mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 32; shl.b32 %r1, %r1, 3;
    mov.u32 %r2, tile; add.u32 %r2, %r2, %r1; mov.u32 %r3, %laneid; and.b32 %r3, %r3, 15;
    shl.b32 %r3, %r3, 4; add.u32 %r4, %r2, %r3;
    st.shared.v4.u32 [%r4], {%r3, %r3, %r3, %r3};
    BARRIER
    xor.b32 %r1, %r1, 256; mov.u32 %r2, tile; add.u32 %r2, %r2, %r1; add.u32 %r2, %r2, %r3;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%s, %r8}, [%r2];
    """
    text = kernel_text(body + STORE, outside=SHARED)
    out = np.zeros(64, np.uint32)
    assert not run_text(text.replace("BARRIER", "bar.sync 0;"), out, threads=64, checks=["race", "init"]).findings
    (finding,) = run_text(text.replace("BARRIER", ""), out, threads=64, checks=["race"]).findings
    assert (finding.kind, finding.line) == ("race", line_of(text, "ldmatrix"))


MOVE = "movmatrix.sync.aligned.m8n8.trans.b16 %s, %r0;\n"


def test_a_matrix_is_turned_over():
    """Element (i, j), which is 8 i + j, goes to (j, i); of every warp."""
    halves = (
        "mov.u32 %r0, %tid.x; shl.b32 %r0, %r0, 1; add.u32 %r1, %r0, 1; shl.b32 %r1, %r1, 16; or.b32 %r0, %r0, %r1;"
    )
    out = run_body(halves + MOVE, threads=64)
    elements = np.arange(128, dtype=np.uint16).reshape(2, 8, 8)
    assert np.array_equal(out.view(np.uint16).reshape(2, 8, 8), elements.swapaxes(1, 2))


def test_a_matrix_takes_a_whole_warp():
    absent = "mov.u32 %r0, %laneid; setp.eq.u32 %p, %r0, 5; @%p ret;\n"
    with pytest.raises(EmulationError, match="not all 32 threads of the warp are there"):
        run_body(absent + MOVE)
