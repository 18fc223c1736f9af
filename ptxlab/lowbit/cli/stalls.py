"""The command `stalls`: what dequantisation costs in stalls (LiquidGEMM §3.2)."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ptxlab.cli.common import AsJson, console, print_json, print_written, progress_bar, require_file, table
from ptxlab.lowbit.bench import stalls as measurements

PANEL = "Measure"


def stalls(
    out: Annotated[
        Path | None, typer.Option(help="Write the record: FILE.json. Default: notebooks/results/<gpu>/stalls.json.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep ncu's report: FILE.ncu-rep.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure which share of the GEMM kernels' stalls is dequantisation (LiquidGEMM §3.2), and record it."""
    require_file("--out", out, ".json")
    require_file("--keep", keep, ".ncu-rep")
    with progress_bar("stalls", None, quiet=as_json) as advance:
        advance(f"{len(measurements.KERNELS)} kernels on the FFN of LLaMA-2-7B")
        record = measurements.measure(keep)
    path = measurements.save(record, out)
    if as_json:
        return print_json([asdict(row) for row in record.rows])
    head, *rows = measurements.table(record.rows)
    console.print(table("Share of all stalls: subtraction, of all dequantisation", head, rows))
    print_written(path, keep)
