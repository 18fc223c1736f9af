"""A decoder layer, `model.decode_layer`, in one CUDA graph: layers in turn, each with weights and cache of its own.

Beside it every operation alone, as the chain launches it, and the least that the card could take for all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from ptxlab import gpu
from ptxlab.bench.attention.problem import random_problem
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.layer.shapes import LENGTH, Work, batch_of, rows_of, sizes_of
from ptxlab.bench.record import Row
from ptxlab.bench.shapes import HEAD_DIM, PAGE
from ptxlab.bench.timing import GEMM_REPLAYS, Measured, copies_beyond_l2, measure, measure_graph
from ptxlab.errors import BenchmarkError
from ptxlab.model import Config, LayerBuffers, LayerInputs, LayerWeights, decode_layer, layer
from ptxlab.model import reference as twins
from ptxlab.quant.tiled import with_arrays

MEASURE, FACE = "layer", "decode_layer"
GEMM, ATTENTION, OTHERS = "gemm", "attention", "others"
_COMPARED = 250e6  # weights of the largest layer that is compared with its exact twin, which takes seconds
_CALLED = (  # by `decode_layer`, in its module
    *("rmsnorm_quantize", "gemm_w4a8", "gemm_w4a8_grouped", "rope_append_kv4", "attention_kv4"),
    *("quantize_activations", "silu_mul_quantize", "route_tokens", "combine_experts"),
)


class DecoderCall(NamedTuple):
    """One call that `decode_layer` makes.

    Attributes:
        name: of the function, and which of its calls it is: `gemm_w4a8 2` is the second.
        part: `gemm`, `attention` or `others`.
        function, args, keywords: of the call.
    """

    name: str
    part: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def call(self, **changed: Any) -> Callable[[], Any]:
        """The call, to be made again, with some keywords changed."""
        return partial(self.function, *self.args, **{**self.keywords, **changed})


@contextmanager
def recorded() -> Iterator[list[DecoderCall]]:
    """Inside, the calls that `decode_layer` makes are noted; the list is complete when the context ends."""
    found: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            found.append((name, function, args, keywords))
            return function(*args, **keywords)

        return call

    functions = {name: getattr(layer, name) for name in _CALLED}
    operations: list[DecoderCall] = []
    try:
        for name, function in functions.items():
            setattr(layer, name, noted(name, function))
        yield operations
    finally:
        for name, function in functions.items():
            setattr(layer, name, function)
    parts = {"gemm_w4a8": GEMM, "gemm_w4a8_grouped": GEMM, "attention_kv4": ATTENTION}
    times = dict.fromkeys((name for name, *_ in found), 0)
    for name, function, args, keywords in found:
        times[name] += 1
        operations.append(DecoderCall(f"{name} {times[name]}", parts.get(name, OTHERS), function, args, keywords))


class Decoder:
    """Layers of a config at a batch: weights and caches on the device, and the state that all layers share."""

    def __init__(self, config: Config, B: int, weights: Sequence[LayerWeights], caches: int = 0) -> None:
        self.config, self.B, self.weights = config, B, weights
        batch = batch_of(config, B)
        caches = caches or max(len(weights), copies_beyond_l2(batch.kv_bytes()))
        self.caches = random_problem(batch, copies=caches).caches
        last = LENGTH - 1
        pages = (gpu.to_host(each.block_table)[:, last // PAGE] for each in self.caches[: len(weights)])
        self.slots = [gpu.to_device((page * PAGE + last % PAGE).astype(np.int32)) for page in pages]
        self.rope = *map(gpu.to_device, config.rope_tables(LENGTH)), gpu.to_device(np.full(B, last, np.int32))
        self.buffers = LayerBuffers.empty(weights[0], self.caches[0])
        rng = np.random.default_rng(B)
        start = rng.standard_normal((2, B, config.hidden), dtype=np.float32).astype(np.float16)
        self._start = [gpu.to_device(each) for each in start]
        self.residual = self._start[1].copy()
        self.restart()

    def restart(self) -> None:
        """Restore the state. In the caches only the last tokens change, and every run writes them anew."""
        gpu.copy_bytes(self.buffers.hidden, self._start[0])
        gpu.copy_bytes(self.residual, self._start[1])

    def calls(self, programmatic: bool = True) -> list[Callable[[], Any]]:
        """A call per layer, each on the output of the one before."""
        buffers = replace(self.buffers, programmatic=programmatic)
        return [
            partial(
                decode_layer,
                buffers.hidden,
                self.residual,
                weights,
                cache,
                slots,
                rope=self.rope,
                buffers=buffers,
                programmatic=programmatic,
            )
            for weights, cache, slots in zip(self.weights, self.caches, self.slots, strict=False)
        ]

    @cached_property
    def operations(self) -> list[list[DecoderCall]]:
        """The calls that each layer makes, in order."""
        found = []
        for call in self.calls():
            with recorded() as operations:
                call()
            found.append(operations)
        return found

    def check(self, graph: gpu.Graph) -> str:
        """Hold the graph that was timed, replayed once, against the same calls made plainly one after another.

        Returns what was checked, in a sentence. Raises BenchmarkError for a bit that differs, or what is not finite.
        """

        def state() -> list[np.ndarray]:
            return [gpu.to_host(array) for array in (self.buffers.attention, self.buffers.hidden, self.residual)]

        self.restart()
        graph.synchronize()
        gpu.to_host(self.residual)  # waits for the copies
        graph.replay()
        graph.synchronize()
        timed = state()
        self.restart()
        plain = self.calls(programmatic=False)
        for number in range(graph.calls):
            plain[number % len(plain)]()
        one_by_one = state()
        if not all((a.view(np.uint16) == b.view(np.uint16)).all() for a, b in zip(timed, one_by_one, strict=True)):
            raise BenchmarkError(f"{FACE}, {self.config.name}, batch {self.B}: other bits than its calls one by one")
        if not all(np.isfinite(array).all() for array in timed):
            raise BenchmarkError(f"{FACE}, {self.config.name}, batch {self.B}: results that are not finite")
        said = f"the graph that was timed, replayed over {graph.calls} layers: attention, result and residual equal"
        return f"{said} to the public calls made plainly one after another, bit for bit"

    def compare(self) -> str:
        """Compare every launch of the first layer with the exact twin (`model.reference`); "" for a layer too large."""
        weights, cache, slots = self.weights[0], self.caches[0], self.slots[0]
        if sum(N * K for N, K in self.config.matrices.values()) > _COMPARED or self.config.experts:
            return ""
        self.restart()
        given = LayerInputs.of(self.buffers.hidden, self.residual, cache, slots, self.rope)
        self.calls()[0]()
        return f"{twins.compare(given, weights, self.buffers, self.residual, cache)}; "

    def work(self) -> list[Work]:
        """The least work of each operation: weights and cache read once from memory; activations stay in the L2."""
        config, found = self.config, []
        routing = self.buffers.routing
        active = 0 if routing is None else int((np.diff(gpu.to_host(routing.routed.offsets)) > 0).sum())
        for name, (N, K) in config.matrices.items():
            weight = getattr(self.weights[0], name)
            share = active / config.experts if config.experts and name in ("gate_up", "down") else 1
            rows = rows_of(config, name, self.B)
            found.append(Work(f"{GEMM} {name}", round(weight.nbytes * share), 2 * rows * N * K))
        batch = batch_of(config, self.B)
        return [*found, Work(ATTENTION, batch.kv_bytes(), 4 * batch.tokens * batch.Hq * HEAD_DIM)]


def warm(config: Config, batches: Sequence[int]) -> None:
    """Compile, in a process that ends then, what a layer launches at these batches."""
    weights = [LayerWeights.random(config, on_device=True)]
    for B in batches:
        Decoder(config, B, weights, caches=1).calls()[0]()


def layers_of(config: Config) -> list[LayerWeights]:
    """Random weights on the device: the same for each of as many layers as exceed the L2 together."""
    first = LayerWeights.random(config, on_device=True)
    return [first, *(copy_of(first) for _ in range(copies_beyond_l2(first.nbytes) - 1))]


def copy_of(weights: Any) -> Any:
    """A layer's weights, or one of them, elsewhere in memory."""
    return with_arrays(weights, lambda array: array.copy())


