"""Table and headline of the suite `vllm`. The record is made up."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving import arrival_rows, profile_rows, rows_of
from benchmarks.serving_arrivals import ArrivalReading
from benchmarks.serving_engine import Reading
from benchmarks.serving_profile import PARTS, StepProfile
from ptxlab.bench.record import Record, Row
from report import frames, serving

FP8 = Reading((24.0, 23.0), {1: (3.5, 3.4), 64: (12.0, 11.8)}, 500_000, 80.0)
OURS = Reading((11.5, 12.0), {1: (1.9,), 64: (5.8, 5.7)}, 950_000, 90.0)
CEILINGS: Any = SimpleNamespace(read_tbps=4.0)


def record(invalid: str = "", further: Sequence[Row] = ()) -> Record:
    rows = [*rows_of("7B", "fp8", FP8, FP8, CEILINGS), *rows_of("7B", "ptxlab", OURS, FP8, CEILINGS), *further]
    device = {"name": "made-up H200", "slug": "h200", "driver": "0", "sms": 132}
    return Record("vllm", device, {"vllm": "0.26.0", "torch": "2.11.0"}, {}, tuple(rows), invalid=invalid)


def test_a_row_for_each_way_and_nothing_for_a_batch_that_does_not_fit() -> None:
    table = serving.table_of(record())
    assert [*table["served as"]] == ["vLLM's FP8, FP8 cache", "ptxlab W4A8, KV4"]
    ours = table.iloc[1]
    assert (ours["step, batch 64"], ours["tokens in the cache"], ours["start"]) == (5.7, 950_000, 90.0)
    assert table["step, batch 256"].isna().all()


def test_requests_a_second_stand_beside_where_they_are_recorded() -> None:
    reading = ArrivalReading(18.0, 48.0, ())
    table = serving.table_of(record(further=[*arrival_rows("7B", "ptxlab", reading, reading, CEILINGS)]))
    assert table["requests/s at 50 ms a token"].isna().tolist() == [True, False]
    assert "requests/s at 50 ms a token" not in serving.table_of(record())


def test_the_headline_is_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "load_record", lambda suite: record())
    line = serving.headline()
    assert "LLaMA-2-7B at 11,398 tokens/s on one made-up H200" in line
    assert "2.0 times as many as vLLM's FP8, with 1.9 times the tokens" in line
    assert "| 2.00x | 1.90 ms | 5.70 ms |  | 950,000 | 90 s |" in serving.section()


def test_where_a_step_goes_stands_below(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {1: StepProfile(2500.4, {part: 10.0 * i for i, part in enumerate(PARTS)}, 420.0)}
    further = [*profile_rows("7B", "ptxlab", step, step, CEILINGS)]
    monkeypatch.setattr(frames, "load_record", lambda suite: record(further=further))
    shown = serving.section()
    assert "| 1 | ptxlab W4A8, KV4 | 2,500 | 0 | 10 | 20 | 30 | 40 | 50 | 60 | 70 | 80 | 90 | 420 |" in shown
    assert "the difference of 80 and 16 new tokens" in shown


def test_a_void_reading_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "load_record", lambda suite: record("the card was throttled"))
    assert serving.headline() == serving.section() == frames.MISSING
