"""What a proof refuses at once, where it ends in time, and how it is interrupted."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from ptxlab.errors import OutOfTime

pytest.importorskip("z3", reason="z3-solver is not installed: it comes with the extra `prove`")

from ptxlab.prove import execute
from ptxlab.prove.solve import time_limit

SUM = """extern "C" __global__ void sum(const int* x, int* out, int n) {
    int s = 0;
    for (int i = 0; i < n; i++) s += x[i];
    out[0] = s;
}
"""
STRIDED = """extern "C" __global__ void strided(const int* x, int* out, int n) {
    int s = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) s += x[i];
    out[threadIdx.x] = s;
}
"""
UNTIL_ZERO = """extern "C" __global__ void until_zero(const int* x, int* out) {
    int i = 0;
    while (x[i] > 0) i++;
    out[0] = i;
}
"""
GATHER = """extern "C" __global__ void gather(const unsigned* x, const int* at, unsigned* out, int n) {
    out[0] = x[at[0]] ^ x[n];
}
"""
BITS = """extern "C" __global__ void bits(const unsigned* x, unsigned* out) {
    unsigned count = 0;
    for (unsigned left = x[0]; left; left >>= 1) count += left & 1;
    out[0] = count;
}
"""
NESTED = """.version 8.0
.target sm_80
.address_size 64
.visible .entry nested(.param .u64 out, .param .u32 n)
{
    .reg .b32 %sum, %turn, %n;
    .reg .b64 %out;
    .reg .pred %more, %inner;
    ld.param.u64 %out, [out];
    ld.param.u32 %n, [n];
    cvta.to.global.u64 %out, %out;
    mov.u32 %sum, 0;
    mov.u32 %turn, 0;
outer:
inner:
    add.u32 %sum, %sum, 3;
    setp.gt.u32 %inner, %n, 5;
    @%inner bra inner;
    add.u32 %turn, %turn, 1;
    setp.lt.u32 %more, %turn, 3;
    @%more bra outer;
    st.global.u32 [%out], %sum;
    ret;
}
"""
HARD = """extern "C" __global__ void hard(const unsigned* x, unsigned long long* out) {
    out[0] = (unsigned long long)x[0] * x[1];
}
"""
LONG = """extern "C" __global__ void long_sum(int* out, int n) {
    int s = 0;
    for (int i = 0; i < n; i++) s += i * s + 1;
    out[0] = s;
}
"""
MEETING = """extern "C" __global__ void meeting(const int* x, const int* end, int* out, int n) {
    __shared__ int part[4];
    int s = 0;
    for (int i = threadIdx.x; i < n + end[0]; i += 4) s = x[i];
    part[threadIdx.x] = s;
    __syncthreads();
    out[threadIdx.x] = part[3 - threadIdx.x];
}
"""
PRIMES = 2147483647, 2147483629, 2147483587  # who refutes the claim has factored a number of 62 bits
ASKED = ("--claim", f"out.u64[i] != {PRIMES[0] * PRIMES[1]}")


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        name = re.search(r"void (\w+)\(", text)
        assert name
        path = tmp_path / f"{name[1]}.cu"
        path.write_text(text)
        return path

    return write


@pytest.mark.default_cases("address")
@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        (SUM, 3, "how often this loop goes round depends on n: add --assume 'n == 4', or another value"),
        (STRIDED, 3, "how often this loop goes round depends on n: add --assume 'n == 4', or another value"),
        (UNTIL_ZERO, 3, "how often this loop goes round depends on x.u32[0], x.u32[1], x.u32[2] and 63 more"),
        (
            GATHER,
            2,
            "its address has more than 64 values, and depends on at.u32[0]: add --assume 'at.u32[0] == 4', or another"
            " value",
        ),
    ],
    ids=["loop", "strided", "data", "address"],
)
def test_what_an_input_decides_is_refused_by_line(cli: Any, file: Any, text: str, line: int, problem: str) -> None:
    path = file(text)
    code, out, err = cli("prove", path, *ASKED)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"error: {path}:{line}: `") and err.endswith(f"`: not modelled: {problem}\n")


@pytest.mark.parametrize(
    ("text", "assumed", "claim"),
    [
        (SUM, ["n == 2"], "out.s32[i] == x.s32[0] + x.s32[1]"),
        (GATHER, ["at.u32[0] == 4", "n == 1"], "out.u32[i] == x.u32[4] ^ x.u32[1]"),
    ],
    ids=["loop", "address"],
)
def test_the_assumption_that_the_error_names_decides(
    cli: Any, file: Any, text: str, assumed: list[str], claim: str
) -> None:
    assumptions = [word for one in [*assumed, *small(text)] for word in ("--assume", one)]
    code, out, err = cli("prove", file(text), *assumptions, "--claim", claim)
    assert code == 0 and "proved" in out, err


@pytest.mark.parametrize("n", [3, 4])
def test_an_assumption_decides_who_comes_to_a_barrier(cli: Any, file: Any, n: int) -> None:
    """The loop before it ends for all threads at the same condition only where `n` and `end` are numbers."""
    assumptions = ("--assume", f"n == {n}", "--assume", "end.s32[0] == 1")
    code, out, err = cli("prove", file(MEETING), *assumptions, "--block", 4, "--claim", "out.s32[i] == x.s32[3 - i]")
    assert (code, "proved" in out) == ((0, True) if n == 3 else (1, False)), err


def test_a_loop_that_an_assumption_makes_too_long_names_the_limit(cli: Any, file: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(execute, "MAX_STEPS", 2000)
    path = file(LONG)
    code, out, err = cli("prove", path, "--assume", "n == 100000", "--claim", "out.s32[i] == 0")
    problem = "not modelled: a launch of more than 2,000 instructions, the most that are followed"
    assert (code, out) == (2, "") and err.startswith(f"error: {path}:3: `") and err.endswith(f"{problem}\n")


def small(text: str) -> list[str]:
    """List bounds on elements, which integers of a claim, unlike the kernel's, do not wrap at."""
    return ["-1000 <= x.s32[0] <= 1000", "-1000 <= x.s32[1] <= 1000"] if text is SUM else []


