"""Text to tokens and back, with the tokenizer of a Hugging Face folder or a GGUF file."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ptxlab.errors import FileError, UnavailableError
from ptxlab.io.files import read_text, write_text
from ptxlab.validate import is_integer

# How the byte-level tokenizers of GGUF split text before they merge bytes: `tokenizer.ggml.pre` -> pattern, or digits.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _GPT2,  # after each digit has become a word
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
}
_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens in `tokenizer.ggml.token_type` that are no text to be merged


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to tokens and back.

    Attributes:
        ends: tokens with which the model ends what it writes.
    """

    ends: tuple[int, ...]
    _library: Any = field(repr=False)

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
        """The tokens of a text, [T], without one for its start."""
        return np.array(self._library.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; those that stand for no text are left out."""
        text: str = self._library.decode([int(token) for token in tokens], skip_special_tokens=True)
        return text

    @classmethod
    def from_folder(cls, path: Path) -> Self:
        """From tokenizer.json; what ends a text is in generation_config.json or else config.json.

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
        return cls(_ends(path), made)

    def save(self, folder: Path) -> None:
        """Write what `from_folder` reads: tokenizer.json, and generation_config.json."""
        write_text(folder / "tokenizer.json", self._library.to_str())
        write_text(folder / "generation_config.json", json.dumps({"eos_token_id": [*self.ends]}) + "\n")

    @classmethod
    def from_gguf(cls, path: Path, metadata: Mapping[str, Any]) -> Self:
        """From the metadata of the GGUF file at `path`: byte-level BPE.

        Raises FileError for another kind, or one that is broken; UnavailableError without `tokenizers`.
        """

        def get(key: str, kind: type) -> Any:
            value = metadata.get(f"tokenizer.ggml.{key}")
            if not isinstance(value, kind):
                raise FileError(f"{path}: tokenizer.ggml.{key}: must be a {kind.__name__} (got {type(value).__name__})")
            return value

        def token(which: str) -> int:
            number: int = get(f"{which}_token_id", int)
            if not 0 <= number < len(tokens):
                raise FileError(
                    f"{path}: tokenizer.ggml.{which}_token_id: must lie in 0..{len(tokens) - 1} (got {number})"
                )
            return number

        kind, split = get("model", str), metadata.get("tokenizer.ggml.pre", "default")
        if kind != "gpt2" or split not in _PATTERNS:
            known = f"gpt2, split by {', '.join(_PATTERNS)}"
            raise FileError(f"{path}: tokenizer.ggml.model: must be {known} (got {kind}, split by {split})")
        tokens, merges, kinds = get("tokens", list), get("merges", list), get("token_type", np.ndarray)
        if len(kinds) != len(tokens):
            raise FileError(f"{path}: tokenizer.ggml.token_type: must be {len(tokens)} (got {len(kinds)})")
        found = library()
        try:
            pairs = [tuple(merge.split(" ")) for merge in merges]
            made = found.Tokenizer(found.models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
        except Exception as error:  # it raises no narrower class
            raise FileError(f"{path}: not a readable tokenizer ({' '.join(str(error).split())})") from None
        words, steps = found.pre_tokenizers, []
        if split == "smollm":
            steps.append(words.Digits(individual_digits=True))
        steps.append(words.Split(found.Regex(_PATTERNS[split]), "isolated"))
        steps.append(words.ByteLevel(add_prefix_space=False, use_regex=False))
        made.pre_tokenizer, made.decoder = words.Sequence(steps), found.decoders.ByteLevel()
        made.add_special_tokens([token for token, of in zip(tokens, kinds, strict=True) if of == _CONTROL])
        made.add_tokens([token for token, of in zip(tokens, kinds, strict=True) if of == _USER_DEFINED])
        if metadata.get("tokenizer.ggml.add_bos_token"):
            start = token("bos")
            made.post_processor = found.processors.TemplateProcessing(
                single=f"{tokens[start]} $A", special_tokens=[(tokens[start], start)]
            )
        return cls((token("eos"),), made)


def _ends(path: Path) -> tuple[int, ...]:
    for file in (path / "generation_config.json", path / "config.json"):
        if not file.is_file():
            continue
        try:
            found = json.loads(read_text(file)).get("eos_token_id")
        except (ValueError, AttributeError):
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
