"""One step of the GEMM ladder on one matrix: inputs on the device, launches over rotating weights, exact results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from ptxlab import gpu
from ptxlab.bench.shapes import GROUP, Layer
from ptxlab.bench.timing import copies_beyond_l2
from ptxlab.errors import BenchmarkError
from ptxlab.expressions import names_in
from ptxlab.kernels.gemm import SPECS
from ptxlab.kernels.gemm.common import F16
from ptxlab.sources import Source, of_kernel
from ptxlab.spec import Arrays, KernelSpec, Sizes

_POISON = 0xA5
# Quantised once and repeated. No multiple of a tile in either direction, so that a tile of the wrong place shows.
BLOCK_ROWS, BLOCK_K = 520, 7 * 128


class Step(NamedTuple):
    """One kernel of the ladder and its source."""

    spec: KernelSpec
    source: Source


def steps_of(names: Sequence[str]) -> list[Step]:
    """The steps among `names` that this GPU runs, in the order of the ladder."""
    wanted = [s for s in SPECS if s.name in names and gpu.why_not(s.arch, exact=s.exact_arch) is None]
    return [Step(spec, of_kernel(spec.name)[0]) for spec in wanted]


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


def activation_order(spec: KernelSpec) -> str:
    """How the activations lie in memory (`layout.activations`)."""
    shape = spec.arg("x").shape
    if len(shape) == 2:
        return "rows"
    return "fragments" if shape[-1] == "512" else "swizzled tiles"


def problem(spec: KernelSpec, layer: Layer, M: int) -> Arrays:
    """Logical inputs on the device: a weight that was quantised in a block and repeated, random activations."""
    rng = np.random.default_rng(0)
    known = {"M": 1, "N": BLOCK_ROWS, "K": BLOCK_K, "g": GROUP}
    block = spec.example(rng, **{name: known[name] for name in spec.example_sizes[0]})["weight"]
    x = rng.integers(-128, 128, (M, layer.K), np.int8)
    return {"weight": tiled(_with_arrays(block, gpu.to_device), layer.N, layer.K), "x": gpu.to_device(x)}


def tiled(weight: Any, N: int, K: int) -> Any:
    """A quantised weight repeated to [N, K]; what is left over at the ends is cut off. NumPy or CuPy arrays."""
    n, k = weight.shape

    def repeated(array: Any) -> Any:
        if array.ndim == 1:
            return np.tile(array, -(-N // n))[:N]
        return np.tile(array, (-(-N // n), -(-K // k)))[:N, : K * array.shape[1] // k].copy()

    return _with_arrays(weight, repeated)


def scaled(accumulators: Any, x_scale: Any, w_scale: Any, bias: Any) -> Any:
    """The epilogue as every step computes it: FP32, each operation rounded, then once to FP16."""
    return (accumulators.astype(np.float32) * x_scale[:, None] * w_scale + bias).astype(np.float16)


@dataclass(frozen=True)
class Launches:
    """Launches of one step that are ready to be timed, one per copy of the weight.

    Attributes:
        step: the kernel.
        sizes: symbols of its spec.
        variant: the constants it was compiled with.
        kernel: as loaded.
        calls: launch on CuPy's current stream.
        arguments: of the first call, by name.
        outputs: what each call writes, FP16 [M, N].
    """

    step: Step
    sizes: dict[str, int]
    variant: dict[str, int]
    kernel: gpu.GpuKernel
    calls: list[Callable[[], None]]
    arguments: Arrays
    outputs: list[Any]

    def check(self, accumulators: Any) -> str:
        """Hold what every call wrote against the exact accumulators, scaled, bit for bit.

        Returns:
            What was checked, in a sentence for the record.

        Raises:
            BenchmarkError: a bit is wrong.
        """
        expected = scaled(accumulators, *(self.arguments[name] for name in ("x_scale", "w_scale", "bias")))
        bits = expected.view(np.uint16)
        if not all(bool((output.view(np.uint16) == bits).all()) for output in self.outputs):
            label = self.step.source.label
            raise BenchmarkError(f"{label}: the timed launches gave wrong results at {self.sizes}, {self.variant}")
        return f"all {bits.size} results of {len(self.outputs)} launches equal to the reference, bit for bit"


def launches(step: Step, sizes: dict[str, int], logical: Arrays) -> Launches:
    """Prepare launches that find every weight in memory and not in the L2."""
    spec, source = step
    constants = variant(spec, sizes)
    kernel = gpu.load(source, spec.name, defines=constants)
    geometry = spec.launch({**sizes, **constants})
    calls, outputs, rotating = [], [], _rotating(spec, sizes, logical)
    for arrays in rotating:
        outputs.append(gpu.empty((sizes["M"], sizes["N"]), np.float16))
        gpu.fill_bytes(outputs[-1], _POISON)
        args = _in_launch_order(spec, {**sizes, **constants}, {**arrays, "y": outputs[-1]})
        calls.append(gpu.prepare(kernel, args, geometry))
    return Launches(step, sizes, constants, kernel, calls, rotating[0], outputs)


def _rotating(spec: KernelSpec, sizes: Sizes, logical: Arrays) -> list[Arrays]:
    """The arguments, as often as it takes to exceed the L2.

    Activations and their scales are shared: in a model the previous kernel has just written them.
    """
    rng = np.random.default_rng(1)
    scales = {
        "x_scale": gpu.to_device(rng.uniform(1e-3, 1e-2, sizes["M"]).astype(np.float32)),
        "bias": gpu.to_device(rng.standard_normal(sizes["N"], dtype=np.float32)),
    }
    found: list[Arrays] = []
    for _ in range(copies_beyond_l2(packed_bytes(spec, sizes))):
        packed = {**spec.pack(logical), **scales}
        shared = {name: array for name, array in (found[0] if found else {}).items() if _of_tokens(spec, name)}
        found.append({**packed, **shared})
    return found


def _in_launch_order(spec: KernelSpec, sizes: Sizes, arrays: Arrays) -> list[Any]:
    """Everything, scratch zeroed; `sizes` has the constants of the variant too."""
    kinds = [arg for arg in spec.args if arg.role == "scratch"]
    scratch = {arg.name: gpu.to_device(np.zeros(arg.resolve(sizes), str(arg.dtype))) for arg in kinds}
    return spec.arguments({**scratch, **arrays}, sizes)


def _of_tokens(spec: KernelSpec, name: str) -> bool:
    return any("M" in names_in(axis) for axis in spec.arg(name).shape)


def _with_arrays(weight: Any, change: Callable[[Any], Any]) -> Any:
    values = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return replace(weight, **{name: change(v) for name, v in values.items() if hasattr(v, "ndim")})
