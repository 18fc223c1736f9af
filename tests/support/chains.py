"""Chains of launches on a GPU: what overlaps must change no bit."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ptxlab import gpu


def assert_same_bits_as_plain(chain: Callable[[bool], None], written: Sequence[Any]) -> None:
    """Assert that 50 replays of the chain, launched programmatically, write the same bits as one plain launch.

    `chain` enqueues the launches, which it is told whether to launch programmatically; `written` are CuPy's arrays.
    """
    import cupy

    outputs: list[list[np.ndarray]] = []
    for programmatic, times in ((False, 1), (True, 50)):
        chain(programmatic)
        graph = gpu.capture([partial(chain, programmatic)])
        for _ in range(times):
            for array in written:
                array[...] = 0
            cupy.cuda.Device().synchronize()
            graph.replay()
            graph.synchronize()
            outputs.append([array.get() for array in written])
    assert all(np.array_equal(a, b) for replayed in outputs[1:] for a, b in zip(outputs[0], replayed, strict=True))
