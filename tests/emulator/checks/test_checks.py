"""Checks: what they find, by line and thread, and that correct kernels are clean."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import emulator
from tests.support.small_kernels import STORE, cuda_to_ptx, kernel_text, line_of, run_text

TWO = ".param .u64 out, .param .u64 a"
SHARED = ".shared .align 4 .b8 buf[512];"
MINE = "mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 2; mov.u32 %r2, buf; add.u32 %r2, %r2, %r1;\n"


def kinds(launch: emulator.Result) -> list[tuple[str, int]]:
    return sorted((f.kind, f.line) for f in launch.findings)


# Packed lanes

PACKED = """mov.u32 %t, %tid.x; ld.param.u64 %x1, [a]; mul.wide.u32 %x2, %t, 12; add.u64 %x1, %x1, %x2;
    ld.global.u32 %r1, [%x1]; ld.global.u32 %r2, [%x1+4]; ld.global.u32 %r3, [%x1+8];
    {instruction}
"""


def run_packed(instruction: str, *rows: tuple[int, int, int]) -> emulator.Result:
    text = kernel_text(PACKED.replace("{instruction}", instruction) + STORE, TWO)
    out, a = np.zeros(len(rows), np.uint32), np.array(rows, np.uint32)
    launch = run_text(text, out, a, threads=len(rows), checks=["lanes"])
    assert all(f.line == line_of(text, "@lanes") for f in launch.findings)
    return launch


MAD = "mad.lo.u32 %s, %r1, %r2, %r3; // @lanes d:u8x4 a:u8x4 b:u32 c:u8x4"


def test_overflow_of_a_lane_disturbs_the_next():
    launch = run_packed(MAD, (0x0F0F0F0F, 15, 0x1E1E1E1E), (0x0101010F, 15, 0x0101019F))
    carry, ranged = sorted(launch.findings, key=lambda f: f.kind)
    assert (carry.kind, carry.lane, carry.thread, carry.block) == ("carry", 1, (1, 0, 0), (0, 0, 0))
    assert "lane 1 is disturbed by lane 0 (15 * 15 + 159 = 384 > 255)" in carry.message
    assert carry.operands == {"a": 1, "b": 15, "c": 1, "d": 17}
    assert (ranged.kind, ranged.lane, ranged.operands["d"]) == ("range", 0, 384 - 256)
    assert str(carry).startswith("carry: k.ptx:") and str(carry).endswith("in block (0,0,0) thread (1,0,0)")


def test_overflow_of_the_top_lane_disturbs_nobody():
    assert [f.kind for f in run_packed(MAD, (0xFF000000, 2, 0)).findings] == ["range"]


def test_findings_are_counted_not_repeated():
    (first, second) = run_packed(MAD, *[(0xFF, 2, 0)] * 20).findings
    assert first.count == second.count == 20 and str(first).endswith("; 19 more")


@pytest.mark.parametrize(
    ("instruction", "row", "expected"),
    [
        ("sub.u32 %s, %r1, %r2; // @lanes d:u8x4 a:u8x4 b:u8x4", (5, 6, 0),
         [("carry", 1), ("carry", 2), ("carry", 3), ("range", 0)]),
        ("sub.u32 %s, %r1, %r2; // @lanes d:s8x4 a:u8x4 b:u8x4", (0x05000000, 0x06000000, 0), []),
        ("add.u32 %s, %r1, %r2; // @lanes d:s8x4 a:u8x4 b:s8x4", (5, 0xFB, 0), [("carry", 1)]),
        ("vadd4.u32.u32.u32 %s, %r1, %r2, 0; // @lanes d:s8x4 a:u8x4 b:s8x4", (5, 0xFB, 0), []),
        ("vadd4.u32.u32.u32 %s, %r1, %r2, 0; // @lanes d:s8x4 a:u8x4 b:s8x4", (225, 0x98, 0), []),
        ("vadd4.u32.u32.u32 %s, %r1, %r2, 0; // @lanes d:s8x4 a:u8x4 b:s8x4", (240, 0x98, 0), [("range", 0)]),
        ("vadd4.u32.u32.u32.sat %s, %r1, %r2, 0; // @lanes d:u8x4 a:u8x4 b:u8x4", (240, 240, 0), []),
        ("xor.b32 %s, %r1, 0x80808080; // @lanes d:s8x4 a:u8x4", (0xFF00FF00, 0, 0), []),
        ("shl.b32 %s, %r1, %r2; // @lanes d:u8x4 a:u8x4 b:u32", (0x0F0F0F0F, 4, 0), []),
        ("shl.b32 %s, %r1, %r2; // @lanes d:u8x4 a:u8x4 b:u32", (0x1F, 4, 0), [("carry", 1), ("range", 0)]),
        ("shr.u32 %s, %r1, %r2; // @lanes d:u8x4 a:u8x4 b:u32", (0x0100, 4, 0), [("carry", 0)]),
        ("mul.lo.u32 %s, %r1, %r2; // @lanes d:u16x2 a:u16x2 b:u8", (0x00FF00FF, 257, 0), [("range", 0)]),
        ("mul.lo.u32 %s, %r1, %r2; // @lanes d:u4x8 a:u4x8 b:u32", (0x00000031, 5, 0), []),
        ("mul.lo.u32 %s, %r1, %r2; // @lanes d:u4x8 a:u4x8 b:u32", (0x00000041, 5, 0), [("carry", 2), ("range", 1)]),
    ],
)  # fmt: skip
def test_packed_operations(instruction, row, expected):
    assert sorted((f.kind, f.lane) for f in run_packed(instruction, row).findings) == expected


@given(st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 3), min_size=32, max_size=32), st.integers(0, 20))
@settings(max_examples=20, deadline=None)
def test_carry_is_exactly_a_wrong_lane(rows, multiplier):
    """Against the definition, lane by lane, in Python integers."""
    rows = [(a & 0x0F0F0F0F, multiplier, c & 0x7F7F7F7F if i % 2 else c) for i, (a, _, c) in enumerate(rows)]
    expected = {}
    for a, b, c in rows:
        stored = (a * b + c) % 2**32
        for lane in range(4):
            exact = (a >> 8 * lane & 255) * b + (c >> 8 * lane & 255)
            for kind, wrong in (("carry", exact % 256 != stored >> 8 * lane & 255), ("range", exact > 255)):
                expected[kind, lane] = expected.get((kind, lane), 0) + wrong
    counts = {(f.kind, f.lane): f.count for f in run_packed(MAD, *rows).findings}
    assert counts == {key: count for key, count in expected.items() if count}


def test_annotation_in_inline_assembly():
    source = r"""
    extern "C" __global__ void k(unsigned* d, const unsigned* a) {
        unsigned r;
        asm("mad.lo.u32 %0, %1, %2, %3; // @lanes d:u8x4 a:u8x4 b:u32 c:u8x4"
            : "=r"(r) : "r"(a[threadIdx.x]), "r"(16), "r"(16));
        d[threadIdx.x] = r;
    }"""
    out, a = np.zeros(32, np.uint32), np.arange(32, dtype=np.uint32)
    findings = [
        (f.kind, f.lane, f.thread, f.count) for f in run_text(cuda_to_ptx(source), out, a, checks=["lanes"]).findings
    ]
    assert findings == [("range", 0, (15, 0, 0), 17), ("carry", 1, (15, 0, 0), 17)]


# Uninitialised reads


@pytest.mark.parametrize(
    ("body", "marker", "message", "thread"),
    [
        ("mov.u32 %r1, 1;\nadd.u32 %s, %r1, %r7;\n", "%r7", "%r7 is read, but never written", (0, 0, 0)),
        ("mov.u32 %s, %tid.x; setp.lt.u32 %p, %s, 20;\n@%p mov.u32 %r1, 5;\nadd.u32 %s, %r1, 1;\n", "%s, %r1, 1;",
         "%r1", (20, 0, 0)),
        ("mov.u32 %s, %tid.x; setp.lt.u32 %p, %s, 20;\n@%p mov.u32 %r1, 5;\nmov.u32 %r2, %r1;\nadd.u32 %s, %r2, 1;\n",
         "%s, %r2, 1;", "%r2", (20, 0, 0)),
        ("mov.u32 %s, 0;\n@%q mov.u32 %s, 1;\n", "@%q", "%q is read", (0, 0, 0)),
        (MINE + "setp.ne.u32 %p, %r0, 3; @%p st.shared.u32 [%r2], %r0; bar.sync 0;\nld.shared.u32 %s, [%r2];\n",
         "ld.shared", "byte 12 of shared memory", (3, 0, 0)),
        (MINE + "st.shared.u16 [%r2], %r0; bar.sync 0;\nld.shared.u32 %s, [%r2];\n",
         "ld.shared", "byte 0 of shared memory", (0, 0, 0)),
        ("ld.param.u64 %x1, [a];\nld.global.u32 %s, [%x1+16];\n", "ld.global", "byte 16 of argument 1", (0, 0, 0)),
        ("mov.u32 %s, 0;\nT: .branchtargets A, B;\nbrx.idx %r7, T;\nA:\nB:\n", "brx.idx", "%r7 is read", (0, 0, 0)),
        (".local .align 4 .b8 mem[8];\nld.local.u32 %s, [mem];\n", "ld.local", "local memory", (0, 0, 0)),
    ],
)  # fmt: skip
def test_uninitialised(body, marker, message, thread):
    text = kernel_text(body + STORE, TWO, SHARED)
    launch = run_text(text, np.zeros(32, np.uint32), np.zeros(8, np.uint32), checks=["init"], uninitialised=[1])
    (finding,) = launch.findings
    assert (finding.kind, finding.line, finding.thread) == ("uninitialised", line_of(text, marker), thread)
    assert message in finding.message


def test_scratch_that_is_written_first_is_fine():
    body = """ld.param.u64 %x1, [a]; mov.u32 %r0, %tid.x; mul.wide.u32 %x2, %r0, 4; add.u64 %x1, %x1, %x2;
    st.global.u32 [%x1], 3; ld.global.u32 %s, [%x1];"""
    out, a = np.zeros((2, 32), np.uint32)
    assert not run_text(kernel_text(body + STORE, TWO), out, a, checks=["init"], uninitialised=[1]).findings


def test_a_copy_of_a_register_uses_nothing() -> None:
    """nvcc copies what a variable of bitsandbytes holds before the loop that sets it."""
    text = kernel_text("mov.u32 %r1, %r7;\nmov.u32 %r1, 5;\nmov.u32 %s, %r1;\n" + STORE)
    assert not run_text(text, np.zeros(32, np.uint32), checks=["init"]).findings


# Races

NEIGHBOUR = "xor.b32 %r3, %r2, 128;\n"  # the same lane of the other warp (1024 + 4 * thread)
RACES = {
    "read after write": "st.shared.u32 [%r2], %r0;\nBARRIER\nld.shared.u32 %s, [%r3];\n",
    "write after read": """st.shared.u32 [%r2], %r0;
        bar.sync 0;
        ld.shared.u32 %s, [%r3];
        BARRIER
        st.shared.u32 [%r2], 0;
        """,
    "write after write": """mov.u32 %s, 1; setp.eq.u32 %p, %r0, 0; setp.eq.u32 %q, %r0, 40;
        @%p st.shared.u32 [buf+256], 77;
        BARRIER
        @%q st.shared.u8 [buf+257], %s;
        """,
}


@pytest.mark.parametrize("name", RACES)
def test_a_missing_barrier_is_a_race(name):
    out = np.zeros(64, np.uint32)
    with_barrier = kernel_text(MINE + NEIGHBOUR + RACES[name].replace("BARRIER", "bar.sync 1;") + STORE, outside=SHARED)
    assert not run_text(with_barrier, out, threads=64, checks=["race", "init"]).findings
    without = kernel_text(MINE + NEIGHBOUR + RACES[name].replace("BARRIER", "") + STORE, outside=SHARED)
    (finding,) = run_text(without, out, threads=64, checks=["race"]).findings
    accesses = [i for i, line in enumerate(without.split("\n"), 1) if "shared.u" in line]
    assert (finding.kind, finding.line) == ("race", accesses[-1])
    assert f"races with line {accesses[-2]}," in finding.message


@pytest.mark.parametrize("heard", [0, 1])
@pytest.mark.parametrize(
    "write",
    ["st.shared.u32 [%r2], 7;", "atom.shared.add.u32 %r4, [%r2], 1;", "cp.async.ca.shared.global [%r2], [%x2], 4;"],
)
def test_a_write_waits_for_all_who_have_read(heard, write):
    """Warps 0 and 1 read, warp 2 has heard of one of them when it writes: of the first reader, or of the second."""
    body = f"""mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 31; shl.b32 %r1, %r1, 2; mov.u32 %r2, buf; add.u32 %r2, %r2, %r1;
    shr.u32 %r5, %r0, 5; setp.eq.u32 %p, %r5, 2; mov.u32 %s, 0; cvt.u64.u32 %x1, %r1; ld.param.u64 %x2, [a];
    add.u64 %x2, %x2, %x1; @%p st.shared.u32 [%r2], %r0;
    bar.sync 0;
    @%p bra WRITE;
    ld.shared.u32 %s, [%r2];
    setp.eq.u32 %q, %r5, {heard}; @%q bar.arrive 1, ALL;
    bra END;
    WRITE: bar.sync 1, ALL;
    {write}
    END:
    """
    one_reader, both_readers = body.replace("ALL", "64"), body.replace("ALL", "96").replace("@%q bar", "bar")
    for source, expected in ((one_reader, [("race", 1, (64, 0, 0))]), (both_readers, [])):
        text = kernel_text(source + STORE, TWO, SHARED)
        findings = run_text(
            text, np.zeros(96, np.uint32), np.zeros(32, np.uint32), threads=96, checks=["race"]
        ).findings
        assert [(f.kind, f.line - line_of(text, "WRITE: "), f.thread) for f in findings] == expected
        assert all(f"by thread ({32 * (1 - heard)},0,0)" in f.message for f in findings)


@pytest.mark.parametrize(
    ("between", "clean"),
    [
        ("", False),
        ("bar.warp.sync -1;", True),
        ("setp.lt.u32 %q, %r0, 16; selp.b32 %r4, 0xffff, 0xffff0000, %q; bar.warp.sync %r4;", True),
        ("and.b32 %r4, %r0, 1; shl.b32 %r4, 0x55555555, %r4; bar.warp.sync %r4;", False),
        ("bar.sync 0;", True),
        ("vote.sync.any.pred %p, %p, -1;", False),
    ],
)
def test_lanes_of_a_warp_do_not_run_in_step(between, clean):
    """Lanes read what their neighbours have written; neither a vote orders memory, nor a meeting with others."""
    body = f"setp.eq.u32 %p, 0, 0; {MINE} st.shared.u32 [%r2], %r0;\n{between}\nxor.b32 %r3, %r2, 4;\n"
    text = kernel_text(body + "ld.shared.u32 %s, [%r3];\n" + STORE, outside=SHARED)
    launch = run_text(text, np.zeros(32, np.uint32), checks=["race"])
    assert kinds(launch) == ([] if clean else [("race", line_of(text, "ld.shared"))])
    if not clean:
        assert "by thread (1,0,0) of block (0,0,0), in block (0,0,0) thread (0,0,0)" in str(launch.findings[0])


@pytest.mark.parametrize(
    ("load", "clean"),
    [("ld.global.u32 %s, [%x2];", True), ("ld.global.nc.u32 %s, [%x2];", False), ("ld.global.nc.u32 %s, [%x3];", True)],
)
def test_the_read_only_path_sees_no_writes_of_the_launch(load: str, clean: bool) -> None:
    """Not those of the own thread either; of another array there are none."""
    body = f"""mov.u32 %r0, %tid.x; mul.wide.u32 %x1, %r0, 4; ld.param.u64 %x2, [a]; add.u64 %x2, %x2, %x1;
    ld.param.u64 %x3, [b]; add.u64 %x3, %x3, %x1; st.global.u32 [%x2], %r0; {load}"""
    text = kernel_text(body + STORE, ".param .u64 a, .param .u64 b, .param .u64 out")
    arrays = [np.zeros(32, np.uint32) for _ in range(3)]
    findings = run_text(text, *arrays, checks=emulator.CHECKS).findings
    messages = [finding.message for finding in findings]
    assert not messages if clean else re.match(r"reads byte 0 of .* through the read-only path, though line", *messages)


def test_lanes_of_one_store_that_disagree():
    text = kernel_text("mov.u32 %s, %tid.x;\nst.shared.u32 [buf], %s;\n" + STORE, outside=SHARED)
    (finding,) = run_text(text, np.zeros(32, np.uint32), checks=["race"]).findings
    assert finding.line == line_of(text, "st.shared") and finding.count == 31
    same = kernel_text("mov.u32 %s, 5;\nst.shared.u32 [buf], %s;\n" + STORE, outside=SHARED)
    assert not run_text(same, np.zeros(64, np.uint32), threads=64, checks=["race"]).findings


@pytest.mark.parametrize("opcode", ["st.relaxed.gpu.global.u32", "st.volatile.global.u32", "st.release.gpu.global.u32"])
def test_strong_stores_of_several_threads_do_not_race(opcode):
    text = kernel_text(f"mov.u32 %s, %tid.x; ld.param.u64 %x1, [a]; {opcode} [%x1], %s;\n" + STORE, TWO)
    assert not run_text(text, np.zeros(64, np.uint32), np.zeros(1, np.uint32), threads=64, checks=["race"]).findings


FLAG = """mov.u32 %r0, %ctaid.x; ld.param.u64 %x1, [out]; ld.param.u64 %x2, [a]; setp.eq.u32 %p, %r0, 1;
    @%p bra READ;
    st.global.u32 [%x1+4], 42;
    {release}
    ret;
    READ:
    {acquire}
    setp.eq.u32 %q, %r1, 0; @%q bra READ;
    {fence}
    ld.global.u32 %s, [%x1+4];
    st.global.u32 [%x1], %s; ret;"""


@pytest.mark.parametrize(
    ("release", "acquire", "fence", "clean"),
    [
        ("st.release.gpu.global.u32 [%x2], 1;", "ld.acquire.gpu.global.u32 %r1, [%x2];", "", True),
        ("membar.gl; st.volatile.global.u32 [%x2], 1;", "ld.volatile.global.u32 %r1, [%x2];", "membar.gl;", True),
        ("fence.acq_rel.gpu; atom.global.add.u32 %r2, [%x2], 1;", "ld.relaxed.gpu.global.u32 %r1, [%x2];",
         "fence.acq_rel.gpu;", True),
        ("atom.release.gpu.global.exch.b32 %r2, [%x2], 1;", "atom.acquire.gpu.global.cas.b32 %r1, [%x2], 0, 0;", "",
         True),
        ("membar.cta; st.volatile.global.u32 [%x2], 1;", "ld.volatile.global.u32 %r1, [%x2];", "membar.sys;", False),
        ("membar.sys; st.volatile.global.u32 [%x2], 1;", "ld.volatile.global.u32 %r1, [%x2];", "membar.sys;", True),
        ("st.volatile.global.u32 [%x2], 1;", "ld.volatile.global.u32 %r1, [%x2];", "", False),
        ("membar.gl; st.volatile.global.u32 [%x2], 1;", "ld.volatile.global.u32 %r1, [%x2];", "", False),
        ("st.relaxed.gpu.global.u32 [%x2], 1;", "ld.acquire.gpu.global.u32 %r1, [%x2];", "", False),
        ("fence.release.gpu; st.relaxed.gpu.global.u32 [%x2], 1;", "ld.relaxed.gpu.global.u32 %r1, [%x2];",
         "fence.acquire.gpu;", True),
        ("fence.acquire.gpu; st.relaxed.gpu.global.u32 [%x2], 1;", "ld.relaxed.gpu.global.u32 %r1, [%x2];",
         "fence.acquire.gpu;", False),
        ("fence.release.gpu; st.relaxed.gpu.global.u32 [%x2], 1;", "ld.relaxed.gpu.global.u32 %r1, [%x2];",
         "fence.release.gpu;", False),
    ],
)  # fmt: skip
def test_flags_order_what_they_should(release, acquire, fence, clean):
    text = kernel_text(FLAG.replace("{release}", release).replace("{acquire}", acquire).replace("{fence}", fence), TWO)
    out = np.zeros(2, np.uint32)
    launch = run_text(text, out, np.zeros(1, np.uint32), threads=1, blocks=2, checks=["race"])
    assert out[0] == 42
    assert kinds(launch) == ([] if clean else [("race", line_of(text, "ld.global.u32 %s"))])


RESET = """mov.u32 %r0, %ctaid.x; mov.u32 %r3, %tid.x; ld.param.u64 %x2, [a]; setp.eq.u32 %q, %r3, 0;
    setp.eq.u32 %p, %r0, 1; @%p bra READ; setp.eq.u32 %p, %r0, 2; @!%p bra WRITE;
    LATER: ld.acquire.gpu.global.u32 %r2, [%x2+4]; setp.eq.u32 %p, %r2, 0; @%p bra LATER;
    WRITE: fence.acq_rel.gpu;
    @%q red.relaxed.gpu.global.add.u32 [%x2], 1;
    ret;
    READ:
    {read}
    ret;"""
POLL = "L: ld.acquire.gpu.global.u32 %r2, [%x2]; setp.eq.u32 %p, %r2, 0; @%p bra L;\n"


@pytest.mark.parametrize(
    ("read", "clean"),
    [
        ("@!%q ret;\n" + POLL + "st.global.u32 [%x2], 0;", True),
        (POLL + "@%q st.global.u32 [%x2], 0;", False),  # thread 1 may still read
        ("@!%q bra MET;\n" + POLL + "MET: bar.sync 0; @!%q st.global.u32 [%x2], 0;", True),
        ("@!%q bra MET;\n" + POLL + "MET: @!%q st.global.u32 [%x2], 0;", False),
        ("@%q st.global.u32 [%x2], 0;", False),
        # block 2 writes once more, unseen
        ("@!%q ret;\n" + POLL + "st.relaxed.gpu.global.u32 [%x2+4], 1;\nmov.u32 %r4, 0;\n"
         "MORE: add.u32 %r4, %r4, 1; setp.lt.u32 %p, %r4, 300; @%p bra MORE;\nst.global.u32 [%x2], 0;", False),
    ],
)  # fmt: skip
def test_who_has_seen_a_flag_resets_it_by_an_ordinary_store(read: str, clean: bool) -> None:
    """Marlin's locks: a strong write lies before a strong read that finds it, also where it releases by a fence."""
    text = kernel_text(RESET.replace("{read}", read), TWO)
    blocks = 3 if "MORE" in read else 2
    outcome = run_text(text, np.zeros(1, np.uint32), np.zeros(2, np.uint32), threads=2, blocks=blocks, checks=["race"])
    assert kinds(outcome)[:1] == ([] if clean else [("race", line_of(text, "st.global.u32 [%x2], 0"))])


