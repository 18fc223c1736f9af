"""ncu over a command, in a process of its own: counters of launches as numbers, or a report to be taken apart later.

The numbers need nothing but ncu; a report (`nsight.report`) also needs the package ncu-report.
"""

import csv
import io
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ptxlab.errors import ArgumentError, UnavailableError

SETS = ("quick", "full")
INSTALL = "it comes with the CUDA toolkit"
FAILED = "ptxlab cannot launch it: "  # what a profiled process prints before the reason

_SAMPLING = "2"  # warps are sampled every 2^(5 + this) clocks: ncu's own choice is too rare for microseconds
_UNKNOWN = re.compile(r"(?:[Ff]ailed to find metrics?|[Uu]nknown metrics?)[^\w]*((?:regex:)?[\w.:]+)")
_MAY_NOT = "as root, or with the option NVreg_RestrictProfilingToAdminUsers=0 of the kernel module nvidia, it may"


def counters(command: Sequence[str], kernel: str, metrics: Sequence[str]) -> dict[str, float]:
    """Run a command under ncu and return the numbers of its only launch of `kernel`, as `launches` does."""
    return launches(command, [kernel], metrics)[0]


def launches(
    command: Sequence[str], kernels: Sequence[str], metrics: Sequence[str], sections: Sequence[str] = ()
) -> list[dict[str, float]]:
    """Run a command under ncu and return the numeric columns of each launch of these kernels.

    Args:
        command: what to run, such as `[sys.executable, "-m", "ptxlab", "run", ...]`.
        kernels: entry symbols in the order of their launches; a kernel that is launched twice stands there twice.
        metrics: ncu's names, `l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum`; all will be there.
        sections: of ncu, whose metrics are read too.

    Raises:
        UnavailableError: no ncu, no permission to count, other launches than those, or a metric that ncu does not know.
    """
    options = ["--csv", "--page", "raw", "--print-units", "base", *_selection_options(kernels, metrics, sections)]
    process = _ncu(options, command)
    rows = parse_launches(process.stdout)
    names = [row["Kernel Name"].partition("(")[0] for row in rows]
    if names != list(kernels):
        raise _other_launches(names, process)
    if unknown_metrics := [metric for metric in metrics if any(not row.get(metric) for row in rows)]:
        raise unknown_metric(unknown_metrics[0])
    return [parse_numbers(row) for row in rows]


def marked_launches(command: Sequence[str], metrics: Sequence[str]) -> list[tuple[str, dict[str, float]]]:
    """Run a command under ncu and return metrics of every launch, by any library, inside `gpu.profiling()`.

    Returns name and numbers of each, in order. Raises UnavailableError: no ncu, no permission to count, no launch, or a
    metric that ncu does not know.
    """
    options = ["--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
    process = _ncu([*options, "--metrics", ",".join(metrics)], command)
    rows = parse_launches(process.stdout)
    if not rows:
        raise _other_launches([], process)
    if unknown_metrics := [metric for metric in metrics if any(not row.get(metric) for row in rows)]:
        raise unknown_metric(unknown_metrics[0])
    return [(row["Kernel Name"].partition("(")[0], parse_numbers(row)) for row in rows]


def collect(
    command: Sequence[str], kernels: Sequence[str], metrics: Sequence[str], out: Path, *, metric_set: str = "quick"
) -> None:
    """Run a command under ncu and write a report of the launches inside its `gpu.profiling()`.

    Caches are emptied before every pass, and the sources that the line tables name go into the report.

    Args:
        command: what to run; it warms up by itself.
        kernels: entry symbols.
        metrics: ncu's names.
        out: the `.ncu-rep` to write.
        metric_set: `quick` for these metrics and the samples of stalled warps; `full` for all that ncu has besides.

    Raises:
        ArgumentError: no such set.
        UnavailableError: no ncu, no permission to count, no launch, or a metric that ncu does not know.
    """
    if metric_set not in SETS:
        raise ArgumentError("--set", f"one of {', '.join(SETS)}", metric_set)
    sections = ["SourceCounters", "LaunchStats", "Occupancy"] if metric_set == "quick" else []
    options = ["--profile-from-start", "off", "--import-source", "yes", "--force-overwrite", "--export", str(out)]
    options += ["--warp-sampling-interval", _SAMPLING, *(["--set", "full"] if metric_set == "full" else [])]
    process = _ncu([*options, *_selection_options(kernels, metrics, sections)], command)
    if not out.is_file():
        raise _other_launches([], process)


def unknown_metric(name: str) -> UnavailableError:
    """Return the error that names an unknown metric."""
    return UnavailableError(f"ncu: does not know the metric {name}")


def version() -> str:
    """Return the version of the ncu on the PATH, `2025.3.1.0`; empty if there is none."""
    ncu = shutil.which("ncu")
    version_text = subprocess.run([ncu, "--version"], capture_output=True, text=True).stdout if ncu else ""
    match = re.search(r"Version (\S+)", version_text)
    return match[1] if match else ""


def _selection_options(kernels: Sequence[str], metrics: Sequence[str], sections: Sequence[str]) -> list[str]:
    options = ["--kernel-name", f"regex:^({'|'.join(sorted(set(kernels)))})$", "--metrics", ",".join(metrics)]
    return options + [option for section in sections for option in ("--section", section)]


def _ncu(options: Sequence[str], command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run ncu. Raise UnavailableError for the problems that it reports."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise UnavailableError(f"ncu (Nsight Compute): not on the PATH; {INSTALL}")
    process = subprocess.run([ncu, "--clock-control", "none", *options, *command], capture_output=True, text=True)
    output_text = process.stdout + process.stderr
    if "ERR_NVGPUCTRPERM" in output_text:
        raise UnavailableError(f"ncu: no permission to read the GPU's counters (ERR_NVGPUCTRPERM); {_MAY_NOT}")
    if unknown := _UNKNOWN.search(output_text):
        raise unknown_metric(unknown[1])
    if reason := re.search(rf"^{FAILED}(.*)$", output_text, re.MULTILINE):
        raise UnavailableError(reason[1])
    return process


def _other_launches(names: Sequence[str], process: subprocess.CompletedProcess[str]) -> UnavailableError:
    """Return the error for launches other than those that were asked for.

    It has ncu's first error, then the last line that the command printed.
    """
    lines = (process.stdout + process.stderr).strip().splitlines()
    error_lines = [line for line in lines if line.startswith("==ERROR==")][:1]
    last_line = [line for line in lines if line.strip() and not line.startswith(("==", '"'))][-1:]
    return UnavailableError(
        f"ncu: saw launches of {', '.join(names) or 'nothing'}: {' '.join([*error_lines, *last_line])}"
    )


def parse_launches(printed: str) -> list[dict[str, str]]:
    """Parse the launches in ncu's CSV, by column; its second line has units and no launch."""
    table = [line for line in printed.splitlines() if line.startswith('"')]
    return [row for row in csv.DictReader(io.StringIO("\n".join(table))) if row["ID"]]


def parse_numbers(row: dict[str, str]) -> dict[str, float]:
    """Return the columns that hold a number."""
    numbers_by_column = {}
    for name, cell in row.items():
        try:
            numbers_by_column[name] = float(str(cell).replace(",", ""))
        except ValueError:
            continue
    return numbers_by_column
