"""Scheduling, memory, and what a launch refuses."""

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.errors import ArgumentError, Deadlock, EmulationError, MemoryFault, UnknownInstruction
from tests.support.axes import both_modes
from tests.support.small_kernels import HEADER, STORE, kernel_text, line_of, run_body, run_text

TID = "mov.u32 %r0, %tid.x;"


# Scheduling


def test_divergence_and_reconvergence():
    body = f"""{TID} and.b32 %r1, %r0, 3; setp.eq.u32 %p, %r1, 0; @%p bra ZERO; setp.eq.u32 %p, %r1, 1; @%p bra ONE;
    mul.lo.u32 %s, %r0, 10; bra JOIN;
    ZERO: add.u32 %s, %r0, 1000; bra JOIN;
    ONE: mov.u32 %s, 7;
    JOIN: add.u32 %s, %s, 1;"""
    expected = [{0: t + 1001, 1: 8}.get(t % 4, 10 * t + 1) for t in range(64)]
    assert run_body(body, threads=64).tolist() == expected


def test_lanes_meet_again_behind_a_branch():
    """The instruction behind the join is dispatched once for all lanes, not once for each path."""
    out = np.zeros(32, np.uint32)
    body = f"""{TID} and.b32 %r1, %r0, 1; setp.eq.u32 %p, %r1, 0; @%p bra A; mov.u32 %s, 1; bra J;
    A: mov.u32 %s, 2; J: {STORE}"""
    launch = run_text(kernel_text(body), out)
    assert launch.steps == 4 + 3 + 9  # before, the two sides (2 + 1), the store


