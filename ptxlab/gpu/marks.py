"""Marks for profilers: named ranges (NVTX) for Nsight Systems and ncu, and the range to profile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache


class NamedRange:
    """A reusable context manager of an NVTX range with a name; does nothing without CuPy.

    A class and no generator, as it stands around every launch: it costs 0.5 µs where nobody profiles.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        _nvtx()[0](self._name)

    def __exit__(self, *_: object) -> None:
        _nvtx()[1]()


@contextmanager
def profiling() -> Iterator[None]:
    """Limit what a waiting profiler records to the launches inside, by CUDA's profiler start and stop.

    Such profilers are `ncu --profile-from-start off` and `nsys profile -c cudaProfilerApi`. The recording begins when
    the device has finished everything before, and ends when it has finished what is launched inside.
    """
    import cupy
    from cupyx.profiler import profile

    cupy.cuda.Device().synchronize()
    with profile():
        yield
        cupy.cuda.Device().synchronize()


@cache
def _nvtx() -> tuple[Callable[[str], object], Callable[[], object]]:
    """Return the functions that begin and end a range."""
    try:
        from cupy.cuda import nvtx
    except ImportError:
        return lambda _: None, lambda: None
    return nvtx.RangePush, nvtx.RangePop
