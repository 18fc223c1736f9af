"""The command `sanitize`: NVIDIA's compute-sanitizer over the kernels."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from ptxlab import kernels
from ptxlab.cli.common import FAILED, AsJson, console, print_json, progress_bar, table
from ptxlab.nsight import sanitizer


def sanitize(
    names: Annotated[list[str], typer.Argument(help="Kernels, or the name of a family: dequant, load, gemm.")],
    tool: Annotated[list[str] | None, typer.Option(help="memcheck, initcheck, synccheck, racecheck; or all.")] = None,
    sizes: Annotated[str | None, typer.Option(help="Sizes beside the examples', M=136,N=1040,K=2048,g=128.")] = None,
    as_json: AsJson = False,
) -> None:
    """Verify kernels on the GPU under compute-sanitizer."""
    chosen = [n for name in names for n in [k for k, s in kernels.specs().items() if s.family == name] or [name]]
    for name in chosen:
        kernels.find(name)
    tools, verdicts = tool or sanitizer.TOOLS, list[sanitizer.Verdict]()
    with progress_bar("sanitize", len(tools), quiet=as_json) as advance:
        for each in tools:
            verdicts += sanitizer.sanitize(each, chosen, sizes)
            advance(each)
    if as_json:
        print_json([asdict(v) for v in verdicts])
    else:
        cells = [
            (
                v.tool,
                v.kernels[0] if len(v.kernels) == 1 else f"{len(v.kernels)} kernels",
                v.summary,
                f"{v.seconds:.0f} s",
            )
            for v in verdicts
        ]
        console.print(table("compute-sanitizer", ("tool", "on", "found", "took>"), cells))
        for v in verdicts:
            if v.first:
                console.print(f"{v.tool}, {', '.join(v.kernels)}, first report:\n{escape(v.first)}", highlight=False)
    if any(v.problems for v in verdicts):
        raise typer.Exit(FAILED)
