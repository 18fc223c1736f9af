"""The pytest plugin, in test runs of its own: what passes, what fails and how it is told."""

import json
import subprocess
import sys
from typing import Any

import pytest

from ptxlab.emulator import EmulatorOptions
from tests.support.plugin import OPTIONS
from tests.support.small_kernels import record_options

pytest_plugins = "pytester"

PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 a, .param .f32 s)
{
    .reg .u64 %p, %o; .reg .u32 %i, %n, %c; .reg .f32 %v, %s;
    ld.param.u64 %p, [a]; ld.param.f32 %s, [s];
    mov.u32 %i, %tid.x; mov.u32 %c, %ctaid.x; mov.u32 %n, %ntid.x;
    mad.lo.u32 %i, %c, %n, %i;
    mul.wide.u32 %o, %i, 4; add.u64 %p, %p, %o;
    ld.global.f32 %v, [%p];
    mul.f32 %v, %v, %s;
    st.global.f32 [%p], %v;
    ret;
}
"""
CUDA = """extern "C" __global__ void scale(float* a, float s) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    a[i % SIZE] *= s;
}
"""
TEMPLATE = """#include "by.cuh"
namespace ns {
template <typename T, int N> __global__ void scale(T* a) { a[blockIdx.x * blockDim.x + threadIdx.x] *= by(N); }
}
"""
HEADER = """
import numpy as np
import pytest
A = np.arange(512, dtype=np.float32)
"""
# A byte of one warp's copy is read by another, which only waits for its own: right at once, not late.
LATE = """.version 8.0
.target sm_80
.address_size 64
.shared .align 16 .b8 buf[1024];
.visible .entry copy(.param .u64 a, .param .u64 out)
{
    .reg .u64 %a, %o, %x; .reg .u32 %i, %s, %v;
    ld.param.u64 %a, [a]; ld.param.u64 %o, [out]; mov.u32 %i, %tid.x; mov.u32 %s, buf;
    mul.wide.u32 %x, %i, 4; add.u64 %a, %a, %x; add.u64 %o, %o, %x; mad.lo.u32 %s, %i, 4, %s;
    cp.async.ca.shared.global [%s], [%a], 4;
    ld.shared.u32 %v, [%s];
    st.global.u32 [%o], %v;
    ret;
}
"""


@pytest.fixture
def plugin(pytester: pytest.Pytester) -> Any:
    """Run a file of tests beside `scale.ptx` and `scale.cu`."""
    pytester.makefile(".ptx", scale=PTX, late=LATE)
    pytester.makefile(".cu", scale=CUDA, template=TEMPLATE)
    pytester.mkdir("headers").joinpath("by.cuh").write_text("__device__ float by(int n) { return n; }\n")
    pytester.makeini("[pytest]\naddopts = --strict-markers")

    def run(body: str, *options: str, subprocess: bool = False) -> Any:
        pytester.makepyfile(test_it=HEADER + body)
        arguments = [*OPTIONS, "-p", "no:cacheprovider", *options]
        return (pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess)(*arguments)

    return run


def test_arrays_by_name_and_by_place(plugin: Any) -> None:
    run = plugin("""
def test_names(emulate):
    out = emulate("scale.ptx", grid=4, block=128, a=A, s=2.0)
    np.testing.assert_array_equal(out.a, A * 2)
    assert out.a is out["a"] is out[0] and out.schedules == ("early",) and out.backend == "emulator"
    assert A[1] == 1 and not hasattr(out, "b")

def test_places(emulate):
    assert emulate("scale.ptx", A, 3.0, grid=4, block=128).a[2] == 6
    assert emulate("scale.ptx", A, grid=4, block=128, arguments={"s": np.float32(3)}).a[2] == 6

def test_cuda(emulate):
    out = emulate("scale.cu", grid=4, block=128, a=A, s=2.0, defines={"SIZE": 512})
    np.testing.assert_array_equal(out.a, A * 2)

