"""The command `cost`: what the cost model says of a GPU, and of a GEMM on it."""

from typing import Annotated

import typer

from ptxlab import cost as model
from ptxlab.bench import counts
from ptxlab.cli.common import AsJson, console, print_json, table
from ptxlab.cost import tables
from ptxlab.errors import ArgumentError
from ptxlab.runtime.arguments import parse_sizes

_AXES = ("M", "N", "K")
_DEVICE = "h200-measured"


def cost(
    device: Annotated[
        str | None, typer.Option(help=f"A GPU. Default: all without --shape, {_DEVICE} with it.", show_default=False)
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Tokens, output and input channels: M=64,N=4096,K=4096.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict what a GEMM costs in each scheme (LiquidGEMM's model); without --shape, list each GPU's limits."""
    if shape is None:
        devices = [model.device(device)] if device is not None else list(model.DEVICES.values())
        if as_json:
            return print_json([tables.device_json(each) for each in devices])
        title = "GPUs by their data sheets, and as measured"
        console.print(table(title, tables.DEVICE_COLUMNS, tables.device_lines(devices)))
        return console.print(f"{tables.RATES} {tables.LEGEND}", style="dim")
    gpu = model.device(device or _DEVICE)
    sizes = parse_sizes("--shape", shape)
    if set(sizes) != set(_AXES):
        raise ArgumentError("--shape", "M=..,N=..,K=..", shape)
    found = tables.entries(gpu, **sizes, alpha_of=counts.alpha_of)
    if as_json:
        return print_json({"device": tables.device_json(gpu), **sizes, "schemes": [e.to_json() for e in found]})
    title = f"{', '.join(f'{axis} = {sizes[axis]}' for axis in _AXES)} on {gpu.name} ({gpu.source}), µs"
    console.print(table(title, tables.SCHEME_COLUMNS, tables.scheme_lines(found)))
    console.print(f"{tables.TIMES} {tables.LEGEND}", style="dim")
