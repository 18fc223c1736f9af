"""The command `sass`: what the assembler made of kernels."""

from typing import Annotated

import typer

from ptxlab import kernels
from ptxlab import sass as sass_tools
from ptxlab.bench import counts
from ptxlab.cli.common import Arch, AsJson, console, print_json, progress_bar, table
from ptxlab.errors import ArgumentError


def sass(
    targets: Annotated[
        list[str] | None, typer.Argument(help="NAME, NAME.cu or FILE[:entry]; two are shown side by side.")
    ] = None,
    arch: Arch = "sm_90a",
    record: Annotated[bool, typer.Option(help="Renew the shipped counts of all kernels instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compile and count: instructions by opcode and pipe, registers, spills, ALU instructions per 8 weights."""
    if record:
        path = counts.save()
        return print_json(str(path)) if as_json else console.print(f"recorded in {path}")
    if not targets:
        raise ArgumentError("targets", "one or two kernels or files", "none")
    found = []
    with progress_bar("sass", len(targets), quiet=as_json) as advance:
        for target in targets:
            found.append(_report(target, arch))
            advance(target)
    if as_json:
        return print_json([r.to_json() for r in found] if len(found) > 1 else found[0].to_json())
    names = [r.name for r in found]
    facts = [
        ("ALU instructions per 8 weights", *("-" if r.alu_per_8 is None else f"{r.alu_per_8:g}" for r in found)),
        ("registers", *(r.registers for r in found)),
        ("spilled bytes", *(r.spill_stores + r.spill_loads for r in found)),
        ("warnings", *("; ".join(r.warnings) or "none" for r in found)),
    ]
    columns = [f"{n}>" for n in names]
    console.print(table(f"{arch}, {', '.join(found[0].tools)}", ("", *columns), facts))
    for title, columns_of in (
        ("Per 8 weights, by opcode", [r.opcodes_per_8 for r in found]),
        ("Whole kernel, by pipe", [r.pipes for r in found]),
        ("Whole kernel, by opcode", [r.opcodes for r in found]),
    ):
        keys = sorted({k for c in columns_of for k in c}, key=lambda k: (-max(c.get(k, 0) for c in columns_of), k))
        if keys:
            console.print(table(title, ("", *columns), [(k, *(f"{c.get(k, 0):g}" for c in columns_of)) for k in keys]))


def _report(target: str, arch: str) -> sass_tools.Report:
    _, source, entry = kernels.resolve(target)
    return sass_tools.report(source, arch, entry=entry)
