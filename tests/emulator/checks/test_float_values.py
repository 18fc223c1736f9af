"""The check "float": what arises is reported, at its first place; what follows from it, and what was there, is not."""

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.emulator.options import checks_of
from tests.support.small_kernels import HEADER, STORE, kernel_text, line_of, run_text

LANE = "mov.u32 %r0, %tid.x; cvt.rn.f32.u32 %f0, %r0; ld.param.u64 %x1, [a]; mul.wide.u32 %x2, %r0, 4;\n"
READ = LANE + "add.u64 %x1, %x1, %x2; ld.global.f32 %f1, [%x1]; mov.u32 %s, 0;\n"
VALUES = np.arange(32, dtype=np.float32)


def findings(body: str, a: np.ndarray = VALUES, checks=("float",), threads: int = 32, blocks: int = 1) -> list:
    text = kernel_text(READ + body + STORE, ".param .u64 out, .param .u64 a")
    launch = run_text(text, np.zeros(threads * blocks, np.uint32), a, threads=threads, blocks=blocks, checks=checks)
    return [(f.kind, text.split("\n")[f.line - 1].strip(), f.thread[0], f.count, f.message) for f in launch.findings]


@pytest.mark.parametrize(
    ("line", "kind", "thread", "count", "message"),
    [
        ("div.rn.f32 %f2, %f1, %f1;", "nan", 0, 1, "makes a NaN of 0, 0,"),
        ("sqrt.rn.f32 %f2, %f3;", "nan", 1, 31, "makes a NaN of -1,"),
        ("rcp.approx.f32 %f2, %f1;", "infinity", 0, 1, "makes an infinity of 0,"),
        ("lg2.approx.f32 %f2, %f1;", "infinity", 0, 1, "makes an infinity of 0,"),
        ("fma.rn.f32 %f2, %f1, 0f7F7FFFFF, %f1;", "infinity", 2, 30, "makes an infinity of 2, 3.40282e+38, 2,"),
        ("ex2.approx.f32 %f2, %f4;", "subnormal", 13, 2, "makes a subnormal number of -130,"),  # of -130 and -140
        ("mul.f32 %f2, %f1, 0f00400000;", None, 0, 0, ""),  # a subnormal operand
        ("cvt.rn.f16.f32 %h0, %f5;", "overflow", 7, 25, "makes an infinity of 70000,"),
        ("cvt.rn.f16x2.f32 %r3, %f1, %f5;", "overflow", 7, 25, "makes an infinity of 7, 70000,"),
        ("cvt.rn.bf16x2.f32 %r3, %f1, %f5;", None, 0, 0, ""),
        ("add.f16x2 %r3, %r4, %r5;", "overflow", 0, 32, "makes an infinity of (0, 65504), (1, 65504),"),
        ("cvt.rn.f16.u32 %h0, 70000;", "overflow", 0, 32, "makes an infinity of 70000,"),
    ],
)
def test_nan_infinity_overflow_and_subnormals_are_found(line, kind, thread, count, message):
    prepare = "neg.f32 %f3, %f1; mul.f32 %f4, %f1, 0fC1200000; mul.f32 %f5, %f1, 0f461C4000;\n"  # -x, -10 x, 10000 x
    prepare += "mov.b32 %r4, 0x7BFF0000; mov.b32 %r5, 0x7BFF3C00;\n"
    expected = [(kind, line, thread, count, message)] if kind else []
    assert findings(prepare + line + "\n") == expected


def test_what_follows_is_not_reported():
    """An infinity that is loaded or a constant is no finding, nor what it makes; infinity - infinity is one."""
    a = VALUES.copy()
    a[3], a[5] = np.inf, np.nan
    softmax = "max.f32 %f2, %f1, 0fFF800000; sub.f32 %f3, 0fFF800000, %f0; ex2.approx.f32 %f4, %f3;\n"
    assert not findings(softmax + "add.f32 %f5, %f1, %f1; fma.rn.f32 %f6, %f1, 0f3F000000, %f5;\n", a)
    ((kind, line, thread, count, _),) = findings("sub.f32 %f3, %f1, %f1; add.f32 %f4, %f3, %f3;\n", a)
    assert (kind, line, thread, count) == ("nan", "sub.f32 %f3, %f1, %f1; add.f32 %f4, %f3, %f3;", 3, 1)


def test_the_first_place_of_each_kind():
    """Later ones of a kind are not told, in the same wave or another one; what a guard leaves out does not count."""
    body = "setp.ne.u32 %p, %r0, 0;\n@%p rcp.approx.f32 %f2, %f1;\ndiv.rn.f32 %f2, %f1, %f1;\n"
    reports = findings(body + "sqrt.rn.f32 %f3, 0fBF800000;\nrcp.approx.f32 %f4, 0f00000000;\n", blocks=2)
    assert [finding[:2] for finding in reports] == [
        ("nan", "div.rn.f32 %f2, %f1, %f1;"),
        ("infinity", "rcp.approx.f32 %f4, 0f00000000;"),
    ]
    assert reports[0][3] == 2


def test_the_check_float_runs_only_on_request():
    body = "div.rn.f32 %f2, %f1, %f1;\n"
    assert not findings(body, checks=checks_of("--check", "all"))
    assert findings(body, checks=checks_of("--check", "all,float"))
    assert checks_of("--check", "all, float") == emulator.CHECKS | {"float"}


def test_a_sum_in_memory():
    a = np.full(32, 3e38, np.float32)
    ((kind, _, thread, count, message),) = findings("red.global.add.f32 [%x1], %f1;\n", a.copy())
    assert (kind, thread, count) == ("infinity", 0, 32) and message == "makes an infinity of 3e+38, 3e+38,"
    assert not findings("red.global.add.f32 [%x1], 0f3F800000;\n", a.copy())
    vector = "and.b64 %x1, %x1, -8;\nred.global.add.v2.f32 [%x1], {0f00000000, %f1};\n"  # two lanes each
    ((kind, _, thread, count, message),) = findings(vector, a)
    assert (kind, thread, message) == ("infinity", 0, "makes an infinity of 3e+38, 3e+38,")


@pytest.mark.parametrize("d", ["f32", "f16"])
def test_products(d):
    """65504 * 65504 * 16 fits f32, not f16; an infinity in one lane's operand makes no finding in another lane."""
    wide = "{%r4, %r5, %r6, %r7}" if d == "f32" else "{%r4, %r5}"
    mma = f"mma.sync.aligned.m16n8k16.row.col.{d}.f16.f16.{d}"
    body = f"{mma} {wide}, {{%a, %a, %a, %a}}, {{%a, %a}}, {wide};"
    text = f"""{HEADER}.visible .entry k(.param .u64 a) {{
.reg .b32 %a, %r<8>, %t; .reg .b64 %x<3>;
ld.param.u64 %x0, [a]; mov.u32 %t, %tid.x; mul.wide.u32 %x1, %t, 4; add.u64 %x0, %x0, %x1; ld.global.u32 %a, [%x0];
{body}
{body}
ret; }}"""

    def kinds(a: int) -> list:
        values = np.zeros(32, np.uint32)
        values[9] = a
        return [(f.kind, f.line) for f in run_text(text, values, checks=["float"]).findings]

    assert kinds(0x7BFF7BFF) == ([] if d == "f32" else [("overflow", line_of(text, mma))])
    assert kinds(0x7C007C00) == [("nan", line_of(text, mma))]  # infinity * 0
    assert kinds(0x7E007E00) == []
    assert kinds(0x3C003C00) == []
