"""One GEMM at one size, or several in turn: timed, held against the reference, beside their floor and peers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from ptxlab import gpu
from ptxlab.bench.record import Row, row_of
from ptxlab.lowbit import cost
from ptxlab.lowbit.bench.gemm.problem import (
    GemmLaunches,
    expected_bits,
    first_tokens,
    launches,
    packed_bytes,
    sizes_at,
    source_of,
    variant,
)
from ptxlab.lowbit.bench.shapes import GROUP, Layer
from ptxlab.lowbit.bench.stream import measure_stream
from ptxlab.lowbit.kernels.gemm.common import GemmStep
from ptxlab.runtime import launching
from ptxlab.runtime.timing import GEMM_REPLAYS, Measured, chain_calls, copies_beyond_l2, measure
from ptxlab.spec import Arrays, evaluate

StreamTime = Callable[[int], float]  # bytes -> microseconds, measured once in a run
Point = tuple[GemmStep, dict[str, int]]


def streams() -> StreamTime:
    """Return a function that measures stream floors, each number of bytes once in a run."""
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
    sums: bool = True,
    **further: Any,
) -> Row:
    """Time one step at one size; every result of the timed launches must be right, bit for bit.

    Args:
        step: the kernel.
        sizes: symbols of its spec.
        logical: its inputs on the device.
        right: the bits of its results (`problem.expected`).
        measured_as: the row's `measure`.
        stream_us: the run's stream floors.
        peers: microseconds by name.
        sums: whether a kernel that does without token sums is given them all the same.
        further: other fields of `Row` by name.
    """
    timed = launches(step, sizes, logical, sums=sums)
    measured = measure(timed.calls, replays=GEMM_REPLAYS)
    return in_turn_row(
        [timed],
        measured,
        stream_us,
        measure=measured_as,
        sizes=sizes,
        checked=timed.check(right),
        peers=dict(peers),
        variant=timed.variant,
        more=timed.resources,
        **{"activations": step.order, **further},
    )


def over_tokens(
    step: GemmStep,
    layer: Layer,
    logical: Arrays,
    tokens: Sequence[int],
    cublas: Mapping[int, Mapping[str, float]],
    group: int = GROUP,
    **further: Any,
) -> Iterator[Row]:
    """Measure a `point` for each number of tokens, the first ones of `logical`, beside cuBLAS."""
    for M in tokens:
        inputs = first_tokens(logical, M)
        right = expected_bits(step.spec, inputs)
        yield point(step, sizes_at(step.spec, layer, M, group), inputs, right, peers=cublas[M], **further)


def compile_all(points: Iterable[Point]) -> None:
    """Compile every variant that will run."""
    launching.compile_all((source_of(step), variant(step.spec, sizes)) for step, sizes in points)


def in_turn_on(
    links: Sequence[Point], logical: Sequence[Arrays], *, programmatic: bool = False
) -> tuple[Measured, list[GemmLaunches]]:
    """Time GEMMs one after the other as one call, over weights that no call finds in the L2."""
    copies = copies_beyond_l2(sum(packed_bytes(step.spec, sizes) for step, sizes in links))
    ready = [
        launches(*link, inputs, copies=copies, programmatic=programmatic)
        for link, inputs in zip(links, logical, strict=True)
    ]
    return measure(chain_calls(*(link.calls for link in ready)), replays=GEMM_REPLAYS), ready


def in_turn_row(
    ready: Sequence[GemmLaunches],
    measured: Measured,
    stream_us: StreamTime,
    *,
    more: Mapping[str, float],
    **further: Any,
) -> Row:
    """Build the row of one or more GEMMs that were timed as one call.

    `further` are arguments of `row_of` and fields of `Row`.
    """
    nbytes = sum(packed_bytes(link.spec, link.sizes) for link in ready)
    operations = sum(int(evaluate(link.spec.operations, link.sizes)) for link in ready)
    return row_of(
        ready[0].spec,
        measured=measured,
        floor=cost.gemm_floor(stream_us(nbytes), operations, gpu.device_info().slug),
        nbytes=sum(link.spec.bytes_moved({**link.sizes, **link.variant}) for link in ready),
        rate=(operations / measured.us / 1e6, "TOPS"),
        operations=operations,
        kernel=", ".join(dict.fromkeys(link.spec.name for link in ready)),
        more={"stream_us": stream_us(nbytes), "packed_bytes": nbytes, **more},
        **further,
    )
