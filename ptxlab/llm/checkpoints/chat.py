"""`ChatTemplate`: how a model was trained to be spoken to, as Hugging Face folders and GGUF files keep it."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from ptxlab.errors import FileError, UnavailableError
from ptxlab.io.files import read_json, read_text, write_text
from ptxlab.llm.checkpoints import render_chat

Message = Mapping[str, str]  # with `role` (system, user or assistant) and `content`
_FILE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template of messages.

    Attributes:
        text: the template.
        tokens: special tokens by the names that templates use, such as `bos_token`.
        source: the file that it is from.
    """

    text: str
    tokens: Mapping[str, str]
    source: Path

    @classmethod
    def from_folder(cls, path: Path) -> Self | None:
        """Read chat_template.jinja or else tokenizer_config.json; None where neither has one. Raises FileError."""
        config = path / _CONFIG
        settings = read_json(config) if config.is_file() else {}
        if not isinstance(settings, dict):
            raise FileError(f"{config}: not a JSON object")
        tokens = {name: _content(token) for name, token in settings.items() if name.endswith("_token")}
        named = {name: token for name, token in tokens.items() if token is not None}
        if (path / _FILE).is_file():
            return cls(read_text(path / _FILE), named, path / _FILE)
        text = settings.get("chat_template")
        if isinstance(text, list):  # several by name
            text = next((entry.get("template") for entry in text if _is_default(entry)), None)
        if text is not None and not isinstance(text, str):
            raise FileError(
                f"{config}: chat_template: must be a template, or a list of them by name (got {text!r:.40})"
            )
        return None if text is None else cls(text, named, config)

    @classmethod
    def from_gguf(cls, path: Path, metadata: Mapping[str, Any]) -> Self | None:
        """Take it out of a GGUF file's metadata; None where it is not there."""
        text, tokens = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.ggml.tokens", [])
        if not isinstance(text, str):
            return None
        ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
        named = {name: i for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}
        return cls(text, {f"{name}_token": tokens[i] for name, i in named.items()}, path)

    def save(self, folder: Path) -> None:
        """Write what `from_folder` reads."""
        write_text(folder / _CONFIG, json.dumps({**self.tokens, "chat_template": self.text}, indent=1) + "\n")

    def render(self, chats: Sequence[Sequence[Message]]) -> list[str]:
        """Render conversations as texts, each up to where the assistant's next message begins.

        Raises FileError for a template that fails or takes too long, UnavailableError without `jinja2`.
        """
        if find_spec("jinja2") is None:
            raise UnavailableError("jinja2: needed for chat templates; python -m pip install 'ptxlab[model]'")
        arguments = {"add_generation_prompt": True, "tools": None, "documents": None}  # as transformers calls it
        request = {
            "template": self.text,
            "variables": {**self.tokens, **arguments},
            "chats": [[dict(message) for message in messages] for messages in chats],
        }
        command = [sys.executable, "-P", render_chat.__file__]
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
        try:
            answer = json.loads(done.stdout)
        except ValueError:  # it was killed, and left nothing
            answer = {"error": f"takes more than {render_chat.seconds(len(chats))} s or {render_chat.BYTES >> 20} MiB"}
        if "error" in answer:
            raise FileError(f"{self.source}: the chat template fails: {answer['error']}")
        texts: list[str] = answer["texts"]
        return texts


def _content(token: Any) -> str | None:
    """Return a special token of tokenizer_config.json, which may be an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _is_default(named: Any) -> bool:
    return isinstance(named, dict) and named.get("name") == "default"
