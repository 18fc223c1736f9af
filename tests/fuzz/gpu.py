"""Programs on the GPU: the driver compiles the PTX at an optimisation level, and the module is dropped afterwards."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ptxlab import gpu
from ptxlab.errors import ArgumentError, CompileError, LaunchError
from ptxlab.gpu.launch import launch
from ptxlab.gpu.module import GpuKernel
from ptxlab.hardware.tensor_map import TensorMap
from ptxlab.sources import Source
from ptxlab.spec import Launch

LEVEL = 4  # the driver's default


def is_available() -> bool:
    """Tell whether there is a GPU that runs the programs."""
    return gpu.why_not("sm_90a") is None


@contextmanager
def kernels(text: str, names: Sequence[str], level: int = LEVEL) -> Iterator[list[GpuKernel]]:
    """Compile a PTX module at an optimisation level from 0 to 4, and yield its kernels.

    `CompileError` has the driver's log.
    """
    import cupy
    from cuda.bindings import driver

    cupy.cuda.runtime.free(0)  # makes the context, which the driver's calls need
    log = bytearray(1 << 14)
    option = driver.CUjit_option
    options = [
        option.CU_JIT_ERROR_LOG_BUFFER,
        option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        option.CU_JIT_OPTIMIZATION_LEVEL,
    ]
    status, module = driver.cuModuleLoadDataEx(text.encode() + b"\0", len(options), options, [log, len(log), level])
    if int(status):
        words = log.partition(b"\0")[0].decode(errors="replace").strip()
        raise CompileError("k.ptx", 0, words.partition("\n")[0] or status.name, "", words)
    try:
        yield [_kernel(text, name, *driver.cuModuleGetFunction(module, name.encode())) for name in names]
    finally:
        driver.cuModuleUnload(module)


def _kernel(text: str, name: str, status: Any, function: Any = None) -> GpuKernel:
    from cuda.bindings import driver

    if int(status):
        raise ArgumentError("entry", "a kernel of the module", name)
    attribute = driver.CUfunction_attribute

    def read(which: Any) -> int:
        return int(driver.cuFuncGetAttribute(which, function)[1])

    raw = SimpleNamespace(
        kernel=SimpleNamespace(ptr=int(function)),
        shared_size_bytes=read(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES),
        max_threads_per_block=read(attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
    )
    return GpuKernel(name, Source.from_text(text, "ptx"), raw)


def run(kernels: Sequence[GpuKernel], args: Sequence[Any], geometry: Launch) -> None:
    """Launch kernels one behind the other, all but the first programmatically, and wait; `LaunchError` if one fails.

    NumPy arrays are copied to the device, an array that is passed twice once, and back at the end.
    """
    import cupy

    copies: dict[int, Any] = {}

    def on_device(array: Any) -> Any:
        return copies.setdefault(id(array), (array, cupy.asarray(array)))[1]

    device_args = [replace(a, array=on_device(a.array)) if isinstance(a, TensorMap) else on_device(a) for a in args]
    try:
        for i, kernel in enumerate(kernels):
            launch(kernel, device_args, replace(geometry, programmatic=i > 0))
        for array, copy in copies.values():
            array[...] = cupy.asnumpy(copy)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise LaunchError(f"failed on the GPU: {error}") from None
