"""Commands on kernels: `list`, `show`, `run`, `verify`."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.syntax import Syntax

from ptxlab import emulator, gpu, registry, runtime
from ptxlab.cli.common import (
    FAILED,
    PICTURES,
    AlsoShape,
    AsJson,
    Backend,
    Block,
    CommandLineError,
    FileArch,
    FileDefine,
    Grid,
    Include,
    Shared,
    Std,
    Uninitialised,
    console,
    exit_code,
    expects,
    print_json,
    print_written,
    progress_bar,
    refuse,
    require_file,
    sizes_text,
    table,
)
from ptxlab.cli.launching import (
    Arguments,
    ArgumentsFile,
    ArgumentTexts,
    Check,
    FileOptions,
    KernelTarget,
    Late,
    MaxSteps,
    ScheduledRun,
    SolvedLaunch,
    Unchecked,
    run_on_schedules,
    run_options,
    solve,
)
from ptxlab.errors import EmulationError, SourceError
from ptxlab.io.files import load_arrays, require_folder, save_arrays
from ptxlab.runtime.arguments import merge_sizes, parse_sizes
from ptxlab.runtime.results import Comparison, Summary, compare_all
from ptxlab.runtime.schedules import CHECK
from ptxlab.runtime.verify import Job, Verdict, check_rows, plan, plan_rows
from ptxlab.runtime.verify import verify as verify_job
from ptxlab.sources import Source
from ptxlab.spec import Arg, KernelSpec
from ptxlab.spec.pictures import Pictures
from ptxlab.testing import annotations

PANEL = "Run and check"


def list_kernels(
    names: Annotated[list[str] | None, typer.Argument(help="Kernels or families. Default: all.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the project's kernels: sources, architecture, what each shows."""
    chosen = [spec for name in names or registry.specs() for spec, *_ in registry.resolve_all(name) if spec is not None]
    rows: list[dict[str, Any]] = [
        {
            "name": spec.label,
            "family": spec.family,
            "sources": [s.language for s in registry.find(spec.name)[1]],
            "arch": spec.arch if spec.exact_arch else f"{spec.arch}+",
            "wrong_by_design": spec.wrong is not None,
            "summary": spec.summary,
        }
        for spec in chosen
    ]
    if as_json:
        return print_json(rows)
    cells = [
        (
            r["name"],
            " ".join(r["sources"]),
            r["arch"],
            ("WRONG BY DESIGN: " if r["wrong_by_design"] else "") + r["summary"],
        )
        for r in rows
    ]
    console.print(table("Kernels", ("name", "sources", "arch", "what it shows"), cells))


