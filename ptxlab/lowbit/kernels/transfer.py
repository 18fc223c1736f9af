"""Packed weights and activations, and KV caches, from the host to the GPU."""

from typing import Any, TypeVar

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit.layout import (
    AtomActivations,
    AtomWeight,
    BlockActivations,
    BlockWeight,
    ExpertWeights,
    KVCache,
    PackedActivations,
    PackedWeight,
)
from ptxlab.lowbit.quant.tiled import with_arrays

_KINDS = (
    PackedWeight,
    AtomWeight,
    BlockWeight,
    ExpertWeights,
    PackedActivations,
    AtomActivations,
    BlockActivations,
    KVCache,
)
_Packed = TypeVar(
    "_Packed",
    PackedWeight,
    AtomWeight,
    BlockWeight,
    ExpertWeights,
    PackedActivations,
    AtomActivations,
    BlockActivations,
    KVCache,
)


@break_graph
def to_device(packed: _Packed) -> _Packed:
    """Copy packed weights (one or experts'), packed activations or a KV cache from NumPy arrays to CuPy's.

    Raises ArgumentError for anything else, UnavailableError where there is no GPU.
    """
    gpu.device_info()  # or the reason why there is none
    if not isinstance(packed, _KINDS):
        rule = f"must be of {', '.join(kind.__name__ for kind in _KINDS[:-1])} or {_KINDS[-1].__name__}"
        raise ArgumentError("packed", rule, type(packed).__name__)
    moved_weight: _Packed = with_arrays(packed, copy_to_device)
    return moved_weight


def copy_to_device(array: Any) -> Any:
    """Copy a NumPy array to CuPy's; return an array on the GPU as it is."""
    return gpu.to_device(array) if isinstance(array, np.ndarray) else array
