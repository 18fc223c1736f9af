"""Views of device arrays: dtype, shape and address, read without conversion, allocation or waiting.

By hand: cuda-core's `StridedMemoryView` takes ten times as long for a tensor of PyTorch 2.13 or newer (decision 0034).
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.gpu.arrays import ALIGNMENT, as_array, caller_stream, empty, is_device_array, library, like, torch_stream
from ptxlab.spec.dtypes import storage
from ptxlab.validate import shape_of


class View(NamedTuple):
    """A device array: `dtype` is its name, and `owner` keeps the memory while the view is used."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    device: int
    owner: Any

    def require(self, name: str, dtype: str, shape: tuple[int, ...], device: int) -> "View":
        """Return the view itself if it has that dtype, shape and device, and is aligned to 16 bytes.

        bfloat16 may come as its bits, uint16. Raises ArgumentError otherwise.
        """
        if self.dtype != dtype and (self.dtype, dtype) != ("uint16", "bfloat16"):
            raise ArgumentError(name, f"dtype {dtype}", self.dtype)
        if self.shape != shape:
            raise ArgumentError(name, f"shape {list(shape)}", list(self.shape))
        if self.device != device:
            raise ArgumentError(name, f"on the current device {device}", f"device {self.device}")
        if self.address % ALIGNMENT:
            raise ArgumentError(name, f"aligned to {ALIGNMENT} bytes on the GPU", f"address {self.address:#x}")
        return self


_view = cast(Callable[[tuple[Any, ...]], View], partial(tuple.__new__, View))  # View(*of), without a call of Python's


def view(name: str, array: Any) -> View:
    """View an array of any library. Raises ArgumentError unless it is contiguous and on the GPU."""
    origin = library(type(array))
    if origin == "torch" and array.is_cuda:
        if not array.is_contiguous():
            raise ArgumentError(name, "C-contiguous", f"strides {array.stride()}")
        return _view((array.data_ptr(), tuple(array.shape), _torch_name(array.dtype), array.get_device(), array))
    if origin != "cupy":
        if not is_device_array(array):
            raise ArgumentError(name, "an array on the GPU (ptxlab.to_device brings it there)", type(array).__name__)
        array = as_array(name, array)
    if not array._c_contiguous:  # `flags` make an object
        raise ArgumentError(name, "C-contiguous", f"strides {array.strides}")
    memory = array.data
    return _view((memory.ptr, array.shape, _name(array.dtype), memory.device_id, array))


def flat_rows(name: str, array: Any) -> tuple[Any, int]:
    """Flatten an array of rows [T, ...] if there are gaps between them, for a kernel that takes a row pitch.

    Returns:
        The array and the elements from one row to the next. An array with gaps between its rows becomes a flat one on
        the same memory, from the first element to the last.

    Raises ArgumentError for gaps within a row, and for rows that overlap or begin at no multiple of 16 bytes.
    """
    shape = shape_of(array)
    width = prod(shape[1:])
    origin = library(type(array))
    if origin == "torch":
        is_contiguous = array.is_contiguous()
    elif origin == "cupy":
        is_contiguous = array._c_contiguous  # `flags` make an object
    else:
        is_contiguous = origin != "numpy" or array.flags.c_contiguous  # `view` checks arrays of other libraries
    if is_contiguous:
        return array, width
    if origin == "torch":
        strides, itemsize = array.stride(), array.itemsize
        flatten = partial(array.as_strided, stride=(1,))
    else:
        itemsize = array.dtype.itemsize
        strides = tuple(stride // itemsize for stride in array.strides)
        package = sys.modules[origin].lib.stride_tricks
        flatten = partial(package.as_strided, array, strides=(itemsize,))
    pitch, inner = strides[0], 1
    for size, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if size > 1 and stride != inner:
            raise ArgumentError(name, "C-contiguous but for gaps between rows", f"strides {strides}")
        inner *= size
    if pitch < width or pitch * itemsize % ALIGNMENT:
        rule = f"rows of {width} elements must lie {width} or more apart, a multiple of {ALIGNMENT} bytes"
        raise ArgumentError(name, rule, f"{pitch} elements")
    return flatten(((shape[0] - 1) * pitch + width,)), pitch


@cache
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name


@cache
def _torch_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def stream_handle() -> int:
    """Return the caller's stream (see `caller_stream`) as the driver's handle."""
    import cupy

    handle: int = cupy.cuda.get_current_stream().ptr
    return handle or torch_stream()


def is_capturing(stream: int) -> bool:
    """Check whether work enqueued on that stream goes into a CUDA graph that is being captured."""
    import cupy

    return stream != 0 and bool(cupy.cuda.runtime.streamIsCapturing(stream))


def current_device() -> int:
    """Return CuPy's current device."""
    import cupy

    return int(cupy.cuda.runtime.getDevice())


def new(example: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Allocate an uninitialised device array for a result that goes to the caller.

    It is PyTorch's own for PyTorch, otherwise CuPy's.
    """
    if library(type(example)) == "torch":
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=example.device)
    return empty(shape, _storage(dtype))


_storage = cache(storage)


def hand_to_caller(array: Any, example: Any, dtype: str) -> Any:
    """Convert an array made by `new` to the caller's library; its writes must have been enqueued."""
    if type(array) is type(example):
        return array
    with caller_stream():
        return like(array, example, dtype)
