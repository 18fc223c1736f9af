"""Packed weights and activations, and KV caches, from the host to the GPU."""

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.layout import ExpertWeights, KVCache, PackedActivations, PackedWeight

_Packed = TypeVar("_Packed", PackedWeight, ExpertWeights, PackedActivations, KVCache)


def to_device(packed: _Packed) -> _Packed:
    """Packed weights, experts' or one, packed activations or a KV cache, NumPy arrays copied to the GPU, as CuPy's.

    Raises ArgumentError for anything else, UnavailableError where there is no GPU.
    """
    gpu.device_info()  # or the reason why there is none
    changed: dict[str, Any]
    if isinstance(packed, (PackedWeight, ExpertWeights)):
        changed = {"buffers": {name: _copied(array) for name, array in packed.buffers.items()}}
    elif isinstance(packed, PackedActivations):
        changed = {name: _copied(getattr(packed, name)) for name in ("x_q", "scale", "token_sum")}
    elif isinstance(packed, KVCache):
        arrays = ("pool", "block_table", "lengths", "k_channel", "v_channel")
        changed = {name: _copied(getattr(packed, name)) for name in arrays}
    else:
        rule = "must be a PackedWeight, ExpertWeights, PackedActivations or KVCache"
        raise ArgumentError("packed", rule, type(packed).__name__)
    return replace(packed, **changed)


def _copied(array: Any) -> Any:
    if isinstance(array, tuple):
        return tuple(map(_copied, array))
    return gpu.to_device(array) if isinstance(array, np.ndarray) else array
