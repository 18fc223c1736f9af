"""Commands that measure: `sass`, `bench`, and NVIDIA's tools over the kernels: `sanitize`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ptxlab import kernels
from ptxlab import sass as sass_tools
from ptxlab.bench import counts
from ptxlab.cli.common import FAILED, Arch, AsJson, console, print_json, progress_bar, table
from ptxlab.errors import ArgumentError
from ptxlab.nsight import sanitizer
from ptxlab.runtime.arguments import parse_sizes


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


def _report(target: str, arch: str) -> sass_tools.Report:
    _, source, entry = kernels.resolve(target)
    return sass_tools.report(source, arch, entry=entry)


def bench(
    suite: Annotated[str, typer.Argument(help="dequant, load, gemm, attention, emulator, or one kernel.")],
    against: Annotated[Path | None, typer.Option(help="Compare with a record; fail if a row got slower.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write the record; default: notebooks/results/<gpu>/, without a checkout here."),
    ] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Plot the record (.png, .svg, .pdf).")] = None,
    as_json: AsJson = False,
) -> None:
    """Time kernels against their floor on this machine's GPU (the suite emulator: on its CPU), and record it."""
    from ptxlab import bench as benches
    from ptxlab import plot

    benches.require_writable(out)  # whatever is wrong with a file is found before anything is measured
    if picture is not None:
        plot.require_writable(picture)
    before = benches.load(against) if against else None
    with progress_bar(f"bench {suite}", None, quiet=as_json) as advance:
        record = benches.run_suite(suite, progress=advance)
        slower = benches.confirmed(benches.compare(record, before), before, advance) if before else []
    written = [benches.save(record, out)]
    if picture is not None:
        from ptxlab.bench.plot import record_figure

        plot.save(record_figure(record), picture)
        written.append(picture)
    if as_json:
        print_json(record.to_json())
    else:
        console.print(f"[bold]{escape(benches.title(record))}[/]", highlight=False)
        for title, columns, rows in benches.as_tables(record):
            console.print(table(title, columns, rows))
        for path in written:
            console.print(f"written: {escape(str(path))}", soft_wrap=True)
        for line in slower:
            console.print(f"[red]slower[/] {escape(str(line))}")
    if slower:
        raise typer.Exit(FAILED)


def sweep(
    target: Annotated[str, typer.Argument(help="A kernel of a W4A8 GEMM or of attention.")],
    define: Annotated[list[str], typer.Option("-D", help="A constant and its values: -D STAGES=4,6,8; repeatable.")],
    shape: Annotated[str | None, typer.Option(help="Of the problem, as `profile` takes it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time every combination of a kernel's constants on this machine's GPU, beside what the spec chooses."""
    from ptxlab.bench import sweep as sweeps
    from ptxlab.profile import launch_target

    spec, _ = kernels.find(target)
    sizes = launch_target.sizes_of(spec, parse_sizes("--shape", shape) if shape else {})
    constants = _constants(define)
    with progress_bar(f"sweep {target}", None, quiet=as_json) as advance:
        found = sweeps.sweep(spec, sizes, constants, advance)
    if as_json:
        return print_json([asdict(one) for one in found])
    title = f"{spec.name} at {', '.join(f'{name}={size}' for name, size in sizes.items())}"
    columns = [*(f"{name}>" for name in constants), "µs>", "speed>", "registers>", "local bytes>", ""]
    console.print(table(title, columns, sweeps.lines(found)))


def _constants(define: list[str]) -> dict[str, list[int]]:
    """The values of every constant, `STAGES=4,6,8`."""
    found: dict[str, list[int]] = {}
    for text in define:
        name, _, values = text.partition("=")
        if name in found:
            raise ArgumentError("-D", "each name once", name)
        try:
            found[name] = [int(value) for value in values.split(",")]
        except ValueError:
            raise ArgumentError("-D", "NAME=INTEGER[,INTEGER..]", text) from None
    return found