def test_an_assumption_may_bound_a_loop(cli: Any, file: Any) -> None:
    assumptions = ("--assume", "n <= 3", "--assume", "0 <= x.s32[0] <= 9", "--assume", "0 <= x.s32[1] <= 9")
    code, out, err = cli(
        "prove", file(SUM), *assumptions, "--assume", "0 <= x.s32[2] <= 9", "--claim", "out.s32[i] <= 27"
    )
    assert code == 0 and "proved" in out, err


def test_an_inner_loop_that_an_assumption_excludes_stays_excluded(cli: Any, tmp_path: Path) -> None:
    """Its branch comes back under the same guard in each turn of the outer loop."""
    path = tmp_path / "nested.ptx"
    path.write_text(NESTED)
    code, out, err = cli("prove", path, "--assume", "n <= 5", "--claim", "out.u32[i] == 9")
    assert code == 0 and "proved" in out, err


@pytest.mark.full
def test_a_loop_over_the_bits_of_an_input_has_an_end(cli: Any, file: Any) -> None:
    code, out, err = cli("prove", file(BITS), "--claim", "out.u32[i] <= 32")
    assert code == 0 and "proved" in out, err


# Time


@pytest.mark.full
def test_the_whole_run_has_a_limit(cli: Any, file: Any) -> None:
    claims = [word for a, b in combinations(PRIMES, 2) for word in ("--claim", f"out.u64[i] != {a * b}")]
    started = time.monotonic()
    code, out, _ = cli("prove", file(HARD), *claims, "--total-seconds", 2)
    assert code == 3 and out.count("undecided") == 3 and time.monotonic() - started < 20


