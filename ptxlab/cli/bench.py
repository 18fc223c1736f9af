"""The command `bench`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ptxlab.cli.common import FAILED, AsJson, console, print_json, print_note, print_written, progress_bar, table
from ptxlab.errors import UnavailableError

if TYPE_CHECKING:
    from ptxlab.bench import Suite

PANEL = "Measure"


Against = Annotated[Path | None, typer.Option(help="Compare with a record; fail if a row got slower.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Where to write the record; default: notebooks/results/<gpu>/, here for FILE.py or no checkout."),
]
Only = Annotated[
    list[str] | None,
    typer.Option(help="Of a suite, one part: of gemm w4a4, g64, compute_80, 7B, 70B; of attention table1, rotation."),
]
Picture = Annotated[Path | None, typer.Option("--plot", help="Plot the record (.png, .svg, .pdf).")]


def bench(
    suite: Annotated[str, typer.Argument(help="dequant, load, gemm, attention, emulator, a kernel, FILE.py.")],
    against: Against = None,
    out: Out = None,
    picture: Picture = None,
    only: Only = None,
    as_json: AsJson = False,
) -> None:
    """Time kernels against their floor on this machine's GPU (the suite emulator: on its CPU), and record it."""
    measure_suite(suite, against=against, out=out, picture=picture, only=only or (), as_json=as_json)


def measure_suite(
    suite: "str | Suite",
    *,
    against: Path | None,
    out: Path | None,
    picture: Path | None,
    only: Sequence[str],
    as_json: bool,
    libraries: Mapping[str, str] | None = None,
    **options: Any,
) -> None:
    """Measure a suite, record it, print it, and compare it with a record; `options` are the suite's, such as `peers`.

    Raises typer.Exit with `FAILED` if a row got slower, and what `bench.run_suite` raises.
    """
    from ptxlab import bench as benches
    from ptxlab import plot

    chosen = suite if isinstance(suite, benches.Suite) else None
    name = chosen.name if chosen else str(suite)
    benches.require_writable(name, out)  # whatever is wrong with a file is found before anything is measured
    if picture is not None:
        plot.require_writable(picture)
    baseline = benches.load(against) if against else None
    resumed_path, partial_path = _resumed_paths(chosen or benches.named_suite(name), out, only)
    keeps = f"rows measured are in {partial_path or resumed_path}: the same command goes on behind them"
    with progress_bar(
        f"bench {name}", None, quiet=as_json, keeps=keeps if resumed_path else "nothing is kept"
    ) as advance:
        record = benches.run_suite(
            suite, advance, only=only, resume=resumed_path, libraries=libraries, say=print_note, **options
        )
        slower = benches.confirm_slower(benches.compare(record, baseline), baseline, advance) if baseline else []
    path = benches.save(record, out)
    if partial_path is not None:
        partial_path.unlink(missing_ok=True)
    if picture is not None:
        from ptxlab.bench.plot import record_figure

        plot.save(record_figure(record), picture)
    if as_json:
        print_json(record.to_json())
    else:
        console.print(f"[bold]{escape(benches.title(record))}[/]", highlight=False)
        for title, columns, rows in benches.as_tables(record):
            console.print(table(title, columns, rows))
        print_written(path, picture)
        for line in slower:
            console.print(f"[red]slower[/] {escape(str(line))}")
    if slower:
        raise typer.Exit(FAILED)


def _resumed_paths(suite: "Suite", out: Path | None, only: Sequence[str]) -> tuple[Path | None, Path | None]:
    """Return the record of a suite that goes on where it stopped, and the file with its sections if it keeps them."""
    from ptxlab import bench as benches

    if not (suite.resumes or suite.keeps):
        return None, None
    try:
        resumed_path = out or benches.resumed_path(suite, only)
    except UnavailableError:  # without a GPU, which is said once the kernels are found
        return None, None
    return resumed_path, benches.partial_path(resumed_path) if suite.keeps else None
