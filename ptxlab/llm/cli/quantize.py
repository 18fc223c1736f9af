"""The command `quantize`: turns a checkpoint or a model into packed weights."""

from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape

from ptxlab.cli.common import (
    AsJson,
    CommandLineError,
    console,
    expects,
    print_json,
    print_written,
    progress_bar,
    refuse,
    require_counts,
    table,
)
from ptxlab.io.files import require_new, sole_writer
from ptxlab.llm.accuracy.text import tokens_of
from ptxlab.llm.checkpoints import convert
from ptxlab.llm.checkpoints.open import MODELS, missing
from ptxlab.llm.cli.models import ModelBackend, model_on_gpu, open_model_with_bar, open_text_with_bar
from ptxlab.llm.model.floats import Tokens
from ptxlab.llm.model.weights import DEFAULT_CACHE
from ptxlab.llm.recipe import calibrate, find_recipe
from ptxlab.llm.recipe.quantize import check_packable, quantize_model
from ptxlab.lowbit.quant import PROTECTIVE_RANGE
from ptxlab.lowbit.quant.kv import BY_CHANNEL

PANEL = "Weights"

_RECIPE = "With --recipe"


def quantize(
    model: Annotated[
        str, typer.Argument(help=".safetensors file; with --recipe a Hugging Face folder, a .gguf file, or smollm2.")
    ],
    out: Annotated[Path, typer.Option(help="Packed file to write; with --recipe the folder to create.")],
    scheme: Annotated[str | None, typer.Option(help="lqq, qoq or qoq_channel. Default: lqq.")] = None,
    group: Annotated[int, typer.Option(help="Weights per level-2 scale: 32, 64 or 128.")] = 64,
    protective_range: Annotated[
        int | None,
        typer.Option("--range", help="Protective range of level 1. Default: 119. LQQ is proved safe up to 120."),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="strips (which the fastest kernels read), dual_mma, qserve, comet, row_major.")
    ] = "strips",
    tensor: Annotated[
        str | None, typer.Option(help="Glob over tensor names; embeddings only if it names them. Default: all.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_RECIPE,
            help="Quantise a whole model by lqq, qoq, qoq_released, qoq_channel, liquid, rtn, atom or fmpq (W4A4).",
        ),
    ] = None,
    rotation: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_RECIPE, help="Rotation of the residual stream: hadamard or random. Default: the recipe's."
        ),
    ] = None,
    int8: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_RECIPE,
            help="fmpq: share of the activations' blocks in INT8, 0 to 1. Default: those with outliers, at most 0.2.",
        ),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_RECIPE,
            help="The KV cache: kv4, with scales per token, or with calibrated scales per channel kv8_channel "
            "(LiquidServe) or kv4_channel (COMET). Default: the recipe's.",
        ),
    ] = None,
    text: Annotated[
        str, typer.Option(rich_help_panel=_RECIPE, help="Calibration text: wikipedia, lee or a UTF-8 file.")
    ] = "wikipedia",
    samples: Annotated[int, typer.Option(rich_help_panel=_RECIPE, help="Number of calibration samples.")] = 128,
    length: Annotated[int, typer.Option(rich_help_panel=_RECIPE, help="Tokens per calibration sample.")] = 1024,
    seed: Annotated[int, typer.Option(rich_help_panel=_RECIPE, help="Seed of the samples' positions in the text.")] = 0,
    backend: ModelBackend = None,
    as_json: AsJson = False,
) -> None:
    """Quantise and pack the matrices of a checkpoint by rounding to nearest; copy the other tensors.

    With --recipe, quantise a whole model: rotation, smoothing, calibration layer by layer, GPTQ.

    An interrupted run resumes when the same command is started again.
    """
    if recipe is None:
        refuse({"--rotation": rotation, "--int8": int8, "--kv": kv}, "needs --recipe")
        limit = _range(scheme or "lqq", protective_range)
        return _file(Path(model), out, scheme or "lqq", group, layout, tensor or "*", limit, as_json=as_json)
    refuse({"--scheme": scheme, "--tensor": tensor}, "is for a file without --recipe")
    require_counts(samples=samples, length=length)
    if seed < 0:
        raise expects("--seed", "an integer, 0 or more", seed)
    on_gpu = model_on_gpu(backend)
    steps = find_recipe(recipe)
    if steps.int8 is None:
        refuse({"--int8": int8}, "is for --recipe fmpq")
    # As many outliers as a group has channels, so that the rest remains whole groups.
    steps = steps.but(group=group, kept=group if steps.kept else 0)
    steps = steps if int8 is None else steps.but(int8=int8, outlier=0.0)
    steps = steps.but(rotate=rotation) if rotation else steps
    caches = (DEFAULT_CACHE, *BY_CHANNEL)
    if kv not in (None, *caches):
        raise expects("--kv", f"{', '.join(caches[:-1])} or {caches[-1]}", kv)
    steps = steps.but(kv=kv) if kv else steps
    steps = steps.but(protective_range=_range(steps.scheme, protective_range))
    check_packable(steps, out)
    float_model, tokenizer = open_model_with_bar(model, quiet=as_json)
    tokens: Tokens = np.empty((0, length), np.int64)
    if steps.is_calibrated:
        corpus = open_text_with_bar(text, quiet=as_json)
        tokens = calibrate.draw_samples(
            tokens_of(corpus.calibration or corpus.evaluation, tokenizer), samples, length, seed
        )
    resumes = "finished layers are kept: the same command goes on behind them"
    with progress_bar(f"quantize {recipe}", float_model.config.layers, quiet=as_json, keeps=resumes) as advance:
        errors = quantize_model(
            float_model.to_device() if on_gpu else float_model,
            tokens,
            steps,
            out,
            tokenizer=tokenizer,
            layout=layout,
            progress=advance,
        )
    if as_json:
        return print_json({"out": str(out), "recipe": steps.to_json(), "errors": errors})
    _print_errors(errors)
    print_written(out)


