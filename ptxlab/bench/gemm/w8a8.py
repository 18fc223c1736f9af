"""The same GEMM with 8-bit weights, which come as they are multiplied: what W4A8 costs beyond it is dequantisation."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from ptxlab import kernels
from ptxlab.bench.gemm.points import Point, StreamTime
from ptxlab.bench.gemm.problem import sizes_at
from ptxlab.bench.gemm.steps import layer_rows as rows_of_steps
from ptxlab.bench.record import Row
from ptxlab.bench.shapes import ALL_TOKENS, LLAMA, Layer
from ptxlab.kernels.gemm.common import GemmStep
from ptxlab.kernels.gemm.ladder import why_not

KERNEL = "gemm_w8a8_sm90"
MEASURE = "w8a8"


def steps(names: Sequence[str]) -> list[GemmStep]:
    """The kernel as a step, where it is among `names` and runs on this GPU."""
    found = [GemmStep(spec, "int8", "") for name, spec in kernels.specs().items() if name == KERNEL and name in names]
    return [step for step in found if why_not(step) is None]


def points(names: Sequence[str]) -> Iterator[Point]:
    """The kernel with its sizes."""
    for step in steps(names):
        for layer in LLAMA:
            for M in ALL_TOKENS:
                yield step, sizes_at(step.spec, layer, M)


def layer_rows(
    layer: Layer,
    names: Sequence[str],
    cublas: Mapping[int, Mapping[str, float]],
    stream_us: StreamTime,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    """One matrix at every number of tokens, beside cuBLAS."""
    chosen = steps(names)
    return rows_of_steps(layer, chosen, cublas, stream_us, progress, tokens=ALL_TOKENS, measured_as=MEASURE)
