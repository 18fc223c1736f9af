"""`ptxlab run` without an .npz: arguments as text, outputs in sight, held against what is expected, by schedule."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.hardware.floats import bfloat16_bits
from ptxlab.runtime import load
from ptxlab.runtime.inputs import parse_argument
from ptxlab.runtime.results import Summary, compare

SAXPY = """struct Scale { int n; float by; };
template <int N>
__global__ void saxpy(Scale s, const float* x, float* y) {
    int i = blockIdx.x * N + threadIdx.x;
    if (i < s.n) y[i] += s.by * x[i];
}
template __global__ void saxpy<32>(Scale, const float*, float*);
"""
# Reads what a copy brings before it waits for it: `WAIT` enables the fix.
COPY = """__global__ void copy(const float* x, float* y) {
    __shared__ alignas(16) float s[32];
    unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(s + threadIdx.x));
    s[threadIdx.x] = -1;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(x + threadIdx.x) : "memory");
#ifdef WAIT
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    y[threadIdx.x] = s[threadIdx.x];
}
"""


@pytest.fixture
def saxpy(tmp_path: Path) -> str:
    path = tmp_path / "saxpy.cu"
    path.write_text(SAXPY)
    return str(path)


ARGUMENTS = ("--arg", "s=i32:30,f32:2", "--arg", "f32[32]:arange", "--arg", "y=f32[32]:1", "--backend", "emulator")


def test_arguments_by_name_and_in_order_and_the_output_in_sight(cli: Any, saxpy: str, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    code, text, _ = cli("run", saxpy, *ARGUMENTS, "--check", "all", "--out", str(out))
    assert code == 0 and "checks clean" in text
    assert all(word in text for word in ("y", "float32[32]", "1 3 5 7 ...", "59"))
    written = np.load(out)
    assert written.files == ["y"] and written["y"].tolist() == [2.0 * i + 1 for i in range(30)] + [1, 1]
    code, text, _ = cli("run", saxpy, *ARGUMENTS, "--json")
    record = json.loads(text)
    assert (record["kernel"], [*record["outputs"]], record["outputs"]["y"]["maximum"]) == ("saxpy<32>", ["y"], 59.0)


def test_only_what_the_kernel_wrote_is_summarised(cli: Any, saxpy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs were copied from the GPU and searched for their extremes, too, for the names in the last line."""
    summarised, summarise = list[str](), Summary.of

    def record_name(name: str, array: Any, **options: bool) -> Summary:
        summarised.append(name)
        return summarise(name, array, **options)

    monkeypatch.setattr(Summary, "of", record_name)
    code, text, _ = cli("run", saxpy, *ARGUMENTS)
    assert (code, summarised) == (0, ["y"])
    assert "emulator  x float32[32], y float32[32]  no checks" in text


def test_outputs_are_held_against_what_is_expected(cli: Any, saxpy: str, tmp_path: Path) -> None:
    y = np.array([2.0 * i + 1 for i in range(30)] + [1, 1], np.float32)
    np.savez(tmp_path / "right.npz", y=y)
    code, text, _ = cli("run", saxpy, *ARGUMENTS, "--expect", str(tmp_path / "right.npz"))
    assert code == 0 and "y: as expected, 32 elements within" in text
    y[7], y[9] = 16, np.nan
    np.savez(tmp_path / "in.npz", **{"expected.y": y})
    code, text, _ = cli("run", saxpy, *ARGUMENTS, "--in", str(tmp_path / "in.npz"))
    assert code == 1 and "y: 2 of 32 elements are not within" in text
    assert "y[9] is 19.0, not nan; y[7] is 15.0, not 16.0" in text
    code, text, _ = cli("run", saxpy, *ARGUMENTS, "--in", str(tmp_path / "in.npz"), "--json", "--atol", "1")
    (comparison,) = json.loads(text)["expected"]
    assert (code, comparison["wrong"], comparison["worst"]) == (1, 1, [{"index": [9], "got": 19.0, "expected": "nan"}])
    np.savez(tmp_path / "other.npz", z=y)
    code, _, error = cli("run", saxpy, *ARGUMENTS, "--expect", str(tmp_path / "other.npz"))
    assert code == 2 and "expected: outputs of the kernel: x, y (got z)" in error


