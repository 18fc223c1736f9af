"""The command `sanitize`: NVIDIA's compute-sanitizer over the kernels."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from ptxlab import registry
from ptxlab.cli.common import FAILED, AlsoShape, AsJson, console, expects, print_json, progress_bar, table
from ptxlab.profile.nsight import sanitizer

PANEL = "Run and check"


def sanitize(
    names: Annotated[list[str], typer.Argument(help="Kernels or families, and layer: a decoder layer.")],
    tool: Annotated[
        str, typer.Option(help="Comma-separated: memcheck, initcheck, synccheck, racecheck, or all.")
    ] = "all",
    shape: AlsoShape = None,
    as_json: AsJson = False,
) -> None:
    """Verify kernels on the GPU under NVIDIA's compute-sanitizer."""
    tools = sanitizer.TOOLS if tool == "all" else tuple(tool.split(","))
    if unknown_tools := [candidate for candidate in tools if candidate not in sanitizer.TOOLS]:
        raise expects("--tool", f"some of {', '.join(sanitizer.TOOLS)}, or all", unknown_tools[0])
    chains = registry.entries("chains")
    # None stands for a file without a spec, which is refused
    specs = [spec for name in names if name not in chains for spec, *_ in registry.resolve_all(name)]
    chosen = [spec.label for spec in specs if spec is not None]
    if len(chosen) < len(specs):
        raise expects("sanitize", "kernels or families", ", ".join(names))
    chosen += [name for name in chains if name in names]
    verdicts = list[sanitizer.SanitizerResult]()
    with progress_bar("sanitize", len(tools), quiet=as_json) as advance:
        for tool_name in tools:
            verdicts += sanitizer.sanitize(tool_name, chosen, shape)
            advance(tool_name)
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
