"""The command `import`: a checkpoint that others have quantised in, packed weights out."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ptxlab.cli.common import AsJson, console, print_json, print_written, progress_bar, table
from ptxlab.llm.checkpoints.imports import import_checkpoint
from ptxlab.llm.checkpoints.open import is_quantized, missing
from ptxlab.llm.checkpoints.rewrite import rewrite_folder

PANEL = "Weights"


def import_(
    source: Annotated[
        Path, typer.Argument(help="A file (.safetensors, .pt, .bin) or the folder of a Hugging Face model.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to make of a model, or the file to make of a file.")],
    layout: Annotated[
        str, typer.Option(help="strips (which the fastest kernels read), dual_mma, qserve, comet, row_major.")
    ] = "strips",
    unchecked: Annotated[bool, typer.Option(help="Also take groups that overflow, and list them.")] = False,
    as_json: AsJson = False,
) -> None:
    """Import a checkpoint of QServe, compressed-tensors, GPTQ or AWQ, or rewrite a folder of an earlier ptxlab.

    Integers are taken over exactly where a scheme here holds them, else rounded, with the error shown. Nothing in a
    file is executed. A folder of `ptxlab quantize` is written anew, in another packing if asked, without rounding.
    """
    if not source.exists():
        raise missing(source, "no such file or folder")
    if is_quantized(source):
        with progress_bar("rewrite", None, quiet=as_json) as advance:
            rewrite_folder(source, out, layout=layout, progress=advance)
        return print_json({"out": str(out)}) if as_json else print_written(out)
    with progress_bar("import", None, quiet=as_json) as advance:
        rows = import_checkpoint(source, out, layout=layout, unchecked=unchecked, progress=advance)
    if as_json:
        return print_json([asdict(row) for row in rows])
    table_rows = [
        (
            row.name,
            "x".join(map(str, row.shape)),
            row.scheme if row.scheme == "qoq_channel" else f"{row.scheme}, group {row.group}",
            "exact" if row.relative_error is None else f"{row.relative_error:.4f}",
            *(f"{count:,} of {row.groups:,}" if count else "-" for count in (row.requantised, row.overflows)),
        )
        for row in rows
    ]
    title = f"{source.name}: {', '.join(sorted({row.format for row in rows}))}; relative errors, groups"
    columns = ("matrix", "shape>", "scheme", "error>", "requantised>", "overflows>")
    console.print(table(title, columns, table_rows))
    for row in rows:
        if row.overflows:
            console.print(f"{row.name}: first overflow: {row.overflow}", highlight=False, soft_wrap=True, markup=False)
    print_written(out)
