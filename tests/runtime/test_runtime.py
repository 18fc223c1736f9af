"""`load` and `run`: any kernel on the emulator, and everything that is refused before a launch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ptxlab
from ptxlab import registry, runtime
from ptxlab.errors import ArgumentError, CompileError, FileError, MemoryFault, SourceError, UnavailableError
from ptxlab.lowbit.layout.nibbles import pack_u4
from ptxlab.runtime.verify import compare
from ptxlab.spec import Launch
from tests.support.add4 import PTX_ADD4

CUDA_AXPY = r"""
// y = a * x + y
extern "C" __global__ void __launch_bounds__(64)
axpy(const float* __restrict__ x, float* y, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""


@pytest.fixture
def lqq() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    q4 = rng.integers(0, 16, (4, 128), dtype=np.uint8)
    return {
        "qweight": pack_u4(q4),
        "scale": rng.integers(1, 9, (4, 2), dtype=np.uint8),
        "offset": rng.integers(9, 100, (4, 2), dtype=np.uint8),
    }


def test_a_cuda_kernel_without_a_spec_runs_on_the_emulator() -> None:
    x, y = np.arange(100, dtype=np.float32), np.ones(100, np.float32)
    kernel = ptxlab.load(CUDA_AXPY)
    assert kernel.parameters == ("x", "y", "a", "n")
    outcome = kernel(x, y, np.float32(3), np.int32(100), grid=2, block=64, backend="emulator")
    assert outcome.backend == "emulator" and outcome.outputs["y"] is y
    assert np.array_equal(y, 3 * np.arange(100) + 1)


CUDA_RACE = """#include "dequant.cuh"
// a comment
__device__ int at(const int* s, int i) { return s[i]; }
__device__ int opposite(const int* s, int t) {
    return at(s, 63 - t);
}
extern "C" __global__ void race(unsigned* y) {
    __shared__ int s[64];
    int t = threadIdx.x;
    s[t] = t;
    y[t] = ptxlab::mul_u8x4(opposite(s, t), 16);
}
"""


def test_any_kernel_is_judged_by_what_comes_from_the_one_before_it() -> None:
    source = """#include "griddep.cuh"
extern "C" __global__ void twice(const int* x, int* y) {
    const int early = x[threadIdx.x];
    ptxlab::wait_for_predecessors();
    y[threadIdx.x] = early + x[threadIdx.x];
}"""
    twice, x, y = ptxlab.load(source, arch="sm_90"), np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    options = {"grid": 1, "block": 32, "backend": "emulator", "checks": ["race"]}
    assert twice(x, y, **options).findings == ()
    (finding,) = twice(x, y, after_wait=["x"], **options).findings
    assert finding.line == 3 and "ahead of griddepcontrol.wait" in finding.message and (y == 2 * x).all()
    with pytest.raises(ArgumentError, match=r"^twice: after_wait: some of x, y \(got z\)$"):
        twice(x, y, after_wait=["z"], **options)


def test_findings_in_a_cuda_source_are_at_its_own_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at those of the PTX that NVRTC made of it, which nobody sees; in a header, at the header's."""
    monkeypatch.chdir(tmp_path)
    Path("race.cu").write_text(CUDA_RACE)
    y = np.zeros(64, np.uint32)
    findings = ptxlab.load("race.cu")(y, grid=1, block=64, backend="emulator", checks=["race", "lanes"]).findings
    race = next(f for f in findings if f.kind == "race")
    assert (race.path, race.line) == ("race.cu", 3) and "races with line 10, `st.shared" in race.message
    assert race.callers == (("race.cu", 5), ("race.cu", 11))
    assert "race.cu:3 (called from line 5, line 11): `ld.shared" in str(race) and "(s + " in race.message
    packed = next(f for f in findings if f.kind == "carry")
    header = Path(packed.path).read_text().splitlines()
    assert packed.path.endswith("dequant.cuh") and 'asm("mul.lo.u32' in header[packed.line - 1]
    assert packed.callers == (("race.cu", 11),) and "(called from line 11 of race.cu)" in str(packed)
    with pytest.raises(MemoryFault, match=r"race\.cu:10: `st\.shared\.u32 .*thread \(64,0,0\)"):
        ptxlab.load("race.cu")(y, grid=1, block=65, backend="emulator")


@pytest.mark.smoke
@pytest.mark.parametrize(
    "declaration",
    [
        'extern "C" __global__ void __launch_bounds__(64, 2) k({})',
        'extern "C" __global__ __launch_bounds__(32 * (1 + 1)) void k({})',
        'extern "C" __launch_bounds__(64) __global__ void k({})',
        'extern "C" {{ __global__ void k({}); }} __global__ void k({})',
        'extern "C" void __global__ k({})',
    ],
)
def test_cuda_kernels_are_found_however_they_are_declared(declaration: str) -> None:
    text = "template <int A, int B> struct Pair {}; struct V { float x, y; };\n"
    text += (
        declaration.replace("{}", "const float* __restrict__ x, int n, V v, float* y")
        .replace("{{", "{")
        .replace("}}", "}")
    )
    kernel = ptxlab.load(text + " { if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x] + v.y; }")
    assert (kernel.entry, kernel.parameters) == ("k", ("x", "n", "v", "y"))
    y, v = np.zeros(3, np.float32), np.array([1, 2], np.float32).tobytes()
    kernel(np.ones(3, np.float32), np.int32(3), v, y, grid=1, block=32, backend="emulator")
    assert (y == 3).all()


CUDA_WGMMA = """
extern "C" __global__ void k(int* arch) {
    *arch = __CUDA_ARCH__;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.fence.sync.aligned;");
    *arch += 1;
#endif
}
"""


def test_the_emulator_runs_what_is_compiled_for_the_kernels_own_architecture() -> None:
    for arch, seen in ((None, 800), ("sm_75", 800), ("sm_89", 890), ("sm_90", 900), ("sm_90a", 901)):
        out = np.zeros(1, np.int32)
        ptxlab.load(CUDA_WGMMA, arch=arch)(out, grid=1, block=32, backend="emulator")
        assert out[0] == seen
    with pytest.raises(ArgumentError, match=r"arch: sm_<number>, such as sm_80 or sm_90a \(got hopper\)"):
        ptxlab.load(CUDA_WGMMA, arch="hopper")
    with pytest.raises(ArgumentError, match="arch: only for CUDA"):
        ptxlab.load(PTX_ADD4, arch="sm_80")


@pytest.mark.parametrize(("arch", "expected"), [(None, (None, False)), ("sm_90", ("sm_90", False)),
                                             ("sm_90a", ("sm_90a", True))])  # fmt: skip
def test_a_gpu_is_asked_whether_it_has_the_architecture(arch, expected, monkeypatch) -> None:
    monkeypatch.setattr(runtime.gpu, "why_not", lambda arch, exact: heard.append((arch, exact)) or "too old")
    heard: list = []
    kernel = ptxlab.load(CUDA_WGMMA, arch=arch)
    assert runtime.choose_backend(None, kernel, Launch((1, 1, 1), (32, 1, 1)), on_device=False) == "emulator"
    assert heard == [expected]


def test_parameters_that_are_more_than_a_name() -> None:
    kernel = ptxlab.load(
        'extern "C" __global__ void k(std::pair<int, int> p, float y[4], int n = 3, int* __restrict__ z) {}'
    )
    assert kernel.parameters == ("p", "y", "n", "z")


def test_a_ptx_kernel_without_a_spec_is_checked_by_lane(tmp_path: Path) -> None:
    path = tmp_path / "add4.ptx"
    path.write_text(PTX_ADD4)
    a = np.full(32, 0x01010101, np.uint32)
    b = np.full(32, 0x10101010, np.uint32)
    b[5] = 0x1010FF10
    total = np.empty_like(a)
    (finding, *further_findings) = ptxlab.load(path)(
        a, b, total, grid=1, block=32, backend="emulator", checks=["lanes"]
    ).findings
    assert np.array_equal(total, a + b)
    assert {finding.kind, *(f.kind for f in further_findings)} == {"carry", "range"}
    carry = next(f for f in (finding, *further_findings) if f.kind == "carry")
    assert carry.line == 1 + PTX_ADD4.split("\n").index(next(x for x in PTX_ADD4.split("\n") if "@lanes" in x))
    assert carry.thread == (5, 0, 0)
    assert "add.u32" in str(carry) and "add4.ptx" in str(carry)


def test_a_kernel_without_a_spec_takes_the_arrays_of_other_libraries() -> None:
    class Foreign:
        """Stand-in for PyTorch's tensors on the CPU: memory that DLPack shares."""

        def __init__(self) -> None:
            self.array = np.arange(32, dtype=np.uint32)
            self.shape = self.array.shape

        def __dlpack__(self, **options: object) -> object:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    a, b, total = Foreign(), np.ones(32, np.uint32), Foreign()
    outcome = ptxlab.load(PTX_ADD4)(a, b, total, grid=1, block=32, backend="emulator")
    assert outcome.outputs["sum"] is total and np.array_equal(total.array, np.arange(32) + 1)


def test_an_array_with_gaps_is_refused_on_every_backend() -> None:
    a = np.zeros(64, np.uint32)
    with pytest.raises(ArgumentError, match=r"add4: b: C-contiguous \(got strides \(8,\)\)"):
        ptxlab.load(PTX_ADD4)(a, a[::2], a, grid=1, block=32)


def test_checks_are_silent_where_nothing_carries() -> None:
    a = np.full(32, 0x7F7F7F7F, np.uint32)
    outcome = ptxlab.load(PTX_ADD4)(
        a, a, np.empty_like(a), grid=1, block=32, backend="emulator", checks=["lanes", "init", "race"]
    )
    assert outcome.findings == ()


def test_out_of_bounds_is_a_fault_with_the_line_and_the_thread() -> None:
    a = np.zeros(31, np.uint32)
    with pytest.raises(MemoryFault, match=r":10: .*ld\.global\.u32.*thread \(31,0,0\).*argument 0 \(a\)"):
        ptxlab.load(PTX_ADD4)(a, a, np.empty_like(a), grid=1, block=32, backend="emulator")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (PTX_ADD4.replace("add.u32 %x0, %x0", "add.u32 %x0 %x0"), SourceError, r"<text>:11:"),
        (PTX_ADD4.replace(", %x1; ", ", %nowhere; "), SourceError, "nowhere"),
        (CUDA_AXPY.replace("a * x", "a * z"), CompileError, r'<text>:6: .*"z" is undefined.*y\[i\] = a \* z\[i\]'),
        ("int main() { return 0; }", ArgumentError, r"entry: a kernel \(__global__\) \(got nothing\)"),
    ],
)
def test_a_source_that_is_wrong_shows_the_line(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        x, y = np.zeros((2, 32), np.float32)
        ptxlab.load(text)(x, y, np.float32(1), np.int32(1), grid=1, block=32, backend="emulator")


def test_files_that_cannot_be_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"missing\.ptx: cannot be read: No such file"):
        ptxlab.load(tmp_path / "missing.ptx")
    with pytest.raises(ArgumentError, match=r"source: a \.ptx or \.cu file"):
        ptxlab.load(tmp_path / "kernel.cpp")
    (tmp_path / "binary.ptx").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(FileError, match=r"binary\.ptx: not a text file"):
        ptxlab.load(tmp_path / "binary.ptx")


