"""Arrays of any library: NumPy on the host; CuPy, PyTorch, JAX and others on the device without a copy."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.io.dlpack import Bits, is_bfloat16, to_numpy, without_subclass

_CUDA = (2, 13)  # DLPack's device types: device memory, managed memory
ALIGNMENT = 16  # bytes: the widest load or store of one thread


def without_pool() -> None:
    """Disable CuPy's memory pool from now on: each array gets its own allocation, so that tools see where it ends."""
    import cupy

    cupy.cuda.set_allocator(None)


def free_pool() -> None:
    """Return the unused memory of CuPy's pool to the driver; does nothing if CuPy is not imported."""
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        cupy.get_default_memory_pool().free_all_blocks()


@contextmanager
def allocating_elsewhere(nbytes: int) -> Iterator[None]:
    """Shift the addresses of arrays that are allocated inside, by first allocating a spacer of `nbytes`.

    CuPy's pool has nothing to reuse. What the driver hands out is its own affair: as a rule other memory than for the
    arrays before.
    """
    import cupy

    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    spacer = empty((nbytes,), np.uint8)
    try:
        yield
    finally:
        del spacer
        pool.free_all_blocks()


def _library(kind: type) -> str:
    """Return the name of the package that a type comes from."""
    return kind.__module__.partition(".")[0]


library: Callable[[type], str] = cache(_library)


def is_device_array(array: Any) -> bool:
    """Check whether the array lies in GPU memory."""
    if library(type(array)) == "cupy":  # which takes long over the last question: it asks the driver
        return isinstance(array, sys.modules["cupy"].ndarray)
    if isinstance(array, (np.ndarray, np.generic)):
        return False
    if hasattr(array, "is_cuda"):  # PyTorch, which takes long over the question below
        return bool(array.is_cuda)
    if hasattr(array, "__dlpack_device__"):
        return array.__dlpack_device__()[0] in _CUDA
    return hasattr(array, "__cuda_array_interface__")


def as_array(name: str, array: Any) -> Any:
    """View an array as NumPy's or, in GPU memory, as CuPy's on the same memory.

    Args:
        name: of the argument, for messages.
        array: NumPy, CuPy, or anything with DLPack or `__cuda_array_interface__` (PyTorch, JAX ...). One of bfloat16
            becomes an array of its bits, uint16.
    """
    if isinstance(array, np.ndarray):
        return without_subclass(name, array.view(np.uint16) if is_bfloat16(array) else array)
    if not is_device_array(array):
        if hasattr(array, "__dlpack__") and not isinstance(array, np.generic):
            return to_numpy(name, array)
        raise ArgumentError(name, "an array: NumPy, CuPy, DLPack or __cuda_array_interface__", type(array).__name__)
    import cupy

    try:
        with caller_stream():
            shared_array = Bits(array) if is_bfloat16(array) else array
            return cupy.from_dlpack(shared_array) if hasattr(shared_array, "__dlpack__") else cupy.asarray(shared_array)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(name, f"an array that can be shared: {error}", type(array).__name__) from None


def check_alignment(name: str, array: Any) -> None:
    """Raise `ArgumentError` for a NumPy or CuPy array whose first element lies where a kernel could not load it."""
    if isinstance(array, np.ndarray):
        if not array.flags.aligned:
            raise ArgumentError(
                name, f"aligned to its {array.itemsize}-byte elements", f"address {array.ctypes.data:#x}"
            )
    elif array.data.ptr % ALIGNMENT:
        raise ArgumentError(name, f"aligned to {ALIGNMENT} bytes on the GPU", f"address {array.data.ptr:#x}")


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Allocate an uninitialised CuPy array on the current device, on the caller's stream."""
    import cupy

    with caller_stream():
        return cupy.empty(shape, dtype)


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Make a CuPy array of zeros on the current device.

    The zeros are written when it returns, so any stream may use the array.
    """
    import cupy

    with caller_stream() as stream:
        array = cupy.zeros(shape, dtype)
        stream.synchronize()
    return array


def to_device(array: np.ndarray) -> Any:
    """Copy a NumPy array to a CuPy array, C-contiguous, on the caller's stream."""
    import cupy

    with caller_stream():
        return cupy.asarray(array, order="C")


