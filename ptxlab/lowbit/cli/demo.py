"""The command `demo`: trained weights through every dequantiser, checked and drawn."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ptxlab import gpu
from ptxlab.cli.common import FAILED, AsJson, Backend, console, download_bar, print_json, progress_bar, table
from ptxlab.lowbit import demo as demos

PANEL = "Project"


def demo(
    out: Annotated[Path, typer.Option(help="Where to write the picture.")] = Path("ptxlab-demo.png"),
    backend: Backend = None,
    as_json: AsJson = False,
) -> None:
    """Quantise trained weights, run every dequantiser on them, check every bit, and draw what happened.

    Downloads the weights first (84 MB, once); generates some where that is not possible.
    """
    from ptxlab import plot  # Matplotlib takes half a second that other commands need not pay
    from ptxlab.lowbit.demo.plot import demo_figure

    plot.require_writable(out)
    with download_bar(demos.TRAINED, quiet=as_json) as progress:
        weights_name, matrices = demos.weights(progress)
    if not as_json:
        count = sum(w.size for w in matrices.values())
        console.print(f"[bold]{count:,} weights[/]: {escape(weights_name)}", highlight=False, soft_wrap=True)
    with progress_bar("demo", demos.steps(), quiet=as_json) as advance:
        rows = list(demos.rows(matrices, backend=backend, advance=advance))
    plot.save(demo_figure(rows, matrices, weights_name), out)
    if as_json:
        print_json({"weights": weights_name, "rows": [asdict(row) for row in rows], "picture": str(out)})
    else:
        console.print(_demo_table(rows))
        _explain(rows)
        _what_next(out)
    if not all(row.as_predicted for row in rows):
        raise typer.Exit(FAILED)


def _demo_table(rows: list[demos.DemoRow]) -> Table:
    columns = ("dequant_...", "weights", "exact?", *(f"±{r}>" for r in demos.RANGES), "ALU/8>", "error>")
    return table(" " * 42 + "overflows at range", columns, [_cells(row) for row in rows])


def _cells(row: demos.DemoRow) -> list[str]:
    exact_text = "yes" if not row.wrong else f"{row.wrong / row.weights:.0%} wrong*"
    if not row.as_predicted:
        exact_text = "FAILED"
    overflows = [f"{row.overflows[protective_range]:,}" if row.overflows else "-" for protective_range in demos.RANGES]
    alu = "-" if row.alu_per_8 is None else f"{row.alu_per_8:g}"
    return [row.kernel.removeprefix("dequant_"), row.scheme, exact_text, *overflows, alu, f"{row.relative_error:.4f}"]


def _explain(rows: list[demos.DemoRow]) -> None:
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
    lines = [f"{command:<62}{explanation}" for command, explanation in demos.next_commands()]
    console.print(
        f"Picture: {escape(str(picture))}\n\nNext:  " + "\n       ".join(lines), highlight=False, soft_wrap=True
    )
    if hint := gpu.unused_gpu_hint():
        console.print(f"[yellow]{escape(hint)}[/]", soft_wrap=True)
