"""Nsight Compute's counters of one launch, by `ncu` in a process of its own."""

import csv
import io
import shutil
import subprocess
from collections.abc import Sequence

from ptxlab.errors import UnavailableError


def counters(command: Sequence[str], kernel: str, metrics: Sequence[str]) -> dict[str, float]:
    """Run a command under ncu and read metrics of the one launch of `kernel` in it.

    Args:
        command: what to run, such as `[sys.executable, "-m", "ptxlab", "run", ...]`.
        kernel: entry symbol; the command has to launch it once.
        metrics: ncu's names, `l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum`.

    Raises:
        UnavailableError: no ncu, no permission to count, or a metric that this ncu does not know.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise UnavailableError("ncu (Nsight Compute): not on the PATH; it comes with the CUDA toolkit")
    options = ["--clock-control", "none", "--csv", "--page", "raw", "--metrics", ",".join(metrics)]
    done = subprocess.run([ncu, *options, *command], capture_output=True, text=True)
    printed = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in printed:
        raise UnavailableError("ncu: no permission to read the GPU's counters (ERR_NVGPUCTRPERM)")
    table = [line for line in done.stdout.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(io.StringIO("\n".join(table))) if row["Kernel Name"].startswith(kernel)]
    if len(rows) != 1:
        raise UnavailableError(f"ncu: saw {len(rows)} launches of {kernel}: {printed.strip().splitlines()[-1:]}")
    if unknown := [metric for metric in metrics if not rows[0].get(metric)]:
        raise UnavailableError(f"ncu: does not know the metric {unknown[0]}")
    return {metric: float(rows[0][metric].replace(",", "")) for metric in metrics}
