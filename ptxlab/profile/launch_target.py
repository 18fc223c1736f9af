"""What a profiler is given to look at: one kernel, its problem on the device, one launch after a few to warm up.

Used from both sides: the command works out what will be launched, and a process under the profiler launches it.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab import gpu, runtime
from ptxlab.errors import ArgumentError, PtxlabError
from ptxlab.io.files import load_arrays
from ptxlab.lowbit import kernels
from ptxlab.lowbit.bench.problems import sized
from ptxlab.lowbit.bench.shapes import HEAD_DIM
from ptxlab.lowbit.kernels.attention.steps import step_of as attention_step
from ptxlab.lowbit.kernels.gemm.ladder import fit_tokens
from ptxlab.profile.nsight import FAILED
from ptxlab.runtime.arguments import geometry, in_order, merge_sizes
from ptxlab.sources import Source
from ptxlab.spec import Arrays, KernelSpec, Launch
from ptxlab.spec.dtypes import dtype_in, storage, stored

WARM_UP = 20  # launches before the one that counts
# By backend and family: as much as shows a steady state. L: tokens of every sequence.
_USUAL: dict[str, dict[str, dict[str, Any]]] = {
    "gpu": {
        "gemm": {"M": 64, "N": 22016, "K": 4096, "g": 128},
        "attention": {"B": 64, "L": 1024, "Hq": 32, "Hkv": 8},
    },
    "emulator": {
        "gemm": {"M": 64, "N": 256, "K": 2048, "g": 128},
        "attention": {"B": 2, "L": 512, "Hq": 8, "Hkv": 2},
    },
}
_LAUNCH = "import sys; from ptxlab.profile import launch_target; launch_target.main(sys.argv[1])"

Call = Callable[[], None]


@dataclass(frozen=True)
class LaunchTarget:
    """One launch to be profiled, as a command line names it.

    Attributes:
        target: `NAME[:FORM]`, `NAME.cu[:FORM]` or `FILE[:entry]`.
        sizes: of a kernel with a spec; what is left out is as in `usual_sizes`.
        inputs: of a file: the `.npz` with its arguments.
        grid, block: of a file.
        shared: of a file: dynamic shared memory in bytes.
        arch: of a file: what a `.cu` is compiled for.
        defines: of a file: `-D` constants.
    """

    target: str
    sizes: dict[str, Any] = field(default_factory=dict)
    inputs: str = ""
    grid: tuple[int, ...] = (1,)
    block: tuple[int, ...] = (32,)
    shared: int = 0
    arch: str | None = None
    defines: dict[str, int] = field(default_factory=dict)

    @property
    def spec(self) -> KernelSpec | None:
        """Of a kernel of the project."""
        return kernels.resolve(self.target)[0]


def command(jobs: Sequence[LaunchTarget]) -> list[str]:
    """What to run under a profiler: it prepares every job, warms it up and launches it once, in this order."""
    return [sys.executable, "-c", _LAUNCH, json.dumps([asdict(job) for job in jobs])]


def main(jobs: str) -> None:
    """The process under the profiler. What ptxlab cannot launch it says in a line that `nsight.collect` looks for."""
    try:
        for described in json.loads(jobs):
            call = prepared(LaunchTarget(**described))
            for _ in range(WARM_UP):
                call()
            with gpu.profiled():
                call()
    except PtxlabError as error:
        raise SystemExit(f"{FAILED}{error}") from None


def usual_sizes(spec: KernelSpec, backend: str = "gpu") -> dict[str, Any]:
    """The sizes of a problem that says something of a kernel, in the symbols that `--shape` takes.

    A GEMM has M, N, K, g; attention B sequences of L tokens with Hq and Hkv heads; others have those of their examples.
    """
    if backend not in _USUAL:
        raise ArgumentError("backend", f"one of {', '.join(_USUAL)}", backend)
    if attention_step(spec):
        return dict(_USUAL[backend]["attention"])
    example = dict(spec.example_sizes[-1])
    if spec.family != "gemm":
        return example
    return fit_tokens(spec, {name: _USUAL[backend]["gemm"].get(name, size) for name, size in example.items()})


def sizes_of(spec: KernelSpec, given: Mapping[str, Any], backend: str = "gpu") -> dict[str, Any]:
    """The usual sizes with those given in their place.

    Raises:
        ArgumentError: a symbol that is not the kernel's, a size below 1, or sizes that break a rule of the kernel.
    """
    sizes = merge_sizes("--shape", spec, usual_sizes(spec, backend), given)
    if attention_step(spec) is None:
        spec.check_sizes(sizes)
    return sizes


def weights_of(sizes: Mapping[str, Any]) -> int | None:
    """How many weights these sizes speak of, N x K or R x K; of a cache its keys and values; None if of neither."""
    for symbols, head_dim in ((("N", "K"), 1), (("R", "K"), 1), (("B", "L", "Hkv"), 2 * HEAD_DIM)):
        if set(symbols) <= set(sizes):
            return prod(int(sizes[symbol]) for symbol in symbols) * head_dim
    return None


def entry_of(job: LaunchTarget) -> str:
    """The entry symbol that will be launched; raises what makes the job impossible anywhere."""
    spec, source, entry = kernels.resolve(job.target)
    if spec is None:
        kernel = _loaded(job, source, entry)
        _file_launch(job, kernel)
        return kernel.entry
    sizes_of(spec, job.sizes)
    return spec.name


def prepared(job: LaunchTarget) -> Call:
    """Put the job's problem on the device; the call launches."""
    spec, source, entry = kernels.resolve(job.target)
    if spec is None:
        return _file_call(job, _loaded(job, source, entry))
    sizes = sizes_of(spec, job.sizes)
    if problem := sized(spec, sizes, copies=1):
        return problem.launches(problem.chosen).calls[0]
    return _spec_call(spec, source, sizes)


