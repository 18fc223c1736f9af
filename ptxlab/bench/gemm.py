"""Suite `gemm`: every step of the W4A8 ladder on the matrices of three models, beside its floor and cuBLAS."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from ptxlab import cost, gpu, toolchain
from ptxlab.bench import peers
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row
from ptxlab.bench.rows import row_of
from ptxlab.bench.shapes import GROUP, LAYERS, TOKENS, Layer
from ptxlab.bench.stream import measure_stream
from ptxlab.bench.timing import copies_beyond_l2, measure
from ptxlab.errors import BenchmarkError
from ptxlab.expressions import names_in
from ptxlab.kernels.gemm import SPECS
from ptxlab.kernels.gemm.common import F16
from ptxlab.sources import Source, of_kernel
from ptxlab.spec import Arrays, KernelSpec, Sizes, evaluate

_REPLAYS = 10
_POISON = 0xA5
# Quantised once and repeated. No multiple of a tile in either direction, so that a tile of the wrong place shows.
_BLOCK_ROWS, _BLOCK_K = 520, 7 * 128


class Step(NamedTuple):
    """One kernel of the ladder and its source."""

    spec: KernelSpec
    source: Source


def rows(names: list[str], ceilings: Ceilings, progress: Callable[[str], None]) -> list[Row]:
    """Measure kernels of the family by name, as far as this GPU runs them."""
    steps = steps_of(names)
    progress("compiling")
    compile_all(steps)
    return [row for layer in LAYERS for row in layer_rows(layer, steps, progress)]


def steps_of(names: Sequence[str]) -> list[Step]:
    """The steps among `names` that this GPU runs, in the order of the ladder."""
    wanted = [s for s in SPECS if s.name in names and gpu.why_not(s.arch, exact=s.exact_arch) is None]
    return [Step(spec, of_kernel(spec.name)[0]) for spec in wanted]


def layer_rows(layer: Layer, steps: Sequence[Step], progress: Callable[[str], None]) -> Iterator[Row]:
    """Every step at every number of tokens on one matrix; the peers first."""
    progress(f"{layer}: peers")
    beside = peers.cublas(layer.N, layer.K, TOKENS)
    streams: dict[int, float] = {}
    for step in steps:
        progress(f"{layer}: {step.spec.name}")
        logical = problem(step.spec, layer, max(TOKENS))
        accumulators = step.spec.reference(**logical)
        for M in TOKENS:
            sizes = sizes_at(step.spec, layer, M)
            nbytes = packed_bytes(step.spec, sizes)
            if nbytes not in streams:
                streams[nbytes] = measure_stream(nbytes)
            first = {**logical, "x": logical["x"][:M]}
            yield point(step, sizes, first, accumulators[:M], streams[nbytes], beside[M])


def sizes_at(spec: KernelSpec, layer: Layer, M: int) -> dict[str, int]:
    """The spec's sizes; those without groups know no `g`."""
    sizes = {"M": M, "N": layer.N, "K": layer.K, "g": GROUP}
    return {name: size for name, size in sizes.items() if name in spec.symbols}


def variant(spec: KernelSpec, sizes: Sizes) -> dict[str, int]:
    """The constants that the spec chooses, with FP16 results."""
    return {**spec.config_for(sizes), "OUT": F16}


def compile_all(steps: Sequence[Step]) -> None:
    """Compile every variant that will run, side by side: loading finds them in the cache."""
    arch = gpu.device_info().arch
    variants = {
        (step.source, tuple(variant(step.spec, sizes_at(step.spec, layer, M)).items()))
        for step in steps
        if step.source.language == "cu"
        for layer in LAYERS
        for M in TOKENS
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda v: toolchain.compile_cuda(v[0], arch, defines=dict(v[1])), variants))


def problem(spec: KernelSpec, layer: Layer, M: int) -> Arrays:
    """Logical inputs on the device: a weight that was quantised in a block and repeated, random activations."""
    rng = np.random.default_rng(0)
    known = {"M": 1, "N": _BLOCK_ROWS, "K": _BLOCK_K, "g": GROUP}
    block = spec.example(rng, **{name: known[name] for name in spec.example_sizes[0]})["weight"]
    x = rng.integers(-128, 128, (M, layer.K), np.int8)
    return {"weight": tiled(on_device(block), layer.N, layer.K), "x": gpu.to_device(x)}


