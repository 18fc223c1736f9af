"""The command `perplexity`: how well a model predicts a text."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ptxlab.cli.common import AsJson, console, expects, print_json, progress_bar
from ptxlab.llm.accuracy.text import tokens_of, windows
from ptxlab.llm.checkpoints.open import is_quantized, stored_numerics
from ptxlab.llm.cli.models import ModelBackend, model_on_gpu, opened_model, opened_text
from ptxlab.llm.model import perplexity as measured
from ptxlab.llm.model.numerics import FakeQuantized

PANEL = "Weights"


def perplexity(
    model: Annotated[str, typer.Argument(help="Hugging Face folder, quantised folder, .gguf file, or smollm2.")],
    text: Annotated[str, typer.Option(help="wikipedia, lee, or a UTF-8 file.")] = "wikipedia",
    count: Annotated[
        int | None, typer.Option("--windows", help="Windows to measure, evenly spread. Default: all of the text.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 2048,
    kv: Annotated[
        int | None,
        typer.Option(help="Bits of the KV cache: 4, 8, or 32 for floats. Default: 4 with quantised weights, else 32."),
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
    """Measure a model's perplexity on a text, in float32 except for what is quantised.

    The calibration articles of wikipedia are not measured. Named models and texts are downloaded once.
    """
    stored = stored_numerics(Path(model)) if is_quantized(Path(model)) else FakeQuantized(None, None)
    for option, bits, known in (("--kv", kv, (4, 8, 32)), ("--acts", acts, (4, 8, 32)[stored.acts != 4 :])):
        if bits not in (None, *known):
            raise expects(option, ", ".join(map(str, known[:-1])) + " or 32", bits)
    on_gpu = model_on_gpu(backend)
    opened, tokenizer = opened_model(model, length=length, quiet=as_json)
    evaluated = windows(tokens_of(opened_text(text, quiet=as_json).evaluation, tokenizer), length, count)
    acts, kv = acts or stored.acts or 32, kv or (4 if stored.kv else 32)
    numerics = replace(stored, acts=None if acts == 32 else acts, kv=None if kv == 32 else f"kv{kv}")
    start = time.perf_counter()
    with progress_bar("perplexity", (len(opened.layers) + 1) * len(evaluated), quiet=as_json) as advance:
        found = measured(
            opened.to_device() if on_gpu else opened, evaluated, numerics, lambda: advance(f"perplexity on {text}")
        )
    seconds = time.perf_counter() - start
    if as_json:
        return print_json(
            {
                "model": model,
                "text": text,
                "perplexity": found,
                "windows": len(evaluated),
                "length": length,
                "tokens": evaluated.size,
                "kv": kv,
                "acts": acts,
                "backend": "gpu" if on_gpu else "numpy",
                "seconds": seconds,
            }
        )
    console.print(
        f"[bold]perplexity {found:.4g}[/]  {escape(model)} on {escape(text)}: {evaluated.size:,} tokens, "
        f"{len(evaluated)} windows of {length}; activations {_bits(acts)}, KV cache {_bits(kv)}; "
        f"{seconds:.1f} s on {'the GPU' if on_gpu else 'this CPU'}",
        highlight=False,
        soft_wrap=True,
    )


def _bits(bits: int) -> str:
    return "float32" if bits == 32 else f"{bits} bits"
