"""What a kernel is given: arrays of any library, checked before anything is launched, and sizes in up to three axes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.layout.tensor_map import TensorMap
from ptxlab.spec import Arg, KernelSpec


def accept(spec: KernelSpec, arg: Arg, array: Any) -> Any:
    """Check dtype, contiguity and alignment; DLPack arrays become NumPy or CuPy arrays on the same memory."""
    array = gpu.as_array(f"{spec.name}: {arg.name}", array)
    if array.dtype != np.dtype(arg.dtype):
        raise ArgumentError(f"{spec.name}: {arg.name}", f"dtype {arg.dtype}", array.dtype)
    _check_contiguous(f"{spec.name}: {arg.name}", array)
    gpu.check_alignment(f"{spec.name}: {arg.name}", array)
    return array


def shared_array(name: str, arg: Any) -> Any:
    """An argument of a kernel without a spec: arrays as `accept` has them, also in a tensor map; the rest as it is."""
    if isinstance(arg, TensorMap):
        return replace(arg, array=shared_array(name, arg.array))
    if not hasattr(arg, "__dlpack__") and not hasattr(arg, "__cuda_array_interface__"):
        return arg
    array = gpu.as_array(name, arg)
    _check_contiguous(name, array)
    return array


def _check_contiguous(name: str, array: Any) -> None:
    if not array.flags.c_contiguous:
        raise ArgumentError(name, "C-contiguous", f"strides {array.strides}")


def dim3(name: str, value: int | Sequence[int]) -> tuple[int, int, int]:
    """One to three positive integers as three."""
    values = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(values) <= 3 or any(v < 1 for v in values):
        raise ArgumentError(name, "one to three positive integers", value)
    return (*values, 1, 1)[:3]  # type: ignore[return-value]


def on_device(arg: Any) -> bool:
    """Whether an argument is, or a tensor map is over, an array in GPU memory."""
    return gpu.is_device_array(arg.array if isinstance(arg, TensorMap) else arg)
