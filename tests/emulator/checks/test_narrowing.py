"""The check "narrow": integers that lose high bits in stores, conversions and products."""

from pathlib import Path

import numpy as np
import pytest

import ptxlab
from ptxlab import Launch, emulator
from tests.support.small_kernels import STORE, kernel_text, run_text

# %r1 is -64, -60 .. 60; %x0 and %x1 are where each thread stores a byte, and a word.
START = """mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 2; sub.s32 %r1, %r1, 64; mov.u32 %s, 0; ld.param.u64 %x0, [a];
cvt.u64.u32 %x2, %r0; add.u64 %x0, %x0, %x2; ld.param.u64 %x1, [out]; mov.u32 %r3, 1000;
"""


def findings(body: str, dtype: type, checks: str = "narrow") -> list[tuple[int, int, str]]:
    """First thread, number of threads and message of each finding."""
    text = kernel_text(START + body + STORE, ".param .u64 out, .param .u64 a")
    outcome = run_text(text, np.zeros(32, np.uint32), np.zeros(32, dtype), threads=32, checks=checks)
    return [(finding.thread[0], finding.count, finding.message) for finding in outcome.findings]


@pytest.mark.parametrize(
    ("body", "dtype", "report"),
    [
        ("mul.lo.s32 %r2, %r1, 2; st.global.u8 [%x0], %r2;", np.int8, None),
        ("mul.lo.s32 %r2, %r1, 3; st.global.u8 [%x0], %r2;", np.int8, (0, 11, "-192 does not fit int8")),
        ("st.global.u8 [%x0], %r1;", np.uint8, (0, 16, "-64 does not fit uint8")),
        ("add.s32 %r2, %r1, 200; st.global.u8 [%x0], %r2;", np.int8, (0, 32, "136 does not fit int8")),
        ("add.s32 %r2, %r1, 200; st.global.u8 [%x0], %r2;", np.uint8, (30, 2, "256 does not fit uint8")),
        ("add.s32 %r2, %r1, 200; st.global.u8 [%x0], %r2;", np.bool_, (30, 2, "256 does not fit 8 bits")),
        ("cvt.u16.u32 %h0, %r1; st.global.u8 [%x0], %h0;", np.int8, None),
        ("mul.lo.s32 %r2, %r1, %r3; cvt.u16.u32 %h0, %r2;", np.int8, (0, 8, "-64000 does not fit 16 bits")),
        ("mul.lo.s32 %r2, %r1, %r3; cvt.sat.s16.s32 %h0, %r2;", np.int8, None),
        ("mul.wide.s32 %x3, %r1, 0x40000000; cvt.u32.u64 %r2, %x3;", np.int8, (0, 31, "does not fit 32 bits")),
        ("mul.lo.s32 %r2, %r1, 0x2000000;", np.int8, None),
        ("mul.lo.s32 %r2, %r1, 0x2222222;", np.int8, (0, 1, "-64 * 35791394 = -2290649216 does not fit s32")),
        ("mad.lo.s32 %r2, %r1, 0x2000000, -1;", np.int8, (0, 1, "-64 * 33554432 + -1 = -2147483649 does")),
        ("mul.lo.u32 %r2, %r0, 0x8421085;", np.int8, (31, 1, "31 * 138547333 = 4294967323 does not fit u32")),
        ("shl.b32 %r2, %r1, 30; and.b32 %r2, %r2, 255;", np.int8, None),
    ],
)
def test_a_number_that_does_not_fit(body: str, dtype: type, report: tuple[int, int, str] | None) -> None:
    expected = [report] if report else []
    reports = findings(body, dtype)
    assert [(thread, count) for thread, count, _ in reports] == [(thread, count) for thread, count, _ in expected]
    assert all(part in message for (_, _, message), (_, _, part) in zip(reports, expected, strict=True))


def test_the_check_narrow_runs_only_on_request() -> None:
    body = "mul.lo.s32 %r2, %r1, %r3; st.global.u8 [%x0], %r2;"
    assert findings(body, np.int8, "all") == []
    assert len(findings(body, np.int8, "all,narrow")) == 1


def test_a_line_that_wraps_on_purpose() -> None:
    line = "mul.lo.u32 %r2, %r0, 0x9E3779B1;"
    assert len(findings(line, np.int8)) == 1
    assert findings(f"{line}  // @wraps", np.int8) == []


SOURCE = """__device__ unsigned hash(unsigned x) { return x * 0x9E3779B1u; }
extern "C" __global__ void k(signed char* y, unsigned* z, const int* x) {
    int i = threadIdx.x;
    y[i] = (signed char)x[i];
    y[i + 32] = (signed char)x[i];  // @wraps
    z[i] = hash(x[i]);  // a hash: @wraps
    z[i + 32] = hash(x[i] + 1);
    y[i + 64] = (x[i] + 64) & 0xff;
}
"""


def test_lines_of_cuda(tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text(SOURCE)
    arguments = [np.zeros(96, np.int8), np.zeros(64, np.uint32), np.arange(100, 132, dtype=np.int32)]
    outcome = ptxlab.load(tmp_path / "k.cu").launch(
        arguments, Launch((1, 1, 1), (32, 1, 1)), backend="emulator", checks="narrow"
    )
    assert outcome is not None
    assert [(f.kind, f.line, f.callers and f.callers[0][1]) for f in outcome.findings] == [
        ("narrow", 4, ()),
        ("narrow", 1, 7),
    ]
    assert "narrow" not in emulator.CHECKS
