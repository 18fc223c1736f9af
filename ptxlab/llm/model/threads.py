"""Sequences through a model of floats, on a CPU several at a time."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np

_MOST_THREADS = 8  # threads: each holds the temporaries of a layer, 1 GB at the widest models
Output = TypeVar("Output")


def map_streams(function: Callable[[Any], Output], streams: Sequence[Any]) -> Iterator[Output]:
    """Yield `function` of every stream [B, T, H], in order; it may be called from several threads at once.

    NumPy computes what lies between products on one core, so that on a CPU a core takes a stream, up to eight at once.
    BLAS has what threads are left for each, in the whole process, until the last result is taken. One after the other
    on a GPU, and where `threadpoolctl` (of the extra `model`) is missing.
    """
    cores = os.cpu_count() or 1
    threads = min(cores, len(streams), _MOST_THREADS)
    if threads < 2 or not isinstance(streams[0], np.ndarray) or find_spec("threadpoolctl") is None:
        yield from map(function, streams)
        return
    from threadpoolctl import threadpool_limits

    running_futures: deque[Future[Output]] = deque()
    with threadpool_limits(cores // threads, "blas"), ThreadPoolExecutor(threads) as pool:
        for stream in streams:
            running_futures.append(pool.submit(function, stream))
            if len(running_futures) > threads:  # results wait in memory, so only one is made ahead
                yield running_futures.popleft().result()
        while running_futures:
            yield running_futures.popleft().result()
