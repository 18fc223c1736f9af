"""Loading: a `.cu` is compiled by NVRTC through the disk cache; the driver assembles a `.ptx` unchanged.

Modules are CuPy's. cuda-core reads sizes and attributes of a `CUkernel` alone, and no global variables (decision 0034).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab import toolchain
from ptxlab.errors import ArgumentError, CompileError
from ptxlab.gpu.architecture import target
from ptxlab.gpu.device import device_info
from ptxlab.sources import Source
from ptxlab.toolchain import cache, nvrtc


@dataclass(frozen=True)
class GpuKernel:
    """An entry of a source, loaded on the current device.

    Attributes:
        name: the entry symbol.
        source: where it comes from.
        raw: CuPy's `RawKernel`, which keeps the module loaded.
    """

    name: str
    source: Source
    raw: Any

    @cached_property
    def handle(self) -> int:
        """The driver's `CUfunction`."""
        return int(self.raw.kernel.ptr)

    @cached_property
    def parameter_bytes(self) -> tuple[int, ...] | None:
        """Size of every parameter in bytes; None where the driver is too old to tell (before CUDA 12.4)."""
        from cuda.bindings import driver

        sizes: list[int] = []
        try:
            while True:
                status, _, size = driver.cuFuncGetParamInfo(self.handle, len(sizes))
                if int(status):
                    return tuple(sizes)
                sizes.append(int(size))
        except RuntimeError:  # the driver lacks the function
            return None

    def variable(self, name: str) -> Any:
        """View a global variable of the module as a CuPy array, u8, over its bytes.

        Raises ArgumentError if there is none.
        """
        import cupy
        from cuda.bindings import driver

        _, module = driver.cuFuncGetModule(self.handle)
        status, address, size = driver.cuModuleGetGlobal(module, name.encode())
        if int(status):
            raise ArgumentError(f"{self.name}: variable", f"a global variable of {self.source.label}", name)
        memory = cupy.cuda.UnownedMemory(int(address), int(size), self)
        return cupy.ndarray((int(size),), np.uint8, cupy.cuda.MemoryPointer(memory, 0))

    @cached_property
    def registers(self) -> int:
        """Registers per thread."""
        return int(self.raw.num_regs)

    @cached_property
    def local_bytes(self) -> int:
        """Local memory per thread: stack and spills."""
        return int(self.raw.local_size_bytes)

    @cached_property
    def shared_bytes(self) -> int:
        """Static shared memory per block."""
        return int(self.raw.shared_size_bytes)

    @cached_property
    def max_threads(self) -> int:
        """Most threads that a block of this kernel can have."""
        return int(self.raw.max_threads_per_block)


_kernels: dict[tuple[object, ...], GpuKernel] = {}


def load(source: Source, entry: str, *, defines: Mapping[str, int | str] = toolchain.NO_DEFINES) -> GpuKernel:
    """Load one entry of a source on the current device; loading the same again is a look-up.

    Args:
        source: CUDA C++ is compiled for this device, or as `compiling_for` says; PTX is handed to the driver as it is.
        entry: entry symbol.
        defines: `-D` constants, CUDA C++ only.

    Raises:
        CompileError: NVRTC or the driver refused it; `log` is what it printed.
        ArgumentError: the source has no such entry.
        UnavailableError: no GPU, or no NVRTC.
    """
    import cupy

    arch = target() or device_info().arch
    is_cuda = source.language == "cu"
    content = toolchain.cuda_digest(source, arch, output=image_kind(), defines=defines) if is_cuda else source.text
    key = (content, source.path, entry, tuple(sorted(defines.items())), cupy.cuda.Device().id)
    if key not in _kernels:
        _kernels[key] = _load(source, entry, _file(source, arch, defines))
    return _kernels[key]


def load_image(source: Source, image: toolchain.Image, entry: str) -> GpuKernel:
    """Load one entry of a cubin compiled from `source` before, so that the inspected machine code is what runs."""
    device_info()  # or the reason why there is none
    return _load(source, entry, image.path)


def _load(source: Source, entry: str, path: Path) -> GpuKernel:
    import cupy

    try:
        raw = cupy.RawModule(path=str(path)).get_function(entry)
        _ = raw.kernel  # CuPy loads at the latest now
    except RuntimeError as error:
        raise _load_error(source, entry, path, error) from None
    return GpuKernel(entry, source, raw)


def image_kind() -> toolchain.Kind:
    """Return the kind of image that CUDA C++ is compiled to.

    It is machine code of this GPU, or PTX of another architecture, which the driver compiles.
    """
    return "cubin" if target() is None else "ptx"


def _file(source: Source, arch: str, defines: Mapping[str, int | str]) -> Path:
    if source.language == "cu":
        return toolchain.compile_cuda(source, arch, output=image_kind(), defines=defines).path
    if defines:
        raise ArgumentError("defines", f"none, since {source.label} is PTX", dict(defines))
    # Under a name that changes with the text, because CuPy remembers modules by their path.
    return cache.get_or_make(cache.key_of(source.text), ".ptx", source.text.encode)


def _load_error(source: Source, entry: str, path: Path, error: RuntimeError) -> CompileError | ArgumentError:
    """Return the error of a module that failed to load; it is loaded once more for the driver's log."""
    if "NOT_FOUND" in str(error):
        return ArgumentError(f"{source.label}: entry", "an entry of that source", entry)
    from cuda.bindings import driver

    log = bytearray(1 << 16)
    option = driver.CUjit_option
    options = [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
    status, module = driver.cuModuleLoadDataEx(path.read_bytes() + b"\0", len(options), options, [log, len(log)])
    if not int(status):
        driver.cuModuleUnload(module)
    text = log.partition(b"\0")[0].decode(errors="replace").strip()
    match = nvrtc.PTXAS_ERROR.search(text)
    line = int(match[1] or 0) if match else 0
    problem = match[2] if match else text.partition("\n")[0] or str(error)
    return CompileError(source.path, line, problem, nvrtc.excerpt(source, line), text)
