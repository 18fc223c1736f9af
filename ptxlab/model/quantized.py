"""`QuantizedModel`: a whole decoder as the kernels take it: packed W4A8 layers, the rest in 16 bits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.layout import pack
from ptxlab.model.config import Config
from ptxlab.model.floats import FloatModel
from ptxlab.model.weights import DTYPES, LayerWeights, quantiser
from ptxlab.quant import Rounding
from ptxlab.reference import Layer
from ptxlab.spec.dtypes import stored
from ptxlab.validate import is_one_of

FUSED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}  # matrices in one product


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

    @classmethod
    def rounded(
        cls,
        model: FloatModel,
        scheme: str = "lqq",
        group: int = 64,
        *,
        rounding: Rounding = "search",
        layout: str = "strips",
        dtype: str = "float16",
        progress: Callable[[str], None] = lambda label: None,
    ) -> Self:
        """The model's weights rounded to nearest, without calibration: the baseline of every recipe.

        Args:
            model: NumPy arrays.
            scheme: `lqq` or `qoq`, in groups of `group`, or `qoq_channel`.
            group: 32, 64 or 128; `qoq_channel` ignores it.
            rounding: of LQQ's group scales (`quantize_lqq`); searched scales cost seconds and save much of the error.
            layout: of the packing.
            dtype: of what lies between the kernels, `float16` or `bfloat16`.
            progress: called before each layer with its name.

        Raises ArgumentError for an unknown scheme, group, layout or dtype, for a matrix that cannot be quantised.
        """
        if not is_one_of(dtype, DTYPES):
            raise ArgumentError("dtype", f"must be one of {', '.join(DTYPES)}", dtype)
        quantise, config = quantiser(scheme, rounding), model.config

        def rounded_layer(layer: Layer) -> LayerWeights:
            fused = {name: np.concatenate([layer[part] for part in parts]) for name, parts in FUSED.items()}
            weights: dict[str, Any] = {name: pack(quantise(w, group), layout) for name, w in fused.items()}
            if config.qkv_bias:
                biases = [layer[f"{part}_bias"] for part in FUSED["qkv"]]
                weights["qkv_bias"] = np.concatenate(biases).astype(np.float32)
            for name in ("input_norm", "post_norm"):
                weights[name] = stored(layer[name].astype(np.float32), dtype)
            return LayerWeights(config=config, **weights)

        layers = []
        for i, layer in enumerate(model.layers):
            progress(f"layer {i}")
            layers.append(rounded_layer(layer))
        return cls(
            config=config,
            embedding=model.embedding.astype(np.float16),
            layers=layers,
            final_norm=stored(model.final_norm.astype(np.float32), dtype),
            head=None if model.head is None else model.head.astype(np.float16),
            recipe={"scheme": scheme, "group": group, "steps": ["round to nearest"]},
        )
