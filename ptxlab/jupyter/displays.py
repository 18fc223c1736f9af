"""What kernels, specs, findings, launches and cells look like in a notebook."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ptxlab import _moved, registry, sources
from ptxlab.emulator import Finding
from ptxlab.jupyter import page
from ptxlab.jupyter.cell import Cell, Fact, Remark, counts, facts
from ptxlab.jupyter.page import Html, chip, details, element, join, listing, table
from ptxlab.jupyter.registers import RegisterRow, word_table
from ptxlab.runtime import Kernel, Outcome
from ptxlab.sass import Report
from ptxlab.sources import Source
from ptxlab.spec import Arg, KernelSpec

_SHORT = 60  # lines of a source that is shown unfolded


def render_kernel(kernel: Kernel) -> str:
    """Render a kernel: its call, and its source."""
    signature = f"{kernel.entry}({', '.join(kernel.parameters)}, grid=, block=)"
    arch = kernel.module.target if kernel.source.language == "ptx" else kernel.arch
    chips = [chip(kernel.source.language), *([chip(lowest_arch(arch))] if arch else [])]
    chips += [chip(f"{name}={macro}") for name, macro in kernel.defines.items()]
    chips += [chip("checks ", ", ".join(sorted(kernel.checks)))] if kernel.checks else []
    spec = registry.specs().get(kernel.entry)
    summary = [element("div", spec.summary)] if spec and kernel.source in sources.sources_of_kernel(spec.name) else []
    return page.page(title_line(element("code", signature), *chips), *summary, _source(kernel.source))


def render_spec(spec: KernelSpec) -> str:
    """Render a spec: its summary, arguments, rules and sources."""
    chips = [chip(lowest_arch(spec.arch)), *([chip("wrong by design", kind="bad")] if spec.wrong else [])]
    arguments = [(element("code", a.name), str(a.dtype), element("code", _shape(a)), a.role) for a in spec.args]
    rules = [element("code", rule) for rule in (*spec.rules, *spec.value_rules)]
    exactness = "bit for bit" if not spec.tolerance and spec.bound is None else spec.tolerance_reason
    properties = [("rules", join(rules, "<br>")), ("compared", exactness)]
    properties += [("wrong", spec.wrong.why)] if spec.wrong else []
    kernel_sources = sources.sources_of_kernel(spec.name)
    return page.page(
        title_line(spec.name, *chips),
        element("div", spec.summary),
        table(("argument, in launch order", "dtype", "shape", "role"), arguments),
        table(("", ""), ((element("b", name), text) for name, text in properties if text)),
        *(_source(source, folded=True) for source in kernel_sources),
    )


def render_finding(finding: Finding) -> str:
    """Render a finding: its place, the lines around it, and for packed lanes the operands in binary."""
    return page.page(render_finding_body(finding))


def render_finding_body(finding: Finding) -> Html:
    """Render a finding without the style."""
    block, thread = ("({}, {}, {})".format(*index) for index in (finding.block, finding.thread))
    times = f"{finding.count} times" if finding.count > 1 else "once"
    place = element("code", page.place(finding.path, finding.line))
    title = title_line(chip(finding.kind, kind="bad"), place, " ", chip(f"block {block} thread {thread}"), chip(times))
    source = page.recall(finding.path)
    lines = page.excerpt(source, finding.line) if source else element("pre", finding.text)
    return join([title, element("div", finding.message), lines, _operands(finding)])


def _operands(finding: Finding) -> Html:
    """Render the sources, the wide result with the bits that do not fit, and what was stored."""
    if finding.fault is None:
        return Html("")
    *operands, stored_register = finding.fault.registers
    exact_values = finding.fault.exact
    rows = [RegisterRow(operand.letter, operand.type, operand.lanes) for operand in operands]
    low, high = stored_register.type.limits
    lanes_out_of_range = {lane for lane, number in enumerate(exact_values) if not low <= number <= high}
    rows.append(
        RegisterRow("exact", stored_register.type, exact_values, lanes_out_of_range, "each lane computed by itself")
    )
    differing_lanes = {lane for lane, number in enumerate(exact_values) if stored_register.lanes[lane] != number}
    rows.append(
        RegisterRow(
            "d", stored_register.type, stored_register.lanes, differing_lanes, f"stored, {stored_register.word:#010x}"
        )
    )
    return word_table(rows, finding.lane)


def render_outcome(outcome: Outcome) -> str:
    """Render a launch: where it ran, what it wrote, what was found."""
    chips = [chip(outcome.backend)]
    finding_count = len(outcome.findings)
    if outcome.backend == "emulator":
        verdict = f"{finding_count} finding{'s' * (finding_count > 1)}" if finding_count else "no findings"
        chips.append(chip(verdict, kind="bad" if finding_count else ""))
        chips.append(chip(f"{outcome.lane_instructions:,} lane instructions"))
    arrays = [chip(element("code", n), f" {a.dtype}{list(a.shape)}") for n, a in outcome.outputs.items()]
    unfolded = [render_finding_body(finding) for finding in outcome.findings[:1]]
    folded_findings = [details(_summary(finding), render_finding_body(finding)) for finding in outcome.findings[1:]]
    return page.page(title_line("launch", *chips), element("div", *arrays), *unfolded, *folded_findings)


def _summary(finding: Finding) -> str:
    repetitions = f"; {finding.count - 1} more" if finding.count > 1 else ""
    return f"{finding.kind}: {page.place(finding.path, finding.line)}: {finding.message}{repetitions}"


def render_cell(cell: Cell) -> str:
    """Render a cell of PTX or CUDA C++: the assembler's reports, and what changed."""
    parts: list[object] = [element("div", cell.note)] if cell.note else []
    for name, report in cell.reports.items():
        parts += _report(name, cell, report)
    parts += map(_remark, cell.remarks)
    for verdict in cell.verdicts:
        sizes = ", ".join(f"{name}={size}" for name, size in verdict.sizes.items())
        verdict_chip = chip("passed", kind="good") if verdict.passed else chip("failed", kind="bad")
        parts.append(
            element(
                "div",
                verdict_chip,
                element("code", f"{verdict.kernel} {sizes}"),
                f" {verdict.backend}: {verdict.detail}",
            )
        )
    if cell.listing:
        code = element("div", _machine_code(cell), cls="tall")
        parts.append(details("machine code by line", code, shown=True))
    return page.page(*parts)