def test_template_with_a_header_beside_the_test(emulate, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    out = emulate("template.cu:ns::scale<float, 3>", A, grid=4, block=128, include=["headers"])
    np.testing.assert_array_equal(out.a, A * 3)

def test_the_same_array_twice_is_one(emulate):
    text = open("scale.ptx").read().replace("f32 s)", "f32 s, .param .u64 b)")
    out = emulate(text, grid=4, block=128, a=A, s=2.0, b=A)
    assert out.a is out.b

def test_a_read_only_array_may_not_be_written(emulate):
    fixed = A.copy()
    fixed.flags.writeable = False
    with pytest.raises(Exception, match="read-only"):
        emulate("scale.ptx", grid=4, block=128, a=fixed, s=2.0)
""")
    run.assert_outcomes(passed=6)


def test_options_of_the_call_and_of_each_schedule_reach_the_machine(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = record_options(monkeypatch)
    run = plugin(
        """
@pytest.mark.ptxlab(checks="async", seeds=2)
def test_differs(emulate):
    arrays = {"a": A[:64], "out": np.zeros(64, np.float32)}
    emulate("late.ptx", grid=1, block=64, checks="lanes", max_steps=500, same=False, **arrays)
""",
        "--ptxlab-seed=5",
    )
    run.assert_outcomes(passed=1)
    checks = frozenset({"lanes"})
    assert options == [
        EmulatorOptions(checks=checks, mode=mode, seed=seed, max_steps=500)
        for mode, seed in (("early", 0), ("late", 5), ("late", 6))
    ]


@pytest.mark.full
def test_hypothesis_calls_it_for_every_example_and_nothing_is_loaded_twice(plugin: Any) -> None:
    run = plugin("""
from hypothesis import given, settings, strategies as st
from ptxlab import runtime
loads = []
load = runtime.load

@pytest.fixture(autouse=True, scope="module")
def counted():
    runtime.load = lambda *a, **k: (loads.append(a), load(*a, **k))[1]
    yield
    runtime.load = load

@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.floats(-4, 4, width=32))
def test_scale(emulate, blocks, s):
    out = emulate("scale.cu", grid=blocks, block=128, a=A, s=s, defines={"SIZE": 512})
    np.testing.assert_array_equal(out.a[: 128 * blocks], A[: 128 * blocks] * np.float32(s))

def test_once():
    assert len(loads) == 1
""")
    run.assert_outcomes(passed=2)


BROKEN = """
def test_bounds(emulate):
    emulate("scale.ptx", grid=4, block=128, a=A[:500], s=2.0)

def test_race(emulate):
    emulate("scale.cu", grid=4, block=128, a=A, s=2.0, defines={"SIZE": 500})

def test_late(emulate):
    emulate("late.ptx", grid=1, block=64, a=A[:64], out=np.zeros(64, np.float32))

@pytest.mark.ptxlab(checks="", seeds=3)
def test_differs(emulate):
    emulate("late.ptx", grid=1, block=64, a=A[:64], out=np.zeros(64, np.float32))
"""


@pytest.mark.smoke
def test_findings_are_failures_with_file_and_line(plugin: Any) -> None:
    run = plugin(BROKEN, "--ptxlab-format", "github")
    run.assert_outcomes(failed=4)
    run.stdout.fnmatch_lines_random(
        [
            "E *MemoryFault: scale.ptx:11: `ld.global.f32*out of bounds",
            "E *replay: pytest test_it.py::test_bounds --ptxlab-schedule early",
            "E *CheckFailed: scale: * finding* (schedule early)",
            "E *race: scale.cu:3: `*argument 0 (a) races with line 3*",
            "E *async: late.ptx:11: `ld.shared.u32*still being written by line 10*",
            "E *copy: out[[]*[]] is * in schedule early and * in late:*",
            "E *replay: pytest test_it.py::test_differs --ptxlab-schedule late:*",
            "::error file=scale.ptx,line=11,title=ptxlab MemoryFault::scale.ptx:11*::test_bounds)%0Aremedy: *",
            "E *remedy (MemoryFault): bound the index*",
            "E *remedy (schedules): wait for each copy*",
            "::error file=scale.cu,line=3,title=ptxlab race::race: scale.cu:3*",
            "::error file=late.ptx,line=11,title=ptxlab async::*",
        ]
    )
    assert "ptxlab/testing" not in run.stdout.str()  # no frame of the plugin


@pytest.mark.default_cases("false-False")
@pytest.mark.parametrize(("workflow", "printed"), [("true", True), ("false", False), (None, False)])
def test_annotations_by_default_are_those_of_a_workflow(
    workflow: str | None, printed: bool, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    if workflow:
        monkeypatch.setenv("GITHUB_ACTIONS", workflow)
    run = plugin("def test_bounds(emulate): emulate('scale.ptx', grid=4, block=128, a=A[:500], s=2.0)")
    assert ("::error file=scale.ptx,line=11," in run.stdout.str()) == printed


def test_each_failure_of_a_test_is_annotated(plugin: Any) -> None:
    """Hypothesis raises several as a group."""
    run = plugin("""
