"""compute-sanitizer's verdicts: read from what it prints, here by a stand-in, on a GPU by the tool itself."""

import json
import subprocess
import sys
from typing import Any

import pytest

from ptxlab.cli import main
from ptxlab.errors import ArgumentError, UnavailableError, VerificationError
from ptxlab.profile.nsight import sanitizer

CLEAN = "========= COMPUTE-SANITIZER\nall kernels verified\n========= ERROR SUMMARY: 0 errors\n"
RACES = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at gemm_w4a8_qoq_sm80+0x210 in mma.cuh:25
=========     and Write access at gemm_w4a8_qoq_sm80+0x110 in mma.cuh:11 [64 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.fixture
def prints(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the tool print something, by its command line; returns the command lines."""
    lines: list[list[str]] = []

    def stand_in(text: Any, code: int = 0) -> list[list[str]]:
        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            lines.append(command)
            return subprocess.CompletedProcess(command, code, text(command) if callable(text) else text, "")

        monkeypatch.setattr(sanitizer.shutil, "which", lambda name: f"/opt/{name}")
        monkeypatch.setattr(sanitizer.subprocess, "run", run)
        return lines

    return stand_in


def test_clean_kernels_take_one_run_per_tool(prints: Any) -> None:
    lines = prints(CLEAN)
    (verdict,) = sanitizer.sanitize("memcheck", ["gemm_w4a8_qoq_sm80", "dequant_lqq"], "M=2,N=8")
    assert (verdict.problems, verdict.summary, verdict.first) == (0, "0 errors", "")
    assert len(lines) == 1 and lines[0][-2:] == ["--shape", "M=2,N=8"] and "gemm_w4a8_qoq_sm80" in lines[0]


def test_others_are_told_apart_with_their_first_report(prints: Any) -> None:
    lines = prints(lambda command: RACES if "gemm_w4a8_qoq_sm80" in command else CLEAN)
    verdicts = list(sanitizer.sanitize("racecheck", ["gemm_w4a8_qoq_sm80", "dequant_lqq"]))
    assert [(v.kernels, v.problems) for v in verdicts] == [(("gemm_w4a8_qoq_sm80",), 1), (("dequant_lqq",), 0)]
    assert verdicts[0].first.splitlines()[0].startswith("Error: Race reported") and len(lines) == 3
    assert verdicts[0].first.endswith("[64 hazards]")


def test_a_layer_is_looked_at_by_itself(prints: Any) -> None:
    lines = prints(CLEAN)
    verdicts = list(sanitizer.sanitize("synccheck", ["dequant_lqq", "layer", "load_bulk_sm90"], "R=2"))
    assert [v.kernels for v in verdicts] == [("dequant_lqq", "load_bulk_sm90"), ("layer",)]
    assert "layer" not in lines[0] and lines[1][-1] == "layer" and "registry" in lines[1][-2] and "R=2" not in lines[1]
    assert [v.kernels for v in sanitizer.sanitize("synccheck", ["layer"])] == [("layer",)]


@pytest.mark.parametrize(
    ("printed", "code", "error", "message"),
    [
        ("========= COMPUTE-SANITIZER\n========= Error: Device not supported\n", 1, UnavailableError, "not supported"),
        (CLEAN, 1, VerificationError, "gemm under memcheck"),
    ],
)
def test_what_is_no_verdict(prints: Any, printed: str, code: int, error: type[Exception], message: str) -> None:
    prints(printed, code)
    with pytest.raises(error, match=message):
        list(sanitizer.sanitize("memcheck", ["gemm"]))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: None)
    with pytest.raises(UnavailableError, match="compute-sanitizer: not on the PATH"):
        list(sanitizer.sanitize("memcheck", ["dequant_lqq"]))
    with pytest.raises(ArgumentError, match="tool: one of memcheck"):
        list(sanitizer.sanitize("valgrind", ["dequant_lqq"]))


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ptxlab", "sanitize", *words])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_the_command_takes_a_family_and_prints_a_table(
    prints: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = prints(CLEAN)
    assert command(monkeypatch, "gemm") == 0
    out = capsys.readouterr().out
    assert all(tool in out for tool in sanitizer.TOOLS) and out.count("0 errors") == 4 == len(lines)
    prints(RACES)
    assert command(monkeypatch, "gemm_w4a8_qoq_sm80", "--tool", "racecheck") == 1
    assert "Race reported between Read access" in capsys.readouterr().out
    assert command(monkeypatch, "gemm_w4a8_qoq_sm80", "--tool", "racecheck", "--json") == 1
    assert json.loads(capsys.readouterr().out)[0]["problems"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_a_kernel_is_clean_under_the_tool_itself(tool: str) -> None:
    try:
        (verdict,) = sanitizer.sanitize(tool, ["load_cp_async"])
    except UnavailableError as reason:
        pytest.skip(str(reason))
    assert verdict.problems == 0, verdict.first
