"""Tokenizers of files that may be hostile: which parts of a tokenizer.json bound time and memory by themselves.

The library `tokenizers` has no limits of its own. A regular expression can take exponential time or end in a panic, and
a normaliser can multiply the text at every step. What is not known to be harmless encodes in a process with limits.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.errors import FileError
from ptxlab.llm.checkpoints import encode_text
from ptxlab.llm.checkpoints.limited_process import Limits, ProgramError, run_program

SECONDS = 60.0  # an encoding may take; 1.3 MB of text take about one
MEMORY = 1 << 32  # bytes that it may take
_MODELS = ("BPE", "WordLevel", "Unigram")
# Steps whose time and output are bounded by the text's length, whatever their other keys say.
_LINEAR = (
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Strip", "StripAccents",
    "BertPreTokenizer", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation", "UnicodeScripts", "Whitespace",
    "WhitespaceSplit", "BPEDecoder", "ByteFallback", "CTC", "Fuse", "WordPiece",
)  # fmt: skip
_NESTED = ("normalizers", "pretokenizers", "decoders")  # keys of a Sequence
_LONGEST_PREFIX = 16  # characters
_MOST_STEPS = 64


@dataclass(frozen=True)
class GuardedEncoder:
    """Encodes by the text of a tokenizer.json in a process with limits; `path` is for errors."""

    path: Path
    definition: str = field(repr=False)

    def __call__(self, text: str) -> npt.NDArray[np.int64]:
        """Encode a text as tokens [T]. Raises FileError if the tokenizer fails, or exceeds `SECONDS` or `MEMORY`."""
        request = {"definition": self.definition, "text": text}
        try:
            ids = run_program(Path(encode_text.__file__), request, Limits(SECONDS, MEMORY))
        except ProgramError as error:
            raise FileError(f"{self.path}: the tokenizer failed on {len(text)} characters ({error})") from None
        return np.array(ids, np.int64)


def is_harmless(definition: dict[str, Any], patterns: Collection[str]) -> bool:
    """Tell whether a tokenizer.json bounds time and memory by itself; `patterns` are known to be fast."""
    model = definition.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") not in _MODELS:
        return False
    return all(_are_bounded(definition.get(section), patterns) for section in ("normalizer", "pre_tokenizer"))


def has_harmless_decoder(definition: dict[str, Any], patterns: Collection[str]) -> bool:
    """Check whether the decoder of a tokenizer.json bounds time and memory; `patterns` are known to be fast."""
    return _are_bounded(definition.get("decoder"), patterns)


def _are_bounded(section: Any, patterns: Collection[str]) -> bool:
    first_steps = [*islice(_steps(section), _MOST_STEPS + 1)]
    return len(first_steps) <= _MOST_STEPS and all(_is_bounded(step, patterns) for step in first_steps)


def _steps(section: Any) -> Iterator[Any]:
    """Yield the steps of a normaliser, pre-tokeniser or decoder in order, however they are nested."""
    pending_steps = [section] if section is not None else []
    while pending_steps:
        step = pending_steps.pop(0)
        is_sequence = isinstance(step, dict) and step.get("type") == "Sequence"
        parts = [step.get(key) for key in _NESTED] if is_sequence else []
        inner_steps = [nested_step for part in parts if isinstance(part, list) for nested_step in part]
        if inner_steps:
            pending_steps = inner_steps + pending_steps
        else:
            yield step


def _is_bounded(step: Any, patterns: Collection[str]) -> bool:
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "Prepend":
        return isinstance(step.get("prepend"), str) and len(step["prepend"]) <= _LONGEST_PREFIX
    if kind not in ("Replace", "Split"):
        return kind in _LINEAR or kind == "Sequence"
    pattern, content = step.get("pattern"), step.get("content", "")
    if not isinstance(pattern, dict) or not isinstance(content, str):
        return False
    literal, expression = pattern.get("String"), pattern.get("Regex")
    if isinstance(literal, str):  # it must not multiply the text
        return len(content) <= max(1, len(literal)) and bool(literal)
    return isinstance(expression, str) and expression in patterns and len(content) <= 1
