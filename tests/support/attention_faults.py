"""What a kernel of attention may get wrong in silence, by tables and lengths: other pages, or fewer tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit.bench.attention import kvdata
from ptxlab.lowbit.bench.attention.problem import SCALE
from ptxlab.lowbit.bench.shapes import HEAD_DIM, PAGE
from ptxlab.lowbit.layout import KVCache
from ptxlab.lowbit.layout.pages import PageView, unpack_pages
from ptxlab.spec.tolerance import Allowed, misses

DRAWS = 1000

every_data = pytest.mark.parametrize("data", kvdata.DATA, ids=lambda data: data.__name__)


class Draws(NamedTuple):
    """Tables s32 [draws, P] and lengths s32 [draws] of sequences."""

    table: Any
    lengths: Any


@dataclass(frozen=True)
class Problem:
    """Attention over one sequence, with further pages from which faults are made.

    Attributes:
        q: f16 [1, 1, Hq, D].
        cache: of the sequence; its pool has, behind its pages, `swapped` and `other_last_pages`.
        swapped: pages of the sequence of which there is one with the integers of keys and values swapped.
        swaps: where those are in the pool.
        other_last_pages: where pages with another last token are.
    """

    q: np.ndarray
    cache: KVCache
    swapped: np.ndarray
    swaps: np.ndarray
    other_last_pages: np.ndarray

    @property
    def length(self) -> int:
        return int(self.cache.lengths[0])

    @property
    def full_pages(self) -> int:
        """Number of full pages."""
        return self.length // PAGE

    def unchanged_draws(self, draws: int = DRAWS) -> Draws:
        return Draws(np.repeat(self.cache.block_table, draws, axis=0), np.repeat(self.cache.lengths, draws))

    def replace_last_tokens(self) -> Draws:
        """Return the unchanged draws, each with another last token."""
        draws = self.unchanged_draws()
        draws.table[:, -1] = np.resize(self.other_last_pages, DRAWS)
        return draws


def problem(data: kvdata.Data, heads: tuple[int, int], length: int, spare: int = 100, seed: int = 0) -> Problem:
    """Make a problem with `spare` pages whose keys and values are swapped, and as many with another last token."""
    rng, (Hq, Hkv) = np.random.default_rng(seed), heads
    pages = ceil_div(length, PAGE)
    sequence_pages = kvdata.random_pages(rng, pages, Hkv, data=data)
    table = rng.permutation(pages).astype(np.int32)[None]
    lengths = np.array([length], np.int32)
    cache = KVCache(
        pool=sequence_pages, block_table=table, lengths=lengths, page_size=PAGE, head_dim=HEAD_DIM, scheme="kv4"
    )
    kvdata.let_last_stand_out(cache)
    swapped = rng.permutation(length // PAGE)[:spare]
    swaps, lasts = sequence_pages[table[0, swapped]], np.repeat(sequence_pages[table[0, -1:]], spare, axis=0)
    features = PageView.of(swaps, "kv4", PAGE, HEAD_DIM).features
    features[...] = features[:, ::-1].copy()
    features = PageView.of(lasts, "kv4", PAGE, HEAD_DIM).features[..., (length - 1) % PAGE, :]
    features[...] = rng.integers(0, 256, features.shape, dtype=np.uint8)
    page_numbers = np.split(np.arange(pages, pages + len(swapped) + spare, dtype=np.int32), [len(swapped)])
    q = kvdata.random_queries(rng, (1, 1, Hq, HEAD_DIM))
    return Problem(q, replace(cache, pool=np.concatenate([sequence_pages, swaps, lasts])), swapped, *page_numbers)


def skip_page(problem: Problem, rng: np.random.Generator) -> Draws:
    return _remove_pages(problem, first := rng.integers(0, problem.full_pages, DRAWS), first + 1)


def read_neighbours_page(problem: Problem, rng: np.random.Generator) -> Draws:
    table, lengths = problem.unchanged_draws()
    first = rng.integers(0, problem.full_pages - 1, DRAWS)
    table[np.arange(DRAWS), first] = problem.cache.block_table[0, first + 1]
    return Draws(table, lengths)


def swap_integers(problem: Problem, rng: np.random.Generator) -> Draws:
    """Swap the integers of keys and values of one page in each draw."""
    table, lengths = problem.unchanged_draws()
    swap = rng.integers(0, len(problem.swaps), DRAWS)
    table[np.arange(DRAWS), problem.swapped[swap]] = problem.swaps[swap]
    return Draws(table, lengths)


def drop_last_token(problem: Problem, rng: np.random.Generator) -> Draws:
    """Drop the last token of each draw; the results are compared with those of `replace_last_tokens`."""
    table, lengths = problem.replace_last_tokens()
    return Draws(table, lengths - 1)


def drop_part(problem: Problem, rng: np.random.Generator) -> Draws:
    """Drop a run of pages in each draw, such as another block hands over."""
    count = rng.integers(1, max(2, problem.full_pages // 2), DRAWS)
    first = rng.integers(0, problem.full_pages - count)
    return _remove_pages(problem, first, first + count)


FAULTS: tuple[Callable[[Problem, np.random.Generator], Draws], ...] = (
    skip_page,
    read_neighbours_page,
    swap_integers,
    drop_last_token,
    drop_part,
)


def _remove_pages(problem: Problem, first: np.ndarray, end: np.ndarray) -> Draws:
    """Remove the pages first .. end - 1 from each draw."""
    table, lengths = problem.unchanged_draws()
    place = np.arange(table.shape[1])
    place = np.minimum(place + (place >= first[:, None]) * (end - first)[:, None], table.shape[1] - 1)
    return Draws(np.take_along_axis(table, place, axis=1), (lengths - (end - first) * PAGE).astype(np.int32))


class Sums(NamedTuple):
    """Sums of every page of a pool: scores' shift [Hkv, r], weights' sums [pages, Hq], values' sums [pages, Hq, D]."""

    shift: Any
    weights: Any
    values: Any


