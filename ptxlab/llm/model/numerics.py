"""Fake quantisation: `Numerics` of a decoder whose activations and KV cache are quantised and dequantised.

Products are in floats. The weights are the layer's; those of a quantised layer are dequantised.
"""

import threading
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.llm.model.cache_formats import CACHE_FORMATS
from ptxlab.llm.model.decoder import Floats, Layer, Numerics
from ptxlab.lowbit.quant.activations import token_scales
from ptxlab.lowbit.quant.atom import ATOM_PAPER
from ptxlab.lowbit.quant.groups import dequantize_groups, integer_groups
from ptxlab.lowbit.quant.kv import BY_CHANNEL, quantize_kv
from ptxlab.validate import is_one_of, require_integer, require_number


@dataclass(frozen=True)
class FakeQuantized(Numerics):
    """Activations and KV cache quantised and dequantised.

    Attributes:
        acts: bits of the activations: 8, per token; 4, in groups along the order of channels that a layer has as
            `<matrix>_order`, as Atom's paper has it (`ATOM_PAPER`), or COMET's where a layer has `<matrix>_int8`, the
            number of INT8 groups at the end; None leaves them floats.
        kv: one of `CACHE_FORMATS`, or None.
        group: channels per scale of 4-bit activations, or None for one scale per token.
        kept: number of channels, the last in that order, which have one scale and more bits.
        kept_bits: bits of these channels.
        clip: the largest 4-bit activation, relative to the largest magnitude of its group.
    """

    acts: int | None = 8
    kv: str | None = "kv4"
    group: int | None = None
    kept: int = 0
    kept_bits: int = 8
    clip: float = 1.0
    _last: threading.local = field(default_factory=threading.local, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy begins without what threads have kept
        return type(self), tuple(getattr(self, attribute.name) for attribute in fields(self) if attribute.init)

    def __post_init__(self) -> None:
        for name, choices in (("acts", (8, 4, None)), ("kv", (*CACHE_FORMATS, None)), ("kept_bits", (8, 16))):
            if not is_one_of(getattr(self, name), choices):
                raise ArgumentError(name, f"must be one of {', '.join(map(str, choices))}", getattr(self, name))
        if self.group is not None:
            require_integer("group", self.group, 1)
        require_integer("kept", self.kept)
        require_number("clip", self.clip, 0.01, 1)

    def product(self, name: str, x: Floats, layer: Layer) -> Floats:
        """See `Numerics.product`; x is quantised first."""
        rounded_input = self.input(x, layer.get(f"{name}_order"), layer.get(f"{name}_int8"))
        return super().product(name, rounded_input, layer)

    def input(self, x: Floats, order: Any = None, int8: Any = None) -> Floats:
        """Round x [.., K] as the kernel that quantises a GEMM's input does.

        A thread keeps its last array, because several matrices read the same input.
        """
        if self.acts is None:
            return x
        key = x, order, int8
        last_key: tuple[Any, ...] = getattr(self._last, "key", (None, None, None))
        if any(new_argument is not old_argument for new_argument, old_argument in zip(key, last_key, strict=True)):
            rows = x.reshape(-1, x.shape[-1])
            rounded_rows = per_token(rows) if self.acts == 8 else self._in_groups(rows, order, int8)
            self._last.key, self._last.rounded = key, rounded_rows.reshape(x.shape)
        rounded: Floats = self._last.rounded
        return rounded

    def round_to_cache(self, keys: Floats, values: Floats, layer: Layer) -> tuple[Floats, Floats]:
        """See `Numerics.round_to_cache`.

        By channel it takes the layer's constants; without them it calibrates on keys and values themselves.
        """
        if self.kv is None:
            return keys, values
        if self.kv in BY_CHANNEL and "k_channel" in layer:
            tensors = (keys, layer["k_channel"]), (values, layer["v_channel"])
            k, v = (quantize_kv(x, self.kv, tuple(channel)).dequantize().astype(x.dtype) for x, channel in tensors)
            return k, v
        cache_format = CACHE_FORMATS[self.kv]
        return cache_format.keys.restore(keys), cache_format.values.restore(values)

    def _in_groups(self, x: Floats, order: Any, int8: Any) -> Floats:
        ordered_input = x if order is None else x[:, order]
        if int8 is not None:
            rounded_channels = self._in_blocks(ordered_input, int(int8))
        else:
            K = x.shape[1] - self.kept
            if K <= 0 or K % (self.group or K):
                raise ArgumentError("group", f"must divide {x.shape[1]} channels less {self.kept}", self.group)
            rounded_parts = [_in_groups(ordered_input[:, :K], self.group or K, 4, ATOM_PAPER.steps(4), self.clip)]
            if self.kept:
                outliers = ordered_input[:, K:]
                keeps_16_bits = self.kept_bits == 16
                steps = ATOM_PAPER.steps(8)
                rounded_outliers = _in_16_bits(outliers) if keeps_16_bits else _in_groups(outliers, self.kept, 8, steps)
                rounded_parts.append(rounded_outliers)
            rounded_channels = np.concatenate(rounded_parts, axis=1)
        return rounded_channels if order is None else rounded_channels[:, np.argsort(order)]

    def _in_blocks(self, x: Floats, int8: int) -> Floats:
        """Round x [M, K] in COMET's blocks, the last `int8` of them to INT8 and the others to INT4."""
        if self.group is None or x.shape[1] % self.group or int8 * self.group > x.shape[1]:
            raise ArgumentError("group", f"must divide {x.shape[1]} channels, {int8} groups in INT8", self.group)
        first_int8_channel = x.shape[1] - int8 * self.group
        parts = (x[:, :first_int8_channel], 4, 7), (x[:, first_int8_channel:], 8, 127)
        rounded_parts = [_in_groups(part, self.group, bits, steps) for part, bits, steps in parts if part.shape[1]]
        return np.concatenate(rounded_parts, axis=1)


def per_token(x: Floats) -> Floats:
    """Round x [M, K] to INT8 per token and back, by the scales of `quantize_activations`."""
    scale = token_scales(x)[:, None]
    rounded_values: Floats = (np.rint(x / scale) * scale).astype(x.dtype)
    return rounded_values


def _in_groups(x: Floats, group: int, bits: int, steps: float, clip: float = 1.0) -> Floats:
    """Round x [M, K] to integers of `bits` bits and back, with a scale per group in FP16."""
    q, scale = integer_groups("activations", x.reshape(len(x), -1, group), bits, steps, clip=clip)
    rounded_values: Floats = dequantize_groups(q.reshape(x.shape), scale).astype(x.dtype)
    return rounded_values


def _in_16_bits(x: Floats) -> Floats:
    """Round x [M, K] to integers of 16 bits and back, with a scale per row."""
    largest_integer = 2**15 - 1
    largest_values = np.abs(x).max(axis=1, keepdims=True)
    scale = np.where(largest_values > 0, largest_values / largest_integer, 1).astype(x.dtype)
    rounded_values: Floats = np.rint(x / scale).clip(-largest_integer, largest_integer) * scale
    return rounded_values
