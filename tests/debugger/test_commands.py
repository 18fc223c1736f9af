"""The commands: what they print, and the one line of those that cannot be carried out."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import runtime
from ptxlab.debugger import Commands, DebuggerError, Session, State, matrices
from ptxlab.debugger.commands import ALIASES, COMMANDS
from ptxlab.errors import PtxlabError
from ptxlab.hardware import fragments
from ptxlab.hardware.descriptors import swizzle
from tests.support.debug_sessions import COUNT, SCALE, start_scale_session, start_session
from tests.support.small_kernels import HEADER, line_of

Run = Callable[[str], str]
FENCES = Path(__file__).parents[1] / "outside" / "fences"


@pytest.fixture
def run() -> Iterator[Run]:
    """Stop `scale` at the load behind its barrier."""
    with start_scale_session() as session:
        commands = Commands(session)
        commands.run("break ld.shared")
        commands.run("continue")
        yield commands.run


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_stop_says_why_where_and_who(run: Run) -> None:
    line = line_of(SCALE, "ld.shared")
    assert lines(run("where")) == [
        f"breakpoint 1, ld.shared: k.ptx:{line}, dispatch 13: block (0,0,0) thread (0,0,0), warp 0 lanes 0-31, "
        "and 3 warps more",
        "#13 ld.shared.f32 %w, [%turned]",
    ]
    run("thread 70")
    assert "block (0,0,0) thread (70,0,0), warp 2 lanes 0-31" in run("where")


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("print %v", "%v = 0 f32, block (0,0,0) thread (0,0,0)"),
        ("p %at", "%at = 1024 0x400 b32, block (0,0,0) thread (0,0,0)"),
        ("p %at as u8x4", "%at = (0, 4, 0, 0) 0x00000400 u8x4, block (0,0,0) thread (0,0,0)"),
        ("p %v[3:6]", "%v[3:6] f32[3], lanes of warp 0 | 3 3 4 5"),
        ("p %tid.x[7]", "%tid.x[7] = 7 0x7 u32, block (0,0,0) thread (0,0,0)"),
        ("p %at as f16x2 lanes", None),
        ("p by", "by = 0.5 f32, argument 2"),
        ("p x[5]", "x[5] = 5 f32, argument 0, float32[128]"),
        ("p x[120:]", "x[120:] f32[8], argument 0, float32[128] | 120 120 121 122 123 124 125 126 127"),
        (
            "p row[0:6] 2x3",
            "row[0:6] f32[6], byte 0 of shared memory of block 0 of the wave (row + 0), as 2x3 "
            "| 0 1 2 | 0 0 1 2 | 1 3 4 5",
        ),
        (
            "p row[1:3] words",
            "row[1:3] b32[2], byte 4 of shared memory of block 0 of the wave (row + 4) | 1 0x3f800000 0x40000000",
        ),
        (
            "p row[0:2] as u8x4",
            "row[0:2] u8x4[2], byte 0 of shared memory of block 0 of the wave (row + 0) "
            "| 0 (0, 0, 0, 0) (0, 0, 128, 63)",
        ),
        (
            "p [%at+8] as f32 1x2",
            "[%at+8] f32[126], byte 8 of shared memory of block 0 of the wave (row + 8), as 1x2 | 0 1 | 0 2 3",
        ),
        ("p shared[127] as f32", "shared[127] = 127 f32, byte 508 of shared memory of block 0 of the wave (row + 508)"),
        ("registers", "%turned = 1148 0x47c b32 | %w = 0 f32"),
        ("delete 1", ""),
        ("break", "1 ld.shared"),
        ("findings", "no findings"),
        ("pending", "nothing is pending"),
        ("lane 9", "block (0,0,0) thread (9,0,0)"),
        ("warp 3", "block (0,0,0) thread (96,0,0)"),
        ("thread 5,0,0", "block (0,0,0) thread (5,0,0)"),
        ("warps", f"warp 0-3 lanes 0-31 runs k.ptx:{line_of(SCALE, 'ld.shared')} `ld.shared.f32 %w, [%turned]`"),
    ],
)
def test_what_is_printed(run: Run, command: str, shown: str | None) -> None:
    output = " | ".join(lines(run(command)))
    assert output == shown if shown is not None else output.count("(") >= 32


@pytest.mark.parametrize("span", [32, 64, 128])
def test_a_swizzled_tile(span: int) -> None:
    """Rows of `span` bytes whose 16-byte pieces were permuted, in order again."""
    x = np.arange(4 * span, dtype=np.float32)  # 16 rows
    text = SCALE.replace("row[128]", "row[512]").replace("[%at], %v", "[%turned], %v")
    positions = swizzle(1024 + 4 * np.arange(len(x)), span)
    text = text.replace("bar.sync 0;", "").replace("mad.lo.u32 %at, %t, 4, %at;", "ld.global.b32 %turned, [%y];")
    with start_session(text, x, positions.astype(np.uint32), np.float32(0), block=len(x), checks="") as session:
        run = Commands(session).run
        run("break xor"), run("continue")
        tile = State(session).find("row").tile(16, span // 4, span)
        np.testing.assert_array_equal(tile.values, x.reshape(16, -1))
        assert run(f"print row 16x{span // 4} swizzle {span}").splitlines()[3].split()[:2] == ["1", f"{x[span // 4]:g}"]


def test_registers_of_the_thread_that_is_looked_at(run: Run) -> None:
    assert run("warp 1").endswith("thread (32,0,0)")
    assert "%v = 32 " in " ".join(lines(run("print %v")))
    assert "%v = 41 " in " ".join(lines((run("lane 9"), run("print %v"))[1]))


def test_steps_and_their_repetition(run: Run) -> None:
    with start_scale_session() as session:
        commands = Commands(session)
        assert "mov.u32 %t" in commands.run("step 3")
        assert "add.u64 %y" in commands.run("")
        assert "#8" in commands.run("stepi 2")
        assert "#7" in commands.run("back") and "#5" in commands.run("backi 2")
        commands.run("where")
        assert commands.run("") == ""
        assert commands.run("restart").startswith("begin")


def test_source_and_code(run: Run) -> None:
    line = line_of(SCALE, "ld.shared")
    assert f"=> {line:>5}+     ld.shared.f32 %w, [%turned];" in run("list").splitlines()
    assert "=>   #13" in run("code") and run("code #0").count("\n") == 4
    shown = lines(run(f"line {line_of(SCALE, 'mad.lo')}"))
    assert shown == ["mad.lo.u32 %at, %t, 4, %at;", "#9 mad.lo.u32 %at, %t, 4, %at %at = 1024 0x400"]


def test_help_names_every_command(run: Run) -> None:
    text = run("help")
    assert all(re.search(rf"^{name}\b", text, re.MULTILINE) for name in COMMANDS)
    assert run("help s").startswith("step, s [COUNT] [all]") and ALIASES["c"] == "continue"


def test_a_name_of_cpp_says_that_debug_information_is_not_read() -> None:
    """`nvcc -G` names locals in a section of the PTX."""
    with start_session(
        f"{SCALE}\n.section .debug_info\n{{\n.b8 0\n}}\n", *[np.zeros(128, np.float32)] * 2, 1.0
    ) as stopped:
        hint = r"\(debug information of `nvcc -G` is not read\), which `line` shows by source line"
        for command in ("print i", "break 8 if i == 2"):
            with pytest.raises(DebuggerError, match=f"'i'; C\\+\\+ locals are in registers {hint}$"):
                Commands(stopped).run(command)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("fly", "unknown command 'fly'; `help` lists them"),
        ("brake 3", "unknown command 'brake'; nearest: break; `help` lists them"),
        ("help brake", "help: no command 'brake'; nearest: break"),
        ("step the dog", "step: [COUNT] [all] (got 'the dog')"),
        ("step 0", "step: [COUNT] [all] (got '0')"),
        ("continue 3", "continue: takes nothing (got '3')"),
        ("delete x", "delete: a number (got 'x')"),
        ("delete 9", "delete: no breakpoint 9; there are [1]"),
        ("print", "print: NAME[FROM:TO] [as TYPE] [lanes | words | ROWSxCOLUMNS [swizzle BYTES]]"),
        ("print %nosuch", "print: no register %nosuch in this kernel"),
        ("print %r99", "print: no register %r99 in this kernel"),
        ("print rows", "print: no register, variable or argument 'rows'; nearest: row"),
        ("print row[200]", "print: row is 128 (got [200])"),
        ("print row[0,0]", "print: row is 128 (got [0,0])"),
        ("print row[a]", "print: an index is a number or from:to, per axis (got [a])"),
        ("print row as f31", "as: a PTX type (f32, s8, bf16, f16x2 ..) or lanes such as u8x4 (got f31)"),
        ("print row as u9x9", "as: a PTX type (f32, s8, bf16, f16x2 ..) or lanes such as u8x4 (got u9x9)"),
        ("print %v as f64", "as: %v has 32 bits, f64 does not fit"),
        ("print %odd as u32", "as: %odd has 8 bits, u32 does not fit"),
        ("print row 99x99", "print: row has 128 elements, 99x99 does not fit"),
        ("print row swizzle 32", "print: swizzle goes with ROWSxCOLUMNS (got 'row swizzle 32')"),
        ("print row 4x8 swizzle 48", "print: swizzle 32, 64, 128, the bytes of a row, of a whole variable in shared"),
        ("print x 4x8 swizzle 32", "print: swizzle 32, 64, 128, the bytes of a row, of a whole variable in shared"),
        ("print [%v]", "print: [%v] points nowhere"),
        ("print [%odd]", "print: [REGISTER+OFFSET] of 32 bits, into shared memory, or 64 (got [%odd])"),
        ("print [nosuch]", "print: [REGISTER+OFFSET] of 32 bits, into shared memory, or 64 (got [nosuch])"),
        ("print [%x-4096]", "print: [%x-4096] points nowhere"),
        ("thread 500", "thread: 0 to 127 (got 500)"),
        ("lane 32", "lane: 0 to 31 (got 32)"),
        ("warp 4", "warp: 0 to 3 (got 4)"),
        ("block 1", "block: 0 to 0 (got 1)"),
        ("thread 0,1,0", "thread: there are (128, 1, 1) (got 0,1,0)"),
        ("thread of mine", "thread: a number (got 'of mine')"),
        ("warp 1,0,0", "warp: a number (got '1,0,0')"),
        ("list 999", "list: k.ptx has"),
        ("code #99", "code: #0 to #21 (got #99)"),
        ("line 1", "line: line 1 of k.ptx has no instruction"),
        ("registers some", "registers: nothing or all (got 'some'); print shows one"),
        ("who holds", "who: holds row N [column M] [of a|b|c|d]"),
        ("who holds row 3", "fragment: this kernel has no mma, wgmma, ldmatrix or stmatrix"),
        ("fragment a", "fragment: this kernel has no mma, wgmma, ldmatrix or stmatrix"),
        ("help fly", "help: no command 'fly'"),
    ],
)  # fmt: skip
def test_what_is_refused(run: Run, command: str, problem: str) -> None:
    place = run("where")
    with pytest.raises(DebuggerError) as error:
        run(command)
    assert problem in str(error.value) and "\n" not in str(error.value)
    assert run("where") == place


# Matrices

FORMS = {  # form of mma -> maps and dtypes of its operands
    "m16n8k32.row.col.s32.s8.s8.s32": (fragments.mma_a(32), fragments.mma_b(32), fragments.mma_c(), "i1", "i4"),
    "m16n8k16.row.col.f32.f16.f16.f32": (fragments.mma_a(16), fragments.mma_b(16), fragments.mma_c(), "f2", "f4"),
    "m16n8k16.row.col.f16.f16.f16.f16": (fragments.mma_a(16), fragments.mma_b(16), fragments.mma_c(16), "f2", "f2"),
}


@pytest.mark.parametrize("form", FORMS)
def test_fragments_of_mma(form: str) -> None:
    """The registers are shown as matrices: those that were dealt out, and their product."""
    map_a, map_b, map_d, dtype, summed = FORMS[form]
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 10, fragment.shape).astype(dtype) for fragment in (map_a, map_b))
    dealt = np.concatenate([map_a.scatter(a), map_b.scatter(b)], axis=1)
    dealt = np.concatenate([dealt, np.zeros((32, 8 - dealt.shape[1]), np.uint32)], axis=1).reshape(-1)
    names = [", ".join(f"%{letter}{i}" for i in range(fragment.registers))
             for letter, fragment in (("a", map_a), ("b", map_b), ("d", map_d))]  # fmt: skip
    loads = "".join(f"ld.global.b32 %{name}, [%x+{4 * i}];\n" for i, name in enumerate(
        [f"a{i}" for i in range(map_a.registers)] + [f"b{i}" for i in range(map_b.registers)]))  # fmt: skip
    d_type = ".f32" if summed == "f4" else ".b32"
    body = f""".reg .b32 %a<4>, %b<4>, %t; .reg {d_type} %d<4>; .reg .b64 %x, %o;
    mov.u32 %t, %tid.x; ld.param.u64 %x, [in]; mul.wide.u32 %o, %t, 32; add.u64 %x, %x, %o;
    {loads}
    mma.sync.aligned.{form} {{{names[2]}}}, {{{names[0]}}}, {{{names[1]}}}, {{{names[2]}}};
    ret;"""
    with start_session(f"{HEADER}.visible .entry k(.param .u64 in) {{\n{body}\n}}", dealt, checks="") as session:
        commands = Commands(session)
        commands.run("break mma")
        commands.run("continue")
        for letter, expected in (("a", a), ("b", b)):
            shown_matrix, _ = matrices.matrix(State(session), matrices.operand(State(session), letter)[1])
            np.testing.assert_array_equal(shown_matrix, expected)
        commands.run("step")
        shown_matrix, _ = matrices.matrix(State(session), matrices.operand(State(session), "d")[1])
        np.testing.assert_array_equal(shown_matrix, a.astype("f4") @ b.astype("f4"))
        for letter, fragment in (("a", map_a), ("d", map_d)):
            lanes = sorted(set(np.argwhere(fragment.rows == 8)[:, 0].tolist()))
            output = commands.run(f"who holds row 8 of {letter}").splitlines()
            assert [int(re.search(r"lane +(\d+)", line)[1]) for line in output[1:]] == lanes
        column = commands.run("who holds row 3 column 5 of d").splitlines()
        assert len(column) == 2 and column[1].split(":")[1].split() == [f"{shown_matrix[3, 5]:g}"]
        assert commands.run("fragment d [0:2, 0:3]").splitlines()[-1].split()[1:] == [
            f"{n:g}" for n in shown_matrix[1, :3]
        ]
        with pytest.raises(DebuggerError, match=r"holds: row 0 to 15 of d \(got 16\)"):
            commands.run("who holds row 16")
        with pytest.raises(DebuggerError, match=r"fragment: mma\S+ has d, a, b, c \(got 'e'\)"):
            commands.run("fragment e")


@pytest.mark.full
def test_wgmma_in_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands in shared memory by their descriptors, the sum over a warp group, the group until it is waited for."""
    monkeypatch.chdir(FENCES)
    kernel = runtime.load("tilelang_2634.cu", arch="sm_90a")
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, (rows, 16)).astype(np.float16) for rows in (64, 8))
    d = np.zeros((64, 8), np.float32)
    args = a.view(np.uint8), b.view(np.uint8), d
    with Session.of(kernel, *args, grid=1, block=128, mode="late") as session:
        run = Commands(session).run
        text = session.kernel.source.text
        with pytest.raises(DebuggerError, match=r"break: line 1 of tilelang_2634.cu has no instruction; the next"):
            run("break 1")
        line = line_of(text, "descriptor(right, 128, 128)")
        assert run(f"break {line}").startswith(f"breakpoint 1, tilelang_2634.cu:{line}")
        assert "print: no register, variable or argument 'w'; C++ locals are in registers" in refusal_of(run, "print w")
        title, assigned, written = run("print t").splitlines()
        assert title.startswith("t is a C++ local") and assigned.strip() == "12  const int t = threadIdx.x;"
        assert re.fullmatch(r" +%r\d+ = 0  0x0", written)
        assert f"tilelang_2634.cu:{line}, dispatch" in run("continue")
        run("delete 1"), run("break wgmma.mma_async")
        assert "breakpoint 2, wgmma.mma_async: tilelang_2634.cu" in run("continue")
        for letter, expected in (("a", a), ("b", b)):
            shown_matrix, _ = matrices.matrix(State(session), matrices.operand(State(session), letter)[1])
            np.testing.assert_array_equal(shown_matrix, expected)
        assert "b of wgmma is in shared memory; `fragment b` prints it" in refusal_of(run, "who holds row 1 of b")
        run("delete 2"), run("break wgmma.commit_group"), run("break wgmma.wait_group"), run("break finding")
        pending = "wgmma m64n8, tilelang_2634.cu:25, by the warp of block (0,0,0) thread (0,0,0) and 3 more: under way"
        assert "async-dirty" in run("continue")
        assert run("pending") == f"{pending}; group 0, not committed"
        run("delete 5"), run("continue"), run("continue")
        assert run("pending") == f"{pending}; group 0, committed"
        run("next")
        assert run("pending") == "nothing is pending"
        shown_matrix, _ = matrices.matrix(State(session), matrices.operand(State(session), "d")[1])
        np.testing.assert_array_equal(shown_matrix, a.astype("f4") @ b.astype("f4").T)
        assert "lane  8 of warp 1" in run("who holds row 18 of d")
        assert "[64 x 8], f32" in run("fragment d")
        assert run("print a").splitlines()[0] == "a   u8[64 x 32], argument 0, uint8[64, 32]"