def show(
    name: Annotated[str, typer.Argument(help="NAME or a family; NAME.ptx or NAME.cu prints that source alone.")],
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot register layout and bank conflicts of a load_* kernel: FILE.png, .svg, .pdf."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a kernel: contract, arguments, rules and source; for load_* kernels also which lane gets which weights."""
    require_file("--plot", plot, *PICTURES)
    kernels = registry.resolve_all(name)
    if plot is not None:
        spec = kernels[0][0]
        pictures = None if len(kernels) > 1 or spec is None else _pictures(spec)
        if spec is None or pictures is None:
            family_names = ", ".join(
                f"one {family_pictures.kernels}" for _, family_pictures in registry.load_all("pictures")
            )
            raise expects("--plot", family_names, name)
        from ptxlab.plot import save

        save(pictures.figure(spec), plot)
    if as_json:
        kernels_as_json = [_as_json(spec, sources) for spec, sources, _ in kernels]
        return print_json(kernels_as_json if len(kernels_as_json) > 1 else kernels_as_json[0])
    for spec, sources, _ in kernels:
        if spec is not None and "." not in name:
            _show_contract(spec)
        for source in sources:
            if "." not in name:
                console.print(f"\n[dim]{escape(source.label)}[/]")
            _print_source(source)
    if "." not in name:
        print_written(plot)


def _as_json(spec: KernelSpec | None, sources: Iterable[Source]) -> dict[str, Any]:
    texts = {"sources": {source.label: source.text for source in sources}}
    if spec is None:
        return texts
    args = [{"name": a.name, "dtype": str(a.dtype), "shape": list(a.shape), "role": a.role} for a in spec.args]
    rules = [*spec.rules, *spec.value_rules]
    return {"name": spec.label, "summary": spec.summary, "args": args, "rules": rules, **texts}


def _show_contract(spec: KernelSpec) -> None:
    console.print(f"[bold]{spec.label}[/]  {escape(spec.summary)}")
    cells = [(a.name, str(a.dtype), _shape(a), a.role) for a in spec.args]
    console.print(table("Arguments, in launch order", ("name", "dtype", "shape", "role"), cells))
    for rule in (*spec.rules, *spec.value_rules):
        console.print(f"  rule  {escape(rule)}", highlight=False)
    if spec.wrong:
        console.print(f"  [red]wrong by design[/]: {escape(spec.wrong.why)}")
    if pictures := _pictures(spec):
        console.print(pictures.as_text(spec), highlight=False, soft_wrap=True)


def _pictures(spec: KernelSpec) -> Pictures | None:
    """Return the pictures that a family registers, if there are some of this kernel."""
    entry = registry.entries("pictures").get(spec.family)
    pictures: Pictures | None = entry.load() if entry else None
    return pictures if pictures and pictures.draws(spec) else None


def _print_source(source: Source) -> None:
    """Print a source verbatim, so that what is piped into a file is the kernel again.

    A terminal gets colours and no line breaks.
    """
    if console.is_terminal:
        console.print(Syntax("", "c", background_color="default").highlight(source.text), soft_wrap=True, end="")
    else:
        console.file.write(source.text)


def _shape(arg: Arg) -> str:
    return f"[{', '.join(arg.shape)}]" if arg.shape else f"= {arg.value or arg.name}"


def run(
    target: KernelTarget,
    inputs: ArgumentsFile = None,
    values: ArgumentTexts = None,
    uninitialised: Uninitialised = None,
    outputs: Annotated[Path | None, typer.Option("--out", help="Write the kernel's outputs: FILE.npz.")] = None,
    expect: Annotated[
        Path | None,
        typer.Option(
            help="Compare each output with the array of its name in FILE.npz. `expected.y` in --in does so for y."
        ),
    ] = None,
    rtol: Annotated[
        float | None, typer.Option(min=0.0, help="Relative tolerance of --expect. Default: 1e-5 of float32.")
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option(min=0.0, help="Absolute tolerance. Default: --rtol of the largest expected magnitude."),
    ] = None,
    backend: Backend = None,
    check: Check = "",
    late: Late = False,
    max_steps: MaxSteps = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Emulator: list bank conflicts and uncoalesced accesses by source line.")
    ] = False,
    unneeded: Annotated[
        bool,
        typer.Option("--unneeded", help="Emulator: leave out each fence and wait in turn; list those no run needs."),
    ] = False,
    unchecked: Unchecked = False,
    grid: Grid = None,
    block: Block = None,
    shared: Shared = None,
    arch: FileArch = None,
    define: FileDefine = None,
    include: Include = None,
    std: Std = None,
    as_json: AsJson = False,
    form: Annotated[
        str, typer.Option("--format", help="Print only the findings, as github (workflow annotations), sarif or json.")
    ] = "text",
) -> None:
    """Run a kernel, the project's or your own file, on given arrays, with the emulator's checks; show its outputs.

    A finding names line, thread, lane and operands. Exit code 1: a finding, or an output that is not as expected.
    """
    if form not in ("text", *annotations.FORMATS):
        raise expects("--format", f"one of text, {', '.join(annotations.FORMATS)}", form)
    if as_json and form != "text":
        raise CommandLineError("--json prints all there is: leave --format out")
    if outputs is not None:
        require_folder(outputs)
    arguments = Arguments.read(inputs, values, uninitialised)
    expected = {**arguments.expected, **(load_arrays(expect) if expect else {})}
    options, schedules = run_options(check, late, max_steps, count_banks=memory)
    if memory or unneeded:
        option = "--memory" if memory else "--unneeded"
        if backend == "gpu":
            raise CommandLineError(f"{option} runs in the emulator: leave --backend gpu out")
        backend = "emulator"
    if unneeded:
        refuse(
            {"--out": outputs, "--memory": memory or None, "--late": late or None, "--expect": expect},
            "goes with one run, and --unneeded makes many: early, late, with seeds",
        )
        refuse({"--format": form if form != "text" else None}, "prints findings, and --unneeded has none")
    spec, source, entry = registry.resolve(target)
    with _print_errors(form, as_json, source.path):
        files = FileOptions(grid, block, shared, arch, define, include, std)
        launch = solve(spec, source, entry, arguments, unchecked, files)
        if unneeded:
            return _show_unneeded(launch, options if options.checks else options.add_checks(emulator.CHECKS), as_json)
        with progress_bar(f"run {target}", None, quiet=as_json or form != "text"):
            run_ = run_on_schedules(launch, backend, options, schedules)
    outcome, bfloat16_names = run_.outcome, launch.bfloat16_names
    written_outputs = {name: outcome.outputs[name] for name in outcome.written}
    comparisons = compare_all({**outcome.outputs}, expected, rtol, atol, bfloat16_names=bfloat16_names)
    summaries = [
        Summary.of(name, _on_host(array), is_bfloat16=name in bfloat16_names) for name, array in written_outputs.items()
    ]
    if outputs is not None:
        save_arrays(outputs, written_outputs)
    if form != "text":
        sys.stdout.write(annotations.render(form, run_.annotations(source.path)))
    elif as_json:
        print_json(
            {
                "backend": outcome.backend,
                "kernel": launch.kernel.name,
                "outputs": {summary.name: summary.to_json() for summary in summaries},
                "findings": [{**asdict(f), "remedy": emulator.remedy_of(f.kind)} for f in outcome.findings],
                "notes": [asdict(note) for note in outcome.notes],
                "expected": [comparison.to_json() for comparison in comparisons],
                "schedules": {
                    "ran": [*map(str, run_.schedules)],
                    "differences": [
                        {**difference.to_json(), "remedy": emulator.remedy_of(CHECK)} for difference in run_.differences
                    ],
                },
                **({"memory": _memory_rows(outcome)} if memory else {}),
            }
        )
    else:
        if memory:
            _show_memory(_memory_rows(outcome))
        shapes = ", ".join(
            f"{name} {'bfloat16' if name in bfloat16_names else array.dtype}{list(array.shape)}"
            for name, array in outcome.outputs.items()
        )
        _show_run(run_, summaries, comparisons, shapes, "checks clean" if options.checks or schedules else "no checks")
    if outcome.findings or run_.differences or any(comparison.wrong for comparison in comparisons):
        raise typer.Exit(FAILED)


