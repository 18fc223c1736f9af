"""Suite `emulator`: lane-instructions per second of the emulator, call by call, on this machine's CPU. Needs no GPU.

The time is that of the process on the CPU, user and system: other programs on the machine count little. A call copies
in, binds the code to memory, runs, and copies out; the first one, which also parses and decodes, is not counted.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, TypeVar

import numpy as np

from ptxlab import emulator
from ptxlab.bench.record import Row, row_of
from ptxlab.bench.suite import Keep, Suite, measure_section
from ptxlab.errors import BenchmarkError, VerificationError
from ptxlab.lowbit.kernels.dequant import SPECS
from ptxlab.lowbit.kernels.gemm.ladder import LADDER, fit_tokens
from ptxlab.registry import specs
from ptxlab.runtime import Outcome, run_spec
from ptxlab.runtime.timing import Measured
from ptxlab.runtime.verify import compare
from ptxlab.sources import in_checkout, results_dir, sources_of_kernel
from ptxlab.spec import KernelSpec
from ptxlab.spec.dtypes import convert_to_dtype, dtype_in

LANES = (4096, 65536)
WANTED = 20e6  # lane-instructions per second and core that make the tests of whole kernels bearable
Checks = tuple[str, ...]
ONE_CHECK: tuple[Checks, ...] = ((), ("lanes",))
EVERY_CHECK: tuple[Checks, ...] = ((), tuple(sorted(emulator.CHECKS)))
GEMM = {"M": 64, "N": 128, "K": 512, "g": 128}
ATTENTION = ("attention_kv4_mma_sm80", "attention_kv4_sm90")
TRITON_SIDE = 128  # of three square matrices
_REPEATS = 7
Ran = TypeVar("Ran")


def rows(progress: Callable[[str], None], keep: Keep = measure_section) -> Iterator[Row]:
    """Measure the parts of the suite, each of which is a section."""
    parts = {"dequantisers": dequantiser_rows, "GEMM": gemm_rows, "attention": attention_rows, "Triton": triton_rows}
    for part, measure_part in parts.items():
        yield from keep(part, partial(measure_part, progress))


def dequantiser_rows(progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure dequantisers of 4,096 and 65,536 lanes."""
    for spec in SPECS:
        for lanes in LANES:
            for checks in ONE_CHECK:
                progress(f"{spec.name}: {lanes} lanes")
                yield measure(spec, lanes, checks)


