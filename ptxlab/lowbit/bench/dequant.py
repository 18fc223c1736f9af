"""Suite `dequant`: every dequantiser streaming through device memory, and its word alone in registers."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ptxlab import emulator, gpu, sass, toolchain
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row, row_of
from ptxlab.bench.suite import Keep, Suite, measure_section
from ptxlab.errors import BenchmarkError
from ptxlab.lowbit.kernels.dequant import SPECS
from ptxlab.runtime.launching import allocate_poisoned
from ptxlab.runtime.timing import copies_beyond_l2, measure
from ptxlab.sass import harness
from ptxlab.sources import Source, sources_of_kernel
from ptxlab.spec import Arrays, KernelSpec, Launch, evaluate

SIZES = {"R": 16384, "K": 16384, "g": 128}
_DISTINCT_ROWS = 256  # quantised once and repeated: the addresses differ, and that is what memory sees

_THREADS = 256
_BLOCKS_PER_SM = 4
_LOOP_CLOCKS = 2e6  # one launch in registers lasts about as many SM clocks
_CHECKED_THREADS, _CHECKED_ITERATIONS = 64, 3


def rows(
    names: list[str], ceilings: Ceilings, progress: Callable[[str], None], keep: Keep = measure_section
) -> Iterator[Row]:
    """Measure kernels of the family by name, all their sources; a kernel is a section."""
    for spec in SPECS:
        if spec.name in names:
            yield from keep(spec.name, partial(kernel_rows, spec, ceilings, progress))


def kernel_rows(spec: KernelSpec, ceilings: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure all sources of a kernel, PTX in registers too."""
    rng = np.random.default_rng(0)
    sizes = {name: SIZES[name] for name in spec.example_sizes[0]}
    logical = spec.example(rng, **{**sizes, "R": _DISTINCT_ROWS})
    for source in sources_of_kernel(spec.name):
        progress(f"{source.label}: streaming")
        yield streaming(spec, source, sizes, logical, ceilings)
        if source.language == "ptx":
            progress(f"{source.label}: in registers")
            yield in_registers(spec, source, rng)


def streaming(spec: KernelSpec, source: Source, sizes: dict[str, int], logical: Arrays, ceilings: Ceilings) -> Row:
    """Measure a dequantiser from memory to memory at `sizes`, and check every result.

    `logical` are distinct rows, repeated to fill the sizes.
    """
    repeats = sizes["R"] // len(logical["q4"])
    nbytes = spec.bytes_moved(sizes)
    packed_inputs = {n: np.tile(a, (repeats, *[1] * (a.ndim - 1))) for n, a in spec.pack(logical).items()}
    kernel = gpu.load(source, spec.name, defines=spec.configs[0])
    calls, outputs = [], []
    for _ in range(copies_beyond_l2(nbytes)):
        arrays = {n: gpu.to_device(a) for n, a in packed_inputs.items()}
        for arg in spec.outputs:
            arrays[arg.name] = allocate_poisoned(arg.resolve(sizes), arg.dtype)
            outputs.append(arrays[arg.name])
        args = spec.arguments(arrays, sizes)
        calls.append(gpu.prepare(kernel, args, spec.launch(sizes)))
    measured = measure(calls)

    expected = spec.reference(**logical).view(np.uint8)
    for output in outputs:
        got = gpu.to_host(output).view(np.uint8).reshape(repeats, *expected.shape)
        if not all((copy_output == expected).all() for copy_output in got):
            raise BenchmarkError(f"{source.label}: the timed launches gave wrong results")
    return row_of(
        spec,
        "streaming",
        sizes,
        measured,
        floor=(nbytes / ceilings.copy_tbps / 1e6, "copy"),
        source=source,
        checked=f"all {sizes['R'] * sizes['K']} weights equal to the reference",
        operations=int(evaluate(spec.operations, sizes)),
        config=dict(spec.configs[0]),
        more={"registers": kernel.registers},
    )


def in_registers(spec: KernelSpec, source: Source, rng: np.random.Generator) -> Row:
    """Measure the marked word in a loop over registers, beside the limit of the pipes for its machine code."""
    device = gpu.device_info()
    loop = harness.looping_harness(source)
    word = harness.word_of(source)
    if loop is None or word is None:
        raise BenchmarkError(f"{source.label}: no word is marked (`// @begin word`)")
    image = toolchain.assemble(loop, device.arch)
    body = sass.loop_of(sass.parse(toolchain.disassemble(image))[harness.LOOPING])
    per_lane, pipe = sass.pipe_limit(sass.pipe_counts(body))  # clocks of an SM per lane and round
    kernel = gpu.load_image(loop, image, harness.LOOPING)

    threads = device.sms * _BLOCKS_PER_SM * _THREADS
    clocks_per_round = per_lane * _BLOCKS_PER_SM * _THREADS
    iterations = max(1, round(_LOOP_CLOCKS / clocks_per_round))
    words = rng.integers(0, 2**32, (threads, harness.LOOP_WORDS), np.uint32)
    shared_words = rng.integers(0, 2**32, (threads, max(1, len(word.shared))), np.uint32)
    _check_loop(kernel, loop, words[:_CHECKED_THREADS], shared_words[:_CHECKED_THREADS])

    arrays = [gpu.to_device(words), gpu.to_device(shared_words), gpu.empty(words.shape, words.dtype)]
    geometry = Launch((threads // _THREADS, 1, 1), (_THREADS, 1, 1))
    measured = measure([gpu.prepare(kernel, [*arrays, np.uint32(iterations)], geometry)])
    weights = 8 * words.size * iterations
    counts = sass.count_per_8_weights(source, device.arch) or {}
    return row_of(
        spec,
        "registers",
        {},
        measured,
        floor=(iterations * clocks_per_round / measured.sm_mhz, pipe),
        source=source,
        checked=f"{_CHECKED_THREADS} threads, {_CHECKED_ITERATIONS} rounds equal to the emulator",
        nbytes=0,
        rate=(weights / (measured.us * measured.sm_mhz * device.sms), "w/clk/SM"),
        more={
            "limit_with_harness": 8 * harness.LOOP_WORDS / per_lane,
            "limit_of_word": 8 / sass.pipe_limit(sass.by_pipe(counts))[0],
            "alu_per_8": sum(counts.values()),
            "instructions_per_8_with_harness": len(body) / harness.LOOP_WORDS,
            "registers": kernel.registers,
            "iterations": iterations,
        },
    )


def _check_loop(kernel: gpu.GpuKernel, loop: Source, words: np.ndarray, shared: np.ndarray) -> None:
    """Run a few rounds of the loop on the GPU and in the emulator, and compare."""
    outputs = [np.zeros_like(words), np.zeros_like(words)]
    iterations = np.uint32(_CHECKED_ITERATIONS)
    gpu.launch(kernel, [words, shared, outputs[0], iterations], Launch((1, 1, 1), (len(words), 1, 1)))
    module = emulator.parse(loop.text, loop.path)
    args: list[np.ndarray | np.generic] = [words.copy(), shared.copy(), outputs[1], iterations]
    emulator.run(module, harness.LOOPING, args, grid=(1, 1, 1), block=(len(words), 1, 1))
    if (outputs[0] != outputs[1]).any():
        raise BenchmarkError(f"{loop.path}: GPU and emulator differ")


SUITE = Suite("dequant", rows, keeps=True)