def _spec_call(spec: KernelSpec, source: Source, sizes: dict[str, Any]) -> Call:
    """On an example of the spec."""
    config = spec.config_for(sizes)
    everything = {**sizes, **config}
    host = arrays_of(spec, spec.example(np.random.default_rng(0), **sizes), everything)
    arrays = {name: gpu.to_device(array) for name, array in host.items()}
    kernel = gpu.load(source, spec.name, defines=config)
    return gpu.prepare(kernel, spec.arguments(arrays, everything), spec.launch(everything))


def arrays_of(spec: KernelSpec, logical: Arrays, everything: Mapping[str, Any]) -> Arrays:
    """Every array argument on the host: inputs packed, the others zero."""
    dtypes = {arg.name: dtype_in(arg.dtype, everything) for arg in spec.args if arg.shape}
    empty = [arg for arg in spec.args if arg.role in ("out", "scratch")]
    zeros = {arg.name: np.zeros(arg.resolve(everything), storage(dtypes[arg.name])) for arg in empty}
    return {**zeros, **{n: np.ascontiguousarray(stored(a, dtypes[n])) for n, a in spec.pack(logical).items()}}


def _loaded(job: LaunchTarget, source: Source, entry: str | None) -> runtime.Kernel:
    return runtime.load(source, entry, defines=job.defines, arch=job.arch)


def _file_launch(job: LaunchTarget, kernel: runtime.Kernel) -> tuple[list[Any], Launch]:
    """The arrays of the `.npz`, on the host and in the kernel's order, and the geometry."""
    given = in_order(kernel.entry, kernel.signature, load_arrays(Path(job.inputs)))
    return kernel.arguments(given), geometry(job.grid, job.block, job.shared)


def _file_call(job: LaunchTarget, kernel: runtime.Kernel) -> Call:
    """On the arrays of the `.npz`."""
    given, launch = _file_launch(job, kernel)
    args = [gpu.to_device(value) if isinstance(value, np.ndarray) else value for value in given]
    return gpu.prepare(gpu.load(kernel.source, kernel.entry, defines=kernel.defines), args, launch)