def refusal_of(run: Run, command: str) -> str:
    with pytest.raises(DebuggerError) as error:
        run(command)
    return str(error.value)


COPY = f"""{HEADER}
.visible .entry copy(.param .u64 x)
{{
    .reg .pred %done; .reg .b32 %bar, %to; .reg .b64 %x, %state;
    .shared .align 16 .b8 tile[64];
    .shared .align 8 .b64 full;
    ld.param.u64 %x, [x];
    mov.u32 %bar, full;
    mov.u32 %to, tile;
    mbarrier.init.shared.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %state, [%bar], 64;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%to], [%x], 64, [%bar];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %done, [%bar], 0;
    @!%done bra WAIT;
    bar.sync 1, 64;
    ret;
}}
"""


def test_copies_mbarriers_and_barriers() -> None:
    with start_session(COPY, np.arange(16, dtype=np.uint32), block=1, mode="late") as session:
        run = Commands(session).run
        run("break mbarrier.try_wait"), run("continue")
        copy = f"bulk copy of 64 bytes, k.ptx:{line_of(COPY, 'cp.async.bulk')}, by block (0,0,0) thread (0,0,0)"
        assert run("pending").splitlines() == [
            f"{copy}: under way; tells the mbarrier at full + 0",
            "mbarrier full + 0: phase 0 (parity 0), 1 of 1 arrivals, 64 bytes to come",
        ]
        run("step")
        assert run("pending") == "mbarrier full + 0: phase 1 (parity 1), 0 of 1 arrivals"
        assert lines(run("print tile as u32"))[1] == "0 0 1 2 3 4 5 6 7"
        run("backi")
        assert "under way" in run("pending")
        run("delete 1")
        assert "error: deadlock" in run("continue")
        assert f"barrier 1: 1 of 64 threads, since k.ptx:{line_of(COPY, 'bar.sync')}" in run("pending")
        assert "waits k.ptx:" in " ".join(lines(run("warps")))


