"""A cell of PTX or CUDA C++: its kernels, what the assembler made of them, and what changed since the last time."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ptxlab import emulator, gpu, sass, toolchain
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.jupyter.page import place, remember
from ptxlab.runtime import Kernel, load
from ptxlab.runtime.verify import Verdict
from ptxlab.sources import Language, Source, names_same_file
from ptxlab.toolchain import kernels as cuda_kernels
from ptxlab.toolchain import nvrtc

Reports = Mapping[str, sass.Report]
Listing = Mapping[tuple[str, int], list[sass.SassInstruction]]
_LINE = re.compile(r"\bline (\d+)")
_ARCH = "sm_90a"  # where there is no GPU: that of an H100


@dataclass(frozen=True)
class Cell:
    """Kernels of a cell and the assembler's reports on them; in a notebook it shows itself as a page.

    Attributes:
        source: the text. Its first line is empty and stands for the magic's, so that lines count as in the cell.
        kernels: by entry symbol.
        reports: what the assembler made of them; empty if there is none here, `note` says what to install.
        earlier: reports of the kernels of the same names that the cell replaces.
        remarks: the assembler's warnings, and the lines that they are about.
        verdicts: of the verification, if one was asked for.
        listing: machine code by (path, line), if it was asked for: of the source, and of headers that it includes.
    """

    source: Source
    kernels: Mapping[str, Kernel]
    reports: Reports
    earlier: Reports = field(default_factory=dict)
    remarks: tuple["Remark", ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    listing: Listing = field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        lines = [self.note] if self.note else []
        for name, report in self.reports.items():
            lines.append(f"{name} ({self.source.language}, {report.arch}, {report.tools[0]})")
            lines.append("  " + ", ".join(fact.in_words() for fact in facts(report, self.earlier.get(name))))
        lines += [f"warning: {remark.text}" + (f" ({remark.place})" if remark.line else "") for remark in self.remarks]
        lines += [
            f"{'passed' if v.passed else 'FAILED'} {v.kernel} {v.sizes} {v.backend}: {v.detail}" for v in self.verdicts
        ]
        return "\n".join(lines)

    __repr__ = __str__


@dataclass(frozen=True)
class Remark:
    """A warning of the assembler, such as C7510 (wgmma serialised); `path` and `line` (0 if unknown) say of what.

    The assembler counts lines of PTX; of CUDA C++ these are the lines that the PTX comes from.
    """

    text: str
    path: str
    line: int

    @property
    def place(self) -> str:
        """`<cell mine>:12`."""
        return place(self.path, self.line)


@dataclass(frozen=True)
class Fact:
    """A number of a report, and what it was before (None: nothing to compare with)."""

    name: str
    now: float
    earlier: float | None = None

    @property
    def changed(self) -> bool:
        """True if the number differs from the one before."""
        return self.earlier is not None and self.earlier != self.now

    def in_words(self) -> str:
        """Format a number and its change as `12 registers (was 14)`."""
        return f"{self.now:g} {self.name}" + (f" (was {self.earlier:g})" if self.changed else "")


def facts(report: sass.Report, earlier: sass.Report | None = None) -> list[Fact]:
    """List registers, spills, shared memory and instructions as facts.

    If a word is marked, instructions per eight weights are among them.
    """
    current_numbers, earlier_numbers = _numbers(report), _numbers(earlier) if earlier else {}
    return [Fact(name, number, earlier_numbers.get(name)) for name, number in current_numbers.items()]


def counts(now: Mapping[str, int], earlier: Mapping[str, int] | None = None) -> list[Fact]:
    """Count each opcode (or pipe, or section), also those that only the earlier version has."""
    names = dict.fromkeys([*now, *(earlier or {})])
    return [Fact(n, now.get(n, 0), None if earlier is None else earlier.get(n, 0)) for n in names]


def _numbers(report: sass.Report) -> dict[str, float]:
    numbers: dict[str, float] = {
        "registers": report.registers,
        "spilled bytes": report.spill_stores + report.spill_loads,
        "stack bytes": report.stack,
        "shared bytes": report.shared,
        "instructions": sum(report.opcodes.values()),
    }
    return numbers if report.alu_per_8 is None else {**numbers, "ALU per 8 weights": report.alu_per_8}


def compile_cell(
    text: str,
    language: Language,
    *,
    kernel: str | None = None,
    arch: str | None = None,
    defines: toolchain.Defines = toolchain.NO_DEFINES,
    checks: frozenset[str] = frozenset(),
    listing: bool = False,
    earlier: Reports | None = None,
) -> Cell:
    """Compile the text of a cell (what stands below the magic's line).

    Args:
        text: PTX or CUDA C++.
        language: `"ptx"` or `"cu"`.
        kernel: the entry symbol, if it is to be one of several; by default all of them.
        arch: architecture to assemble and, as in `ptxlab.load`, to run for. By default the reports are of this
            machine's GPU, or of an H100 where there is none.
        defines: `-D` constants, CUDA C++ only.
        checks: of the emulator, for every call that does not ask for others.
        listing: keep the machine code by line.
        earlier: reports of earlier versions by entry symbol.

    Raises:
        CompileError, SourceError: with the cell's line.
        ArgumentError: no such entry, or none at all.
    """
    source = _source(text, language)
    remember(source)
    shown_for = arch or (gpu.device_info().arch if gpu.why_not(None) is None else _ARCH)
    image, note = None, ""
    try:
        image = toolchain.build(source, shown_for, defines=defines)
    except UnavailableError as error:
        note = f"not assembled: {error}"
    if language == "ptx":
        entries = list(emulator.parse(source.text, source.path).entries)
    else:
        entries = cuda_kernels.entries(source, arch, defines)
    chosen = [kernel] if kernel else list(entries)
    if not chosen:
        raise ArgumentError(source.path, "a kernel (.visible .entry, __global__)", "none")
    load_options: dict[str, Any] = {} if language == "ptx" else {"defines": defines, "arch": arch}
    kernels = {name: replace(load(source, name, **load_options), checks=checks) for name in chosen}
    reports = {name: sass.report(source, shown_for, entry=name, defines=defines) for name in chosen} if image else {}
    earlier_reports = {name: earlier[name] for name in reports if earlier and name in earlier}
    remarks = _remarks(source, image, defines) if image else ()
    lines = _by_line(source, image, chosen) if image and listing else {}
    return Cell(source, kernels, reports, earlier_reports, remarks, listing=lines, note=note)


def _remarks(source: Source, image: toolchain.Image, defines: toolchain.Defines) -> tuple[Remark, ...]:
    remarks = []
    for warning in image.warnings:
        text = warning.removeprefix("ptxas info").lstrip(" :")
        match = _LINE.search(text)
        origin = (source.path, int(match[1]) if match else 0)
        if match and source.language == "cu":
            ptx = toolchain.compile_cuda(source, image.arch, output="ptx", defines=defines)
            origin = nvrtc.origin_of(source, ptx.data.decode(), origin[1])
            text = _LINE.sub(f"line {origin[1]}", text)
        remarks.append(Remark(text, *origin))
    return tuple(remarks)


def _by_line(source: Source, image: toolchain.Image, entries: list[str]) -> Listing:
    """Group machine code by the line that it comes from."""
    code = sass.parse(toolchain.disassemble(image))
    lines: dict[tuple[str, int], list[sass.SassInstruction]] = {}
    for instruction in (i for name in entries for i in code[name]):
        is_of_source = source.language == "ptx" or names_same_file(instruction.path, source.path)
        lines.setdefault((source.path if is_of_source else instruction.path, instruction.line), []).append(instruction)
    return lines


def _source(text: str, language: Language) -> Source:
    """Make a source of the cell. Its name is that of the cell's first kernel, its path one that messages can name."""
    pattern = r"\.entry\s+(\w+)" if language == "ptx" else r"__global__\b[^;{(]*?(?:__\w+__\s*\([^)]*\)\s*)?(\w+)\s*\("
    match = re.search(pattern, text)
    name = match[1] if match else "cell"
    return Source(name, f"<cell {name}>" if match else "<cell>", language, "\n" + text)
