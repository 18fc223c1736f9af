"""Prompts of `ptxlab generate`: with what they are asked for, checked, read from files, and as tokens."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ptxlab.cli.common import CommandLineError, expects, require_counts
from ptxlab.errors import ArgumentError, naming
from ptxlab.io.files import read_text
from ptxlab.llm.checkpoints.chat import Message
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.llm.generated_text import require_stop
from ptxlab.llm.model import Sampling


class Prompt(NamedTuple):
    """A prompt, how to go on from it (`sampling` as `Sampling` takes it), and where it was read."""

    prompt: str
    tokens: int
    sampling: dict[str, Any]
    stop: tuple[str, ...] = ()
    where: str = "the prompt"


def read_prompts(path: Path, usual: Prompt) -> list[Prompt]:
    """The prompts of a file; what a line of .jsonl does not say is `usual`, with a further seed for each."""
    prompts: list[Prompt] = []
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
        each = Prompt(prompt, tokens, settings, tuple(stop), where)
        try:
            check_prompt(each)
        except CommandLineError as error:
            raise CommandLineError(f"{where}: {error}") from None
        prompts.append(each)
    if not prompts:
        raise CommandLineError(f"{path}: no prompt in it")
    return prompts


def _is_like(value: Any, usual: Any) -> bool:
    """Whether a JSON value is of the type of what stands for it otherwise, or an integer where that is a number."""
    return type(value) is type(usual) or (type(value) is int and not isinstance(usual, list))


def require_fit(asked: list[Prompt], encoded: list[list[int]], most: int | None) -> None:
    """Raise for a prompt that does not fit the model's context."""
    for each, given in zip(asked, encoded, strict=True):
        if most is not None and len(given) + each.tokens > most:
            rule = f"must fit the model's context of {most} tokens with its --tokens"
            raise ArgumentError(each.where, rule, f"{len(given)} + {each.tokens}")


def check_prompt(asked: Prompt) -> None:
    """Raise CommandLineError for a number or a stop string that is not allowed."""
    require_counts(tokens=asked.tokens)
    with naming_options():
        require_stop(asked.stop)
        Sampling(**asked.sampling)


@contextmanager
def naming_options() -> Iterator[None]:
    """An `ArgumentError` inside is about the option of the argument's name."""
    try:
        yield
    except ArgumentError as error:
        raise expects(f"--{dashed(error.argument)}", error.rule.removeprefix("must be "), error.value) from None


def dashed(name: str) -> str:
    """An argument's name as an option has it."""
    return name.replace("_", "-")


def encode_prompts(tokenizer: Tokenizer, asked: list[Prompt], before: list[Message] | None) -> list[list[int]]:
    """The tokens of prompts; asked in the chat template behind the messages `before`, unless that is None."""
    if before is None:
        encoded = []
        for each in asked:
            with naming(each.where):
                encoded.append(tokenizer.encode_prompt(each.prompt))
        return encoded
    return tokenizer.encode_chats([[*before, {"role": "user", "content": each.prompt}] for each in asked])
