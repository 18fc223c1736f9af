"""Calls as an engine makes them: views of a projection, padded slots of 64 bits, one graph for every step."""

from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import gpu
from ptxlab.lowbit.kernels.attention.common import draw_cache
from ptxlab.lowbit.kernels.attention.prefill import PREFILL
from ptxlab.lowbit.layout import KVCache
from ptxlab.lowbit.layout.pages import PageView
from ptxlab.lowbit.quant import quantize_kv
from ptxlab.runtime.verify import compare
from tests.support.attention_calls import assert_within_bound
from tests.support.attention_problems import map_arrays

TOKENS, HQ, HKV, D = 96, 4, 2, 128  # of a step, padding included
SEQUENCES, PAGES_EACH, PAGE = 5, 4, 64


class Step:
    """Draw a step: new tokens of some sequences, the slots they go to, and padding."""

    def __init__(self, rng: np.random.Generator) -> None:
        new = rng.multinomial(rng.integers(SEQUENCES, TOKENS), rng.dirichlet(np.ones(SEQUENCES)))
        new[rng.integers(SEQUENCES)] = 0
        past = rng.integers(0, PAGES_EACH * PAGE - new + 1) * (new > 0)  # what has no new token is empty
        self.qkv = rng.standard_normal((TOKENS, (HQ + 2 * HKV) * D)).astype(np.float16)
        self.starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        self.lengths = (past + new).astype(np.int32)
        self.table = rng.permutation(SEQUENCES * PAGES_EACH).astype(np.int32).reshape(SEQUENCES, PAGES_EACH)
        self.slots = np.full(TOKENS, -1, np.int64)
        sequences = np.repeat(np.arange(SEQUENCES), new)
        positions = np.concatenate([np.arange(p, p + n) for p, n in zip(past, new, strict=True)])
        self.slots[: len(sequences)] = self.table[sequences, positions // PAGE] * PAGE + positions % PAGE

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """Queries, keys and values [TOKENS, heads, D]."""
        return tuple(np.split(self.qkv.reshape(TOKENS, -1, D), [HQ, HQ + HKV], axis=1))

    def append(self, pool: np.ndarray) -> np.ndarray:
        """Return a pool with the new tokens in it."""
        pool, real = pool.copy(), self.slots >= 0
        pages = PageView.of(pool, "kv4", PAGE, D)
        for index, tokens in enumerate(self.parts[1:]):
            pages.part(index).write(quantize_kv(tokens[real].astype(np.float32), "kv4"), self.slots[real])
        return pool


@pytest.mark.gpu
def test_a_graph_of_a_step_is_replayed_on_other_steps(cupy: Any) -> None:
    """Append, decode and prefill without a look at any number: rows of length 0, slots of -1, other tables."""
    if reason := gpu.why_not(PREFILL.arch, exact=True):
        pytest.skip(reason)
    rng = np.random.default_rng(0)
    qkv = cupy.zeros((TOKENS, (HQ + 2 * HKV) * D), cupy.float16)
    k, v = (qkv[:, begin * D : (begin + HKV) * D].reshape(TOKENS, HKV, D) for begin in (HQ, HQ + HKV))
    q, slots = cupy.zeros((TOKENS, HQ, D), cupy.float16), cupy.full(TOKENS, -1, cupy.int64)
    last, starts = cupy.zeros((SEQUENCES, HQ, D), cupy.float16), cupy.zeros(SEQUENCES + 1, cupy.int32)
    cache = KVCache.empty(SEQUENCES, PAGES_EACH, HKV, D, page_size=PAGE, like=qkv)
    past = np.full(SEQUENCES, PAGES_EACH * PAGE)
    drawn = draw_cache(rng, past, Hkv=HKV, P=PAGES_EACH, pages=cache.pages, D=D, page_size=PAGE)
    cache.pool[...] = cupy.asarray(drawn.pool)
    out, lse = cupy.zeros_like(q), cupy.zeros(q.shape[:-1], cupy.float32)
    decoded = cupy.zeros_like(last)
    decode_memory = ptxlab.attention_workspace(cache)

    def layer() -> None:
        ptxlab.append_kv4(k, v, cache, slots)
        ptxlab.attention_kv4(q, cache, query_start_loc=starts, out=(out, lse), return_lse=True)
        ptxlab.attention_kv4(last, cache, out=decoded, workspace=decode_memory)

    layer()
    graph = gpu.capture([layer])
    for _ in range(20):
        step, pool = Step(rng), cache.pool.get()
        queries, latest = step.parts[0], rng.standard_normal(last.shape).astype(np.float16)
        arrays = {"lengths": cache.lengths, "block_table": cache.block_table}
        new = {"lengths": step.lengths, "block_table": step.table}
        written = [(qkv, step.qkv), (slots, step.slots), (starts, step.starts), (q, queries), (last, latest)]
        for array, numbers in [*written, *((arrays[name], new[name]) for name in arrays)]:
            array[...] = cupy.asarray(numbers)
        out.fill(np.nan)
        cupy.cuda.Device().synchronize()
        graph.replay()
        graph.synchronize()
        host = map_arrays(cache, lambda array: array.get())
        assert np.array_equal(host.pool, step.append(pool))
        count = int(step.starts[-1])
        chunks = {"q": queries[:count].astype(np.float32), "cache": host, "starts": step.starts}
        logical = {**chunks, "softmax_scale": D**-0.5, "window": 0, "blocks": 1, "parts": 1}
        outputs = {"out": out[:count].get(), "lse": lse[:count].get(), "arrivals": PREFILL.pack(logical)["arrivals"]}
        compare(PREFILL, outputs, logical)
        assert np.isnan(out[count:].get()).all()
        assert_within_bound(latest[:, None], host, decoded[:, None].get())
