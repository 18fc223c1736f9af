"""`Runner`: a quantised decoder on a batch of sequences, in NumPy's exact integers or on a GPU, and its text.

A runner takes *rows*: a token, its sequence, its position. Decoding has a row per sequence; a prompt has one for each
of its tokens, in chunks. A layer writes keys and values of all rows before any of them attends, and a row reads the
tokens up to its position from the quantised cache. So a text does not depend on how its prompt is cut into chunks, nor
on pages that it shares, unless `own_keys` are asked for in 16 bits. On a GPU a cache that is not kv4 needs
`batch_invariant` for that. Sequences take pages of a common pool as they grow (`pages.Pages`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.llm.model.config import Config
from ptxlab.llm.model.pages import PAGE, Pages
from ptxlab.llm.model.quantized import CACHE_CONSTANTS, QuantizedModel
from ptxlab.llm.model.weights import DEFAULT_CACHE, LayerWeights
from ptxlab.lowbit.kernels.attention.prefill import CHUNKED
from ptxlab.lowbit.layout import KVCache
from ptxlab.lowbit.layout.pages import page_bytes
from ptxlab.lowbit.quant import Level1Weight, quantize_level1
from ptxlab.lowbit.quant.kv import BY_CHANNEL, BY_TOKEN
from ptxlab.runtime.arguments import check_flags
from ptxlab.validate import is_one_of, require_integer

Indices = npt.NDArray[np.int32]
CHUNK = 256  # rows of prompts at a time
HEADS = ("float16", "int8")  # of the LM head
OWN_KEYS = ("cache", "16-bit")  # where rows of prompts find keys and values of their own chunk
HEAD_ROWS = 8  # rows of the 8-bit head are padded to a multiple of this


class Rows(NamedTuple):
    """Tokens, their sequences, their positions, s32 [R] each; those of a sequence follow each other."""

    token: Indices
    sequence: Indices
    position: Indices

    def part(self, start: int, stop: int) -> "Rows":
        """Return rows start..stop - 1."""
        return Rows(*(array[start:stop] for array in self))


def launch_sizes(largest: int) -> list[int]:
    """Return the numbers of rows of launches: powers of two, and the largest."""
    return sorted({largest, *(1 << i for i in range(largest.bit_length()) if 1 << i < largest)})


def padded_rows(rows: int, largest: int) -> int:
    """Return the number of rows of the launch for n rows: the next of `launch_sizes`."""
    return min(largest, 1 << (rows - 1).bit_length())


def quantize_head(head: Any) -> Level1Weight:
    """Quantise an LM head f16 or f32 [V, H], NumPy, to INT8 with a scale per row.

    Rows of zeros pad it to a multiple of 8.
    """
    return quantize_level1(np.pad(head, ((0, -len(head) % HEAD_ROWS), (0, 0))), 127)


class Runner(ABC):
    """A model with the caches of `batch` sequences of up to `context` tokens, which share the pages of one pool.

    Attributes:
        model: what it runs.
        batch: sequences, B.
        context: tokens of a sequence at most, prompt included.
        chunk: rows of prompts at a time.
        pages: how many the pool has, in every layer.
        page_pool: which pages are free, and how many sequences have each of the others.
        batch_invariant: whether a token has the same bits whatever else is in the batch.
        head: what the LM head multiplies in: `float16`, or `int8` with a scale per row and token, whose sums are exact.
        cache: the scheme of the cache: `kv4` or `kv8`, or the scheme by channel for which the model is calibrated.
        rotated: whether the cache holds rotated keys (`KVCache`), which lose less in 4 bits. Values lie as the model's
            weights make them: rotated by a recipe with `rotate_heads`, or plain.
        own_keys: where rows of prompts find keys and values of their own chunk: in the `cache`, or in `16-bit` arrays
            as the projection leaves them. That is faster for long prompts and loses less, but a text then depends on
            how its prompt is cut into chunks, and on pages that it shares.
        lengths: tokens of each sequence so far, s32 [B], on the host.
        table: pages of each sequence, s32 [B, max_pages], on the host; the first `page_counts` of them count.
        page_counts: how many pages each sequence has, s32 [B].
        runs: the class of models that the runner takes.
    """

    runs: type[Any] = QuantizedModel
    model: Any

    def __init__(
        self,
        model: Any,
        batch: int = 1,
        context: int = 2048,
        *,
        chunk: int | None = None,
        pages: int | None = None,
        batch_invariant: bool = False,
        head: str = "float16",
        cache: str | None = None,
        rotated: bool | None = None,
        own_keys: str = "cache",
    ) -> None:
        """Prepare a runner of `batch` sequences of up to `context` tokens.

        By default there are as many `pages` as all sequences can need, and `cache` is the scheme that the model is
        calibrated for. Keys are `rotated` by default unless it is by channel.
        """
        if not isinstance(model, self.runs):
            raise ArgumentError("model", f"must be a {self.runs.__name__}", type(model).__name__)
        for name, number in (("batch", batch), ("context", context), ("chunk", CHUNK if chunk is None else chunk)):
            require_integer(name, number, 1)
        require_integer("pages", 1 if pages is None else pages, 1)
        for name, tokens in (("context", batch * context), ("pages", (pages or 1) * PAGE), ("chunk", chunk or 1)):
            if tokens >= 1 << 31:
                raise ArgumentError(name, "must be of fewer than 2^31 tokens in all", tokens)
        schemes = [model.cache if isinstance(model, QuantizedModel) else DEFAULT_CACHE, *BY_TOKEN]
        cache = schemes[0] if cache is None else cache
        if not is_one_of(cache, schemes):
            rule = f"must be one of {', '.join(dict.fromkeys(schemes))}; by channel the model must be calibrated for it"
            raise ArgumentError("cache", rule, cache)
        rotated = cache in BY_TOKEN if rotated is None else rotated
        check_flags(batch_invariant=batch_invariant, rotated=rotated)
        if rotated and cache in BY_CHANNEL:
            raise ArgumentError("rotated", f"must be False for {cache}: only kv4 and kv8 rotate keys", rotated)
        if not is_one_of(own_keys, OWN_KEYS):
            raise ArgumentError("own_keys", f"must be one of {', '.join(OWN_KEYS)}", own_keys)
        if own_keys == "16-bit" and (batch_invariant or cache not in CHUNKED):
            reason = "only kv4 has kernels for 16-bit ones"
            if batch_invariant:
                reason = "else results depend on how other prompts are cut into chunks"
            condition = "where it is batch_invariant" if batch_invariant else f"for {cache}"
            raise ArgumentError("own_keys", f"must be cache {condition}: {reason}", own_keys)
        if not is_one_of(head, HEADS):
            raise ArgumentError("head", f"must be one of {', '.join(HEADS)}", head)
        self.chunk = min(CHUNK, batch * context) if chunk is None else chunk
        if model.config.context is not None and context > model.config.context:
            raise ArgumentError("context", f"must be at most the model's {model.config.context} tokens", context)
        self.model, self.batch, self.context = model, int(batch), int(context)
        self.pages = self.batch * self.max_pages if pages is None else int(pages)
        self.batch_invariant, self.head, self.cache, self.rotated = batch_invariant, head, cache, rotated
        self.own_keys = own_keys
        self.lengths: Indices = np.zeros(batch, np.int32)
        self.table: Indices = np.zeros((batch, self.max_pages), np.int32)
        self.page_counts: Indices = np.zeros(batch, np.int32)
        self.page_pool = Pages(self.pages)

    def _pool(self, example: Any = None) -> Any:
        """Return the empty pool of a layer's cache, u8 [pages, 2, Hkv, bytes], an array of `example`'s library."""
        size = page_bytes(self.cache, PAGE, self.config.head_dim)
        shape = self.pages, 2, self.config.kv_heads, size
        return np.zeros(shape, np.uint8) if example is None else np.zeros(shape, np.uint8, like=example)

    def _cache(self, weights: LayerWeights, pool: Any, block_table: Any, lengths: Any) -> KVCache:
        """Return a layer's cache in this pool, with the layer's constants where it is by channel."""
        options: dict[str, Any] = {"page_size": PAGE, "head_dim": self.config.head_dim, "rotated": self.rotated}
        if self.cache in BY_CHANNEL:
            options |= {name: tuple(weights.parts[name]) for name in CACHE_CONSTANTS}
        return KVCache(pool=pool, block_table=block_table, lengths=lengths, scheme=self.cache, **options)

    @property
    def config(self) -> Config:
        """The model's."""
        config: Config = self.model.config
        return config

    @property
    def max_pages(self) -> int:
        """Pages of a sequence."""
        return ceil_div(self.context, PAGE)

    def prefill(self, prompts: Sequence[Sequence[int]], progress: Callable[[], None] = lambda: None) -> Any:
        """Start the sequences anew with these tokens, and return the logits f16 [B, V] after each prompt.

        `progress` is called after each chunk.

        Raises ArgumentError for another number of prompts than sequences, an empty one, one that is longer than the
        context, a token outside the vocabulary, or more of them than the pages hold.
        """
        if len(prompts) != self.batch:
            raise ArgumentError("prompts", f"must be {self.batch}, one for each sequence", len(prompts))
        for i, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= self.context:
                raise ArgumentError(f"prompts[{i}]", f"must have 1 to {self.context} tokens", len(prompt))
        checked_prompts = {i: self._check_tokens(f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)}
        for b in range(self.batch):
            self.release(b)
        with self._append_tokens("prefill", checked_prompts) as rows:
            ends, last_rows = self.lengths.cumsum() - 1, []
            for start in range(0, len(rows.token), self.chunk):
                stop = start + self.chunk
                normed = self._run(rows.part(start, stop))
                last_rows += [
                    normed[end - start : end - start + 1].copy() for end in map(int, ends) if start <= end < stop
                ]
                progress()
            return self._logits(np.concatenate(last_rows))

    def extend(self, new: Mapping[int, Sequence[int]]) -> Any:
        """Append tokens to sequences, up to `chunk` in all, and return the logits f16 [n, V] after each part.

        Raises ArgumentError for more of them, an empty part, a token outside the vocabulary, or where no room is left.
        """
        count = sum(map(len, new.values()))
        if not all(map(len, new.values())) or count > self.chunk:
            raise ArgumentError("tokens", f"must be 1 to {self.chunk}, at least one of each sequence", count)
        parts = {b: self._check_tokens(f"tokens of sequence {b}", new[b]) for b in self._check_sequences([*new])}
        ends = np.cumsum([len(part) for part in parts.values()]) - 1
        with self._append_tokens("extend", parts) as rows:
            return self._logits(self._run(rows)[ends])

    @abstractmethod
    def decode(self, tokens: Any, sequences: Sequence[int] | None = None) -> Any:
        """Append a token s32 [n] to each of these `sequences` (all), and return the logits f16 [n, V] of the next.

        Raises ArgumentError where a sequence is as long as the context, or no page is left for it.
        """

    def missing_pages(self, b: int, tokens: int) -> int:
        """Count the further pages that sequence b needs for `tokens` more tokens."""
        return max(0, ceil_div(int(self.lengths[b]) + tokens, PAGE) - int(self.page_counts[b]))

    def reserve(self, b: int, tokens: int) -> bool:
        """Reserve pages for `tokens` more tokens of sequence b from the free pages.

        Return True if it got every page; if there are too few it takes none and returns False.
        """
        needed_pages, page_count = self.missing_pages(b, tokens), int(self.page_counts[b])
        if needed_pages > len(self.page_pool.free):
            return False
        for i in range(page_count, page_count + needed_pages):
            self.table[b, i] = self.page_pool.take()
        self.page_counts[b] += needed_pages
        return True

    def share(self, b: int, tokens: Sequence[int]) -> None:
        """Begin the empty sequence b with the pages that hold the first of these tokens already (`register_pages`).

        The last token is never among them, as the next one follows from its logits.
        """
        shared_pages = self.page_pool.share(tokens[:-1])
        self.table[b, : len(shared_pages)] = shared_pages
        self.page_counts[b], self.lengths[b] = len(shared_pages), len(shared_pages) * PAGE

    def register_pages(self, b: int, tokens: Sequence[int]) -> None:
        """Let other sequences `share` the pages of sequence b that these tokens, its first, fill."""
        self.page_pool.register(tokens, self.table[b, : self.page_counts[b]].tolist())

    def release(self, b: int) -> None:
        """Empty sequence b; pages that no other sequence holds become free."""
        self.page_pool.release(self.table[b, : self.page_counts[b]].tolist())
        self.page_counts[b] = self.lengths[b] = 0

    def check_prompt(self, prompt: Sequence[int]) -> list[int]:
        """Return a prompt's tokens. Raises ArgumentError for an empty prompt, or a token outside the vocabulary."""
        if _as_array(prompt).size == 0:
            raise ArgumentError("prompt", "must have 1 token or more", 0)
        tokens: list[int] = self._check_tokens("prompt", prompt).tolist()
        return tokens

    @abstractmethod
    def _run(self, rows: Rows) -> Any:
        """Run one launch's rows; return the normalised stream after the last layer, [R, H] of the layers' dtype."""

    @abstractmethod
    def _logits(self, normed: Any) -> Any:
        """Compute the logits f16 [R, V] of the normalised stream."""

    @contextmanager
    def _append_tokens(self, name: str, new: Mapping[int, Indices]) -> Iterator[Rows]:
        """Yield the rows of new tokens; within the context their sequences have grown by them (`_grow_sequences`)."""
        sequences, counts = list(new), [len(tokens) for tokens in new.values()]
        first_positions = self.lengths[sequences]
        positions = [
            np.arange(begin, begin + n, dtype=np.int32) for begin, n in zip(first_positions, counts, strict=True)
        ]
        sequence = np.repeat(np.array(sequences, np.int32), counts)
        with self._grow_sequences(name, sequences, counts):
            yield Rows(np.concatenate([*new.values()]), sequence, np.concatenate(positions))

    @contextmanager
    def _grow_sequences(self, name: str, sequences: Sequence[int], counts: Sequence[int]) -> Iterator[None]:
        """Count so many more tokens of the sequences, and give them pages; all of it or, with an error, nothing.

        If what writes these tokens fails, or is interrupted, they do not count.
        """
        old_lengths = self.lengths[sequences]
        new_lengths = old_lengths + counts
        if int(new_lengths.max()) > self.context:
            raise ArgumentError(name, f"no more than the context of {self.context} tokens", f"{new_lengths.max()}")
        missing_pages = np.maximum(ceil_div(new_lengths, PAGE) - self.page_counts[sequences], 0)
        if missing_pages.sum() > len(self.page_pool.free):
            rule = f"no more than the {self.pages} pages of {PAGE} tokens, of which {len(self.page_pool.free)} are free"
            raise ArgumentError(name, rule, f"{missing_pages.sum()} more")
        for i in np.flatnonzero(missing_pages).tolist():
            self.reserve(sequences[i], counts[i])
        self.lengths[sequences] = new_lengths
        try:
            yield
        except BaseException:
            self.lengths[sequences] = old_lengths
            raise

    def _slots(self, sequence: Any, position: Any) -> Indices:
        """Return where tokens lie in the pool: page · 64 + offset."""
        slots: Indices = self.table[sequence, position // PAGE] * PAGE + position % PAGE
        return slots

    def _check_sequences(self, sequences: Sequence[int] | None) -> list[int]:
        """Return numbers of sequences, of all for None. Raises ArgumentError for one that is missing or named twice."""
        chosen_sequences = list(range(self.batch) if sequences is None else sequences)
        if (
            not chosen_sequences
            or len(set(chosen_sequences)) < len(chosen_sequences)
            or not set(chosen_sequences) <= set(range(self.batch))
        ):
            raise ArgumentError("sequences", f"must be sequences in 0..{self.batch - 1}, each once", chosen_sequences)
        return chosen_sequences

    def _check_tokens(self, name: str, tokens: Any, n: int | None = None) -> Indices:
        """Return tokens as s32 [n]. Raises ArgumentError for anything else, and for a token outside the vocabulary."""
        array, last_token = _as_array(tokens), self.config.vocabulary - 1
        if array.ndim != 1 or array.dtype.kind not in "iu" or n not in (None, len(array)):
            raise ArgumentError(name, f"must be integers [{n or 'n'}]", f"{array.dtype} {list(array.shape)}")
        is_wrong = (array < 0) | (array > last_token)
        if is_wrong.any():
            raise ArgumentError(name, f"must be tokens in 0..{last_token}", int(array[is_wrong.argmax()]))
        return array.astype(np.int32)


def _as_array(tokens: Any) -> npt.NDArray[Any]:
    """Convert tokens to an array.

    Lists of unlike lengths become an array of objects, which is refused by its dtype.
    """
    try:
        return np.asarray(tokens)
    except ValueError:
        return np.asarray(tokens, dtype=object)