def test_loops_with_different_counts():
    body = f"{TID} mov.u32 %s, 0; L: add.u32 %s, %s, %r0; sub.s32 %r0, %r0, 1; setp.gt.s32 %p, %r0, 0; @%p bra L;"
    assert run_body(body, threads=100).tolist() == [0, *(t * (t + 1) // 2 for t in range(1, 100))]


SPIN = """.reg .b32 %seen;
    mov.u32 %r0, %ctaid.x; ld.param.u64 %x1, [out]; ld.param.u64 %x2, [flag]; setp.eq.u32 %p, %r0, {writer};
    @%p bra WRITER;
    WAIT: ld.acquire.gpu.global.u32 %seen, [%x2]; setp.eq.u32 %q, %seen, 0; @%q bra WAIT;
    ld.global.u32 %s, [%x1+4]; st.global.u32 [%x1], %s; ret;
    WRITER: st.global.u32 [%x1+4], 42; st.release.gpu.global.u32 [%x2], 1; ret;"""
SPIN_PARAMS = ".param .u64 out, .param .u64 flag"


@pytest.mark.parametrize("writer", [0, 1])
def test_spinning_on_a_global_flag_does_not_starve_the_writer(writer):
    out, flag = np.zeros(2, np.uint32), np.zeros(1, np.uint32)
    text = kernel_text(SPIN.replace("{writer}", str(writer)), SPIN_PARAMS)
    launch = run_text(text, out, flag, threads=1, blocks=2, checks=["race", "init"])
    assert out.tolist() == [42, 42] and flag[0] == 1 and not launch.findings


@pytest.mark.full
def test_lanes_of_a_warp_take_turns_at_a_lock():
    """Every lane takes the lock in turn, the loser's spin being the lower code: independent thread scheduling."""
    params = ".param .u64 lock, .param .u64 sum"
    body = """ld.param.u64 %x1, [lock]; ld.param.u64 %x2, [sum];
    L: atom.global.cas.b32 %r1, [%x1], 0, 1; setp.ne.u32 %p, %r1, 0; @%p bra L;
    ld.volatile.global.u32 %r2, [%x2]; add.u32 %r2, %r2, 1; st.volatile.global.u32 [%x2], %r2;
    atom.global.exch.b32 %r1, [%x1], 0; ret;"""
    lock, total = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    run_text(kernel_text(body, params), lock, total, threads=32, blocks=2)
    assert total[0] == 64


def test_step_budget_says_where_it_spins():
    text = kernel_text("ld.param.u64 %x1, [out];\nL: ld.volatile.global.u32 %r1, [%x1]; bra L; ret;")
    message = r"still running after 5000 steps: k.ptx:\d+: .*thread \(0,0,0\) and 31 more"
    with pytest.raises(EmulationError, match=message):
        run_text(text, np.zeros(4, np.uint32), max_steps=5000)


def test_barrier_deadlock_names_every_waiter():
    text = kernel_text(f"{TID} setp.lt.u32 %p, %r0, 32;\n@%p bar.sync 1, 96;\n@!%p bar.sync 2;\nret;")
    with pytest.raises(Deadlock) as raised:
        run_text(text, np.zeros(4, np.uint32), threads=64)
    first, second = str(raised.value).split("\n")[1:]
    assert f"k.ptx:{line_of(text, 'bar.sync 1')}: " in first and "96 threads of its block at barrier 1" in first
    assert f"k.ptx:{line_of(text, 'bar.sync 2')}: " in second and "thread (32,0,0) and 31 more" in second


def test_barrier_after_early_exit():
    body = f"{TID} setp.gt.u32 %p, %r0, 40; @%p ret; bar.sync 0; mov.u32 %s, 5; bar.sync 1, 64; "
    assert run_body(body, threads=64).tolist() == [5] * 41 + [0] * 23


def test_named_barriers_hand_over():
    """The upper warp produces and only arrives; the lower one waits."""
    body = f"""{TID} setp.ge.u32 %p, %r0, 32; mov.u32 %r1, buf; shl.b32 %r2, %r0, 2; add.u32 %r2, %r1, %r2;
    @%p st.shared.u32 [%r2-128], %r0; @%p bar.arrive 3, 64; @%p ret;
    bar.sync 3, 64; ld.shared.u32 %s, [%r2]; """
    out = np.zeros(64, np.uint32)
    outside = ".shared .align 4 .b8 buf[128];"
    launch = run_text(kernel_text(body + STORE, outside=outside), out, threads=64, checks=["race", "init"])
    assert out.tolist() == [*range(32, 64), *[0] * 32] and not launch.findings


def test_barrier_reductions():
    body = f"{TID} setp.lt.u32 %p, %r0, 10; bar.red.popc.u32 %s, 0, %p; bar.red.and.pred %q, 1, 64, %p;"
    assert set(run_body(body + "@%q mov.u32 %s, 0;", threads=64)) == {10}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("shfl.sync.bfly.b32 %s, %r0, 5, 31, -1;", lambda i: i ^ 5),
        ("shfl.sync.up.b32 %s|%p, %r0, 3, 0, -1; @!%p mov.u32 %s, 99;", lambda i: 99 if i < 3 else i - 3),
        ("shfl.sync.down.b32 %s, %r0, 1, 0x1c1f, -1;", lambda i: i if i % 4 == 3 else i + 1),
        ("shfl.sync.idx.b32 %s, %r0, 2, 0x181f, -1;", lambda i: i // 8 * 8 + 2),
        ("setp.lt.u32 %p, %r0, 4; vote.sync.ballot.b32 %s, %p, -1;", lambda i: 15),
        ("redux.sync.add.u32 %s, %r0, -1;", lambda i: 496),
        ("shr.u32 %r1, %r0, 3; match.any.sync.b32 %s, %r1, -1;", lambda i: 255 << i // 8 * 8),
    ],
)
def test_shuffles_and_votes(body, expected):
    assert run_body("mov.u32 %r0, %laneid; " + body).tolist() == [expected(i) for i in range(32)]


def test_lanes_of_a_collective_wait_for_each_other():
    """Half of the warp comes late, over another path; and a mask of a few lanes needs only those."""
    body = """mov.u32 %r0, %laneid; setp.lt.u32 %p, %r0, 16; @%p bra LOW; add.u32 %r1, %r0, 100; bra JOIN;
    LOW: mov.u32 %r1, %r0; bra JOIN;
    mov.u32 %r1, 77;
    JOIN: shfl.sync.bfly.b32 %s, %r1, 16, 31, -1;"""
    assert run_body(body).tolist() == [*range(116, 132), *range(16)]
    two_lanes = "mov.u32 %r0, %laneid; mov.u32 %s, 9; setp.lt.u32 %p, %r0, 2; @%p shfl.sync.bfly.b32 %s, %r0, 1, 31, 3;"
    assert run_body(two_lanes).tolist() == [1, 0, *[9] * 30]


def test_missing_lane_of_a_mask_is_a_deadlock():
    body = """mov.u32 %r0, %laneid; setp.lt.u32 %p, %r0, 7; @%p bra S; bar.sync 0;
    S: shfl.sync.bfly.b32 %s, %r0, 1, 31, -1; ret;"""
    with pytest.raises(Deadlock, match="the rest of its warp"):
        run_text(kernel_text(body), np.zeros(1))


def test_special_registers_in_three_dimensions():
    body = """mov.u32 %r0, %tid.x; mov.u32 %r1, %tid.y; mov.u32 %r2, %tid.z;
    mad.lo.u32 %r3, %r2, 3, %r1; mad.lo.u32 %r3, %r3, 5, %r0;
    mov.u32 %r4, %ctaid.y; mov.u32 %r5, %nctaid.x; mov.u32 %r6, %ctaid.x; mad.lo.u32 %r4, %r4, %r5, %r6;
    mad.lo.u32 %r7, %r4, 30, %r3;
    ld.param.u64 %x1, [out]; mul.wide.u32 %x2, %r7, 4; add.u64 %x1, %x1, %x2;
    mov.u32 %r8, %warpid; mad.lo.u32 %r8, %r8, 1000, %r7;
    st.global.u32 [%x1], %r8; ret;"""
    out = np.zeros(180, np.uint32)
    emulator.run(kernel_text(body), None, [out], grid=(3, 2), block=(5, 3, 2))
    assert out.tolist() == list(range(180))


def test_switch():
    body = f"""{TID} and.b32 %r1, %r0, 3; mov.u32 %s, 0;
    T: .branchtargets A, B, C, A;
    brx.idx %r1, T;
    A: add.u32 %s, %s, 1; B: add.u32 %s, %s, 10; C: add.u32 %s, %s, 100;"""
    assert run_body(body).tolist() == [111, 110, 100, 111] * 8
    with pytest.raises(EmulationError, match="index 7 of 4 targets"):
        run_body(body.replace("and.b32 %r1, %r0, 3", "and.b32 %r1, %r0, 7"))


def test_one_array_twice():
    both_arrays = np.zeros(32, np.uint32)
    body = f"""{OUT_AT} ld.param.u64 %x3, [b]; add.u64 %x3, %x3, %x2; st.global.u32 [%x1], %r0; ld.global.u32 %s, [%x3];
    add.u32 %s, %s, 100; st.global.u32 [%x3], %s; ret;"""
    run_text(kernel_text(body, ".param .u64 out, .param .u64 b"), both_arrays, both_arrays)
    assert both_arrays.tolist() == list(range(100, 132))


def test_many_waves():
    assert (run_body("mov.u32 %s, %ctaid.x;", threads=1000, blocks=300) == np.repeat(np.arange(300), 1000)).all()


@both_modes
@pytest.mark.parametrize("add", ["red.shared.add.s32 [%r4], %r1;", "atom.shared.add.s32 %r2, [%r4], %r1;",
                                 "atom.shared::cta.add.u32 %r2, [%r4], %r1;"])  # fmt: skip
def test_sums_in_shared_memory(add: str, mode: str) -> None:
    """Negative numbers of four warps at eight places; a race only where nothing orders them and the plain accesses."""
    body = f"""mov.u32 %r0, %tid.x; and.b32 %r3, %r0, 7; shl.b32 %r3, %r3, 2; mov.u32 %r4, buf; add.u32 %r4, %r4, %r3;
    setp.lt.u32 %p, %r0, 8; @%p st.shared.s32 [%r4], -5; bar.sync 0;
    sub.s32 %r1, 60, %r0;
    {add}
    bar.sync 0; ld.shared.s32 %s, [%r4];
    """
    sums = np.array([-5 + sum(60 - t for t in range(128) if t % 8 == i) for i in range(8)] * 16)
    out = np.zeros(128, np.int32)
    for text in (body, body.replace("bar.sync 0; ld", "ld"), body.replace("bar.sync 0;\n", "")):
        ptx, clean = kernel_text(text + STORE, outside=".shared .align 4 .b8 buf[32];"), text == body
        findings = run_text(ptx, out, threads=128, mode=mode, checks=emulator.CHECKS).findings
        assert [f.kind for f in findings][:1] == ([] if clean else ["race"])
        assert not clean or (out == sums).all()


def test_atomics_on_one_address():
    params, out, total = ".param .u64 out, .param .u64 sum", np.zeros(96, np.uint32), np.zeros(1, np.uint32)
    run_text(
        kernel_text("ld.param.u64 %x1, [sum]; atom.global.inc.u32 %s, [%x1], 49;" + STORE, params),
        out,
        total,
        threads=96,
    )
    assert out.tolist() == [i % 50 for i in range(96)] and total[0] == 46
    run_text(
        kernel_text(f"{TID} ld.param.u64 %x1, [sum]; red.global.max.u32 [%x1], %r0; ret;", params),
        out,
        total,
        threads=96,
    )
    assert total[0] == 95


# Memory

OUT_AT = "ld.param.u64 %x1, [out]; mov.u32 %r0, %tid.x; mul.wide.u32 %x2, %r0, 4; add.u64 %x1, %x1, %x2;\n"


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ("st.global.u32 [%x1+4], %r0;",
         r"thread \(31,0,0\): 4 bytes at byte 128 of argument 0 \(out\), 4 bytes past its end"),
        ("ld.global.u32 %r1, [%x1-4];", r"thread \(0,0,0\): 4 bytes at 4 bytes before argument 0 \(out\)"),
        ("ld.global.u32 %r1, [%x1+2];", "is not a multiple of the 4 bytes"),
        ("ld.global.v2.u32 {%r1, %r2}, [%x1];", r"thread \(1,0,0\): address .* is not a multiple of the 8 bytes"),
        ("ld.global.u32 %r1, [%x2];", "a null pointer"),
        ("st.global.u64 [%x1+124], %x1;", "not a multiple"),
        ("atom.global.add.u32 %r1, [%x1+4], 1;", "past its end"),
        ("st.shared.u32 [64], %r0;", r"shared address -960 \(window of 0 bytes\)"),
        ("ld.u32 %r1, [%x3];", "a null pointer"),
        ("mov.u32 %r1, buf; ld.shared.u32 %r1, [%r1+64];", r"shared address 64 \(window of 64 bytes\)"),
        ("cvta.to.global.u64 %x3, %x1; mov.u64 %x3, half; st.global.f32 [%x3], %f1;", "const half is read-only"),
    ],
)  # fmt: skip
def test_access_out_of_bounds(access, message):
    text = kernel_text(OUT_AT + access + "\nret;", outside=".shared .align 8 .b8 buf[64]; .const .f32 half = 0.5;")
    out = np.zeros(32, np.uint32)
    with pytest.raises(MemoryFault, match=message) as raised:
        run_text(text, out)
    assert f"k.ptx:{line_of(text, access)}: " in str(raised.value)
    assert not out.any()


