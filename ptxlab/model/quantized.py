"""`QuantizedModel`: a whole decoder as the kernels take it: packed W4A8 layers, the rest in 16 bits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ptxlab.model.config import Config
from ptxlab.model.weights import LayerWeights


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedModel:
    """A dense decoder on the kernels.

    Attributes:
        config: its shape.
        embedding: f16 [V, H].
        layers: packed weights, with queries, keys and values in one matrix, gate and up in another.
        final_norm: of the layers' dtype, [H].
        head: f16 [V, H], or None where it is the embedding.
        recipe: how its weights were made: steps with their settings, as JSON has them.
    """

    config: Config
    embedding: Any = field(repr=False)
    layers: Sequence[LayerWeights] = field(repr=False)
    final_norm: Any = field(repr=False)
    head: Any = field(default=None, repr=False)
    recipe: Mapping[str, Any] = field(default_factory=dict)