def test_the_entry_must_exist() -> None:
    with pytest.raises(ArgumentError, match=r"entry: one of add4 \(got sub4\)"):
        ptxlab.load(PTX_ADD4, "sub4")
    with pytest.raises(ArgumentError, match="defines: only for CUDA"):
        ptxlab.load(PTX_ADD4, defines={"N": 1})


def test_run_returns_outputs_by_name(lqq: dict[str, np.ndarray]) -> None:
    outcome = ptxlab.run("dequant_lqq", **lqq, backend="emulator")
    assert set(outcome.outputs) == {"out"}
    assert outcome.outputs["out"].shape == (4, 128) and outcome.outputs["out"].dtype == np.int8
    numpy_runner = ptxlab.run("dequant_lqq.cu", **lqq, backend="emulator")
    assert np.array_equal(outcome.outputs["out"], numpy_runner.outputs["out"])


def test_run_writes_into_the_array_it_is_given(lqq: dict[str, np.ndarray]) -> None:
    out = np.full((4, 128), 99, np.int8)
    outcome = ptxlab.run("dequant_lqq", **lqq, out={"out": out}, backend="emulator")
    assert outcome.outputs["out"] is out
    assert np.array_equal(out, ptxlab.run("dequant_lqq", **lqq, backend="emulator").outputs["out"])


