"""Arrivals at an engine of vLLM, as far as they need neither a GPU nor vLLM: what is drawn, timed and searched."""

import asyncio
import math
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import serving_arrivals
from benchmarks.serving import part, rows
from benchmarks.serving_arrivals import ArrivalReading, draw_arrivals, draw_lengths, find_rate, serve
from ptxlab import gpu
from ptxlab.bench.record import Row
from ptxlab.errors import BenchmarkError

CEILINGS: Any = SimpleNamespace(read_tbps=4.0)
FP8 = ArrivalReading(10.0, 49.0, ((8.0, 40.0), (10.0, 49.0), (16.0, 80.0)))
OURS = ArrivalReading(18.0, 48.0, ((16.0, 30.0), (18.0, 48.0), (32.0, 90.0)))


def test_lengths_have_the_means_of_chats_and_are_cut() -> None:
    lengths = draw_lengths(100_000)
    assert lengths.min() == 4 and lengths.max() == 1024
    assert lengths.mean(axis=0) == pytest.approx([157, 295], rel=0.03)  # long answers are cut


def test_another_rate_has_the_same_requests_at_other_times() -> None:
    slow, fast = draw_arrivals(2.0, 1000, 500), draw_arrivals(8.0, 1000, 500)
    assert [(call.prompt, call.new) for call in slow] == [(call.prompt, call.new) for call in fast]
    assert [call.at for call in slow] == pytest.approx([4 * call.at for call in fast])
    assert np.diff([call.at for call in slow]).mean() == pytest.approx(0.5, rel=0.15)
    assert {token for call in slow for token in call.prompt} <= {*range(3, 1000)}


class MadeUpEngine:
    """Makes a token in 2 ms, two at a time behind the first."""

    def __init__(self, *, loses: int = 0) -> None:
        self.loses, self.running, self.most = loses, 0, 0

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        self.running += 1
        self.most = max(self.most, self.running)
        left = sampling_params - self.loses
        for count in (1, *(2,) * ((left - 1) // 2)):
            await asyncio.sleep(2e-3 * count)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * count)])
        self.running -= 1


def test_requests_run_side_by_side_and_a_token_takes_its_time() -> None:
    engine, arrivals = MadeUpEngine(), [serving_arrivals.Arrival(0.01 * i, [5], 21) for i in range(8)]
    ms = asyncio.run(serve(engine, arrivals, lambda new: new, "run"))
    assert len(ms) == 8 and 2.0 <= min(ms) <= max(ms) < 20 and engine.most > 1


def test_a_request_that_lacks_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="request 0 made 19 tokens instead of 21"):
        asyncio.run(serve(MadeUpEngine(loses=2), [serving_arrivals.Arrival(0.0, [5], 21)], lambda new: new, "run"))


def test_the_rate_is_searched_between_the_last_that_holds_and_the_first_that_does_not() -> None:
    reading = find_rate(lambda rate: 2.5 * rate)  # the limit is passed at 20
    assert 20 / 2 ** (1 / 16) < reading.requests_per_s <= 20
    assert reading.p99_ms == pytest.approx(2.5 * reading.requests_per_s)
    assert [rate for rate, _ in reading.tried[:4]] == [4, 8, 16, 32] and len(reading.tried) == 8


def test_where_no_rate_holds_there_is_none() -> None:
    reading = find_rate(lambda rate: 100.0)
    assert reading.requests_per_s == 0 and math.isnan(reading.p99_ms) and len(reading.tried) == 1


def test_what_would_end_late_is_not_tried() -> None:
    spent = iter([False, False, True])
    assert find_rate(lambda rate: rate, lambda: next(spent, True)).tried == ((4, 4), (8, 8))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make engines up, and return which of them were measured."""
    measured: list[str] = []

    def measure(model: str, name: str) -> ArrivalReading:
        measured.append(name)
        return FP8 if name == "fp8" else OURS

    monkeypatch.setattr(serving_arrivals, "measure", measure)
    monkeypatch.setattr(gpu, "free_pool", lambda: None)
    return measured


def all_rows(only: list[str], done: list[Row]) -> list[Row]:
    return [*rows((), CEILINGS, lambda label: None, only, done)]


def test_rows_stand_beside_fp8_of_the_same_call(engines: list[str]) -> None:
    assert part(["arrivals"]) == part([]) == [("7B", "ptxlab")]
    base, ours = all_rows(["arrivals"], [])
    assert engines == ["fp8", "ptxlab"]
    assert (ours.measure, ours.rate, ours.rate_unit, ours.peers) == ("arrivals", 18.0, "requests/s", {"fp8": 1e5})
    assert ours.more == {"p99_ms": 48.0, "over_fp8": pytest.approx(1.8)} and base.peers == {}
    assert 0 < ours.fraction < 1
    assert all_rows(["arrivals"], [base, ours]) == [base, ours] and len(engines) == 2
    longer = all_rows(["arrivals", "kv8", "ptxlab"], [base, ours])
    assert [row.kernel for row in longer[2:]] == ["LLaMA-2-7B in vLLM, kv8"]


def test_a_model_that_holds_no_rate_is_one_line(engines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_arrivals, "measure", lambda model, name: ArrivalReading(0.0, math.nan, ((4.0, 60.0),)))
    rule = r"^vllm, LLaMA-2-7B, fp8: no rate from 4 requests/s on holds 50 ms a token$"
    with pytest.raises(BenchmarkError, match=rule):
        all_rows(["arrivals"], [])
