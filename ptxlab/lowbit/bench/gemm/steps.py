"""Kernels by name on the matrices of three models, with row-major activations: the W4A8 ladder, and W8A8 beside it.

W8A8 is the same GEMM with weights that come as they are multiplied: what W4A8 costs beyond it is dequantisation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from ptxlab import registry
from ptxlab.bench.record import Row
from ptxlab.lowbit.bench.gemm.points import Point, StreamTime, over_tokens
from ptxlab.lowbit.bench.gemm.problem import problem, sizes_at, steps_of
from ptxlab.lowbit.bench.shapes import ALL_TOKENS, GROUP, LAYERS, LLAMA, TOKENS, Layer
from ptxlab.lowbit.kernels.gemm.common import GemmStep
from ptxlab.lowbit.kernels.gemm.ladder import why_not

MEASURE, W8A8 = "gemm", "w8a8"
W8A8_KERNEL = "gemm_w8a8_sm90"


def w8a8_of(names: Sequence[str]) -> list[GemmStep]:
    """List W8A8 as a step, if it is among `names` and runs on this GPU."""
    steps = [GemmStep(spec, "int8", "") for n, spec in registry.specs().items() if n == W8A8_KERNEL and n in names]
    return [step for step in steps if why_not(step) is None]


def points(names: Sequence[str]) -> Iterator[Point]:
    """Yield every kernel among `names` with its sizes."""
    for steps, layers, tokens in ((steps_of(names), LAYERS, TOKENS), (w8a8_of(names), LLAMA, ALL_TOKENS)):
        for step in steps:
            yield from ((step, sizes_at(step.spec, layer, M)) for layer in layers for M in tokens)


def layer_rows(
    layer: Layer,
    steps: Sequence[GemmStep],
    cublas: Mapping[int, Mapping[str, float]],
    stream_us: StreamTime,
    progress: Callable[[str], None],
    measured_as: str = MEASURE,
    tokens: Sequence[int] = (),
    group: int = GROUP,
) -> Iterator[Row]:
    """Measure every step on one matrix beside cuBLAS.

    By default the token counts are the ladder's, for W8A8 all.
    """
    tokens = tokens or (ALL_TOKENS if measured_as == W8A8 else TOKENS)
    for step in steps:
        progress(f"{layer}: {step.spec.name}")
        logical = problem(step.spec, layer, max(tokens), group)
        yield from over_tokens(
            step, layer, logical, tokens, cublas, group, measured_as=measured_as, stream_us=stream_us
        )
