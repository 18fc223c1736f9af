"""Formats of a KV cache: what attention reads back of keys and values, in floats, and how many bits they take."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ptxlab.lowbit.quant.kv import KV_SCHEMES, kv_scheme, quantize_kv
from ptxlab.lowbit.reference.attention import rotate_heads

Floats = npt.NDArray[np.floating]
PAGE = 64  # tokens whose mean centres keys, and that share constants by channel
_CONSTANTS = 32  # bits of a scale and a zero in FP16
_E4M3_LARGEST = 448.0


@dataclass(frozen=True)
class StoredTensor:
    """Storage format of keys or of values.

    Attributes:
        scheme: one of `KV_SCHEMES`; or "e4m3", FP8 with scale 1 for the whole tensor, as vLLM stores it by default.
        rotated: whether `reference.rotate_heads` rotates every head before the quantiser, and back behind. Kernels
            rotate queries instead of rotating keys back.
        tokens: consecutive tokens of one channel that share scale and zero (KIVI); None: channels of one token and
            head share them. The last tokens stay floats until they fill a group.
        centred: whether the mean of the sequence's first `PAGE` tokens is subtracted before all else, and added back
            behind. Softmax does not see what all keys of a head have in common, so no kernel has to add it to keys.
    """

    scheme: str
    rotated: bool = False
    tokens: int | None = None
    centred: bool = False

    def restore(self, x: Floats) -> Floats:
        """Return what a reader gets of keys or values float [B, T, Hkv, D], in the same dtype and library.

        Raises ArgumentError as `quantize_kv` does, ValueError as `rotate_heads` does.
        """
        if self.centred:
            center = x[:, :PAGE].mean(axis=1, keepdims=True)
            restored: Floats = self._restore_rotated(x - center) + center
            return restored
        return self._restore_rotated(x)

    def bits(self, head_dim: int) -> float:
        """Return the bits of an element, its share of the constants included."""
        if self.scheme == "e4m3":
            return 8.0
        scheme = kv_scheme(self.scheme)
        return scheme.bits + (0 if scheme.by_channel else _CONSTANTS / (self.tokens or head_dim))

    def _restore_rotated(self, x: Floats) -> Floats:
        if not self.rotated:
            return self._round_trip(x)
        restored: Floats = rotate_heads(self._round_trip(rotate_heads(x))).astype(x.dtype)
        return restored

    def _round_trip(self, x: Floats) -> Floats:
        if self.scheme == "e4m3":
            return e4m3(x)
        if self.tokens is None:
            return _round_trip_groups(x, self.scheme)
        B, T, heads, D = x.shape
        groups = T // self.tokens
        full_groups = x[:, : groups * self.tokens]
        by_channel = full_groups.reshape(B, groups, self.tokens, heads, D).transpose(0, 1, 3, 4, 2)
        restored = _round_trip_groups(by_channel, self.scheme).transpose(0, 1, 4, 2, 3).reshape(full_groups.shape)
        return np.concatenate([restored, x[:, groups * self.tokens :]], axis=1)


@dataclass(frozen=True)
class CacheFormat:
    """A format of the keys and one of the values."""

    keys: StoredTensor
    values: StoredTensor

    def token_bytes(self, head_dim: int, kv_heads: int, layers: int) -> float:
        """Return the bytes of a token in the caches of all layers, scales and zeros included."""
        return layers * kv_heads * head_dim * (self.keys.bits(head_dim) + self.values.bits(head_dim)) / 8


def e4m3(x: Floats) -> Floats:
    """Return x rounded to FP8 e4m3, ties to even, in x's dtype; beyond 448 it is 448 (.satfinite)."""
    _, exponent = np.frexp(x)  # |x| = m * 2^exponent, m in [0.5, 1): four bits of m are kept
    step = np.ldexp(np.ones_like(x), np.maximum(exponent, -5) - 4)
    rounded_values: Floats = (np.rint(x / step) * step).clip(-_E4M3_LARGEST, _E4M3_LARGEST)
    return rounded_values


def _round_trip_groups(x: Floats, scheme: str) -> Floats:
    restored: Floats = quantize_kv(x, scheme).dequantize().astype(x.dtype)
    return restored


def _same_for_both(tensor: StoredTensor) -> CacheFormat:
    return CacheFormat(tensor, tensor)


_KV4, _KV8 = StoredTensor("kv4"), StoredTensor("kv8")
_KV4_ROTATED = StoredTensor("kv4", rotated=True)
CACHE_FORMATS: Mapping[str, CacheFormat] = {
    **{scheme: _same_for_both(StoredTensor(scheme)) for scheme in KV_SCHEMES},
    "kv4_keys_rotated": CacheFormat(_KV4_ROTATED, _KV4),
    "kv4_rotated": _same_for_both(_KV4_ROTATED),
    "kv4_rotated_centred": CacheFormat(StoredTensor("kv4", rotated=True, centred=True), _KV4_ROTATED),
    "k8v4": CacheFormat(_KV8, _KV4),
    "k8v4_rotated": CacheFormat(_KV8, _KV4_ROTATED),
    "kivi4": CacheFormat(StoredTensor("kv4", tokens=PAGE), _KV4),
    "fp8": _same_for_both(StoredTensor("e4m3")),
}
