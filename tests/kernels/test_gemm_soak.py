"""Endurance: 20,000 GEMMs of random kernels and shapes beside a busy stream, every result checked on the GPU.

The host waits for the device only at the beginning and at the end.
"""

import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import PackedWeight, gpu
from ptxlab.errors import ArgumentError
from ptxlab.kernels.gemm.common import Step, example_channel, example_lqq, example_qoq
from ptxlab.kernels.gemm.ladder import LADDER, why_not
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec, Launch

pytestmark = pytest.mark.gpu

CALLS, SECONDS = 20_000, 300
CASES = 6  # shapes, each with its own weights, per kernel
EXAMPLES = {"qoq": example_qoq, "qoq_channel": example_channel, "lqq": example_lqq}
TOKENS, MOST_ROWS, MOST_CHANNELS = (1, 2, 7, 16, 33, 64, 129, 256), 4096, 4096
COPY_BYTES, COPIES, BATCHES = 128 << 20, 16, 2  # of the busy stream: what a batch copies, and batches in flight

COMPARE = Source.from_text(
    """
extern "C" __global__ void compare(int* y, const int* expected, unsigned size, unsigned long long* wrong) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    if (y[i] != expected[i]) atomicAdd(wrong, 1ull);
    y[i] = 0x7fc0ffee;  // or what a later call does not write would still be right
}
""",
    "<compare>",
)


@dataclass(frozen=True)
class Case:
    """A step of the ladder on one problem, on the device."""

    kernel: str
    sizes: dict[str, int]
    x: Any
    x_sum: Any  # or None
    weight: PackedWeight
    expected: Any  # int32 accumulators
    wrong: Any  # uint64 [1]: elements that were not as expected, so far

    def call(self) -> Any:
        """The accumulators, on the current stream: what the 20,000 calls are calls of."""
        return ptxlab.gemm_w4a8(self.x, weight=self.weight, x_sum=self.x_sum, out_dtype="int32", kernel=self.kernel)

    def check(self, y: Any) -> None:
        """Count wrong elements on the device."""
        blocks = (-(-y.size // 256), 1, 1)
        arguments = [y, self.expected, np.uint32(y.size), self.wrong]
        gpu.launch(gpu.load(COMPARE, "compare"), arguments, Launch(blocks, (256, 1, 1)))

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"


def draw_sizes(spec: KernelSpec, rng: np.random.Generator) -> dict[str, int]:
    """Any sizes that the kernel takes; small ones as often as large ones."""
    while True:
        rows, channels = (int(np.exp2(rng.uniform(0, np.log2(most)))) for most in (MOST_ROWS // 8, MOST_CHANNELS // 32))
        drawn = {"M": int(rng.choice(TOKENS)), "N": 8 * rows, "K": 32 * channels, "g": int(rng.choice((32, 64, 128)))}
        sizes = {symbol: drawn[symbol] for symbol in spec.example_sizes[0]}
        try:
            spec.check_sizes(sizes)
        except ArgumentError:
            continue
        return sizes


def draw_case(step: Step, rng: np.random.Generator) -> Case:
    sizes = draw_sizes(step.spec, rng)
    logical = EXAMPLES[step.scheme](rng, **sizes)
    x, expected = gpu.to_device(logical["x"]), gpu.to_device(step.spec.reference(**logical))
    x_sum = gpu.to_device(logical["x"].sum(axis=1, dtype=np.int32)) if rng.integers(2) else None
    weight = ptxlab.to_device(ptxlab.pack(logical["weight"], step.packing))
    return Case(step.spec.name, sizes, x, x_sum, weight, expected, gpu.to_device(np.zeros(1, np.uint64)))


class BusyStream:
    """A second stream: large copies, and a checked GEMM after each batch of them."""

    def __init__(self, cases: list[Case]) -> None:
        import cupy

        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.target, self.source = (gpu.to_device(np.zeros(COPY_BYTES, np.uint8)) for _ in range(2))
        self.cases = cases
        self.batches: deque[Any] = deque()
        self.calls = 0

    def feed(self, rng: np.random.Generator) -> None:
        """Enqueue another batch if fewer than `BATCHES` are on their way."""
        while self.batches and self.batches[0].done:
            self.batches.popleft()
        if len(self.batches) == BATCHES:
            return
        with self.stream:
            for _ in range(COPIES):
                gpu.copy_bytes(self.target, self.source)
            case = self.cases[rng.integers(len(self.cases))]
            case.check(case.call())
            self.batches.append(self.stream.record())
        self.calls += 1


def memory() -> dict[str, int]:
    """Bytes in use by arrays, held by CuPy's pool, and free on the device; waits for the device."""
    import cupy

    cupy.cuda.Device().synchronize()
    pool = cupy.get_default_memory_pool()
    return {"used": pool.used_bytes(), "held": pool.total_bytes(), "free": cupy.cuda.runtime.memGetInfo()[0]}


def test_twenty_thousand_calls_beside_a_busy_stream() -> None:
    import cupy

    rng = np.random.default_rng(0)
    steps = [step for step in LADDER if why_not(step) is None and step.order == "row_major"]
    cases = [draw_case(step, rng) for step in steps for _ in range(CASES)]
    busy, stream = BusyStream(cases), cupy.cuda.Stream(non_blocking=True)

    first = cases[0]
    first.check(cupy.zeros_like(first.expected) + 0x7FC0FFEE)
    assert int(first.wrong[0]) == first.expected.size, "the check itself notices"
    first.wrong.fill(0)
    cupy.cuda.Device().synchronize()
    for on in (stream, busy.stream):  # compiles, loads, and fills the pool of each stream
        with on:
            for case in cases:
                case.check(case.call())
    before, start = memory(), time.monotonic()

    for done in range(CALLS):
        assert time.monotonic() - start < SECONDS, f"only {done} calls in {SECONDS} s"
        busy.feed(rng)
        with stream:
            case = cases[rng.integers(len(cases))]
            case.check(case.call())

    after = memory()
    assert {str(case): int(case.wrong[0]) for case in cases if int(case.wrong[0])} == {}
    assert busy.calls > CALLS // 1000, "the other stream was busy"
    assert after["used"] == before["used"]
    largest = max(case.expected.nbytes for case in cases)  # the pool may split blocks in another way
    assert after["held"] - before["held"] <= 2 * largest
    if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1":  # or other workers allocate on the device as well
        assert before["free"] - after["free"] <= after["held"] - before["held"]
    seconds = time.monotonic() - start
    print(f"{CALLS} calls of {len(steps)} kernels, {busy.calls} more beside them, in {seconds:.0f} s; {after}")
