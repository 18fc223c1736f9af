"""The command `profile`: what one launch of a kernel does to the machine, on a page."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ptxlab import nsight, profiled, stalls
from ptxlab.cli.common import AsJson, console, print_json, progress_bar, table
from ptxlab.cli.run import _dims, _integers
from ptxlab.errors import ArgumentError
from ptxlab.files import write_whole
from ptxlab.nsight import Profile

SAVED = (".ncu-rep", ".json")  # what a profile can be read from, besides being made


def profile(
    target: Annotated[str | None, typer.Argument(help="NAME, NAME.cu, or FILE[:entry].")] = None,
    shape: Annotated[str | None, typer.Option(help="Sizes of the problem, M=64,N=4096,K=4096,g=128.")] = None,
    compare: Annotated[
        str | None, typer.Option(help="Beside it: another NAME or FILE, a saved .ncu-rep, a profile's .json.")
    ] = None,
    chosen: Annotated[str, typer.Option("--set", help="quick: the page's figures; full: all that ncu has.")] = "quick",
    saved: Annotated[Path | None, typer.Option("--from", help="A saved .ncu-rep (or .json) instead of a GPU.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Where to leave the .ncu-rep, for ncu-ui or --from.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to draw the page: .png, .svg or .pdf.")] = None,
    stalled: Annotated[
        bool, typer.Option("--stalls", help="Record what dequantisation costs in stalls (LiquidGEMM §3.2) instead.")
    ] = False,
    inputs: Annotated[Path | None, typer.Option("--in", help=".npz with the arguments by name; files only.")] = None,
    grid: Annotated[str | None, typer.Option(help="Blocks, x[,y[,z]]; for files only. Default 1.")] = None,
    block: Annotated[str | None, typer.Option(help="Threads, x[,y[,z]]; for files only. Default 32.")] = None,
    shared: Annotated[int | None, typer.Option(help="Dynamic shared memory in bytes; for files only.")] = None,
    arch: Annotated[str | None, typer.Option(help="What to compile a .cu for, sm_90a; files only.")] = None,
    define: Annotated[
        list[str] | None, typer.Option("-D", metavar="NAME[=N]", help="A constant of a .cu, -D TILE=64; -D X is 1.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Launch a kernel once, warmed up, under Nsight Compute, and put on a page what it did and what it waited for."""
