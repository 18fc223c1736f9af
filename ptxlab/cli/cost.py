"""The command `cost`: what the cost model says of a GPU, and of a GEMM on it."""

from typing import Annotated

import typer

from ptxlab import cost as model
from ptxlab import costtables
from ptxlab.cli.common import AsJson, console, print_json, table
from ptxlab.errors import ArgumentError
from ptxlab.runtime.arguments import parse_sizes

_AXES = ("M", "N", "K")


def cost(
    device: Annotated[str, typer.Option(help="A GPU; without --shape all are shown.")] = "h200-measured",
    shape: Annotated[str | None, typer.Option(help="Tokens, output and input channels, M=64,N=4096,K=4096.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a GEMM costs by LiquidGEMM's model, scheme by scheme; without a shape, what sets it on every GPU."""
    gpu = model.device(device)
    if shape is None:
        if as_json:
            return print_json([costtables.device_json(each) for each in model.DEVICES.values()])
        title = "GPUs by their data sheets, and as measured"
        console.print(table(title, costtables.DEVICE_COLUMNS, costtables.device_lines()))
        return console.print(f"{costtables.RATES} {costtables.LEGEND}", style="dim")
    sizes = parse_sizes("--shape", shape)
    if set(sizes) != set(_AXES):
        raise ArgumentError("--shape", "M=..,N=..,K=..", shape)
    found = costtables.entries(gpu, **sizes)
    if as_json:
        return print_json({"device": costtables.device_json(gpu), **sizes, "schemes": [e.to_json() for e in found]})
    title = f"{', '.join(f'{axis} = {sizes[axis]}' for axis in _AXES)} on {gpu.name} ({gpu.source}), µs"
    console.print(table(title, costtables.SCHEME_COLUMNS, costtables.scheme_lines(found)))
    console.print(f"{costtables.TIMES} {costtables.LEGEND}", style="dim")
