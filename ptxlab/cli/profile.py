"""The command `profile`: one launch of a kernel under Nsight Compute, on a page."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ptxlab.cli.common import (
    PICTURES,
    AsJson,
    Block,
    CommandLineError,
    FileArch,
    FileDefine,
    Grid,
    Include,
    Inputs,
    Plot,
    Shape,
    Shared,
    Std,
    console,
    expects,
    parse_dimensions,
    print_json,
    print_written,
    progress_bar,
    refuse,
    require_file,
    sizes_text,
    table,
)
from ptxlab.profile import nsight, profiles
from ptxlab.profile.launch_target import LaunchTarget
from ptxlab.profile.nsight import Profile
from ptxlab.runtime.arguments import parse_defines, parse_sizes

PANEL = "Measure"

_WIDEST = 90  # characters of a source line


def profile(
    target: Annotated[str | None, typer.Argument(help="NAME, NAME.cu, NAME:FORM, or FILE[:entry].")] = None,
    shape: Shape = None,
    compare: Annotated[str | None, typer.Option(help="Compare with NAME, FILE or a saved .ncu-rep or .json.")] = None,
    saved: Annotated[
        Path | None, typer.Option("--from", help="Read a saved .ncu-rep or .json instead of launching.")
    ] = None,
    chosen: Annotated[
        str, typer.Option("--set", help="Metrics to collect. quick: those of the page; full: all that ncu has.")
    ] = "quick",
    keep: Annotated[Path | None, typer.Option(help="Keep ncu's report: FILE.ncu-rep.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the profile: FILE.json.")] = None,
    plot: Plot = None,
    inputs: Inputs = None,
    grid: Grid = None,
    block: Block = None,
    shared: Shared = None,
    arch: FileArch = None,
    define: FileDefine = None,
    include: Include = None,
    std: Std = None,
    as_json: AsJson = False,
) -> None:
    """Profile one warmed-up launch under Nsight Compute: throughput, stall reasons, and the source lines that stall."""
    file_options: dict[str, Any] = {
        "--in": inputs,
        "--grid": grid,
        "--block": block,
        "--shared": shared,
        "--arch": arch,
    }
    file_options |= {"-D": define, "-I": include, "--std": std}
    sizes = parse_sizes("--shape", shape) if shape is not None else {}
    if (target is None) == (saved is None):
        raise CommandLineError("profile expects either a kernel or --from FILE")
    if chosen not in nsight.SETS:
        raise expects("--set", " or ".join(nsight.SETS), chosen)
    if saved is not None and saved.suffix not in profiles.SAVED:
        raise expects("--from", f"a {' or '.join(profiles.SAVED)} file", saved)
    require_file("--keep", keep, ".ncu-rep")
    require_file("--out", out, ".json")
    require_file("--plot", plot, *PICTURES)
    refuse({"--keep": saved and keep}, "needs a launch, and --from launches nothing")
    suffixes = {Path(given_path).suffix for given_path in (target or saved, compare) if given_path}
    if suffixes <= set(profiles.SAVED):
        refuse({"--set": None if chosen == "quick" else chosen, **file_options}, "needs a launch")
    if suffixes == {".json"}:
        refuse({"--shape": shape}, "cannot change the sizes that a .json profile was made with")

    def make_target(named: str) -> LaunchTarget:
        job = LaunchTarget(named, sizes)
        if job.spec is not None:
            refuse(file_options, f"is for files only: {job.spec.name} has a spec, which says it")
            return job
        refuse({"--shape": shape}, "is for kernels with a spec; a file takes --in, --grid and --block")
        if inputs is None:
            raise expects("--in", "an .npz with the arguments of the kernel by name", "nothing")
        geometry = parse_dimensions("grid", grid or "1"), parse_dimensions("block", block or "32"), shared or 0
        folders = tuple(map(str, include or ()))
        return LaunchTarget(named, {}, str(inputs), *geometry, arch, parse_defines("-D", define or []), folders, std)

    def page(named: str, keep: Path | None) -> Profile:
        if Path(named).suffix in profiles.SAVED:
            return profiles.read_saved(Path(named), sizes)
        return profiles.profile(make_target(named), metric_set=chosen, keep=keep)

    with progress_bar("profile", None, quiet=as_json) as advance:
        advance(target or str(saved))
        pages = [page(target or str(saved), keep)]
        if compare:
            advance(compare)
            pages.append(page(compare, None))
    words = nsight.differences(*pages) if compare else []
    if out is not None:
        nsight.save(pages[0], out)
    if plot is not None:
        from ptxlab.plot import save  # Matplotlib takes half a second that others need not pay
        from ptxlab.profile.plot import page_figure

        save(page_figure(pages, words), plot)
    if as_json:
        values = [entry.to_json() for entry in pages]
        return print_json({"profiles": values, "differences": words} if compare else values[0])
    show(pages, words)
    print_written(out, plot, keep)


def show(pages: Sequence[Profile], words: Sequence[str]) -> None:
    """Print the page, or two beside each other."""
    kernels = [f"{page.kernel}>" for page in pages]
    rows = [("problem", *(sizes_text(page.sizes) or "-" for page in pages))]
    rows += [
        (figure.label, *(nsight.amount(figure, page.figures.get(figure.name)) for page in pages))
        for figure in nsight.FIGURES
        if any(figure.name in page.figures for page in pages)
    ]
    console.print(table(", ".join(dict.fromkeys(page.device for page in pages)), ("", *kernels), rows))
    reasons = sorted({r for page in pages for r in page.stalls}, key=lambda r: -max(o.stalls.get(r, 0) for o in pages))
    cells = [(reason.replace("_", " "), *(f"{page.stalls.get(reason, 0):.1%}" for page in pages)) for reason in reasons]
    console.print(table("Stalls by reason", ("", *kernels), [row for row in cells if set(row[1:]) != {"0.0%"}]))
    for page in pages:
        title = f"{page.kernel}: lines with most stalls ({page.samples:,} warps sampled, {page.issuing:.0%} issuing)"
        console.print(f"[bold]{title}[/]", soft_wrap=True)
        for carrier in page.carriers:
            console.print(escape(_describe_carrier(carrier)), highlight=False, soft_wrap=True)
        console.print()
    for sentence in words:
        console.print(escape(sentence), soft_wrap=True, highlight=False)


def _describe_carrier(carrier: nsight.Carrier) -> str:
    """Format a line's share of the stalls and its two most frequent reasons.

    Its source follows, and its instruction with most stalls.
    """
    top_reasons = list(carrier.reasons.items())[:2]
    reasons = ", ".join(f"{reason.replace('_', ' ')} {share / carrier.share:.0%}" for reason, share in top_reasons)
    texts = [textwrap.shorten(text, _WIDEST, placeholder=" …") for text in (carrier.text, carrier.sass) if text]
    return "\n        ".join([f"{carrier.share:6.1%}  {carrier.where}: {reasons}", *texts])