def test_neighbouring_buffers_are_apart():
    a, b = np.arange(32, dtype=np.uint32), np.arange(32, dtype=np.uint32)
    with pytest.raises(MemoryFault, match=r"byte 128 of argument 0"):
        run_text(kernel_text(OUT_AT + "st.global.u32 [%x1+4], 7; ret;", ".param .u64 out, .param .u64 b"), a, b)
    assert b.tolist() == list(range(32))


def test_spaces_and_generic_addresses():
    body = f"""{TID} mov.u32 %r1, buf; shl.b32 %r2, %r0, 2; add.u32 %r1, %r1, %r2; st.shared.u32 [%r1], %r0; bar.sync 0;
    mov.u64 %x1, buf; cvta.shared.u64 %x2, %x1; ld.u32 %r3, [%x2+12]; isspacep.shared %p, %x2;
    cvta.to.shared.u64 %x4, %x2; ld.shared.u32 %r5, [%x4+8];
    .local .align 8 .b8 depot[16]; mov.u64 %x5, depot; st.local.u32 [%x5+4], %r0;
    cvta.local.u64 %x6, %x5; ld.u32 %r6, [%x6+4];
    mov.u64 %x7, table; cvta.const.u64 %x7, %x7; ld.u8 %r7, [%x7+2]; ld.const.s8 %r8, [table+3];
    add.u32 %s, %r3, %r5; mad.lo.u32 %s, %r6, 100, %s; add.u32 %s, %s, %r7; add.u32 %s, %s, %r8; @!%p mov.u32 %s, 0;"""
    outside = ".shared .align 8 .b8 buf[256]; .const .align 1 .b8 table[4] = {0, 0, 50, -1};"
    assert run_body(body, threads=64, blocks=3, outside=outside).tolist() == [5 + 100 * t + 49 for t in range(64)] * 3


