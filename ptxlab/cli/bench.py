"""The commands `bench` and `report`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ptxlab import headline, kvpoints, kvtargets, targets, tested
from ptxlab import report as reports
from ptxlab.bench.record import Record
from ptxlab.cli.common import FAILED, AsJson, console, notes, print_json, progress_bar, table


def bench(
    suite: Annotated[str, typer.Argument(help="dequant, load, gemm, attention, emulator, or one kernel.")],
    against: Annotated[
        Path | None, typer.Option(help="A record to compare with: fails if a row got slower, twice.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the record; by default notebooks/results/<gpu>/.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time kernels against their floor on this machine's GPU (the suite emulator: on its CPU), and record it.

    Where gemm_w4a8 or attention_kv4 was measured it is also drawn, and held against what was aimed at.
    """
    from ptxlab import bench as benches

    before = benches.load(against) if against else None  # a file that is no record is found before anything is measured
    with progress_bar(f"bench {suite}", None, quiet=as_json) as advance:
        record = benches.run_suite(suite, progress=advance)
        slower = benches.confirmed(benches.compare(record, before), before, advance) if before else []
    path = benches.save(record, out)
    pictures = _drawn(record, out)
    if as_json:
        print_json(record.to_json())
    else:
        console.print(table(*benches.as_table(record)))
        for measured, aims in ((headline.points(record), targets), (kvpoints.points(record), kvtargets)):
            if measured:
                console.print(table("what was aimed at", targets.COLUMNS, aims.lines(record)))
        for written in (path, *pictures):
            console.print(f"recorded in {escape(str(written))}", soft_wrap=True)
        for line in slower:
            console.print(f"[red]slower[/] {escape(str(line))}")
    if slower:
        raise typer.Exit(FAILED)


def _drawn(record: Record, out: Path | None) -> list[Path]:
    """Pictures of a record that has any: beside `out`, or where the README looks for them."""
    if not headline.points(record) and not kvpoints.points(record):
        return []
    from ptxlab import figures  # Matplotlib takes half a second that other suites need not pay

    folder = out.parent if out else figures.drawn_into()
    return figures.draw_gemm(record, folder) + figures.draw_attention(record, folder)


def report(
    check: Annotated[bool, typer.Option(help="Change nothing; fail if the README is out of date.")] = False,
    figures: Annotated[bool, typer.Option(help="Also redraw notebooks/figures.")] = False,
    notebooks: Annotated[bool, typer.Option(help="Also execute the notebooks and write their .ipynb.")] = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild the README's tables, the headers' figures, pictures and notebooks from the specs and the records.

    With --check, also name the kernels whose sources changed since the recorded GPU tests; that is no failure.
    """
    changed = reports.update(write=not check)
    if figures:
        from ptxlab import figures as drawings

        changed += drawings.draw_all()
    if notebooks:
        from ptxlab import notebooks as books

        scripts = books.scripts()
        with progress_bar("notebooks", len(scripts), quiet=as_json) as advance:
            for script in scripts:
                advance(script.name)
                changed.append(books.build(script))
    if as_json:
        print_json([str(path) for path in changed])
    else:
        console.print(
            "\n".join(f"{'out of date' if check else 'updated'}: {path}" for path in changed) or "all up to date"
        )
    if check:
        for line in tested.warnings():
            notes.print(f"[yellow]{escape(line)}[/]", soft_wrap=True)
        if changed:
            raise typer.Exit(FAILED)