def test_null_is_a_null_pointer(cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "add.cu"
    path.write_text("__global__ void add(int* y, const int* bias) { y[threadIdx.x] = bias ? *bias : 7; }")
    code, text, _ = cli("run", str(path), "--arg", "y=i32[32]", "--arg", "bias=null", "--backend", "emulator")
    assert code == 0 and "7 7 7 7 ..." in text


def test_parameters_of_mangled_ptx_have_one_name_in_messages_and_options(cli: Any, tmp_path: Path) -> None:
    cuda = "template <int N> __global__ void add(float* y, int n) { y[threadIdx.x] += n + N; }\n"
    cuda += "template __global__ void add<2>(float*, int);"
    text = load(cuda).module.text
    path, symbol = tmp_path / "add.ptx", re.findall(r"\.entry (\w+)", text)[0]
    path.write_text(text)
    command = ("run", str(path), "--backend", "emulator")
    code, _, error = cli(*command)
    assert code == 2 and "add<2>: param_0: must be given" in error
    code, _, error = cli(*command, "--arg", "param_0=f32[31]", "--arg", "param_1=1")
    assert code == 1 and "of argument 0 (param_0), 4 bytes past its end" in error
    np.savez(tmp_path / "symbols.npz", **{f"{symbol}_param_0": np.ones(32, np.float32), f"{symbol}_param_1": 3})
    np.savez(tmp_path / "names.npz", **{"add<2>_param_0": np.ones(32, np.float32), "param_1": 3})
    for arguments in (("--in", f"{tmp_path}/symbols.npz"), ("--in", f"{tmp_path}/names.npz")):
        code, text, _ = cli(*command, *arguments)
        assert code == 0 and re.search(r" param_0 +float32\[32\] +6 6 6 6 ", text)
    code, text, error = cli(
        *command, "--arg", f"{symbol}_param_0=f32[32]:uninitialised", "--arg", "1", "--check", "init"
    )
    assert code == 1 and text.startswith("uninitialised: ")


def test_arrays_of_a_file_in_order(cli: Any, saxpy: str, tmp_path: Path) -> None:
    pair = np.array((30, 2.0), [("n", "i4"), ("by", "f4")])
    np.savez(tmp_path / "in.npz", pair, np.ones(32, np.float32), np.zeros(32, np.float32))
    code, text, _ = cli("run", saxpy, "--in", str(tmp_path / "in.npz"), "--backend", "emulator")
    assert code == 0 and "2 2 2 2 ..." in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "saxpy<32>: s: must be given (got no arguments)"),
        (("--arg", "z=1"), "saxpy<32>: --arg: each of s, x, y once (got z)"),
        (("--arg", "x=1", "--arg", "x=2"), "saxpy<32>: --arg: each of s, x, y once (got x)"),
        (("--arg", "1",) * 4, "saxpy<32>: --arg: at most 3 (s, x, y) (got 4)"),
        (("--arg", "x=f33[4]"), "--arg: a dtype of f16, f32, f64"),
        (("--arg", "x=i32[4]:normal"), "--arg: one of uniform, arange, zeros, uninitialised or a number that i32"),
        (("--arg", "x=many"), "--arg: [NAME=]VALUE, of which VALUE is a number"),
        (("--arg", "x=nowhere.npy"), "nowhere.npy: cannot be read: No such file or directory"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], message: str, cli: Any, saxpy: str) -> None:
    code, _, error = cli("run", saxpy, *arguments)
    assert code == 2 and message in error and error.count("\n") == 1


@pytest.mark.parametrize(("options", "code"), [((), 1), (("-D", "WAIT"), 0)])
def test_results_that_depend_on_the_schedule_are_a_finding(options: Any, code: int, cli: Any, tmp_path: Path) -> None:
    (tmp_path / "copy.cu").write_text(COPY)
    arguments = ("--arg", "x=f32[32]:arange", "--arg", "y=f32[32]", *options)
    command = ("run", str(tmp_path / "copy.cu"), *arguments, "--check", "schedules")
    assert cli(*command)[0] == code
    text = cli(*command)[1]
    line = "schedules: y[0] is 0.0 in schedule early and -1.0 in late:0; 32 of 32 elements differ"
    assert (line in text) == bool(code) and ("checks clean" in text) != bool(code)
    assert text.count("remedy (schedules): wait for each copy before its data are read") == code
    record = json.loads(cli(*command, "--json")[1])["schedules"]
    assert record["ran"] == ["early", "late:0", "late:1", "late:2"] and len(record["differences"]) == code
    assert ("::error file=" in cli(*command, "--format", "github")[1]) == bool(code)


