"""Notes on lines that ptxas or a GPU treats otherwise than the PTX manual says."""

import re
from pathlib import Path

import numpy as np
import pytest

import ptxlab
from ptxlab import emulator
from ptxlab.emulator.front.quirks import notes_of
from ptxlab.hardware import quirks

WITH_FORMS = [quirk for quirk in quirks.load().values() if quirk.forms]
SOURCE = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out)
{{
.reg .b16 %h<10>; .reg .b32 %r<20>, %t; .reg .b64 %x<20>, %in, %out; .reg .pred %p<8>;
ld.param.u64 %out, [out];
mov.b64 %in, %out;
mov.u32 %t, %tid.x;
{}
ret;
}}
"""
WGMMA = "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%r1, %r2, %r3, %r4}"


def notes(lines: str) -> tuple[emulator.Note, ...]:
    """List the notes on these lines of a kernel."""
    return notes_of(emulator.parse(SOURCE.format(lines), "k.ptx").entries["k"])


@pytest.mark.parametrize("quirk", WITH_FORMS, ids=lambda quirk: quirk.name)
def test_each_program_has_a_note_of_its_quirk_alone(quirk: quirks.Quirk) -> None:
    assert {note.quirk for note in notes(quirk.program)} == {quirk.name}


@pytest.mark.parametrize(
    "lines",
    [
        "testp.normal.f32 %p1, %r0;",  # no guard
        "@%p0 set.eq.u32.f32 %r1, %r2, %r3;",
        "bfe.s32 %r1, %r2, 31, 4; bfe.u32 %r1, %r2, 32, 4;",
        "mov.b32 %r3, 4; mov.b32 %r3, 40; bfe.s32 %r1, %r2, %r3, 4;",  # of two, none is always the position
        "@%p0 mov.b32 %r3, 40; bfe.s32 %r1, %r2, %r3, 4;",
        "shl.b16 %h1, %h2, 65535; shl.b32 %r1, %r2, 65536;",
        "bfi.b64 %x1, %x2, %x3, 8, 4;",
        "ld.global.f64 %x1, [%in]; st.global.b64 [%out], %x1; ld.global.u64 %x2, [%in]; st.global.b32 [%out], %x2;",
        "ld.global.u64 %x1, [%in]; add.s32 %r1, %r2, %r3; sub.sat.s32 %r4, %r5, %r1;",  # a - (b + c)
        "cvt.rn.bf16.f32 %h1, %r1; cvt.rzi.s32.bf16 %r2, %h1;",  # what C++ makes
        "add.f16 %h1, %h2, %h3; max.NaN.xorsign.abs.f16 %h4, %h1, %h2;",
        "vadd.s32.s32.s32 %r1.h0, %r2, %r3, %r4; vadd.s32.s32.s32.sat %r1, %r2, %r3;",
        "vmad.u32.u32.u32.po %r1, %r2, %r3, %r4; vmad.s32.s32.s32.sat.shr7 %r1, -%r2, %r3, %r4;",
        "vmad.u32.u32.s32.sat %r1, %r2.b0, %r3, %r4; vmad.u32.s32.u32.sat %r1, %r2, -%r3.h1, %r4;",
        "lop3.and.b32 %r1|%p1, %r2, %r3, %r4, 128, %p2; setp.gt.u32 %p3, %r1, 0; setp.ne.u32 %p4, %r1, 1;",
        "lop3.b32 %r1, %r2, %r3, %r4, 128; setp.ne.u32 %p3, %r1, 0; clz.b32 %r5, %r1;",
        "lop3.or.b32 %r1|%p1, %r2, %r3, %r4, 128, %p2; mov.b64 %x1, {%r1, %r2}; clz.b64 %r5, %x1; mov.b64 %x2, %x1;",
        "set.eq.u32.u32 %r1, %r2, %r3; setp.eq.u32 %p1, %r1, -1; setp.lt.s32 %p2, %r1, 0; setp.lo.u32 %p3, %r1, 0;",
        "set.eq.u32.s16 %r1, %h2, %h3; setp.eq.u32 %p1, %r1, 1;",
        "set.eq.u32.f16x2 %r1, %r2, %r3; setp.ne.s32 %p1, %r1, 1;",
        "ld.global.b32 %r1, [%in]; mad.hi.u32 %r2, %r1, 3, %r1; mad.hi.u32 %r3, %r1, 3, %r1;",
        "ld.global.b32 %r1, [%in]; mad.hi.u32 %r2, %r1, 3, %r1; mad.hi.s32 %r3, %r1, 3, %r2;",
        "ld.global.b32 %r1, [%in]; mad.hi.u32 %r2, %r1, 3, %r1; add.u32 %r1, %r1, 1; mad.hi.u32 %r3, %r1, 3, %r2;",
        "rcp.approx.f32 %r1, %r2; rcp.approx.ftz.f32 %r3, %r1; div.approx.ftz.f32 %r4, %r3, %r1;",
        "red.shared::cluster.add.u64 [%r1], %x1; atom.shared::cluster.min.u32 %r1, [%r2], %r3;",
        "red.shared::cta.min.u64 [%r1], %x1; red.global.min.u64 [%x1], %x1;",
        f"{WGMMA}, %x1, %x2, %p1;\n{WGMMA}, %x1, %x3, %p1;",
        *(f"{WGMMA}, %x1, %x2, %p1;\n{between}\n{WGMMA}, %x1, %x2, %p1;"
          for between in ("wgmma.fence.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "@%p0 bra L; L:",
                          "add.s64 %x2, %x2, 2;")),
    ],
)  # fmt: skip
def test_no_note_beside_a_form(lines: str) -> None:
    assert notes(lines) == ()


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("comparison_of_set", "set.eq.u32.f32 %r1, %r2, %r3; setp.ne.s32 %p1|%p2, 1, %r1;"),
        ("comparison_of_set", "set.eq.s32.s64 %r1, %x2, %x3; mov.b32 %r2, 0; setp.gt.xor.u32 %p1, %r2, %r1, %p2;"),
        ("comparison_of_set", "set.eq.s32.f64 %r1, %x2, %x3; set.ge.f32.u32 %r2, %r1, 0;"),
        ("addend_of_mad_hi", "vmin2.u32.u32.u32 %r1.h0, %r2, %r3, %r4; mad.hi.u32 %r5, %r2, %r3, %r1;"),
        ("addend_of_mad_hi", "mov.b32 %r1, %t; mad.hi.cc.s32 %r2, %r1, 5, 6; mad.hi.cc.s32 %r3, %r1, 5, %t;"),
    ],
)  # fmt: skip
def test_other_forms_have_one_note(name: str, lines: str) -> None:
    assert [note.quirk for note in notes(lines)] == [name]


def test_a_wgmma_is_noted_as_equal_though_others_are_in_between() -> None:
    first, second = f"{WGMMA}, %x1, %x2, %p1;", f"{WGMMA}, %x1, %x3, %p1;"
    (note,) = notes(f"{first}\n{second}\nwgmma.commit_group.sync.aligned;\n{first}\nadd.s64 %x2, %x2, 2;\n{first}")
    assert (note.quirk, note.line) == ("equal_wgmma", 13)


def test_a_constant_may_come_by_a_register() -> None:
    (note,) = notes("mov.b32 %r3, 40;\nbfe.s32 %r1, %r2, %r3, 4;")
    assert str(note) == (
        "note: k.ptx:11: `bfe.s32 %r1, %r2, %r3, 4`: bfe.s32 with a constant position of 32 or more is -1 "
        "(quirk bfe_constant, guide/hardware_quirks.md)"
    )


def test_a_note_is_no_finding() -> None:
    kernel = ptxlab.load(SOURCE.format("bfe.s32 %r1, %t, 32, 1; st.global.b32 [%out], %r1;"))
    noted = kernel(np.zeros(1, np.int32), grid=1, block=1, checks="all", backend="emulator")
    assert noted.findings == () and [note.quirk for note in noted.notes] == ["bfe_constant"]
    assert kernel(np.zeros(1, np.int32), grid=1, block=1, checks="race", backend="emulator").notes == ()


def test_this_projects_kernels_have_no_quirks() -> None:
    for path in Path(ptxlab.__file__).parent.parent.glob("ptx/**/*.ptx"):
        for entry in emulator.parse(path.read_text(), str(path)).entries.values():
            assert notes_of(entry) == (), path


def test_every_quirk_says_what_versions_make_it() -> None:
    for quirk in quirks.load().values():
        assert quirk.ptxas and {*quirk.ptxas} <= {*quirks.PTXAS}
        assert quirk.who in ("optimiser", "ptxas", "hardware")
        assert quirk.effect.endswith(".") and re.match(r"[A-Z]|[a-z]+\b.*", quirk.effect)
