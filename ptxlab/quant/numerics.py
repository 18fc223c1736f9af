"""Fake quantisation: `Numerics` of a decoder whose activations and KV cache are quantised and dequantised.

Products are in floats. The weights are the layer's; those of a quantised layer are dequantised.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.quant.activations import token_scales
from ptxlab.quant.kv import KV_SCHEMES, quantize_kv
from ptxlab.reference import Layer, Numerics
from ptxlab.reference.decoder import Floats
from ptxlab.validate import is_one_of, require_integer, require_number


@dataclass(frozen=True)
class FakeQuantized(Numerics):
    """Activations and KV cache quantised and dequantised.

    Attributes:
        acts: bits of the activations: 8, per token; 4, in groups along the order of channels that a layer has as
            `<matrix>_order`; None leaves them floats.
        kv: one of `KV_SCHEMES`, per token and head, or None.
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
    _last: list[Any] = field(default_factory=lambda: [None, None, None], repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, known in (("acts", (8, 4, None)), ("kv", (*KV_SCHEMES, None)), ("kept_bits", (8, 16))):
            if not is_one_of(getattr(self, name), known):
                raise ArgumentError(name, f"must be one of {', '.join(map(str, known))}", getattr(self, name))
        if self.group is not None:
            require_integer("group", self.group, 1)
        require_integer("kept", self.kept)
        require_number("clip", self.clip, 0.01, 1)

    def product(self, name: str, x: Floats, layer: Layer) -> Floats:
        """See `Numerics.product`; x is quantised first."""
        return super().product(name, self.input(x, layer.get(f"{name}_order")), layer)

    def input(self, x: Floats, order: Any = None) -> Floats:
        """x [.., K] as a GEMM sees it. The last result is kept, because several matrices read the same input."""
        if self.acts is None:
            return x
        if self._last[0] is not x or self._last[1] is not order:
            rows = x.reshape(-1, x.shape[-1])
            seen = per_token(rows) if self.acts == 8 else self._in_groups(rows, order)
            self._last[:] = x, order, seen.reshape(x.shape)
        found: Floats = self._last[2]
        return found

    def cached(self, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        """See `Numerics.cached`."""
        if self.kv is None:
            return keys, values
        k, v = (quantize_kv(x, self.kv).dequantize().astype(x.dtype) for x in (keys, values))
        return k, v

    def _in_groups(self, x: Floats, order: Any) -> Floats:
        ordered = x if order is None else x[:, order]
        K = x.shape[1] - self.kept
        if K <= 0 or K % (self.group or K):
            raise ArgumentError("group", f"must divide {x.shape[1]} channels less {self.kept}", self.group)
        four = ordered[:, :K].reshape(len(x), -1, self.group or K)
        seen = [_symmetric(four, self.clip, -8, 7).reshape(len(x), K)]
        if self.kept:
            high = 2 ** (self.kept_bits - 1)
            seen.append(_symmetric(ordered[:, K:], 1.0, 1 - high, high - 1))
        together = np.concatenate(seen, axis=1)
        return together if order is None else together[:, np.argsort(order)]


def per_token(x: Floats) -> Floats:
    """x [M, K] as INT8 per token and back, by the scales of `quantize_activations`."""
    scale = token_scales(x)[:, None]
    seen: Floats = (np.rint(x / scale) * scale).astype(x.dtype)
    return seen


def _symmetric(x: Floats, clip: float, low: int, high: int) -> Floats:
    """x [.., g] as integers in low..high and back, one scale per last axis."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    scale = np.where(largest > 0, clip * largest / high, 1).astype(x.dtype)
    seen: Floats = np.rint(x / scale).clip(low, high) * scale
    return seen
