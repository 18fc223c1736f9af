"""Prompts of `ptxlab generate`: with what they are asked for, checked, read from files, and as tokens."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from ptxlab.cli.common import CommandLineError, expects, require_counts
from ptxlab.errors import ArgumentError, naming
from ptxlab.io.files import read_text
from ptxlab.llm.checkpoints.chat import Message
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.llm.generated_text import require_stop
from ptxlab.llm.model import Sampling

_SHARES = ("top_k", "top_p", "min_p")  # without effect where the likeliest token is taken


class Prompt(NamedTuple):
    """A prompt, how to go on from it (`sampling` as `Sampling` takes it), and where it was read."""

    text: str
    tokens: int
    sampling: dict[str, Any]
    stop: tuple[str, ...] = ()
    place: str = "the prompt"


def read_prompts(path: Path, usual: Prompt) -> list[Prompt]:
    """Read the prompts of a file; what a line of .jsonl does not say is `usual`, with a further seed for each."""
    prompts: list[Prompt] = []
    text = read_text(path, newline="\n").removeprefix("\ufeff")
    for number, line in enumerate(text.split("\n"), 1):  # `splitlines` would split at characters of JSON and texts
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        keys: Any = {"prompt": line}
        if path.suffix == ".jsonl":
            try:
                keys = json.loads(line)
            except (ValueError, RecursionError):
                keys = None
        settings: dict[str, Any] = {"tokens": usual.tokens, "stop": list(usual.stop), **usual.sampling}
        settings["seed"] += len(prompts)
        has_prompt = isinstance(keys, dict) and isinstance(keys.get("prompt"), str) and keys["prompt"]
        if not has_prompt or any(not _is_like(keys.get(key, default), default) for key, default in settings.items()):
            rule = "an object with a prompt, and perhaps tokens, stop (a list), temperature, seed and others"
            raise CommandLineError(f"{place}: expects {rule}, got {line.strip()[:60]!r}")
        for key in keys:
            if key not in ("prompt", *settings):
                raise CommandLineError(f"{place}: expects the keys prompt, {', '.join(settings)}, got {key[:60]!a}")
        settings |= keys
        ignored_options = changed_shares(keys)
        if ignored_options and not settings["temperature"]:
            raise CommandLineError(f"{place}: {', '.join(ignored_options)} needs a temperature above 0")
        content, tokens, stop = (settings.pop(key) for key in ("prompt", "tokens", "stop"))
        prompt = Prompt(content, tokens, settings, tuple(stop), place)
        try:
            check_prompt(prompt)
        except CommandLineError as error:
            raise CommandLineError(f"{place}: {error}") from None
        prompts.append(prompt)
    if not prompts:
        raise CommandLineError(f"{path}: no prompt in it")
    return prompts


def _is_like(setting: Any, usual: Any) -> bool:
    """Tell whether a JSON value is of the type of the usual one, or an integer where that is a number."""
    return type(setting) is type(usual) or (type(setting) is int and not isinstance(usual, list))


def require_fit(prompts: list[Prompt], encoded: list[list[int]], limit: int | None) -> None:
    """Raise for a prompt that does not fit the model's context."""
    for prompt, ids in zip(prompts, encoded, strict=True):
        if limit is not None and len(ids) + prompt.tokens > limit:
            rule = f"must fit the model's context of {limit} tokens with its --tokens"
            raise ArgumentError(prompt.place, rule, f"{len(ids)} + {prompt.tokens}")


def check_prompt(prompt: Prompt) -> None:
    """Raise CommandLineError for a number or a stop string that is not allowed."""
    require_counts(tokens=prompt.tokens)
    with naming_options():
        require_stop(prompt.stop)
        Sampling(**prompt.sampling)


def changed_shares(sampling: Mapping[str, Any]) -> list[str]:
    """Name the settings that say which tokens are drawn from, where they leave any out."""
    defaults = asdict(Sampling())
    return [name for name in _SHARES if sampling.get(name, defaults[name]) != defaults[name]]


@contextmanager
def naming_options() -> Iterator[None]:
    """Turn an `ArgumentError` raised inside into an error about the option of the argument's name."""
    try:
        yield
    except ArgumentError as error:
        raise expects(f"--{option_name(error.argument)}", error.rule.removeprefix("must be "), error.value) from None


def option_name(name: str) -> str:
    """Spell an argument's name as options are spelled."""
    return name.replace("_", "-")


def encode_prompts(tokenizer: Tokenizer, prompts: list[Prompt], opening: list[Message] | None) -> list[list[int]]:
    """Encode prompts; in the chat template after the messages `opening`, unless that is None."""
    if opening is None:
        encoded_prompts = []
        for prompt in prompts:
            with naming(prompt.place):
                encoded_prompts.append(tokenizer.encode_prompt(prompt.text))
        return encoded_prompts
    return tokenizer.encode_chats([[*opening, {"role": "user", "content": prompt.text}] for prompt in prompts])
