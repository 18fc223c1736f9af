"""The command `bench`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ptxlab.cli.common import FAILED, AsJson, console, print_json, progress_bar, table, written


def bench(
    suite: Annotated[
        str, typer.Argument(help="dequant, load, gemm, attention, layer, decode, torch, emulator, a kernel, FILE.py.")
    ],
    against: Annotated[Path | None, typer.Option(help="Compare with a record; fail if a row got slower.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the record; default: notebooks/results/<gpu>/, here for FILE.py or no checkout."
        ),
    ] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Plot the record (.png, .svg, .pdf).")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the suite gemm: w4a4, 7B, 70B. Of layer and decode: a model, B=16, a mix (fp8_row ...), alone (no "
            "mix); fused, timeline, d64, epilogues."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time kernels against their floor on this machine's GPU (the suite emulator: on its CPU), and record it."""
    from ptxlab import bench as benches
    from ptxlab import plot

    benches.require_writable(suite, out)  # whatever is wrong with a file is found before anything is measured
    if picture is not None:
        plot.require_writable(picture)
    if suite == "torch":  # a room above `bench`
        from ptxlab.llm import torch

        benches.SUITES[suite] = torch.bench.rows
    before = benches.load(against) if against else None
    with progress_bar(f"bench {suite}", None, quiet=as_json) as advance:
        resume = (out or benches.resumed_path(suite, only or ())) if suite in benches.RESUMED else None
        record = benches.run_suite(suite, progress=advance, only=only or (), resume=resume)
        slower = benches.confirmed(benches.compare(record, before), before, advance) if before else []
    path = benches.save(record, out)
    if picture is not None:
        from ptxlab.bench.plot import record_figure

        plot.save(record_figure(record), picture)
    if as_json:
        print_json(record.to_json())
    else:
        console.print(f"[bold]{escape(benches.title(record))}[/]", highlight=False)
        for title, columns, rows in benches.as_tables(record):
            console.print(table(title, columns, rows))
        written(path, picture)
        for line in slower:
            console.print(f"[red]slower[/] {escape(str(line))}")
    if slower:
        raise typer.Exit(FAILED)
