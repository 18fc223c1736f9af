"""Launches of this machine's GPU under its own ncu, which has to be allowed to count."""

import re
import runpy
from pathlib import Path

import pytest

from ptxlab import gpu, registry, sass, toolchain
from ptxlab.arithmetic import ceil_div
from ptxlab.errors import UnavailableError
from ptxlab.lowbit.bench.gemm.problem import variant
from ptxlab.profile import launch_target, nsight, profiles
from ptxlab.profile.launch_target import LaunchTarget
from ptxlab.profile.nsight import ProfiledLaunch
from ptxlab.sass.mainloop import main_loop
from ptxlab.spec import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.timing]  # counters of the device, which count others' launches too

OUTSIDE = Path(__file__).parents[2] / "outside"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchTarget:
    """Return a kernel without a spec, by the name of its file, on 64 threads."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(OUTSIDE / "inputs.py"))
    return LaunchTarget(
        str(OUTSIDE / "carrying_multiply.cu"), inputs=str(tmp_path / "carrying_multiply.npz"), block=(64,)
    )


def launch_or_skip(jobs: list[LaunchTarget], metrics: tuple[str, ...]) -> list[ProfiledLaunch]:
    try:
        return profiles.launch(jobs, metrics)
    except UnavailableError as reason:
        if re.search("no permission|not on the PATH|not installed", str(reason)):
            pytest.skip(str(reason))
        raise


def in_main_loop(spec: KernelSpec, sizes: dict[str, int]) -> float:
    """Count the instructions of a thread per weight in the main loops of all tiles of tokens.

    The count is from the machine code.
    """
    if missing := {"nvrtc", "ptxas", "nvdisasm"} & set(toolchain.missing()):
        pytest.skip(f"{', '.join(sorted(missing))}: not installed")
    config = variant(spec, sizes)
    image = toolchain.build(registry.find(spec.name)[1][0], gpu.device_info().arch, defines=config)
    loop = main_loop(sass.parse(toolchain.disassemble(image))[spec.name])
    assert loop is not None
    return loop.per_weight * ceil_div(sizes["M"], config["BM"])


def test_kernels_with_and_without_a_spec(file: LaunchTarget) -> None:
    """Beside what every iteration of the main loop executes are loads, waits and the epilogue: less than as much again.

    On an H200 1.55 times the main loop's instructions were executed at the job's 64 tokens, and 1.64 times at 256.
    """
    job = LaunchTarget("gemm_w4a8_sm90")
    gemm, outside = launch_or_skip([job, file], nsight.METRICS)
    assert gemm.kernel == "gemm_w4a8_sm90" and outside.kernel == "dequantize"
    sizes = launch_target.sizes_of(job.spec, job.sizes)
    page = nsight.profile_of(gemm, weights=launch_target.weights_of(job.spec, sizes))
    assert set(page.figures) == {figure.name for figure in nsight.FIGURES} and page.carriers and page.device
    assert 1 < page.figures["per_weight"] / in_main_loop(job.spec, sizes) < 2 and page.figures["sm_mhz"] > 500
    assert outside.number("launch__block_size") == 64
    assert sum(one.executed for one in outside.instructions) == outside.number("smsp__inst_executed.sum")


def test_a_metric_that_this_ncu_does_not_know_is_named(file: LaunchTarget) -> None:
    with pytest.raises(UnavailableError, match=r"does not know the metric no__such_metric\.sum"):
        launch_or_skip([file], ("gpu__time_duration.sum", "no__such_metric.sum"))[0].number("no__such_metric.sum")
