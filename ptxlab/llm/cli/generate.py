"""The command `generate`: text from a model, as it is made; of one prompt, of many at once, or in a conversation."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
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
    interruptible,
    notes,
    print_json,
    progress_bar,
    refuse,
    require_counts,
)
from ptxlab.errors import ArgumentError, UnavailableError, naming
from ptxlab.io.files import read_text
from ptxlab.llm.checkpoints.chat import Message
from ptxlab.llm.checkpoints.folder import load
from ptxlab.llm.checkpoints.open import is_quantized, open_tokenizer
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.llm.cli.models import model_on_gpu, opened_model
from ptxlab.llm.generated_text import GeneratedText, require_stop
from ptxlab.llm.model import (
    Config,
    FloatModel,
    FloatRunner,
    Footprint,
    KernelRunner,
    NumpyRunner,
    QuantizedModel,
    Runner,
    Sampling,
)
from ptxlab.llm.model.generate import generate as generated
from ptxlab.llm.model.kernel_runner import PROMPT_ATTENTIONS, require_torch
from ptxlab.llm.model.memory import budget, largest_batch, require_batch, weights_of
from ptxlab.llm.model.runner import HEADS, PAGE
from ptxlab.llm.server import Request, Server
from ptxlab.lowbit.quant import GROUPS

PANEL = "Weights"

RUNNERS: dict[str, type[Runner]] = {"gpu": KernelRunner, "numpy": NumpyRunner}
SCHEMES = ("lqq", "qoq", "qoq_channel", "float")
_AT_ONCE = 16  # sequences of --prompts
_CHUNK_OF_TORCH = 2048  # rows: only the first chunk of a prompt is PyTorch's
_CONVERSATION = 4096  # tokens
_SAMPLING, _CHAT, _COMPUTING = "Sampling", "Chat", "Computing"


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to go on from; with --chat, the first message.", show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Many prompts, served together: one a line, or .jsonl with prompt, tokens, ...")
    ] = None,
    model: Annotated[
        str, typer.Option(help="smollm2, a Hugging Face folder, a .gguf file, or what `quantize --recipe` made.")
    ] = "smollm2",
    tokens: Annotated[int, typer.Option(help="How many to generate at most; with --chat, of each answer.")] = 64,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be repeated.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="How many continuations, the first streamed (1); of --prompts, at a time (up to 16)."),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(rich_help_panel=_SAMPLING, help="0: the likeliest token. Above: draw from softmax(logits / T)."),
    ] = 0,
    top_k: Annotated[
        int, typer.Option(rich_help_panel=_SAMPLING, help="Draw from so many of the likeliest tokens; 0: from all.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            rich_help_panel=_SAMPLING, help="Draw from the likeliest tokens that have this share of probability."
        ),
    ] = 1,
    min_p: Annotated[
        float,
        typer.Option(
            rich_help_panel=_SAMPLING, help="Draw from tokens at least this share as likely as the likeliest."
        ),
    ] = 0,
    repetition_penalty: Annotated[
        float, typer.Option(rich_help_panel=_SAMPLING, help="Above 1: make tokens that came before less likely.")
    ] = 1,
    seed: Annotated[int, typer.Option(rich_help_panel=_SAMPLING, help="Seed of the random draws.")] = 0,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            rich_help_panel=_CHAT,
            help="Hold a conversation in the model's chat template: read a message per line, until an empty one.",
        ),
    ] = False,
    system: Annotated[
        str | None, typer.Option(rich_help_panel=_CHAT, metavar="TEXT", help="The system message of --chat.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_CHAT,
            help=f"Tokens of the whole conversation. Default: {_CONVERSATION}, or the model's context if that is less.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(rich_help_panel=_COMPUTING, help="gpu or numpy. Default: the GPU if there is one."),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_COMPUTING,
            help="How weights are rounded here: lqq, qoq or qoq_channel; float: compute with the weights as they are, "
            "in float32. Default: lqq.",
        ),
    ] = None,
    group: Annotated[
        int, typer.Option(rich_help_panel=_COMPUTING, help="Weights per level-2 scale where they are rounded here.")
    ] = 64,
    head: Annotated[
        str,
        typer.Option(
            rich_help_panel=_COMPUTING,
            help="What the LM head multiplies in: float16, or int8: half its bytes, exact sums.",
        ),
    ] = "float16",
    prompt_attention: Annotated[
        str,
        typer.Option(
            rich_help_panel=_COMPUTING,
            help="What attends prompts on a GPU. cache: our kernel, in 4 bits; torch: PyTorch, in 16 bits.",
        ),
    ] = "cache",
    memory: Annotated[
        float | None,
        typer.Option(rich_help_panel=_COMPUTING, help="GB (10^9 bytes) of a GPU that may be taken at most."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text, or hold a conversation, with W4A8 weights and a 4-bit KV cache, in the kernels' integers.

    Without a GPU the same integers are computed in NumPy, where W4A4's folders run as well. Weights that are not
    quantised yet are rounded to nearest. --scheme float shows what the model says without quantisation.
    """
    how = _Computing(model, _backend(backend, scheme), scheme, group, head, prompt_attention, memory, quiet=as_json)
    talks = chat and prompts is None and batch in (None, 1) and not as_json
    if prompts is not None:
        refuse({"PROMPT": prompt}, "goes without --prompts")
    elif not prompt and not talks:
        raise CommandLineError("the prompt must not be empty")
    if not chat:
        refuse({"--system": system, "--context": context}, "needs --chat")
    _check(how, batch)
    shares = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    asked = _Asked(
        prompt or "",
        tokens,
        {"temperature": temperature, "seed": seed, **shares, "repetition_penalty": repetition_penalty},
        tuple(stop or ()),
    )
    _check_numbers(asked)
    if prompts is None and not temperature:
        usual = asdict(Sampling())
        changed = {f"--{_dashed(name)}": value for name, value in shares.items() if value != usual[name]}
        refuse(changed, "needs --temperature above 0")
    many = [asked] if prompts is None else _read_prompts(prompts, asked)
    opened, tokenizer = _open(how)
    if chat and not tokenizer.chats:
        raise CommandLineError("--chat needs a model with a chat template, or with <|im_start|> in its vocabulary")
    from threadpoolctl import threadpool_limits  # of the extra `model`, which `_open` has asked for

    before: list[Message] = [{"role": "system", "content": system}] if system else []
    encoded: list[list[int]] = []
    if talks:
        longest, place = _conversation(context, opened.config), "the conversation"
    else:
        encoded = _encoded(tokenizer, many, before if chat else None)
        _check_fit(many, encoded, opened.config.context)
        lengths = [len(ids) + each.tokens for ids, each in zip(encoded, many, strict=True)]
        longest, place = max(lengths), many[lengths.index(max(lengths))].where
    size = (batch or 1) if prompts is None else min(batch or _AT_ONCE, len(many))
    runner = _runner(how, opened, size, longest, place, fixed=batch is not None, at_once=prompts is None)
    # A step of one sequence is memory-bound; on a busy machine two threads wait for each other longer than they compute
    with threadpool_limits(1 if size == 1 else None, "blas"):
        if talks:
            _converse(runner, tokenizer, asked, before, how)
        elif prompts is None:
            _continue(runner, tokenizer, asked, encoded[0], how, echo="" if chat else asked.prompt)
        else:
            _serve(runner, tokenizer, many, encoded, how)


