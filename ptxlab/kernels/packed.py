"""Packed weights and activations from the host to the GPU."""

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.layout import ExpertWeights, PackedActivations, PackedWeight

_Packed = TypeVar("_Packed", PackedWeight, ExpertWeights, PackedActivations)


def to_device(packed: _Packed) -> _Packed:
    """Packed weights, experts' or one, or packed activations, with NumPy arrays copied to the current GPU, as CuPy's.

    Raises ArgumentError for anything else, UnavailableError where there is no GPU.
    """
    gpu.device_info()  # or the reason why there is none
    changed: dict[str, Any]
    if isinstance(packed, (PackedWeight, ExpertWeights)):
        changed = {"buffers": {name: _copied(array) for name, array in packed.buffers.items()}}
    elif isinstance(packed, PackedActivations):
        changed = {name: _copied(getattr(packed, name)) for name in ("x_q", "scale", "token_sum")}
    else:
        raise ArgumentError(
            "packed", "must be a PackedWeight, ExpertWeights or PackedActivations", type(packed).__name__
        )
    return replace(packed, **changed)


def _copied(array: Any) -> Any:
    return gpu.to_device(array) if isinstance(array, np.ndarray) else array
