"""Endurance: 20,000 GEMMs of random kernels and shapes beside a busy stream, every result checked on the GPU.

And that no kernel of the family is left out.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import PackedWeight, gpu
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels import gemm
from ptxlab.lowbit.kernels.gemm import w4a4, w4ax, w8a8
from ptxlab.lowbit.kernels.gemm.common import GemmStep, example_channel, example_lqq, example_qoq
from ptxlab.lowbit.kernels.gemm.f16 import F16
from ptxlab.lowbit.kernels.gemm.ladder import LADDER, why_not
from ptxlab.spec import KernelSpec
from tests.support import soak

CASES = 6  # shapes, each with its own weights, per kernel
EXAMPLES = {"qoq": example_qoq, "qoq_channel": example_channel, "lqq": example_lqq}
BLOCKS = 132  # of a grid that shares tiles out: up to twice as many
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
        """Return the accumulators, on the current stream."""
        return ptxlab.gemm_w4a8(self.x, weight=self.weight, x_sum=self.x_sum, out_dtype="int32", kernel=self.kernel)

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"


def draw_sizes(spec: KernelSpec, rng: np.random.Generator) -> dict[str, int]:
    """Draw sizes that the kernel takes, small ones as often as large ones."""
    while True:
        rows, channels = (
            int(np.exp2(rng.uniform(0, np.log2(limit)))) for limit in (MOST_ROWS // 8, MOST_CHANNELS // 32)
        )
        drawn = {"M": int(rng.choice(TOKENS)), "N": 8 * rows, "K": 32 * channels, "g": int(rng.choice((32, 64, 128)))}
        int8 = int(rng.integers(channels // 4 + 1))  # of the blocks of 128
        drawn |= {"K4": 128 * (channels // 4 - int8), "K8": 128 * int8}
        drawn |= {"outliers": int(rng.choice((0, 64, 128))), "blocks": int(rng.integers(1, 2 * BLOCKS))}
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


BY_SPEC = (*w4a4.SPECS, *w4ax.SPECS, *w8a8.SPECS, F16)
APART = {  # of the family, and why no test here calls it
    "gemm_tile_lqq_sm80": "one tile of 16 x 8, to be looked at in a debugger",
    "gemm_w4a8_grouped_sm90": "in layers of experts: tests/llm/model/test_on_gpu.py",
}


def test_no_kernel_is_left_out() -> None:
    called = {step.spec.name for step in LADDER} | {spec.name for spec in BY_SPEC}
    assert called | {*APART} == {spec.name for spec in gemm.SPECS} and not called & {*APART}


@pytest.mark.default_cases("gemm_w4ax_sm90")
@pytest.mark.parametrize("spec", (w4ax.COMET, w4ax.SM90), ids=lambda spec: spec.name)
def test_a_case_has_the_same_bits_each_time(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator gives the same bits each time, counters and the gaps between outputs included."""
    soak.emulate_launches(monkeypatch)
    sizes = spec.example_sizes[1]
    case = soak.SpecLaunch.of(spec, sizes, np.random.default_rng(0))
    assert np.array_equal(case.call(), case.expected) and np.array_equal(case.call(), case.expected)
    assert [*case.outputs(case.expected)] == [arg.name for arg in spec.outputs]
    assert not np.shares_memory(case.call(), case.call()) and str(case).startswith(f"{spec.name}(M=5, ")


@pytest.mark.long(40)
@pytest.mark.gpu
def test_twenty_thousand_launches_by_spec_beside_a_busy_stream() -> None:
    """The kernels of W4A4, W4Ax, 8 and 16 bits that run here are launched; on Hopper INT4 MMAs are software."""
    rng = np.random.default_rng(0)
    specs = [spec for spec in BY_SPEC if gpu.why_not(spec.arch, exact=spec.exact_arch) is None]
    soak.endure([soak.SpecLaunch.of(spec, draw_sizes(spec, rng), rng) for spec in specs for _ in range(CASES)], rng)


@pytest.mark.long(40)
@pytest.mark.gpu
def test_twenty_thousand_calls_beside_a_busy_stream() -> None:
    rng = np.random.default_rng(0)
    steps = [step for step in LADDER if why_not(step) is None and step.order == "row_major"]
    soak.endure([draw_case(step, rng) for step in steps for _ in range(CASES)], rng)
