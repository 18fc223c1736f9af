"""Tokenizers of Hugging Face folders and GGUF files."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError, FileError, PtxlabError, UnavailableError
from ptxlab.io.files import read_json, write_text
from ptxlab.llm.checkpoints.chat import ChatTemplate, Message, read_object
from ptxlab.llm.checkpoints.guard import GuardedEncoder, has_harmless_decoder, is_harmless
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
# GPT-4o's, which a tokenizer.json may have; no GGUF file's is built with it.
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Patterns that a tokenizer.json may have without `GuardedEncoder`: none takes more than a moment on any text.
_FAST_PATTERNS = frozenset(
    {*_PATTERNS.values(), _O200K, " {2,}", r"\s+", r"\p{N}", r"\p{N}{1,3}", r"\p{N}+", r"\d", r"[0-9]", r"[\r\n]"}
)
_LLAMA3_NAMES = ("llama-bpe", "llama3")  # a word that is a token is not merged; texts begin with a start token
_CHATML_START = "<|im_start|>"
_CONTROL, _USER_DEFINED = 3, 4  # values of `tokenizer.ggml.token_type` of tokens that no merge yields
# What ends a text of a GGUF file, as llama.cpp has it: these metadata, and tokens of these texts, whatever their type.
_END_IDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_END_TEXTS = frozenset({
    "</s>", "<eos>", "[EOS]", "[e~[", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>",
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_turn>", "<turn|>",
    "<end_of_utterance>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
})  # fmt: skip
_MOST_STARTS = 64  # tokens ahead of a text
_MOST_SPLITS = 1 << 28  # characters of all ways to cut SentencePiece's tokens in two; LLaMA's have 3 million


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to tokens and back.

    Attributes:
        ends: the tokens that end a generated text.
        starts: those that the model expects ahead of a text.
        template: of conversations, or None.
    """

    ends: tuple[int, ...]
    _library: Any = field(repr=False)
    starts: tuple[int, ...] = ()
    template: ChatTemplate | None = field(default=None, repr=False)
    _guarded: GuardedEncoder | None = field(default=None, repr=False)

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        count: int = self._library.get_vocab_size()
        return count

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Encode a text as tokens [T], without start tokens.

        Raises ArgumentError for what UTF-8 cannot hold, FileError where the file's tokenizer fails or takes too long.
        """
        if not isinstance(text, str) or not _is_utf8(text):
            raise ArgumentError("text", "must be a str without lone surrogates", ascii(text))
        if self._guarded:
            return self._guarded(text)
        with _no_panic("text", "must be one that the model's tokenizer can encode"):
            return np.array(self._library.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode tokens to text; special tokens are left out."""
        with _no_panic("tokens", "must be ones that the model's tokenizer can decode"):
            text: str = self._library.decode([int(token) for token in tokens], skip_special_tokens=True)
        return text

    @property
    def chats(self) -> bool:
        """True where the model can be asked: it has a template, or ChatML's tokens."""
        return self.template is not None or len(self.encode(_CHATML_START)) == 1

    def encode_chats(self, chats: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Encode conversations, with the token of their start, up to where the assistant's next message begins.

        By the model's template, which of a folder decides on that token alone, and of a GGUF file with start tokens has
        it once; in ChatML where the model has none. Raises what `ChatTemplate.render` raises.
        """
        if self.template is not None:
            return [self.encode(text).tolist() for text in self.template.render(chats)]
        return [self.encode_prompt(_chatml(messages)) for messages in chats]

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text that a model goes on from, with the token of its start."""
        tokens: list[int] = self.encode(text).tolist()
        return [*self.starts, *tokens]

    @classmethod
    def from_folder(cls, path: Path) -> Self:
        """Read tokenizer.json, which neither truncates nor pads here, whatever it says.

        The end tokens are those of generation_config.json or else config.json. The start tokens are those that its
        template puts ahead of a text, whatever `add_bos_token` of tokenizer_config.json says, as in transformers 5.

        Raises FileError if a file is missing or broken, UnavailableError without `tokenizers`.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise FileError(f"{path}: no tokenizer.json")
        definition = read_json(file)
        if not isinstance(definition, dict):
            raise FileError(f"{file}: not a readable tokenizer (no JSON object)")
        definition |= {"truncation": None, "padding": None}
        if isinstance(definition.get("model"), dict):
            definition["model"] = {**definition["model"], "dropout": None}
        if not has_harmless_decoder(definition, _FAST_PATTERNS):
            raise FileError(f"{file}: decoder: must be of known steps that do not multiply the text")
        guarded_tokenizer = None
        if not is_harmless(definition, _FAST_PATTERNS):
            guarded_tokenizer = GuardedEncoder(file, json.dumps(definition))
            definition |= {"normalizer": None, "pre_tokenizer": None}
        tokenizer_class = library().Tokenizer
        with _refuse_unreadable(file):
            tokenizer = tokenizer_class.from_str(json.dumps(definition))  # not of the file, whose keys may occur twice
        return cls(
            _ends(path),
            tokenizer,
            starts=_starts(file, tokenizer),
            template=ChatTemplate.from_folder(path),
            _guarded=guarded_tokenizer,
        )

    def save(self, folder: Path) -> None:
        """Write what `from_folder` reads: tokenizer.json, generation_config.json, and the template.

        The template is in tokenizer_config.json, which also keeps transformers, and so vLLM, from taking a tokenizer of
        the model's family in place of this one.
        """
        definition = json.loads(self._guarded.definition if self._guarded else self._library.to_str())
        definition |= {"truncation": None, "padding": None, "post_processor": self._template()}
        write_text(folder / "tokenizer.json", json.dumps(definition, ensure_ascii=False))
        write_text(folder / "generation_config.json", json.dumps({"eos_token_id": [*self.ends]}) + "\n")
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        if self.template is not None:
            settings |= self.template.settings
        elif self.ends:
            settings |= {"eos_token": self._library.id_to_token(self.ends[0])}
        write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=1) + "\n")

    def _template(self) -> dict[str, Any] | None:
        """Build the post-processor that puts the start tokens ahead of a text; None without start tokens."""
        if not self.starts:
            return None
        texts = {token: self._library.id_to_token(token) for token in self.starts}
        specials = [{"SpecialToken": {"id": texts[token], "type_id": 0}} for token in self.starts]
        first_piece, second_piece = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
        return {
            "type": "TemplateProcessing",
            "single": [*specials, first_piece],
            "pair": [*specials, first_piece, second_piece],
            "special_tokens": {text: {"id": text, "ids": [token], "tokens": [text]} for token, text in texts.items()},
        }

    @classmethod
    def from_gguf(cls, path: Path, metadata: Mapping[str, Any]) -> Self:
        """Build a tokenizer from the metadata of the GGUF file at `path`.

        Kinds: byte-level BPE (`gpt2`), and SentencePiece's BPE (`llama`).
        Raises FileError for another kind, or one that is broken; UnavailableError without `tokenizers`.
        """
        get = _Metadata(path, metadata)
        tokens, kinds, model = get("tokens", list), get("token_type", np.ndarray), get("model", str)
        if len(kinds) != len(tokens):
            raise get.wrong("token_type", f"must be {len(tokens)}", len(kinds))
        split_name = get("pre", str, "default") if model == "gpt2" else ""
        if model not in ("gpt2", "llama"):
            raise get.wrong("model", "must be gpt2 or llama", model)
        if split_name and split_name not in _PATTERNS:
            raise get.wrong("pre", f"must be one of {', '.join(_PATTERNS)}", split_name)
        if len({*tokens}) != len(tokens):
            raise get.wrong("tokens", "must differ from one another", f"{len(tokens) - len({*tokens})} twice")
        end_ids = [i for i, token in enumerate(tokens) if token in _END_TEXTS]
        control = {*end_ids, *np.flatnonzero(kinds == _CONTROL).tolist()}
        with _refuse_unreadable(path):
            tokenizer = _byte_level(get, tokens, split_name) if split_name else _sentence_piece(get, tokens)
            tokenizer.add_special_tokens([tokens[i] for i in sorted(control)])
            tokenizer.add_tokens([tokens[i] for i in np.flatnonzero(kinds == _USER_DEFINED) if i not in control])
        adds_begin_token = get("add_bos_token", bool, model == "llama" or split_name in _LLAMA3_NAMES)
        starts = (get.token("bos", len(tokens)),) if adds_begin_token else ()
        template = ChatTemplate.from_gguf(path, metadata, begins=adds_begin_token)
        return cls(_gguf_ends(get, tokens, end_ids), tokenizer, starts=starts, template=template)


def _chatml(messages: Sequence[Message]) -> str:
    turns = [f"{_CHATML_START}{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    return "".join(turns) + f"{_CHATML_START}assistant\n"


@dataclass(frozen=True)
class _Metadata:
    """A GGUF file's metadata of the tokenizer, by the key without `tokenizer.ggml.`."""

    path: Path
    values: Mapping[str, Any]

    def __call__(self, key: str, kind: Any, *default: Any) -> Any:
        """Return the value of a key, which must be of the type `kind`; without a default the key must exist."""
        entry = self.values.get(f"tokenizer.ggml.{key}", *default)
        if not isinstance(entry, kind):
            raise self.wrong(key, f"must be of type {getattr(kind, '__name__', kind)}", type(entry).__name__)
        return entry

    def token(self, which: str, tokens: int) -> int:
        """Return the id of a special token, which must lie below `tokens`."""
        number: int = self(f"{which}_token_id", int)
        if isinstance(number, bool) or not 0 <= number < tokens:
            raise self.wrong(f"{which}_token_id", f"must lie in 0..{tokens - 1}", number)
        return number

    def wrong(self, key: str, rule: str, got: object) -> FileError:
        """Return the error for a key's wrong value."""
        return FileError(f"{self.path}: tokenizer.ggml.{key}: {rule} (got {got})")


def _byte_level(metadata: _Metadata, tokens: list[str], split: str) -> Any:
    """Build a tokenizer of BPE over bytes, within the words that a pattern splits text into."""
    tokenizers = library()
    merges = [tuple(merge.split(" ")) for merge in metadata("merges", list)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, ignore_merges=split in _LLAMA3_NAMES))
    pre_tokenizers, steps = tokenizers.pre_tokenizers, []
    if split == "smollm":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.Split(tokenizers.Regex(_PATTERNS[split]), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(steps), tokenizers.decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    return tokenizer


def _sentence_piece(metadata: _Metadata, tokens: list[str]) -> Any:
    """Build a tokenizer of BPE over characters, or over the bytes of a character that is no token.

    The pair whose token scores best merges first.
    """
    tokenizers = library()
    scores, vocabulary = metadata("scores", np.ndarray), {token: i for i, token in enumerate(tokens)}
    if len(scores) != len(tokens):
        raise metadata.wrong("scores", f"must be {len(tokens)}", len(scores))
    splits = sum(len(token) ** 2 for token in tokens)
    if splits > _MOST_SPLITS:
        raise metadata.wrong("tokens", f"lengths squared must sum to {_MOST_SPLITS} at most", splits)
    merges = [
        (token[:cut], token[cut:])
        for i in np.argsort(-scores, kind="stable")
        for token in [tokens[i]]
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    unknown_token = tokens[metadata.token("unknown", len(tokens))]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True)
    )
    normalizers = [tokenizers.normalizers.Replace(" ", "▁")]
    decoders = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    if metadata("add_space_prefix", bool, True):
        normalizers.insert(0, tokenizers.normalizers.Prepend("▁"))
        decoders.append(tokenizers.decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = (
        tokenizers.normalizers.Sequence(normalizers),
        tokenizers.decoders.Sequence(decoders),
    )
    return tokenizer


def _gguf_ends(metadata: _Metadata, tokens: list[str], by_text: list[int]) -> tuple[int, ...]:
    """Return the end tokens of a GGUF file, that of `eos_token_id` first."""
    named_ends = [
        which for which in _END_IDS if which == "eos" or f"tokenizer.ggml.{which}_token_id" in metadata.values
    ]
    listed_ids = metadata("eos_token_ids", list | np.ndarray, [])
    if invalid_ids := [token for token in listed_ids if not is_integer(token) or not 0 <= token < len(tokens)]:
        raise metadata.wrong("eos_token_ids", f"must lie in 0..{len(tokens) - 1}", invalid_ids[0])
    end_ids = [*(metadata.token(which, len(tokens)) for which in named_ends), *map(int, listed_ids), *by_text]
    return tuple(dict.fromkeys(end_ids))


def _ends(path: Path) -> tuple[int, ...]:
    for file in (path / "generation_config.json", path / "config.json"):
        declared_ends = read_object(file).get("eos_token_id")
        if declared_ends is not None:
            end_ids = tuple(declared_ends) if isinstance(declared_ends, list) else (declared_ends,)
            if not all(map(is_integer, end_ids)):
                raise FileError(f"{file}: eos_token_id: must be an integer or a list of them (got {declared_ends!r})")
            return tuple(dict.fromkeys(end_ids))
    return ()


def _starts(file: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the start tokens of a tokenizer.json."""
    if tokenizer.post_processor is None:
        return ()
    processor = json.loads(tokenizer.post_processor.__getstate__())
    adding = [part for part in _parts(processor) if part["type"] != "ByteLevel"]
    if len(adding) > 1:
        raise FileError(f"{file}: post_processor: at most one part may add tokens (got {len(adding)})")
    starts = tuple(_start_tokens(adding[0])) if adding else ()
    if len(starts) > _MOST_STARTS:
        raise FileError(f"{file}: post_processor: at most {_MOST_STARTS} tokens ahead of a text (got {len(starts)})")
    return starts


def _parts(processor: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what a post-processor consists of, however it is nested."""
    if processor["type"] != "Sequence":
        yield processor
    for inner_processor in processor.get("processors", ()):
        yield from _parts(inner_processor)


def _start_tokens(processor: dict[str, Any]) -> Iterator[int]:
    """Yield the tokens that a part of a post-processor puts ahead of a text."""
    if "cls" in processor:
        yield processor["cls"][1]
    for piece in processor.get("single", ()):
        if "SpecialToken" not in piece:
            break
        yield from processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def _no_panic(argument: str, rule: str) -> Iterator[None]:
    """Turn a panic of the library, which is no Exception, into an ArgumentError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ArgumentError(argument, rule, error) from None


@contextmanager
def _refuse_unreadable(file: Path) -> Iterator[None]:
    """Turn what the library raises, which may be a panic and then no Exception, into a FileError."""
    try:
        yield
    except (PtxlabError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises no narrower class
        raise FileError(f"{file}: not a readable tokenizer ({' '.join(str(error).split())})") from None


def library() -> Any:
    """Import the library `tokenizers`. Raises UnavailableError if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise UnavailableError("tokenizers: needed for models' text; python -m pip install 'ptxlab[model]'") from None
    return tokenizers
