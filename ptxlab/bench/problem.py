"""One step of the GEMM ladder on one matrix: inputs on the device, launches over rotating weights, exact results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.bench.shapes import GROUP, Layer
from ptxlab.bench.timing import copies_beyond_l2
from ptxlab.errors import BenchmarkError
from ptxlab.expressions import names_in
from ptxlab.kernels.gemm.common import F16, Step
from ptxlab.kernels.gemm.ladder import LADDER, why_not
from ptxlab.sources import Source, of_kernel
from ptxlab.spec import Arrays, KernelSpec, Sizes

_POISON = 0xA5
# Quantised once and repeated. No multiple of a tile in either direction, so that a tile of the wrong place shows.
BLOCK_ROWS, BLOCK_K = 520, 7 * 128


def steps_of(names: Sequence[str]) -> list[Step]:
    """The steps among `names` that this GPU runs, in the order of the ladder."""
    return [s for s in LADDER if s.spec.name in names and s.order == "row_major" and why_not(s) is None]


def source_of(step: Step) -> Source:
    """The source that is measured: the one that a bare name means."""
    return of_kernel(step.spec.name)[0]


def sizes_at(spec: KernelSpec, layer: Layer, M: int) -> dict[str, int]:
    """The spec's sizes; those without groups know no `g`."""
    sizes = {"M": M, "N": layer.N, "K": layer.K, "g": GROUP}
    return {name: size for name, size in sizes.items() if name in spec.symbols}


def variant(spec: KernelSpec, sizes: Sizes) -> dict[str, int]:
    """The constants that the spec chooses, with FP16 results where there is a choice."""
    config = spec.config_for(sizes)
    return {**config, "OUT": F16} if "OUT" in config else config


def packed_bytes(spec: KernelSpec, sizes: Sizes) -> int:
    """Bytes of the packed weight: the matrices among the inputs that know nothing of the tokens."""
    return sum(a.nbytes(sizes) for a in spec.inputs if len(a.shape) > 1 and not _of_tokens(spec, a.name))


def problem(spec: KernelSpec, layer: Layer, M: int) -> Arrays:
    """Logical inputs on the device: a weight that was quantised in a block and repeated; random activations."""
    rng = np.random.default_rng(0)
    known = {"M": 1, "N": BLOCK_ROWS, "K": BLOCK_K, "g": GROUP}
    block = spec.example(rng, **{name: known[name] for name in spec.example_sizes[0]})["weight"]
    return {
        "weight": tiled(_with_arrays(block, gpu.to_device), layer.N, layer.K),
        "x": gpu.to_device(rng.integers(-128, 128, (M, layer.K), np.int8)),
        "x_scale": gpu.to_device(rng.uniform(1e-3, 1e-2, M).astype(np.float32)),
        "bias": gpu.to_device(rng.standard_normal(layer.N, dtype=np.float32)),
    }


def first_tokens(logical: Arrays, M: int) -> Arrays:
    """The same problem with its first M tokens."""
    return {**logical, "x": logical["x"][:M], "x_scale": logical["x_scale"][:M]}


def tiled(weight: Any, N: int, K: int) -> Any:
    """A quantised weight repeated to [N, K]; what is left over at the ends is cut off. NumPy or CuPy arrays."""
    n, k = weight.shape

    def repeated(array: Any) -> Any:
        if array.ndim == 1:
            return np.tile(array, -(-N // n))[:N]
        return np.tile(array, (-(-N // n), -(-K // k)))[:N, : K * array.shape[1] // k].copy()

    return _with_arrays(weight, repeated)


@dataclass(frozen=True)
class Launches:
    """Launches of one step that are ready to be timed, one per copy of the weight.

    Attributes:
        step: the kernel.
        sizes: symbols of its spec.
        variant: the constants it was compiled with.
        kernel: as loaded.
        calls: launch on CuPy's current stream.
        outputs: what each call writes, FP16 [M, N].
    """

    step: Step
    sizes: dict[str, int]
    variant: dict[str, int]
    kernel: gpu.GpuKernel
    calls: list[Callable[[], None]]
    outputs: list[Any]

    def check(self, logical: Arrays) -> str:
        """Hold what every call wrote against the reference of the problem, bit for bit.

        Returns:
            What was checked, in a sentence for the record.

        Raises:
            BenchmarkError: a bit is wrong.
        """
        expected = self.step.spec.reference(**logical, OUT=F16).view(np.uint16)
        if not all(bool((output.view(np.uint16) == expected).all()) for output in self.outputs):
            where = f"{source_of(self.step).label} with {self.variant}"
            raise BenchmarkError(f"{where}: the timed launches gave wrong results at {self.sizes}")
        return f"all {expected.size} results of {len(self.outputs)} launches equal to the reference, bit for bit"


def launches(step: Step, sizes: dict[str, int], logical: Arrays) -> Launches:
    """Prepare launches that find every weight in memory and not in the L2."""
    spec = step.spec
    constants = variant(spec, sizes)
    kernel = gpu.load(source_of(step), spec.name, defines=constants)
    everything = {**sizes, **constants}
    calls, outputs = [], []
    for arrays in _rotating(spec, sizes, logical):
        outputs.append(gpu.empty((sizes["M"], sizes["N"]), np.float16))
        gpu.fill_bytes(outputs[-1], _POISON)
        args = spec.arguments({**arrays, **_scratch(spec, everything), "y": outputs[-1]}, everything)
        calls.append(gpu.prepare(kernel, args, spec.launch(everything)))
    return Launches(step, sizes, constants, kernel, calls, outputs)


def _rotating(spec: KernelSpec, sizes: Sizes, logical: Arrays) -> list[Arrays]:
    """The inputs, as often as it takes for the weights to exceed the L2.

    Activations are shared: in a model the previous kernel has just written them.
    """
    found: list[Arrays] = []
    for _ in range(copies_beyond_l2(packed_bytes(spec, sizes))):
        packed = spec.pack(logical)
        shared = {name: array for name, array in (found[0] if found else {}).items() if _of_tokens(spec, name)}
        found.append({**packed, **shared})
    return found


def _scratch(spec: KernelSpec, sizes: Sizes) -> Arrays:
    """Zeros for what a kernel works in."""
    scratch = [arg for arg in spec.args if arg.role == "scratch"]
    return {arg.name: gpu.to_device(np.zeros(arg.resolve(sizes), str(arg.dtype))) for arg in scratch}


def _of_tokens(spec: KernelSpec, name: str) -> bool:
    return any("M" in names_in(axis) for axis in spec.arg(name).shape)


def _with_arrays(weight: Any, change: Callable[[Any], Any]) -> Any:
    values = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return replace(weight, **{name: change(v) for name, v in values.items() if hasattr(v, "ndim")})