def test_several(emulate):
    errors = []
    for file, a in (("scale.ptx", A[:500]), ("late.ptx", A[:8])):
        with pytest.raises(Exception) as error:
            arrays = {"s": 2.0} if file == "scale.ptx" else {"out": A}
            emulate(file, grid=4, block=128, a=a, **arrays)
        errors.append(error.value)
    raise ExceptionGroup("several", errors)
""", "--ptxlab-format", "github")  # fmt: skip
    run.stdout.fnmatch_lines_random(["::error file=scale.ptx,line=11,*", "::error file=late.ptx,line=10,*"])


def test_a_schedule_can_be_seen_again(plugin: Any) -> None:
    run = plugin("""
@pytest.mark.ptxlab(checks="", seeds=2)
def test_schedules(emulate):
    out = emulate("late.ptx", grid=1, block=64, a=A[:64], out=np.zeros(64, np.float32), same=False)
    assert out.schedules == ("late:7",)
""", "--ptxlab-schedule", "late:7")  # fmt: skip
    run.assert_outcomes(passed=1)
    run = plugin("""
@pytest.mark.ptxlab(checks="", seeds=2)
def test_schedules(emulate):
    out = emulate("late.ptx", grid=1, block=64, a=A[:64], out=np.zeros(64, np.float32), same=False)
    assert out.schedules == ("early", "late:5", "late:6")
    assert emulate("late.ptx", A[:64], A[:64], grid=1, block=64, seeds=0).schedules == ("early",)
