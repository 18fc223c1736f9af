"""What is put under a profiler: problems of every kind, launched by the very process that ncu would watch."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu, registry
from ptxlab.errors import ArgumentError
from ptxlab.profile import launch_target, nsight
from ptxlab.profile.launch_target import LaunchTarget
from tests.support.add4 import PTX_ADD4
from tests.support.emulated_gpu import emulated_gpu

__all__ = ["emulated_gpu"]

SMALL = (
    LaunchTarget("gemm_w4a8_qoq_sm90", {"M": 8, "N": 64, "K": 128}),
    LaunchTarget("gemm_w4a8_sm90", {"M": 8, "N": 64, "K": 128}),
    LaunchTarget("gemm_w4a8_sm90:channel", {"M": 8, "N": 64, "K": 128}),
    LaunchTarget("attention_kv4_sm90", {"B": 1, "L": 64, "Hq": 1, "Hkv": 1}),
    LaunchTarget("attention_kv4_mma_sm80", {"B": 1, "L": 64, "Hq": 1, "Hkv": 1}),
    LaunchTarget("append_kv4"),
    LaunchTarget("rope_append_kv4"),
    LaunchTarget("dequant_lqq"),
    LaunchTarget("load_bulk_sm90"),
    LaunchTarget("quantize_activations_s8"),
    LaunchTarget("gemm_w8a8_sm90", {"M": 8, "N": 64, "K": 128}),
)


@pytest.fixture
def events(emulated_gpu: pytest.MonkeyPatch) -> list[str]:
    """Log the entries as they are launched, and where the profiled stretch begins and ends."""
    seen: list[str] = []
    prepare = gpu.prepare

    def prepare_recorded(kernel: Any, args: Any, geometry: Any) -> Any:
        call = prepare(kernel, args, geometry)
        return lambda: (seen.append(kernel.run.entry), call())

    @contextmanager
    def profiling() -> Iterator[None]:
        seen.append("begin")
        yield
        seen.append("end")

    emulated_gpu.setattr(gpu, "prepare", prepare_recorded)
    emulated_gpu.setattr(gpu, "profiling", profiling)
    emulated_gpu.setattr(launch_target, "WARM_UP", 1)
    return seen


@pytest.fixture
def add4(tmp_path: Path) -> LaunchTarget:
    (tmp_path / "add4.ptx").write_text(PTX_ADD4)
    np.savez(tmp_path / "in.npz", **{name: np.full(32, 2, np.uint32) for name in ("a", "b", "sum")})
    return LaunchTarget(str(tmp_path / "add4.ptx"), inputs=str(tmp_path / "in.npz"))


@pytest.mark.full
def test_each_job_is_warmed_up_and_then_profiled_once(events: list[str], add4: LaunchTarget) -> None:
    python, option, code, jobs = launch_target.command([*SMALL, add4])
    assert (python, option) == (sys.executable, "-c") and "launch_target.main" in code
    launch_target.main(jobs)
    names = [*(job.target.removesuffix(":channel") for job in SMALL), "add4"]
    assert events == [event for name in names for event in (name, "begin", name, "end")]
    assert [launch_target.entry_of(job) for job in (*SMALL, add4)] == names


def test_a_failed_launch_is_one_line_with_the_prefix_that_the_command_looks_for(
    events: list[str], add4: LaunchTarget
) -> None:
    np.savez(add4.inputs, a=np.zeros(32, np.uint32))
    with pytest.raises(SystemExit, match=f"^{nsight.FAILED}add4: b: must be given"):
        launch_target.main(json.dumps([asdict(add4)]))
    assert events == []


def test_a_file_is_compiled_with_folders_language_and_constants(events: list[str], tmp_path: Path) -> None:
    """The process under the profiler gets -I, --std and -D."""
    (tmp_path / "headers").mkdir()
    (tmp_path / "headers" / "by.cuh").write_text("template <class T> concept Number = sizeof(T) == 4;\n")
    text = '#include "by.cuh"\ntemplate <Number T> __global__ void scale(T* x) { x[threadIdx.x] *= BY; }\n'
    (tmp_path / "k.cu").write_text(text + "template __global__ void scale<TYPE>(TYPE*);\n")
    np.savez(tmp_path / "in.npz", x=np.ones(32, np.float32))
    options: dict[str, Any] = {
        "include": (str(tmp_path / "headers"),),
        "std": "c++20",
        "defines": {"BY": 3, "TYPE": "float"},
    }
    job = LaunchTarget(f"{tmp_path / 'k.cu'}:scale<float>", inputs=str(tmp_path / "in.npz"), **options)
    launch_target.main(launch_target.command([job])[-1])
    assert events == [launch_target.entry_of(job), "begin", launch_target.entry_of(job), "end"]


def test_sizes_are_the_usual_ones_unless_given() -> None:
    assert LaunchTarget("gemm_w4a8_sm90").spec is registry.specs()["gemm_w4a8_sm90"]
    sizes = launch_target.sizes_of(registry.specs()["gemm_w4a8_sm90"], {"M": 3})
    assert sizes == {"M": 3, "N": 22016, "K": 4096, "g": 128}
    assert launch_target.usual_sizes(registry.specs()["gemm_w4a8_sm90"], "emulator")["N"] == 256
    assert launch_target.usual_sizes(registry.specs()["gemm_w8a8_sm90"])["N"] == 22016, "no step, and yet a GEMM"
    with pytest.raises(ArgumentError, match=r"backend: one of gpu, emulator \(got cuda\)"):
        launch_target.usual_sizes(registry.specs()["gemm_w4a8_sm90"], "cuda")
    assert "g" not in launch_target.usual_sizes(registry.specs()["gemm_w4a8_qoq_channel_sm80"])
    assert set(launch_target.usual_sizes(registry.specs()["attention_kv4_naive"])) == {"B", "L", "Hq", "Hkv"}
    with pytest.raises(ArgumentError, match=r"--shape: gemm_w4a8_sm90 takes M, N, K, g \(got L\)"):
        launch_target.entry_of(LaunchTarget("gemm_w4a8_sm90", {"L": 3}))
    with pytest.raises(ArgumentError, match="K % g == 0"):
        launch_target.entry_of(LaunchTarget("gemm_w4a8_sm90", {"K": 100}))
    with pytest.raises(ArgumentError, match=r"--shape: sizes of 1 or more \(got M=0\)"):
        launch_target.entry_of(LaunchTarget("gemm_w4a8_sm90", {"M": 0}))
    assert launch_target.sizes_of(registry.specs()["append_kv4"], {"R": 0})["R"] == 0, "no rotation"


@pytest.mark.parametrize("backend", ["gpu", "emulator"])
@pytest.mark.parametrize("name", registry.specs())
def test_usual_sizes_are_such_as_the_kernel_takes(name: str, backend: str) -> None:
    spec = registry.specs()[name]
    assert launch_target.sizes_of(spec, {}, backend) == launch_target.usual_sizes(spec, backend)


def test_weights_that_the_figures_are_per() -> None:
    gemm, attention = registry.specs()["gemm_w4a8_sm90"], registry.specs()["attention_kv4_sm90"]
    assert launch_target.weights_of(gemm, {"M": 5, "N": 3, "K": 7}) == 21
    assert launch_target.weights_of(registry.specs()["dequant_lqq"], {"R": 2, "K": 8, "g": 4}) == 16
    assert launch_target.weights_of(attention, {"B": 2, "L": 3, "Hq": 8, "Hkv": 4}) == 2 * 2 * 3 * 4 * 128
    assert launch_target.weights_of(attention, {"T": 5}) is launch_target.weights_of(gemm, {}) is None
    assert launch_target.weights_of(None, {"N": 3, "K": 7}) is None
