"""What is timed: as many rounds of the calls as fill a replay, between two stamps of the clock."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import BenchmarkError
from ptxlab.runtime import timing
from ptxlab.runtime.timing import Measured


class Recorder:
    """Graphs of calls, in the order in which they are made and run."""

    def __init__(self, us: float) -> None:
        self.us, self.sizes, self.ran = us, list[int](), list[str]()

    def capture(self, calls: Sequence[Callable[[], None]]) -> Any:
        """Make a graph that counts its calls. The first, a probe, is ten times as slow as the one that is measured."""
        self.sizes.append(len(calls))
        name, slower = f"graph {len(self.sizes)}", 1 if len(self.sizes) == 1 else 0.1

        def time(replays: int) -> Any:
            self.ran.append(f"{name} {replays} times")
            return SimpleNamespace(median=slower * self.us, fastest=slower * self.us / 2, slowest=slower * self.us * 3)

        return SimpleNamespace(
            name=name, time=time, run=lambda call: call(), synchronize=lambda: self.ran.append("synchronize")
        )


@pytest.mark.parametrize(
    ("us", "calls", "rounds"),
    [(10.0, 1, 200), (10.0, 8, 25), (10.0, 7, 29), (1999.0, 1, 2), (2000.0, 1, 1), (1e6, 3, 1), (900.0, 3, 1)],
)
def test_a_replay_has_rounds_of_two_milliseconds(
    us: float, calls: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`median` is of a call, so a round takes it as often as it has calls."""
    graphs = Recorder(us)
    stamps = SimpleNamespace(
        start=lambda: graphs.ran.append("start"), stop=lambda: graphs.ran.append("stop"), mhz=lambda: 1755.0
    )
    monkeypatch.setattr(timing, "Clock", lambda: stamps)
    times, graph = timing.measure_graph([lambda: None] * calls, replays=7, capture=graphs.capture)
    assert graphs.sizes == [calls, calls * rounds] and graph.name == "graph 2"  # type: ignore[attr-defined]
    assert times == Measured(us=us * 0.1, fastest=us * 0.1 / 2, slowest=us * 0.1 * 3, sm_mhz=1755.0)
    assert graphs.ran == ["graph 1 3 times", "start", "graph 2 7 times", "stop", "synchronize"]
    graphs.sizes.clear()
    assert timing.measure([lambda: None] * calls, capture=graphs.capture) == times
    assert graphs.ran[-3] == f"graph 2 {timing.REPLAYS} times"


def test_calls_run_until_the_clock_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 100 µs makes a graph of 20, which runs 150 times in 300 ms, before the clock is read."""
    graphs = Recorder(100.0)
    stamps = SimpleNamespace(start=lambda: graphs.ran.append("start"), stop=lambda: None, mhz=lambda: 1755.0)
    monkeypatch.setattr(timing, "Clock", lambda: stamps)
    timing.measure([lambda: None], replays=5, settle_ms=300, capture=graphs.capture)
    assert graphs.ran[1:4] == ["graph 2 150 times", "start", "graph 2 5 times"]


def test_clocks_are_stamped_on_two_blocks_of_each_sm(emulated_gpu: pytest.MonkeyPatch) -> None:
    """The emulator has a block on each SM of its own, so a GPU of two SMs stamps four."""
    clock = timing.Clock()
    clock.start()
    start, stop = clock._stamps
    assert start[:, 0].tolist() == [0, 1, 2, 3] and not stop.any()
    clock.stop()
    assert stop[:, 0].tolist() == [0, 1, 2, 3]
    with pytest.raises(BenchmarkError, match="no SM was stamped twice"):
        clock.mhz()  # the emulator's time stands still
    stop[:, 1:] = start[:, 1:] + np.array([3510, 2000], np.uint64)
    assert clock.mhz() == 1755.0


def test_calls_are_made_in_turn() -> None:
    names: list[str] = []
    calls = [[lambda name=f"{kind}{i}": names.append(name) for i in range(2)] for kind in "ab"]
    for pair in timing.chain_calls(*calls):  # type: ignore[arg-type]
        pair()
    assert names == ["a0", "b0", "a1", "b1"]
    with pytest.raises(ValueError, match="shorter"):
        timing.chain_calls(calls[0], calls[1][:1])  # type: ignore[arg-type]
