"""Layers whose products from attention to attention are one persistent launch, beside the chain of launches.

A layer is three launches then: rope and append, attention, `gemm_w4a8_chain_sm90`, which ends with the queries, keys
and values of the layer behind. Both ways give the same bits, and are timed in turn.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.launching import prepared
from ptxlab.bench.layer import decoder
from ptxlab.bench.layer.decoder import Decoder
from ptxlab.bench.record import Row
from ptxlab.bench.shapes import GROUP
from ptxlab.bench.timing import GEMM_REPLAYS, Measured, measure_graph
from ptxlab.errors import ArgumentError, BenchmarkError
from ptxlab.kernels.gemm.chain import CHAIN, PRODUCTS
from ptxlab.model import Config

MEASURE = "chain"
MODELS, BATCHES = ("LLaMA-2-7B", "LLaMA-2-70B", "LLaMA-3-8B"), (1, 2, 4, 8)
LAUNCHES = "launches"  # how the peer of a row is named
_ROUNDS = 2  # each way in turn; the faster time counts


class Chained:
    """A decoder's layers, each of three launches; `begin` makes what the first one finds."""

    def __init__(self, made: Decoder) -> None:
        self.decoder, buffers, config = made, made.buffers, made.config
        between = [{call.name: call for call in operations} for operations in made.operations]
        self.first = [between[0][name] for name in ("qkv_in", "qkv")]
        sizes = sizes_of(config, made.B)
        arrived = gpu.to_device(np.zeros(len(PRODUCTS), np.uint32))
        given: list[dict[str, Any]] = []
        for number, weights in enumerate(made.weights):
            behind = made.weights[(number + 1) % len(made.weights)]
            packed = {name: getattr(behind if name == "qkv" else weights, name).buffers for name in PRODUCTS}
            given.append(
                {
                    "attended": buffers.attention.reshape(made.B, -1),
                    "stream": made.residual,
                    "gamma": weights.post_norm,
                    "gamma_next": behind.input_norm,
                    **{name: each["strips"] for name, each in packed.items()},
                    **{f"{name}_scale": each["channel_scale"] for name, each in packed.items()},
                    "between": buffers.gate_up,
                    "y": buffers.qkv,
                    "arrived": arrived,
                }
            )
        _, launches = prepared(CHAIN, sizes, CHAIN.config_for(sizes), given, programmatic=True)
        self.layers: list[list[Any]] = [
            [names["q"], names["attention"], launch] for names, launch in zip(between, launches, strict=True)
        ]

    def begin(self) -> None:
        """The state that the first layer finds, on the current stream."""
        self.decoder.restart()
        for call in self.first:
            call(programmatic=False)

    def calls(self) -> list[Callable[[], Any]]:
        """A call per layer."""
        return [partial(_make, layer) for layer in self.layers]

    def check(self, graph: gpu.Graph) -> str:
        """Hold the graph that was timed, replayed once, against the layers' launches made plainly one by one.

        Returns what was checked. Raises BenchmarkError for a bit that differs, or what is not finite.
        """
        made = self.decoder
        state = [made.buffers.attention, made.residual]
        self.begin()
        gpu.to_host(made.buffers.qkv)  # waits for it
        graph.replay()
        graph.synchronize()
        timed = [gpu.to_host(array) for array in state]
        made.restart()
        plain = made.calls(programmatic=False)
        for number in range(graph.calls):
            plain[number % len(plain)]()
        where = f"{MEASURE}, {made.config.name}, batch {made.B}"
        for got, array in zip(timed, state, strict=True):
            if not (got.view(np.uint16) == gpu.to_host(array).view(np.uint16)).all():
                raise BenchmarkError(f"{where}: other bits than the launches one by one")
            if not np.isfinite(got).all():
                raise BenchmarkError(f"{where}: results that are not finite")
        return f"replayed over {graph.calls} layers: attention and stream equal to the launches one by one, bit for bit"


def _make(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def sizes_of(config: Config, B: int) -> dict[str, Any]:
    """Of the kernel, for B tokens."""
    widths = {"H": config.hidden, "A": config.heads * config.head_dim, "F": config.ffn, "Q": config.qkv_width}
    return {"M": B, **widths, "g": GROUP, "eps": config.eps}


def fits(config: Config, B: int) -> bool:
    """Whether the kernel takes a layer of this config at a batch."""
    try:
        CHAIN.check_sizes(sizes_of(config, B))
    except ArgumentError:
        return False
    return not config.experts


def warm(config: Config, batches: Sequence[int]) -> None:
    """Compile, in a process that ends then, what is measured."""
    weights = decoder.layers_of(config)[:1]
    for B in (B for B in batches if fits(config, B)):
        chained = Chained(Decoder(config, B, weights, caches=1))
        chained.begin()
        chained.calls()[0]()


def rows(config: Config, ceilings: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    """A row for every batch that the kernel takes."""
    weights = decoder.layers_of(config)
    for B in (B for B in BATCHES if fits(config, B)):
        progress(f"{config.name}, batch {B}: chain")
        made = Decoder(config, B, weights)
        chained, best, checked = Chained(made), dict[str, Measured](), ""
        for _ in range(_ROUNDS):
            for name, calls in ((LAUNCHES, made.calls()), (MEASURE, chained.calls())):
                measured, graph = measure_graph(calls, replays=GEMM_REPLAYS)
                best[name] = min(best.get(name, measured), measured, key=lambda m: m.us)
            checked = chained.check(graph)
        row = decoder.row_of(config, B, best[MEASURE], made.work(), ceilings, checked)
        yield replace(row, measure=MEASURE, peers={LAUNCHES: best[LAUNCHES].us})
