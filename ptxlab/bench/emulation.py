"""Suite `emulator`: lane-instructions per second of the emulator, end to end, on this machine's CPU. Needs no GPU."""

from collections.abc import Callable, Iterator
from time import perf_counter

import numpy as np

from ptxlab import emulator
from ptxlab.bench.record import Row, row_of
from ptxlab.bench.timing import Measured
from ptxlab.errors import BenchmarkError
from ptxlab.kernels.dequant import SPECS
from ptxlab.sources import of_kernel
from ptxlab.spec import KernelSpec

LANES = (4096, 65536)
WANTED = 20e6  # lane-instructions per second and core that make the tests of whole kernels bearable
_REPEATS = 7


def rows(progress: Callable[[str], None]) -> Iterator[Row]:
    """Every dequantiser, 4,096 and 65,536 lanes, without checks and with the lane check."""
    for spec in SPECS:
        for lanes in LANES:
            for checks in ((), ("lanes",)):
                progress(f"{spec.name}: {lanes} lanes")
                yield measure(spec, lanes, checks)


def measure(spec: KernelSpec, lanes: int, checks: tuple[str, ...]) -> Row:
    """Parse, copy in, run, copy out; the median of several runs, each compared with the reference."""
    weights = lanes * (8 if spec.arg("out").dtype == "float16" else 16)
    sizes = {name: {"R": 16, "K": weights // 16, "g": 64}[name] for name in spec.example_sizes[0]}
    source = of_kernel(spec.name)[0]
    logical = spec.example(np.random.default_rng(0), **sizes)
    packed, launch = spec.pack(logical), spec.launch(sizes)
    seconds = []
    for _ in range(_REPEATS):
        out = np.empty(spec.arg("out").resolve(sizes), str(spec.arg("out").dtype))
        arrays = {**packed, "out": out}
        args = spec.arguments(arrays, sizes)
        start = perf_counter()
        module = emulator.parse(source.text, source.path)
        result = emulator.run(module, spec.name, args, grid=launch.grid, block=launch.block, checks=checks)
        seconds.append(perf_counter() - start)
        if out.tobytes() != spec.reference(**logical).tobytes():
            raise BenchmarkError(f"{source.label}: the timed run gave wrong results")
    seconds.sort()
    median = seconds[_REPEATS // 2]
    return row_of(
        spec,
        "emulator" + "".join(f" +{check}" for check in checks),
        {**sizes, "lanes": lanes},
        Measured(median * 1e6, seconds[0] * 1e6, seconds[-1] * 1e6, sm_mhz=0.0),
        floor=(result.lane_instructions / WANTED * 1e6, "wanted"),
        checked="every weight equal to the reference, every run",
        nbytes=spec.bytes_moved(sizes),
        rate=(result.lane_instructions / median / 1e6, "Mlane/s"),
    )
