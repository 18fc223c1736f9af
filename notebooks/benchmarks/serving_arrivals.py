"""Requests that arrive one by one at an engine of vLLM: how many a second it serves within a limit of time a token.

Arrivals are a Poisson process. Lengths are log-normal, like those of chats: prompts of 161 tokens and 338 new ones in
the mean, before they are cut to 4 to 1,024. Prompts are random tokens.
"""

import asyncio
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.serving_engine import MODELS, SECONDS, Rule, engine_arguments, prepare, run_process
from ptxlab.llm.model import Config

REQUESTS = 400
LIMIT_MS = 50.0  # of a token, 99% of the requests within it
PROMPT_MEAN, NEW_MEAN, SIGMA = 161.0, 338.0, 1.0
SHORTEST, LONGEST = 4, 1024  # tokens of a prompt, and new ones
FIRST_RATE, DOUBLINGS, HALVINGS = 4.0, 6, 4
_LAST_RUN = 60  # of `SECONDS`, kept for the run that has begun


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, in seconds from the start, its prompt, and how many tokens it asks for."""

    at: float
    prompt: list[int]
    new: int


@dataclass(frozen=True)
class ArrivalReading:
    """Hold what an engine serves.

    Attributes:
        requests_per_s: the highest rate that was tried at which 99% of the requests stay within `LIMIT_MS` a token.
        p99_ms: a token there.
        tried: (requests/s, p99 in ms a token) of every run.
    """

    requests_per_s: float
    p99_ms: float
    tried: tuple[tuple[float, float], ...]


def draw_lengths(count: int, seed: int = 0) -> np.ndarray:
    """Draw the lengths s64 [count, 2] of prompts and of what they ask for."""
    means = np.log([PROMPT_MEAN, NEW_MEAN]) - SIGMA**2 / 2
    lengths = np.exp(np.random.default_rng(seed).normal(means, SIGMA, (count, 2)))
    return lengths.round().clip(SHORTEST, LONGEST).astype(np.int64)


def draw_arrivals(rate: float, vocabulary: int, count: int = REQUESTS, seed: int = 0) -> list[Arrival]:
    """Draw requests; the same lengths and tokens at any rate."""
    rng = np.random.default_rng(seed + 1)
    times = rng.exponential(1.0, count).cumsum() / rate
    lengths = draw_lengths(count, seed)
    prompts = [rng.integers(3, vocabulary, length).tolist() for length in lengths[:, 0]]
    return [Arrival(*request) for request in zip(times.tolist(), prompts, lengths[:, 1].tolist(), strict=True)]


class Engine(Protocol):
    """Name what is used of `vllm.v1.engine.async_llm.AsyncLLM`."""

    def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        """Yield an output whenever tokens were made."""


async def serve(engine: Engine, arrivals: Sequence[Arrival], sampling: Callable[[int], Any], name: str) -> list[float]:
    """Send each request when it comes, and return the milliseconds a token of each, behind its first one.

    `sampling` makes the parameters for so many new tokens, of outputs that hold new tokens alone. Raises ValueError for
    a request that got another number of tokens.
    """
    start = time.perf_counter()

    async def ask(number: int, arrival: Arrival) -> float:
        await asyncio.sleep(max(0.0, arrival.at - (time.perf_counter() - start)))
        first, count, last = 0.0, 0, 0.0
        prompt = {"prompt_token_ids": arrival.prompt}
        async for output in engine.generate(prompt, sampling(arrival.new), f"{name} {number}"):
            last = time.perf_counter()
            first, count = first or last, count + len(output.outputs[0].token_ids)
        if count != arrival.new:
            raise ValueError(f"request {number} made {count} tokens instead of {arrival.new}")
        return 1e3 * (last - first) / (count - 1)

    return await asyncio.gather(*(ask(number, arrival) for number, arrival in enumerate(arrivals)))


def find_rate(p99_at: Callable[[float], float], is_late: Callable[[], bool] = lambda: False) -> ArrivalReading:
    """Find the highest rate within the limit: double it until it is passed, then halve the interval, as a ratio.

    `p99_at` measures a rate in requests/s. `is_late` tells when no run may begin any more.
    """
    rates_and_p99s: list[tuple[float, float]] = []

    def holds(rate: float) -> bool:
        rates_and_p99s.append((rate, p99_at(rate)))
        return rates_and_p99s[-1][1] <= LIMIT_MS

    met_rate, missed_rate = 0.0, FIRST_RATE
    while len(rates_and_p99s) < DOUBLINGS and not is_late() and holds(missed_rate):
        met_rate, missed_rate = missed_rate, 2 * missed_rate
    for _ in range(HALVINGS if met_rate else 0):
        if is_late():
            break
        trial_rate = math.sqrt(met_rate * missed_rate)
        met_rate, missed_rate = (trial_rate, missed_rate) if holds(trial_rate) else (met_rate, trial_rate)
    return ArrivalReading(met_rate, dict(rates_and_p99s).get(met_rate, math.nan), tuple(rates_and_p99s))


def measure(model: str, name: str) -> ArrivalReading:
    """Measure a variant in a new process. Raises BenchmarkError with the line that says why if it fails."""
    fields = json.loads(run_process("benchmarks.serving_arrivals", model, name))
    return ArrivalReading(fields["requests_per_s"], fields["p99_ms"], tuple(map(tuple, fields["tried"])))


def run(model: str, name: str, folder: Path) -> None:
    """Measure a variant in this process, and write its reading into the folder."""
    begin, rule = time.time(), Rule(tokens=LONGEST, new=LONGEST)
    prepare(folder, model, rule)
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    def sampling(new: int) -> Any:
        output_options: dict[str, Any] = {"output_kind": RequestOutputKind.DELTA, "detokenize": False}
        return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=new, **output_options)

    vocabulary = Config.named(MODELS[model]).vocabulary

    async def start() -> Any:  # within the loop that its sockets belong to
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(folder, name, rule)))

    with asyncio.Runner() as loop:
        engine = loop.run(start())

        def p99_at(rate: float) -> float:
            arrivals = draw_arrivals(rate, vocabulary)
            return float(np.percentile(loop.run(serve(engine, arrivals, sampling, f"{rate:.2f}")), 99))

        try:
            p99_at(FIRST_RATE * 8)  # the first calls of a shape
            reading = find_rate(p99_at, lambda: time.time() - begin > SECONDS - _LAST_RUN)
        finally:
            engine.shutdown()
    (folder / "reading.json").write_text(json.dumps(asdict(reading)))


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