def on_device(weight: Any) -> Any:
    """The same weight with its arrays on the device."""
    return _with_arrays(weight, gpu.to_device)


def tiled(weight: Any, N: int, K: int) -> Any:
    """A quantised weight repeated to [N, K]; what is left over at the ends is cut off. NumPy or CuPy arrays."""
    n, k = weight.shape

    def repeated(array: Any) -> Any:
        if array.ndim == 1:
            return np.tile(array, -(-N // n))[:N]
        return np.tile(array, (-(-N // n), -(-K // k)))[:N, : K * array.shape[1] // k].copy()

    return _with_arrays(weight, repeated)


def _with_arrays(weight: Any, change: Callable[[Any], Any]) -> Any:
    values = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return replace(weight, **{name: change(v) for name, v in values.items() if hasattr(v, "ndim")})


def packed_bytes(spec: KernelSpec, sizes: Sizes) -> int:
    """Bytes of the packed weight: the matrices among the inputs that know nothing of the tokens."""
    return sum(a.nbytes(sizes) for a in spec.inputs if len(a.shape) > 1 and not _of_tokens(spec, a.name))


def _of_tokens(spec: KernelSpec, name: str) -> bool:
    return any("M" in names_in(axis) for axis in spec.arg(name).shape)


def rotated(spec: KernelSpec, sizes: Sizes, logical: Arrays) -> list[Arrays]:
    """The arguments on the device, as often as it takes to find every weight in memory and not in the L2.

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


def scaled(accumulators: Any, x_scale: Any, w_scale: Any, bias: Any) -> Any:
    """The epilogue as every step computes it: FP32, each operation rounded, then once to FP16."""
    return (accumulators.astype(np.float32) * x_scale[:, None] * w_scale + bias).astype(np.float16)


def point(
    step: Step, sizes: dict[str, int], logical: Arrays, accumulators: Any, stream_us: float, beside: dict[str, float]
) -> Row:
    """Time one step at one size and hold every result of the timed launches against the exact one, bit for bit."""
    spec, source = step
    constants = variant(spec, sizes)
    kernel = gpu.load(source, spec.name, defines=constants if source.language == "cu" else {})
    geometry = spec.launch({**sizes, **constants})
    calls, outputs, arguments = [], [], rotated(spec, sizes, logical)
    for arrays in arguments:
        outputs.append(gpu.empty((sizes["M"], sizes["N"]), np.float16))
        gpu.fill_bytes(outputs[-1], _POISON)
        calls.append(
            gpu.prepare(kernel, launch_args(spec, {**sizes, **constants}, {**arrays, "y": outputs[-1]}), geometry)
        )
    measured = measure(calls, replays=_REPLAYS)
    expected = scaled(accumulators, *(arguments[0][name] for name in ("x_scale", "w_scale", "bias")))
    bits = expected.view(np.uint16)
    if not all(bool((output.view(np.uint16) == bits).all()) for output in outputs):
        raise BenchmarkError(f"{source.label}: the timed launches gave wrong results at {sizes}")
    operations = int(evaluate(spec.operations, sizes))
    return row_of(
        spec,
        source,
        "gemm",
        sizes,
        measured,
        floor=cost.gemm_floor(stream_us, operations, gpu.device_info().slug),
        checked=f"all {expected.size} results of {len(outputs)} launches equal to the reference, bit for bit",
        nbytes=spec.bytes_moved({**sizes, **constants}),
        rate=(operations / measured.us / 1e6, "TOPS"),
        operations=operations,
        peers=beside,
        activations=activation_order(spec),
        variant=constants,
        more={
            "stream_us": stream_us,
            "packed_bytes": packed_bytes(spec, sizes),
            "registers": kernel.registers,
            "local_bytes": kernel.local_bytes,
        },
    )


def launch_args(spec: KernelSpec, sizes: Sizes, arrays: Arrays) -> list[Any]:
    """Everything in launch order, scratch zeroed; `sizes` has the constants of the variant too."""
    scratch = {
        a.name: gpu.to_device(np.zeros(a.resolve(sizes), str(a.dtype))) for a in spec.args if a.role == "scratch"
    }
    return spec.arguments({**scratch, **arrays}, sizes)


def activation_order(spec: KernelSpec) -> str:
    """How the activations lie in memory (`layout.activations`)."""
    shape = spec.arg("x").shape
    if len(shape) == 2:
        return "rows"
    return "fragments" if shape[-1] == "512" else "swizzled tiles"
