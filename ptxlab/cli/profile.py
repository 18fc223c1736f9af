"""The command `profile`: what one launch of a kernel does to the machine, on a page."""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ptxlab import nsight
from ptxlab.cli.common import (
    AsJson,
    Backend,
    Block,
    Define,
    FileArch,
    Grid,
    Shared,
    console,
    dims,
    print_json,
    progress_bar,
    table,
)
from ptxlab.cli.timelines import profile_timeline
from ptxlab.errors import ArgumentError
from ptxlab.io.files import require_folder
from ptxlab.nsight import Profile
from ptxlab.profile import launch_target, profiles, stalls
from ptxlab.runtime.arguments import parse_integers, parse_sizes

_WIDEST = 100  # characters of a source line


def profile(
    target: Annotated[str | None, typer.Argument(help="NAME, NAME.cu, or FILE[:entry].")] = None,
    shape: Annotated[str | None, typer.Option(help="Sizes of the problem, M=64,N=4096,K=4096,g=128.")] = None,
    compare: Annotated[
        str | None, typer.Option(help="Beside it: another NAME or FILE, a saved .ncu-rep or .json.")
    ] = None,
    chosen: Annotated[str, typer.Option("--set", help="quick: the page's figures; full: all that ncu has.")] = "quick",
    saved: Annotated[Path | None, typer.Option("--from", help="A saved .ncu-rep or .json instead of a launch.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Where to leave ncu's report, a .ncu-rep; the --timeline, a .json. See --from.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page: .json, or drawn as .png, .svg or .pdf.")
    ] = None,
    in_stalls: Annotated[
        bool, typer.Option("--stalls", help="Instead: what dequantisation costs in stalls (LiquidGEMM §3.2), recorded.")
    ] = False,
    timeline: Annotated[
        bool,
        typer.Option("--timeline", help="Instead: what warp groups did when. --out: a picture; .json is for Perfetto."),
    ] = False,
    record: Annotated[bool, typer.Option("--record", help="Keep the timeline under notebooks/results.")] = False,
    backend: Backend = None,
    inputs: Annotated[
        Path | None, typer.Option("--in", help=".npz with the arguments by name; for files only.")
    ] = None,
    grid: Grid = None,
    block: Block = None,
    shared: Shared = None,
    arch: FileArch = None,
    define: Define = None,
    as_json: AsJson = False,
) -> None:
    """Launch a kernel once, warmed up, under Nsight Compute, and put on a page what it did and what it waited for."""
    of_files = {"--in": inputs, "--grid": grid, "--block": block, "--shared": shared, "--arch": arch, "-D": define}
    of_pages = {"--compare": compare, "--set": None if chosen == "quick" else chosen, **of_files}
    of_timelines = {"--backend": backend, "--record": record or None}
    sizes = parse_sizes("--shape", shape) if shape is not None else {}
    kept = ".json" if timeline else ".ncu-rep"
    if keep is not None and keep.suffix != kept:
        raise ArgumentError("--keep", f"a {kept}", keep)
    _refuse({"--keep": saved and keep}, "none with --from, which launches nothing")
    for path in filter(None, (out, keep)):
        require_folder(path)
    if in_stalls:
        others = {"target": target, "--shape": shape, "--from": saved, "--timeline": timeline or None}
        _refuse({**others, **of_pages, **of_timelines}, "none with --stalls")
        if out is not None and out.suffix != ".json":
            raise ArgumentError("--out", "a .json with --stalls", out)
        return _stalls(out, keep, as_json)
    if timeline:
        _refuse(of_pages, "none with --timeline")
        _refuse({"--shape": saved and shape, "--backend": saved and backend}, "none with --from, which has its own")
        return profile_timeline(
            target, sizes, backend=backend, saved=saved, out=out, keep=keep, record=record, as_json=as_json
        )
    _refuse(of_timelines, "with --timeline only")
    if chosen not in nsight.SETS:
        raise ArgumentError("--set", f"one of {', '.join(nsight.SETS)}", chosen)
    if (target is None) == (saved is None):
        raise ArgumentError("target", "a kernel, or a report with --from", target or "neither")
    if saved is not None and saved.suffix not in profiles.SAVED:
        raise ArgumentError("--from", f"a {' or '.join(profiles.SAVED)}", saved)
    read = {Path(named).suffix for named in (target or saved, compare) if named}
    if read <= set(profiles.SAVED):
        _refuse({"--set": of_pages["--set"], **of_files}, "none where nothing is launched")
    if read == {".json"}:
        _refuse({"--shape": shape}, "none of a .json, which has its own")
    write = _writer(out) if out is not None else None

    def job(named: str) -> launch_target.Job:
        made = launch_target.Job(named, sizes)
        if made.spec is not None:
            _refuse(of_files, f"for files only: the spec of {made.spec.name} says it")
            return made
        _refuse({"--shape": shape}, "for kernels with a spec; a file takes --in, --grid and --block")
        if inputs is None:
            raise ArgumentError("--in", "an .npz with the arguments of the kernel by name", "nothing")
        geometry = dims("grid", grid or "1"), dims("block", block or "32"), shared or 0
        return launch_target.Job(named, {}, str(inputs), *geometry, arch, parse_integers("-D", define or []))

    def made(named: str, keep: Path | None) -> Profile:
        if Path(named).suffix in profiles.SAVED:
            return profiles.saved(Path(named), sizes)
        return profiles.profile(job(named), chosen=chosen, keep=keep)

    with progress_bar("profile", None, quiet=as_json) as advance:
        advance(target or str(saved))
        found = [made(target or str(saved), keep)]
        if compare:
            advance(compare)
            found.append(made(compare, None))
    words = nsight.differences(*found) if compare else []
    if write is not None:
        write(found, words)
    if as_json:
        values = [one.to_json() for one in found]
        return print_json({"profiles": values, "differences": words} if compare else values[0])
    show(found, words)
    if out is not None:
        console.print(f"written: {escape(str(out))}", soft_wrap=True)