@pytest.mark.parametrize("seed", range(4))
def test_whoever_is_last_at_a_counter_resets_it(seed: int) -> None:
    """The last to come is in mode late any of the blocks that come with one instruction."""
    body = """ld.param.u64 %x2, [a]; fence.acq_rel.gpu; atom.relaxed.gpu.global.add.u32 %r1, [%x2], 1;
        setp.ne.u32 %p, %r1, 4; @%p ret; fence.acq_rel.gpu; st.global.u32 [%x2], 0; ret;"""
    arrays = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    outcome = run_text(kernel_text(body, TWO), *arrays, threads=1, blocks=5, checks=["race"], mode="late", seed=seed)
    assert kinds(outcome) == []


WARP_FLAG = """mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; ld.param.u64 %x1, [out]; ld.param.u64 %x2, [a];
    mul.wide.u32 %x3, %r0, 4; add.u64 %x3, %x1, %x3; mov.u32 %r4, 9;
    setp.eq.u32 %q, %r0, 0; setp.eq.u32 %p, %r1, 1; @%p bra READ;
    st.global.u32 [%x3], 42;
    {wrote}
    ret;
    READ:
    {read}
    ld.global.u32 %s, [%x3];
    st.global.u32 [%x3+128], %s; ret;"""
MEET = "bar.warp.sync -1;\n"


