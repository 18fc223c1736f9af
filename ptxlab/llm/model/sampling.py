"""`Sampling`: how the next token is chosen from logits; and the scores of tokens that it draws from.

Penalty, temperature, top-k, top-p and min-p follow one another, and mean, what they do in transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.validate import is_integer, require_integer, require_number

COLDEST, HOTTEST = 1e-6, 1e6  # temperatures: float16 logits over them are finite, and still differ, in float32


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The rules by which the next token is chosen. Raises ArgumentError for a value out of range.

    Attributes:
        temperature: 0 takes the likeliest token; above 0 tokens are drawn from softmax(logits / temperature).
        seed: of the draws, 0 or more.
        top_k: draw from so many of the likeliest tokens, and from those that equal the last of them; 0: from all.
        top_p: draw from the fewest likeliest tokens whose probabilities add up to this share.
        min_p: draw from tokens at least this share as likely as the likeliest.
        repetition_penalty: what logits of tokens that came before, in the prompt too, are divided by where they are
            positive, and multiplied by where they are negative.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        degree = self.temperature
        is_number = isinstance(degree, int | float) and not isinstance(degree, bool)
        if not is_number or not (degree == 0 or COLDEST <= degree <= HOTTEST):
            raise ArgumentError("temperature", f"must be 0, or a number in {COLDEST:g}..{HOTTEST:g}", repr(degree))
        if not is_integer(self.seed) or not 0 <= self.seed < 2**32:
            raise ArgumentError("seed", "must be an integer in 0..2^32-1", repr(self.seed))
        require_integer("top_k", self.top_k)
        require_number("top_p", self.top_p, 0, 1)
        require_number("min_p", self.min_p, 0, 1)
        require_number("repetition_penalty", self.repetition_penalty, COLDEST, HOTTEST)

    @property
    def penalizes(self) -> bool:
        """True where scores depend on the tokens before."""
        return self.repetition_penalty != 1

    @property
    def takes_largest(self) -> bool:
        """True where the next token is that of the largest logit."""
        return not self.temperature and not self.penalizes


class _Columns(NamedTuple):
    """The settings of n rows of scores, each [n, 1], where the scores are."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition_penalty: Any


def tokens_mask(tokens: Sequence[Sequence[int]], logits: Any) -> Any:
    """Mark the tokens of each list in a mask of the vocabulary, bool of the shape and place of logits [n, V]."""
    mask = np.zeros(logits.shape, np.bool_)
    for row, ids in zip(mask, tokens, strict=True):
        row[np.asarray(ids)] = True
    return gpu.to_device(mask) if gpu.is_device_array(logits) else mask


@np.errstate(invalid="ignore")  # of rows without a finite logit, which nobody draws from
def adjust(scores: Any, samplings: Sequence[Sampling], seen: Any = None) -> Any:
    """Turn logits [n, V], in the dtype to compute in, into the scores to draw from, with -inf for tokens left out.

    `samplings` are one for each row, or one for all; `seen` (`tokens_mask`) are the tokens that are penalised. Nothing
    waits for a GPU. A row whose temperature is 0 is left undivided.
    """
    settings = _settings(samplings, scores)
    if seen is not None:
        penalty = settings.repetition_penalty
        scores = np.where(seen, np.where(scores < 0, scores * penalty, scores / penalty), scores)
    if any(sampling.temperature for sampling in samplings):
        scores = scores / settings.temperature
    if any(sampling.top_k or sampling.top_p < 1 or sampling.min_p for sampling in samplings):
        scores = np.where(_find_excluded(scores, settings), scores.dtype.type(-np.inf), scores)
    return scores


def _settings(samplings: Sequence[Sampling], logits: Any) -> _Columns:
    """Return numbers where one `Sampling` is for all rows, which need not be copied to a GPU; else columns."""
    rows = [
        _Columns(
            float(sampling.temperature or 1),
            sampling.top_k,
            float(sampling.top_p),
            float(sampling.min_p),
            float(sampling.repetition_penalty),
        )
        for sampling in samplings
    ]
    if len(rows) == 1:
        return rows[0]
    columns = np.array(rows, logits.dtype).T[..., None]
    return _Columns(*(gpu.to_device(columns) if gpu.is_device_array(logits) else columns))


def _find_excluded(scores: Any, settings: _Columns) -> Any:
    """Find the tokens [n, V] that cannot be drawn."""
    count, lowest_score = scores.shape[-1], scores.dtype.type(-np.inf)
    order = np.argsort(-scores, axis=-1, kind="stable")[:, ::-1]  # ascending; of equal tokens the first is the last
    ranked_scores = np.take_along_axis(scores, order, axis=-1)
    position = np.arange(count, like=scores)
    threshold = np.where(position == count - settings.top_k, ranked_scores, lowest_score).max(axis=-1, keepdims=True)
    ranked_scores = np.where(ranked_scores < threshold, lowest_score, ranked_scores)
    shares = np.exp(ranked_scores - ranked_scores[:, -1:])
    cumulative_shares = shares.cumsum(axis=-1)
    excluded = (ranked_scores < threshold) | (shares < settings.min_p)
    excluded |= (
        (cumulative_shares / cumulative_shares[:, -1:] <= 1 - settings.top_p)
        & (settings.top_p < 1)
        & (position < count - 1)
    )
    return np.take_along_axis(excluded | (ranked_scores == lowest_score), np.argsort(order, axis=-1), axis=-1)