def gemm_rows(progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure the GEMM ladder, with all checks too."""
    for spec in (specs()[name] for name in dict.fromkeys(step.spec.name for step in LADDER)):
        for checks in EVERY_CHECK:
            progress(spec.name)
            yield measure_kernel(
                spec, fit_tokens(spec, {name: size for name, size in GEMM.items() if name in spec.symbols}), checks
            )


def attention_rows(progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure attention, with all checks too."""
    for name in ATTENTION:
        for checks in EVERY_CHECK:
            progress(name)
            yield measure_kernel(specs()[name], dict(specs()[name].example_sizes[0]), checks)


def triton_rows(progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure Triton's matmul, with all checks too."""
    for path in _triton_files():
        for checks in EVERY_CHECK:
            progress(path.stem)
            yield triton_matmul(path, checks)


def measure(spec: KernelSpec, lanes: int, checks: Checks) -> Row:
    """Measure a dequantiser on so many lanes."""
    weights = lanes * (8 if spec.arg("out").dtype == "float16" else 16)
    sizes = {name: {"R": 16, "K": weights // 16, "g": 64}[name] for name in spec.example_sizes[0]}
    return measure_kernel(spec, sizes, checks, lanes=lanes)


def measure_kernel(spec: KernelSpec, sizes: Mapping[str, Any], checks: Checks, **extra_sizes: int) -> Row:
    """Measure any kernel at these sizes; compare every result with the reference."""
    source, logical = sources_of_kernel(spec.name)[0], spec.example(np.random.default_rng(0), **sizes)
    config = spec.config_for(sizes)
    inputs = {
        name: convert_to_dtype(array, dtype_in(spec.arg(name).dtype, config))
        for name, array in spec.pack(logical).items()
    }

    def call() -> Outcome:
        return run_spec(
            spec, source, inputs, sizes=sizes, backend="emulator", checks=checks, config=config, unchecked=True
        )

    def check(outcome: Outcome) -> int:
        outputs = {arg.name: outcome.outputs[arg.name] for arg in spec.outputs}
        try:
            compare(spec, outputs, logical, config)
        except VerificationError as error:
            raise BenchmarkError(f"{source.label}: the timed run gave wrong results: {error}") from None
        return outcome.lane_instructions

    measured, count = time_on_cpu(call, check)
    return row_of(
        spec,
        _measure_name(checks),
        {**sizes, **extra_sizes},
        measured,
        floor=(count / WANTED * 1e6, "wanted"),
        checked="every result equal to the reference, or within its tolerance",
        nbytes=spec.bytes_moved({**sizes, **config}),
        rate=(count / measured.us, "Mlane/s"),
    )


def triton_matmul(path: Path, checks: Checks) -> Row:
    """Measure the matmul that Triton compiled, on small numbers whose sums are exact."""
    n, rng = TRITON_SIDE, np.random.default_rng(0)
    a, b = ((rng.integers(-8, 9, (n, n)) / 8).astype(np.float16) for _ in range(2))
    expected = (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16)
    module, scratch = emulator.parse(path.read_text(encoding="utf-8"), path.name), np.zeros(16, np.uint8)

    c = np.zeros((n, n), np.float16)
    args: list[Any] = [a, b, c, *map(np.int32, (n, n, n)), scratch, scratch]
    grid = n // 64, n // 128

    def check(outcome: emulator.Result) -> int:
        if not np.array_equal(c, expected):
            raise BenchmarkError(f"{path.name}: the timed run gave wrong results")
        c[...] = 0
        return outcome.lane_instructions

    def call() -> emulator.Result:
        return emulator.run(module, None, args, grid=grid, block=128, shared_bytes=49152, checks=checks)

    measured, count = time_on_cpu(call, check)
    return Row(
        kernel=f"triton_{path.stem}",
        source="ptx",
        measure=_measure_name(checks),
        sizes={"M": n, "N": n, "K": n},
        time_us=measured.us,
        fastest_us=measured.fastest,
        slowest_us=measured.slowest,
        rate=count / measured.us,
        rate_unit="Mlane/s",
        bytes=3 * a.nbytes,
        operations=2 * n**3,
        floor_us=count / WANTED * 1e6,
        fraction=count / WANTED * 1e6 / measured.us,
        limit="wanted",
        sm_mhz=0.0,
        checked="every result equal to NumPy's",
    )


def time_on_cpu(call: Callable[[], Ran], check: Callable[[Ran], int]) -> tuple[Measured, int]:
    """Measure the CPU time of a call, the median of several after the first; also return what `check` returns.

    `check` is not timed.
    """
    count, seconds = check(call()), []
    for _ in range(_REPEATS):
        start = process_time()
        run = call()
        seconds.append(process_time() - start)
        check(run)
    seconds.sort()
    return Measured(seconds[_REPEATS // 2] * 1e6, seconds[0] * 1e6, seconds[-1] * 1e6, sm_mhz=0.0), count


def _measure_name(checks: Checks) -> str:
    has_every_check = {*checks} == emulator.CHECKS
    return "emulator" + (" +all" if has_every_check else "".join(f" +{check}" for check in checks))


def _triton_files() -> list[Path]:
    """List Triton's compiled files, which only a checkout has."""
    folder = results_dir().parents[1] / "tests" / "outside" / "triton"
    return sorted(folder.glob("matmul_sm*.ptx")) if in_checkout() else []


SUITE = Suite("emulator", rows, on_gpu=False, keeps=True)
