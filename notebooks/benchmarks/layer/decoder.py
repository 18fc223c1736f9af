"""A decoder layer, `model.decode_layer`, in one CUDA graph: layers in turn, each with weights and cache of its own.

Beside it every operation alone, as the chain launches it, and the least that the card could take for all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from benchmarks.layer.shapes import LENGTH, Work, batch_of, rows_of, sizes_of
from ptxlab import gpu
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row
from ptxlab.errors import BenchmarkError
from ptxlab.llm.model import Config, LayerBuffers, LayerCall, LayerInputs, LayerWeights, decode_layer, layer_calls
from ptxlab.llm.model import reference as twins
from ptxlab.lowbit.bench.attention.problem import random_problem
from ptxlab.lowbit.bench.shapes import HEAD_DIM, PAGE
from ptxlab.lowbit.kernels.attention import attention_kv4, attention_workspace
from ptxlab.lowbit.kernels.gemm import gemm_w4a8, gemm_w4a8_grouped
from ptxlab.lowbit.quant.tiled import with_arrays
from ptxlab.runtime.timing import GEMM_REPLAYS, Measured, copies_beyond_l2, measure, measure_graph

MEASURE, FACE = "layer", "decode_layer"
GEMM, ATTENTION, OTHERS = "gemm", "attention", "others"
_COMPARED = 400e6  # weights in use of the largest layer that is compared with its exact twin, which takes seconds
_WATCHED = (1, 5, 33)  # batches of `check_chains`
_PARTS = {gemm_w4a8: GEMM, gemm_w4a8_grouped: GEMM, attention_kv4: ATTENTION}


def part_of(call: LayerCall) -> str:
    """`gemm`, `attention` or `others`."""
    return _PARTS.get(call.function, OTHERS)


def label_of(call: LayerCall) -> str:
    """What a call is named in a record: `gemm qkv`, `attention`, `rmsnorm_quantize qkv_in`."""
    part = part_of(call)
    return {GEMM: f"{GEMM} {call.name}", ATTENTION: ATTENTION}.get(part, f"{call.function.__name__} {call.name}")


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

    def ending(self, weights: Sequence[LayerWeights], residual_epilogue: bool) -> "Decoder":
        """The same with other epilogues: as many weights, interleaved or not, and buffers of its own."""
        made = copy(self)
        made.weights = weights
        made.buffers = LayerBuffers.empty(weights[0], self.caches[0], residual_epilogue=residual_epilogue)
        made.restart()
        return made

    def restart(self) -> None:
        """Restore the state. In the caches only the last tokens change, and every run writes them anew."""
        gpu.copy_bytes(self.buffers.hidden, self._start[0])
        gpu.copy_bytes(self.residual, self._start[1])

    def layers(self, programmatic: bool = True) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """What `decode_layer` is given for each layer, which goes on with the result of the one before."""
        buffers = replace(self.buffers, programmatic=programmatic)
        how = {"rope": self.rope, "buffers": buffers, "programmatic": programmatic}
        return [
            ((self._x, self.residual, weights, cache, slots), how)
            for weights, cache, slots in zip(self.weights, self.caches, self.slots, strict=False)
        ]

    @property
    def _x(self) -> Any:
        """What a layer is given, which is what the one before it returned."""
        return self.buffers.result(self.residual)

    def calls(self, programmatic: bool = True) -> list[Callable[[], Any]]:
        """A call per layer."""
        return [partial(decode_layer, *given, **how) for given, how in self.layers(programmatic)]

    @cached_property
    def operations(self) -> list[list[LayerCall]]:
        """The calls that each layer makes, in order."""
        return [layer_calls(*given, **how) for given, how in self.layers()]

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
        experts = min(self.config.experts, self.B * self.config.chosen_experts) or 1
        of_experts = ("gate_up", "down")
        if sum(N * K * (experts if n in of_experts else 1) for n, (N, K) in self.config.matrices.items()) > _COMPARED:
            return ""
        self.restart()
        given = LayerInputs.of(self._x, self.residual, cache, slots, self.rope)
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
        return [*found, Work(ATTENTION, batch.kv_bytes(), 4 * batch.tokens * batch.Hq * batch.D)]


def check_chains() -> None:
    """Two small layers after each other against their twins, for tools that watch launches: dense, dense with the
    epilogues of its GEMMs, and of experts.
    """
    dense = Config(hidden=512, ffn=768, heads=4, kv_heads=2, head_dim=HEAD_DIM, layers=1, vocabulary=1, name="dense")
    for config, ends in (
        (dense, False),
        (dense, True),
        (replace(dense, experts=4, chosen_experts=2, name="experts"), False),
    ):
        first = LayerWeights.random(config, on_device=True, interleaved=ends)
        for B in _WATCHED:
            weights = [first, copy_of(first)]
            decoder = Decoder(config, B, weights).ending(weights, residual_epilogue=ends)
            print(f"{config.name}{' with epilogues' if ends else ''}, batch {B}: {decoder.compare()}")
            decoder.calls()[1]()
            gpu.to_host(decoder.residual)  # waits for it


def warm(config: Config, batches: Sequence[int]) -> None:
    """Compile, in a process that ends then, what a layer launches at these batches."""
    weights = [LayerWeights.random(config, on_device=True)]
    for B in batches:
        Decoder(config, B, weights, caches=1).calls()[0]()


def layers_of(config: Config, *, interleaved: bool = False) -> list[LayerWeights]:
    """Random weights on the device: the same for each of as many layers as exceed the L2 together."""
    first = LayerWeights.random(config, on_device=True, interleaved=interleaved)
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
    for of_layers in zip(*decoder.operations, strict=True):
        call, name = of_layers[0], label_of(of_layers[0])
        part[name] = part_of(call)
        calls: list[Callable[[], Any]] = [*of_layers]
        if part[name] == GEMM:
            keyword = "weights" if "weights" in call.keywords else "weight"
            calls = [partial(call, **{keyword: weight}) for weight in copied(call.name)]
        elif part[name] == ATTENTION:
            calls = over_caches(decoder, call)
        us[name] = measure(calls, replays=GEMM_REPLAYS).us
    return Alone(us, part)


def over_caches(decoder: Decoder, attention: LayerCall, **changed: Any) -> list[Callable[[], Any]]:
    """Attention of a layer over every cache, perhaps with other keywords."""
    calls = (replace(attention, args=(attention.args[0], cache)) for cache in decoder.caches)
    return [partial(call, **changed) for call in calls]


def invariant_us(decoder: Decoder) -> float:
    """Microseconds of attention that splits a sequence by its own length, timed as `alone` times the other."""
    (attention,) = (call for call in decoder.operations[0] if part_of(call) == ATTENTION)
    cache = decoder.caches[0]
    space = attention_workspace(cache, batch_invariant=True) if gpu.is_device_array(cache.pool) else None
    calls = over_caches(decoder, attention, batch_invariant=True, workspace=space)
    return measure(calls, replays=GEMM_REPLAYS).us


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
    more = {"plain_us": plain, "invariant_attention_us": invariant_us(decoder), **more}
    return row_at(config, B, measured, decoder.work(), apart, ceilings, checked, peers, more)


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
    share = parts["others_us"] / sum(parts.values())
    made = row_of(config, B, measured, work, ceilings, checked)
    return replace(made, peers=dict(peers), more={**parts, "others_share": share, **floors, **apart.us, **more})


def row_of(config: Config, B: int, measured: Measured, work: Sequence[Work], ceilings: Ceilings, checked: str) -> Row:
    """A layer's time beside its floor."""
    floor = sum(each.us(ceilings) for each in work)
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
        bytes=sum(each.nbytes for each in work),
        operations=sum(each.operations for each in work),
        floor_us=floor,
        fraction=floor / measured.us,
        limit="sum of its operations",
        sm_mhz=measured.sm_mhz,
        checked=checked,
        face=FACE,
    )
