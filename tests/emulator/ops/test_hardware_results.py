"""Small programs and what an H200 made of them, where the emulator once did otherwise."""

import numpy as np
import pytest

import ptxlab
from tests.golden.cases import DOMAINS, Case
from tests.support.axes import on_every_backend

# D = -0 and A = 0, of which one operand is negated: A in registers, B in shared memory
WGMMA = """{ .shared .align 128 .b8 tile[256]; .reg .b32 %s, %d<3>, %zero; .reg .b64 %tile; .reg .pred %adds;
mov.b32 %zero, 0; mov.u32 %s, tile; cvt.u64.u32 %tile, %s; shr.u64 %tile, %tile, 4;
or.b64 %tile, %tile, 0x1000080000; mad.lo.u32 %s, %t, 2, %s; st.shared.b16 [%s], 0; fence.proxy.async; bar.sync 0;
mov.b32 {d:f32}, {a:f32}; mov.b32 %d0, {a:f32}; mov.b32 %d1, {a:f32}; mov.b32 %d2, {a:f32};
setp.eq.u32 %adds, 0, 0; wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{d:f32}, %d0, %d1, %d2}, {%zero, %zero, %zero, %zero}, %tile, %adds,
    SIGNS, 0;
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"""
MMA = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {{d:f64}, {e:f64}}, {{a:f64}}, {{b:f64}}, {{c:f64}, {c:f64}};"
MINUS_ZERO, MINUS_ONE, HUGE = 1 << 63, 0xBFF0000000000000, 0x5F24388213F060EA

# the program, its sources (and the word in memory) in the order of their names, and the first destination, all as bits
PROGRAMS = [
    (WGMMA.replace("SIGNS", "-1, 1"), [0x80000000], 0),
    (WGMMA.replace("SIGNS", "1, -1"), [0x80000000], 0),
    (MMA, [0, MINUS_ONE, MINUS_ZERO], MINUS_ZERO),
    (MMA, [0, MINUS_ONE, 0], 0),
    ("atom.add.f32 {d:f32}, [{m:f32}], {a:f32}; ld.f32 {d:f32}, [{m:f32}];", [1, 0x00400000], 0),
    ("red.add.f32 [{m:f32}], {a:f32}; ld.f32 {d:f32}, [{m:f32}];", [0x80800000, 0x00400000], 0x80800000),
    ("slct.ftz.b32.f32 {d:u32}, {a:u32}, {b:u32}, {c:f32};", [1, 2, 0x80000001], 1),
    ("slct.ftz.b32.f32 {d:u32}, {a:u32}, {b:u32}, {c:f32};", [1, 2, 0x80800000], 2),
    ("fma.rn.f64 {d:f64}, {a:f64}, {b:f64}, {c:f64};", [HUGE, 0x7D8BCCB02030015B, 0xFFF << 52], 0xFFF << 52),
    ("fma.rz.f64 {d:f64}, {a:f64}, {b:f64}, {c:f64};", [HUGE, 0x7D8BCCB02030015B, 0xFFF << 52], 0xFFF << 52),
    ("mul.rn.ftz.f32 {d:f32}, {a:f32}, {b:f32};", [0x00800000, 0x3F7FFFFF], 0),
    ("mul.rn.ftz.f16x2 {d:f16x2}, {a:f16x2}, {b:f16x2};", [0x84003C00, 0x3BFF3C00], 0x80003C00),
    ("fma.rn.ftz.f16x2 {d:f16x2}, {a:f16x2}, {b:f16x2}, {c:f16x2};", [0x84003C00, 0x3BFF3C00, 0], 0x80003C00),
    ("cvt.rp.ftz.f32.f64 {d:f32}, {a:f64};", [0x380FFFFFFFFFFFFF], 0x00800000),
    ("rcp.approx.ftz.f64 {d:f64}, {a:f64};", [0x7FF0000000000001], 0),
    ("rsqrt.approx.ftz.f64 {d:f64}, {a:f64};", [0x7FF0000000000001], 0),
    ("rcp.approx.ftz.f64 {d:f64}, {a:f64};", [0x7FF8000000000000], 0x7FFFFFFF00000000),
    ("rsqrt.approx.ftz.f64 {d:f64}, {a:f64};", [0x4000000000000000], 0x3FE6A09E00000000),
    ("div.rz.f64 {d:f64}, {a:f64}, 0d4008000000000000;", [0x3FF0000000000000], 0x3FD5555555555555),
]


@on_every_backend
@pytest.mark.parametrize(
    ("program", "sources", "expected"),
    PROGRAMS,
    ids=[f"{i} {p[0].split()[0].strip('{') or 'wgmma'}" for i, p in enumerate(PROGRAMS)],
)
def test_results_equal_those_of_hardware(program: str, sources: list[int], expected: int, backend: str) -> None:
    case, threads = Case("k", program), 128 if "wgmma" in program else 32
    widths = {name: DOMAINS[domain].bits // 8 for name, domain in case.fields.items()}
    names = sorted(name for name in widths if name not in "de")
    arrays = {name: np.zeros(threads, f"u{width}") for name, width in widths.items()}
    for name, source in zip(names, sources, strict=True):
        arrays[name][:] = source
    text = case.ptx(version="8.6", target="sm_90a")
    ptxlab.load(text)(*arrays.values(), grid=1, block=threads, backend=backend)
    assert [hex(x) for x in arrays["d"]] == [hex(expected)] * threads