def to_host(array: Any) -> np.ndarray:
    """Copy a CuPy array to a NumPy array after everything that was enqueued on the device."""
    import cupy

    cupy.cuda.Device().synchronize()
    host: np.ndarray = cupy.asnumpy(array)
    return host


def synchronize() -> None:
    """Wait for everything that was enqueued on the current device."""
    import cupy

    cupy.cuda.Device().synchronize()


def fetch(array: Any) -> Callable[[], np.ndarray]:
    """Enqueue a copy of a CuPy array to the host on the caller's stream; the result, when called, waits for it alone.

    What is enqueued behind the copy may run meanwhile.
    """
    import cupy
    import cupyx

    with caller_stream() as stream:
        host: np.ndarray = cupyx.empty_pinned(array.shape, array.dtype)
        cupy.asnumpy(array, stream=stream, out=host, blocking=False)
        copy_event = stream.record(cupy.cuda.Event(disable_timing=True))

    def wait() -> np.ndarray:
        copy_event.synchronize()
        return host

    return wait


def gumbel(seed: int) -> Callable[[tuple[int, ...]], Any]:
    """Return a function that draws f32 CuPy arrays of any shape from Gumbel's distribution, on the caller's stream."""
    import cupy

    state = cupy.random.RandomState(seed)

    def draw(shape: tuple[int, ...]) -> Any:
        with caller_stream():
            return state.gumbel(size=shape, dtype=np.float32)

    return draw


def fill_bytes(array: Any, byte: int) -> None:
    """Set every byte of a CuPy array, on CuPy's current stream."""
    import cupy

    cupy.cuda.runtime.memsetAsync(array.data.ptr, byte, array.nbytes, cupy.cuda.get_current_stream().ptr)


def copy_bytes(target: Any, source: Any) -> None:
    """Copy one CuPy array's bytes into another of the same size with the copy engine, on CuPy's current stream."""
    import cupy

    if target.nbytes != source.nbytes:
        raise ArgumentError("target", f"{source.nbytes} bytes", target.nbytes)
    kind, stream = cupy.cuda.runtime.memcpyDeviceToDevice, cupy.cuda.get_current_stream().ptr
    cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, kind, stream)


def like(array: Any, example: Any, dtype: str = "") -> Any:
    """Convert an array (NumPy or CuPy) to the library of `example`, on the same memory.

    Where `dtype` is bfloat16, the array holds its bits as uint16, and so does what is returned for NumPy and CuPy.
    """
    library = type(example).__module__.partition(".")[0]
    if dtype == "bfloat16" and library in ("torch", "jax", "jaxlib"):
        array = Bits(array, of_bfloat16=True)
    if library == "torch":
        return sys.modules["torch"].from_dlpack(array)
    if library in ("jax", "jaxlib"):
        return sys.modules["jax"].dlpack.from_dlpack(array)
    return array


def caller_stream() -> AbstractContextManager[Any]:
    """Make the stream that the caller works on CuPy's current stream while inside.

    The context manager is the stream itself, because a generator takes longer. It is CuPy's own if the caller has
    chosen one (`with stream:`), else PyTorch's current stream where PyTorch is in use. PyTorch is never imported for
    this.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()
    torch_handle = 0 if stream.ptr else torch_stream()
    context: AbstractContextManager[Any] = borrow_stream(torch_handle) if torch_handle else stream
    return context


def torch_stream() -> int:
    """Return the handle of PyTorch's current stream on CuPy's current device.

    It is 0, the default stream, where PyTorch is not in use.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    import cupy

    return _torch_streams()(cupy.cuda.runtime.getDevice())


@cache
def _torch_streams() -> Callable[[int], int]:
    """Return a function from a device to PyTorch's current stream there.

    `torch.cuda.current_stream` makes an object of it, which takes longer.
    """
    torch = sys.modules["torch"]
    quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return quick or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


def borrow_stream(handle: int) -> Any:
    """Wrap a stream that another library owns as CuPy's."""
    import cupy

    return cupy.cuda.Stream.from_external(_Borrowed(handle))


class _Borrowed:
    """A stream of another library, as the CUDA stream protocol presents it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
