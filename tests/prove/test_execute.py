"""Symbolic execution of whole kernels, against the emulator on numbers."""

import numpy as np
import pytest

from ptxlab import emulator
from tests.support.small_kernels import kernel_text, line_of

z3 = pytest.importorskip("z3", reason="z3-solver is not installed: it comes with the extra `prove`")

from ptxlab.prove.execute import Buffer, NotModelled, execute  # noqa: E402

PARAMS = ".param .u64 in, .param .u64 out"
# Each thread: %r0 is its number, %r1 its word of `in`; what it leaves in %s goes to its word of `out`.
BEFORE = """mov.u32 %r0, %tid.x; ld.param.u64 %x0, [in]; mul.wide.u32 %x1, %r0, 4; add.u64 %x0, %x0, %x1;
    ld.global.u32 %r1, [%x0];"""
AFTER = "ld.param.u64 %x2, [out]; add.u64 %x2, %x2, %x1; st.global.u32 [%x2], %s; ret;"
TABLE = ".const .align 4 .b32 table[4] = {7, 70, 700, 7000};"
BODIES = {
    "a loop with a constant bound": """mov.u32 %s, 0; mov.u32 %r2, 0;
    again: and.b32 %r3, %r1, 1; add.u32 %s, %s, %r3; shr.u32 %r1, %r1, 1; add.u32 %r2, %r2, 1;
    setp.lt.u32 %p, %r2, 32; @%p bra again;""",
    "a loop that an input ends": """mov.u32 %s, 0; and.b32 %r1, %r1, 7;
    again: setp.eq.u32 %p, %r1, 0; @%p bra done; add.u32 %s, %s, %r1; sub.u32 %r1, %r1, 1; bra again;
    done:""",
    "both ways of a branch": """setp.lt.s32 %p, %r1, 0; @%p bra negative; mul.lo.u32 %s, %r1, 3; bra done;
    negative: neg.s32 %s, %r1;
    done: xor.b32 %s, %s, 5;""",
    "a predicated instruction": "mov.u32 %s, 1; setp.gt.u32 %p, %r1, 9; @!%p mov.u32 %s, %r1;",
    "a predicated store": """mov.u32 %s, 7; ld.param.u64 %x5, [out]; add.u64 %x5, %x5, %x1; st.global.u32 [%x5], %s;
    setp.gt.u32 %p, %r1, 9; @%p st.global.u32 [%x5], %r1; ld.global.u32 %s, [%x5];""",
    "a branch by thread": """setp.lt.u32 %p, %r0, 2; @%p bra low; mov.u32 %s, 1; bra done;
    low: add.u32 %s, %r1, %r0;
    done:""",
    "neighbours in a warp": """mov.u32 %s, %r1; shfl.sync.bfly.b32 %r2, %s, 1, 31, -1; add.u32 %s, %s, %r2;
    shfl.sync.down.b32 %r3|%q, %s, 2, 3, -1; selp.b32 %s, %r3, 9, %q;""",
    "shared memory": """.shared .align 4 .b8 tile[16]; mov.u32 %r2, tile; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3;
    st.shared.u32 [%r4], %r1; bar.sync 0; xor.b32 %r3, %r3, 12; add.u32 %r4, %r2, %r3; ld.shared.u32 %s, [%r4];""",
    "a barrier on one condition": """.shared .align 4 .b8 tile[16]; mov.u32 %r2, tile; shl.b32 %r3, %r0, 2;
    ld.param.u64 %x5, [in]; ld.global.u32 %r5, [%x5]; mov.u32 %s, 5; setp.lt.u32 %p, %r5, 99; @%p bra done;
    add.u32 %r4, %r2, %r3; st.shared.u32 [%r4], %r1; bar.warp.sync -1; xor.b32 %r3, %r3, 4; add.u32 %r4, %r2, %r3;
    ld.shared.u32 %s, [%r4]; bar.sync 1;
    done:""",
    "a table read at an input": """and.b32 %r2, %r1, 3; mul.wide.u32 %x5, %r2, 4; mov.u64 %x6, table;
    add.u64 %x6, %x6, %x5; ld.const.u32 %s, [%x6];""",
    "bytes put together": """mov.b32 {%h0, %h1}, %r1; mov.b32 %s, {%h1, %h0}; cvt.s32.s16 %r2, %h0;
    add.u32 %s, %s, %r2;""",
    "a carry": "add.cc.u32 %r2, %r1, %r1; addc.u32 %s, 0, 0; mad.wide.u32 %x5, %r1, %r1, 0; cvt.u32.u64 %r3, %x5;",
}
THREADS = 4


