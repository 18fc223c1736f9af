"""Time to the first token of a prompt whose beginning other requests have left in the cache, and of a new prompt."""

import time
from collections.abc import Sequence

import numpy as np

from ptxlab.errors import BenchmarkError
from ptxlab.llm.model import Runner
from ptxlab.llm.model.pages import PAGE
from ptxlab.llm.server import Server

TOKENS, SHARED_PAGES = 2000, 29  # of a prompt; of 64 tokens each
_REPEATS = 10


def first_token_times(
    runner: Runner, tokens: int = TOKENS, pages: int = SHARED_PAGES, repeats: int = _REPEATS
) -> tuple[list[float], list[float]]:
    """Return microseconds from `submit` to the first token: of prompts that share so many pages, and of new ones.

    Both kinds take turns, one request at a time. Of each pair the first prompt is random, and the second begins with
    the same pages and goes on with other tokens. The first pair is not timed.

    Raises BenchmarkError where a prompt shares other pages than it should.
    """
    server, rng = Server(runner), np.random.default_rng(tokens)
    shared_us, new_us = [], []
    for _ in range(1 + repeats):
        new = rng.integers(0, runner.config.vocabulary, tokens)
        suffix = rng.integers(0, runner.config.vocabulary, tokens - pages * PAGE)
        new_us.append(_first_token_us(server, new.tolist(), pages=0))
        shared_us.append(_first_token_us(server, [*new[: pages * PAGE].tolist(), *suffix.tolist()], pages))
    return shared_us[1:], new_us[1:]


def _first_token_us(server: Server, prompt: Sequence[int], pages: int) -> float:
    pool = server.runner.page_pool
    shared = pool.share(prompt[:-1])
    pool.release(shared)
    if len(shared) != pages:
        raise BenchmarkError(f"time to the first token: a prompt shares {len(shared)} pages instead of {pages}")
    begin = time.perf_counter()
    request = server.submit(prompt, tokens=1)
    while not request.done:
        server.step()
    return 1e6 * (time.perf_counter() - begin)
