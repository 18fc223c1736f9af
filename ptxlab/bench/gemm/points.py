"""One GEMM at one size: timed, held against the reference, set beside its floor and its peers."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from ptxlab import cost, gpu, toolchain
from ptxlab.bench.gemm.problem import launches, packed_bytes, source_of, variant
from ptxlab.bench.record import Row, row_of
from ptxlab.bench.stored import FACTOR, stored_peers, stored_times
from ptxlab.bench.stream import measure_stream
from ptxlab.bench.timing import GEMM_REPLAYS, measure
from ptxlab.kernels.gemm.common import GemmStep
from ptxlab.spec import Arrays, evaluate

StreamTime = Callable[[int], float]  # bytes -> microseconds, measured once in a run
Point = tuple[GemmStep, dict[str, int]]


def streams() -> StreamTime:
    """The stream floors of one run: each number of bytes is measured when it is first asked for."""
    return cache(measure_stream)


def point(
    step: GemmStep,
    sizes: dict[str, int],
    logical: Arrays,
    right: Any,
    *,
    measured_as: str,
    stream_us: StreamTime,
    peers: Mapping[str, float],
    more: Mapping[str, float] | None = None,
    sums: bool = True,
    **further: Any,
) -> Row:
    """Time one step at one size. Every result of the timed launches has to be the right one, bit for bit.

    Args:
        step: the kernel.
        sizes: symbols of its spec.
        logical: its inputs on the device.
        right: the bits of its results (`problem.expected`).
        measured_as: the row's `measure`.
        stream_us: the run's stream floors.
        peers: microseconds by name.
        more: further figures of the row.
        sums: whether a kernel that does without token sums is given them all the same.
        further: other fields of `Row` by name.
    """
    spec = step.spec
    timed = launches(step, sizes, logical, sums=sums)
    measured = measure(timed.calls, replays=GEMM_REPLAYS)
    operations, nbytes = int(evaluate(spec.operations, sizes)), packed_bytes(spec, sizes)
    return row_of(
        spec,
        source_of(step),
        measured_as,
        sizes,
        measured,
        floor=cost.gemm_floor(stream_us(nbytes), operations, gpu.device_info().slug),
        checked=timed.check(right),
        nbytes=spec.bytes_moved({**sizes, **timed.variant}),
        rate=(operations / measured.us / 1e6, "TOPS"),
        operations=operations,
        peers=dict(peers),
        variant=timed.variant,
        more={
            "stream_us": stream_us(nbytes),
            "packed_bytes": nbytes,
            "registers": timed.kernel.registers,
            "local_bytes": timed.kernel.local_bytes,
            **(more or {}),
        },
        **{"activations": step.order, **further},
    )


def all_peers(N: int, K: int, M: int, cublas: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """cuBLAS's times in this run with the stored ones of others, and what a row's `more` says of these."""
    others, factor = stored_peers((N, K, M), cublas, stored_times(gpu.device_info().slug))
    return {**cublas, **others}, {FACTOR: factor} if others else {}


def compile_all(points: Iterable[Point]) -> None:
    """Compile every variant that will run, side by side: loading finds them in the cache."""
    arch = gpu.device_info().arch
    variants = {(source_of(step), tuple(variant(step.spec, sizes).items())) for step, sizes in points}
    with ThreadPoolExecutor() as pool:
        compiled = [
            pool.submit(toolchain.compile_cuda, source, arch, defines=dict(constants))
            for source, constants in variants
            if source.language == "cu"
        ]
        for job in compiled:
            job.result()
