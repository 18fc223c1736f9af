"""What `ptxlab generate` writes: a text as it is made, a conversation, or the texts of many prompts."""

import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import typer
from rich.markup import escape

from ptxlab.arithmetic import ceil_div
from ptxlab.cli.common import FAILED, CommandLineError, interruptible, notes, print_json, progress_bar
from ptxlab.errors import ArgumentError, naming
from ptxlab.llm.checkpoints.chat import Message
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.llm.cli.prompts import Prompt
from ptxlab.llm.generated_text import GeneratedText
from ptxlab.llm.model import FloatRunner, Runner
from ptxlab.llm.model.generate import generate
from ptxlab.llm.server import Request, Server


class Computing(NamedTuple):
    """The options that a runner is made of."""

    model: str
    backend: str
    scheme: str | None
    group: int | None
    head: str
    cache: str | None
    rotated: bool | None
    memory: float | None
    quiet: bool


class _Streamed(NamedTuple):
    """Text behind prompts, all tokens of the first sequence, and how long it took: seconds, tokens/s."""

    generated_texts: list[GeneratedText]
    tokens: list[int]
    prompt_tokens: int
    prompt_seconds: float
    rate: float | None

    def speed(self) -> str:
        """Describe the speed: tokens per second, and the seconds that the prompt took."""
        rate = f"{self.rate:.1f} tokens/s" if self.rate else "1 token"
        return f"{rate}; prompt of {self.prompt_tokens} tokens in {self.prompt_seconds:.2f} s"


