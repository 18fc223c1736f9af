"""`Runner`: a quantised decoder on a batch of sequences, in NumPy's exact integers or on a GPU, and its text.

A runner takes *rows*: a token, its sequence, its position. Decoding has a row per sequence; a prompt has one for each
of its tokens, in chunks. A layer writes keys and values of all rows before any of them attends, and a row sees the
tokens up to its position, so both are the same calls.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.model.config import Config
from ptxlab.model.quantized import QuantizedModel
from ptxlab.validate import require_integer

Indices = npt.NDArray[np.int32]
PAGE = 64  # tokens of a page of the cache
CHUNK = 256  # rows of prompts at a time


class Rows(NamedTuple):
    """Tokens, their sequences, their positions, s32 [R] each; those of a sequence follow each other."""

    token: Indices
    sequence: Indices
    position: Indices

    def part(self, start: int, stop: int) -> "Rows":
        """Rows start..stop - 1."""
        return Rows(*(array[start:stop] for array in self))


class Runner(ABC):
    """A model with the caches of `batch` sequences of up to `context` tokens.

    Attributes:
        model: what it runs.
        batch: sequences, B.
        context: tokens of a sequence at most, prompt included.
        chunk: rows of prompts at a time.
        lengths: tokens of each sequence so far, s32 [B], on the host.
    """

    def __init__(self, model: QuantizedModel, batch: int = 1, context: int = 2048, *, chunk: int | None = None) -> None:
        if not isinstance(model, QuantizedModel):
            raise ArgumentError("model", "must be a QuantizedModel", type(model).__name__)
        for name, number in (("batch", batch), ("context", context), ("chunk", CHUNK if chunk is None else chunk)):
            require_integer(name, number, 1)
        self.chunk = min(CHUNK, batch * context) if chunk is None else chunk
        if model.config.experts:
            raise ArgumentError("model", "must be dense", f"{model.config.experts} experts")
        if model.config.context is not None and context > model.config.context:
            raise ArgumentError("context", f"must be at most the model's {model.config.context} tokens", context)
        self.model, self.batch, self.context = model, int(batch), int(context)
        self.lengths: Indices = np.zeros(batch, np.int32)

    @property
    def config(self) -> Config:
        """The model's."""
        return self.model.config

    @property
    def max_pages(self) -> int:
        """Pages of a sequence."""
        return -(-self.context // PAGE)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Any:
        """Start the sequences anew with these tokens, and return the logits f16 [B, V] behind each prompt.

        Raises ArgumentError for another number of prompts than sequences, an empty one, one that is longer than the
        context, or a token outside the vocabulary.
        """
        if len(prompts) != self.batch:
            raise ArgumentError("prompts", f"must be {self.batch}, one for each sequence", len(prompts))
        for i, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= self.context:
                raise ArgumentError(f"prompts[{i}]", f"must have 1 to {self.context} tokens", len(prompt))
        self.lengths[...] = [len(prompt) for prompt in prompts]
        rows = Rows(
            np.concatenate([self._checked(f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]),
            np.repeat(np.arange(self.batch, dtype=np.int32), self.lengths),
            np.concatenate([np.arange(length, dtype=np.int32) for length in self.lengths]),
        )
        ends, last = self.lengths.cumsum() - 1, []
        for start in range(0, len(rows.token), self.chunk):
            stop = start + self.chunk
            normed = self._run(rows.part(start, stop))
            last += [normed[end - start : end - start + 1].copy() for end in map(int, ends) if start <= end < stop]
        return self._logits(np.concatenate(last))

    @abstractmethod
    def decode(self, tokens: Any) -> Any:
        """Append a token s32 [B] to every sequence, and return the logits f16 [B, V] of the next.

        Raises ArgumentError where a sequence is as long as the context.
        """

    @abstractmethod
    def _run(self, rows: Rows) -> Any:
        """The normalised stream after the last layer, [R, H] of the layers' dtype, for up to `chunk` rows."""

    @abstractmethod
    def _logits(self, normed: Any) -> Any:
        """f16 [R, V]."""

    def _grow(self) -> None:
        """Count one more token of each sequence."""
        if int(self.lengths.max()) >= self.context:
            raise ArgumentError("decode", f"no more than the context of {self.context} tokens", "a further one")
        self.lengths += 1

    def _checked(self, name: str, tokens: Any, n: int | None = None) -> Indices:
        """Tokens s32 [n]; raises ArgumentError for anything else, and for one outside the vocabulary."""
        array, most = np.asarray(tokens), self.config.vocabulary - 1
        if array.ndim != 1 or array.dtype.kind not in "iu" or n not in (None, len(array)):
            raise ArgumentError(name, f"must be integers [{n or 'n'}]", f"{array.dtype} {list(array.shape)}")
        wrong = (array < 0) | (array > most)
        if wrong.any():
            raise ArgumentError(name, f"must be tokens in 0..{most}", int(array[wrong.argmax()]))
        return array.astype(np.int32)
