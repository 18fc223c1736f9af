"""An ncu that says what a test wants, remembers how it was called, and writes the report that it is given."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from ptxlab.profile.nsight import ncu as module

STALLS = {"long_scoreboard": 2.5, "barrier": 1.5, "selected": 1.0, "not_selected": 0.3, "wait_not_issued": 0.1}


def raw_page_csv(names: Sequence[str], metrics: Sequence[str]) -> str:
    """Write the output of ncu with --csv --page raw.

    Other output comes first, then the header, a line of units, and a line per launch.
    """
    columns = ["ID", "Process ID", "Kernel Name", *metrics]
    columns += [f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio" for reason in STALLS]
    lines = [columns, ["", "", "", *("%" for _ in columns[3:])]]
    for number, name in enumerate(names):
        values = [f"1,{number:03}.5" for _ in metrics] + [str(average) for average in STALLS.values()]
        lines.append([str(number), "7", f"{name}(const uint4 *, int)", *values])
    return "==PROF== Connected\n" + "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines) + "\n"


@pytest.fixture
def ncu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace ncu: `output` is what it prints, `report` the file that it exports, `command` its last command line."""
    state = SimpleNamespace(output="", command=[], report=None)

    def run(command: list[str], **_: object) -> SimpleNamespace:
        if command[1:] == ["--version"]:
            return SimpleNamespace(stdout="Nsight Compute\nVersion 2025.3.1.0 (build 36398880) (public-release)\n")
        state.command = command
        if state.report is not None:
            shutil.copy(state.report, Path(command[command.index("--export") + 1]))
        return SimpleNamespace(stdout=state.output, stderr="")

    monkeypatch.setattr(module, "shutil", SimpleNamespace(which=lambda name: "/opt/ncu"))
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=run, CompletedProcess=subprocess.CompletedProcess))
    return state