def _report(name: str, cell: Cell, report: Report) -> list[object]:
    earlier_report = cell.earlier.get(name)
    numbers = facts(report, earlier_report)
    spill_names = {"spilled bytes", "stack bytes"}
    cells = [_fact(fact, bad=fact.name in spill_names and fact.now > 0) for fact in numbers]
    pipes = counts(report.pipes, earlier_report.pipes if earlier_report else None)
    opcodes = counts(report.opcodes, earlier_report.opcodes if earlier_report else None)
    return [
        title_line(element("code", name), chip(report.arch), element("span", ", ".join(report.tools), cls="dim")),
        table([fact.name for fact in numbers], [cells]),
        element("div", element("b", "pipes "), *map(_count, pipes)),
        element("div", element("b", "opcodes "), *map(_count, opcodes)),
    ]


def _remark(remark: Remark) -> Html:
    """Render a warning of the assembler and the lines that it is about."""
    source = page.recall(remark.path) if remark.line else None
    lines = page.excerpt(source, remark.line, around=1) if source else ""
    return element("div", chip("warning", kind="bad"), remark.text, lines)


def _fact(fact: Fact, *, bad: bool) -> Html:
    earlier_note = element("span", f" was {fact.earlier:g}", cls="dim") if fact.changed else ""
    number_cell = chip(f"{fact.now:g}", kind="bad" if bad else "changed") if bad or fact.changed else f"{fact.now:g}"
    return element("td", number_cell, earlier_note)


def _count(fact: Fact) -> Html:
    earlier_note = element("span", f" was {fact.earlier:g}", cls="dim") if fact.changed else ""
    return chip(element("code", fact.name), f" {fact.now:g}", earlier_note, kind="changed" if fact.changed else "")


def _machine_code(cell: Cell) -> Html:
    """Render each line of the cell with the instructions that it became below it; then those of headers."""
    return join(_by_line(path, cell) for path in dict.fromkeys([cell.source.path, *(path for path, _ in cell.listing)]))


def _by_line(path: str, cell: Cell) -> Html:
    source = cell.source if path == cell.source.path else Source.from_text(Path(path).read_text(), path)
    line_items = [] if source is cell.source else [element("b", Path(path).name)]
    for number, line in enumerate(page.highlight_lines(source.text, source.language), 1):
        if code := cell.listing.get((path, number)):
            line_items.append(join([element("span", f"{number:>4}  ", cls="no"), line]))
            line_items += [
                element("span", f"{'':>10}{i.guard:<6}{i.name:<22}{', '.join(i.operands)}", cls="dim") for i in code
            ]
    return element("pre", join(line_items, "\n"))


def title_line(*parts: object) -> Html:
    """Lay out a display's first line: a name in bold, and chips."""
    return element("div", element("b", parts[0]), " ", *parts[1:], cls="title")


def _source(source: Source, *, folded: bool = False) -> Html:
    text = listing(source.text, source.language, first=2 if source.text.startswith("\n") else 1)  # a cell's magic
    count = source.text.count("\n")
    return details(f"{source.label}, {count} lines", text, shown=not folded and count <= _SHORT)


def lowest_arch(arch: str) -> str:
    """Say on which architectures code runs: a letter at the end marks code that runs nowhere else."""
    return f"{arch} only" if arch[-1].isalpha() else f"{arch} and newer"


def _shape(arg: Arg) -> str:
    return f"[{', '.join(arg.shape)}]" if arg.shape else f"= {arg.value or arg.name}"


PAGES: dict[type, Callable[[Any], str]] = {
    Cell: render_cell,
    Finding: render_finding,
    Kernel: render_kernel,
    KernelSpec: render_spec,
    Outcome: render_outcome,
}


def __getattr__(name: str) -> Any:
    """Look up a name that has moved."""
    return _moved.name_in(__name__, name)
