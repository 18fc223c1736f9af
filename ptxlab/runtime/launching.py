"""Preparation shared by the suites: compiled variants, poisoned results, launches of a kernel on its arrays."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ptxlab import gpu, toolchain
from ptxlab.sources import Source, sources_of_kernel
from ptxlab.spec import Arrays, KernelSpec, Sizes

Call = Callable[[], None]
POISON = 0xA5  # what results are filled with: an element that no launch writes is found


@dataclass(frozen=True)
class Launches:
    """Launches of one kernel that are ready to be timed, one for each copy of the data that must miss the L2.

    Attributes:
        spec: the kernel.
        sizes: symbols of its spec.
        variant: the constants it was compiled with.
        kernel: as loaded.
        calls: launch on CuPy's current stream.
        outputs: what each call writes.
    """

    spec: KernelSpec
    sizes: dict[str, Any]
    variant: dict[str, int]
    kernel: gpu.GpuKernel
    calls: list[Call]
    outputs: Any

    @property
    def resources(self) -> dict[str, int]:
        """Registers and local memory of a thread."""
        return {"registers": self.kernel.registers, "local_bytes": self.kernel.local_bytes}


def compile_all(variants: Iterable[tuple[Source, Mapping[str, int]]]) -> None:
    """Compile the CUDA C++ sources in parallel, each variant once, into the cache that loading reads."""
    arch, kind = (
        gpu.target() or gpu.device_info().arch,
        gpu.image_kind(),
    )  # asked here: other threads know of no `compiling_for`
    distinct = {(source, tuple(constants.items())) for source, constants in variants if source.language == "cu"}
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(toolchain.compile_cuda, source, arch, output=kind, defines=dict(named))
            for source, named in distinct
        ]
        for job in jobs:
            job.result()


def allocate_poisoned(shape: tuple[int, ...], dtype: Any, byte: int = POISON) -> Any:
    """Allocate an array on the device, every byte of which is `byte`."""
    array = gpu.empty(shape, dtype)
    gpu.fill_bytes(array, byte)
    return array


def prepare_launches(
    spec: KernelSpec, sizes: Sizes, constants: Sizes, arrays: Iterable[Arrays], *, programmatic: bool = False
) -> tuple[gpu.GpuKernel, list[Call]]:
    """Load the kernel with these constants; return it and a launch on each of `arrays`, which are on the device.

    `programmatic`: a launch may begin while the one before it still runs, where the kernel waits for that by itself.
    """
    sizes_and_constants = {**sizes, **constants}
    kernel = gpu.load(sources_of_kernel(spec.name)[0], spec.name, defines=constants)
    geometry = replace(spec.launch(sizes_and_constants), programmatic=programmatic and bool(spec.after_wait))
    return kernel, [
        gpu.prepare(kernel, spec.arguments(launch_arrays, sizes_and_constants), geometry) for launch_arrays in arrays
    ]
