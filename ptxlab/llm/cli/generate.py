"""The command `generate`: text from a quantised model, as it is made; of one prompt, or of many at once."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from ptxlab import gpu
from ptxlab.arithmetic import ceil_div
from ptxlab.cli.common import (
    FAILED,
    AsJson,
    CommandLineError,
    expects,
    notes,
    print_json,
    progress_bar,
    refuse,
    require_counts,
)
from ptxlab.errors import ArgumentError, UnavailableError, naming
from ptxlab.io.files import read_text
from ptxlab.llm.checkpoints.folder import load
from ptxlab.llm.checkpoints.open import is_quantized, open_tokenizer
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.llm.cli.models import ModelBackend, opened_model
from ptxlab.llm.model import Config, FloatModel, Footprint, KernelRunner, NumpyRunner, QuantizedModel, Runner
from ptxlab.llm.model.generate import generate as generated
from ptxlab.llm.model.kernel_runner import PROMPT_ATTENTIONS, require_torch
from ptxlab.llm.model.memory import budget, largest_batch, require_batch, weights_of
from ptxlab.llm.model.runner import HEADS, PAGE
from ptxlab.llm.model.sampling import Sampling
from ptxlab.llm.server import Request, Server
from ptxlab.lowbit.quant import GROUPS

PANEL = "Weights"

RUNNERS: dict[str, type[Runner]] = {"gpu": KernelRunner, "numpy": NumpyRunner}
_TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # ChatML, which SmolLM2 and Qwen2 are trained on
_AT_ONCE = 16  # sequences of --prompts
_CHUNK_OF_TORCH = 2048  # rows: only the first chunk of a prompt is PyTorch's
_BROKEN = "\ufffd"  # what a character decodes to while tokens of it are lacking


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to go on from; with --chat, what is asked.", show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Many prompts, served together: one a line, or .jsonl with prompt, tokens, ...")
    ] = None,
    model: Annotated[
        str, typer.Option(help="smollm2, a Hugging Face folder, a .gguf file, or what `quantize --recipe` made.")
    ] = "smollm2",
    backend: ModelBackend = None,
    tokens: Annotated[int, typer.Option(help="How many to generate at most.")] = 64,
    batch: Annotated[
        int | None,
        typer.Option(help="How many continuations, the first streamed (1); of --prompts, at a time (up to 16)."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0: the likeliest token. Above: draw from softmax(logits / T).")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random draws.")] = 0,
    group: Annotated[int, typer.Option(help="Weights per level-2 scale where they are rounded here.")] = 64,
    head: Annotated[
        str, typer.Option(help="What the LM head multiplies in: float16, or int8: half its bytes, exact sums.")
    ] = "float16",
    prompt_attention: Annotated[
        str,
        typer.Option(help="What attends prompts on a GPU. cache: our kernel, in 4 bits; torch: PyTorch, in 16 bits."),
    ] = "cache",
    memory: Annotated[float | None, typer.Option(help="GB (10^9 bytes) of a GPU that may be taken at most.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask, in the ChatML template of instruct models.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a text with W4A8 weights and a 4-bit KV cache, in the integers that the kernels compute.

    Without a GPU the same integers are computed in NumPy, where W4A4's folders run as well. Weights that are not
    quantised yet are rounded to nearest.
    """
    if backend is None:
        backend = "gpu" if gpu.why_not("sm_90a", exact=True) is None else "numpy"
    _check(prompt, prompts, backend, tokens, batch, temperature, seed, group, head, prompt_attention, memory)
    if prompts is None:
        asked, size = [_Asked(prompt or "", tokens, temperature, seed)], batch or 1
    else:
        asked = _read_prompts(prompts, tokens, temperature, seed)
        size = min(batch or _AT_ONCE, len(asked))
    opened, tokenizer = _open(model, quiet=as_json)
    from threadpoolctl import threadpool_limits  # of the extra `model`, which `_open` has asked for

    encoded = [_encoded(tokenizer, each, chat=chat) for each in asked]
    _check_fit(asked, encoded, opened.config.context)
    lengths = [len(given) + each.tokens for given, each in zip(encoded, asked, strict=True)]
    context = max(lengths)
    by_torch: dict[str, Any] = {"prompt_attention": "torch"} if prompt_attention == "torch" else {}
    how: dict[str, Any] = {"head": head, "chunk": min(_CHUNK_OF_TORCH, size * context) if by_torch else None}
    pages = None
    if memory is not None:
        longest = asked[lengths.index(context)].where
        fixed, at_once = batch is not None, prompts is None
        counted = weights_of(opened) if isinstance(opened, QuantizedModel) else {"group": group}
        size, pages = _fitted(
            memory, opened.config, size, context, longest, fixed=fixed, at_once=at_once, **how, **counted
        )
    weights = opened if isinstance(opened, QuantizedModel) else _rounded(opened, model, group, quiet=as_json)
    runner = RUNNERS[backend](weights, size, context, pages=pages, **how, **by_torch)
    if prompts is not None:
        with threadpool_limits(1 if size == 1 else None, "blas"):
            return _serve(runner, tokenizer, asked, encoded, backend, model, as_json=as_json)

    assert prompt is not None
    given = encoded[0]
    if not as_json and not chat:
        _write(prompt)
    texts = [_Text(tokenizer) for _ in range(size)]
    steps = generated(runner, [given] * size, tokens, temperature=temperature, seed=seed)
    times = [time.perf_counter()]
    # A step of one sequence is memory-bound; on a busy machine two threads wait for each other longer than they compute
    with threadpool_limits(1 if size == 1 else None, "blas"):
        for step in steps:
            times.append(time.perf_counter())
            for text, token in zip(texts, step.tolist(), strict=True):
                text.append(token)
            if not as_json:
                _write(texts[0].fresh())
            if all(text.ended for text in texts):
                break
    rate = size * (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else None
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
    _note(f"{said}; prompt of {len(given)} tokens in {times[1] - times[0]:.2f} s; {_where(runner, backend)}")


class _Asked(NamedTuple):
    """A prompt, how to go on from it, and where it was found."""

    prompt: str
    tokens: int
    temperature: float
    seed: int
    where: str = "the prompt"


def _serve(
    runner: Runner,
    tokenizer: Tokenizer,
    asked: list[_Asked],
    encoded: list[list[int]],
    backend: str,
    model: str,
    *,
    as_json: bool,
) -> None:
    """All prompts through a `Server`, each printed in its turn once it is done. Exits with 1 where one failed."""
    server = Server(runner)
    requests: list[Request] = []
    for given, each in zip(encoded, asked, strict=True):
        with naming(each.where):
            requests.append(
                server.submit(given, each.tokens, ends=tokenizer.ends, temperature=each.temperature, seed=each.seed)
            )
    begin, shown = time.perf_counter(), 0
    while shown < len(requests):
        server.step()
        while shown < len(requests) and requests[shown].done:
            if not as_json:
                _write(f"[{shown + 1}] {asked[shown].prompt}{_text_of(requests[shown], tokenizer)}\n")
                if requests[shown].error:
                    _note(f"[{shown + 1}] failed: {requests[shown].error}")
            shown += 1
    seconds, made = time.perf_counter() - begin, sum(len(request.tokens) for request in requests)
    if as_json:
        found: list[dict[str, Any]] = [
            {
                "prompt_tokens": len(request.prompt),
                "tokens": _kept(request, tokenizer),
                "text": _text_of(request, tokenizer),
                "error": request.error,
            }
            for request in requests
        ]
        rates: dict[str, Any] = {"seconds": seconds, "tokens_per_second": made / seconds}
        print_json(
            {"model": model, "backend": backend, "recipe": dict(runner.model.recipe), **rates, "requests": found}
        )
    else:
        said = f"{len(requests)} prompts of {sum(map(len, encoded))} tokens, {runner.batch} at a time"
        _note(f"{made / seconds:.1f} tokens/s: {made} in {seconds:.2f} s; {said}; {_where(runner, backend)}")
    if any(request.error for request in requests):
        raise typer.Exit(FAILED)


def _kept(request: Request, tokenizer: Tokenizer) -> list[int]:
    """Its tokens but for the one that ended it."""
    return request.tokens[:-1] if request.tokens and request.tokens[-1] in tokenizer.ends else request.tokens


def _text_of(request: Request, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(_kept(request, tokenizer))


def _where(runner: Runner, backend: str) -> str:
    torch = getattr(runner, "prompt_attention", "cache") == "torch"
    attention = "PyTorch's attention" if torch else "the decode attention"
    how = f"a CUDA graph per step, the prompt by {attention}, in chunks of"
    where = {"gpu": f"the GPU: {how} {runner.chunk} tokens", "numpy": "NumPy"}[backend]
    weight = runner.model.layers[0].qkv
    precision = {"atom": "W4A4", "fmpq": "W4Ax"}.get(weight.scheme, "W4A8")
    return f"{precision}, KV4, on {where}"


def _note(said: str) -> None:
    notes.print(f"[dim]{escape(said)}[/]", highlight=False, soft_wrap=True)


def _read_prompts(path: Path, tokens: int, temperature: float, seed: int) -> list[_Asked]:
    """The prompts of a file; what a line of .jsonl does not say is as the options have it, a further seed for each."""
    found: list[_Asked] = []
    text = read_text(path, newline="\n").removeprefix("\ufeff")
    for number, line in enumerate(text.split("\n"), 1):  # `splitlines` would split at characters of JSON and texts
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        keys: Any = {"prompt": line}
        if path.suffix == ".jsonl":
            try:
                keys = json.loads(line)
            except (ValueError, RecursionError):
                keys = None
        asked: dict[str, Any] = {"tokens": tokens, "temperature": temperature, "seed": seed + len(found)}
        known = isinstance(keys, dict) and isinstance(keys.get("prompt"), str) and keys["prompt"]
        if not known or any(type(keys.get(key, value)) not in (int, type(value)) for key, value in asked.items()):
            rule = "an object with a prompt, and perhaps tokens, temperature and seed"
            raise CommandLineError(f"{where}: expects {rule}, got {line.strip()[:60]!r}")
        for key in keys:
            if key not in ("prompt", *asked):
                raise CommandLineError(f"{where}: expects the keys prompt, {', '.join(asked)}, got {key[:60]!a}")
        each = _Asked(where=where, **asked | keys)
        try:
            _check_numbers(each)
        except CommandLineError as error:
            raise CommandLineError(f"{where}: {error}") from None
        found.append(each)
    if not found:
        raise CommandLineError(f"{path}: no prompt in it")
    return found


def _check_fit(asked: list[_Asked], encoded: list[list[int]], most: int | None) -> None:
    """Raise for a prompt that does not fit the model's context."""
    for each, given in zip(asked, encoded, strict=True):
        if most is not None and len(given) + each.tokens > most:
            rule = f"must fit the model's context of {most} tokens with its --tokens"
            raise ArgumentError(each.where, rule, f"{len(given)} + {each.tokens}")


def _fitted(
    memory: float,
    config: Config,
    batch: int,
    context: int,
    where: str,
    *,
    fixed: bool,
    at_once: bool,
    **how: Any,
) -> tuple[int, int]:
    """The batch, which becomes smaller where it must unless it is `fixed`, and the cache's pages within --memory.

    The pages hold all sequences `at_once`, or no fewer than the longest one, of the prompt that was found `where`.
    """
    least, footprint = ceil_div(context, PAGE), Footprint.of(config, 1, context, **how)
    if footprint.total(least) > budget(memory):
        needed = f"at least {footprint.needed(least)} for the {context} tokens of {where}"
        raise expects("--memory", needed, memory)
    pages = None if at_once else least
    if fixed:
        with _options():
            require_batch(config, batch, memory, context, pages=pages, **how)
    else:
        batch = largest_batch(config, memory, context, most=batch, pages=pages, **how)
    return batch, min(batch * least, Footprint.of(config, batch, context, **how).most_pages(memory))


@contextmanager
def _options() -> Iterator[None]:
    """An `ArgumentError` inside is about the option of the argument's name."""
    try:
        yield
    except ArgumentError as error:
        raise expects(f"--{error.argument}", error.rule.removeprefix("must be "), error.value) from None


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


def _check(
    prompt: str | None,
    prompts: Path | None,
    backend: str,
    tokens: int,
    batch: int | None,
    temperature: float,
    seed: int,
    group: int,
    head: str,
    prompt_attention: str,
    memory: float | None,
) -> None:
    """Raise CommandLineError for a bad option, before anything is fetched."""
    if prompts is not None:
        refuse({"PROMPT": prompt}, "goes without --prompts")
    elif not prompt:
        raise CommandLineError("the prompt must not be empty")
    if backend not in RUNNERS:
        raise expects("--backend", " or ".join(RUNNERS), backend)
    if backend == "gpu" and (reason := gpu.why_not("sm_90a", exact=True)):
        raise UnavailableError(f"--backend gpu: {reason}; pass --backend numpy")
    if group not in GROUPS:
        raise expects("--group", ", ".join(map(str, GROUPS)), group)
    if head not in HEADS:
        raise expects("--head", " or ".join(HEADS), head)
    if prompt_attention not in PROMPT_ATTENTIONS:
        raise expects("--prompt-attention", " or ".join(PROMPT_ATTENTIONS), prompt_attention)
    if prompt_attention == "torch":
        if backend != "gpu":
            raise CommandLineError(f"--prompt-attention torch goes with --backend gpu (got {backend})")
        require_torch(on_gpu=True)
    if memory is not None:
        with _options():
            budget(memory)
    require_counts(batch=1 if batch is None else batch)
    _check_numbers(_Asked(prompt or "", tokens, temperature, seed))


def _check_numbers(asked: _Asked) -> None:
    require_counts(tokens=asked.tokens)
    with _options():
        Sampling(temperature=asked.temperature, seed=asked.seed)


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


def _encoded(tokenizer: Tokenizer, asked: _Asked, *, chat: bool) -> list[int]:
    if chat and len(tokenizer.encode("<|im_start|>")) != 1:
        raise CommandLineError("--chat needs a model that is trained on ChatML: its vocabulary lacks <|im_start|>")
    with naming(asked.where):
        tokens: list[int] = tokenizer.encode(_TURN.format(asked.prompt) if chat else asked.prompt).tolist()
    return tokens if tokenizer.start is None else [tokenizer.start, *tokens]


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