def test_phases_count_on() -> None:
    """A copy that is done early is shown as done; the end of the launch keeps its state."""
    with start_session(COPY.replace("bar.sync 1, 64;", ""), np.arange(16, dtype=np.uint32), block=1) as session:
        run = Commands(session).run
        run("break mbarrier.try_wait"), run("continue")
        assert (
            run("pending")
            .splitlines()[0]
            .endswith("done, but nobody has waited for it; tells the mbarrier at full + 0")
        )
        assert run("continue") == "the launch has ended after 10 dispatches, no findings"
        assert lines(run("print %state"))[0].startswith("%state = 1 ")  # phase 0, one arrival missing
        assert run("registers").count("\n") == 4
        assert run("pending") == "mbarrier full + 0: phase 1 (parity 1), 0 of 1 arrivals"
        assert run("warps").split() == ["warp", "0", "lanes", "0", "ended"]
        assert "the launch has ended" in refusal_of(run, "step")


def test_what_is_found_at_the_very_end() -> None:
    """Bytes that never come are no instruction's finding: the end says it."""
    text = COPY.replace("64, [%bar];", "32, [%bar];").partition("WAIT")[0] + "    ret;\n}\n"
    with start_session(text, np.arange(16, dtype=np.uint32), block=1) as session:
        output = Commands(session).run("continue").splitlines()
        assert output[0].startswith(f"async: k.ptx:{line_of(COPY, 'expect_tx')}: `mbarrier.arrive.expect_tx")
        assert output[1:] == ["the launch has ended after 8 dispatches, 1 finding"] and session.found


