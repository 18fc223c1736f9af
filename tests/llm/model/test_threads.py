"""Streams in threads: all of them in order, a few at a time, each with what it alone has kept."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from ptxlab.llm.model import threads
from ptxlab.llm.model.numerics import FakeQuantized
from ptxlab.llm.model.threads import map_streams

pytest.importorskip("threadpoolctl", reason="of the extra `model`")
STREAMS = [np.full((1, 2, 3), i, np.float32) for i in range(9)]


@pytest.fixture
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the machine has three cores."""
    monkeypatch.setattr(threads, "os", SimpleNamespace(cpu_count=lambda: 3))


def test_each_core_takes_a_stream_and_results_are_in_order(three_cores: None) -> None:
    together = threading.Barrier(3, timeout=60)

    def first(x: np.ndarray) -> float:
        together.wait()  # breaks unless three run at a time
        return float(x[0, 0, 0])

    assert [*map_streams(first, STREAMS)] == [*range(9)]


def test_no_more_is_made_than_is_taken(three_cores: None) -> None:
    """No more than four are made, so that three can run while one waits."""
    calls: list[int] = []
    stream = map_streams(lambda x: calls.append(0), STREAMS)
    for num_taken in range(1, 10):
        next(stream)
        assert len(calls) <= num_taken + 3
    assert len(calls) == 9


def test_an_error_in_a_thread_is_raised(three_cores: None) -> None:
    def failing(x: np.ndarray) -> None:
        if x[0, 0, 0] == 4:
            raise ValueError("stream 4")

    stream = map_streams(failing, STREAMS)
    assert [next(stream) for _ in range(4)] == [None] * 4
    with pytest.raises(ValueError, match="stream 4"):
        next(stream)


@pytest.mark.parametrize("alone", ["one core", "arrays of a GPU", "no threadpoolctl"])
def test_without_threads_streams_run_one_after_the_other(
    alone: str, three_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if alone == "one core":
        monkeypatch.setattr(threads, "os", SimpleNamespace(cpu_count=lambda: 1))
    if alone == "no threadpoolctl":
        monkeypatch.setattr(threads, "find_spec", lambda name: None)
    streams = STREAMS if alone != "arrays of a GPU" else [object()] * 2
    assert {*map_streams(lambda x: threading.get_ident(), streams)} == {threading.get_ident()}


def test_a_copy_has_the_same_settings() -> None:
    numerics = FakeQuantized(acts=4, kv="kv8", group=32, kept=16, kept_bits=16, clip=0.9)
    numerics.round_to_cache(*np.zeros((2, 1, 4, 1, 64), np.float32), {})
    assert pickle.loads(pickle.dumps(numerics)) == copy.deepcopy(numerics) == numerics


def test_a_thread_keeps_the_input_that_it_has_quantised() -> None:
    numerics, x, y = FakeQuantized(), *np.random.default_rng(0).standard_normal((2, 1, 4, 8)).astype(np.float32)
    rounded = numerics.input(x)
    with ThreadPoolExecutor(1) as executor:
        np.testing.assert_array_equal(executor.submit(numerics.input, y).result(), FakeQuantized().input(y))
    assert numerics.input(x) is rounded
