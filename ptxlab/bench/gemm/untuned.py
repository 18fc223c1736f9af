"""What `gemm_w4a8` launches on matrices of other models, at odd numbers of tokens, beside cuBLAS FP8."""

from collections.abc import Callable, Iterator, Sequence

from ptxlab.bench import peers
from ptxlab.bench.gemm import headline
from ptxlab.bench.gemm.points import Point, StreamTime
from ptxlab.bench.gemm.problem import expected, first_tokens, tokens
from ptxlab.bench.record import Row
from ptxlab.bench.shapes import UNTUNED, UNTUNED_TOKENS, Layer

MEASURE = "untuned"


def points(names: Sequence[str]) -> Iterator[Point]:
    """Every kernel among `names` that is launched, with its sizes."""
    for layer in UNTUNED:
        for M in tokens_on(layer, names):
            yield headline.at(layer, M)


def tokens_on(layer: Layer, names: Sequence[str]) -> list[int]:
    """The numbers of tokens at which one of the kernels `names` is launched."""
    if not headline.steps():
        return []
    return [M for M in UNTUNED_TOKENS if headline.chosen(layer, M).spec.name in names]


def rows(
    layers: Sequence[Layer], names: Sequence[str], stream_us: StreamTime, progress: Callable[[str], None]
) -> Iterator[Row]:
    """Matrices at every number of tokens at which one of the kernels `names` is launched."""
    for layer in layers:
        if not (measured := tokens_on(layer, names)):
            continue
        progress(f"{layer}: untuned")
        beside = peers.cublas(layer.N, layer.K, UNTUNED_TOKENS, ["cublas_fp8"])
        logical = {**headline.weight_of(layer), **tokens(layer, max(UNTUNED_TOKENS))}
        for M in measured:
            inputs = first_tokens(logical, M)
            right = expected(headline.chosen(layer, M).spec, inputs)
            yield headline.launched(layer, M, inputs, right, measured_as=MEASURE, stream_us=stream_us, peers=beside[M])
