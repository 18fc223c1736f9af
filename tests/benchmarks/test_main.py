"""`python -m benchmarks`: which suites it has, and what it passes to them."""

import sys
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import peers
from ptxlab import bench
from tests.support.headline_record import record


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as exit_:
        command.main()
    return int(exit_.value.code or 0)


def test_a_library_that_is_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks.pytorch", None)
    assert run(["torch"], monkeypatch) == 2
    assert "torch: " in capsys.readouterr().err


@pytest.mark.default_cases("decode", "vllm")
@pytest.mark.parametrize("suite", ["decode", "layer", "prefill", "torch", "vllm"])
def test_its_own_suites(suite: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    if suite in ("prefill", "torch"):
        pytest.importorskip("transformers", reason="transformers is not installed: it comes with the extra `torch`")
    measured: list[tuple[Any, Any]] = []
    monkeypatch.setattr(bench, "run_suite", lambda suite, *_, **options: measured.append((suite, options)) or record())
    assert run([suite, "--out", str(tmp_path / "r.json")], monkeypatch) == 0
    ((chosen, options),) = measured
    assert chosen is command.find_suite(suite) and chosen.name == suite and "peers" not in options
    assert options["resume"] == tmp_path / "r.json" and options["libraries"] == peers.versions()


@pytest.mark.parametrize("suite", ["gemm", "attention"])
def test_suites_with_peers(suite: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    measured: list[tuple[Any, Any]] = []
    monkeypatch.setattr(bench, "run_suite", lambda suite, *_, **options: measured.append((suite, options)) or record())
    assert run([suite, "--out", str(tmp_path / "r.json")], monkeypatch) == 0
    ((chosen, options),) = measured
    assert chosen == suite and options["peers"] is peers.PUBLIC
    assert "peers" in bench.suite_of(suite)[0].takes


def test_another_suite_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dequant"], monkeypatch) == 2
    assert "suite: one of decode, layer, prefill, torch, vllm, gemm, attention (got dequant)" in " ".join(
        capsys.readouterr().err.split()
    )