def _on_host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array


def _show_run(run_: ScheduledRun, summaries: list[Summary], compared: list[Comparison], shapes: str, none: str) -> None:
    """Print findings, differences and notes, the outputs and how they compare; then a line on backend and arrays."""
    outcome = run_.outcome
    lines = [*map(str, outcome.findings), *(f"{CHECK}: {difference}" for difference in run_.differences)]
    kinds = [finding.kind for finding in outcome.findings] + [CHECK] * bool(run_.differences)
    for line in [*lines, *emulator.remedies_of(kinds), *map(str, outcome.notes)]:
        console.print(escape(line), soft_wrap=True, highlight=False)
    if summaries:
        rows = [summary.cells() for summary in summaries]
        console.print(table("", ("output", "type", "first values", "min>", "max>", "NaN>"), rows))
    for comparison in compared:
        console.print(escape(str(comparison)), soft_wrap=True, highlight=False)
    state = f"{len(lines)} finding{'s' * (len(lines) > 1)}" if lines else none
    console.print(f"[dim]{outcome.backend}[/]  {escape(shapes)}  {state}", soft_wrap=True, highlight=False)


@contextmanager
def _print_errors(form: str, as_json: bool, path: str) -> Iterator[None]:
    """Print an error that ends the run as an annotation or as JSON too."""
    try:
        yield
    except (EmulationError, SourceError) as error:
        annotation = annotations.of_error(error, annotations.relative(path))
        if as_json:
            print_json({"error": annotation.to_json(), "exit_code": exit_code(error)})
        elif form != "text":
            sys.stdout.write(annotations.render(form, [annotation]))
        raise


