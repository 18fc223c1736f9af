"""The engine: where a session stops, that it comes back to the same state, and what it refuses."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import emulator, runtime
from ptxlab.debugger import DebuggerError, Session, State
from ptxlab.errors import ArgumentError, MemoryFault
from tests.support.debug_sessions import COUNT, SCALE, load_text, start_scale_session, start_session
from tests.support.small_kernels import HEADER, line_of


@pytest.fixture
def scale() -> Iterator[Session]:
    with start_scale_session() as session:
        yield session


def state_of(session: Session) -> tuple[Any, ...]:
    """Return where a session is, and all that the kernel holds there."""
    moment = session.now.moment
    registers = [file.tobytes() for file in moment.machine.files.values()]
    return *moment.key, moment.pc, registers, moment.machine.memory.arena.tobytes()


def line(session: Session) -> int:
    return session.now.moment.instruction.line


def lanes(session: Session, name: str) -> Any:
    return State(session).find(name).values


def test_it_begins_before_the_first_instruction(scale: Session) -> None:
    assert scale.now.reason == "begin" and scale.now.moment.key == (0, False) and scale.now.moment.pc == 0


def test_a_line_stops_before_its_instruction(scale: Session) -> None:
    number = scale.stop_at(f"k.ptx:{line_of(SCALE, 'bar.sync')}")
    assert scale.go_on().reason == f"breakpoint {number}, k.ptx:{line_of(SCALE, 'bar.sync')}"
    assert line(scale) == line_of(SCALE, "bar.sync") and len(scale.now.moment.warps) == 4
    np.testing.assert_array_equal(lanes(scale, "%v"), np.arange(32))
    np.testing.assert_array_equal(lanes(scale, "row"), np.arange(128))
    np.testing.assert_array_equal(lanes(scale, "y"), np.zeros(128))
    scale.forget(number)
    assert scale.go_on().ended
    x = np.arange(128, dtype=np.float32)
    w = x.reshape(4, 32)[:, ::-1].reshape(-1) + np.where(np.arange(128) % 2, np.float32(0.5), 0).astype(np.float32)
    with np.errstate(divide="ignore"):
        np.testing.assert_array_equal(lanes(scale, "y"), w / (w - 3))


def test_opcodes_and_instructions(scale: Session) -> None:
    scale.stop_at("ld.shared")
    scale.go_on()
    assert scale.now.moment.instruction.opcode == "ld.shared.f32"
    scale.stop_at(f"#{scale.now.moment.pc + 2}")
    assert scale.go_on().moment.instruction.opcode == "setp.eq.u32"


def test_a_step_follows_one_warp_or_all() -> None:
    """Warp 1 leaves the loop at once, so its next line is behind it; anyone's next one is in it."""
    with start_session(COUNT, np.zeros(1, np.uint32), 3, block=64, checks="") as count:
        count.stop_at("bra")
        count.go_on()
        count.look_at(0, 32)
        assert count.step(everyone=True).moment.instruction.text.startswith("add.u32")
        count.restart()
        with pytest.raises(DebuggerError, match=r"^back: this is the beginning of the launch$"):
            count.back()
        count.go_on()
        count.look_at(0, 32)
        count.forget(1)
        assert count.step().moment.instruction.opcode == "ld.param.u64"
        assert 1 in count.now.moment.warps
        assert count.now.moment.position > 9  # the loop has run in between


def test_lanes_that_come_apart(scale: Session) -> None:
    scale.stop_at("add.f32")
    scale.go_on()
    assert scale.now.moment.pc > 0 and len(np.arange(128)[scale.now.moment.lanes]) == 64


def test_backwards_is_the_same_state(scale: Session) -> None:
    """Every state on the way, registers and memory, comes again in the other order."""
    on_the_way = [state_of(scale)]
    for _ in range(30):
        if scale.step("instruction").ended:
            break
        on_the_way.append(state_of(scale))
    for state in reversed(on_the_way):
        scale.back("instruction")
        assert state_of(scale) == state