@dataclass(frozen=True)
class Alone:
    """Microseconds of every operation of a layer alone, and the part that it belongs to, by name."""

    us: dict[str, float]
    part: dict[str, str]

    def of(self, part: str) -> float:
        """The sum over the operations of a part."""
        return sum(us for name, us in self.us.items() if self.part[name] == part)


def alone(decoder: Decoder, copied: Callable[[str], list[Any]]) -> Alone:
    """Each operation by itself, launched as the chain launches it.

    GEMMs over `copied` weights and attention over caches that no call finds in the L2; the others on what they find
    there, as in the chain.
    """
    us: dict[str, float] = {}
    part: dict[str, str] = {}
    for place, operation in enumerate(decoder.operations[0]):
        name = operation.name
        if operation.part == GEMM:
            keyword = "weights" if "weights" in operation.keywords else "weight"
            matrix = _matrix(decoder.weights[0], operation.keywords[keyword])
            name = f"{GEMM} {matrix}"
            calls = [operation.call(**{keyword: weight}) for weight in copied(matrix)]
        elif operation.part == ATTENTION:
            q, _ = operation.args
            name, calls = ATTENTION, [replaced(operation, (q, each)) for each in decoder.caches]
        else:
            calls = [operations[place].call() for operations in decoder.operations]
        us[name] = measure(calls, replays=GEMM_REPLAYS).us
        part[name] = operation.part
    return Alone(us, part)


