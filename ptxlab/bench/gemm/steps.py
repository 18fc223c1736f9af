"""Every step of the W4A8 ladder on the matrices of three models, with row-major activations."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from ptxlab.bench.gemm.points import Point, StreamTime, point
from ptxlab.bench.gemm.problem import expected, first_tokens, problem, sizes_at
from ptxlab.bench.record import Row
from ptxlab.bench.shapes import LAYERS, TOKENS, Layer
from ptxlab.kernels.gemm.common import GemmStep

MEASURE = "gemm"


def points(steps: Sequence[GemmStep]) -> Iterator[Point]:
    """Every step with its sizes."""
    for step in steps:
        for layer in LAYERS:
            for M in TOKENS:
                yield step, sizes_at(step.spec, layer, M)


def layer_rows(
    layer: Layer,
    steps: Sequence[GemmStep],
    cublas: Mapping[int, Mapping[str, float]],
    stream_us: StreamTime,
    progress: Callable[[str], None],
    *,
    tokens: Sequence[int] | None = None,
    measured_as: str = MEASURE,
) -> Iterator[Row]:
    """Every step on one matrix, at the ladder's numbers of tokens or others, beside cuBLAS."""
    tokens = tokens or TOKENS
    for step in steps:
        progress(f"{layer}: {step.spec.name}")
        logical = problem(step.spec, layer, max(tokens))
        for M in tokens:
            sizes, inputs = sizes_at(step.spec, layer, M), first_tokens(logical, M)
            right = expected(step.spec, inputs)
            yield point(step, sizes, inputs, right, measured_as=measured_as, stream_us=stream_us, peers=cublas[M])
