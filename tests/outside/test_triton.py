"""Kernels that Triton compiled, checked and compared with NumPy: its .ptx in `triton/`, and by Triton where it is."""

import importlib.util
import re
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import PtxlabError
from ptxlab.hardware.tensor_map import TensorMap

HERE = Path(__file__).parent / "triton"
both_architectures = pytest.mark.parametrize("arch", ["sm80", "sm90"])
Run = Callable[..., Any]
SHARED = {"add": 0, "softmax": 16, "matmul": 49152}  # bytes that Triton asks for, at most


def check_add(run: Run) -> None:
    x, y = np.random.default_rng(0).standard_normal((2, 1300), dtype=np.float32)
    out = run(x, y, np.zeros_like(x), x.size, grid=3)
    np.testing.assert_array_equal(out[2], x + y)


def check_softmax(run: Run) -> None:
    x = np.random.default_rng(1).standard_normal((5, 200), dtype=np.float32)
    out = run(x, np.zeros_like(x), 200, 200, grid=5)
    e = np.exp(x - x.max(axis=1, keepdims=True), dtype=np.float64)
    np.testing.assert_allclose(out[1], e / e.sum(axis=1, keepdims=True), rtol=1e-5)


def check_matmul(run: Run) -> None:
    """Check a product of integers and eighths, whose sums are exact in whatever order they are made."""
    rng, (m, n, k) = np.random.default_rng(2), (80, 144, 96)
    a, b = ((rng.integers(-8, 9, shape) / 8).astype(np.float16) for shape in ((m, k), (k, n)))
    out = run(a, b, np.zeros((m, n), np.float16), m, n, k, grid=(2, 2))
    np.testing.assert_array_equal(out[2], (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16))


CHECKS = {"add": check_add, "softmax": check_softmax, "matmul": check_matmul}
each_kernel = pytest.mark.parametrize("name", CHECKS)


@pytest.mark.default_cases("add-sm90", "add-sm80", "softmax-sm90", "softmax-sm80")
@both_architectures
@each_kernel
@pytest.mark.ptxlab(checks="all", seeds=2)
def test_ptx_that_triton_has_made(name: str, arch: str, emulate: Run) -> None:
    scratch = [np.zeros(16, np.uint8)] * 2  # Triton's two last parameters

    def run(*args: Any, grid: Any) -> Any:
        file = HERE / f"{name}_{arch}.ptx"
        return emulate(file, *args, *scratch, grid=grid, block=128, shared_bytes=SHARED[name])

    CHECKS[name](run)


