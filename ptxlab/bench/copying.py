"""The time of a copy, to compare kernels with that read and write as many bytes."""

from pathlib import Path

import numpy as np

from ptxlab import gpu
from ptxlab.arithmetic import ceil_div
from ptxlab.runtime.timing import GEMM_REPLAYS, measure
from ptxlab.sources import Source
from ptxlab.spec import Launch

_THREADS = 256
_RANDOM = 1 << 20  # distinct random bytes, repeated
_PER_BLOCK = _THREADS * 4 * 16  # bytes that one block of copy.ptx copies


def source() -> Source:
    """Read the kernel `stream_copy`."""
    return Source.read(Path(__file__).with_name("copy.ptx"))


def geometry(nbytes: int, *, programmatic: bool = False) -> Launch:
    """Return the geometry with a block for every 16 KiB."""
    return Launch((ceil_div(nbytes, _PER_BLOCK), 1, 1), (_THREADS, 1, 1), programmatic=programmatic)


def copy_us(moved: int, copies: int) -> float:
    """Measure the microseconds of a copy that moves `moved` bytes: half of them read, half of them written.

    The copies take turns over `copies` buffers.
    """
    nbytes = max(16, moved // 2 // 16 * 16)
    kernel = gpu.load(source(), "stream_copy")
    first = gpu.to_device(np.resize(np.frombuffer(np.random.default_rng(0).bytes(_RANDOM), np.uint8), nbytes))
    calls = []
    for _ in range(copies):
        origin, destination = (gpu.empty((nbytes,), np.uint8) for _ in range(2))
        gpu.copy_bytes(origin, first)
        calls.append(gpu.prepare(kernel, [origin, destination, np.uint64(nbytes)], geometry(nbytes)))
    return measure(calls, replays=GEMM_REPLAYS).us