def _writer(out: Path) -> Callable[[Sequence[Profile], Sequence[str]], None]:
    """Writes the first profile as JSON, or all of them as a picture; ArgumentError for another kind of file."""
    if out.suffix == ".json":
        return lambda found, _: nsight.save(found[0], out)
    from ptxlab import plot
    from ptxlab.profile import plot as profileplot  # Matplotlib takes half a second that others need not pay

    plot.format_of(out)
    return lambda found, words: plot.save(profileplot.page_figure(found, words), out)


def show(found: Sequence[Profile], words: Sequence[str]) -> None:
    """Print the page, or two beside each other."""
    names, kernels = [f"{one}>" for one in found], [f"{one.kernel}>" for one in found]
    rows = [
        (figure.label, *(nsight.amount(figure, one.figures.get(figure.name)) for one in found))
        for figure in nsight.FIGURES
        if any(figure.name in one.figures for one in found)
    ]
    console.print(table(", ".join(dict.fromkeys(one.device for one in found)), ("", *names), rows))
    reasons = sorted({r for one in found for r in one.stalls}, key=lambda r: -max(o.stalls.get(r, 0) for o in found))
    cells = [(reason.replace("_", " "), *(f"{one.stalls.get(reason, 0):.1%}" for one in found)) for reason in reasons]
    console.print(table("Stalls by reason", ("", *kernels), [row for row in cells if set(row[1:]) != {"0.0%"}]))
    for one in found:
        console.print(f"[bold]{one.kernel}: where {one.samples:,} sampled warps waited ({one.issuing:.0%} issued)[/]")
        for carrier in one.carriers:
            console.print(escape(_carried(carrier)), highlight=False, soft_wrap=True)
        console.print()
    for sentence in words:
        console.print(escape(sentence), soft_wrap=True, highlight=False)


def _carried(carrier: nsight.Carrier) -> str:
    """A line's share of the stalls, its two most frequent reasons, its source, its instruction with most of them."""
    most = list(carrier.reasons.items())[:2]
    reasons = ", ".join(f"{reason.replace('_', ' ')} {share / carrier.share:.0%}" for reason, share in most)
    texts = [textwrap.shorten(text, _WIDEST, placeholder=" …") for text in (carrier.text, carrier.sass) if text]
    return "\n        ".join([f"{carrier.share:6.1%}  {carrier.where}: {reasons}", *texts])


def _refuse(options: dict[str, Any], rule: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise ArgumentError(name, rule, value)


def _stalls(out: Path | None, keep: Path | None, as_json: bool) -> None:
    with progress_bar("stalls", None, quiet=as_json) as advance:
        advance(f"{len(stalls.KERNELS)} kernels on the FFN of LLaMA-2-7B")
        record = stalls.measure(keep)
    path = stalls.save(record, out)
    if as_json:
        return print_json([vars(row) for row in record.rows])
    head, *rows = stalls.table(record.rows)
    console.print(table("Subtraction, of all dequantisation: shares of the stalls", head, rows))
    console.print(f"recorded in {escape(str(path))}", soft_wrap=True)