def replaced(operation: DecoderCall, args: tuple[Any, ...]) -> Callable[[], Any]:
    """The same call of other arguments."""
    return operation._replace(args=args).call()


def _matrix(weights: LayerWeights, weight: Any) -> str:
    return next(name for name in weights.config.matrices if getattr(weights, name) is weight)


def copies_of(weights: LayerWeights) -> Callable[[str], list[Any]]:
    """A function from a matrix's name to as many copies as exceed the L2, made at its first call."""

    @cache
    def copied(matrix: str) -> list[Any]:
        weight = getattr(weights, matrix)
        return [weight, *(copy_of(weight) for _ in range(copies_beyond_l2(weight.nbytes) - 1))]

    return copied


def row(
    config: Config,
    B: int,
    weights: Sequence[LayerWeights],
    copied: Callable[[str], list[Any]],
    ceilings: Ceilings,
    peers: Mapping[str, float],
    more: Mapping[str, float],
    compared: bool = False,
) -> Row:
    """A layer at one batch, timed and checked; if `compared`, also with the exact twin."""
    decoder = Decoder(config, B, weights)
    measured, graph = measure_graph(decoder.calls(), replays=GEMM_REPLAYS)
    checked = (decoder.compare() if compared else "") + decoder.check(graph)
    plain = measure(decoder.calls(programmatic=False), replays=GEMM_REPLAYS).us
    apart = alone(decoder, copied)
    return row_at(config, B, measured, decoder.work(), apart, ceilings, checked, peers, {"plain_us": plain, **more})


def row_at(
    config: Config,
    B: int,
    measured: Measured,
    work: Sequence[Work],
    apart: Alone,
    ceilings: Ceilings,
    checked: str,
    peers: Mapping[str, float],
    more: Mapping[str, float],
) -> Row:
    """The row of what was measured."""
    floors = {f"floor {each.name}": each.us(ceilings) for each in work}
    parts = {f"{part}_us": apart.of(part) for part in (GEMM, ATTENTION, OTHERS)}
    floor, nbytes = sum(floors.values()), sum(each.nbytes for each in work)
    return Row(
        kernel=FACE,
        source="cu",
        measure=MEASURE,
        sizes=sizes_of(config, B),
        time_us=measured.us,
        fastest_us=measured.fastest,
        slowest_us=measured.slowest,
        rate=B / measured.us * 1e3,
        rate_unit="tokens/ms",
        bytes=nbytes,
        operations=sum(each.operations for each in work),
        floor_us=floor,
        fraction=floor / measured.us,
        limit="sum of its operations",
        sm_mhz=measured.sm_mhz,
        checked=checked,
        peers=dict(peers),
        more={**parts, "others_share": parts["others_us"] / sum(parts.values()), **floors, **apart.us, **more},
        face=FACE,
    )