@pytest.mark.parametrize(
    ("wrote", "read", "clean"),
    [
        (MEET + "@%q st.release.gpu.global.u32 [%x2], 1;", POLL, True),
        ("@%q st.release.gpu.global.u32 [%x2], 1;", POLL, False),
        ("@%q red.release.gpu.global.add.u32 [%x2], 1;", POLL, False),
        ("red.release.gpu.global.add.u32 [%x2], 1;", POLL.replace("eq.u32 %p, %r2, 0", "ne.u32 %p, %r2, 32"), True),
        (MEET + "@%q fence.acq_rel.gpu; @%q st.relaxed.gpu.global.u32 [%x2], 1;", POLL, True),
        ("fence.acq_rel.gpu;" + MEET + "@%q st.relaxed.gpu.global.u32 [%x2], 1;", POLL, False),
        ("fence.acq_rel.gpu; @%q st.relaxed.gpu.global.u32 [%x2], 1;", POLL, False),
        ("bar.sync 0; @%q st.release.gpu.global.u32 [%x2], 1;", POLL, True),
        ("@!%q bar.arrive 1, 32; @%q bar.sync 1, 32; @%q st.release.gpu.global.u32 [%x2], 1;", POLL, True),
        (MEET + "@%q st.release.gpu.global.u32 [%x2], 1;", "@!%q bra MET;\n" + POLL + "MET:" + MEET, True),
        (MEET + "@%q st.release.gpu.global.u32 [%x2], 1;", "@!%q bra MET;\n" + POLL + "MET:", False),
    ],
)
def test_a_flag_stands_for_the_lane_that_sets_it(wrote, read, clean):
    """Lanes of one block write, lanes of the other one read; lane 0 or all of them say so and hear of it."""
    text = kernel_text(WARP_FLAG.replace("{wrote}", wrote).replace("{read}", read), TWO)
    out = np.zeros(64, np.uint32)
    launch = run_text(text, out, np.zeros(1, np.uint32), threads=32, blocks=2, checks=["race"])
    assert out[32:].tolist() == [42] * 32
    assert kinds(launch) == ([] if clean else [("race", line_of(text, "ld.global.u32 %s"))])