""", "--ptxlab-seed", "5")  # fmt: skip
    run.assert_outcomes(passed=1)


@pytest.mark.full
def test_annotations_come_through_xdist_into_a_file(
    plugin: Any, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # other plugins take seconds to import
    options = "-p xdist -p ptxlab.testing.plugin -n 1 --ptxlab-format sarif --ptxlab-output found.sarif"
    result = plugin(BROKEN, *options.split(), subprocess=True)
    result.assert_outcomes(failed=4)
    log = json.loads((pytester.path / "found.sarif").read_text())
    (run,) = log["runs"]
    assert log["version"] == "2.1.0" and run["tool"]["driver"]["name"] == "ptxlab"
    places = {
        (r["ruleId"], at["artifactLocation"]["uri"], at["region"]["startLine"])
        for r in run["results"]
        for at in [r["locations"][0]["physicalLocation"]]
    }
    assert {("MemoryFault", "scale.ptx", 11), ("race", "scale.cu", 3), ("async", "late.ptx", 11)} <= places
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {kind for kind, *_ in places}


def test_annotations_as_json(plugin: Any, pytester: pytest.Pytester) -> None:
    plugin(BROKEN, "--ptxlab-format", "json", "--ptxlab-output", "found.json").assert_outcomes(failed=4)
    annotations = json.loads((pytester.path / "found.json").read_text())
    lines = {(annotation["test"].partition("::")[2], annotation["line"]) for annotation in annotations}
    assert lines >= {("test_bounds", 11), ("test_race", 3), ("test_late", 11)}


BAD = {
    'emulate("scale.ptx", grid=4, block=128, a=A)': "scale: s: must be given (got a)",
    'emulate("scale.ptx", grid=4, block=128, a=A, s=2.0, n=3)': "scale: arguments: each of a, s once (got n)",
    'emulate("scale.ptx", A, 1.0, 2.0, grid=4, block=128)': "scale: args: at most 2 (a, s) (got 3)",
    'emulate("scale.ptx", A, 1.0, grid=4, block=128, a=A)': "scale: arguments: each of a, s once (got a)",
    'emulate("nosuch.cu", grid=1)': "nosuch.cu: no such file beside the test (.) or in the project's root",
    'emulate("scale.ptx", grid=0, a=A, s=2.0)': "grid: one to three positive integers (got 0)",
    'emulate("scale.ptx", grid=1, a=A.astype("f8"), s=2.0)': "scale: a: *float64*",
    'emulate("scale.ptx", grid=1, a=A[::2], s=2.0)': "scale: a: C-contiguous*",
    'emulate("scale.ptx", grid=1, a=A, s=2.0, checks="nosuch")': "checks: some of *",
    'emulate("scale.ptx", grid=1, a=A, s=2.0, seeds=-1)': "seeds: an integer, 0 or more (got -1)",
    'emulate("scale.ptx", grid=1, a=A, s=2.0, max_steps=0)': "max_steps: has to be a positive integer (got 0)",
    'emulate("scale.ptx", grid=1, a=A, s=2.0, defines=["X"])': "defines: names of macros with *",
    'emulate("scale.ptx", grid=1, a=A, s=2.0, arguments=["X"])': "arguments: a mapping from names *(got list)",
    'emulate("scale.ptx", grid=1, a=A, s=2.0, arguments={"s": 1.0})': "arguments: names that are not given *(got s)",
    'emulate("x" * 300 + ".cu", grid=1)': "xxx*.cu: no such file beside the test (.) or in the project's root",
    'emulate("scale.cu", grid=1, a=A, s=2.0)': 'CompileError: scale.cu:3: *identifier "SIZE" is undefined*',
    'emulate("scale.ptx", grid=1, a=A, s=2.0, arch="sm_80")': "arch: only for CUDA C++ sources (got sm_80)",
    "emulate(5, grid=1)": "kernel: a .ptx or .cu file*(got builtins.int)",
    'emulate("scale.ptx", grid=1, a=A, s=2.0).b': "AttributeError: no array 'b': the kernel has a",
}


def test_bad_input_fails_in_one_line_at_the_call(plugin: Any) -> None:
    tests = "".join(f"\ndef test_{i}(emulate):\n    {call}\n" for i, call in enumerate(BAD))
    run = plugin(
        tests + "\n@pytest.mark.ptxlab(check=1)\ndef test_marker(emulate):\n    pass\n", "--ptxlab-format=github"
    )
    run.assert_outcomes(failed=len(BAD), errors=1)
    escaped = [line.replace("[", "[[]") for line in BAD.values()]
    run.stdout.fnmatch_lines_random([f"E *{line}" for line in escaped])
    run.stdout.fnmatch_lines_random(["*test_it.py::test_marker: the marker ptxlab takes checks= and seeds="])
    run.stdout.fnmatch_lines(["::error file=scale.cu,line=3,title=ptxlab CompileError::scale.cu:3: *"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ptxlab-schedule", "soon"], "--ptxlab-schedule expects early or late:SEED, got soon"),
        (["--ptxlab-schedule", "soon:3"], "--ptxlab-schedule expects early or late:SEED, got soon:3"),
        (["--ptxlab-schedule", "late"], "--ptxlab-schedule expects early or late:SEED, got late"),
        (["--ptxlab-schedule", "late:x"], "--ptxlab-schedule expects early or late:SEED, got late:x"),
        (["--ptxlab-output", "x"], "--ptxlab-output expects --ptxlab-format beside it"),
        (["--ptxlab-seed", "-1"], "--ptxlab-seed expects 0 or more, got -1"),
        (["--ptxlab-format", "sarif", "--ptxlab-output", "no/x"], "--ptxlab-output expects a file in a folder*"),
    ],
)
def test_bad_options_stop_at_once(options: list[str], message: str, plugin: Any) -> None:
    run = plugin("def test_nothing(): pass", *options)
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    run.stderr.fnmatch_lines([f"ERROR: {message}"])


def test_the_help_says_what_each_option_takes(plugin: Any) -> None:
    run = plugin("", "--help")
    takes = {
        "backend": "{emulator,gpu}",
        "seed": "N",
        "schedule": "early|late:SEED",
        "format": "{github,sarif,json}",
        "output": "FILE",
    }
    run.stdout.fnmatch_lines([f"  --ptxlab-{name}={values}*" for name, values in takes.items()])


def test_cuda_without_its_compiler_and_the_gpu_backend_without_a_gpu(plugin: Any, monkeypatch: Any) -> None:
    from ptxlab import gpu
    from ptxlab.errors import UnavailableError
    from ptxlab.toolchain import nvrtc

    def missing() -> None:
        raise UnavailableError(f"NVRTC: needed to compile CUDA C++ and not found; {nvrtc.INSTALL}")

    monkeypatch.setattr(nvrtc, "_library", missing)
    monkeypatch.setattr(gpu, "why_not", lambda *_, **__: "there is none")
    test = "def test_it(emulate):\n    emulate('scale.NAME', grid=4, block=128, a=A, s=2.0)\n"
    run = plugin(test.replace("NAME", "cu"))
    run.stdout.fnmatch_lines(["E *UnavailableError: NVRTC: needed to compile CUDA C++ and not found; python -m pip*"])
    run = plugin(test.replace("NAME", "ptx"), "--ptxlab-backend", "gpu")
    run.stdout.fnmatch_lines(["E *UnavailableError: scale: no GPU backend here: there is none*"])


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("a/k.cu:7: `bar.sync 0`: no", ("a/k.cu", 7)),
        ("still running after 5 steps: a/k.cu:7: `ld.u32 %r1, [%rd1]`: block (0,0,0)", ("a/k.cu", 7)),
        ("nothing to be found: `x.cu:3`", ("k.ptx", 1)),
    ],
)
def test_an_error_is_annotated_at_the_place_in_its_message(message: str, place: tuple[str, int]) -> None:
    from ptxlab.errors import EmulationError
    from ptxlab.testing.annotations import of_error

    annotation = of_error(EmulationError(message), "k.ptx")
    assert (annotation.path, annotation.line) == place


def test_what_a_test_run_within_a_test_imports_stays(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it is imported twice in one process: C extensions crash then (`tests/support/plugin.py`)."""
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    plugin("def test_import(): import wave").assert_outcomes(passed=1)
    assert "wave" in sys.modules and "test_it" not in sys.modules


@pytest.mark.full
def test_loading_the_plugin_imports_nothing_heavy() -> None:
    """Every test run of a project that has ptxlab installed pays for this import."""
    code = (
        "import pytest, sys; before = {*sys.modules}; import ptxlab.testing.plugin; print(*({*sys.modules} - before))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in loaded if name.startswith("ptxlab")} == {
        "ptxlab",
        "ptxlab._moved",
        "ptxlab.testing",
        "ptxlab.testing.plugin",
    }
    assert "numpy" not in loaded and len(loaded) < 20


@pytest.mark.gpu
def test_the_same_tests_on_a_gpu(plugin: Any) -> None:
    body = """
@pytest.mark.parametrize("file", ["scale.ptx", "scale.cu"])
def test_scale(emulate, file):
    defines = {"SIZE": 512} if file.endswith("cu") else None
    out = emulate(file, grid=4, block=128, a=A, s=2.0, defines=defines)
    np.testing.assert_array_equal(out.a, A * 2)
    assert out.backend == "gpu"
"""
    plugin(body, "--ptxlab-backend", "gpu").assert_outcomes(passed=2)
