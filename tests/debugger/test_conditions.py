"""Breakpoints with a condition, and arrays in the shape of their declaration."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import ptxlab
from ptxlab.debugger import Commands, DebuggerError, Session
from ptxlab.debugger.variables import constant, template_arguments
from tests.support.small_kernels import line_of

TEXT = """
#define WIDTH (ROWS * 8)  // columns
constexpr int HALF = WIDTH >> 1;
__device__ float table[3][5] = {{1}};
template <typename T, int DEPTH = 2> __global__ void k(const T* x, T* y, int n) {
    __shared__ T buf[DEPTH][WIDTH];
    __shared__ alignas(16) T cube[2][HALF / 4][sizeof(T)];
    const int i = threadIdx.x;
    buf[i & 1][i] = x[i];
    cube[0][i & 3][i & 3] = x[i];
    __syncthreads();
    y[i] = buf[i & 1][i] + table[0][1] + n + cube[0][0][0];
}
"""
STORE = line_of(TEXT, "y[i] =")
Run = Callable[[str], str]


def load_kernel() -> ptxlab.Kernel:
    """Load the template kernel for float and 2, with ROWS=8."""
    return ptxlab.load(TEXT, "k<float, 2>", defines={"ROWS": 8})


@pytest.fixture
def run() -> Iterator[Run]:
    """Start a session at the beginning of the kernel, with two blocks of 64."""
    x = np.arange(64, dtype=np.float32)
    with Session.of(load_kernel(), x, np.zeros_like(x), np.int32(4), grid=2, block=64) as session:
        yield Commands(session).run


@pytest.mark.parametrize(
    ("condition", "place"),
    [
        ("%tid.x == 37", "block (0,0,0) thread (37,0,0), warp 1"),
        ("%tid.x >= 0x28 and n == 4", "block (0,0,0) thread (40,0,0), warp 1"),
        ("x[3] > 2.5 and %ctaid.x != 0", "block (1,0,0) thread (0,0,0), warp 0"),
        ("buf[1, 5] == 5 and %tid.x > 61", "block (0,0,0) thread (62,0,0), warp 1"),
    ],
)
def test_a_breakpoint_stops_for_lanes_that_hold_its_condition(condition: str, place: str, run: Run) -> None:
    assert f":{STORE} if {condition}" in run(f"break {STORE} if {condition}")
    assert place in run("continue") and place.partition(", ")[0] in run("print %tid.x")
    assert condition in run("break")


def test_a_condition_that_no_lane_holds_stops_nothing(run: Run) -> None:
    run(f"break {STORE} if n < -3")
    run("break #5 if %tid.x == 64")
    assert "the launch has ended" in run("continue")
    run(f"break {STORE} if %tid.x == 33")
    assert "thread (33,0,0)" in run("rewind"), "backwards too"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("if n", r"break: a condition such as %r5 == 3, of numbers, .* \(got 'n'\)"),
        ("if x == 3", "break: one number is compared; x has 64, so give an index"),
        ("if %nosuch == 3", "print: no register %nosuch in this kernel.*"),
        ("if lost == 3", "print: no register, variable or argument 'lost'; .*"),
        ("break nan if n == 3", r"break: `if` goes with a line or an instruction \(got nan\)"),
        ("print table[0, 0, 0]", r"print: table is 3 x 5 \(got \[0, 0, 0\]\)"),
        ("print shared[0, 1]", r"print: shared is \d+ \(got \[0, 1\]\); `print shared as u32 ROWSxCOLUMNS` .*"),
    ],
)
def test_what_cannot_be_asked_is_one_line(command: str, message: str, run: Run) -> None:
    with pytest.raises(DebuggerError, match=f"^{message}$"):
        run(f"break {STORE} {command}" if command.startswith("if") else command)


def test_arrays_have_the_shape_of_their_declaration(run: Run) -> None:
    run(f"break {STORE}")
    run("continue")
    assert "f32[2 x 64]" in run("print buf") and "f32[3 x 5]" in run("print table")
    assert run("print buf[1, 5]").startswith("buf[1, 5] = 5 ") and "(buf + 276)" in run("print buf[1, 5]")
    assert "(buf + 256)" in run("print buf[1, 0:8]"), "row 1 begins behind 64 numbers of 4 bytes"
    assert "f32[8 x 4]" in run("print cube[0]"), "sizeof(T) follows from the other lengths"


def test_constants_of_declarations() -> None:
    kernel = load_kernel()
    instance = template_arguments(kernel)
    assert instance == {"T": "float", "DEPTH": "2"}
    numbers = {"WIDTH": 64, "HALF / 4 + 1u": 9, "DEPTH * 3": 6, "1 << 4": 16, "7 % 4 - 2": 1}
    unknown = dict.fromkeys(("sizeof(T)", "LOST", "1 / 0", "x +", "1.5"))
    for expression, number in {**numbers, **unknown}.items():
        assert constant(kernel, expression, instance) == number
