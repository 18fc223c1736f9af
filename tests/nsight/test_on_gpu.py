"""Launches of this machine's GPU under its own ncu, which has to be allowed to count."""

import re
import runpy
from pathlib import Path

import pytest

from ptxlab import nsight, profiles
from ptxlab.errors import UnavailableError
from ptxlab.nsight import Launched
from ptxlab.subject import Job

pytestmark = pytest.mark.gpu

OUTSIDE = Path(__file__).parent.parent / "outside"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A kernel without a spec, by the name of its file, on 64 threads."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(OUTSIDE / "inputs.py"))
    return Job(str(OUTSIDE / "carrying_multiply.cu"), inputs=str(tmp_path / "carrying_multiply.npz"), block=(64,))


def launched(jobs: list[Job], metrics: tuple[str, ...]) -> list[Launched]:
    try:
        return profiles.launch(jobs, metrics)
    except UnavailableError as reason:
        if re.search("no permission|not on the PATH|not installed", str(reason)):
            pytest.skip(str(reason))
        raise


def test_kernels_with_and_without_a_spec(file: Job) -> None:
    gemm, outside = launched([Job("gemm_w4a8_sm90"), file], nsight.METRICS)
    assert gemm.kernel == "gemm_w4a8_sm90" and outside.kernel == "dequantize"
    page = nsight.profile_of(gemm, weights=4096 * 4096)
    assert set(page.figures) == {figure.name for figure in nsight.FIGURES} and page.carriers and page.device
    assert 1 < page.figures["per_weight"] < 10 and page.figures["sm_mhz"] > 500
    assert outside.number("launch__block_size") == 64
    assert sum(one.executed for one in outside.instructions) == outside.number("smsp__inst_executed.sum")


def test_a_metric_that_this_ncu_does_not_know_is_named(file: Job) -> None:
    with pytest.raises(UnavailableError, match=r"does not know the metric no__such_metric\.sum"):
        launched([file], ("gpu__time_duration.sum", "no__such_metric.sum"))[0].number("no__such_metric.sum")
