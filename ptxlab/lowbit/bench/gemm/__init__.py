"""Suite `gemm`: the W4A8 ladder, what `gemm_w4a8` launches, and W4A4, beside their floor and the peers given."""

from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial

from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row
from ptxlab.bench.suite import Keep, Suite, measure_section
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.bench import stream
from ptxlab.lowbit.bench.gemm import ampere, chain, grouped, groups, headline, limits, points, quantiser, steps, w4a4
from ptxlab.lowbit.bench.gemm.points import StreamTime
from ptxlab.lowbit.bench.gemm.problem import steps_of
from ptxlab.lowbit.bench.peers import NO_PEERS, Peers
from ptxlab.lowbit.bench.shapes import ALL_TOKENS, LAYERS, LLAMA, MIXTRAL, TOKENS, UNTUNED, Layer

PARTS = {w4a4.PART: w4a4.compared_rows, groups.PART: groups.compared_rows, ampere.PART: ampere.compared_rows}


def rows(
    names: list[str],
    ceilings: Ceilings,
    progress: Callable[[str], None],
    matrices: Container[tuple[int, int]] | None = None,
    only: Sequence[str] = (),
    peers: Peers = NO_PEERS,
    keep: Keep = measure_section,
) -> list[Row]:
    """Measure kernels of the family by name, as far as this GPU runs them.

    Chains and the quantiser are measured if all kernels that `gemm_w4a8` may launch are, experts also if the grouped
    kernel is. With `matrices` rows are of those alone, by (N, K), without chains and the quantiser; with `only` of the
    part that it names alone (`part`). A matrix is a section, and so is each of the others.
    """
    if only:
        layers, parts = part(only), [measured_parts for word, measured_parts in PARTS.items() if word in only]
        return [row for measured_parts in parts for row in measured_parts(layers, names, progress, peers, keep)]
    is_whole = matrices is None and _all_launched(names)
    planned_points = [*steps.points(names), *headline.points(names), *grouped.points(names), *w4a4.points(names)]
    if not planned_points:
        raise ArgumentError("suite", "a kernel of the GEMM suite that this GPU runs", ", ".join(names))
    progress("compiling")
    points.compile_all(planned_points)
    stream_us = points.streams()
    single_layers, mixtral, untuned_layers = (
        [layer for layer in layers if matrices is None or (layer.N, layer.K) in matrices]
        for layers in (LAYERS, MIXTRAL, UNTUNED)
    )
    measured_rows: list[Row] = []
    for layer in single_layers:
        measured_rows += keep(str(layer), partial(layer_rows, layer, names, stream_us, progress, peers))
    if is_whole:
        measured_rows += keep("quantiser", partial(quantiser.rows, ceilings, progress))
        measured_rows += keep("chain", partial(chain.rows, stream_us, progress, peers))
    measured_rows += keep("untuned", partial(headline.untuned_rows, untuned_layers, names, stream_us, progress, peers))
    if is_whole or any(grouped.points(names)):
        measured_rows += keep("grouped", partial(grouped.rows, mixtral, stream_us, progress))
    progress("counting with ncu")
    return limits.with_limits(measured_rows)


def part(words: Sequence[str]) -> tuple[Layer, ...]:
    """Find the matrices of the parts that words name, with `7B` or `70B` of that model alone.

    `w4a4` is W4A4 and W4Ax beside W4A8, W8A8 and cuBLAS, `g64` the ladder in groups of 64, `compute_80` its steps for
    Ampere compiled for that. Raises ArgumentError for another word, and for no part.
    """
    models = dict.fromkeys(layer.model for layer in LLAMA)
    for word in words:
        if word not in (*PARTS, *models):
            raise ArgumentError("only", f"one of {', '.join((*PARTS, *models))}", word)
    if words and not PARTS.keys() & set(words):
        raise ArgumentError("only", f"must name a part too: {', '.join(PARTS)}", ", ".join(words))
    return tuple(layer for layer in LLAMA if layer.model in words or not {*words} & {*models})


def layer_rows(
    layer: Layer, names: Sequence[str], stream_us: StreamTime, progress: Callable[[str], None], peers: Peers
) -> Iterator[Row]:
    """Measure everything that concerns one matrix alone; its peers first."""
    progress(f"{layer}: peers")
    peer_times = peers.cublas(layer.N, layer.K, ALL_TOKENS if layer in LLAMA else TOKENS, None)
    yield from steps.layer_rows(layer, steps_of(names), peer_times, stream_us, progress)
    if layer in LLAMA:
        if any(step.spec.name in names for step in headline.steps()):
            w4a8 = peers.humming(layer.N, layer.K, ALL_TOKENS)
            yield from headline.layer_rows(
                layer, names, {M: peer_times[M] | w4a8[M] for M in peer_times}, stream_us, progress
            )
        yield from steps.layer_rows(layer, steps.w8a8_of(names), peer_times, stream_us, progress, steps.W8A8)
        yield from w4a4.layer_rows(layer, names, peer_times, stream_us, progress)


def _all_launched(names: Sequence[str]) -> bool:
    return bool(headline.steps()) and all(step.spec.name in names for step in headline.steps())


def _record_of(only: Sequence[str]) -> str:
    """Name the record of the one part in `only`; return "" for the whole suite, several words or none of its parts."""
    return f"gemm_{only[0]}" if len({*only}) == 1 and only[0] in PARTS else ""


SUITE = Suite(
    "gemm",
    rows,
    takes=frozenset({"matrices", "peers"}),
    part=part,
    record_of=_record_of,
    keeps=True,
    shortfall=stream.shortfall,
)
