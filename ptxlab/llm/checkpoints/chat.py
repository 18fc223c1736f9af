"""`ChatTemplate`: how a model was trained to be spoken to, as Hugging Face folders and GGUF files keep it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from ptxlab.errors import FileError, UnavailableError
from ptxlab.io.files import read_json, read_text
from ptxlab.llm.checkpoints import render_chat
from ptxlab.llm.checkpoints.limited_process import Limits, ProgramError, run_program

Message = Mapping[str, str]  # with `role` (system, user or assistant) and `content`
_FILE, _CONFIG, _MAP = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
_LAST_LINE_END = re.compile(r"(\r\n|\r|\n)\Z")  # which Jinja drops
_WALL = 10  # times the seconds of processor time, on a busy machine


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template of messages.

    Attributes:
        text: the template.
        tokens: special tokens by the names that templates use, such as `bos_token`.
        source: the file that it is from.
        unset: names of tokens that the model does without: nothing in a text. Any other `*_token` must be defined.
    """

    text: str
    tokens: Mapping[str, str]
    source: Path
    unset: frozenset[str] = frozenset()

    @classmethod
    def from_folder(cls, path: Path) -> Self | None:
        """Read chat_template.jinja or else tokenizer_config.json; None where neither has one. Raises FileError.

        The special tokens are, as in transformers, those of `extra_special_tokens` of tokenizer_config.json, else of
        special_tokens_map.json, which is not looked at beside `added_tokens_decoder`, else of tokenizer_config.json.
        """
        config = path / _CONFIG
        settings = read_object(config)
        extra_tokens = settings.get("extra_special_tokens")
        special_tokens: dict[str, str] = {}
        null_names: set[str] = set()
        special_tokens_map = {} if "added_tokens_decoder" in settings else read_object(path / _MAP)
        for part in (settings, special_tokens_map, extra_tokens if isinstance(extra_tokens, dict) else {}):
            tokens = {name: _content(token) for name, token in part.items() if name.endswith("_token")}
            special_tokens |= {name: token for name, token in tokens.items() if token is not None}
            null_names |= {name for name in tokens if part[name] is None}
        unset = frozenset(null_names - special_tokens.keys())
        if (path / _FILE).is_file():
            return cls(read_text(path / _FILE), special_tokens, path / _FILE, unset)
        text = settings.get("chat_template")
        if isinstance(text, list):  # several by name
            text = next((entry.get("template") for entry in text if _is_default(entry)), None)
        if text is not None and not isinstance(text, str):
            raise FileError(
                f"{config}: chat_template: must be a template, or a list of them by name (got {text!r:.40})"
            )
        return None if text is None else cls(text, special_tokens, config, unset)

    @classmethod
    def from_gguf(cls, path: Path, metadata: Mapping[str, Any], *, begins: bool = False) -> Self | None:
        """Read the chat template of a GGUF file's metadata; None if there is none.

        With `begins` the start token is ahead of a conversation, once, whether the template has it or not.
        """
        text, tokens = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.ggml.tokens", [])
        if not isinstance(text, str):
            return None
        ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
        token_ids = {name: i for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}
        if begins and "bos" in token_ids:
            text = _begin_with_start_token(text)
        return cls(text, {f"{name}_token": tokens[i] for name, i in token_ids.items()}, path)

    @property
    def settings(self) -> dict[str, str | None]:
        """The settings that `from_folder` reads, as keys of tokenizer_config.json."""
        return {**self.tokens, **dict.fromkeys(sorted(self.unset)), "chat_template": self.text}

    def render(self, chats: Sequence[Sequence[Message]]) -> list[str]:
        """Render conversations as texts, each up to where the assistant's next message begins.

        Raises FileError for a template that fails, takes too long, or has a token that no file defines;
        UnavailableError without `jinja2`.
        """
        if find_spec("jinja2") is None:
            raise UnavailableError("jinja2: needed for chat templates; python -m pip install 'ptxlab[model]'")
        arguments = {"add_generation_prompt": True, "tools": None, "documents": None}  # as transformers calls it
        request = {
            "template": self.text,
            "variables": {**self.tokens, **arguments},
            "unset": sorted(self.unset),
            "chats": [[dict(message) for message in messages] for messages in chats],
        }
        seconds = render_chat.SECONDS + len(chats) // render_chat.CHATS_PER_SECOND
        limits = Limits(_WALL * seconds, render_chat.BYTES, seconds)
        try:
            texts: list[str] = run_program(Path(render_chat.__file__), request, limits)
        except ProgramError as error:
            raise FileError(f"{self.source}: the chat template fails: {error}") from None
        return texts


def read_object(file: Path) -> Mapping[str, Any]:
    """Read a JSON file, which must hold an object; {} where there is none."""
    if not file.is_file():
        return {}
    content = read_json(file)
    if not isinstance(content, dict):
        raise FileError(f"{file}: not a JSON object")
    return content


def _begin_with_start_token(text: str) -> str:
    """Put the start token ahead of a template, unless it is there; `+` keeps blanks at the seams."""
    template = _LAST_LINE_END.sub("", text)
    start_once = "{{ whole if whole.startswith(bos_token) else bos_token ~ whole }}"
    return f"{{% set whole +%}}{template}{{%+ endset %}}{start_once}"


def _content(token: Any) -> str | None:
    """Return a special token of tokenizer_config.json, which may be an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _is_default(named: Any) -> bool:
    return isinstance(named, dict) and named.get("name") == "default"
