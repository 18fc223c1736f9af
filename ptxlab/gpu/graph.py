"""CUDA graphs: many calls recorded once and replayed without the host, which is how everything here is timed.

CuPy captures and replays; cuda-core would save no line, as its graphs need its own stream objects (decision 0034).
"""

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ptxlab.gpu.arrays import borrow_stream


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over the replays of a graph.

    Attributes:
        median: what is reported.
        fastest: of the replays, likewise `slowest`.
        calls: calls per replay.
        replays: replays measured.
    """

    median: float
    fastest: float
    slowest: float
    calls: int
    replays: int


@dataclass(frozen=True)
class Graph:
    """Calls captured on a stream of their own.

    Attributes:
        graph: CuPy's graph.
        stream: CuPy's stream on which it was captured and is replayed.
        calls: how many calls it holds.
    """

    graph: Any
    stream: Any
    calls: int

    def replay(self, stream: Any = None) -> None:
        """Replay the graph once without waiting, on its own stream or a given CuPy stream."""
        self.graph.launch(self.stream if stream is None else stream)

    def run(self, call: Callable[[], None]) -> None:
        """Run a call on the graph's stream."""
        with self.stream:
            call()

    def synchronize(self) -> None:
        """Wait for everything replayed."""
        self.stream.synchronize()

    def time(self, *, replays: int = 20, warm_up: int = 2) -> Timing:
        """Replay and time with events.

        Args:
            replays: how many replays to take the median of.
            warm_up: replays before, not measured.
        """
        import cupy

        for _ in range(warm_up):
            self.replay()
        events = [cupy.cuda.Event() for _ in range(replays + 1)]
        events[0].record(self.stream)
        for event in events[1:]:
            self.replay()
            event.record(self.stream)
        self.synchronize()
        milliseconds = [cupy.cuda.get_elapsed_time(a, b) for a, b in itertools.pairwise(events)]
        per_call = [1e3 * elapsed_ms / self.calls for elapsed_ms in milliseconds]
        return Timing(statistics.median(per_call), min(per_call), max(per_call), self.calls, replays)


def capture(calls: Iterable[Callable[[], None]]) -> Graph:
    """Capture calls, in order, into a graph.

    Each call must only enqueue work on the caller's stream (`launch` on device arrays does); none may allocate or wait.
    They are called once before, uncaptured, so that loading and first-time work stay out of the graph.
    """
    import cupy

    calls = list(calls)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()  # what the calls depend on may have been enqueued on other streams
    with stream:
        for call in calls:
            call()
        stream.synchronize()
        stream.begin_capture()
        try:
            for call in calls:
                call()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is void; what matters is why
                stream.end_capture()
            raise
        graph = stream.end_capture()
    return Graph(graph, stream, len(calls))


def wrap_graph(launch: Callable[[], None], stream: int, calls: int) -> Graph:
    """Make a `Graph` of a graph that another library captured, to time it in the same way.

    Args:
        launch: replays it on its stream, without waiting.
        stream: the stream's handle.
        calls: how many calls it holds.
    """
    return Graph(_Foreign(launch), borrow_stream(stream), calls)


@dataclass(frozen=True)
class _Foreign:
    """A graph of another library with the methods that `Graph` calls."""

    replay: Callable[[], None]

    def launch(self, _: Any) -> None:
        self.replay()


def time_calls(call: Callable[[], None], *, repeats: int = 10, warm_up: int = 2) -> float:
    """Measure the median microseconds of a call enqueued on a stream, without a graph.

    It is for work that far outlasts a launch.

    For large copies: as nodes of a graph they go through the copy engine, which is slower than what the driver does
    with them on a stream.
    """
    return float(statistics.median(call_times(call, repeats=repeats, warm_up=warm_up)))


def call_times(call: Callable[[], Any], *, repeats: int, warm_up: int) -> list[float]:
    """Measure the microseconds of each of the calls enqueued on a stream one after the other, without a graph."""
    import cupy

    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(warm_up):
            call()
        events = [cupy.cuda.Event() for _ in range(repeats + 1)]
        events[0].record(stream)
        for event in events[1:]:
            call()
            event.record(stream)
        stream.synchronize()
    return [1e3 * float(cupy.cuda.get_elapsed_time(a, b)) for a, b in itertools.pairwise(events)]