def _range(scheme: str | None, protective_range: int | None) -> int:
    """Return the protective range of a scheme that has one. Raises for --range with qoq_channel."""
    refuse(
        {"--range": protective_range if scheme == "qoq_channel" else None},
        "is for lqq and qoq: qoq_channel has one level",
    )
    return PROTECTIVE_RANGE if protective_range is None else protective_range


def _print_errors(errors: dict[int, dict[str, float | None]]) -> None:
    products = {index: _by_product(layer_errors) for index, layer_errors in errors.items()}
    rows = [
        (f"layer {index}", *(f"{fmean(values):.5f}" if values else "-" for values in layer_errors.values()))
        for index, layer_errors in products.items()
    ]
    if not rows or rows[0][1] == "-":
        return
    title, columns = (
        "relative squared error of each product over the calibration text",
        tuple(next(iter(products.values()))),
    )
    if any("." in name for layer_errors in errors.values() for name in layer_errors):
        title += "; of experts the mean"
    console.print(table(title, ("", *(f"{name}>" for name in columns)), rows))
    for index, layer_errors in errors.items():
        if experts := [
            name.partition(".")[2] for name, error in layer_errors.items() if error is None and name.startswith("down.")
        ]:
            console.print(
                f"layer {index}: experts rounded to nearest, which fewer than {calibrate.LEAST_TOKENS} tokens of the "
                f"text take: {', '.join(experts)}",
                highlight=False,
                soft_wrap=True,
            )


def _by_product(errors: dict[str, float | None]) -> dict[str, list[float]]:
    """Group the known errors by product; errors of every expert count to their product."""
    products: dict[str, list[float]] = {}
    for name, error in errors.items():
        products.setdefault(name.partition(".")[0], []).extend([] if error is None else [error])
    return products


def _file(
    file: Path, out: Path, scheme: str, group: int, layout: str, tensor: str, limit: int, *, as_json: bool
) -> None:
    """Quantise a checkpoint's matrices one by one, then load the new file again and compare every bit."""
    if file.is_dir() or (not file.exists() and str(file) in MODELS):
        command = f"quantize {file} --recipe lqq --out FOLDER"
        raise CommandLineError(f"{file} is no file; a whole model needs --recipe: {command}")
    if not file.exists():
        raise missing(file, "no such file")
    require_new(out)
    conversion = convert.plan(file, scheme=scheme, group=group, layout=layout, pattern=tensor, protective_range=limit)
    with sole_writer(out), progress_bar("quantize", conversion.steps, quiet=as_json) as advance:
        require_new(out)  # another process may have finished it meanwhile
        conversion.write(out, advance)
        conversion.verify(out, advance)
    if as_json:
        return print_json([_row(planned_tensor) for planned_tensor in conversion.tensors])
    packed_tensors = [planned_tensor for planned_tensor in conversion.tensors if planned_tensor.fields]
    copied_tensors = [planned_tensor for planned_tensor in conversion.tensors if not planned_tensor.fields]
    table_rows = [
        (p.source.name, "x".join(map(str, p.source.shape)), f"{p.source.nbytes:,}", f"{p.nbytes:,}", f"{p.bits:.2f}")
        for p in packed_tensors
    ]
    packing = scheme if scheme == "qoq_channel" else f"{scheme} ±{limit}, group {group}"
    title = f"{file.name}: {packing}, {layout}; loaded again, equal in every bit"
    console.print(table(title, ("tensor", "shape>", "bytes>", "packed bytes>", "bits per weight>"), table_rows))
    for planned_tensor in copied_tensors:
        if planned_tensor.selected:
            console.print(
                f"[dim]copied {escape(f'{planned_tensor.described}: {planned_tensor.reason}')}[/]",
                highlight=False,
                soft_wrap=True,
            )
    console.print(
        f"{len(packed_tensors)} packed, {len(copied_tensors)} copied: {escape(str(out))}",
        soft_wrap=True,
        highlight=False,
    )


def _row(planned: convert.PlannedTensor) -> dict[str, Any]:
    return {
        "tensor": planned.source.name,
        "shape": list(planned.source.shape),
        "packed": planned.fields,
        "copied_because": planned.reason,
        "bytes_before": planned.source.nbytes,
        "bytes": planned.nbytes,
    }