def test_an_array_that_is_read_and_written_may_be_given_as_out() -> None:
    """`attention_merge` has one that is called `out` itself: by `run` there is no other way to give it."""
    spec, (source,) = registry.find("attention_merge")
    sizes = spec.example_sizes[0]
    logical = spec.example(np.random.default_rng(0), **sizes)
    packed = spec.pack(logical)
    out = {"out": packed.pop("out").astype(np.float16), "lse": packed.pop("lse").copy()}
    outcome = ptxlab.run(source.label, out=out, **packed, **sizes, backend="emulator")
    assert outcome.outputs["out"] is out["out"] and outcome.outputs["lse"] is out["lse"]
    compare(spec, outcome.outputs, logical)
    with pytest.raises(ArgumentError, match=r"attention_merge: lse: must be given"):
        ptxlab.run(source.label, out={"out": out["out"]}, **packed, **sizes, backend="emulator")


def test_an_empty_matrix_gives_an_empty_result(lqq: dict[str, np.ndarray]) -> None:
    out = ptxlab.run("dequant_qoq_channel", qweight=np.empty((0, 4), np.uint32), backend="emulator").outputs["out"]
    assert out.shape == (0, 32)
    out = ptxlab.run("dequant_lqq", **{n: a[:0] for n, a in lqq.items()}, backend="emulator").outputs["out"]
    assert out.shape == (0, 128)
    out = ptxlab.run("dequant_lqq", **{n: a[:, :0] for n, a in lqq.items()}, g=64, backend="emulator").outputs["out"]
    assert out.shape == (4, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": None}, r"dequant_lqq: scale: must be given"),
        ({"zero": np.zeros((4, 2), np.uint8)}, r"dequant_lqq: arguments: offset, qweight, scale \(got zero\)"),
        ({"qweight": np.zeros((4, 16), np.int64)}, r"dequant_lqq: qweight: dtype uint32 \(got int64\)"),
        ({"qweight": np.zeros((4, 32), np.uint32)[:, ::2]}, r"dequant_lqq: qweight: C-contiguous \(got strides"),
        ({"qweight": np.zeros((4, 15), np.uint32)}, r"dequant_lqq: .*K"),
        ({"scale": np.zeros((4, 2), np.uint8)}, r"dequant_lqq: scale: scale >= 1 \(got scale\[0, 0\] = 0\)"),
        ({"scale": np.full((4, 2), 17, np.uint8)}, r"dequant_lqq: scale: scale <= 16"),
    ],
)
def test_bad_input_is_refused_before_any_launch(lqq: dict[str, np.ndarray], change: dict, message: str) -> None:
    out = np.full((4, 128), 99, np.int8)
    inputs = {n: a for n, a in {**lqq, **change}.items() if a is not None}
    with pytest.raises(ArgumentError, match=message):
        ptxlab.run("dequant_lqq", **inputs, out={"out": out}, backend="emulator")
    assert (out == 99).all()