@pytest.mark.default_cases(
    "a branch by thread",
    "a carry",
    "both ways of a branch",
    "bytes put together",
    "neighbours in a warp",
    "a predicated instruction",
    "a predicated store",
    "shared memory",
)
@pytest.mark.parametrize("case", BODIES)
def test_the_same_as_the_emulator(case: str) -> None:
    text = kernel_text(BEFORE + BODIES[case] + AFTER, PARAMS, outside=TABLE)
    module = emulator.parse(text)
    source, out = Buffer("in", 16), Buffer("out", 16)
    trace = execute(
        module.entries["k"], [source, out], grid=(1, 1, 1), block=(THREADS, 1, 1),
        threads=[((0, 0, 0), (t, 0, 0)) for t in range(THREADS)],
    )  # fmt: skip
    assert trace.faults == [] and sorted(out.written) == list(range(16))
    rng = np.random.default_rng(3)
    for numbers in (rng.integers(0, 2**32, THREADS, np.uint32), np.array([0, 9, 10, 2**31], np.uint32)):
        expected = np.zeros(THREADS, np.uint32)
        emulator.run(module, "k", [numbers, expected], grid=1, block=THREADS)
        substitutions = [
            (source.read(at), z3.BitVecVal(int(octet), 8)) for at, octet in enumerate(numbers.view(np.uint8))
        ]
        result_bytes = [z3.simplify(z3.substitute(out.content[at], *substitutions)).as_long() for at in range(16)]
        assert np.array(result_bytes, np.uint8).view(np.uint32).tolist() == expected.tolist(), numbers


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("vote.sync.any.pred %p, %q, -1;", "no such instruction"),
        ("atom.global.add.u32 %s, [%x0], 1;", "no such instruction"),
        (
            "mul.wide.u32 %x5, %r1, 4; add.u64 %x5, %x5, %x0; ld.global.u32 %s, [%x5];",
            "its address has more than 64 values, and depends on in.u32[0]",
        ),
        (
            "again: add.u32 %r1, %r1, 1; setp.ne.u32 %p, %r1, 0; @%p bra again;",
            "how often this loop goes round depends on in.u32[0]",
        ),
        ("again: bra again;", "more than 300 instructions"),
        ("mov.u32 %s, %smid;", "%smid is not modelled"),
        ("shfl.sync.bfly.b32 %s, %r1, 16, 31, -1;", "lane 16 of the warp is not followed here"),
        ("bar.sync 0;", "of the 32 threads of a barrier, 1 come to it"),
        ("bar.warp.sync 3;", "of the 2 threads of a barrier, 1 come to it"),
    ],
)
def test_what_is_not_modelled_is_refused_by_line(body: str, why: str, monkeypatch) -> None:
    monkeypatch.setattr("ptxlab.prove.execute.MAX_STEPS", 300)
    text = kernel_text(f"{BEFORE}\n{body}\n{AFTER}", PARAMS)
    entry = emulator.parse(text, "k.ptx").entries["k"]
    first = (0, 0, 0)
    with pytest.raises(NotModelled) as error:
        execute(entry, [Buffer("in"), Buffer("out")], grid=(1, 1, 1), block=(32, 1, 1), threads=[(first, first)])
    assert why in str(error.value) and f"k.ptx:{line_of(text, body)}: `" in str(error.value)