def _show_unneeded(launch: SolvedLaunch, options: emulator.EmulatorOptions, as_json: bool) -> None:
    """Show which fences and waits of a kernel its runs need."""

    def attempt(mode: str, seed: int, without: frozenset[emulator.Statement]) -> emulator.Ran:
        changed_options = replace(options, mode=mode, seed=seed, without=without)
        outcome = launch.copy_arrays().run(backend="emulator", options=changed_options)
        findings = tuple(f"{f.kind} at {Path(f.path).name}:{f.line}" for f in outcome.findings)
        return emulator.Ran(findings, b"".join(a.tobytes() for a in outcome.outputs.values()))

    statements = emulator.statements_of(launch.kernel.module.entries[launch.kernel.entry])
    verdicts = dict.fromkeys(statements, ("not tried", ""))
    with progress_bar("unneeded", sum(s.is_tried for s in statements), quiet=as_json) as advance:
        for need in emulator.needs_of(statements, attempt):
            verdict = "needed" if need.why else "another does its work" if need.stands_in else "no run needed it"
            verdicts[need.statement] = verdict, need.why
            advance(str(need.statement))
    rows = [{**asdict(statement), "verdict": verdict, "why": why} for statement, (verdict, why) in verdicts.items()]
    if as_json:
        return print_json(rows)
    cells = [
        (", from ".join(f"{Path(path).name}:{line}" for path, line in ((r["path"], r["line"]), *r["callers"][-1:])),
         r["opcode"], r["verdict"], r["why"])
        for r in rows
    ]  # fmt: skip
    console.print(table("Fences and waits", ("line", "instruction", "verdict", "without it"), cells))
    console.print("Evidence, no proof: with these inputs, early, late and with 20 seeds (guide/checks.md).")


def _memory_rows(outcome: runtime.Outcome) -> list[dict[str, Any]]:
    """Compute the cost of each source line's accesses beyond the least; the dearest first."""
    costs: list[tuple[str, emulator.SharedAccess | emulator.GlobalAccess, int, int]] = []
    costs += [("shared", a, a.wavefronts, a.wavefronts - a.conflicts) for a in outcome.shared]
    costs += [("global", a, a.sectors, a.needed) for a in outcome.sectors]
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for space, access, taken_bytes, needed_bytes in costs:
        key = space, access.path, access.line
        row = rows.setdefault(key, dict(zip(("space", "path", "line"), key, strict=True)) | {"instructions": []})
        row["instructions"].append(next(word for word in access.text.split() if word[0] not in "@{"))
        for name, count in (("requests", access.requests), ("took", taken_bytes), ("needed", needed_bytes)):
            row[name] = row.get(name, 0) + count
    return sorted(rows.values(), key=lambda row: (row["space"], row["needed"] - row["took"], -row["took"]))


def _show_memory(rows: list[dict[str, Any]]) -> None:
    for space, title, unit in (
        ("shared", "Shared memory: passes over the banks", "wavefronts"),
        ("global", "Global memory: sectors of 32 bytes", "sectors"),
    ):
        cells = [
            (
                f"{Path(row['path']).name}:{row['line']}",
                ", ".join(f"{n} x {op}" if n > 1 else op for op, n in Counter(row["instructions"]).items()),
                *(f"{row[name]:,}" for name in ("requests", "took", "needed")),
                f"{row['took'] - row['needed']:,}",
            )
            for row in rows
            if row["space"] == space
        ]
        if cells:
            columns = ("line", "instructions", "requests>", f"{unit}>", "needed>", "extra>")
            console.print(table(title, columns, cells))


