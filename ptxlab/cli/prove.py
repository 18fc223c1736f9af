"""The command `prove`: what a kernel does for all inputs, decided by a solver."""

from pathlib import Path
from time import monotonic
from typing import Annotated

import typer
from rich.markup import escape

from ptxlab import registry
from ptxlab.cli.common import (
    FAILED,
    UNDECIDED,
    AsJson,
    CommandLineError,
    FileArch,
    FileDefine,
    Grid,
    Include,
    Std,
    console,
    notes,
    parse_dimensions,
    print_json,
    print_written,
    progress_bar,
    refuse,
    require_file,
    table,
)
from ptxlab.errors import OutOfTime
from ptxlab.io.files import save_arrays
from ptxlab.prove import Claim, Decision, decide, registered_claims
from ptxlab.prove.solve import check_solver, time_limit
from ptxlab.runtime import Kernel, load
from ptxlab.runtime.arguments import geometry, parse_defines

PANEL = "Run and check"


def prove(
    targets: Annotated[
        list[str] | None, typer.Argument(help="NAME, NAME.cu, a family, or FILE[:entry].", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every claim of the project.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --all: the half that takes seconds, which the tests decide too.")
    ] = False,
    assume: Annotated[
        list[str] | None, typer.Option(help='A condition on the inputs: "1 <= scale <= 16". May be repeated.')
    ] = None,
    claim: Annotated[
        list[str] | None, typer.Option(help='What is to hold: "out.u8[i] == q.u4[i] * scale". May be repeated.')
    ] = None,
    equals: Annotated[
        str | None, typer.Option(help="NAME or FILE whose outputs, on the same inputs, are other.out in a claim.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.001, help="Time per claim, and to follow the launch of a file.")
    ] = 60.0,
    total_seconds: Annotated[
        float | None,
        typer.Option(min=0.001, help="Time for the whole run; what is left then is undecided. Default: no limit."),
    ] = None,
    solver: Annotated[str, typer.Option(help="z3, bitwuzla or cvc5.")] = "z3",
    counterexample: Annotated[
        Path | None, typer.Option("--out", help="Write the first counterexample's arguments, for `run --in`: FILE.npz.")
    ] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Claims on a NAME: do not assume its rules on values.")
    ] = False,
    grid: Grid = None,
    block: Annotated[
        str | None, typer.Option(rich_help_panel="Files without a spec", help="Threads per block. Default: 1.")
    ] = None,
    arch: FileArch = None,
    define: FileDefine = None,
    include: Include = None,
    std: Std = None,
    as_json: AsJson = False,
) -> None:
    """Prove what a kernel does for all inputs, or show an input for which it does not.

    Without --claim: the claims on it, and its @lanes annotations. A loop's bound and an address that depend on an input
    need an --assume that makes them numbers. Exit code 1: refuted, 3: undecided in time.

    Example: ptxlab prove unpack.ptx --assume "scale <= 17" --claim "out.u8[i] == nibbles(q)[i] * scale"
    """
    if bool(targets) == everything:
        raise CommandLineError("prove expects kernels, families, files or --all")
    require_file("--out", counterexample, ".npz")
    check_solver(solver)
    if quick and not everything:
        raise CommandLineError("--quick needs --all")
    if everything:
        kernel_options = {"--assume": assume, "--claim": claim, "--equals": equals, "--unchecked": unchecked or None}
        refuse(kernel_options, "is for one kernel, not for --all")
    deadline = monotonic() + total_seconds if total_seconds else None
    from ptxlab.prove.kernels import claims_of, claims_on_file, claims_on_spec

    claims: list[Claim] = []
    for target in targets or []:
        for spec, sources, entry in registry.resolve_all(target):
            if spec is None:
                refuse({"--unchecked": unchecked or None}, "is for kernels with a spec")
                kernel = load(
                    sources[0],
                    entry,
                    defines=parse_defines("-D", define or []),
                    arch=arch,
                    include=include or (),
                    std=std,
                )
                compared_kernel = _kernel(equals) if equals else None
                launch_geometry = geometry(
                    parse_dimensions("grid", grid or "1"), parse_dimensions("block", block or "1"), 0, 1
                )
                title = f"follow {Path(kernel.source.path).name}"
                with (
                    progress_bar(title, None, quiet=as_json) as advance,
                    time_limit(*_nearer_limit(seconds, deadline, total_seconds, f"{title}: not at its end")),
                ):
                    claims += claims_on_file(
                        kernel, claim or [], assume or [], launch_geometry, compared_kernel, advance
                    )
                continue
            file_options = {"--grid": grid, "--block": block, "--arch": arch, "-D": define}
            refuse(file_options, f"is for files only: {spec.name} has a spec, which says it")
            if claim or equals:
                claims += claims_on_spec(spec, sources, claim or [], assume or [], equals or "", unchecked)
            elif assume or unchecked:
                raise CommandLineError(f"{'--assume' if assume else '--unchecked'} needs --claim or --equals")
            else:
                labels = {source.label for source in sources}
                claims += [
                    *claims_of(spec, sources),
                    *(c for c in registered_claims() if c.subject.split(",")[0] in labels),
                ]
    if everything:
        claims += [c for spec in registry.specs().values() for c in claims_of(spec, registry.find(spec.name)[1])]
        claims = [c for c in [*claims, *registered_claims()] if c.quick or not quick]
    if not claims:
        raise CommandLineError(f"{', '.join(targets or [])}: the spec has no claims; give --claim")
    outcomes = []
    with progress_bar("prove", len(claims), quiet=as_json) as advance:
        for next_claim in claims:
            advance(f"{next_claim.subject}: {next_claim.name}")
            try:
                with time_limit(deadline and max(0.001, deadline - monotonic()), ""):
                    outcomes.append(decide(next_claim, seconds=seconds, solver=solver, say=advance.say))
            except OutOfTime:
                outcomes.append(Decision(next_claim, "undecided", 0.0, solver))
            if not notes.is_terminal and not as_json:  # a log instead of a bar
                line = (
                    f"{next_claim.subject}: {next_claim.name}: {_verdict(outcomes[-1])}, {outcomes[-1].seconds:.2f} s"
                )
                notes.print(line, soft_wrap=True, highlight=False, markup=False)
    _report(outcomes, counterexample, as_json)


def _nearer_limit(seconds: float, deadline: float | None, total: float | None, task: str) -> tuple[float, str]:
    """Return the nearer of two limits of time, and the message that says which it was."""
    remaining_seconds = seconds if deadline is None else deadline - monotonic()
    if remaining_seconds < seconds:
        return max(0.001, remaining_seconds), f"{task} after --total-seconds {total:g}"
    return seconds, f"{task} after --seconds {seconds:g}"


def _kernel(target: str) -> Kernel:
    """Load a kernel by name or file, as one without a spec."""
    _, source, entry = registry.resolve(target)
    return load(source, entry)


def _report(outcomes: list[Decision], path: Path | None, as_json: bool) -> None:
    explanation = next((o.explanation for o in outcomes if o.explanation and not o.as_expected), None)
    explanation = explanation or next((o.explanation for o in outcomes if o.explanation), None)
    if path is not None and explanation is not None:
        save_arrays(path, explanation.arrays)
    if as_json:
        print_json([o.to_json() for o in outcomes])
    else:
        rows = [(o.claim.subject, o.claim.name, _verdict(o), f"{o.seconds:.2f}") for o in outcomes]
        console.print(table("", ("subject", "claim", "verdict", "seconds>"), rows))
        for o in outcomes:
            if o.explanation:
                console.print(
                    f"[bold]{escape(o.claim.subject)}[/], {escape(o.claim.name)}: {escape(o.claim.text)}",
                    soft_wrap=True,
                )
                for line in o.explanation.lines:
                    console.print(f"  {escape(line)}", soft_wrap=True, highlight=False)
                if o.explanation.command:
                    arguments_file = path if o.explanation is explanation and path else "FILE.npz"
                    console.print(
                        f"  {escape(o.explanation.command)} --in {arguments_file}", soft_wrap=True, highlight=False
                    )
        print_written(path if explanation is not None else None)
    failed = [o for o in outcomes if not o.as_expected]
    if any(o.verdict != "undecided" for o in failed):
        raise typer.Exit(FAILED)
    if failed:
        raise typer.Exit(UNDECIDED)


def _verdict(outcome: Decision) -> str:
    expected_note = " (as expected)" if outcome.claim.expect == "refuted" else ""
    return f"{outcome.verdict}{expected_note if outcome.as_expected else ''}"