class _Computing(NamedTuple):
    """What computes: the options that a runner is made of."""

    model: str
    backend: str
    scheme: str | None
    group: int
    head: str
    prompt_attention: str
    memory: float | None
    quiet: bool


class _Asked(NamedTuple):
    """A prompt, how to go on from it (`sampling` as `Sampling` takes it), and where it was read."""

    prompt: str
    tokens: int
    sampling: dict[str, Any]
    stop: tuple[str, ...] = ()
    where: str = "the prompt"


class _Streamed(NamedTuple):
    """Text behind prompts, all tokens of the first sequence, and how long it took: seconds, tokens/s."""

    texts: list[GeneratedText]
    tokens: list[int]
    prompt_tokens: int
    prompt_seconds: float
    rate: float | None

    def note(self, where: str) -> None:
        """Say how fast it was."""
        said = f"{self.rate:.1f} tokens/s" if self.rate else "1 token"
        _note(f"{said}; prompt of {self.prompt_tokens} tokens in {self.prompt_seconds:.2f} s; {where}")


def _stream(
    runner: Runner,
    prompt: list[int],
    asked: _Asked,
    tokenizer: Tokenizer,
    *,
    echo: str = "",
    quiet: bool = False,
    goes_on: bool = False,
) -> _Streamed:
    """Write the first sequence's text behind `echo` as it is made, unless it is to be `quiet`."""
    size = runner.batch
    texts = [GeneratedText(tokenizer, asked.stop) for _ in range(size)]
    computed = len(prompt) - (int(runner.lengths[0]) if goes_on else 0)
    chunks = ceil_div(size * computed, runner.chunk)
    tokens, times = list[int](), [time.perf_counter()]
    with progress_bar("prompt", chunks, quiet=quiet or chunks == 1) as advance:
        how: dict[str, Any] = {"goes_on": goes_on, "progress": lambda: advance("prompt"), **asked.sampling}
        steps = generated(runner, [prompt] * size, asked.tokens, **how)
        first = next(steps)
    if not quiet:
        _write(echo)
    with interruptible(lambda: f"{len(tokens)} tokens are made"):
        for step in chain([first], steps):
            times.append(time.perf_counter())
            tokens.append(int(step[0]))
            for text, token in zip(texts, step.tolist(), strict=True):
                text.append(token)
            if not quiet:
                _write(texts[0].fresh())
            if all(text.ended for text in texts):
                break
    if not quiet:
        _write(texts[0].fresh(whole=True) + "\n")
    rate = size * (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else None
    return _Streamed(texts, tokens, computed, times[1] - times[0], rate)


def _continue(
    runner: Runner, tokenizer: Tokenizer, asked: _Asked, prompt: list[int], how: _Computing, *, echo: str
) -> None:
    """Stream the first continuation of a prompt behind the text `echo`, and print the others; or all as JSON."""
    streamed = _stream(runner, prompt, asked, tokenizer, echo=echo, quiet=how.quiet)
    if how.quiet:
        return print_json(
            {
                "model": how.model,
                "backend": how.backend,
                "recipe": _recipe(runner),
                "prompt_tokens": len(prompt),
                "tokens": [text.tokens for text in streamed.texts],
                "texts": [text.text for text in streamed.texts],
                "prefill_seconds": streamed.prompt_seconds,
                "tokens_per_second": streamed.rate,
            }
        )
    for i, text in enumerate(streamed.texts[1:], 2):
        _write(f"\n[{i}] {echo}{text.text}\n")
    streamed.note(_where(runner, how))


def _converse(runner: Runner, tokenizer: Tokenizer, asked: _Asked, before: Sequence[Message], how: _Computing) -> None:
    """Answer messages until there are no more; what the cache holds of the conversation is not computed again."""
    messages, held = [*before], list[int]()
    for message in _messages(asked.prompt):
        messages.append({"role": "user", "content": message})
        with naming("the message"):
            (prompt,) = tokenizer.encode_chats([messages])
        if len(prompt) + asked.tokens > runner.context:
            rule = f"must fit the conversation's {runner.context} tokens (--context) with --tokens and what came before"
            raise ArgumentError("the message", rule, f"{len(prompt)} + {asked.tokens}")
        # The template, or the tokenizer, may make other tokens of an answer's text than those that were generated.
        goes_on = 0 < len(held) < len(prompt) and prompt[: len(held)] == held
        streamed = _stream(runner, prompt, asked, tokenizer, goes_on=goes_on)
        streamed.note(_where(runner, how))
        messages.append({"role": "assistant", "content": streamed.texts[0].text})
        held = (prompt + streamed.tokens)[: int(runner.lengths[0])]


def _messages(first: str) -> Iterator[str]:
    """The first message, if there is one; then what is typed, up to an empty line, or every line that is piped in."""
    if first:
        yield first
    is_typed = sys.stdin.isatty()
    while True:
        try:
            message = input("\n> " if is_typed else "")
        except EOFError:
            return
        if message.strip():
            yield message
        elif is_typed:
            return


def _serve(
    runner: Runner, tokenizer: Tokenizer, asked: list[_Asked], encoded: list[list[int]], how: _Computing
) -> None:
    """All prompts through a `Server`, each printed in its turn once it is done. Exits with 1 where one failed."""
    server = Server(runner)
    texts = [GeneratedText(tokenizer, each.stop) for each in asked]
    requests: list[Request] = []
    for ids, each, text in zip(encoded, asked, texts, strict=True):
        with naming(each.where):
            requests.append(server.submit(ids, each.tokens, ends=text.ends, **each.sampling))
    text_of = dict(zip(requests, texts, strict=True))
    begin, shown = time.perf_counter(), 0
    while shown < len(requests):
        for request in server.step():
            if request.error is None:
                text_of[request].append(request.tokens[-1])
            if text_of[request].ended:
                server.cancel(request)
        while shown < len(requests) and requests[shown].done:
            if not how.quiet:
                _write(f"[{shown + 1}] {asked[shown].prompt}{texts[shown].text}\n")
                if requests[shown].error:
                    _note(f"[{shown + 1}] failed: {requests[shown].error}")
            shown += 1
    seconds, made = time.perf_counter() - begin, sum(len(request.tokens) for request in requests)
    if how.quiet:
        answers: list[dict[str, Any]] = [
            {
                "prompt_tokens": len(request.prompt),
                "tokens": text.tokens,
                "text": text.text,
                "error": request.error,
            }
            for request, text in text_of.items()
        ]
        rates: dict[str, Any] = {"seconds": seconds, "tokens_per_second": made / seconds}
        about: dict[str, Any] = {"model": how.model, "backend": how.backend, "recipe": _recipe(runner)}
        print_json({**about, **rates, "requests": answers})
    else:
        said = f"{len(requests)} prompts of {sum(map(len, encoded))} tokens, {runner.batch} at a time"
        _note(f"{made / seconds:.1f} tokens/s: {made} in {seconds:.2f} s; {said}; {_where(runner, how)}")
    if any(request.error for request in requests):
        raise typer.Exit(FAILED)


def _recipe(runner: Runner) -> dict[str, Any]:
    return {"scheme": "float"} if isinstance(runner, FloatRunner) else dict(runner.model.recipe)


def _where(runner: Runner, how: _Computing) -> str:
    if isinstance(runner, FloatRunner):
        return f"weights and KV cache in float32, on {'the GPU' if how.backend == 'gpu' else 'NumPy'}"
    torch = getattr(runner, "prompt_attention", "cache") == "torch"
    attention = "PyTorch's attention" if torch else "the decode attention"
    on_gpu = f"the GPU: a CUDA graph per step, the prompt by {attention}, in chunks of {runner.chunk} tokens"
    precision = {"atom": "W4A4", "fmpq": "W4Ax"}.get(runner.model.layers[0].qkv.scheme, "W4A8")
    return f"{precision}, KV4, on {on_gpu if how.backend == 'gpu' else 'NumPy'}"


def _note(said: str) -> None:
    notes.print(f"[dim]{escape(said)}[/]", highlight=False, soft_wrap=True)


def _read_prompts(path: Path, usual: _Asked) -> list[_Asked]:
    """The prompts of a file; what a line of .jsonl does not say is `usual`, with a further seed for each."""
    prompts: list[_Asked] = []
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
        settings: dict[str, Any] = {"tokens": usual.tokens, "stop": list(usual.stop), **usual.sampling}
        settings["seed"] += len(prompts)
        has_prompt = isinstance(keys, dict) and isinstance(keys.get("prompt"), str) and keys["prompt"]
        if not has_prompt or any(not _is_like(keys.get(key, value), value) for key, value in settings.items()):
            rule = "an object with a prompt, and perhaps tokens, stop (a list), temperature, seed and others"
            raise CommandLineError(f"{where}: expects {rule}, got {line.strip()[:60]!r}")
        for key in keys:
            if key not in ("prompt", *settings):
                raise CommandLineError(f"{where}: expects the keys prompt, {', '.join(settings)}, got {key[:60]!a}")
        settings |= keys
        prompt, tokens, stop = (settings.pop(key) for key in ("prompt", "tokens", "stop"))
        each = _Asked(prompt, tokens, settings, tuple(stop), where)
        try:
            _check_numbers(each)
        except CommandLineError as error:
            raise CommandLineError(f"{where}: {error}") from None
        prompts.append(each)
    if not prompts:
        raise CommandLineError(f"{path}: no prompt in it")
    return prompts


def _is_like(value: Any, usual: Any) -> bool:
    """Whether a JSON value is of the type of what stands for it otherwise, or an integer where that is a number."""
    return type(value) is type(usual) or (type(value) is int and not isinstance(usual, list))


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
        raise expects(f"--{_dashed(error.argument)}", error.rule.removeprefix("must be "), error.value) from None


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _backend(backend: str | None, scheme: str | None) -> str:
    if scheme == "float":
        return "gpu" if model_on_gpu(backend) else "numpy"
    if backend is None:
        return "gpu" if gpu.why_not("sm_90a", exact=True) is None else "numpy"
    if backend not in RUNNERS:
        raise expects("--backend", " or ".join(RUNNERS), backend)
    if backend == "gpu" and (reason := gpu.why_not("sm_90a", exact=True)):
        raise UnavailableError(f"--backend gpu: {reason}; pass --backend numpy")
    return backend


def _check(how: _Computing, batch: int | None) -> None:
    """Raise CommandLineError for a bad option, before anything is fetched."""
    if how.scheme not in (None, *SCHEMES):
        raise expects("--scheme", f"{', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}", how.scheme)
    if how.group not in GROUPS:
        raise expects("--group", ", ".join(map(str, GROUPS)), how.group)
    if how.head not in HEADS:
        raise expects("--head", " or ".join(HEADS), how.head)
    if how.prompt_attention not in PROMPT_ATTENTIONS:
        raise expects("--prompt-attention", " or ".join(PROMPT_ATTENTIONS), how.prompt_attention)
    by_torch = how.prompt_attention == "torch"
    if how.scheme == "float":
        others = {"--head int8": how.head != "float16" or None, "--prompt-attention torch": by_torch or None}
        refuse({**others, "--memory": how.memory}, "is not for --scheme float")
    if by_torch:
        if how.backend != "gpu":
            raise CommandLineError(f"--prompt-attention torch goes with --backend gpu (got {how.backend})")
        require_torch(on_gpu=True)
    if how.memory is not None:
        with _options():
            budget(how.memory)
    require_counts(batch=1 if batch is None else batch)


def _check_numbers(asked: _Asked) -> None:
    require_counts(tokens=asked.tokens)
    with _options():
        require_stop(asked.stop)
        Sampling(**asked.sampling)


def _conversation(context: int | None, config: Config) -> int:
    """How many tokens a conversation may have."""
    most = config.context
    if context is None:
        return _CONVERSATION if most is None else min(_CONVERSATION, most)
    require_counts(context=context)
    if most is not None and context > most:
        raise expects("--context", f"at most {most}, the model's context", context)
    return context


def _open(how: _Computing) -> tuple[FloatModel | QuantizedModel, Tokenizer]:
    """A model, quantised already or not; one that has a name is downloaded."""
    path = Path(how.model)
    if not is_quantized(path) or how.scheme == "float":
        return opened_model(how.model, quiet=how.quiet)
    if how.scheme is not None:
        raise CommandLineError(f"--scheme {how.scheme} goes with weights that are not quantised yet")
    quantized = load(path)
    return quantized, open_tokenizer(path, quantized.config)


def _runner(
    how: _Computing,
    opened: FloatModel | QuantizedModel,
    size: int,
    context: int,
    longest: str,
    *,
    fixed: bool,
    at_once: bool,
) -> Runner:
    """A runner of `size` sequences, or fewer where --memory holds no more and the size is not `fixed`."""
    if how.scheme == "float" and isinstance(opened, FloatModel):
        return FloatRunner(opened.to_device() if how.backend == "gpu" else opened, size, context)
    by_torch: dict[str, Any] = {"prompt_attention": "torch"} if how.prompt_attention == "torch" else {}
    options: dict[str, Any] = {
        "head": how.head,
        "chunk": min(_CHUNK_OF_TORCH, size * context) if by_torch else None,
    }
    pages, scheme = None, how.scheme or "lqq"
    if how.memory is not None:
        rounding = {"group": how.group, "scheme": scheme}
        counted = weights_of(opened) if isinstance(opened, QuantizedModel) else rounding
        size, pages = _fitted(
            how.memory, opened.config, size, context, longest, fixed=fixed, at_once=at_once, **options, **counted
        )
    if isinstance(opened, FloatModel):
        opened = _rounded(opened, how.model, scheme, how.group, quiet=how.quiet)
    return RUNNERS[how.backend](opened, size, context, pages=pages, **options, **by_torch)


def _rounded(model: FloatModel, source: str, scheme: str, group: int, *, quiet: bool) -> QuantizedModel:
    """Round the weights to nearest, and say so."""
    with progress_bar("round", model.config.layers, quiet=quiet) as advance:
        rounded = QuantizedModel.rounded(model, scheme, group, progress=advance)
    if not quiet:
        grain = "per channel" if scheme == "qoq_channel" else f"in groups of {group}"
        name = {"lqq": "LQQ"}.get(scheme, "QoQ")
        _note(f"{Path(source).name}: weights rounded to nearest, {name} {grain}, uncalibrated")
    return rounded


def _encoded(tokenizer: Tokenizer, asked: list[_Asked], before: list[Message] | None) -> list[list[int]]:
    """The tokens of prompts; asked in the chat template behind the messages `before`, unless that is None."""
    if before is None:
        encoded = []
        for each in asked:
            with naming(each.where):
                encoded.append(tokenizer.encode_prompt(each.prompt))
        return encoded
    return tokenizer.encode_chats([[*before, {"role": "user", "content": each.prompt}] for each in asked])


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
