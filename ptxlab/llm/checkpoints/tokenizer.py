"""Tokenizers of Hugging Face folders and GGUF files."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError, FileError, PtxlabError, UnavailableError
from ptxlab.io.files import read_json, write_text
from ptxlab.llm.checkpoints.chat import ChatTemplate, Message
from ptxlab.validate import is_integer

# How byte-level tokenizers split text into words before they merge bytes: `tokenizer.ggml.pre` -> pattern.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _GPT2,  # after each digit was split off
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3")  # a word that is a token is not merged; texts begin with a start token
_CHATML_START = "<|im_start|>"
_CONTROL, _USER_DEFINED = 3, 4  # values of `tokenizer.ggml.token_type` of tokens that no merge yields


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to tokens and back.

    Attributes:
        ends: the tokens that end a generated text.
        template: of conversations, or None.
    """

    ends: tuple[int, ...]
    _library: Any = field(repr=False)
    template: ChatTemplate | None = field(default=None, repr=False)

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        count: int = self._library.get_vocab_size()
        return count

    @property
    def start(self) -> int | None:
        """The token that the model expects at the start of a text, or None."""
        of_nothing = self._library.encode("").ids
        return of_nothing[0] if of_nothing else None

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """The tokens of a text, [T], without one for its start. Raises ArgumentError for what UTF-8 cannot hold."""
        try:
            return np.array(self._library.encode(text, add_special_tokens=False).ids, np.int64)
        except TypeError:
            raise ArgumentError("text", "must be a str without lone surrogates", ascii(text)) from None

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; special tokens are left out."""
        text: str = self._library.decode([int(token) for token in tokens], skip_special_tokens=True)
        return text

    @property
    def chats(self) -> bool:
        """True where the model can be asked: it has a template, or ChatML's tokens."""
        return self.template is not None or len(self.encode(_CHATML_START)) == 1

    def encode_chats(self, chats: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Encode conversations, with the token of their start, up to where the assistant's next message begins.

        By the model's template; in ChatML where it has none. Raises what `ChatTemplate.render` raises.
        """
        if self.template is not None:
            return [self.encode(text).tolist() for text in self.template.render(chats)]
        return [self.encode_prompt(_chatml(messages)) for messages in chats]

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text that a model goes on from, with the token of its start."""
        tokens: list[int] = self.encode(text).tolist()
        return tokens if self.start is None else [self.start, *tokens]

    @classmethod
    def from_folder(cls, path: Path) -> Self:
        """From tokenizer.json; the end tokens are those of generation_config.json or else config.json.

        Raises FileError if a file is missing or broken, UnavailableError without `tokenizers`.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise FileError(f"{path}: no tokenizer.json")
        kind = library().Tokenizer
        try:
            made = kind.from_file(str(file))
        except Exception as error:  # it raises no narrower class
            raise FileError(f"{file}: not a readable tokenizer ({' '.join(str(error).split())})") from None
        return cls(_ends(path), made, template=ChatTemplate.from_folder(path))

    def save(self, folder: Path) -> None:
        """Write what `from_folder` reads: tokenizer.json, generation_config.json, and the template."""
        write_text(folder / "tokenizer.json", self._library.to_str())
        write_text(folder / "generation_config.json", json.dumps({"eos_token_id": [*self.ends]}) + "\n")
        if self.template is not None:
            self.template.save(folder)

    @classmethod
    def from_gguf(cls, path: Path, metadata: Mapping[str, Any]) -> Self:
        """From the metadata of the GGUF file at `path`: byte-level BPE (`gpt2`), or SentencePiece's BPE (`llama`).

        Raises FileError for another kind, or one that is broken; UnavailableError without `tokenizers`.
        """
        get = _Metadata(path, metadata)
        tokens, kinds, model = get("tokens", list), get("token_type", np.ndarray), get("model", str)
        if len(kinds) != len(tokens):
            raise get.wrong("token_type", f"must be {len(tokens)}", len(kinds))
        split = get("pre", str, "default") if model == "gpt2" else ""
        if model not in ("gpt2", "llama"):
            raise get.wrong("model", "must be gpt2 or llama", model)
        if split and split not in _PATTERNS:
            raise get.wrong("pre", f"must be one of {', '.join(_PATTERNS)}", split)
        try:
            made = _byte_level(get, tokens, split) if split else _sentence_piece(get, tokens)
        except PtxlabError:
            raise
        except Exception as error:  # the library raises no narrower class
            raise FileError(f"{path}: not a readable tokenizer ({' '.join(str(error).split())})") from None
        made.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL])
        made.add_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED])
        if get("add_bos_token", bool, model == "llama" or split in _LLAMA3_NAMES):
            start = get.token("bos", len(tokens))
            made.post_processor = library().processors.TemplateProcessing(
                single=f"{tokens[start]} $A", special_tokens=[(tokens[start], start)]
            )
        return cls((get.token("eos", len(tokens)),), made, template=ChatTemplate.from_gguf(path, metadata))


def _chatml(messages: Sequence[Message]) -> str:
    turns = [f"{_CHATML_START}{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    return "".join(turns) + f"{_CHATML_START}assistant\n"


@dataclass(frozen=True)
class _Metadata:
    """A GGUF file's metadata of the tokenizer, by the key without `tokenizer.ggml.`."""

    path: Path
    values: Mapping[str, Any]

    def __call__(self, key: str, kind: type, *default: Any) -> Any:
        """The value of a key, of the type `kind`; without a default the key must exist."""
        value = self.values.get(f"tokenizer.ggml.{key}", *default)
        if not isinstance(value, kind):
            raise self.wrong(key, f"must be of type {kind.__name__}", type(value).__name__)
        return value

    def token(self, which: str, tokens: int) -> int:
        """The number of a special token."""
        number: int = self(f"{which}_token_id", int)
        if not 0 <= number < tokens:
            raise self.wrong(f"{which}_token_id", f"must lie in 0..{tokens - 1}", number)
        return number

    def wrong(self, key: str, rule: str, value: object) -> FileError:
        """The error for a key's value."""
        return FileError(f"{self.path}: tokenizer.ggml.{key}: {rule} (got {value})")


def _byte_level(get: _Metadata, tokens: list[str], split: str) -> Any:
    """BPE over bytes, within the words that a pattern splits text into."""
    found = library()
    merges = [tuple(merge.split(" ")) for merge in get("merges", list)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = found.Tokenizer(found.models.BPE(vocabulary, merges, ignore_merges=split in _LLAMA3_NAMES))
    words, steps = found.pre_tokenizers, []
    if split == "smollm":
        steps.append(words.Digits(individual_digits=True))
    steps.append(words.Split(found.Regex(_PATTERNS[split]), "isolated"))
    steps.append(words.ByteLevel(add_prefix_space=False, use_regex=False))
    made.pre_tokenizer, made.decoder = words.Sequence(steps), found.decoders.ByteLevel()
    if split == "qwen2":
        made.normalizer = found.normalizers.NFC()
    return made


def _sentence_piece(get: _Metadata, tokens: list[str]) -> Any:
    """BPE over characters, or bytes of a character that is no token; the pair whose token scores best merges first."""
    found = library()
    scores, vocabulary = get("scores", np.ndarray), {token: i for i, token in enumerate(tokens)}
    if len(scores) != len(tokens):
        raise get.wrong("scores", f"must be {len(tokens)}", len(scores))
    merges = [
        (token[:cut], token[cut:])
        for i in np.argsort(-scores, kind="stable")
        for token in [tokens[i]]
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    unknown = tokens[get.token("unknown", len(tokens))]
    made = found.Tokenizer(found.models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    before = [found.normalizers.Replace(" ", "▁")]
    after = [found.decoders.Replace("▁", " "), found.decoders.ByteFallback(), found.decoders.Fuse()]
    if get("add_space_prefix", bool, True):
        before.insert(0, found.normalizers.Prepend("▁"))
        after.append(found.decoders.Strip(" ", 1, 0))
    made.normalizer, made.decoder = found.normalizers.Sequence(before), found.decoders.Sequence(after)
    return made


def _ends(path: Path) -> tuple[int, ...]:
    for file in (path / "generation_config.json", path / "config.json"):
        if not file.is_file():
            continue
        try:
            found = read_json(file).get("eos_token_id")
        except AttributeError:
            raise FileError(f"{file}: not a JSON object") from None
        if found is not None:
            ends = tuple(found) if isinstance(found, list) else (found,)
            if not all(map(is_integer, ends)):
                raise FileError(f"{file}: eos_token_id: must be an integer or a list of them (got {found!r})")
            return ends
    return ()


def library() -> Any:
    """The library `tokenizers`; UnavailableError where it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise UnavailableError("tokenizers: needed for models' text; python -m pip install 'ptxlab[model]'") from None
    return tokenizers