@pytest.mark.smoke
@settings(max_examples=8)
@given(st.lists(st.sampled_from(["step", "instruction", "anyone", "back", "back all", "go on", "rewind"]), max_size=8))
def test_any_way_to_a_moment_finds_the_same(moves: list[str]) -> None:
    seen: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    with start_scale_session() as scale:
        scale.stop_at("setp")
        acts = {"step": scale.step, "instruction": lambda: scale.step("instruction"),
                "anyone": lambda: scale.step("instruction", everyone=True), "back": scale.back,
                "back all": lambda: scale.back("instruction", everyone=True),
                "go on": scale.go_on, "rewind": scale.rewind}  # fmt: skip
        for move in moves:
            try:
                acts[move]()
            except DebuggerError as error:
                assert "the beginning" in str(error) or "has ended" in str(error)
            state = state_of(scale)
            assert seen.setdefault(state[:2], state) == state


def test_a_nan_and_the_operands_it_came_from() -> None:
    """The float check is not asked for: the breakpoint asks for it, and stays where the session is."""
    x = np.full(64, 3, np.float32)
    x[37] = 0  # of thread 58, by way of the turn
    text = SCALE.replace("sub.f32 %d, %w, 0f40400000", "mul.f32 %d, %w, 0f00000000")
    with start_session(text, x, np.zeros(64, np.float32), np.float32(0), block=64) as scale:
        scale.step()
        state = state_of(scale)
        scale.stop_at("nan")
        assert state_of(scale) == state
        stop = scale.go_on()
        assert (stop.moment.findings[0].kind, stop.moment.findings[0].thread) == ("nan", (58, 0, 0))
        assert stop.moment.is_after and line(scale) == line_of(text, "div.rn") and scale.focus == (0, 58)
        assert np.isnan(lanes(scale, "%w")[58 % 32])
        scale.back("instruction")
        assert not stop.ended and (lanes(scale, "%w")[58 % 32], lanes(scale, "%d")[58 % 32]) == (0, 0)
        scale.go_on()
        assert scale.now.moment.is_after  # the same again


def test_any_finding_but_not_of_floats_unasked() -> None:
    """Without the barrier there is a race; the division by 0 makes an infinity, which `finding` does not mean."""
    text = SCALE.replace("bar.sync 0;", "").replace("xor.b32 %turned, %at, 124", "xor.b32 %turned, %at, 252")
    with start_session(
        text, np.arange(64, dtype=np.float32), np.zeros(64, np.float32), np.float32(0), block=64
    ) as scale:
        scale.stop_at("infinity")
        scale.forget(1)
        scale.stop_at("finding")
        kinds = []
        while not scale.go_on().ended:
            kinds += [finding.kind for finding in scale.now.moment.findings]
        assert set(kinds) == {"race"} and scale.found
        scale.stop_at("infinity")
        scale.forget(2)
        assert scale.rewind().moment.findings[0].kind == "infinity"


def test_a_fault_stops_where_it_is_and_ends_the_launch() -> None:
    x = np.zeros(32, np.float32)
    with start_session(SCALE, x, np.zeros(16, np.float32), np.float32(0)) as scale:
        stop = scale.go_on()
        assert stop.reason == "error" and isinstance(stop.moment.error, MemoryFault) and not stop.ended
        assert line(scale) == line_of(SCALE, "st.global")
        assert lanes(scale, "%y")[16] - lanes(scale, "%y")[0] == 64
        assert scale.go_on().ended and isinstance(scale.now.moment.error, MemoryFault)
        assert scale.rewind().reason == "error"


def test_a_deadlock_leaves_the_state() -> None:
    with start_session(f"{HEADER}.visible .entry k() {{ .reg .b32 %r; mov.u32 %r, 7; bar.sync 0, 64; ret; }}") as stuck:
        stop = stuck.go_on()
        assert stop.ended and "deadlock" in str(stop.moment.error)
        assert lanes(stuck, "%r").tolist() == [7] * 32


def test_the_callers_arrays_stay() -> None:
    x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    with start_session(SCALE, x, y, np.float32(1), block=128) as scale:
        assert scale.go_on().ended and lanes(scale, "y").any()
    assert not y.any()


