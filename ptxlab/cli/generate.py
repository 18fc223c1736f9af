"""The command `generate`: text from a quantised model, as it is made."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ptxlab import gpu
from ptxlab.cli.common import AsJson, CommandLineError, expects, notes, print_json, progress_bar, require_counts
from ptxlab.cli.models import ModelBackend, opened_model
from ptxlab.errors import UnavailableError
from ptxlab.io.tokenizer import Tokenizer
from ptxlab.model import FloatModel, KernelRunner, NumpyRunner, QuantizedModel, Runner
from ptxlab.model.folder import load
from ptxlab.model.generate import generate as generated
from ptxlab.model.open import is_quantized, open_tokenizer
from ptxlab.quant import GROUPS

RUNNERS: dict[str, type[Runner]] = {"gpu": KernelRunner, "numpy": NumpyRunner}
_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # ChatML, which SmolLM2 and Qwen2 are trained on
_BROKEN = "\ufffd"  # what a character decodes to while tokens of it are lacking


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; with --chat, what is asked.")],
    model: Annotated[
        str, typer.Option(help="smollm2, a Hugging Face folder, a .gguf file, or what `quantize --recipe` made.")
    ] = "smollm2",
    backend: ModelBackend = None,
    tokens: Annotated[int, typer.Option(help="How many to generate at most.")] = 64,
    batch: Annotated[int, typer.Option(help="How many continuations at once; the first is streamed.")] = 1,
    temperature: Annotated[
        float, typer.Option(help="0: the likeliest token. Above: draw from softmax(logits / T).")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random draws.")] = 0,
    group: Annotated[int, typer.Option(help="Weights per level-2 scale where they are rounded here.")] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="Ask, in the ChatML template of instruct models.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a text with W4A8 weights and a 4-bit KV cache, in the integers that the kernels compute.

    Without a GPU the same integers are computed in NumPy. Weights that are not quantised yet are rounded to nearest.
    """
    if backend is None:
        backend = "gpu" if gpu.why_not("sm_90a", exact=True) is None else "numpy"
    _check(prompt, backend, tokens, batch, temperature, seed, group)
    opened, tokenizer = _open(model, quiet=as_json)
    from threadpoolctl import threadpool_limits  # of the extra `model`, which `_open` has asked for

    given, most = _encoded(tokenizer, prompt, chat=chat), opened.config.context
    if most is not None and len(given) + tokens > most:
        rule = f"prompt and --tokens must fit the model's context of {most} tokens"
        raise CommandLineError(f"{rule} (got {len(given)} + {tokens})")
    weights = opened if isinstance(opened, QuantizedModel) else _rounded(opened, model, group, quiet=as_json)
    runner = RUNNERS[backend](weights, batch, len(given) + tokens)

    if not as_json and not chat:
        _write(prompt)
    texts = [_Text(tokenizer) for _ in range(batch)]
    steps = generated(runner, [given] * batch, tokens, temperature=temperature, seed=seed)
    times = [time.perf_counter()]
    # A step of one sequence is memory-bound; on a busy machine two threads wait for each other longer than they compute
    with threadpool_limits(1 if batch == 1 else None, "blas"):
        for step in steps:
            times.append(time.perf_counter())
            for text, token in zip(texts, step.tolist(), strict=True):
                text.append(token)
            if not as_json:
                _write(texts[0].fresh())
            if all(text.ended for text in texts):
                break
    rate = batch * (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else None
    if as_json:
        return print_json(
            {
                "model": model,
                "backend": backend,
                "recipe": dict(runner.model.recipe),
                "prompt_tokens": len(given),
                "tokens": [text.tokens for text in texts],
                "texts": [tokenizer.decode(text.tokens) for text in texts],
                "prefill_seconds": times[1] - times[0],
                "tokens_per_second": rate,
            }
        )
    _write(texts[0].fresh(whole=True) + "\n")
    for i, text in enumerate(texts[1:], 2):
        _write(f"\n[{i}] {'' if chat else prompt}{tokenizer.decode(text.tokens)}\n")
    said = f"{rate:.1f} tokens/s" if rate else "1 token"
    how = "a CUDA graph per step, the prompt by the decode attention, in chunks of"
    where = {"gpu": f"the GPU: {how} {runner.chunk} tokens", "numpy": "NumPy"}[backend]
    notes.print(
        f"[dim]{said}; prompt of {len(given)} tokens in {times[1] - times[0]:.2f} s; W4A8, KV4, on {where}[/]",
        highlight=False,
        soft_wrap=True,
    )


class _Text:
    """What a sequence has so far.

    Attributes:
        tokens: up to the one that ends it, which is not among them.
        ended: whether that came.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens: list[int] = []
        self.ended, self._tokenizer, self._shown = False, tokenizer, 0

    def append(self, token: int) -> None:
        self.ended = self.ended or token in self._tokenizer.ends
        if not self.ended:
            self.tokens.append(token)

    def fresh(self, *, whole: bool = False) -> str:
        """Text that was not shown yet; a character whose tokens are incomplete waits, unless the text is `whole`."""
        text = self._tokenizer.decode(self.tokens)
        if text.endswith(_BROKEN) and not whole:
            return ""
        shown, self._shown = self._shown, len(text)
        return text[shown:]


def _check(prompt: str, backend: str, tokens: int, batch: int, temperature: float, seed: int, group: int) -> None:
    """Raise CommandLineError for a bad option, before anything is fetched."""
    if not prompt:
        raise CommandLineError("the prompt must not be empty")
    if backend not in RUNNERS:
        raise expects("--backend", " or ".join(RUNNERS), backend)
    if backend == "gpu" and (reason := gpu.why_not("sm_90a", exact=True)):
        raise UnavailableError(f"--backend gpu: {reason}; pass --backend numpy")
    if group not in GROUPS:
        raise expects("--group", ", ".join(map(str, GROUPS)), group)
    require_counts(tokens=tokens, batch=batch)
    if not 0 <= temperature < float("inf"):
        raise expects("--temperature", "a number, 0 or more", temperature)
    if not 0 <= seed < 2**32:
        raise expects("--seed", "an integer in 0..2^32-1", seed)


def _open(source: str, *, quiet: bool) -> tuple[FloatModel | QuantizedModel, Tokenizer]:
    """A model, quantised already or not; one that has a name is downloaded."""
    path = Path(source)
    if is_quantized(path):
        quantized = load(path)
        return quantized, open_tokenizer(path, quantized.config)
    return opened_model(source, quiet=quiet)


def _rounded(model: FloatModel, source: str, group: int, *, quiet: bool) -> QuantizedModel:
    """Round the weights to nearest, and say so."""
    with progress_bar("round", model.config.layers, quiet=quiet) as advance:
        rounded = QuantizedModel.rounded(model, "lqq", group, progress=advance)
    if not quiet:
        said = f"{escape(Path(source).name)}: weights rounded to nearest, LQQ in groups of {group}, uncalibrated"
        notes.print(f"[dim]{said}[/]", highlight=False, soft_wrap=True)
    return rounded


def _encoded(tokenizer: Tokenizer, prompt: str, *, chat: bool) -> list[int]:
    if chat and len(tokenizer.encode("<|im_start|>")) != 1:
        raise CommandLineError("--chat needs a model that is trained on ChatML: its vocabulary lacks <|im_start|>")
    tokens: list[int] = tokenizer.encode(_TURN.format(prompt) if chat else prompt).tolist()
    return tokens if tokenizer.start is None else [tokenizer.start, *tokens]


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
