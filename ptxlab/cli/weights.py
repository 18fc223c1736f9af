"""Commands on this machine and on weights: `demo`, `doctor`, `audit`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ptxlab import demo as demos
from ptxlab import doctor as doctors
from ptxlab import gpu, kvdemo
from ptxlab.cli.common import FAILED, AsJson, Backend, console, print_json, progress_bar, table
from ptxlab.errors import UnavailableError
from ptxlab.io import checkpoint
from ptxlab.io.files import write_text
from ptxlab.weights import audit as audits


def demo(
    out: Annotated[Path, typer.Option(help="Where to write the picture.")] = Path("ptxlab-demo.png"),
    backend: Backend = None,
    as_json: AsJson = False,
) -> None:
    """Quantise real trained weights, run every dequantiser on them, check every bit, and draw what happened.

    Then attention over a quantised KV cache, on real text through the same layers.
    """
    from ptxlab import plot  # Matplotlib takes half a second that other commands need not pay
    from ptxlab.demo.plot import demo_figure

    plot.format_of(out)
    what, matrices = demos.weights()
    count = sum(w.size for w in matrices.values())
    if not as_json:
        console.print(f"[bold]{count:,} weights[/]: {escape(what)}", highlight=False, soft_wrap=True)
    model = checkpoint.demo_checkpoint()
    with progress_bar("demo", demos.steps() + (model is not None), quiet=as_json) as advance:
        rows = list(demos.rows(matrices, backend=backend, advance=advance))
        caches = None
        if model is not None:
            advance("attention over a quantised cache")
            caches = kvdemo.cache_table(model)
    plot.save(demo_figure(rows, matrices, what), out)
    if as_json:
        attention = None if caches is None else asdict(caches)
        print_json(
            {"weights": what, "rows": [asdict(row) for row in rows], "attention": attention, "picture": str(out)}
        )
    else:
        console.print(_demo_table(rows))
        _explain(rows)
        if caches is not None:
            console.print(_cache_table(caches))
            _explain_caches(caches)
        _what_next(out)
    if not all(row.as_predicted for row in rows):
        raise typer.Exit(FAILED)


def _demo_table(rows: list[demos.Row]) -> Table:
    columns = ("dequant_...", "weights", "exact?", *(f"±{r}>" for r in demos.RANGES), "ALU/8>", "error>")
    return table(" " * 42 + "overflows at range", columns, [_cells(row) for row in rows])


def _cells(row: demos.Row) -> list[str]:
    exact = "yes" if not row.wrong else f"{row.wrong / row.weights:.0%} wrong*"
    if not row.as_predicted:
        exact = "FAILED"
    overflows = [f"{row.overflows[r]:,}" if row.overflows else "-" for r in demos.RANGES]
    alu = "-" if row.alu_per_8 is None else f"{row.alu_per_8:g}"
    return [row.kernel.removeprefix("dequant_"), row.scheme, exact, *overflows, alu, f"{row.relative_error:.4f}"]


def _cache_table(caches: kvdemo.CacheTable) -> Table:
    columns = ("KV cache", "bits/element>", "error>", "worst layer>")
    cells = [(row.cache, f"{row.bits:g}", f"{row.error:.4f}", f"{row.worst:.4f}") for row in caches.rows]
    return table("attention over a quantised cache", columns, cells)


def _explain_caches(caches: kvdemo.CacheTable) -> None:
    console.print(
        f"{caches.inputs}, by the NumPy references; errors are relative, of attention's outputs.\n"
        "Smoothing moves outliers of the keys into the queries, calibrated on the text that follows. Here no channel\n"
        f"exceeds {caches.outlier:.1f} times the median of its head; large models have channels of 10 (QServe §4.2).\n",
        highlight=False,
        soft_wrap=True,
    )


def _explain(rows: list[demos.Row]) -> None:
    backend = {"gpu": "the GPU", "emulator": "the PTX emulator, on this CPU"}[rows[0].backend]
    console.print(
        f"Each row is a hand-written .ptx file, run by {backend}, every weight compared with the NumPy reference.\n"
        "* by design: it subtracts the zero point before the packed multiplication; wrong exactly where predicted.\n"
        f"ALU/8: arithmetic instructions per 8 weights in sm_90a machine code, {rows[0].alu_source}.\n"
        "error: relative, the Frobenius norm of what quantising changed over that of the weights.\n",
        highlight=False,
        soft_wrap=True,
    )


def _what_next(picture: Path) -> None:
    console.print(
        f"Picture: {escape(str(picture))}\n\n"
        "Next:  ptxlab show dequant_lqq                                the kernel, commented\n"
        "       ptxlab verify --all                                    every kernel against its reference\n"
        "       ptxlab sass dequant_qoq_vadd4 dequant_qoq_vadd4_s32    why the spelling matters\n"
        "       ptxlab doctor                                          what else this machine could do",
        highlight=False,
        soft_wrap=True,
    )
    if hint := gpu.unused_gpu():
        console.print(f"[yellow]{escape(hint)}[/]", soft_wrap=True)


def doctor(as_json: AsJson = False) -> None:
    """Say what is installed, which backends work, and what to install for the rest."""
    items = doctors.examine()
    if as_json:
        return print_json([item.to_json() for item in items])
    cells = [(item.name, "yes" if item.works else "no", item.detail, item.remedy) for item in items]
    console.print(table("", ("", "here", "what", "to get it"), cells))


def audit(
    file: Annotated[Path | None, typer.Argument(help="A .safetensors checkpoint; by default the demo's.")] = None,
    tensor: Annotated[str, typer.Option(help="Glob over tensor names.")] = "*",
    scheme: Annotated[list[str] | None, typer.Option(help="qoq, lqq; may be repeated. Default: both.")] = None,
    protective_range: Annotated[
        list[int] | None, typer.Option("--range", help="May be repeated; default 119, 120, 127.")
    ] = None,
    group: Annotated[int, typer.Option(help="Weights per level-2 scale: 32, 64 or 128.")] = 128,
    picture: Annotated[Path | None, typer.Option("--plot", help="Write a picture (.png, .svg, .pdf).")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to a file as well.")] = None,
    as_json: AsJson = False,
) -> None:
    """Count, per tensor, the weights that each scheme would overflow at each protective range, and the error."""
    file = file or checkpoint.demo_checkpoint()
    if file is None:
        raise UnavailableError("demo weights: not installed; python -m pip install 'ptxlab[demo]', or name a file")
    if picture is not None:
        from ptxlab import plot
        from ptxlab.weights.plot import audit_figure

        plot.format_of(picture)
    schemes = tuple(scheme or ("qoq", "lqq"))
    ranges = tuple(protective_range or demos.RANGES)
    rows: list[audits.AuditRow] = []
    skipped: list[audits.SkippedTensor] = []
    with progress_bar("audit", None, quiet=as_json) as advance:
        found = audits.audit_file(
            file,
            pattern=tensor,
            schemes=schemes,
            ranges=ranges,
            group=group,
            progress=lambda _done, _all, name: advance(name),
        )
        for item in found:
            if isinstance(item, audits.AuditRow):
                rows.append(item)
            else:
                skipped.append(item)
    if picture is not None:
        plot.save(audit_figure(rows, file.name), picture)
    found_json = [asdict(row) for row in rows] + [asdict(item) for item in skipped]
    if out is not None:
        write_text(out, json.dumps(found_json, indent=1) + "\n")
    if as_json:
        return print_json(found_json)
    columns = ("tensor", "scheme", "range>", "weights>", "overflows>", "clipped>", "error>")
    cells = [
        (
            r.tensor,
            r.scheme,
            f"±{r.protective_range}",
            f"{r.weights:,}",
            f"{r.overflows:,}",
            "-" if r.clipped is None else f"{r.clipped:,}",
            "-" if r.relative_error is None else f"{r.relative_error:.4f}",
        )
        for r in rows
    ]
    if cells:
        console.print(table(f"{file.name}, group {group}", columns, cells))
    for item in skipped:
        console.print(f"[dim]skipped {escape(item.tensor)}: {escape(item.reason)}[/]", highlight=False)
