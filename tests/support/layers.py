"""A tiny decoder layer with everything that it needs, on the host; the numbers of a tiny model."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ptxlab.llm.model import Config, LayerBuffers, LayerInputs, LayerWeights, decode_layer
from ptxlab.lowbit import quant
from ptxlab.lowbit.layout import KVCache, scatter
from ptxlab.spec.dtypes import convert_to_dtype

TINY = Config(hidden=128, ffn=128, heads=2, kv_heads=1, head_dim=64, layers=1, vocabulary=100)
TINY_MODEL = Config(
    hidden=64, ffn=96, heads=2, kv_heads=1, head_dim=64, layers=2, vocabulary=260, tied_head=True, context=200
)
LENGTHS = (70, 1, 33)


@dataclass(eq=False)
class LayerProblem:
    """A layer, and what it is given."""

    weights: LayerWeights
    cache: KVCache
    x: Any
    residual: Any
    slots: Any
    rope: tuple[Any, ...]
    buffers: LayerBuffers

    @property
    def inputs(self) -> LayerInputs:
        """Inputs of the layer, with the arrays' present values."""
        return LayerInputs.of(self.x, self.residual, self.cache, self.slots, self.rope)

    def run(self, **options: Any) -> Any:
        """Run the layer, by default in the emulator."""
        operands = self.x, self.residual, self.weights, self.cache, self.slots
        return decode_layer(*operands, rope=self.rope, buffers=self.buffers, **{"backend": "emulator", **options})


def layer_problem(
    config: Config = TINY,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    scheme: str = "lqq",
    dtype: str = "float16",
    group: int = 128,
    seed: int = 0,
    interleaved: bool = False,
    layout: str = "strips",
    **buffers: Any,
) -> LayerProblem:
    """Make a decoder layer with random weights, cache and inputs.

    The lengths include the token that is about to come.
    """
    rng = np.random.default_rng(seed)
    weight_options: dict[str, Any] = {"dtype": dtype, "group": group, "interleaved": interleaved, "layout": layout}
    weights = LayerWeights.random(config, seed, scheme, **weight_options)
    cache = KVCache.empty(len(lengths), 2, config.kv_heads, config.head_dim)
    cache.lengths[...] = lengths
    cache.block_table[...] = rng.permutation(cache.pages).reshape(cache.block_table.shape)

    def tokens(count: int) -> quant.QuantizedKV:
        return quant.quantize_kv(rng.standard_normal((count, config.kv_heads, config.head_dim), dtype=np.float32))

    scatter(cache, [tokens(length) for length in lengths], [tokens(length) for length in lengths])
    x, residual = convert_to_dtype(rng.standard_normal((2, len(lengths), config.hidden), dtype=np.float32), dtype)
    positions = np.array(lengths, np.int32) - 1
    return LayerProblem(
        weights=weights,
        cache=cache,
        x=x.copy(),
        residual=residual.copy(),
        slots=np.array([cache.slots(b)[-1] for b in range(len(lengths))], np.int32),
        rope=(*config.rope_tables(max(lengths)), positions),
        buffers=LayerBuffers.empty(weights, cache, **buffers),
    )


def another_layer(problem: LayerProblem, seed: int) -> LayerProblem:
    """Make the next layer: other weights, and a copy of the pool.

    The stream and the buffers are the same.
    """
    interleaved = getattr(problem.weights.gate_up, "interleaved", False)
    weights = LayerWeights.random(problem.weights.config, seed, interleaved=interleaved)
    cache = replace(problem.cache, pool=problem.cache.pool.copy())
    return replace(problem, weights=weights, cache=cache, x=problem.buffers.output(problem.residual))