def test_one_wave_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of a later wave is not there before its turn; then it has a state of its own."""
    monkeypatch.setattr(emulator.launch, "WAVE_LANES", 64)
    text = COUNT.replace("mov.u32 %i, 0", "mov.u32 %i, %ctaid.x").replace("setp.lt", "setp.eq")
    with start_session(text, np.zeros(1, np.uint32), 99, block=64, grid=3, checks="") as count:
        count.look_at(2, 5)
        with pytest.raises(DebuggerError, match="runs in another wave"):
            State(count)
        assert count.step().moment.position > 10 and lanes(count, "%ctaid.x")[5] == 2
        assert count.focus == (2, 5)
        assert count.go_on().ended and lanes(count, "%i")[0] == 3
        count.rewind()
        assert count.now.moment.position == 0


def test_a_race_that_does_not_matter_is_passed_over() -> None:
    """A launch that is run again, to see whether a value that races is used, is one to the debugger."""
    body = """.reg .pred %p; .reg .b32 %r<4>; .reg .b64 %x;
    .shared .align 4 .b32 flag[1];
    mov.u32 %r0, %tid.x; ld.param.u64 %x, [out]; mov.u32 %r3, 5;
    setp.eq.u32 %p, %r0, 0;
    @%p st.shared.u32 [flag], %r0;
    @!%p ld.shared.u32 %r1, [flag];
    mov.u32 %r1, 0;
    st.global.u32 [%x], %r3;
    ret;"""
    text = f"{HEADER}.visible .entry k(.param .u64 out) {{\n{body}\n}}"
    out = np.zeros(1, np.uint32)
    assert not runtime.load(text)(out.copy(), grid=1, block=64, backend="emulator", checks=["race"]).findings
    with start_session(text, out, block=64, checks="race") as kernel:
        kernel.stop_at("race")
        kernel.stop_at("mov.u32")
        stops = [kernel.go_on().moment.key for _ in range(2)]
        assert stops == sorted(set(stops)) and [key[1] for key in stops] == [False] * 2
        assert kernel.go_on().ended and not kernel.found
        assert kernel.now.moment.position == 9


def test_the_groups_of_mma_come_one_by_one() -> None:
    """The emulator does a straight line of mma at once; under the debugger each does its own."""
    header = ".reg .b32 %a<4>; .reg .b32 %b<4>; .reg .b32 %c<8>; mov.u32 %a0, 0x01010101; mov.u32 %b0, 0x01010101;"
    mma = "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {{{}}}, {{%a0, %a0}}, {{%b0}}, {{{}}};"
    first, second = ", ".join(f"%c{i}" for i in range(4)), ", ".join(f"%c{i}" for i in range(4, 8))
    body = "\n".join([header, mma.format(first, first), mma.format(second, second), "ret;"])
    with start_session(f"{HEADER}.visible .entry k() {{\n{body}\n}}") as kernel:
        kernel.stop_at("mma")
        kernel.go_on()
        kernel.step()
        assert (lanes(kernel, "%c0")[0], lanes(kernel, "%c4")[0]) == (16, 0)


def test_what_was_left_behind_is_freed(scale: Session) -> None:
    """Every step backwards makes another arena, which may be large."""
    gc.disable()
    try:
        scale.step()
        scale.step()
        memory = weakref.ref(scale.now.moment.machine.memory)
        scale.back()
        assert memory() is None
        scale.go_on()
        memory = weakref.ref(scale.now.moment.machine.memory)
        scale.restart()
        assert memory() is None
    finally:
        gc.enable()


def test_without_a_debugger_nothing_is_watched() -> None:
    """`watch_launches` reaches the launches inside it and no others."""
    seen = []

    def attach(machine: Any) -> list[Any]:
        seen.append(machine.watchers)
        return []

    def launch() -> None:
        load_text(COUNT)(np.zeros(1, np.uint32), 3, grid=1, block=32, backend="emulator")

    with emulator.watch_launches(attach):
        launch()
    launch()
    assert seen == [()]


def test_a_call_of_two_kernels() -> None:
    """The moments of both count on; a breakpoint in one is none in the other."""
    first, second = load_text(COUNT, "first.ptx"), load_text(SCALE, "second.ptx")

    def call() -> None:
        first(np.zeros(1, np.uint32), 2, grid=1, block=32, backend="emulator")
        second(*np.zeros((2, 32), np.float32), 0.5, grid=1, block=32, backend="emulator")

    with Session(call, second) as both:
        both.stop_at("#5")
        assert both.go_on().moment.machine.launch.entry.name == "count"
        both.forget(1)
        both.stop_at("ld.param.u64")
        both.stop_at("ld.param.u32")
        both.go_on()
        assert both.step("instruction").moment.machine.launch.entry.name == "count"
        assert both.go_on().ended and both.now.moment.machine.launch.entry.name == "scale"
        both.stop_at("div.rn")
        assert both.rewind().moment.machine.launch.entry.name == "scale"
        assert both.rewind().moment.machine.launch.entry.name == "count"


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("1", "break: line 1 of k.ptx has no instruction; the next with one is {first}"),
        ("500", "break: k.ptx has {lines} lines (got 500)"),
        ("0", "break: k.ptx has {lines} lines (got 0)"),
        ("other.cu:3", "break: no instruction is from other.cu; there is k.ptx"),
        ("#99", "break: #99 is no instruction; they are #0 to #{last}"),
        ("wgmma", "break: a line, #INSTRUCTION, an opcode of the kernel, or finding, carry"),
        ("", "break: a line, #INSTRUCTION"),
    ],
)
def test_breakpoints_that_are_nowhere(scale: Session, place: str, problem: str) -> None:
    first, lines = line_of(SCALE, "ld.param"), len(SCALE.splitlines())
    with pytest.raises(DebuggerError) as error:
        scale.stop_at(place)
    assert problem.format(first=first, lines=lines, last=len(scale.code) - 1) in str(error.value)
    assert "\n" not in str(error.value) and not scale.breakpoints


def test_what_cannot_be_done(scale: Session) -> None:
    for act, problem in (
        (scale.back, "back: this is the beginning of the launch"),
        (scale.rewind, "rewind: this is the beginning of the launch"),
        (lambda: scale.forget(3), "delete: no breakpoint 3; there are none"),
        (lambda: scale.look_at(1, 0), r"block: 0 to 0 \(got 1\)"),
        (lambda: scale.look_at(0, 128), r"thread: 0 to 127 \(got 128\)"),
        (lambda: scale.step("mile"), "step: by line, call, instruction"),
    ):
        with pytest.raises(DebuggerError, match=problem):
            act()
    scale.go_on()
    for act in (scale.go_on, scale.step):
        with pytest.raises(DebuggerError, match="the launch has ended; back, rewind and restart go on from here"):
            act()


def test_a_warp_that_has_ended() -> None:
    text = COUNT.replace("@%second bra DONE", "@%second ret")
    with start_session(text, np.zeros(1, np.uint32), 5, block=64, checks="") as count:
        count.stop_at("add")
        count.go_on()
        count.look_at(0, 40)
        with pytest.raises(DebuggerError, match="step: warp 1 of block 0 has ended; step all"):
            count.step()
        assert count.step(everyone=True).moment.instruction.opcode == "setp.lt.u32"


def test_a_launch_that_is_refused_is_no_session() -> None:
    with pytest.raises(ArgumentError, match="2 arguments"):
        start_session(COUNT, np.zeros(1, np.uint32))
    with pytest.raises(ArgumentError, match="block: has at most 1024 threads"):
        start_session(COUNT, np.zeros(1, np.uint32), 3, block=2000)
    with pytest.raises(DebuggerError, match="the call has launched nothing in the emulator"):
        Session(lambda: None, load_text(COUNT))


# Lines of k.cu: 2 has two instructions, around those of a function inlined from it, which itself inlines another.
INLINED = f"""{HEADER}
.file 1 "k.cu"
.visible .entry k(.param .u64 out)
{{
    .reg .b32 %a, %b; .reg .b64 %o; .reg .pred %p;
    .loc 1 1 1
    ld.param.u64 %o, [out];
    mov.u32 %b, 0;
AGAIN:
    .loc 1 2 1
    mov.u32 %a, 1;
    add.u32 %a, %a, 1;
    .loc 1 7 5, function_name $f, inlined_at 1 2 5
    add.u32 %a, %a, 2;
    .loc 1 9 1, function_name $g, inlined_at 1 7 5
    add.u32 %a, %a, 3;
    .loc 1 8 1, function_name $f, inlined_at 1 2 5
    add.u32 %a, %a, 4;
    .loc 1 2 9
    mul.lo.u32 %a, %a, 5;
    .loc 1 3 1
    add.u32 %b, %b, 1;
    setp.lt.u32 %p, %b, 2;
    @%p bra AGAIN;
    .loc 1 4 1
    st.global.u32 [%o], %a;
    ret;
}}
"""


def frames(session: Session) -> tuple[int, ...]:
    """Return the line of the next instruction, and the lines from which its function was called."""
    instruction = session.now.moment.instruction
    return instruction.line, *(at for _, at in instruction.callers)


def test_a_line_stops_once_where_its_instructions_begin() -> None:
    with start_session(INLINED, np.zeros(1, np.uint32), checks="") as kernel:
        kernel.stop_at("k.cu:2")
        kernel.stop_at("k.cu:9")
        stops = [kernel.go_on().moment.instruction.text for _ in range(6)]
        assert stops == ["mov.u32 %a, 1", "add.u32 %a, %a, 3", "mul.lo.u32 %a, %a, 5"] * 2
        assert kernel.go_on().ended


@pytest.mark.parametrize(
    ("unit", "visited"),
    [
        ("line", [(1,), (2,), (7, 2), (9, 7, 2), (8, 2), (2,), (3,), (2,), (7, 2)]),
        ("call", [(1,), (2,), (3,), (2,), (3,), (4,)]),
    ],
)
def test_a_step_by_calls_stays_out_of_functions(unit: str, visited: list[tuple[int, ...]]) -> None:
    with start_session(INLINED, np.zeros(1, np.uint32), checks="") as kernel:
        seen = [frames(kernel), *(kernel.step(unit) and frames(kernel) for _ in visited[1:])]
        assert seen == visited


def test_a_step_by_calls_within_a_function_comes_back_to_its_caller() -> None:
    with start_session(INLINED, np.zeros(1, np.uint32), checks="") as kernel:
        kernel.stop_at("k.cu:7")
        kernel.go_on()
        seen = [kernel.step("call") and frames(kernel) for _ in range(3)]
        assert seen == [(8, 2), (2,), (3,)]


def test_a_step_of_another_warp_begins_where_that_warp_is() -> None:
    """Warp 1 has not been at the line of which warp 0 is about to run its part."""
    text = f"""{HEADER}