def test_dynamic_shared_memory_lies_behind_the_static():
    outside = ".extern .shared .align 16 .b8 dyn[];"
    body = """.shared .align 4 .b8 fixed[20];
    mov.u32 %r1, dyn; mov.u32 %r2, fixed; sub.u32 %s, %r1, %r2; st.shared.u32 [dyn+60], %s;"""
    assert set(run_body(body, outside=outside, shared_bytes=64)) == {32}
    with pytest.raises(MemoryFault, match="out of bounds"):
        run_body(body, outside=outside, shared_bytes=60)


def test_narrow_and_wide_registers():
    body = """mov.u32 %r1, 0x12F4; cvt.u16.u32 %h1, %r1; mov.b32 %r2, {%h1, %h1};
    mov.b32 {%h2, %h3}, %r2; cvt.s32.s8 %s, %h3; """
    assert set(run_body(body)) == {0xFFFFFFF4}


# Launches


def test_arguments_are_refused_before_anything_runs():
    text = kernel_text("st.global.u32 [%x1], 1;", ".param .u64 out, .param .u32 n, .param .align 4 .b8 s[8]")
    good = [np.zeros(4, np.uint32), np.uint32(4), bytes(8)]
    bad = {
        "takes 3 arguments": good[:2],
        "C-contiguous": [np.zeros((4, 4), np.uint32).T, *good[1:]],
        "has to have 4 bytes": [good[0], np.uint64(4), good[2]],
        "has to have 8 bytes": [*good[:2], bytes(7)],
        "not a buffer": [good[0], np.zeros(1), good[2]],
        "byte order": [good[0].astype(">u4"), *good[1:]],
        "NumPy scalar or bytes": [good[0], 4, good[2]],
    }
    for message, args in bad.items():
        with pytest.raises(ArgumentError, match=message):
            emulator.run(text, "k", args, grid=1, block=1)
    launches = {
        "1024": {"block": 2000}, "positive": {"grid": 0}, "rase": {"checks": ["rase"]}, "mode": {"mode": "x"},
        "227": {"shared_bytes": 10**6}, "divide": {"cluster": 2},
    }  # fmt: skip
    for message, options in launches.items():
        with pytest.raises(ArgumentError, match=message):
            emulator.run(text, "k", good, **{"grid": 1, "block": 1, **options})
    with pytest.raises(ArgumentError, match="one of k"):
        emulator.run(text, "other", good, grid=1, block=1)


