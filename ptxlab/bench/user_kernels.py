"""Kernels of `FILE.py`: each source over memory at the last sizes of its examples, beside the copy bandwidth."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from ptxlab import gpu
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row, row_of
from ptxlab.bench.suite import Keep, measure_section
from ptxlab.errors import ArgumentError, BenchmarkError, VerificationError
from ptxlab.runtime.launching import allocate_poisoned
from ptxlab.runtime.timing import copies_beyond_l2, measure
from ptxlab.runtime.verify import compare
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec, evaluate
from ptxlab.spec.dtypes import convert_to_dtype, dtype_in, storage
from ptxlab.spec.user_specs import SpecWithSources


def rows(
    specs: Iterable[SpecWithSources], ceilings: Ceilings, progress: Callable[[str], None], keep: Keep = measure_section
) -> Iterator[Row]:
    """Measure every source of every spec."""
    for spec, sources in specs:
        for source in sources:
            progress(source.label)
            yield from keep(source.label, partial(_streaming_rows, spec, source, ceilings))


def _streaming_rows(spec: KernelSpec, source: Source, ceilings: Ceilings) -> list[Row]:
    return [streaming(spec, source, ceilings)]


def streaming(spec: KernelSpec, source: Source, ceilings: Ceilings) -> Row:
    """Measure inputs and outputs in as many copies as exceed the L2.

    The outputs of every copy are compared.
    """
    if not spec.example_sizes:
        raise ArgumentError(f"{spec.name}: example_sizes", "sizes to measure at", "none")
    sizes = dict(spec.example_sizes[-1])
    constants = spec.config_for(sizes)
    sizes_and_constants = {**sizes, **constants}
    logical = spec.example(np.random.default_rng(0), **sizes)
    inputs = {n: convert_to_dtype(a, dtype_in(spec.arg(n).dtype, constants)) for n, a in spec.pack(logical).items()}
    kernel = gpu.load(source, spec.name, defines=constants)
    calls, outputs = [], []
    nbytes = spec.bytes_moved(sizes_and_constants)
    for _ in range(copies_beyond_l2(max(1, nbytes))):
        arrays = {name: gpu.to_device(array) for name, array in inputs.items()}
        for arg in spec.args:
            if arg.role in ("out", "scratch"):
                arrays[arg.name] = allocate_poisoned(
                    arg.resolve(sizes_and_constants), storage(dtype_in(arg.dtype, constants))
                )
        outputs.append({arg.name: arrays[arg.name] for arg in spec.outputs})
        calls.append(gpu.prepare(kernel, spec.arguments(arrays, sizes_and_constants), spec.launch(sizes_and_constants)))
    # What is written again and again is no longer the example.
    is_in_place = any(arg.role == "inout" for arg in spec.args)
    measured = measure(calls)
    for copy_outputs in () if is_in_place else outputs:
        try:
            compare(spec, {name: gpu.to_host(array) for name, array in copy_outputs.items()}, logical, constants)
        except VerificationError as error:
            raise BenchmarkError(f"{source.label}: the timed launches gave wrong results: {error}") from None
    return row_of(
        spec,
        "streaming",
        sizes,
        measured,
        floor=(nbytes / ceilings.copy_tbps / 1e6, "copy"),
        source=source,
        checked="not: it writes in place" if is_in_place else "every copy equal to the reference",
        nbytes=nbytes,
        operations=int(evaluate(spec.operations, sizes_and_constants)),
        variant=dict(constants),
        more={"registers": kernel.registers},
    )
