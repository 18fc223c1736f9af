"""Timing by replayed CUDA graphs, with the SM clock measured during the same replays."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ptxlab import gpu
from ptxlab.errors import BenchmarkError
from ptxlab.sources import Source
from ptxlab.spec import Launch

BEYOND_L2 = 200_000_000  # bytes that calls must touch between two visits of the same buffer
REPLAYS, GEMM_REPLAYS = 20, 10  # of which the median is taken
_GRAPH_US = 2000.0  # one replay lasts about this long, so that its launch does not count


@dataclass(frozen=True)
class Measured:
    """Microseconds per call over the replays, and the median SM clock during them in MHz."""

    us: float
    fastest: float
    slowest: float
    sm_mhz: float


def copies_beyond_l2(nbytes: int) -> int:
    """Return how many copies of a buffer to rotate over so that every call misses the L2."""
    return max(1, math.ceil(BEYOND_L2 / nbytes))


def combine_calls(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """Return one call that makes these calls in turn, so that they are timed as a whole."""

    def call_all() -> None:
        for call in calls:
            call()

    return call_all


def chain_calls(*calls: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
    """Join the first call of each sequence into one (`combine_calls`), then the second of each, and so on."""
    return [combine_calls(round_calls) for round_calls in zip(*calls, strict=True)]


def measure(
    calls: Sequence[Callable[[], None]],
    *,
    replays: int = REPLAYS,
    settle_ms: float = 0.0,
    capture: Callable[[Sequence[Callable[[], None]]], gpu.Graph] = gpu.capture,
) -> Measured:
    """Time calls that enqueue device work (`gpu.prepare`), one after the other, again and again.

    See `measure_graph`, which also gives the graph.
    """
    return measure_graph(calls, replays=replays, settle_ms=settle_ms, capture=capture)[0]


def measure_graph(
    calls: Sequence[Callable[[], None]],
    *,
    replays: int = REPLAYS,
    settle_ms: float = 0.0,
    capture: Callable[[Sequence[Callable[[], None]]], gpu.Graph] = gpu.capture,
) -> tuple[Measured, gpu.Graph]:
    """Measure calls in a CUDA graph; return the times and the graph that was timed.

    Args:
        calls: one round: the same kernel over rotating buffers.
        replays: how many to take the median of.
        settle_ms: how long the calls run beforehand. A GPU at its power limit takes some hundred milliseconds to lower
            its clock: until then, times depend on what ran before.
        capture: makes a graph of calls; another one for the calls of another library.
    """
    probe = capture(calls).time(replays=3)
    rounds = max(1, math.ceil(_GRAPH_US / (probe.median * len(calls))))
    graph = capture([*calls] * rounds)
    if settle_ms:
        graph.time(replays=math.ceil(1e3 * settle_ms / (probe.median * len(calls) * rounds)))
    clock = Clock()
    graph.run(clock.start)
    timing = graph.time(replays=replays)
    graph.run(clock.stop)
    graph.synchronize()
    return Measured(timing.median, timing.fastest, timing.slowest, clock.mhz()), graph


class Clock:
    """Measures the SM clock: stamps every SM's cycle counter and the time, at start and stop."""

    def __init__(self) -> None:
        blocks = 2 * gpu.device_info().sms  # so that every SM gets one
        stamp = gpu.load(Source.read(Path(__file__).with_name("stamp.ptx")), "stamp")
        geometry = Launch((blocks, 1, 1), (1, 1, 1))
        self._stamps = [gpu.to_device(np.zeros((blocks, 3), np.uint64)) for _ in range(2)]
        self.start, self.stop = (gpu.prepare(stamp, [stamps], geometry) for stamps in self._stamps)

    def mhz(self) -> float:
        """Compute the clock rate between start and stop, the median over the SMs."""
        start_stamps, stop_stamps = ({sm: (c, t) for sm, c, t in gpu.to_host(s).tolist()} for s in self._stamps)
        return clock_mhz(start_stamps, stop_stamps)


def clock_mhz(start_stamps: dict[int, tuple[int, int]], stop_stamps: dict[int, tuple[int, int]]) -> float:
    """Compute the median clock rate over the SMs that were stamped twice.

    Args:
        start_stamps: SM -> (clocks, nanoseconds).
        stop_stamps: likewise, later.
    """
    rates = [
        1e3 * (stop_stamps[sm][0] - clocks) / (stop_stamps[sm][1] - time)
        for sm, (clocks, time) in start_stamps.items()
        if sm in stop_stamps and stop_stamps[sm][1] > time
    ]
    if not rates:
        raise BenchmarkError("SM clock: no SM was stamped twice")
    return float(np.median(rates))
