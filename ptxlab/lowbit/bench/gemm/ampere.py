"""The part `compute_80`: the steps for Ampere as PTX for sm_80, which the driver of the GPU at hand compiles."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ptxlab import gpu
from ptxlab.bench.record import Row
from ptxlab.bench.suite import Keep, measure_section
from ptxlab.lowbit.bench.gemm import steps
from ptxlab.lowbit.bench.gemm.points import compile_all, streams
from ptxlab.lowbit.bench.gemm.problem import sizes_at, steps_of
from ptxlab.lowbit.bench.peers import Peers
from ptxlab.lowbit.bench.shapes import TOKENS, Layer
from ptxlab.lowbit.kernels.gemm import sm80

PART = MEASURE = "compute_80"
ARCH = "sm_80"


def compared_rows(
    layers: Sequence[Layer],
    names: Sequence[str],
    progress: Callable[[str], None],
    peers: Peers,
    keep: Keep = measure_section,
) -> Iterator[Row]:
    """Measure the steps for sm_80 among `names` at the ladder's tokens. No peer of that architecture is known."""
    ampere = [step for step in steps_of(names) if step in sm80.STEPS]
    progress("compiling")
    with gpu.compiling_for(ARCH):
        compile_all((step, sizes_at(step.spec, layer, M)) for layer in layers for step in ampere for M in TOKENS)
    stream_us = streams()
    no_peers: dict[int, dict[str, float]] = {M: {} for M in TOKENS}

    def of_layer(layer: Layer) -> list[Row]:
        with gpu.compiling_for(ARCH):
            return [*steps.layer_rows(layer, ampere, no_peers, stream_us, progress, MEASURE, TOKENS)]

    for layer in layers:
        yield from keep(str(layer), partial(of_layer, layer))
