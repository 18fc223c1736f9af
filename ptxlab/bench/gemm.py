"""Suite `gemm`: every step of the W4A8 ladder on the matrices of three models, beside its floor and cuBLAS."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from ptxlab import cost, gpu, toolchain
from ptxlab.bench import limits, peers
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.problem import (
    first_tokens,
    launches,
    packed_bytes,
    problem,
    sizes_at,
    source_of,
    steps_of,
    variant,
)
from ptxlab.bench.record import Row
from ptxlab.bench.rows import row_of
from ptxlab.bench.shapes import LAYERS, TOKENS, Layer
from ptxlab.bench.stream import measure_stream
from ptxlab.bench.timing import measure
from ptxlab.errors import ArgumentError
from ptxlab.kernels.gemm.common import Step
from ptxlab.spec import Arrays, evaluate

_REPLAYS = 10


def rows(names: list[str], ceilings: Ceilings, progress: Callable[[str], None]) -> list[Row]:
    """Measure kernels of the family by name, as far as this GPU runs them."""
    steps = steps_of(names)
    if not steps:
        raise ArgumentError("suite", "a step of the GEMM ladder that this GPU runs", ", ".join(names))
    progress("compiling")
    _compile_all(steps)
    measured = [row for layer in LAYERS for row in layer_rows(layer, steps, progress)]
    progress("counting with ncu")
    return limits.with_limits(measured)


def layer_rows(layer: Layer, steps: Sequence[Step], progress: Callable[[str], None]) -> Iterator[Row]:
    """Every step at every number of tokens on one matrix; the peers first."""
    progress(f"{layer}: peers")
    beside = peers.cublas(layer.N, layer.K, TOKENS)
    streams: dict[int, float] = {}
    for step in steps:
        progress(f"{layer}: {step.spec.name}")
        logical = problem(step.spec, layer, max(TOKENS))
        for M in TOKENS:
            sizes = sizes_at(step.spec, layer, M)
            nbytes = packed_bytes(step.spec, sizes)
            if nbytes not in streams:
                streams[nbytes] = measure_stream(nbytes)
            yield point(step, sizes, first_tokens(logical, M), streams[nbytes], beside[M])


def point(step: Step, sizes: dict[str, int], logical: Arrays, stream_us: float, beside: dict[str, float]) -> Row:
    """Time one step at one size. Every result of the timed launches has to be the exact one, bit for bit."""
    spec = step.spec
    timed = launches(step, sizes, logical)
    measured = measure(timed.calls, replays=_REPLAYS)
    operations = int(evaluate(spec.operations, sizes))
    return row_of(
        spec,
        source_of(step),
        "gemm",
        sizes,
        measured,
        floor=cost.gemm_floor(stream_us, operations, gpu.device_info().slug),
        checked=timed.check(logical),
        nbytes=spec.bytes_moved({**sizes, **timed.variant}),
        rate=(operations / measured.us / 1e6, "TOPS"),
        operations=operations,
        peers=beside,
        activations=step.order,
        variant=timed.variant,
        more={
            "stream_us": stream_us,
            "packed_bytes": packed_bytes(spec, sizes),
            "registers": timed.kernel.registers,
            "local_bytes": timed.kernel.local_bytes,
        },
    )


def _compile_all(steps: Sequence[Step]) -> None:
    """Compile every variant that will run, side by side: loading finds them in the cache."""
    arch = gpu.device_info().arch
    variants = {
        (source_of(step), tuple(variant(step.spec, sizes_at(step.spec, layer, M)).items()))
        for step in steps
        if source_of(step).language == "cu"
        for layer in LAYERS
        for M in TOKENS
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda v: toolchain.compile_cuda(v[0], arch, defines=dict(v[1])), variants))
