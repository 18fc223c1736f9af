"""The command `quantize`: a checkpoint in, a checkpoint of packed weights out."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ptxlab.cli.common import AsJson, console, print_json, progress_bar, table
from ptxlab.weights import convert


def quantize(
    file: Annotated[Path, typer.Argument(help="A .safetensors checkpoint.")],
    out: Annotated[Path, typer.Option(help="Where to write the packed checkpoint.")],
    scheme: Annotated[str, typer.Option(help="lqq, qoq or qoq_channel.")] = "lqq",
    group: Annotated[int, typer.Option(help="Weights per level-2 scale: 32, 64 or 128.")] = 64,
    layout: Annotated[
        str, typer.Option(help="strips (of the fastest kernels), dual_mma, qserve, comet, row_major.")
    ] = "strips",
    tensor: Annotated[str, typer.Option(help="Glob over tensor names; embeddings only if it names them.")] = "*",
    as_json: AsJson = False,
) -> None:
    """Quantise and pack the matrices of a checkpoint, copy the rest, and load the result again to compare every bit."""
    conversion = convert.plan(file, scheme=scheme, group=group, layout=layout, pattern=tensor)
    with progress_bar("quantize", conversion.steps, quiet=as_json) as advance:
        conversion.write(out, advance)
        conversion.verify(out, advance)
    if as_json:
        return print_json([_row(planned) for planned in conversion.tensors])
    packed = [planned for planned in conversion.tensors if planned.fields]
    copied = [planned for planned in conversion.tensors if not planned.fields]
    cells = [
        (p.info.name, "x".join(map(str, p.info.shape)), f"{p.info.nbytes:,}", f"{p.nbytes:,}", f"{p.bits:.2f}")
        for p in packed
    ]
    what = scheme if scheme == "qoq_channel" else f"{scheme}, group {group}"
    title = f"{file.name}: {what}, {layout}; loaded again, equal in every bit"
    console.print(table(title, ("tensor", "shape>", "bytes>", "packed bytes>", "bits per weight>"), cells))
    for planned in copied:
        if planned.selected:
            console.print(
                f"[dim]copied {escape(f'{planned.described}: {planned.reason}')}[/]", highlight=False, soft_wrap=True
            )
    console.print(f"{len(packed)} packed, {len(copied)} copied: {escape(str(out))}", soft_wrap=True, highlight=False)


def _row(planned: convert.PlannedTensor) -> dict[str, Any]:
    return {
        "tensor": planned.info.name,
        "shape": list(planned.info.shape),
        "packed": planned.fields,
        "copied_because": planned.reason,
        "bytes_before": planned.info.nbytes,
        "bytes": planned.nbytes,
    }
