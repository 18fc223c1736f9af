"""Sectors of global memory: touched against needed, per instruction."""

import numpy as np
import pytest

from tests.support.small_kernels import STORE, kernel_text, line_of, run_text

PARAMS = ".param .u64 out, .param .u64 a"
OUTSIDE = ".shared .align 128 .b8 buf[2048];"


def sectors(access: str, stride: int, threads: int = 64, guard: str = "") -> tuple[int, int, int]:
    """Return (requests, sectors, needed) of an access at `stride` bytes per thread."""
    body = f"""mov.u32 %r0, %tid.x; ld.param.u64 %x1, [a]; mul.wide.u32 %x2, %r0, {stride}; add.u64 %x1, %x1, %x2;
    mov.u32 %s, 0; mov.u32 %r2, buf; {guard}
{access}
"""
    text = kernel_text(body + STORE, PARAMS, OUTSIDE)
    launch = run_text(text, np.zeros(threads, np.uint32), np.zeros(16384, np.uint32), threads=threads, count_banks=True)
    accesses = [a for a in launch.sectors if a.line == line_of(text, access)]
    assert all(a.path == "k.ptx" and a.text == access.rstrip(";") for a in accesses)
    return (accesses[0].requests, accesses[0].sectors, accesses[0].needed) if accesses else (0, 0, 0)


@pytest.mark.parametrize(
    ("access", "stride", "per_warp"),
    [
        ("ld.global.u32 %r4, [%x1];", 4, (4, 4)),
        ("ld.global.u32 %r4, [%x1];", 8, (8, 4)),
        ("ld.global.u32 %r4, [%x1];", 128, (32, 4)),
        ("ld.global.u32 %r4, [%x1];", 0, (1, 1)),
        ("ld.u32 %r4, [%x1];", 64, (32, 4)),  # generic
        ("ld.global.u8 %r4, [%x1];", 1, (1, 1)),
        ("ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%x1];", 16, (16, 16)),
        ("ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%x1];", 64, (32, 16)),
        ("st.global.u32 [%x1], %r0;", 32, (32, 4)),
        ("red.global.add.u32 [%x1], 1;", 4, (4, 4)),
        ("cp.async.ca.shared.global [%r2], [%x1], 4; cp.async.wait_all;", 16, (16, 4)),
        ("ld.shared.u32 %r4, [%r2];", 4, (0, 0)),
    ],
)
def test_requests_and_sectors_of_an_access(access, stride, per_warp):
    assert sectors(access, stride) == (2 if per_warp[0] else 0, 2 * per_warp[0], 2 * per_warp[1])


def test_lanes_that_take_no_part():
    assert sectors("@%p ld.global.u32 %r4, [%x1];", 32, guard="setp.lt.u32 %p, %r0, 40;") == (2, 40, 5)


def test_nothing_is_counted_unless_asked():
    assert run_text(kernel_text(STORE), np.zeros(32, np.uint32)).sectors == ()
