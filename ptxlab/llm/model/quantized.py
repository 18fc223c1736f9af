"""`QuantizedModel`: a whole decoder for the kernels: packed layers in W4A8 or W4A4, the rest in 16 bits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.llm.model.config import Config
from ptxlab.llm.model.decoder import BIASES, NORMS, ROUTER, Layer, expert_of, expert_part
from ptxlab.llm.model.floats import FloatModel
from ptxlab.llm.model.numerics import FakeQuantized
from ptxlab.llm.model.weights import DEFAULT_CACHE, DTYPES, LayerWeights, quantiser
from ptxlab.lowbit.layout import ReorderedWeight, pack, stack_experts, unpack
from ptxlab.lowbit.layout.packed_weight import QuantizedWeight
from ptxlab.lowbit.quant import Rounding
from ptxlab.lowbit.quant.inputs import extremes
from ptxlab.lowbit.quant.kv import BY_CHANNEL
from ptxlab.spec.dtypes import convert_to_dtype, floats
from ptxlab.validate import is_one_of

CACHE_CONSTANTS = ("k_channel", "v_channel")  # constants of a cache by channel, by attribute of a layer
FUSED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}  # one product each
OF_EXPERTS = ("gate_up", "down")  # products that each expert has of its own


def fused_parts(config: Config) -> dict[str, tuple[str, ...]]:
    """Return the matrices of each product, in the order of a layer.

    They are `FUSED`; with experts `gate_up.0`, `down.0` and so on.
    """
    if not config.experts:
        return FUSED
    parts = {name: parts for name, parts in FUSED.items() if name not in OF_EXPERTS}
    for expert in range(config.experts):
        for name in OF_EXPERTS:
            parts[expert_part(name, expert)] = tuple(expert_part(part, expert) for part in FUSED[name])
    return parts


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedModel:
    """A decoder on the kernels.

    Attributes:
        config: its shape.
        embedding: f16 [V, H].
        layers: packed weights, with queries, keys and values in one matrix, gate and up in another.
        final_norm: of the layers' dtype, [H].
        head: f16 [V, H], or None where it is the embedding.
        recipe: how its weights were made: the steps and their settings, as JSON values.
    """

    config: Config
    embedding: Any = field(repr=False)
    layers: Sequence[LayerWeights] = field(repr=False)
    final_norm: Any = field(repr=False)
    head: Any = field(default=None, repr=False)
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ArgumentError for layers that are calibrated for different caches."""
        for index, layer in enumerate(self.layers):
            if layer.cache != self.cache:
                raise ArgumentError(
                    f"layers[{index}]: cache", f"must be {self.cache}, as the first layer's", layer.cache
                )

    @property
    def cache(self) -> str:
        """The scheme of the KV cache that its layers are calibrated for; kv4 where they are for none."""
        return self.layers[0].cache

    @classmethod
    def rounded(
        cls,
        model: FloatModel,
        scheme: str = "lqq",
        group: int = 32,
        *,
        rounding: Rounding = "levels",
        layout: str = "strips",
        dtype: str = "float16",
        progress: Callable[[str], None] = lambda label: None,
    ) -> Self:
        """Round a model's weights to nearest, without calibration.

        Args:
            model: NumPy arrays.
            scheme: `lqq` or `qoq`, in groups of `group`, or `qoq_channel`.
            group: 32, 64 or 128; `qoq_channel` ignores it.
            rounding: of LQQ's groups (`quantize_lqq`). "levels" costs seconds, saves much of the error, and in groups
                of 32 nearly all of it where a file held the weights in 4 bits.
            layout: of the packing.
            dtype: of what lies between the kernels, `float16` or `bfloat16`.
            progress: called before each layer with its name.

        Raises ArgumentError for an unknown scheme, group, layout or dtype, for a matrix that cannot be quantised.
        """
        if not is_one_of(dtype, DTYPES):
            raise ArgumentError("dtype", f"must be one of {', '.join(DTYPES)}", dtype)
        quantise, layers = quantiser(scheme, rounding), []
        for i, layer in enumerate(model.layers):
            progress(f"layer {i}")
            products = fused_parts(model.config).items()
            fused = {name: np.concatenate([layer[part] for part in parts]) for name, parts in products}
            weights = {name: quantise(w, group) for name, w in fused.items()}
            layers.append(pack_layer(model.config, layer, weights, layout, dtype))
        recipe = {"scheme": scheme, "group": group, "steps": ["round to nearest"]}
        return cls(config=model.config, layers=layers, recipe=recipe, **convert_ends(model, dtype))