def test_an_interrupted_run_stops_and_goes_on() -> None:
    with start_session(COUNT, np.zeros(1, np.uint32), 100, checks="") as session:
        session._run.interrupted = True  # as a KeyboardInterrupt leaves it
        assert session.go_on().reason == "interrupted" and session.now.moment.position == 1
        assert session.go_on().ended


NAMES = (
    "%v",
    "%turned",
    "%odd",
    "%tid.x",
    "%tid.q",
    "%clock",
    "%",
    "row",
    "x",
    "by",
    "shared",
    "[%at+4]",
    "[%x-8]",
    "",
)
INDICES = ("", "[0:4]", "[3]", "[:]", "[5:2]", "[0:9,1]", "[200:]", "[127]", "[", "[-1]")
TYPES = ("", "as u8x4", "as f16x2", "as bf16", "as f64", "as pred", "as s4x8", "as u1x32", "as b16", "as")
SHAPES = ("", "lanes", "words", "2x4", "0x4", "4x8 swizzle 32", "4x32 swizzle 128", "swizzle", "9x99999999999")
LINES = st.one_of(
    st.builds("p {}{} {} {}".format, *map(st.sampled_from, (NAMES, INDICES, TYPES, SHAPES))),
    st.lists(st.sampled_from([*ALIASES, *NAMES, "0", "3", "all", "#4", "row 8", "k.ptx:20", "é", "]"])).map(" ".join),
)


@given(st.lists(LINES, max_size=25))
@settings(max_examples=12)
def test_any_line_is_carried_out_or_refused_in_one(typed: list[str]) -> None:
    with start_scale_session() as session:
        commands = Commands(session)
        commands.run("break ld.shared"), commands.run("continue")
        for line in typed:
            try:
                commands.run(line)
            except PtxlabError as error:
                assert "\n" not in str(error)


def test_the_fragment_of_a_warp_group() -> None:
    """The fragment of A in registers, of any width, is made of its warps': with 8 bits it equals the recorded one."""
    fragment = matrices.of_warp_group(fragments.mma_a(32))
    np.testing.assert_array_equal(fragment.rows, fragments.wgmma_a().rows)
    np.testing.assert_array_equal(fragment.cols, fragments.wgmma_a().cols)