def page_sums(problem: Problem, tokens: int, shift: Any = None) -> Sums:
    """Compute the sums of the first `tokens` of every page of the pool, in NumPy or CuPy."""
    Hkv, Hq = problem.cache.num_kv_heads, problem.q.shape[2]
    pool, q = problem.cache.pool, problem.q.reshape(Hkv, Hq // Hkv, HEAD_DIM).astype(np.float64)
    keys, values = (
        unpack_pages(pool[:, part].copy(), "kv4", HEAD_DIM, PAGE, len(pool) * PAGE)
        .dequantize()
        .reshape(len(pool), PAGE, Hkv, HEAD_DIM)[:, :tokens]
        .transpose(2, 0, 1, 3)
        for part in (0, 1)
    )
    scores = keys.astype(np.float64).reshape(Hkv, -1, HEAD_DIM) @ q.swapaxes(1, 2) * SCALE
    shift = scores.max(axis=1) if shift is None else shift
    weights = np.exp(scores - shift[:, None]).reshape(Hkv, len(pool), tokens, -1)
    sums = weights.swapaxes(2, 3) @ values.astype(np.float64)
    return Sums(
        shift,
        weights.sum(axis=2).transpose(1, 0, 2).reshape(len(pool), Hq),
        sums.transpose(1, 0, 2, 3).reshape(len(pool), Hq, HEAD_DIM),
    )


class Expected:
    """Attention in float64 of any sequence over the pages of a problem, by their sums."""

    def __init__(self, problem: Problem) -> None:
        self.page_sums = page_sums(problem, PAGE)
        self.problem, self._sums_by_end = problem, {PAGE: self.page_sums}

    def __call__(self, draws: Draws) -> tuple[Any, Any]:
        """Compute (out f64 [draws, 1, 1, Hq, D], lse f64 [draws, 1, 1, Hq]) of draws.

        All draws end at the same place in their last pages.
        """
        (end,) = {int((length - 1) % PAGE) + 1 for length in draws.lengths}
        if end not in self._sums_by_end:
            self._sums_by_end[end] = page_sums(self.problem, end, self.page_sums.shift)
        last_sums, pages = self._sums_by_end[end], ceil_div(draws.lengths, PAGE)
        rows = np.arange(len(pages))
        used = np.zeros((len(pages), len(self.page_sums.weights)))  # how often each page is, but as the last one
        for i in range(draws.table.shape[1]):
            used[rows, draws.table[:, i]] += i < pages - 1
        last = draws.table[rows, pages - 1]
        used, last = (np.asarray(array, like=self.page_sums.weights) for array in (used, last))
        Hq = self.page_sums.weights.shape[1]
        total = used @ self.page_sums.weights + last_sums.weights[last]
        out = (used @ self.page_sums.values.reshape(len(self.page_sums.values), -1)).reshape(len(pages), Hq, -1)
        out = (out + last_sums.values[last]) / total[..., None]
        return out[:, None, None], (np.log(total) + self.page_sums.shift.reshape(-1))[:, None, None]


def misses_bound(outputs: np.ndarray, expected: np.ndarray, allowed: Allowed) -> np.ndarray:
    """Tell which results [draws, ...] have an element, or a row, that is further off than allowed."""
    elements, rows = misses(outputs, expected, allowed)
    return elements.reshape(len(outputs), -1).any(axis=-1) | rows.reshape(len(outputs), -1).any(axis=-1)