def pack_layer(
    config: Config,
    layer: Layer,
    weights: Mapping[str, QuantizedWeight | ReorderedWeight],
    layout: str = "strips",
    dtype: str = "float16",
    *,
    cache: str = DEFAULT_CACHE,
    unchecked: bool = False,
) -> LayerWeights:
    """Build a layer for the kernels: norms, biases and router of the float layer, quantised matrices by `fused_parts`.

    Matrices of W4A4 are packed already. The float layer's constants of a `cache` by channel are included.
    """
    parts: dict[str, Any] = {
        name: weight if isinstance(weight, ReorderedWeight) else pack(weight, layout, unchecked=unchecked)
        for name, weight in weights.items()
    }
    if config.experts:
        for name in OF_EXPERTS:
            parts[name] = stack_experts([parts.pop(expert_part(name, e)) for e in range(config.experts)])
        parts[ROUTER] = _to_16_bits(ROUTER, layer[ROUTER], dtype)
    if config.qkv_bias:
        biases = [layer[f"{part}_bias"] for part in FUSED["qkv"]]
        parts["qkv_bias"] = np.concatenate(biases).astype(np.float32)
    for name in NORMS:
        parts[name] = _to_16_bits(name, layer[name], dtype)
    if cache in BY_CHANNEL:
        parts |= {name: layer[name] for name in CACHE_CONSTANTS}
    return LayerWeights(config=config, cache=cache, **parts)


def convert_ends(model: FloatModel, dtype: str) -> dict[str, Any]:
    """Return embedding, final_norm and head of a `QuantizedModel`.

    The norm is in the layers' dtype.
    """
    return {
        "embedding": _to_16_bits("embedding", model.embedding, "float16"),
        "final_norm": _to_16_bits("final_norm", model.final_norm, dtype),
        "head": None if model.head is None else _to_16_bits("head", model.head, "float16"),
    }


def _to_16_bits(name: str, x: Any, dtype: str) -> Any:
    """Convert x to 16 bits. Raises ArgumentError for NaN, infinity and values beyond the range of float16."""
    low, high = extremes(name, x)
    largest_value, limit = max(-float(low.min()), float(high.max())), float(np.finfo(np.float16).max)
    if dtype == "float16" and largest_value > limit:
        raise ArgumentError(name, f"must lie in ±{limit:g} to be stored in float16", f"{largest_value:g}")
    return convert_to_dtype(x.astype(np.float32, copy=False), dtype)


def dequantize_layer(layer: LayerWeights) -> Layer:
    """Dequantise a packed layer to float32, by the names of `decoder.decoder_layer`.

    W4A4 adds the orders of channels, a cache's constants by channel add `k_channel` and `v_channel`.
    """
    sizes = layer.config.separate_matrices
    arrays: dict[str, Any] = {name: floats(getattr(layer, name)) for name in NORMS}
    if layer.router is not None:
        arrays[ROUTER] = floats(layer.router)
    for fused, parts in fused_parts(layer.config).items():
        ends = np.cumsum([sizes[part][0] for part in parts])[:-1].tolist()
        weight = product_weight(layer, fused)
        if isinstance(weight, ReorderedWeight):
            values, order = weight.dequantize(), weight.order
            arrays |= {f"{part}_order": order for part in parts}
            if weight.scheme == "fmpq":
                arrays |= {f"{part}_int8": np.asarray(weight.int8, like=order) for part in parts}
        else:
            values = unpack(weight).dequantize()
        arrays |= zip(parts, np.split(values, ends), strict=True)
        if fused == "qkv" and layer.qkv_bias is not None:
            arrays |= zip(BIASES, np.split(layer.qkv_bias, ends), strict=True)
    return arrays | {name: layer.parts[name] for name in CACHE_CONSTANTS if name in layer.parts}


def product_weight(layer: LayerWeights, name: str) -> Any:
    """Return the packed weight of a product by its name in `fused_parts`."""
    expert = expert_of(name)
    return getattr(layer, name) if expert is None else getattr(layer, name.partition(".")[0]).expert(expert)


def numerics_of(layer: LayerWeights) -> FakeQuantized:
    """Return the numerics of a model of such layers: the activations that its kernels read, and its cache."""
    weight = layer.qkv
    if not isinstance(weight, ReorderedWeight):
        return FakeQuantized(kv=layer.cache)
    return FakeQuantized(acts=4, kv=layer.cache, group=weight.group, kept=weight.outliers, clip=weight.clip)