def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Kernels or families, FILE.py with a spec; NAME.ptx selects one source, NAME:FORM one of the forms."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every kernel.")] = False,
    backend: Annotated[str | None, typer.Option(help="gpu or emulator. Default: each that is available.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the example inputs.")] = 0,
    shape: AlsoShape = None,
    arch: Annotated[
        str | None,
        typer.Option(help="Compile for an older GPU: sm_80 is run by the emulator, and on a newer GPU from its PTX."),
    ] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Check only whether a row has the same bits alone and in a batch.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Verify kernels against their NumPy references, on the GPU and in the emulator, with every check on."""
    if bool(names) == everything:
        raise CommandLineError("verify expects kernels, families or --all")
    with gpu.compiling_for(arch):
        _verify(names, backend, seed, shape, batch_invariant, as_json)


def _verify(
    names: list[str] | None, backend: str | None, seed: int, shape: str | None, batch_invariant: bool, as_json: bool
) -> None:
    """Verify as for the architecture that kernels are compiled for."""
    jobs, skipped_kernels = plan(names or registry.families(), backend)
    if batch_invariant:
        if shape:
            raise CommandLineError("--batch-invariant has sizes of its own: leave --shape out")
        jobs, jobs_without_rows = plan_rows(jobs)
        skipped_kernels += jobs_without_rows
    jobs += _jobs_at(parse_sizes("--shape", shape), jobs) if shape else []
    verdicts, check = [], check_rows if batch_invariant else verify_job
    with progress_bar("verify", len(jobs), quiet=as_json) as advance:
        for job in jobs:
            verdicts.append(check(job, seed=seed))
            advance(f"{job.source.label} on {job.backend}")
    failed = [v for v in verdicts if not v.passed]
    if as_json:
        print_json([v.to_json() for v in verdicts])
    else:
        groups: dict[tuple[str, str], list[Verdict]] = {}
        for v in verdicts:
            groups.setdefault((v.kernel, v.backend), []).append(v)
        cells = [
            (kernel, job_backend, f"{sum(v.passed for v in group)}/{len(group)}", _worst(group).detail)
            for (kernel, job_backend), group in groups.items()
        ]
        console.print(table("", ("kernel", "backend", "passed>", "first failing case, or what held"), cells))
        for line in skipped_kernels:
            console.print(f"[yellow]skipped[/] {escape(line)}", soft_wrap=True, highlight=False)
        console.print(f"{len(verdicts) - len(failed)} passed, {len(failed)} failed, {len(skipped_kernels)} skipped")
    if failed:
        raise typer.Exit(FAILED)


def _jobs_at(sizes: dict[str, int], jobs: list[Job]) -> list[Job]:
    """Return the same kernels on the same backends at other sizes.

    Each takes the sizes that it has, floats as in its example.
    """
    if unknown_symbols := set(sizes) - {symbol for job in jobs for symbol in job.spec.example_sizes[0]}:
        raise expects("--shape", "sizes that one of the kernels has", min(unknown_symbols))
    added_jobs = []
    for job in {(job.label, job.backend): job for job in jobs}.values():
        usual_sizes = job.spec.example_sizes[0]
        job_sizes = {symbol: size for symbol, size in usual_sizes.items() if isinstance(size, float)}
        requested_sizes = {symbol: size for symbol, size in sizes.items() if symbol in usual_sizes}
        merge_sizes("--shape", job.spec, usual_sizes, requested_sizes)  # refuses sizes below 1
        job_sizes |= requested_sizes
        job.spec.check_sizes(job_sizes)
        added_jobs.append(Job(job.spec, job.source, job.backend, job_sizes))
    return added_jobs


def _worst(group: list[Verdict]) -> Verdict:
    """Return the first failed verdict, otherwise the last one."""
    worst_verdict = next((v for v in group if not v.passed), group[-1])
    return (
        worst_verdict
        if worst_verdict.passed
        else replace(worst_verdict, detail=f"{sizes_text(worst_verdict.sizes)}: {worst_verdict.detail}")
    )
