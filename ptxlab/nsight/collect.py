"""Nsight Compute's counters of launches, by `ncu` in a process of its own."""

import csv
import io
import shutil
import subprocess
from collections.abc import Sequence

from ptxlab.errors import UnavailableError


def counters(command: Sequence[str], kernel: str, metrics: Sequence[str]) -> dict[str, float]:
    """Run a command under ncu and read metrics of the one launch of `kernel` in it: `launches` for one."""
    return launches(command, [kernel], metrics)[0]


def launches(
    command: Sequence[str], kernels: Sequence[str], metrics: Sequence[str], sections: Sequence[str] = ()
) -> list[dict[str, float]]:
    """Run a command under ncu and read every number that it gives of each launch of these kernels.

    Args:
        command: what to run, such as `[sys.executable, "-m", "ptxlab", "run", ...]`.
        kernels: entry symbols in the order of their launches; a kernel that is launched twice stands there twice.
        metrics: ncu's names, `l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum`; all will be there.
        sections: of ncu, whose metrics are read too.

    Raises:
        UnavailableError: no ncu, no permission to count, other launches than those, or a metric that ncu does not know.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise UnavailableError("ncu (Nsight Compute): not on the PATH; it comes with the CUDA toolkit")
    options = ["--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    options += ["--kernel-name", f"regex:^({'|'.join(sorted(set(kernels)))})$", "--metrics", ",".join(metrics)]
    options += [option for section in sections for option in ("--section", section)]
    done = subprocess.run([ncu, *options, *command], capture_output=True, text=True)
    printed = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in printed:
        raise UnavailableError("ncu: no permission to read the GPU's counters (ERR_NVGPUCTRPERM)")
    rows = launched(done.stdout)
    names = [row["Kernel Name"].partition("(")[0] for row in rows]
    if names != list(kernels):
        raise UnavailableError(
            f"ncu: saw launches of {', '.join(names) or 'nothing'}: {printed.strip().splitlines()[-1:]}"
        )
    if unknown := [metric for metric in metrics if any(not row.get(metric) for row in rows)]:
        raise UnavailableError(f"ncu: does not know the metric {unknown[0]}")
    return [numbers(row) for row in rows]


def launched(printed: str) -> list[dict[str, str]]:
    """The launches in ncu's CSV, by column; its second line has units and no launch."""
    table = [line for line in printed.splitlines() if line.startswith('"')]
    return [row for row in csv.DictReader(io.StringIO("\n".join(table))) if row["ID"]]


def numbers(row: dict[str, str]) -> dict[str, float]:
    """The columns that hold a number."""
    found = {}
    for name, value in row.items():
        try:
            found[name] = float(str(value).replace(",", ""))
        except ValueError:
            continue
    return found