def _stream(
    runner: Runner,
    ids: list[int],
    prompt: Prompt,
    tokenizer: Tokenizer,
    *,
    echo: str = "",
    quiet: bool = False,
    goes_on: bool = False,
) -> _Streamed:
    """Write the first sequence's text after `echo` as it is generated, unless `quiet`."""
    size = runner.batch
    generated_texts = [GeneratedText(tokenizer, prompt.stop) for _ in range(size)]
    computed_tokens = len(ids) - (int(runner.lengths[0]) if goes_on else 0)
    chunks = ceil_div(size * computed_tokens, runner.chunk)
    tokens, times = list[int](), [time.perf_counter()]
    with progress_bar("prompt", chunks, quiet=quiet or chunks == 1) as advance:
        options: dict[str, Any] = {"goes_on": goes_on, "progress": lambda: advance("prompt"), **prompt.sampling}
        steps = generate(runner, [ids] * size, prompt.tokens, **options)
        first_step = next(steps)
    if not quiet:
        _write(echo)
    with interruptible(lambda: f"generate: {len(tokens)} of {prompt.tokens} tokens; what is printed is kept"):
        for step in chain([first_step], steps):
            times.append(time.perf_counter())
            tokens.append(int(step[0]))
            for generated, token in zip(generated_texts, step.tolist(), strict=True):
                generated.append(token)
            if not quiet:
                _write(generated_texts[0].fresh())
            if all(generated.ended for generated in generated_texts):
                break
    if not quiet:
        _write(generated_texts[0].fresh(whole=True) + "\n")
    rate = size * (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else None
    return _Streamed(generated_texts, tokens, computed_tokens, times[1] - times[0], rate)


def continue_text(
    runner: Runner, tokenizer: Tokenizer, prompt: Prompt, ids: list[int], computing: Computing, *, echo: str
) -> None:
    """Stream the first continuation of a prompt after the text `echo`, then print the others; or print all as JSON."""
    text_stream = _stream(runner, ids, prompt, tokenizer, echo=echo, quiet=computing.quiet)
    if computing.quiet:
        return print_json(
            {
                "model": computing.model,
                "backend": computing.backend,
                "recipe": _recipe(runner),
                "prompt_tokens": len(ids),
                "tokens": [generated.tokens for generated in text_stream.generated_texts],
                "texts": [generated.text for generated in text_stream.generated_texts],
                "prefill_seconds": text_stream.prompt_seconds,
                "tokens_per_second": text_stream.rate,
            }
        )
    for i, generated in enumerate(text_stream.generated_texts[1:], 2):
        _write(f"\n[{i}] {echo}{generated.text}\n")
    note(f"{text_stream.speed()}; {_describe_backend(runner, computing)}")


def converse(
    runner: Runner, tokenizer: Tokenizer, prompt: Prompt, opening: Sequence[Message], computing: Computing
) -> None:
    """Answer messages until there are no more; what the cache holds of the conversation is not computed again."""
    messages, cached_tokens = [*opening], list[int]()
    for message in _messages(prompt.text):
        messages.append({"role": "user", "content": message})
        with naming("the message"):
            (ids,) = tokenizer.encode_chats([messages])
        if len(ids) + prompt.tokens > runner.context:
            rule = f"must fit the conversation's {runner.context} tokens (--context) with --tokens and what came before"
            raise ArgumentError("the message", rule, f"{len(ids)} + {prompt.tokens}")
        # The template, or the tokenizer, may make other tokens of an answer's text than those that were generated.
        goes_on = 0 < len(cached_tokens) < len(ids) and ids[: len(cached_tokens)] == cached_tokens
        text_stream = _stream(runner, ids, prompt, tokenizer, goes_on=goes_on)
        note(f"{text_stream.speed()}; {_describe_backend(runner, computing)}")
        messages.append({"role": "assistant", "content": text_stream.generated_texts[0].text})
        cached_tokens = (ids + text_stream.tokens)[: int(runner.lengths[0])]


def _messages(first: str) -> Iterator[str]:
    """Yield the first message, if there is one, then messages from standard input.

    Typed messages end at an empty line; from a pipe every line is one.
    """
    if first:
        yield first
    is_typed = sys.stdin.isatty()
    while True:
        try:
            message = input("\n> " if is_typed else "")
        except EOFError:
            return
        except UnicodeDecodeError:
            raise CommandLineError("standard input: a message must be UTF-8") from None
        if message.strip():
            yield message
        elif is_typed:
            return


def serve_prompts(
    runner: Runner, tokenizer: Tokenizer, prompts: list[Prompt], encoded: list[list[int]], computing: Computing
) -> None:
    """Put all prompts through a `Server`, each printed in its turn once it is done. Exits with 1 where one failed."""
    server = Server(runner)
    generated_texts = [GeneratedText(tokenizer, prompt.stop) for prompt in prompts]
    requests: list[Request] = []
    for ids, prompt, generated in zip(encoded, prompts, generated_texts, strict=True):
        with naming(prompt.place):
            requests.append(server.submit(ids, prompt.tokens, ends=generated.ends, **prompt.sampling))
    generated_by_request = dict(zip(requests, generated_texts, strict=True))
    start, shown_count = time.perf_counter(), 0
    on_terminal = sys.stdout.isatty()  # which shows the answers, between which a bar would stand
    interruption_note = "what is printed is kept"
    with progress_bar(
        "prompts", len(requests), quiet=computing.quiet or on_terminal, keeps=interruption_note
    ) as advance:
        while shown_count < len(requests):
            for request in server.step():
                if request.error is None:
                    generated_by_request[request].append(request.tokens[-1])
                if generated_by_request[request].ended:
                    server.cancel(request)
            while shown_count < len(requests) and requests[shown_count].done:
                if not computing.quiet:
                    _write(f"[{shown_count + 1}] {prompts[shown_count].text}{generated_texts[shown_count].text}\n")
                    if requests[shown_count].error:
                        note(f"[{shown_count + 1}] failed: {requests[shown_count].error}")
                shown_count += 1
                advance(f"prompt {shown_count}")
    seconds, tokens = time.perf_counter() - start, sum(len(request.tokens) for request in requests)
    if computing.quiet:
        answers: list[dict[str, Any]] = [
            {
                "prompt_tokens": len(request.prompt),
                "tokens": generated.tokens,
                "text": generated.text,
                "error": request.error,
            }
            for request, generated in generated_by_request.items()
        ]
        rates: dict[str, Any] = {"seconds": seconds, "tokens_per_second": tokens / seconds}
        run_facts: dict[str, Any] = {"model": computing.model, "backend": computing.backend, "recipe": _recipe(runner)}
        print_json({**run_facts, **rates, "requests": answers})
    else:
        summary = f"{len(requests)} prompts of {sum(map(len, encoded))} tokens, {runner.batch} at a time"
        speed = f"{tokens / seconds:.1f} tokens/s: {tokens} in {seconds:.2f} s"
        note(f"{speed}; {summary}; {_describe_backend(runner, computing)}")
    if any(request.error for request in requests):
        raise typer.Exit(FAILED)


def _recipe(runner: Runner) -> dict[str, Any]:
    return {"scheme": "float"} if isinstance(runner, FloatRunner) else dict(runner.model.recipe)


def _describe_backend(runner: Runner, computing: Computing) -> str:
    if isinstance(runner, FloatRunner):
        return f"weights and KV cache in float32, on {'the GPU' if computing.backend == 'gpu' else 'NumPy'}"
    gpu_sentence = f"the GPU: a CUDA graph per step, the prompt in chunks of {runner.chunk} tokens"
    precision = {"atom": "W4A4", "fmpq": "W4Ax"}.get(runner.model.layers[0].qkv.scheme, "W4A8")
    cache = runner.cache.upper().replace("_CHANNEL", " by channel") + (" with rotated keys" if runner.rotated else "")
    return f"{precision}, {cache}, on {gpu_sentence if computing.backend == 'gpu' else 'NumPy'}"


def note(remark: str) -> None:
    """Print a remark on standard error."""
    notes.print(f"[dim]{escape(remark)}[/]", highlight=False, soft_wrap=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