.file 1 "k.cu"
.visible .entry k() {{
    .reg .b32 %t, %a; .reg .pred %second;
    .loc 1 4 1
    mov.u32 %t, %tid.x; setp.ge.u32 %second, %t, 32; @%second bra OTHER;
    .loc 1 5 1
    mov.u32 %a, 1;
    .loc 1 6 1
    bra.uni DONE;
OTHER:
    .loc 1 5 1
    mov.u32 %a, 2;
    .loc 1 6 1
    mov.u32 %a, 3;
DONE:
    ret; }}"""
    with start_session(text, block=64, checks="") as kernel:
        kernel.stop_at("k.cu:5")
        assert kernel.go_on().moment.warps.tolist() == [0]
        kernel.forget(1)
        kernel.look_at(0, 32)
        assert [kernel.step().moment.instruction.text for _ in range(2)] == ["mov.u32 %a, 2", "mov.u32 %a, 3"]


def test_blocks_and_threads_are_numbered_with_x_fastest() -> None:
    """A session looks at the thread that a finding is about, and at the first one that a breakpoint stops."""
    text = f"""{HEADER}.visible .entry k(.param .u64 out) {{
        .reg .b32 %x, %y, %t; .reg .b64 %o; .reg .pred %p, %q;
        ld.param.u64 %o, [out]; mov.u32 %x, %ctaid.x; mov.u32 %y, %ctaid.y; mov.u32 %t, %tid.y;
        setp.eq.u32 %p, %x, 1; setp.eq.and.u32 %q, %y, 1, %p; setp.eq.and.u32 %q, %t, 3, %q;
        @!%q ret;
        st.global.u32 [%o+400], %x;
        ret; }}"""
    with start_session(text, np.zeros(1, np.uint32), grid=(3, 2), block=(16, 4), checks="") as kernel:
        kernel.stop_at("st.global")
        kernel.go_on()
        assert kernel.focus == (4, 48)
        assert kernel.go_on().reason == "error"
        kernel.look_at(5, 17)
        values = State(kernel)
        assert [int(values.find(name).values[17]) for name in ("%x", "%y", "%t")] == [2, 1, 1]