def test_what_counts_as_never_written(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text("__global__ void k(float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }")
    command = ("run", str(tmp_path / "k.cu"), "--check", "init", "--arg", "y=f32[32]", "--arg")
    assert cli(*command, "x=f32[32]:zeros")[0] == 0
    code, text, _ = cli(*command, "x=f32[32]:uninitialised")
    assert code == 1 and text.startswith("uninitialised: ")
    np.savez(tmp_path / "k.npz", x=np.zeros(32, np.float32), y=np.zeros(32, np.float32))
    command = (*command[:-3], "--in", str(tmp_path / "k.npz"))
    assert cli(*command)[0] == 0
    assert cli(*command, "--uninitialised", "y")[0] == 0
    assert cli(*command, "--uninitialised", "x")[1] == text
    assert cli(*command, "--uninitialised", "z")[::2] == (2, "error: k: uninitialised: some of x, y (got z)\n")


@pytest.mark.parametrize(
    ("body", "kind", "problem"),
    [
        ("y[threadIdx.x + 1] = 0;", "MemoryFault", "out of bounds"),
        ("while (*(volatile int*)y == 0);", "Deadlock", "deadlock: threads spin"),
    ],
)
def test_json_of_a_fault_has_its_place_and_the_exit_code(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, kind: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("k.cu").write_text(f"__global__ void k(int* y) {{\n    {body}\n}}")
    code, out, error = cli("run", "k.cu", "--arg", "i32[32]", "--backend", "emulator", "--json")
    record = json.loads(out)
    place = record["error"]["path"], record["error"]["line"]
    assert (code, record["exit_code"], record["error"]["kind"], place) == (1, 1, kind, ("k.cu", 2))
    assert problem in record["error"]["message"] and problem in error
    assert error.endswith(f"\n  remedy ({kind}): {record['error']['remedy']}\n")


def test_content_is_the_same_in_every_run() -> None:
    a, b = (parse_argument("--arg", "x=f32[4,2]:normal", 3).value for _ in range(2))
    assert a.shape == (4, 2) and np.array_equal(a, b)
    assert parse_argument("--arg", "u8[2x3]:uniform").value.shape == (2, 3)
    assert parse_argument("--arg", "bf16[2]:1").value.tolist() == [0x3F80] * 2
    assert parse_argument("--arg", "n=0x10").value == 16 and parse_argument("--arg", "-1.5").value == -1.5
    packed = parse_argument("--arg", "p=i32:1,f64:2,u8:3").value
    assert packed == np.array([1, 0], "i4").tobytes() + np.array([2.0]).tobytes() + bytes([3, *[0] * 7])


def test_summaries_and_comparisons() -> None:
    one = Summary.of("y", np.array([np.nan, 2, -np.inf], np.float32))
    assert (one.nan, one.minimum, one.maximum) == (1, -np.inf, 2.0) and one.to_json()["minimum"] == "-inf"
    assert Summary.of("y", np.zeros((0, 3))).minimum is None
    assert compare("y", np.array([1, 2]), np.array([1, 3])).wrong == 1
    assert compare("y", np.array([np.nan, np.inf]), np.array([np.nan, np.inf])).wrong == 0
    assert compare("y", np.array([1.0]), np.array([np.inf])).wrong == 1
    with pytest.raises(ArgumentError, match=r"^expected y: shape \[2\] \(got \[3\]\)$"):
        compare("y", np.zeros(2), np.zeros(3))


BFLOAT16_KERNEL = """
#include <cuda_bf16.h>
__global__ void halve(__nv_bfloat16* y, const __nv_bfloat16* x) {
    y[threadIdx.x] = __float2bfloat16(__bfloat162float(x[threadIdx.x]) / 2);
}
"""


def test_bfloat16_is_shown_and_compared_as_numbers(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Declared by the kernel, or by the argument where the kernel takes bits."""
    monkeypatch.chdir(tmp_path)
    Path("k.cu").write_text(BFLOAT16_KERNEL)
    x = np.array([1, -3, np.nan, 0.5], np.float32)
    np.savez("bits.npz", y=np.zeros(4, np.uint16), x=bfloat16_bits(x))
    np.savez("good.npz", y=x / 2)
    np.savez("good_bits.npz", y=bfloat16_bits(x / 2))
    np.savez("bad.npz", y=np.array([0.5, -1.5, np.nan, 0.5], np.float32))
    command = ("run", "k.cu", "--in", "bits.npz", "--block", "4", "--backend", "emulator")
    code, text, _ = cli(*command, "--expect", "good.npz", "--json")
    report = json.loads(text)["outputs"]["y"]
    assert (code, report["dtype"], report["first"]) == (0, "bfloat16", [0.5, -1.5, "nan", 0.25])
    assert (report["nan"], report["minimum"], report["maximum"]) == (1, -1.5, 0.5)
    assert cli(*command, "--expect", "good_bits.npz")[0] == 0
    code, text, _ = cli(*command, "--expect", "bad.npz")
    assert code == 1 and "worst: y[3] is 0.25, not 0.5" in text
    Path("bits.cu").write_text("__global__ void copy(unsigned short* y) { y[threadIdx.x] += 0x80; }")
    command = ("run", "bits.cu", "--block", "2", "--backend", "emulator", "--json", "--arg")
    assert json.loads(cli(*command, "bf16[2]:1")[1])["outputs"]["y"]["first"] == [2.0, 2.0]
    assert json.loads(cli(*command, "u16[2]:1")[1])["outputs"]["y"]["first"] == [129, 129]
