"""The command `perplexity`: how well a model, or several side by side, predict a text."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
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
    progress_bar,
    table,
)
from ptxlab.llm.accuracy.text import tokens_of, windows
from ptxlab.llm.checkpoints.open import is_quantized, stored_numerics
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.llm.cli.models import ModelBackend, model_on_gpu, open_model_with_bar, open_text_with_bar
from ptxlab.llm.model import perplexity as measured
from ptxlab.llm.model.floats import Tokens
from ptxlab.llm.model.numerics import FakeQuantized
from ptxlab.lowbit.quant.kv import kv_scheme

PANEL = "Weights"


def perplexity(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Hugging Face folders, quantised folders, .gguf files, or smollm2: one, or several to compare.",
        ),
    ],
    text: Annotated[str, typer.Option(help="wikipedia, lee, or a UTF-8 file.")] = "wikipedia",
    count: Annotated[
        int | None, typer.Option("--windows", help="Windows to measure, evenly spread. Default: all of the text.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 2048,
    kv: Annotated[
        int | None,
        typer.Option(
            help="Bits of the KV cache, with scales by token: 4, 8, or 32 for floats. "
            "Default: the cache of quantised weights, else 32."
        ),
    ] = None,
    acts: Annotated[
        int | None,
        typer.Option(
            help="Bits of the activations: 8, 32 for floats, or 4 where the weights are W4A4's. "
            "Default: those of quantised weights, else 32."
        ),
    ] = None,
    backend: ModelBackend = None,
    as_json: AsJson = False,
) -> None:
    """Measure the perplexity of models on the same windows of a text, in float32 except for what is quantised.

    The calibration articles of wikipedia are not measured. Named models and texts are downloaded once.
    """
    numerics = [_numerics(model, kv, acts) for model in models]
    on_gpu = model_on_gpu(backend)
    opened, tokenizers = zip(*(open_model_with_bar(name, length=length, quiet=as_json) for name in models), strict=True)
    tokens = _common_tokens(models, tokenizers, open_text_with_bar(text, quiet=as_json).evaluation, text)
    evaluated, rows = windows(tokens, length, count), list[_Measured]()
    steps = len(evaluated) * sum(model.config.layers + 1 for model in opened)
    with progress_bar("perplexity", steps, quiet=as_json) as advance:
        for name, model, numeric in zip(models, opened, numerics, strict=True):
            start, placed_model = time.perf_counter(), model.to_device() if on_gpu else model
            figure = measured(placed_model, evaluated, numeric, partial(advance, f"{name} on {text}"))
            ratio = figure / rows[0].perplexity if rows else 1.0
            rows.append(_Measured(name, figure, ratio, numeric, time.perf_counter() - start))
    about = {"windows": len(evaluated), "length": length, "tokens": evaluated.size}
    if as_json:
        return print_json(_json(rows, text, about, on_gpu=on_gpu))
    sample = f"{evaluated.size:,} tokens, {len(evaluated)} windows of {length}"
    if len(rows) > 1:
        return _print_table(rows, f"perplexity on {text}: {sample}", on_gpu=on_gpu)
    (row,) = rows
    console.print(
        f"[bold]perplexity {row.perplexity:.4g}[/]  {escape(row.model)} on {escape(text)}: {sample}; "
        f"activations {_bits(row.acts)}, KV cache {_bits(row.kv)}; "
        f"{row.seconds:.1f} s on {'the GPU' if on_gpu else 'this CPU'}",
        highlight=False,
        soft_wrap=True,
    )


@dataclass(frozen=True)
class _Measured:
    """A model's perplexity, its ratio to the first model's, and how it was measured."""

    model: str
    perplexity: float
    ratio: float
    numerics: FakeQuantized
    seconds: float

    @property
    def acts(self) -> int:
        return self.numerics.acts or 32

    @property
    def kv(self) -> int:
        return kv_scheme(self.numerics.kv).bits if self.numerics.kv else 32


def _numerics(model: str, kv: int | None, acts: int | None) -> FakeQuantized:
    """Tell how a model computes: as its weights have it, but for the bits that the options set."""
    numerics = stored_numerics(Path(model)) if is_quantized(Path(model)) else FakeQuantized(None, None)
    for option, bits, choices in (("--kv", kv, (4, 8, 32)), ("--acts", acts, (4, 8, 32)[numerics.acts != 4 :])):
        if bits not in (None, *choices):
            raise expects(option, ", ".join(map(str, choices[:-1])) + " or 32", bits)
    acts = acts or numerics.acts or 32
    cache = numerics.kv if kv is None else {4: "kv4", 8: "kv8", 32: None}[kv]
    return replace(numerics, acts=None if acts == 32 else acts, kv=cache)


def _common_tokens(
    models: Sequence[str], tokenizers: Sequence[Tokenizer], documents: tuple[str, ...], text: str
) -> Tokens:
    """Cut a text into tokens. Raises CommandLineError where the models' tokenizers cut it otherwise."""
    first_tokens, *rest_of_models = (tokens_of(documents, tokenizer) for tokenizer in tokenizers)
    for name, tokens in zip(models[1:], rest_of_models, strict=True):
        if not np.array_equal(first_tokens, tokens):
            rule = "perplexities of other tokens cannot be compared"
            raise CommandLineError(f"{models[0]} and {name} cut {text} into different tokens: {rule}")
    return first_tokens


def _json(rows: Sequence[_Measured], text: str, about: dict[str, int], *, on_gpu: bool) -> dict[str, Any]:
    """Return one model's figures, or those of each beside the ratio to the first."""
    figures: list[dict[str, Any]] = [
        {"model": row.model, "perplexity": row.perplexity, "kv": row.kv, "acts": row.acts, "seconds": row.seconds}
        for row in rows
    ]
    shared_fields = {"text": text, **about, "backend": "gpu" if on_gpu else "numpy"}
    if len(rows) == 1:
        return {**figures[0], **shared_fields}
    return {
        **shared_fields,
        "models": [{**model_figures, "ratio": row.ratio} for model_figures, row in zip(figures, rows, strict=True)],
    }


def _print_table(rows: Sequence[_Measured], title: str, *, on_gpu: bool) -> None:
    """Print a row for each model; the heading of the seconds names the GPU or this CPU."""
    table_rows = [
        (
            row.model,
            f"{row.perplexity:.4g}",
            f"{row.ratio:.4f}",
            _bits(row.acts),
            _bits(row.kv),
            f"{row.seconds:.1f}",
        )
        for row in rows
    ]
    seconds = f"s on {'the GPU' if on_gpu else 'this CPU'}>"
    columns = ("model", "perplexity>", "of the first>", "activations>", "KV cache>", seconds)
    console.print(table(escape(title), columns, table_rows))


def _bits(bits: int) -> str:
    return "float32" if bits == 32 else f"{bits} bits"
