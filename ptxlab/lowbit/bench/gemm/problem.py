"""A GEMM on one matrix: inputs on the device, launches over rotating weights, exact results."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import BenchmarkError
from ptxlab.lowbit.bench.shapes import GROUP, Layer
from ptxlab.lowbit.kernels.gemm import STEPS
from ptxlab.lowbit.kernels.gemm.common import F16, GemmStep
from ptxlab.lowbit.kernels.gemm.ladder import LADDER, why_not
from ptxlab.lowbit.kernels.gemm.strips_tiles import SMS
from ptxlab.lowbit.quant.tiled import BLOCK_K, BLOCK_ROWS, repeat_to_shape, with_arrays
from ptxlab.runtime.launching import Launches, allocate_poisoned, prepare_launches
from ptxlab.runtime.timing import copies_beyond_l2
from ptxlab.sources import Source, sources_of_kernel
from ptxlab.spec import Arrays, KernelSpec, Sizes
from ptxlab.spec.expressions import names_in

OUTLIERS = 128  # channels of Atom's weights that are INT8
INT8_BLOCKS = 5  # one block of COMET's activations in so many is INT8, rounded down, but at least one
_OF_TOKENS = ("x", "x_scale", "x_sum", "rows")  # logical inputs that are no part of the weight; nor is the bias


def steps_of(names: Sequence[str]) -> list[GemmStep]:
    """List the steps of the ladder among `names` that this GPU runs, in the ladder's order."""
    return [step for step in LADDER if step.spec.name in names and step.spec in STEPS and why_not(step) is None]


def source_of(step: GemmStep) -> Source:
    """Return the source that is measured: the one that a bare name means."""
    return sources_of_kernel(step.spec.name)[0]


