"""Endurance: 20,000 GEMMs of random kernels and shapes beside a busy stream, every result checked on the GPU."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import PackedWeight, gpu
from ptxlab.errors import ArgumentError
from ptxlab.kernels.gemm.common import GemmStep, example_channel, example_lqq, example_qoq
from ptxlab.kernels.gemm.ladder import LADDER, why_not
from ptxlab.spec import KernelSpec
from tests.support import soak

pytestmark = pytest.mark.gpu

CASES = 6  # shapes, each with its own weights, per kernel
EXAMPLES = {"qoq": example_qoq, "qoq_channel": example_channel, "lqq": example_lqq}
TOKENS, MOST_ROWS, MOST_CHANNELS = (1, 2, 7, 16, 33, 64, 129, 256), 4096, 4096


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
        """The accumulators, on the current stream."""
        return ptxlab.gemm_w4a8(self.x, weight=self.weight, x_sum=self.x_sum, out_dtype="int32", kernel=self.kernel)

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


def draw_case(step: GemmStep, rng: np.random.Generator) -> Case:
    sizes = draw_sizes(step.spec, rng)
    logical = EXAMPLES[step.scheme](rng, **sizes)
    x, expected = gpu.to_device(logical["x"]), gpu.to_device(step.spec.reference(**logical))
    x_sum = gpu.to_device(logical["x"].sum(axis=1, dtype=np.int32)) if rng.integers(2) else None
    weight = ptxlab.to_device(ptxlab.pack(logical["weight"], step.packing))
    return Case(step.spec.name, sizes, x, x_sum, weight, expected, gpu.to_device(np.zeros(1, np.uint64)))


def test_twenty_thousand_calls_beside_a_busy_stream() -> None:
    rng = np.random.default_rng(0)
    steps = [step for step in LADDER if why_not(step) is None and step.order == "row_major"]
    soak.endure([draw_case(step, rng) for step in steps for _ in range(CASES)], rng)
