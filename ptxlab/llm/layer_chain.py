"""`Decoder`: layers with weights and caches of their own, launched one after another, and held against their twins."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import BenchmarkError
from ptxlab.llm.model import Config, LayerBuffers, LayerCall, LayerInputs, LayerWeights, decode_layer, layer_calls
from ptxlab.llm.model import reference as twins
from ptxlab.lowbit.bench.attention.problem import random_problem
from ptxlab.lowbit.bench.shapes import HEAD_DIM, PAGE, Batch, even
from ptxlab.lowbit.quant.tiled import with_arrays
from ptxlab.runtime.timing import copies_beyond_l2

FACE = "decode_layer"
LENGTH = 1024  # tokens of every sequence, the new one included
_COMPARED = 400e6  # weights in use of the largest layer that is compared with its exact twin, which takes seconds
_WATCHED = (1, 5, 33)  # batches of `check_chains`


def batch_of(config: Config, B: int) -> Batch:
    """Build an attention batch of B sequences, all of `LENGTH` tokens."""
    return even((config.heads, config.kv_heads), B, LENGTH, config.head_dim)


class Decoder:
    """Layers of a config at a batch: weights and caches on the device, and the state that all layers share."""

    def __init__(self, config: Config, B: int, weights: Sequence[LayerWeights], caches: int = 0) -> None:
        self.config, self.B, self.weights = config, B, weights
        batch = batch_of(config, B)
        caches = caches or max(len(weights), copies_beyond_l2(batch.kv_bytes()))
        self.caches = random_problem(batch, copies=caches).caches
        last_position = LENGTH - 1
        pages = (gpu.to_host(cache.block_table)[:, last_position // PAGE] for cache in self.caches[: len(weights)])
        self.slots = [gpu.to_device((page * PAGE + last_position % PAGE).astype(np.int32)) for page in pages]
        self.rope = *map(gpu.to_device, config.rope_tables(LENGTH)), gpu.to_device(np.full(B, last_position, np.int32))
        self.buffers = LayerBuffers.empty(weights[0], self.caches[0])
        rng = np.random.default_rng(B)
        start = rng.standard_normal((2, B, config.hidden), dtype=np.float32).astype(np.float16)
        self._start = [gpu.to_device(array) for array in start]
        self.residual = self._start[1].copy()
        self.restart()

    def with_epilogues(self, weights: Sequence[LayerWeights], residual_epilogue: bool) -> "Decoder":
        """Return a copy with other epilogues and with buffers of its own.

        There are as many weights as before, interleaved or not.
        """
        decoder = copy(self)
        decoder.weights = weights
        decoder.buffers = LayerBuffers.empty(weights[0], self.caches[0], residual_epilogue=residual_epilogue)
        decoder.restart()
        return decoder

    def restart(self) -> None:
        """Restore the state. In the caches only the last tokens change, and every run writes them anew."""
        gpu.copy_bytes(self.buffers.hidden, self._start[0])
        gpu.copy_bytes(self.residual, self._start[1])

    def layers(self, programmatic: bool = True) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the arguments of `decode_layer` for each layer.

        A layer goes on with the result of the layer before it.
        """
        buffers = replace(self.buffers, programmatic=programmatic)
        keywords = {"rope": self.rope, "buffers": buffers, "programmatic": programmatic}
        return [
            ((self._x, self.residual, weights, cache, slots), keywords)
            for weights, cache, slots in zip(self.weights, self.caches, self.slots, strict=False)
        ]

    @property
    def _x(self) -> Any:
        """Input of a layer, which is the output of the layer before it."""
        return self.buffers.output(self.residual)

    def calls(self, programmatic: bool = True) -> list[Callable[[], Any]]:
        """Return one call per layer."""
        return [partial(decode_layer, *args, **keywords) for args, keywords in self.layers(programmatic)]

    @cached_property
    def operations(self) -> list[list[LayerCall]]:
        """The calls that each layer makes, in order."""
        return [layer_calls(*args, **keywords) for args, keywords in self.layers()]

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
        timed_state = state()
        self.restart()
        serial_calls = self.calls(programmatic=False)
        for number in range(graph.calls):
            serial_calls[number % len(serial_calls)]()
        one_by_one = state()
        if not all(
            (a.view(np.uint16) == b.view(np.uint16)).all() for a, b in zip(timed_state, one_by_one, strict=True)
        ):
            raise BenchmarkError(f"{FACE}, {self.config.name}, batch {self.B}: other bits than its calls one by one")
        if not all(np.isfinite(array).all() for array in timed_state):
            raise BenchmarkError(f"{FACE}, {self.config.name}, batch {self.B}: results that are not finite")
        summary = f"the graph that was timed, replayed over {graph.calls} layers: attention, result and residual equal"
        return f"{summary} to the public calls made plainly one after another, bit for bit"

    def compare(self) -> str:
        """Compare every launch of the first layer with the exact twin (`model.reference`); "" for a layer too large."""
        weights, cache, slots = self.weights[0], self.caches[0], self.slots[0]
        experts = min(self.config.experts, self.B * self.config.chosen_experts) or 1
        expert_matrices = ("gate_up", "down")
        sizes = (N * K * (experts if name in expert_matrices else 1) for name, (N, K) in self.config.matrices.items())
        if sum(sizes) > _COMPARED:
            return ""
        self.restart()
        inputs = LayerInputs.of(self._x, self.residual, cache, slots, self.rope)
        self.calls()[0]()
        return f"{twins.compare(inputs, weights, self.buffers, self.residual, cache)}; "


def check_chains() -> None:
    """Run two small layers in a row against their twins, for tools that watch launches.

    Models: dense, dense with the epilogues of its GEMMs, and of experts.
    """
    dense = Config(hidden=512, ffn=768, heads=4, kv_heads=2, head_dim=HEAD_DIM, layers=1, vocabulary=1, name="dense")
    for config, ends in (
        (dense, False),
        (dense, True),
        (replace(dense, experts=4, chosen_experts=2, name="experts"), False),
    ):
        first_layer = LayerWeights.random(config, on_device=True, interleaved=ends)
        for B in _WATCHED:
            weights = [first_layer, copy_of(first_layer)]
            decoder = Decoder(config, B, weights).with_epilogues(weights, residual_epilogue=ends)
            print(f"{config.name}{' with epilogues' if ends else ''}, batch {B}: {decoder.compare()}")
            decoder.calls()[1]()
            gpu.to_host(decoder.residual)  # waits for it


def layers_of(config: Config, *, interleaved: bool = False) -> list[LayerWeights]:
    """Make random weights on the device, the same ones for each layer.

    There are as many layers as exceed the L2 cache together.
    """
    first_layer = LayerWeights.random(config, on_device=True, interleaved=interleaved)
    return [first_layer, *(copy_of(first_layer) for _ in range(copies_beyond_l2(first_layer.nbytes) - 1))]


def copy_of(weights: Any) -> Any:
    """Copy a layer's weights, or one of them, to other memory."""
    return with_arrays(weights, lambda array: array.copy())