def sizes_at(spec: KernelSpec, layer: Layer, M: int, group: int = GROUP, rows: int = 1) -> dict[str, int]:
    """Return the spec's sizes: a spec without groups has no `g`, and only tiles of activations have `rows`.

    Some of W4A4's channels are outliers; K then counts the others alone. Some of W4Ax's blocks are INT8. Tiles that are
    shared out go to as many blocks of the grid as an H200 has SMs.
    """
    outliers = OUTLIERS if "outliers" in spec.symbols else 0
    K8 = max(1, layer.K // 128 // INT8_BLOCKS) * 128
    sizes = {"M": M, "N": layer.N, "K": layer.K - outliers, "outliers": outliers, "g": group, "rows": rows}
    sizes |= {"K4": layer.K - K8, "K8": K8, "blocks": SMS}
    return {name: size for name, size in sizes.items() if name in spec.symbols}


def variant(spec: KernelSpec, sizes: Sizes, sums: bool = True) -> dict[str, int]:
    """Return the constants that the spec chooses.

    If there is a choice, results are FP16, and `sums` decides if there are token sums.
    """
    options = {"OUT": F16, "SIGNED": int(not sums)}
    config = spec.config_for(sizes)
    return {**config, **{name: setting for name, setting in options.items() if name in config}}


def packed_bytes(spec: KernelSpec, sizes: Sizes) -> int:
    """Count the bytes of the packed weight: the matrices among the inputs that do not depend on the tokens."""
    return sum(a.nbytes(sizes) for a in spec.inputs if len(a.shape) > 1 and not _of_tokens(spec, a.name))


def problem(spec: KernelSpec, layer: Layer, M: int, group: int = GROUP, seed: int = 0) -> Arrays:
    """Draw logical inputs on the device: a weight, quantised in a block and repeated, and random activations."""
    return {**weights(spec, layer, group, seed), **tokens(layer, M, seed)}


def weights(spec: KernelSpec, layer: Layer, group: int = GROUP, seed: int = 0) -> Arrays:
    """Draw the logical inputs that do not depend on the tokens."""
    rng = np.random.default_rng(seed)
    block_sizes = {"M": 1, "N": BLOCK_ROWS, "K": BLOCK_K, "g": group}
    block = spec.example(rng, **{name: block_sizes[name] for name in spec.example_sizes[0]})
    parts = {name: part for name, part in block.items() if name not in (*_OF_TOKENS, "bias")}
    repeated_parts = {
        name: repeat_to_shape(with_arrays(part, gpu.to_device), layer.N, layer.K) for name, part in parts.items()
    }
    return {**repeated_parts, "bias": gpu.to_device(rng.standard_normal(layer.N, dtype=np.float32))}


def tokens(layer: Layer, M: int, seed: int = 0) -> Arrays:
    """Draw random activations [M, K] with their scales."""
    rng = np.random.default_rng(seed)
    return {
        "x": gpu.to_device(rng.integers(-128, 128, (M, layer.K), np.int8)),
        "x_scale": gpu.to_device(rng.uniform(1e-3, 1e-2, M).astype(np.float32)),
    }


def first_tokens(logical: Arrays, M: int) -> Arrays:
    """Return the same problem with its first M tokens."""
    first_rows = {
        name: with_arrays(part, lambda array: array[:M]) for name, part in logical.items() if name.startswith("x")
    }
    return {**logical, **first_rows}


def expected_bits(spec: KernelSpec, logical: Arrays) -> Any:
    """Compute the bits of the reference's FP16 results, u16 [M, N], on the device.

    The input `rows` is left out, as it says only how activations lie.
    """
    inputs = {name: array for name, array in logical.items() if name != "rows"}
    return spec.expected(inputs, {"OUT": F16})["y"].view(np.uint16)


class GemmLaunches(Launches):
    """Launches of one step, one per copy of the weight; `outputs` is a list of f16 [M, N]."""

    def check(self, right: Any) -> str:
        """Hold what every call wrote against the right bits, u16 [M, N] (`expected_bits`).

        Returns:
            What was checked, in a sentence for the record.

        Raises:
            BenchmarkError: a bit is wrong.
        """
        if not all(bool((output.view(np.uint16) == right).all()) for output in self.outputs):
            label = f"{sources_of_kernel(self.spec.name)[0].label} with {self.variant}"
            raise BenchmarkError(f"{label}: the timed launches gave wrong results at {self.sizes}")
        return f"all {right.size} results of {len(self.outputs)} launches equal to the reference, bit for bit"


def launches(
    step: GemmStep,
    sizes: dict[str, int],
    logical: Arrays,
    *,
    sums: bool = True,
    copies: int | None = None,
    programmatic: bool = False,
    constants: Sizes | None = None,
) -> GemmLaunches:
    """Prepare launches that find every weight in memory and not in the L2.

    Args:
        step: the kernel.
        sizes: symbols of its spec.
        logical: inputs on the device, with `rows` where the activations lie in tiles.
        sums: whether a kernel that does without token sums is given them all the same.
        copies: of the weight, one launch each; by default as many as exceed the L2.
        programmatic: a launch may begin while the one before it still runs, where the kernel waits for that by itself.
        constants: those of another variant than the spec chooses.
    """
    spec = step.spec
    constants = dict(constants or variant(spec, sizes, sums))
    everything, outputs = {**sizes, **constants}, []
    scratch = _scratch(spec, everything)  # of all launches: one follows the other

    def arrays_of_copies() -> Iterator[Arrays]:
        for arrays in _pack_copies(spec, logical, copies or copies_beyond_l2(packed_bytes(spec, sizes))):
            outputs.append(allocate_poisoned((sizes["M"], sizes["N"]), np.float16))
            yield {**arrays, **scratch, "y": outputs[-1]}

    kernel, calls = prepare_launches(spec, sizes, constants, arrays_of_copies(), programmatic=programmatic)
    return GemmLaunches(spec, sizes, constants, kernel, calls, outputs)


def _pack_copies(spec: KernelSpec, logical: Arrays, copies: int) -> list[Arrays]:
    """Pack the inputs and copy them to `copies` in all.

    Activations are shared: in a model the previous kernel has just written them.
    """
    with gpu.NamedRange(f"pack {spec.name}"):
        packed_arrays = spec.pack(logical)
    copied_names = [name for name in packed_arrays if not _of_tokens(spec, name)]
    return [
        packed_arrays,
        *({**packed_arrays, **{name: packed_arrays[name].copy() for name in copied_names}} for _ in range(copies - 1)),
    ]


def _scratch(spec: KernelSpec, sizes: Sizes) -> Arrays:
    """Allocate zeros for a kernel's scratch arguments."""
    scratch = [arg for arg in spec.args if arg.role == "scratch"]
    return {arg.name: gpu.zeros(arg.resolve(sizes), str(arg.dtype)) for arg in scratch}


def _of_tokens(spec: KernelSpec, name: str) -> bool:
    return any("M" in names_in(axis) for axis in spec.arg(name).shape)
