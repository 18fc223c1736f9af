"""The launch that a profiler measures: one kernel on its problem, launched once after warm-up.

Used from both sides: the command works out what will be launched, and a process under the profiler launches it.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab import gpu, registry, runtime
from ptxlab.errors import ArgumentError, PtxlabError
from ptxlab.io.files import load_arrays
from ptxlab.profile.nsight import FAILED
from ptxlab.runtime.arguments import geometry, merge_sizes, order_arguments
from ptxlab.runtime.backends import BACKENDS
from ptxlab.runtime.problems import problems_of
from ptxlab.sources import Source
from ptxlab.spec import Arrays, KernelSpec, Launch
from ptxlab.spec.dtypes import convert_to_dtype, dtype_in, storage

WARM_UP = 20  # launches before the one that counts
_LAUNCH = "import sys; from ptxlab.profile import launch_target; launch_target.main(sys.argv[1])"

Call = Callable[[], None]


@dataclass(frozen=True)
class LaunchTarget:
    """A launch to be profiled, as a command line names it.

    Attributes:
        target: `NAME[:FORM]`, `NAME.cu[:FORM]` or `FILE[:entry]`.
        sizes: of a kernel with a spec; what is left out is as in `usual_sizes`.
        inputs: of a file: the `.npz` with its arguments.
        grid, block: of a file.
        shared: of a file: dynamic shared memory in bytes.
        arch: of a file: what a `.cu` is compiled for.
        defines: of a file: `-D` constants.
        include: of a file: folders for `#include`.
        std: of a file: its language, such as `c++20`.
    """

    target: str
    sizes: dict[str, Any] = field(default_factory=dict)
    inputs: str = ""
    grid: tuple[int, ...] = (1,)
    block: tuple[int, ...] = (32,)
    shared: int = 0
    arch: str | None = None
    defines: dict[str, Any] = field(default_factory=dict)
    include: tuple[str, ...] = ()
    std: str | None = None

    @property
    def spec(self) -> KernelSpec | None:
        """Spec of a registered kernel; None for a file."""
        return registry.resolve(self.target)[0]


def command(jobs: Sequence[LaunchTarget]) -> list[str]:
    """Return the command to run under a profiler: it prepares each job, warms it up and launches it once, in order."""
    return [sys.executable, "-c", _LAUNCH, json.dumps([asdict(job) for job in jobs])]


def main(jobs: str) -> None:
    """Run the jobs in the process under the profiler.

    If ptxlab cannot launch one, the process exits with a line that `nsight.collect` looks for.
    """
    try:
        for job_description in json.loads(jobs):
            call = prepare_launch(LaunchTarget(**job_description))
            for _ in range(WARM_UP):
                call()
            with gpu.profiling():
                call()
    except PtxlabError as error:
        raise SystemExit(f"{FAILED}{error}") from None


def usual_sizes(spec: KernelSpec, backend: str = "gpu") -> dict[str, Any]:
    """Return the sizes of a problem that is typical of a kernel, in the symbols that `--shape` takes.

    A GEMM has M, N, K, g; attention B sequences of L tokens with Hq and Hkv heads; others have those of their examples.
    """
    if backend not in BACKENDS:
        raise ArgumentError("backend", f"one of {', '.join(BACKENDS)}", backend)
    return problems_of(spec).usual_sizes(spec, backend)


def sizes_of(spec: KernelSpec, requested: Mapping[str, Any], backend: str = "gpu") -> dict[str, Any]:
    """Return a kernel's usual sizes, overridden by the requested ones.

    Raises:
        ArgumentError: a symbol that is not the kernel's, a size below 1, or sizes that break a rule of the kernel.
    """
    sizes = merge_sizes("--shape", spec, usual_sizes(spec, backend), requested)
    problems_of(spec).check_sizes(spec, sizes)
    return sizes


def weights_of(spec: KernelSpec | None, sizes: Mapping[str, Any]) -> int | None:
    """Count the weights (N x K or R x K) or cache elements of these sizes; None for other kernels and files."""
    return problems_of(spec).weights(sizes) if spec else None


def entry_of(job: LaunchTarget) -> str:
    """Return the entry symbol that will be launched. Raises for a job that no machine could run."""
    spec, source, entry = registry.resolve(job.target)
    if spec is None:
        kernel = _load_kernel(job, source, entry)
        _file_launch(job, kernel)
        return kernel.entry
    sizes_of(spec, job.sizes)
    return spec.name


def prepare_launch(job: LaunchTarget) -> Call:
    """Put the job's problem on the device and return the call that launches it."""
    spec, source, entry = registry.resolve(job.target)
    if spec is None:
        return _file_call(job, _load_kernel(job, source, entry))
    sizes = sizes_of(spec, job.sizes)
    if problem := problems_of(spec).sized(spec, sizes, 1):
        return problem.launches(problem.chosen).calls[0]
    return _spec_call(spec, source, sizes)


def _spec_call(spec: KernelSpec, source: Source, sizes: dict[str, Any]) -> Call:
    """Prepare a launch of a spec's kernel on an example of the spec."""
    config = spec.config_for(sizes)
    sizes_and_constants = {**sizes, **config}
    host = arrays_of(spec, spec.example(np.random.default_rng(0), **sizes), sizes_and_constants)
    arrays = {name: gpu.to_device(array) for name, array in host.items()}
    kernel = gpu.load(source, spec.name, defines=config)
    return gpu.prepare(kernel, spec.arguments(arrays, sizes_and_constants), spec.launch(sizes_and_constants))


def arrays_of(spec: KernelSpec, logical: Arrays, sizes_and_constants: Mapping[str, Any]) -> Arrays:
    """Return every array argument on the host: inputs packed, the others zero."""
    dtypes = {arg.name: dtype_in(arg.dtype, sizes_and_constants) for arg in spec.args if arg.shape}
    output_arguments = [arg for arg in spec.args if arg.role in ("out", "scratch")]
    zero_arrays = {
        arg.name: np.zeros(arg.resolve(sizes_and_constants), storage(dtypes[arg.name])) for arg in output_arguments
    }
    return {
        **zero_arrays,
        **{n: np.ascontiguousarray(convert_to_dtype(a, dtypes[n])) for n, a in spec.pack(logical).items()},
    }


def _load_kernel(job: LaunchTarget, source: Source, entry: str | None) -> runtime.Kernel:
    return runtime.load(source, entry, defines=job.defines, arch=job.arch, include=job.include, std=job.std)


def _file_launch(job: LaunchTarget, kernel: runtime.Kernel) -> tuple[list[Any], Launch]:
    """Return the arrays of the `.npz`, on the host and in the kernel's order, and the geometry."""
    arrays = {kernel.parameter(name): array for name, array in load_arrays(Path(job.inputs)).items()}
    ordered_arrays = order_arguments(kernel.name, kernel.signature, arrays)
    return kernel.arguments(ordered_arrays), geometry(job.grid, job.block, job.shared)


def _file_call(job: LaunchTarget, kernel: runtime.Kernel) -> Call:
    """Prepare a launch of a file's kernel on the arrays of its `.npz`."""
    host_arguments, launch = _file_launch(job, kernel)
    args = [gpu.to_device(argument) if isinstance(argument, np.ndarray) else argument for argument in host_arguments]
    return gpu.prepare(gpu.load(kernel.source, kernel.entry, defines=kernel.defines), args, launch)
