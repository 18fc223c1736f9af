"""Real reports, read without a GPU: every instruction with its place, its samples and how often it was executed."""

import sys
from pathlib import Path

import pytest

from ptxlab.errors import FileError, UnavailableError
from ptxlab.profile import nsight
from ptxlab.profile.nsight import ProfiledLaunch
from tests.support.reports import FILE, GEMM


@pytest.fixture(scope="module")
def gemm() -> ProfiledLaunch:
    (launched,) = nsight.read(GEMM)
    return launched


def test_the_launch_and_its_metrics(gemm: ProfiledLaunch) -> None:
    assert gemm.kernel == "gemm_w4a8_qoq_sm90"
    assert gemm.names["device__attribute_display_name"] == "NVIDIA H200"
    assert all(gemm.number(metric) >= 0 for metric in nsight.METRICS)
    assert gemm.number("launch__block_size") == 128


def test_every_instruction_of_the_kernel_in_its_place(gemm: ProfiledLaunch) -> None:
    assert [one.offset for one in gemm.instructions] == list(range(0, 16 * len(gemm.instructions), 16))
    assert sum(one.executed for one in gemm.instructions) == gemm.number("smsp__inst_executed.sum")
    samples = sum(sum(one.samples.values()) for one in gemm.instructions)
    assert samples == gemm.number("smsp__pcsamp_sample_count") > 100
    assert 0 < sum(one.stalled for one in gemm.instructions) < samples


def test_source_lines_and_their_text(gemm: ProfiledLaunch) -> None:
    assert {"gemm_w4a8_qoq_sm90.cu", "dequant.cuh"} <= {one.file for one in gemm.instructions}
    wait = next(one for one in gemm.instructions if one.sass.startswith("WARPGROUP.DEPBAR"))
    assert "wgmma_wait<0>" in gemm.text_of(wait.file, wait.line)
    assert gemm.text_of(wait.file, 10**6) == gemm.text_of("elsewhere.cu", 1) == ""


def test_branches_go_to_offsets(gemm: ProfiledLaunch) -> None:
    branches = [one.sass.split()[-1] for one in gemm.instructions if "BRA" in one.sass.split()[:2]]
    assert branches and all(int(target, 16) < 16 * (len(gemm.instructions) + 64) for target in branches)


def test_a_kernel_without_a_line_table() -> None:
    (launched,) = nsight.read(FILE)
    assert launched.kernel == "add4" and launched.instructions
    assert {one.file for one in launched.instructions} == {""}


def test_a_metric_that_is_not_there_is_named(gemm: ProfiledLaunch) -> None:
    with pytest.raises(UnavailableError, match=r"does not know the metric no__such\.sum"):
        gemm.number("no__such.sum")


def test_what_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="not found"):
        nsight.read(tmp_path / "none.ncu-rep")
    (tmp_path / "a.ncu-rep").write_bytes(b"no report")
    with pytest.raises(FileError, match=r"a\.ncu-rep: not a report|holds no launch"):
        nsight.read(tmp_path / "a.ncu-rep")
    (tmp_path / "b.ncu-rep").write_bytes(GEMM.read_bytes()[:5000])
    with pytest.raises(FileError, match=r"b\.ncu-rep: not a report|holds no launch"):
        nsight.read(tmp_path / "b.ncu-rep")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    with pytest.raises(UnavailableError, match=r"ncu-report: not installed; python -m pip install 'ptxlab\[profile\]'"):
        nsight.read(GEMM)
