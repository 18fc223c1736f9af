"""The command `sass`: what the assembler made of kernels."""

import linecache
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ptxlab import emulator, mangled, registry, toolchain
from ptxlab import sass as machine_code
from ptxlab.cli.common import (
    Arch,
    AsJson,
    CommandLineError,
    Define,
    Include,
    Std,
    console,
    parse_dimensions,
    print_json,
    print_written,
    progress_bar,
    refuse,
    table,
)
from ptxlab.hardware.occupancy import Occupancy, occupancy
from ptxlab.runtime import with_build
from ptxlab.runtime.arguments import geometry, parse_defines
from ptxlab.sass import Report, SassInstruction
from ptxlab.sass.wgmma import describe_overwritten_operands
from ptxlab.sources import Source, names_same_file
from ptxlab.spec import KernelSpec
from ptxlab.toolchain.kernels import entry_symbols, find_kernel

PANEL = "Measure"

_SIDE_BY_SIDE = 2  # so many are compared by opcode; of more there is a row each


def sass(
    targets: Annotated[
        list[str] | None,
        typer.Argument(help="NAME, NAME.cu, NAME:FORM, FILE[:entry] or a family; two are compared side by side."),
    ] = None,
    arch: Arch = "sm_90a",
    define: Define = None,
    include: Include = None,
    std: Std = None,
    block: Annotated[
        str | None, typer.Option(help="Threads per block, x[,y[,z]]: show the occupancy too.", show_default=False)
    ] = None,
    shared: Annotated[
        int | None,
        typer.Option(help="Bytes of dynamic shared memory, of the occupancy. Default: 0.", show_default=False),
    ] = None,
    listing: Annotated[
        bool, typer.Option("--listing", help="Print the machine code, interleaved with the source lines.")
    ] = False,
    ptx: Annotated[
        bool, typer.Option("--ptx", help="With --listing, of a .cu: each source line, its PTX, its machine code.")
    ] = False,
    record: Annotated[bool, typer.Option("--record", help="Renew the recorded counts of all kernels instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compile and count: instructions by opcode and pipe, registers, spills, ALU instructions per 8 weights.

    With --block, the occupancy: how many blocks an SM holds at once, and what limits them.

    With --listing, the machine code below its source lines; with --ptx too, the PTX of each line.
    """
    if record:
        options = {
            "--listing": listing or None,
            "--ptx": ptx or None,
            "-D": define or None,
            "--block": block,
            "--shared": shared,
        }
        refuse(options, "cannot be combined with --record")
        paths = [path for _, write_records in registry.load_all("counts") for path in write_records()]
        return print_json([*map(str, paths)]) if as_json else print_written(*paths)
    if not targets:
        raise CommandLineError("sass expects kernels, families or files")
    if block is None:
        refuse({"--shared": shared}, "needs --block")
    if not listing:
        refuse({"--ptx": ptx or None}, "needs --listing")
    threads = prod(geometry(1, parse_dimensions("block", block)).block) if block is not None else 0

    def occupancy_of(report: Report) -> Occupancy:
        return occupancy(arch, threads, report.registers, report.shared + (shared or 0))

    macros = parse_defines("-D", define or [])
    named_kernels = [
        (sources[0].label + (spec.suffix if spec else ""), sources[0], entry, macros or _constants_of_form(spec))
        if spec
        else _file_kernel(with_build(sources[0], include or (), std), entry, arch, macros)
        for target in targets
        for spec, sources, entry in registry.resolve_all(target)
    ]
    if listing:
        texts = {}
        for label, source, entry, defines in named_kernels:
            texts[label] = [f"{source.label}, {arch}"]
            if threads:
                sm_occupancy = occupancy_of(machine_code.report(source, arch, entry=entry, defines=defines))
                texts[label].append(
                    f"An SM holds {sm_occupancy.blocks} blocks of {threads} threads at once, {sm_occupancy.warps} of"
                    f" at most {sm_occupancy.most_warps} warps, limited by {', '.join(sm_occupancy.limits)}"
                )
            show = group_by_line if ptx and source.language == "cu" else interleave
            texts[label] += show(source, arch, entry, defines)
        return print_json(texts) if as_json else print("\n\n".join("\n".join(lines) for lines in texts.values()))
    reports = []
    with progress_bar("sass", len(named_kernels), quiet=as_json) as advance:
        for label, source, entry, defines in named_kernels:
            report = machine_code.report(source, arch, entry=entry, defines=defines)
            code = machine_code.instructions(source, arch, entry=entry, defines=defines)
            reports.append(
                replace(report, name=label, warnings=(*report.warnings, *describe_overwritten_operands(code)))
            )
            advance(label)
    occupancies = [occupancy_of(report) for report in reports] if threads else []
    if as_json:
        rows = [report.to_json() for report in reports]
        for row, report_occupancy in zip(rows, occupancies, strict=False):
            row["occupancy"] = asdict(report_occupancy)
        return print_json(rows if len(rows) > 1 else rows[0])
    title = f"{arch}, {', '.join(dict.fromkeys(tool for report in reports for tool in report.tools))}"
    (_compare if len(reports) <= _SIDE_BY_SIDE else _summarise)(title, reports)
    if occupancies:
        columns = ("kernel", "blocks>", "warps>", "of at most>", "limited by")
        cells = [
            (
                report.name,
                report_occupancy.blocks,
                report_occupancy.warps,
                report_occupancy.most_warps,
                ", ".join(report_occupancy.limits),
            )
            for report, report_occupancy in zip(reports, occupancies, strict=True)
        ]
        console.print(table(f"An SM holds at once, in blocks of {threads} threads", columns, cells))


def _file_kernel(source: Source, entry: str | None, arch: str, defines: dict[str, Any]) -> tuple[str, Source, Any, Any]:
    """Return label, source, symbol and constants of a kernel of a file, found by its C++ name.

    The label is what names the kernel on the command line: `file.cu:ns::add<float, 3>`.
    """
    name = mangled.demangle(entry) if entry else None
    if source.language == "cu":
        source, entry = find_kernel(source, entry, arch, defines)
    elif entry is None and len(symbols := entry_symbols(source.text)) == 1:
        (entry,) = symbols
    if entry is None:  # `report` says which there are
        return source.label, source, entry, defines
    return f"{source.label}:{name or mangled.name_of(entry)}", source, entry, defines


def _constants_of_form(spec: KernelSpec | None) -> dict[str, int]:
    """Return the constants of a form, one of a kernel's several contracts, at its last example.

    Return none for other kernels, whose sources have their own.
    """
    return spec.config_for(spec.example_sizes[-1]) if spec and spec.form else {}


def _summarise(title: str, reports: Sequence[Report]) -> None:
    """Print a row per kernel."""
    columns = ["kernel", "ALU per 8 weights>", "registers>", "spilled bytes>", "lines of SASS>"]
    rows: list[list[Any]] = [
        [r.name, _alu(r), r.registers, _spilled_bytes(r), sum(r.opcodes.values())] for r in reports
    ]
    if not _any_dequantises(reports):
        for row in [columns, *rows]:
            del row[1]
    console.print(table(title, columns, rows))
    for report in reports:
        for warning in report.warnings:
            console.print(f"{report.name}: {escape(warning)}", soft_wrap=True, highlight=False)


def _compare(title: str, reports: Sequence[Report]) -> None:
    """Print a column per kernel."""
    columns = [f"{report.name}>" for report in reports]
    facts = [
        *([("ALU instructions per 8 weights", *map(_alu, reports))] if _any_dequantises(reports) else []),
        ("registers", *(report.registers for report in reports)),
        ("spilled bytes", *map(_spilled_bytes, reports)),
        ("warnings", *("; ".join(report.warnings) or "none" for report in reports)),
    ]
    console.print(table(title, ("", *columns), facts))
    for heading, counts_by_report in (
        ("Per 8 weights, by opcode", [report.opcodes_per_8 for report in reports]),
        ("Whole kernel, by pipe", [report.pipes for report in reports]),
        ("Whole kernel, by opcode", [report.opcodes for report in reports]),
    ):
        keys = sorted(
            {k for c in counts_by_report for k in c}, key=lambda k: (-max(c.get(k, 0) for c in counts_by_report), k)
        )
        if keys:
            console.print(
                table(heading, ("", *columns), [(k, *(f"{c.get(k, 0):g}" for c in counts_by_report)) for k in keys])
            )


def _any_dequantises(reports: Sequence[Report]) -> bool:
    return any(report.alu_per_8 is not None for report in reports)


def _alu(report: Report) -> str:
    return "-" if report.alu_per_8 is None else f"{report.alu_per_8:g}"


def _spilled_bytes(report: Report) -> int:
    return report.spill_stores + report.spill_loads


def interleave(source: Source, arch: str, entry: str | None, defines: toolchain.Defines) -> Iterator[str]:
    """Yield the machine code of one entry in the order of addresses.

    Each run of instructions lies below its source line.
    """
    code = machine_code.instructions(source, arch, entry=entry, defines=defines)
    for place, run in groupby(code, lambda instruction: _place(source, instruction)):
        yield _headline(source, place)
        yield from map(_format_instruction, run)


def group_by_line(source: Source, arch: str, entry: str | None, defines: toolchain.Defines) -> Iterator[str]:
    """Yield the source lines of one entry of a `.cu`, each followed by its PTX and then by its machine code."""
    ptx = toolchain.compile_cuda(source, arch, output="ptx", defines=defines).data.decode()
    lines: dict[tuple[str, int], tuple[list[str], list[str]]] = {}
    for instruction in emulator.parse(ptx, source.path, source.path).entries[str(entry)].instructions:
        lines.setdefault((instruction.path, instruction.line), ([], []))[0].append(f"    {instruction.text} ;")
    for sass_instruction in machine_code.instructions(source, arch, entry=entry, defines=defines):
        lines.setdefault(_place(source, sass_instruction), ([], []))[1].append(_format_instruction(sass_instruction))
    for place, (ptx_instructions, sass_instructions) in lines.items():
        yield from (_headline(source, place), *ptx_instructions, *sass_instructions)


def _place(source: Source, instruction: SassInstruction) -> tuple[str, int]:
    is_of_source = source.language == "ptx" or names_same_file(instruction.path, source.path)
    return (source.path if is_of_source else instruction.path, instruction.line)


def _headline(source: Source, place: tuple[str, int]) -> str:
    """Return a place with its source line."""
    return f"{Path(place[0]).name}:{place[1]}  {_source_line(source, *place)}".rstrip()


def _source_line(source: Source, path: str, line: int) -> str:
    if path == source.path:
        lines = source.text.splitlines()
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return linecache.getline(path, line).strip()


def _format_instruction(instruction: SassInstruction) -> str:
    text = " ".join(filter(None, (instruction.guard, instruction.name, ", ".join(instruction.operands))))
    return f"    /*{instruction.address:04x}*/ {text} ;"
