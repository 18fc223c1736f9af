"""What a kernel of PTX accesses through its pointers, and where nothing can be said of it."""

import pytest

from ptxlab.emulator import Entry, parse
from ptxlab.emulator.front.pointer_accesses import accesses_of, pointers_of


def entry(body: str) -> Entry:
    text = f""".version 7.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 stride, .param .u32 n) {{
    .reg .u64 %p<4>, %q<4>; .reg .b32 %r<8>; .reg .f32 %f<4>; .reg .f64 %d<4>; .reg .b16 %h<4>; .reg .pred %c;
    .shared .align 16 .b8 tile[64];
    ld.param.u64 %p0, [a]; ld.param.u64 %q0, [b]; ld.param.u32 %r0, [n];
    {body} ret; }}"""
    return parse(text).entries["k"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("ld.global.f32 %f0, [%p0+4];", {"a": {"f32"}}),
        ("cvta.to.global.u64 %p1, %p0; mad.wide.u32 %p2, %r0, 8, %p1; st.global.f64 [%p2], %d0;", {"a": {"f64"}}),
        ("ld.global.b32 %r1, [%p0]; add.f32 %r2, %r1, %r1; st.global.b32 [%q0], %r2;", {"a": {"f32"}, "b": {"f32"}}),
        ("ld.global.v2.b32 {%r1, %r2}, [%p0]; fma.rn.f16x2 %r3, %r1, %r2, %r2;", {"a": {"f16"}}),
        ("ld.global.b16 %h0, [%p0]; cvt.f32.f16 %f0, %h0; st.global.f32 [%q0], %f0;", {"a": {"f16"}, "b": {"f32"}}),
        ("ld.global.b32 %r1, [%p0]; st.global.b32 [%q0], %r1;", {"a": {"u32"}, "b": {"u32"}}),
        ("red.global.add.f32 [%p0], %f0; ld.global.f64 %d0, [%p0];", {"a": {"f32", "f64"}}),
        ("setp.eq.u64 %c, %p0, 0; @%c mov.u64 %p1, %p0; ld.global.u32 %r1, [%p1];", {"a": {"u32"}}),
        # Of a pointer that is mixed with another value, stored, copied from or handed on, nothing is known.
        ("selp.b64 %p1, %p0, %q0, %c; ld.global.f32 %f0, [%p1];", {}),
        ("ld.param.u64 %p1, [stride]; add.u64 %p2, %p0, %p1; ld.global.f32 %f0, [%p2];", {}),
        ("ld.global.f32 %f0, [%p0]; st.shared.u64 [tile], %p0;", {}),
        ("ld.global.f32 %f0, [%p0]; cp.async.ca.shared.global [tile], [%p0], 16;", {}),
        ("ld.global.b32 %r1, [%p0]; add.f32 %r2, %r1, %r1; and.b32 %r3, %r1, 1; add.u32 %r4, %r1, 1;", {}),
        ("ld.global.b32 %r1, [%p0]; st.global.b32 [%q0], %r1; mov.b32 %r1, 0; add.f32 %r2, %r1, %r1;", {}),
    ],
)
def test_accesses_through_each_pointer(body: str, expected: dict[str, set[str]]) -> None:
    assert {name: set(map(str, types)) for name, types in accesses_of(entry(body)).items()} == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("ld.global.u8 %r1, [%p0]; and.b32 %r1, %r1, 63; cp.async.ca.shared.global [tile], [%q0], 16;", {"a", "b"}),
        ("ld.param.u64 %p1, [stride]; setp.gt.u64 %c, %p1, 5; @%c st.global.u32 [%p0], 0;", {"a"}),
        ("ld.param.u64 %p1, [stride]; add.u64 %p2, %p0, %p1; ld.global.f32 %f0, [%p2];", set()),  # which of the two?
        ("prefetch.global.L2 [%p0];", set()),
    ],
)
def test_pointers_for_sure(body: str, expected: set[str]) -> None:
    assert pointers_of(entry(body)) == expected