APART = {
    # Lockstep goes the lower way first: it would read what the other way has still to store.
    "a barrier": """.shared .align 4 .b8 tile[4]; mov.u32 %r2, tile; setp.ne.u32 %p, %r0, 0; @%p bra other;
    bar.sync 0; ld.shared.u32 %s, [%r2]; bra done;
    other: st.shared.u32 [%r2], %r1; bar.sync 0; mov.u32 %s, 1;
    done:""",
    "a barrier of a warp": """.shared .align 4 .b8 tile[4]; mov.u32 %r2, tile; setp.ne.u32 %p, %r0, 0; @%p bra other;
    bar.warp.sync 3; ld.shared.u32 %s, [%r2]; bra done;
    other: st.shared.u32 [%r2], %r1; bar.warp.sync 3; mov.u32 %s, 1;
    done:""",
    "a lane": "mov.u32 %s, 0; setp.gt.u32 %p, %r1, 9; @%p shfl.sync.bfly.b32 %s, %r1, 1, 31, 3;",
}


@pytest.mark.parametrize("case", APART)
def test_threads_that_meet_elsewhere_are_not_followed(case: str) -> None:
    entry = emulator.parse(kernel_text(BEFORE + APART[case] + AFTER, PARAMS)).entries["k"]
    threads = [((0, 0, 0), (t, 0, 0)) for t in range(2)]
    with pytest.raises(NotModelled, match=r"1 come to it|is not followed here"):
        execute(entry, [Buffer("in"), Buffer("out")], grid=(1, 1, 1), block=(2, 1, 1), threads=threads)


def test_an_address_may_have_as_many_values_as_said() -> None:
    table = ".const .align 4 .b32 table[64] = {7};"
    body = """and.b32 %r2, %r1, 63; mul.wide.u32 %x5, %r2, 4; mov.u64 %x6, table; add.u64 %x6, %x6, %x5;
    ld.const.u32 %s, [%x6];"""
    entry = emulator.parse(kernel_text(BEFORE + body + AFTER, PARAMS, outside=table)).entries["k"]
    first, out = (0, 0, 0), Buffer("out")
    execute(entry, [Buffer("in"), out], grid=(1, 1, 1), block=(1, 1, 1), threads=[(first, first)])
    solver = z3.Solver()
    assert solver.check(z3.UGT(out.content[0], 7)) == z3.unsat


def test_faults_name_the_line_and_the_condition() -> None:
    body = "setp.gt.u32 %p, %r1, 9; @%p trap; add.u64 %x0, %x0, 1; ld.global.u32 %s, [%x0];"
    entry = emulator.parse(kernel_text(BEFORE + body + AFTER, PARAMS), "k.ptx").entries["k"]
    first, source = (0, 0, 0), Buffer("in")
    trace = execute(entry, [source, Buffer("out")], grid=(1, 1, 1), block=(1, 1, 1), threads=[(first, first)])
    (trapped, why), (unaligned, place) = trace.faults
    assert "traps" in why and "byte 1 of in" in place
    word = z3.Concat(*[source.read(at) for at in (3, 2, 1, 0)])
    solver = z3.Solver()
    assert solver.check(trapped, z3.ULE(word, 9)) == z3.unsat and solver.check(trapped) == z3.sat
    assert solver.check(unaligned, z3.UGT(word, 9)) == z3.unsat


def test_what_nobody_wrote_may_be_anything() -> None:
    entry = emulator.parse(kernel_text(BEFORE + "setp.eq.u32 %p, %r1, 0; @%p mov.u32 %s, 1;" + AFTER, PARAMS)).entries[
        "k"
    ]
    first, source, out = (0, 0, 0), Buffer("in"), Buffer("out")
    execute(entry, [source, out], grid=(1, 1, 1), block=(1, 1, 1), threads=[(first, first)])
    zero = [source.read(offset) == 0 for offset in range(4)]
    solver = z3.Solver()
    assert solver.check(*zero, out.content[0] != 1) == z3.unsat
    assert solver.check(z3.Not(z3.And(zero)), out.content[0] == 77) == z3.sat