def test_a_misaligned_array_is_refused(lqq: dict[str, np.ndarray]) -> None:
    raw = np.zeros(4 * 16 * 4 + 1, np.uint8)
    shifted = raw[1:].view(np.uint32).reshape(4, 16)
    with pytest.raises(ArgumentError, match=r"dequant_lqq: qweight: .*align"):
        ptxlab.run("dequant_lqq", **{**lqq, "qweight": shifted}, backend="emulator")


def test_unchecked_admits_what_the_rules_refuse(lqq: dict[str, np.ndarray]) -> None:
    lqq["scale"][:] = 255
    outcome = ptxlab.run("dequant_lqq", **lqq, unchecked=True, checks=["lanes"], backend="emulator")
    assert {f.kind for f in outcome.findings} == {"carry", "range"}


def test_backends_that_do_not_exist_are_named(lqq: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"backend: one of gpu, emulator \(got tpu\)"):
        ptxlab.run("dequant_lqq", **lqq, backend="tpu")
    monkeypatch.setattr(runtime.gpu, "why_not", lambda *a, **k: "no CUDA device")
    with pytest.raises(UnavailableError, match=r'no GPU backend here: no CUDA device; pass backend="emulator"'):
        ptxlab.run("dequant_lqq", **lqq, backend="gpu")


def test_who_asks_for_checks_gets_the_emulator_also_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.gpu, "why_not", lambda *a, **k: None)
    kernel, one_warp = ptxlab.load(PTX_ADD4), Launch((1, 1, 1), (32, 1, 1))
    assert runtime.choose_backend(None, kernel, one_warp, on_device=False) == "gpu"
    assert runtime.choose_backend(None, kernel, one_warp, on_device=False, checks=["race"]) == "emulator"
    with pytest.raises(UnavailableError, match="checks are the emulator's"):
        runtime.choose_backend("gpu", kernel, one_warp, on_device=False, checks=["race"])


def test_checks_of_a_kernel_are_those_of_calls_that_ask_for_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    launched_checks: list[tuple[str, set[str]]] = []
    monkeypatch.setattr(runtime.gpu, "why_not", lambda *a, **k: None)
    monkeypatch.setattr(
        runtime.Kernel,
        "launch",
        lambda *_, backend, options, **__: launched_checks.append((backend, set(options.checks))),
    )
    kernel, a = replace(ptxlab.load(PTX_ADD4), checks=frozenset({"lanes"})), np.zeros(32, np.uint32)
    for options in ({}, {"backend": "emulator"}, {"backend": "gpu"}, {"checks": ()}, {"checks": ["race"]}):
        kernel(a, a, a, grid=1, block=32, **options)
    assert launched_checks == [("emulator", {"lanes"})] * 2 + [("gpu", set())] * 2 + [("emulator", {"race"})]


