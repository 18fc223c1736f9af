"""The part `g64`: the ladder in LiquidGEMM's groups (LiquidGEMM §7.1), beside what `gemm_w4a8` launches with them."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ptxlab.bench.record import Row
from ptxlab.bench.suite import Keep, measure_section
from ptxlab.lowbit.bench.gemm import headline, steps
from ptxlab.lowbit.bench.gemm.points import compile_all, streams
from ptxlab.lowbit.bench.gemm.problem import sizes_at, steps_of
from ptxlab.lowbit.bench.peers import Peers
from ptxlab.lowbit.bench.shapes import TOKENS, Layer

PART, GROUP = "g64", 64


def compared_rows(
    layers: Sequence[Layer],
    names: Sequence[str],
    progress: Callable[[str], None],
    peers: Peers,
    keep: Keep = measure_section,
) -> Iterator[Row]:
    """Measure every step with groups among `names`, and `gemm_w4a8`, at the ladder's tokens beside cuBLAS."""
    steps_with_groups = [step for step in steps_of(names) if "g" in step.spec.symbols]
    progress("compiling")
    planned_points = [
        (step, sizes_at(step.spec, layer, M, GROUP)) for layer in layers for step in steps_with_groups for M in TOKENS
    ]
    if headline.steps():
        planned_points += [headline.point_at(layer, M, GROUP) for layer in layers for M in TOKENS]
    compile_all(planned_points)
    stream_us = streams()

    def of_layer(layer: Layer) -> Iterator[Row]:
        progress(f"{layer}: peers")
        cublas = peers.cublas(layer.N, layer.K, TOKENS, None)
        progress(f"{layer}: {headline.FACE}")
        yield from headline.rows_beside(layer, cublas, stream_us, GROUP)
        yield from steps.layer_rows(layer, steps_with_groups, cublas, stream_us, progress, tokens=TOKENS, group=GROUP)

    for layer in layers:
        yield from keep(str(layer), partial(of_layer, layer))
