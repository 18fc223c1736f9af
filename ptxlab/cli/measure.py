"""Commands that measure: `sass`, `bench`, `report`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ptxlab import report as reports
from ptxlab import runtime
from ptxlab import sass as sass_tools
from ptxlab.cli.common import FAILED, Arch, AsJson, console, print_json, progress_bar, table


def sass(
    targets: Annotated[list[str], typer.Argument(help="NAME, NAME.cu or FILE[:entry]; two are shown side by side.")],
    arch: Arch = "sm_90a",
    as_json: AsJson = False,
) -> None:
    """Compile and count: instructions by opcode and pipe, registers, spills, ALU instructions per 8 weights."""
    found = [sass_tools.report(*_source_and_entry(target), arch) for target in targets]
    if as_json:
        return print_json([r.to_json() for r in found] if len(found) > 1 else found[0].to_json())
    names = [r.name for r in found]
    facts = [
        ("ALU instructions per 8 weights", *("-" if r.alu_per_8 is None else f"{r.alu_per_8:g}" for r in found)),
        ("registers", *(r.registers for r in found)),
        ("spilled bytes", *(r.spill_bytes for r in found)),
    ]
    console.print(table(f"{arch}, {found[0].tool}", ("", *(f"{n}>" for n in names)), facts))
    for title, counts in (("pipe", [r.pipes for r in found]), ("opcode", [r.opcodes for r in found])):
        keys = sorted({k for c in counts for k in c}, key=lambda k: (-max(c.get(k, 0) for c in counts), k))
        rows = [(k, *(c.get(k, 0) for c in counts)) for k in keys]
        console.print(table(f"Instructions of the whole kernel by {title}", (title, *(f"{n}>" for n in names)), rows))


def _source_and_entry(target: str) -> tuple:
    spec, source, entry = runtime.resolve(target)
    return source, spec.name if spec else runtime.load(source, entry).entry


def bench(
    suite: Annotated[str, typer.Argument(help="A suite (dequant), or one kernel of it.")],
    against: Annotated[Path | None, typer.Option(help="A record to compare with: fails if a row got slower.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the record; by default notebooks/results/<gpu>/.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time kernels against their floor on this machine's GPU, and record it."""
    from ptxlab import bench as benches

    with progress_bar(f"bench {suite}", None, quiet=as_json) as advance:
        record = benches.run_suite(suite, progress=advance)
    path = benches.save(record, out)
    slower = benches.compare(record, benches.load(against)) if against else []
    if as_json:
        print_json(record.to_json())
    else:
        console.print(benches.as_table(record), f"recorded in {escape(str(path))}")
        for line in slower:
            console.print(f"[red]slower[/] {escape(str(line))}")
    if slower:
        raise typer.Exit(FAILED)


def report(
    check: Annotated[bool, typer.Option(help="Change nothing; fail if something is out of date.")] = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild the README's tables and pictures from the specs and the recorded measurements."""
    changed = reports.update(write=not check)
    if as_json:
        print_json([str(path) for path in changed])
    else:
        console.print("\n".join(f"{'out of date' if check else 'updated'}: {path}" for path in changed) or "all up to date")
    if check and changed:
        raise typer.Exit(FAILED)