@pytest.mark.parametrize("option", ["--seconds", "--total-seconds"])
def test_following_a_file_has_a_limit_too(cli: Any, file: Any, option: str) -> None:
    code, out, err = cli("prove", file(STRIDED), "--block", 32, "--assume", "n <= 9999", *ASKED, option, 0.001)
    assert (code, out) == (3, "") and err == f"error: follow strided.cu: not at its end after {option} 0.001\n"


def test_a_limit_ends_what_runs_and_nothing_else() -> None:
    with pytest.raises(OutOfTime, match="sums"), time_limit(0.05, "sums"):
        while True:
            sum(range(1000))
    with pytest.raises(KeyboardInterrupt), time_limit(60, "sums"):
        raise KeyboardInterrupt
    with time_limit(None, "sums"), time_limit(60, "sums"):
        pass


def test_a_limit_ends_a_job_in_the_background_too() -> None:
    """Such a job ignores SIGINT."""
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(OutOfTime, match="sums"), time_limit(0.05, "sums"):
            while True:
                sum(range(1000))
    finally:
        signal.signal(signal.SIGINT, previous_handler)


@pytest.mark.full
def test_an_interrupt_ends_the_solver_at_once(file: Any) -> None:
    command = [sys.executable, "-m", "ptxlab", "prove", str(file(HARD)), *ASKED]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=interruptible)
    assert started.stderr
    time.sleep(0.5)
    while started.poll() is None and "z3" not in Path(f"/proc/{started.pid}/maps").read_text():
        time.sleep(0.1)
    time.sleep(3)  # it asks by now, or still reads the file: either is interrupted
    sent = time.monotonic()
    os.kill(started.pid, signal.SIGINT)
    _, err = started.communicate(timeout=60)
    assert started.returncode == 130 and time.monotonic() - sent < 5
    assert err.count("\n") <= 1 and "Traceback" not in err


def interruptible() -> None:
    """Take SIGINT as a shell's foreground process does, whatever the test runner was started with."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The texts


UNPACK = """.version 8.0
.target sm_80
.address_size 64
.visible .entry unpack(.param .u64 q, .param .u64 scale, .param .u64 out)
{
    .reg .u32 %w, %s;
    .reg .u64 %q, %scale, %out;
    ld.param.u64 %q, [q];
    ld.param.u64 %scale, [scale];
    ld.param.u64 %out, [out];
    ld.global.u32 %w, [%q];
    ld.global.u8 %s, [%scale];
    and.b32 %w, %w, 0x0f0f0f0f;
    mul.lo.u32 %w, %w, %s;
    st.global.u32 [%out], %w;
    ret;
}
"""


def test_the_example_of_the_help_runs(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(cli("prove", "--help")[1].split())
    example = re.search(r"Example: ptxlab (prove .*?) ╭", text)
    assert example
    (tmp_path / "unpack.ptx").write_text(UNPACK)
    monkeypatch.chdir(tmp_path)
    code, out, err = cli(*shlex.split(example[1]))
    assert code == 0 and "proved" in out, err


@pytest.mark.default_cases("-0-proved")
@pytest.mark.parametrize(("edit", "code", "verdict"), [("", 0, "proved"), ("0xf0f0f0f0 => 0xf0f0f070", 1, "refuted")])
def test_a_kernel_equals_a_file(cli: Any, tmp_path: Path, edit: str, code: int, verdict: str) -> None:
    text = cli("show", "dequant_comet.ptx")[1].replace("dequant_comet", "copy")
    original, _, replacement = edit.partition(" => ")
    assert not edit or original in text
    path = tmp_path / "copy.ptx"
    path.write_text(text.replace(original, replacement) if edit else text)
    got, out, err = cli("prove", "dequant_comet", "--equals", path)
    assert got == code and verdict in out, err


def test_a_file_that_takes_other_arguments_equals_nothing(cli: Any, file: Any) -> None:
    code, _, err = cli("prove", "dequant_comet", "--equals", file(HARD))
    assert code == 2 and err.startswith("error: hard.cu: hard: as many parameters as dequant_comet has arguments (")
    assert err.endswith("(got 2)\n") and err.count("\n") == 1
