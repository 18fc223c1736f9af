"""A decoder layer, `model.decode_layer`, in one CUDA graph: layers in turn, each with weights and cache of its own.

Beside it every operation alone, as the chain launches it, and the least that the card could take for all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from benchmarks.layer_shapes import Work, rows_of, sizes_of
from ptxlab import gpu
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row
from ptxlab.llm.layer_chain import FACE, Decoder, batch_of, copy_of
from ptxlab.llm.model import Config, LayerCall, LayerWeights
from ptxlab.lowbit.kernels.attention import attention_kv4, attention_workspace
from ptxlab.lowbit.kernels.gemm import gemm_w4a4, gemm_w4a8, gemm_w4a8_grouped, gemm_w4ax
from ptxlab.runtime.timing import GEMM_REPLAYS, Measured, copies_beyond_l2, measure, measure_graph

MEASURE = "layer"
GEMM, ATTENTION, OTHERS = "gemm", "attention", "others"
_PARTS = {**dict.fromkeys((gemm_w4a8, gemm_w4a8_grouped, gemm_w4a4, gemm_w4ax), GEMM), attention_kv4: ATTENTION}


def part_of(call: LayerCall) -> str:
    """Return the part of a layer that a call belongs to: `gemm`, `attention` or `others`."""
    return _PARTS.get(call.function, OTHERS)


def label_of(call: LayerCall) -> str:
    """Return a call's name in a record: `gemm qkv`, `attention`, `rmsnorm_quantize qkv_in`."""
    part = part_of(call)
    return {GEMM: f"{GEMM} {call.name}", ATTENTION: ATTENTION}.get(part, f"{call.function.__name__} {call.name}")


def work_of(decoder: Decoder) -> list[Work]:
    """Compute the least work of each operation.

    Weights and cache are read once from memory; activations stay in the L2.
    """
    config, work = decoder.config, []
    routing = decoder.buffers.routing
    active_experts = 0 if routing is None else int((np.diff(gpu.to_host(routing.routed.offsets)) > 0).sum())
    for matrix, (N, K) in config.matrices.items():
        weight = getattr(decoder.weights[0], matrix)
        share = active_experts / config.experts if config.experts and matrix in ("gate_up", "down") else 1
        rows = rows_of(config, matrix, decoder.B)
        work.append(Work(f"{GEMM} {matrix}", round(weight.nbytes * share), 2 * rows * N * K))
    batch = batch_of(config, decoder.B)
    return [*work, Work(ATTENTION, batch.kv_bytes(), 4 * batch.tokens * batch.Hq * batch.D)]


def warm(config: Config, batches: Sequence[int]) -> None:
    """Compile all that a layer launches at these batches, in a process that ends then."""
    weights = [LayerWeights.random(config, on_device=True)]
    for B in batches:
        Decoder(config, B, weights, caches=1).calls()[0]()


@dataclass(frozen=True)
class Alone:
    """Microseconds of every operation of a layer alone, and the part that it belongs to, by name."""

    us: dict[str, float]
    part: dict[str, str]

    def of(self, part: str) -> float:
        """Return the summed microseconds of the operations of a part."""
        return sum(us for label, us in self.us.items() if self.part[label] == part)


def alone(decoder: Decoder, copy_matrix: Callable[[str], list[Any]]) -> Alone:
    """Time each operation by itself, launched as the chain launches it.

    GEMMs run over copies of the weights and attention over caches that no call finds in the L2. The others find
    their inputs in the L2, as in the chain.
    """
    us: dict[str, float] = {}
    part_by_label: dict[str, str] = {}
    for layer_calls in zip(*decoder.operations, strict=True):
        call, label = layer_calls[0], label_of(layer_calls[0])
        part_by_label[label] = part_of(call)
        calls: list[Callable[[], Any]] = [*layer_calls]
        if part_by_label[label] == GEMM:
            keyword = "weights" if "weights" in call.keywords else "weight"
            calls = [partial(call, **{keyword: weight}) for weight in copy_matrix(call.name)]
        elif part_by_label[label] == ATTENTION:
            calls = calls_over_caches(decoder, call)
        us[label] = measure(calls, replays=GEMM_REPLAYS).us
    return Alone(us, part_by_label)


