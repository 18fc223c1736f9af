"""What `gemm_w4a8` launches on matrices of other models, at odd numbers of tokens, beside cuBLAS FP8."""

from collections.abc import Callable, Iterator

from ptxlab.bench import headline, peers
from ptxlab.bench.points import Point, StreamTime
from ptxlab.bench.problem import expected, first_tokens, tokens
from ptxlab.bench.record import Row
from ptxlab.bench.shapes import UNTUNED, UNTUNED_TOKENS

MEASURE = "untuned"


def points() -> Iterator[Point]:
    """Every kernel that is launched, with its sizes."""
    for layer in UNTUNED:
        for M in UNTUNED_TOKENS:
            yield headline.at(layer, M)


def rows(stream_us: StreamTime, progress: Callable[[str], None]) -> Iterator[Row]:
    """Every matrix at every number of tokens."""
    for layer in UNTUNED:
        progress(f"{layer}: untuned")
        beside = peers.cublas(layer.N, layer.K, UNTUNED_TOKENS, ["cublas_fp8"])
        logical = {**headline.weight_of(layer), **tokens(layer, max(UNTUNED_TOKENS))}
        for M in UNTUNED_TOKENS:
            inputs = first_tokens(logical, M)
            right = expected(headline.chosen(layer, M).spec, inputs)
            yield headline.launched(layer, M, inputs, right, measured_as=MEASURE, stream_us=stream_us, peers=beside[M])
