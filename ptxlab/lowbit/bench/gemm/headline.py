"""What `gemm_w4a8` launches where no kernel is asked for, at every point of the suite and in every order it takes.

The weight is packed once, for all numbers of tokens: LQQ in groups, and QoQ per channel. Activations come with their
token sums from the quantiser that writes them in that order. With groups of 128 row-major ones stand beside once more
as if they came from elsewhere, without sums: then the kernel does without.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ptxlab.bench.record import Row
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.bench.gemm.points import Point, StreamTime, point
from ptxlab.lowbit.bench.gemm.problem import expected_bits, first_tokens, sizes_at, tokens, weights
from ptxlab.lowbit.bench.peers import Peers
from ptxlab.lowbit.bench.shapes import ALL_TOKENS, GROUP, GROUPS, LLAMA, PER_CHANNEL, UNTUNED, UNTUNED_TOKENS, Layer
from ptxlab.lowbit.kernels.gemm import ladder
from ptxlab.lowbit.kernels.gemm.common import GemmStep
from ptxlab.lowbit.kernels.gemm.options import GemmOptions
from ptxlab.spec import Arrays

FACE = "gemm_w4a8"
MEASURE, UNTUNED_MEASURE = "headline", "untuned"
WITHOUT_SUMS = "row_major-sums"  # order of a row whose activations came without token sums
SCHEME, CHANNEL_SCHEME, PACKING = "lqq", "qoq_channel", "strips"
ORDER = "row_major"  # of the activations where only one is measured: in chains, with experts, on untuned shapes
_TILES = (8, 16, 32, 64, 128, 256)  # tokens of a tile of activations: the first that holds all, else the last


class _Weight(NamedTuple):
    """Fields of a packed weight by which a kernel is chosen."""

    scheme: str
    layout: str
    N: int
    K: int
    group: int


def scheme_of(group: int) -> str:
    """Return the scheme of weights with groups, or without."""
    return CHANNEL_SCHEME if group == PER_CHANNEL else SCHEME


def steps(group: int = GROUP) -> list[GemmStep]:
    """List the steps that take weights of this group and run on this GPU."""
    scheme_and_packing = scheme_of(group), PACKING
    return [
        step
        for step in ladder.LADDER
        if (step.scheme, step.packing) == scheme_and_packing and ladder.why_not(step) is None
    ]


def weight_of(layer: Layer, group: int = GROUP, seed: int = 0) -> Arrays:
    """Build the logical weight of one matrix on the device."""
    example_spec = next(step.spec for step in steps(group) if step.spec.example_sizes)
    return weights(example_spec, layer, group, seed)


def choose_step(layer: Layer, M: int, group: int = GROUP, order: str = ORDER) -> GemmStep:
    """Return the step that `gemm_w4a8` chooses."""
    weight: Any = _Weight(scheme_of(group), PACKING, layer.N, layer.K, group or layer.K)
    return ladder.choose(weight, order, M, GemmOptions(backend="gpu"))


def rows_of_tile(M: int, order: str) -> int:
    """Return the tokens of a tile of activations in that order."""
    if order == "tiles":
        return next((rows for rows in _TILES if rows >= M), _TILES[-1])
    return 8 if order == "fragment" else 1


def point_at(layer: Layer, M: int, group: int = GROUP, order: str = ORDER) -> Point:
    """Return the step that `gemm_w4a8` chooses at a point, and its sizes."""
    step = choose_step(layer, M, group, order)
    return step, sizes_at(step.spec, layer, M, group, rows_of_tile(M, order))


def points(names: Sequence[str]) -> Iterator[Point]:
    """Yield every kernel among `names` that is launched, with its sizes."""
    for layer in LLAMA:
        for group in (*GROUPS, PER_CHANNEL):
            for M in ALL_TOKENS:
                for order in _orders(layer, M, group):
                    step, sizes = point_at(layer, M, group, order)
                    if step.spec.name in names:
                        yield step, sizes
    yield from (point_at(layer, M) for layer in UNTUNED for M in _untuned_tokens(layer, names))


def layer_rows(
    layer: Layer,
    names: Sequence[str],
    peer_times: Mapping[int, Mapping[str, float]],
    stream_us: StreamTime,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    """Measure one matrix at every number of tokens, with every group, in every order.

    The number of tokens varies slowest: after thousands of tokens the clock stays low for a while, which slows down
    what is measured next.
    """
    if not any(step.spec.name in names for step in steps()):
        return
    progress(f"{layer}: {FACE}")
    activations = tokens(layer, max(ALL_TOKENS))
    weights_by_group = {group: weight_of(layer, group) for group in (*GROUPS, PER_CHANNEL)}
    for M in ALL_TOKENS:
        further = {"stream_us": stream_us, "peers": peer_times[M]}
        for group, weight in weights_by_group.items():
            yield from _rows_at(layer, M, group, first_tokens({**weight, **activations}, M), names, **further)


def rows_beside(
    layer: Layer, peer_times: Mapping[int, Mapping[str, float]], stream_us: StreamTime, group: int = GROUP
) -> Iterator[Row]:
    """Measure what is launched on one matrix at the numbers of tokens of the peers."""
    if not steps(group):
        return
    logical = {**weight_of(layer, group), **tokens(layer, max(peer_times))}
    for M, peers in peer_times.items():
        inputs = first_tokens(logical, M)
        right = expected_bits(choose_step(layer, M, group).spec, inputs)
        yield measure_launched(
            layer, M, inputs, right, group=group, measured_as=MEASURE, stream_us=stream_us, peers=peers
        )


def untuned_rows(
    layers: Sequence[Layer], names: Sequence[str], stream_us: StreamTime, progress: Callable[[str], None], peers: Peers
) -> Iterator[Row]:
    """Measure matrices of other models, at odd token counts at which one of `names` is launched, beside cuBLAS FP8."""
    for layer in layers:
        if not (measured := _untuned_tokens(layer, names)):
            continue
        progress(f"{layer}: untuned")
        fp8 = peers.cublas(layer.N, layer.K, UNTUNED_TOKENS, ["cublas_fp8"])
        logical = {**weight_of(layer), **tokens(layer, max(UNTUNED_TOKENS))}
        for M in measured:
            inputs, fp8_us = first_tokens(logical, M), fp8[M]
            right = expected_bits(choose_step(layer, M).spec, inputs)
            yield measure_launched(
                layer, M, inputs, right, measured_as=UNTUNED_MEASURE, stream_us=stream_us, peers=fp8_us
            )


def measure_launched(
    layer: Layer, M: int, logical: Arrays, right: Any, *, group: int = GROUP, order: str = ORDER, **further: Any
) -> Row:
    """Measure the kernel that is launched at one point, in one order; `further` are arguments of `point`."""
    step, sizes = point_at(layer, M, group, order)
    inputs = {**logical, "rows": sizes["rows"]} if "rows" in sizes else logical
    return point(step, sizes, inputs, right, face=FACE, **further)


def _untuned_tokens(layer: Layer, names: Sequence[str]) -> list[int]:
    return [M for M in UNTUNED_TOKENS if steps() and choose_step(layer, M).spec.name in names]


def _orders(layer: Layer, M: int, group: int) -> list[str]:
    """List the orders of activations that a kernel reads at this size; only the usual group has unusual orders."""
    orders = dict.fromkeys(step.order for step in steps(group) if group == GROUP or step.order == ORDER)
    return [order for order in orders if _is_taken(*point_at(layer, M, group, order))]


def _is_taken(step: GemmStep, sizes: dict[str, int]) -> bool:
    try:
        step.spec.check_sizes(sizes)
    except ArgumentError:
        return False
    return True


def _rows_at(layer: Layer, M: int, group: int, logical: Arrays, names: Sequence[str], **further: Any) -> Iterator[Row]:
    orders = {order: choose_step(layer, M, group, order) for order in _orders(layer, M, group)}
    orders = {order: step for order, step in orders.items() if step.spec.name in names}
    right = expected_bits(next(iter(orders.values())).spec, logical) if orders else None
    for order in orders:
        yield measure_launched(layer, M, logical, right, group=group, order=order, measured_as=MEASURE, **further)
    if ORDER in orders and group == GROUP:
        row = measure_launched(layer, M, logical, right, group=group, sums=False, measured_as=MEASURE, **further)
        yield replace(row, activations=WITHOUT_SUMS)