def calls_over_caches(decoder: Decoder, attention: LayerCall, **changes: Any) -> list[Callable[[], Any]]:
    """List calls of a layer's attention, one per cache, with changed keywords if given."""
    calls = (replace(attention, args=(attention.args[0], cache)) for cache in decoder.caches)
    return [partial(call, **changes) for call in calls]


def invariant_us(decoder: Decoder) -> float:
    """Time attention that splits a sequence by its own length, in microseconds, as `alone` times the default."""
    (attention,) = (call for call in decoder.operations[0] if part_of(call) == ATTENTION)
    cache = decoder.caches[0]
    space = attention_workspace(cache, batch_invariant=True) if gpu.is_device_array(cache.pool) else None
    calls = calls_over_caches(decoder, attention, batch_invariant=True, workspace=space)
    return measure(calls, replays=GEMM_REPLAYS).us


def copies_of(weights: LayerWeights) -> Callable[[str], list[Any]]:
    """Return a function that copies a matrix, by name, until the copies exceed the L2; it copies once per matrix."""

    @cache
    def copy_matrix(matrix: str) -> list[Any]:
        weight = getattr(weights, matrix)
        return [weight, *(copy_of(weight) for _ in range(copies_beyond_l2(weight.nbytes) - 1))]

    return copy_matrix


def row(
    config: Config,
    B: int,
    weights: Sequence[LayerWeights],
    copy_matrix: Callable[[str], list[Any]],
    ceilings: Ceilings,
    peers: Mapping[str, float],
    figures: Mapping[str, float],
    compare_twin: bool = False,
) -> Row:
    """Time and check a layer at one batch; if `compare_twin`, also compare it with its twin, `model.reference`."""
    decoder = Decoder(config, B, weights)
    measured, graph = measure_graph(decoder.calls(), replays=GEMM_REPLAYS)
    check_note = (decoder.compare() if compare_twin else "") + decoder.check(graph)
    serial_us = measure(decoder.calls(programmatic=False), replays=GEMM_REPLAYS).us
    alone_times = alone(decoder, copy_matrix)
    figures = {"plain_us": serial_us, "invariant_attention_us": invariant_us(decoder), **figures}
    return row_at(config, B, measured, work_of(decoder), alone_times, ceilings, check_note, peers, figures)


def row_at(
    config: Config,
    B: int,
    measured: Measured,
    work: Sequence[Work],
    alone_times: Alone,
    ceilings: Ceilings,
    checked: str,
    peers: Mapping[str, float],
    figures: Mapping[str, float],
) -> Row:
    """Build the row of a measured layer, with parts, floors and peers."""
    floors = {f"floor {operation.name}": operation.us(ceilings) for operation in work}
    parts = {f"{part}_us": alone_times.of(part) for part in (GEMM, ATTENTION, OTHERS)}
    share = parts["others_us"] / sum(parts.values())
    base_row = row_of(config, B, measured, work, ceilings, checked)
    return replace(
        base_row, peers=dict(peers), more={**parts, "others_share": share, **floors, **alone_times.us, **figures}
    )


def row_of(config: Config, B: int, measured: Measured, work: Sequence[Work], ceilings: Ceilings, checked: str) -> Row:
    """Build the row of a layer's time and its floor."""
    floor = sum(operation.us(ceilings) for operation in work)
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
        bytes=sum(operation.nbytes for operation in work),
        operations=sum(operation.operations for operation in work),
        floor_us=floor,
        fraction=floor / measured.us,
        limit="sum of its operations",
        sm_mhz=measured.sm_mhz,
        checked=checked,
        face=FACE,
    )
