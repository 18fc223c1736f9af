"""How ncu is called, and what becomes of what it complains of."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.profile import nsight
from ptxlab.profile.nsight import ncu as module
from tests.support.fake_ncu import ncu, raw_page_csv
from tests.support.reports import GEMM

__all__ = ["ncu"]


def test_counters_of_one_launch(ncu: SimpleNamespace) -> None:
    ncu.output = raw_page_csv(["k"], ["a.sum", "b.sum"])
    numbers = nsight.counters(["python", "-c", "0"], "k", ["a.sum", "b.sum"])
    assert numbers["a.sum"] == numbers["b.sum"] == 1000.5
    assert ncu.command[-3:] == ["python", "-c", "0"]
    assert ncu.command[ncu.command.index("--kernel-name") + 1] == "regex:^(k)$"
    assert ncu.command[ncu.command.index("--metrics") + 1] == "a.sum,b.sum"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM", "no permission to read the GPU's counters .*; as root"),
        ("==ERROR== it broke", "saw launches of nothing: ==ERROR== it broke$"),
        (
            "Traceback:\nNo module named 'k'\n\n==ERROR== error code (1).",
            r": ==ERROR== error code \(1\). No module named 'k'$",
        ),
        (raw_page_csv(["k", "k"], ["a.sum"]), "saw launches of k, k"),
        (raw_page_csv(["k"], ["b.sum"]), "does not know the metric a.sum"),
        ("==ERROR== Failed to find metric a.sum", "does not know the metric a.sum$"),
        (f"{nsight.FAILED}k: shape (got 3)\n==WARNING== none", r"^k: shape \(got 3\)$"),
    ],
)
def test_what_ncu_cannot(output: str, message: str, ncu: SimpleNamespace, tmp_path: Path) -> None:
    ncu.output = output
    with pytest.raises(UnavailableError, match=message):
        nsight.counters(["python"], "k", ["a.sum"])
    if "ID" not in output:  # no table of counters, hence the same for a report
        with pytest.raises(UnavailableError, match=message):
            nsight.collect(["python"], ["k"], ["a.sum"], tmp_path / "k.ncu-rep")


def test_a_report_is_of_the_stretch_that_is_profiled(ncu: SimpleNamespace, tmp_path: Path) -> None:
    ncu.report = GEMM
    nsight.collect(["python", "-c", "0"], ["k", "j"], ["a.sum"], tmp_path / "k.ncu-rep")
    assert (tmp_path / "k.ncu-rep").read_bytes() == GEMM.read_bytes()
    options = dict(zip(ncu.command, ncu.command[1:], strict=False))
    assert options["--clock-control"] == "none" and options["--profile-from-start"] == "off"
    assert options["--kernel-name"] == "regex:^(j|k)$" and "--set" not in options
    assert ncu.command.count("--section") == 3
    nsight.collect(["python", "-c", "0"], ["k"], ["a.sum"], tmp_path / "k.ncu-rep", metric_set="full")
    assert ncu.command[ncu.command.index("--set") + 1] == "full" and "--section" not in ncu.command


def test_only_two_sets_are_known(ncu: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"--set: one of quick, full \(got all\)"):
        nsight.collect(["python"], ["k"], ["a.sum"], tmp_path / "k.ncu-rep", metric_set="all")


def test_without_ncu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "shutil", SimpleNamespace(which=lambda name: None))
    with pytest.raises(UnavailableError, match=r"ncu \(Nsight Compute\): not on the PATH; it comes with"):
        nsight.collect(["python"], ["k"], ["a.sum"], tmp_path / "k.ncu-rep")
    assert nsight.version() == ""


def test_the_version_of_ncu(ncu: SimpleNamespace) -> None:
    assert nsight.version() == "2025.3.1.0"
