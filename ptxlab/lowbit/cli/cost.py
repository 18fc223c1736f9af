"""The commands `cost` and `cost schedule`: models of a GPU, of a GEMM on it, and of COMET's schedules."""

import math
from typing import Annotated

import typer

from ptxlab.cli.common import (
    PICTURES,
    AsJson,
    Plot,
    console,
    expects,
    print_json,
    print_written,
    refuse,
    require_file,
    table,
)
from ptxlab.errors import ArgumentError
from ptxlab.lowbit import cost as model
from ptxlab.lowbit.bench import counts
from ptxlab.lowbit.cost import published, tables
from ptxlab.lowbit.cost.schedule import (
    COMET,
    COMET_INT4,
    COMET_SMS,
    SCHEDULES,
    TILE,
    Costs,
    grid,
    int8_blocks,
    layer_speedups,
    rate_bound,
)
from ptxlab.lowbit.model_shapes import shape_of
from ptxlab.runtime.arguments import parse_sizes

PANEL = "Measure"

_AXES = ("M", "N", "K")
_DEVICE = "h200-measured"
_SHAPE = {"M": 512, "N": 4096, "K": 4096}


def cost(
    context: Annotated[typer.Context, "its subcommand, if one is asked for"],
    device: Annotated[
        str | None,
        typer.Option(help=f"A GPU. Default: all, or {_DEVICE} with --shape or --scheme.", show_default=False),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Tokens, output and input channels. Default with --scheme: M=512,N=4096,K=4096."),
    ] = None,
    scheme: Annotated[str | None, typer.Option(help="Only these: w4a8-lqq,w4a4; w4a4 means every W4A4 scheme.")] = None,
    papers: Annotated[bool, typer.Option("--papers", help="Compare the model with W4A4 results in papers.")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict a GEMM's time in each scheme (LiquidGEMM's model); without --shape, list each GPU's limits."""
    if context.invoked_subcommand is not None:
        return refuse(
            {
                "--device": device,
                "--shape": shape,
                "--scheme": scheme,
                "--papers": papers or None,
                "--json": as_json or None,
            },
            f"is no option of `{context.invoked_subcommand}`: leave it out",
        )
    if papers:
        refuse({"--device": device, "--shape": shape, "--scheme": scheme}, "cannot be combined with --papers")
        return _papers(as_json)
    if shape is None and scheme is None:
        devices = [model.device(device)] if device is not None else list(model.DEVICES.values())
        if as_json:
            return print_json([tables.device_json(gpu_model) for gpu_model in devices])
        title = "GPUs by their data sheets, and as measured"
        console.print(table(title, tables.DEVICE_COLUMNS, tables.device_lines(devices)))
        return console.print(f"{tables.RATES} {tables.LEGEND}", style="dim")
    gpu = model.device(device or _DEVICE)
    sizes = parse_sizes("--shape", shape) if shape is not None else _SHAPE
    if set(sizes) != set(_AXES):
        raise ArgumentError("--shape", "M=..,N=..,K=..", shape)
    chosen_schemes = model.schemes(scheme) if scheme is not None else None
    costs = tables.entries(gpu, **sizes, counts_of=counts.loop_counts, schemes=chosen_schemes)
    if as_json:
        return print_json({"device": tables.device_json(gpu), **sizes, "schemes": [e.to_json() for e in costs]})
    title = f"{', '.join(f'{axis} = {sizes[axis]}' for axis in _AXES)} on {gpu.name} ({gpu.source}), µs"
    console.print(table(title, tables.SCHEME_COLUMNS, tables.scheme_lines(costs)))
    console.print(f"{tables.TIMES} {tables.LEGEND} {tables.LOOPS}", style="dim")


def _papers(as_json: bool) -> None:
    predictions = published.predictions(counts.loop_counts)
    if as_json:
        return print_json(
            [
                {**vars(prediction.figure), "in_turn": prediction.in_turn, "overlapped": prediction.overlapped}
                for prediction in predictions
            ]
        )
    console.print(
        table("What papers report, and the model", tables.PUBLISHED_COLUMNS, tables.published_lines(predictions))
    )
    console.print(tables.PUBLISHED, style="dim")


def schedule(
    name: Annotated[str, typer.Option("--model", help="A model by name.")] = "LLaMA-3-8B",
    tokens: Annotated[int, typer.Option(help="Tokens (rows of the activations).")] = 64,
    sms: Annotated[int, typer.Option(help="Streaming multiprocessors.")] = COMET_SMS,
    int4: Annotated[float, typer.Option(help="Share of INT4 blocks, 0 to 1.")] = COMET_INT4,
    int8_cost: Annotated[float, typer.Option(help="Time of an INT8 tile, in INT4 tiles.")] = 2.0,
    conversion: Annotated[float, typer.Option(help="Time to convert an INT8 tile's weights, in INT4 tiles.")] = 0.0,
    spread: Annotated[
        bool, typer.Option("--spread", help="Spread the INT8 blocks along K, rather than put them last.")
    ] = False,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Simulate COMET's tile schedules on a model's matrices; --plot draws the output projection's."""
    require_file("--plot", plot, *PICTURES)
    if tokens < 1:
        raise expects("--tokens", "1 or more", tokens)
    if not 0 <= int4 <= 1:
        raise expects("--int4", "a share of 0 to 1", int4)
    costs = Costs(1.0, int8_cost, conversion)
    shape = shape_of(name, "--model")
    speedups = layer_speedups([*shape.matrices.values()], tokens, sms, costs, int4_share=int4, spread=spread)
    bound = rate_bound(int4, costs.ratio)
    if as_json:
        print_json(
            {"model": name, "tokens": tokens, "sms": sms, "ratio": costs.ratio, "bound": bound, "over_w4a8": speedups}
        )
    else:
        title = f"{name}, {tokens} tokens, {sms} SMs: an INT8 tile takes {costs.ratio:.3g} INT4 tiles"
        reported_times = COMET.get(name, {}) if (sms, int4) == (COMET_SMS, COMET_INT4) else {}
        lines = tables.schedule_lines(speedups, reported_times)
        console.print(table(title, tables.SCHEDULE_COLUMNS, lines))
        console.print(f"{tables.BOUND} {bound:.2f}x.", style="dim")
    if plot is not None:
        from ptxlab.lowbit.cost.plot import schedule_figure
        from ptxlab.plot import save

        N, K = shape.matrices["o"]
        tiles = grid(tokens, N, K, int8_blocks(math.ceil(K / TILE), 1 - int4, spread=spread), k_first=False)
        save(schedule_figure({f"{name}, {N} x {K}": (tiles, sms, costs)}, SCHEDULES), plot)
        if not as_json:
            print_written(plot)
