"""W4A4 by Atom's rules, outliers included, and W4Ax by COMET's on LLaMA-2's matrices, beside cuBLAS.

The part `w4a4` of the suite measures them beside W4A8 and W8A8 at COMPARED numbers of tokens, and nothing else. The
steps for sm_80 are measured on one small matrix, that of Atom's own benchmark: on GPUs without INT4 tensor cores they
run in software.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.arithmetic import ceil_div
from ptxlab.bench.record import Row
from ptxlab.bench.suite import Keep, measure_section
from ptxlab.lowbit.bench.gemm import headline, steps
from ptxlab.lowbit.bench.gemm.points import Point, StreamTime, compile_all, over_tokens, streams
from ptxlab.lowbit.bench.gemm.problem import sizes_at
from ptxlab.lowbit.bench.peers import Peers
from ptxlab.lowbit.bench.shapes import LLAMA, Layer
from ptxlab.lowbit.kernels.gemm import w4a4, w4ax
from ptxlab.lowbit.kernels.gemm.common import GemmStep
from ptxlab.lowbit.kernels.gemm.ladder import why_not
from ptxlab.lowbit.quant.tiled import BLOCK_ROWS, with_arrays
from ptxlab.spec import Arrays, KernelSpec

MEASURES = {"w4a4": w4a4.SPECS, "w4ax": w4ax.SPECS}  # rows' `measure`, with its kernels
TOKENS = (16, 64, 128, 256, 512)  # those at which cuBLAS is measured
PART = "w4a4"  # of the suite
COMPARED = (64, 128, 256, 512, 1024)
CUBLAS = ("cublas_fp8", "cublas_int8")
LADDER_LAYER = LLAMA[1]  # 4096 x 4096


def points(names: Sequence[str]) -> Iterator[Point]:
    """Yield every kernel among `names` that this GPU runs, with its sizes."""
    for layer in LLAMA:
        for step in _steps(layer, names):
            yield from ((step, sizes_at(step.spec, layer, M)) for M in TOKENS)


def compared_rows(
    layers: Sequence[Layer],
    names: Sequence[str],
    progress: Callable[[str], None],
    peers: Peers,
    keep: Keep = measure_section,
) -> Iterator[Row]:
    """Measure this part of the suite: kernels among `names` beside W4A8, W8A8 and cuBLAS at COMPARED tokens.

    The W4A8 kernel is the one that `gemm_w4a8` launches.
    """
    w8a8_steps = steps.w8a8_of([steps.W8A8_KERNEL])
    progress("compiling")
    kernels = [(step, layer) for layer in layers for step in (*w8a8_steps, *_steps(layer, names))]
    planned_points = [(step, sizes_at(step.spec, layer, M)) for step, layer in kernels for M in COMPARED]
    if headline.steps():
        planned_points += [headline.point_at(layer, M) for layer in layers for M in COMPARED]
    compile_all(planned_points)
    stream_us = streams()

    def of_layer(layer: Layer) -> Iterator[Row]:
        progress(f"{layer}: peers")
        peer_times = peers.cublas(layer.N, layer.K, COMPARED, CUBLAS)
        progress(f"{layer}: {headline.FACE}")
        yield from headline.rows_beside(layer, peer_times, stream_us)
        yield from steps.layer_rows(layer, w8a8_steps, peer_times, stream_us, progress, steps.W8A8, COMPARED)
        yield from layer_rows(layer, names, peer_times, stream_us, progress, COMPARED)

    for layer in layers:
        yield from keep(str(layer), partial(of_layer, layer))


def layer_rows(
    layer: Layer,
    names: Sequence[str],
    cublas: Mapping[int, Mapping[str, float]],
    stream_us: StreamTime,
    progress: Callable[[str], None],
    counts: Sequence[int] = (),
) -> Iterator[Row]:
    """Measure every kernel on one matrix, by default at TOKENS."""
    counts = counts or TOKENS
    for step in _steps(layer, names):
        progress(f"{layer}: {step.spec.name}")
        logical = problem(step.spec, layer, max(counts))
        yield from over_tokens(step, layer, logical, counts, cublas, measured_as=step.scheme, stream_us=stream_us)


def problem(spec: KernelSpec, layer: Layer, M: int, seed: int = 0) -> Arrays:
    """Draw logical inputs on the device: a weight of repeated rows, and random activations."""
    sizes = sizes_at(spec, layer, M) | {"N": min(layer.N, BLOCK_ROWS)}
    drawn_inputs = spec.example(np.random.default_rng(seed), **{name: sizes[name] for name in spec.example_sizes[0]})
    logical: Arrays = with_arrays(drawn_inputs, gpu.to_device)
    weight = {name: part for name, part in logical.items() if not name.startswith("x")}
    return {**logical, **with_arrays(weight, lambda array: _repeat_rows(array, layer.N))}


def _repeat_rows(array: Any, rows: int) -> Any:
    return np.tile(array, (ceil_div(rows, len(array)), *[1] * (array.ndim - 1)))[:rows].copy()


def _steps(layer: Layer, names: Sequence[str]) -> list[GemmStep]:
    """List the steps among `names` for a matrix; a step's scheme is the name of the measure."""
    production = (w4a4.SM90, w4ax.SM90)
    steps = [GemmStep(spec, measure, "") for measure, specs in MEASURES.items() for spec in specs if spec.name in names]
    return [step for step in steps if (layer == LADDER_LAYER or step.spec in production) and why_not(step) is None]