def test_the_emulator_is_not_chosen_silently_for_hours_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.gpu, "why_not", lambda *a, **k: "no CUDA device")
    kernel = ptxlab.load(PTX_ADD4)
    with pytest.raises(UnavailableError, match=r'emulator would take about \d+ s; pass backend="emulator"'):
        runtime.choose_backend(None, kernel, Launch((1 << 20, 1, 1), (1024, 1, 1)), on_device=False)
    assert runtime.choose_backend(None, kernel, Launch((1, 1, 1), (32, 1, 1)), on_device=False) == "emulator"


def test_a_kernel_is_launched_as_cupy_and_numba_write_it() -> None:
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    outcome = ptxlab.load(CUDA_AXPY)[2, 32](x, y, 2, 64, backend="emulator", checks="all")
    assert outcome.outputs["y"] is y and np.array_equal(y, 2 * x) and outcome.findings == ()
    ptxlab.load(CUDA_AXPY)[(1,), (64, 1), 128](x, y, -2, 64, backend="emulator")
    assert not y.any()


def test_checks_are_named_by_a_string_too() -> None:
    a, out = np.full(32, 0xFFFFFFFF, np.uint32), np.zeros(32, np.uint32)
    for checks in ("lanes", "all", "lanes, race", ["lanes"]):
        assert ptxlab.load(PTX_ADD4)[1, 32](a, a, out, backend="emulator", checks=checks).findings
    for checks, got in (("slow", "slow"), (1, "1"), (True, "True"), ([None], "None"), ("race,x", "x")):
        with pytest.raises(
            ArgumentError,
            match=rf"^checks: some of all, async, divergence, .*, overrun, proxy, quirks, race \(got {got}\)$",
        ):
            ptxlab.load(PTX_ADD4)[1, 32](a, a, out, backend="emulator", checks=checks)


@pytest.mark.parametrize("source", [None, 1.5, b"x.ptx", ["x.ptx"]])
def test_what_is_no_source_is_refused(source: object) -> None:
    with pytest.raises(ArgumentError, match=r"^source: a path, the text itself or a Source \(got "):
        ptxlab.load(source)


@pytest.mark.parametrize("options", [{"defines": 3}, {"defines": {1: 2}}, {"defines": {"N": None}},
                                  {"defines": {"N": 1.5}}, {"arch": 80}, {"arch": b"sm_80"}])  # fmt: skip
def test_constants_and_architectures_that_are_none_are_refused(options: dict) -> None:
    with pytest.raises(ArgumentError, match=r"^(defines: names of macros|arch: sm_<number>)"):
        ptxlab.load(CUDA_AXPY, **options)


def test_geometry_is_checked() -> None:
    a = np.zeros(32, np.uint32)
    with pytest.raises(ArgumentError, match="grid: one to three positive integers"):
        ptxlab.load(PTX_ADD4)(a, a, a, grid=0, block=32)
    for size in (None, 1.5, "1", True, (1, 1, 1, 1), (1, 2.0), -1):
        with pytest.raises(ArgumentError, match=r"^block: one to three positive integers"):
            ptxlab.load(PTX_ADD4)(a, a, a, grid=1, block=size)
    for size in (None, 1.5, -1, "0"):
        with pytest.raises(ArgumentError, match=r"^shared_bytes: an integer, 0 or more"):
            ptxlab.load(PTX_ADD4)[1, 32, size](a, a, a)
    with pytest.raises(ArgumentError, match=r"^add4: \[\]: kernel\[grid, block\] or "):
        ptxlab.load(PTX_ADD4)[1]
    with pytest.raises(ArgumentError, match=r"add4: args: 3 arguments \(a, b, sum\) \(got 2\)"):
        ptxlab.load(PTX_ADD4)(a, a, grid=1, block=32)


def test_a_kernel_of_a_later_architecture_says_which_one_was_compiled() -> None:
    text = '#if __CUDA_ARCH__ >= 900\nextern "C" __global__ void k(int* y) { y[0] = 1; }\n#endif'
    with pytest.raises(ArgumentError, match=r"entry: there is no kernel in PTX of <text> for sm_80 \(got k\)"):
        ptxlab.load(text)(np.zeros(1, np.int32), grid=1, block=1, backend="emulator")