def test_read_only_arrays():
    frozen = np.arange(32, dtype=np.uint32)
    frozen.flags.writeable = False
    out = np.zeros(32, np.uint32)
    read = "ld.param.u64 %x1, [b]; ld.global.u32 %s, [%x1+8];" + STORE
    run_text(kernel_text(read, ".param .u64 out, .param .u64 b"), out, frozen)
    assert set(out) == {2}
    with pytest.raises(ArgumentError, match=r"argument 0 \(out\).*writeable"):
        run_text(kernel_text(STORE), frozen)


def test_unknown_instruction_is_named_before_anything_runs():
    out = np.zeros(32, np.uint32)
    text = kernel_text(STORE + "\nfrobnicate.u32 %r1, %r2;")
    with pytest.raises(UnknownInstruction, match=rf"k.ptx:{line_of(text, 'frobnicate')}: `frobnicate.u32 %r1, %r2`"):
        run_text(text, out)


def test_reqntid():
    text = f"{HEADER}.visible .entry k() .reqntid 64 {{ ret; }}"
    emulator.run(text, None, [], grid=1, block=64)
    with pytest.raises(ArgumentError, match="reqntid"):
        emulator.run(text, None, [], grid=1, block=32)


def test_the_address_of_a_parameter_in_32_bits():
    """LLVM takes it in 32 bits, which cvta.param widens: so Triton has it for tensor descriptors."""
    body = """mov.u32 %r0, words; cvt.u64.u32 %x1, %r0; cvta.param.u64 %x2, %x1; ld.u32 %r1, [%x2+4];
    ld.param.u64 %x3, [out]; st.global.u32 [%x3], %r1; ret;"""
    out = np.zeros(1, np.uint32)
    run_text(
        kernel_text(body, ".param .u64 out, .param .align 16 .b8 words[16]"),
        out,
        np.arange(4, dtype=np.uint32).tobytes(),
    )
    assert out[0] == 1


@both_modes
def test_the_address_of_a_parameter_fits_32_bits(mode: str) -> None:
    """Threads choose among parameters, as Triton has them do for a tuple of pointers."""
    choose = "mov.u32 %t, %tid.x; setp.lt.u32 %p, %t, 16; mov.b32 %r0, a; mov.b32 %r1, b; selp.b32 %r2, %r0, %r1, %p;"
    text = kernel_text(f"{choose} ld.param.u32 %s, [%r2+AT]; {STORE}", ".param .u32 a, .param .u32 b, .param .u64 out")
    out = np.zeros(32, np.int32)
    run_text(text.replace("+AT", ""), np.uint32(7), np.uint32(9), out, threads=32, mode=mode)
    assert out.tolist() == [7] * 16 + [9] * 16
    with pytest.raises(MemoryFault, match="out of bounds"):
        run_text(text.replace("AT", "4096"), np.uint32(7), np.uint32(9), out, threads=32, mode=mode)