@pytest.mark.ptxlab(checks="all", seeds=2)
def test_a_product_of_tensor_copies_is_clean(emulate: Run) -> None:
    """Behind mbarrier.init Triton has bar.sync alone, without a fence."""
    rng, (m, n, k) = np.random.default_rng(2), (100, 72, 136)
    a, b = ((rng.integers(-8, 9, shape) / 8).astype(np.float16) for shape in ((m, k), (k, n)))
    arrays = a, b, np.zeros((m, n), np.float16)
    maps = [x for array in arrays for x in (TensorMap(array, (64, 64), 128), *array.shape, array.shape[1], 1)]
    scratch = [np.zeros(16, np.uint8)] * 2
    out = emulate(HERE / "matmul_tma_sm90.ptx", *maps, k, *scratch, grid=(2, 2), block=128, shared_bytes=57344)
    np.testing.assert_array_equal(out[2], (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.syspath_prepend(str(HERE))
    import kernels

    yield kernels
    del sys.modules["kernels"]


@pytest.mark.default_cases("softmax-sm90", "softmax-sm80")
@both_architectures
@each_kernel
def test_the_kernels_themselves(name: str, arch: str, emulate: Run, kernels: Any) -> None:
    function, _, constants, _ = kernels.KERNELS[name]
    CHECKS[name](lambda *args, grid: emulate(function, *args, **constants, grid=grid, arch=arch.replace("sm", "sm_")))


@pytest.mark.smoke
def test_a_fence_that_triton_sets_is_needed(emulate: Run) -> None:
    """Its matmul for sm_90 has threads store masked tiles into shared memory, for wgmma to read."""
    text = (HERE / "matmul_sm90.ptx").read_text()
    broken = text.replace("fence.proxy.async.shared::cta;", "")
    assert broken != text
    scratch = [np.zeros(16, np.uint8)] * 2
    with pytest.raises(AssertionError, match=r"async-dirty: .*wgmma.* without a fence.proxy.async behind it"):
        check_matmul(lambda *args, grid: emulate(broken, *args, *scratch, grid=grid, block=128, shared_bytes=49152))


def test_findings_name_lines_of_the_python_file(emulate: Run, kernels: Any) -> None:
    x = np.zeros(500, np.float32)
    line = next(
        i for i, text in enumerate((HERE / "kernels.py").read_text().splitlines(), 1) if "tl.load(x + i" in text
    )
    with pytest.raises(Exception, match=rf"tests/outside/triton/kernels.py:{line}: .*argument 0 \(x\).*out of bounds"):
        emulate(kernels.add, x, x, x, 501, grid=1, BLOCK=512)


def test_a_copy_of_the_file_is_named_though_triton_has_compiled_another(
    emulate: Run, kernels: Any, tmp_path: Path
) -> None:
    test_findings_name_lines_of_the_python_file(emulate, kernels)
    copy = tmp_path / "kernels.py"
    copy.write_text((HERE / "kernels.py").read_text())
    spec = importlib.util.spec_from_file_location("kernels_copy", copy)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    x = np.zeros(500, np.float32)
    with pytest.raises(Exception, match=rf"^{re.escape(str(copy))}:\d+: "):
        emulate(module.add, x, x, x, 501, grid=1, BLOCK=512)


def test_numbers_and_constants_of_a_call(emulate: Run, kernels: Any) -> None:
    x = np.arange(16, dtype=np.float32)
    for n in (1, 16, np.int32(7)):  # 1 becomes a constant, 16 is known to be a multiple of 16
        out = emulate(kernels.add, x, x, np.zeros_like(x), n=n, BLOCK=32, grid=1, num_warps=1)
        np.testing.assert_array_equal(out.out, np.where(np.arange(16) < n, 2 * x, 0))


@pytest.mark.parametrize("s", [2.5, np.float16(2.5), np.float32(2.5), np.float64(2.5)])
def test_a_float_is_as_wide_as_its_parameter(s: Any, emulate: Run, kernels: Any) -> None:
    out = emulate(kernels.scale, np.arange(32, dtype=np.float32), s, 3.0, grid=1, BLOCK=32)
    np.testing.assert_array_equal(out.x, 7.5 * np.arange(32))


def test_heuristics_and_configurations_give_constants(emulate: Run, kernels: Any) -> None:
    import triton

    x = np.arange(48, dtype=np.float32)
    by_n = triton.heuristics({"BLOCK": lambda arguments: triton.next_power_of_2(arguments["n"])})(kernels.add)
    np.testing.assert_array_equal(emulate(by_n, x, x, np.zeros_like(x), 48, grid=1).out, 2 * x)
    tuned = triton.autotune([triton.Config({"BLOCK": 64}, num_warps=2)], key=["n"])(kernels.add)
    np.testing.assert_array_equal(emulate(tuned, x, x, np.zeros_like(x), 48, grid=1).out, 2 * x)


def multiply(emulate: Run, kernels: Any, dtype: str, arch: str) -> None:
    import triton.language as tl

    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    rng, exact = np.random.default_rng(3), "int32" if dtype == "int8" else "float32"
    a, b = (rng.integers(-4, 5, (64, 64)).astype(getattr(ml_dtypes, dtype, dtype)) for _ in range(2))
    c = np.zeros((64, 64), exact)
    out = emulate(kernels.dot, a, b, c, TILE=64, OUT=getattr(tl, exact), grid=1, arch=arch)
    np.testing.assert_array_equal(out.c, a.astype(exact) @ b.astype(exact))


TENSOR_CORES = [
    *((dtype, arch) for dtype in ("float16", "bfloat16", "int8", "float32") for arch in ("sm_80", "sm_90")),
    ("float8_e5m2", "sm_89"),
    ("float8_e4m3fn", "sm_90"),
]


@pytest.mark.default_cases("float16-sm_80", "bfloat16-sm_90", "int8-sm_80", "float8_e5m2-sm_89")
@pytest.mark.parametrize(("dtype", "arch"), TENSOR_CORES)
def test_dtypes_that_are_multiplied(dtype: str, arch: str, emulate: Run, kernels: Any) -> None:
    multiply(emulate, kernels, dtype, arch)


def test_blackwell_is_refused_by_name(emulate: Run, kernels: Any) -> None:
    with pytest.raises(PtxlabError, match=r"dot: tmem_size: 0: the tensor memory .* is not emulated \(got \d+\)"):
        multiply(emulate, kernels, "float16", "sm_100")


def test_launches_that_are_refused_by_name(emulate: Run, kernels: Any) -> None:
    x = np.zeros((64, 64), np.float16)
    with pytest.raises(PtxlabError, match=r"described: global_scratch_size: 0: scratch memory .* \(got \d+\)"):
        emulate(kernels.described, x, x.copy(), TILE=64, grid=1, arch="sm_90")
    y = np.zeros(64, np.float32)
    with pytest.raises(PtxlabError, match=r"add: num_ctas: 1: clusters of Triton's are not launched here \(got 2\)"):
        emulate(kernels.add, y, y, y.copy(), 64, BLOCK=64, grid=1, arch="sm_90", num_ctas=2)


REFUSED = {
    "n=2**70, BLOCK=128": "add: n: an integer of at most 64 bits (got 1180591620717411303424)",
    "n=3, BLOCK=128, arch=90": "arch: sm_<number>, such as sm_80 or sm_90a (got 90)",
    "n=3": "add: BLOCK: must be given (got x, y, out, n)",
    "n=3, BLOCK=100": "add: triton.compile: what Triton compiles (got *power of 2)",
    "n=3, BLOCK=128, num_warp=1": "add: arguments: each of x, y, out, n, BLOCK once (got num_warp)",
    "n='3', BLOCK=128": "add: n: an array or a number (got str)",
    "n=3, BLOCK=128, arch='90'": "arch: sm_<number>, such as sm_80 or sm_90 (got 90)",
    "n=3, BLOCK=128, block=64": "block: 128, which the kernel was compiled for (got 64)",
    "n=3, BLOCK=128, defines={'X': 1}": "defines: not for a Triton kernel, *",
}


@pytest.mark.parametrize("call", REFUSED)
def test_bad_calls_are_refused_in_one_line(call: str, emulate: Run, kernels: Any) -> None:
    x = np.zeros(3, np.float32)
    with pytest.raises(PtxlabError) as error:
        emulate(kernels.add, x, x, x, grid=1, **eval(f"dict({call})"))
    assert fnmatchcase(str(error.value), REFUSED[call]) and "\n" not in str(error.value)
