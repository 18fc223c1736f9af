"""`Problems`: the inputs that a family's kernels are profiled, swept and recorded on; a family may register its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ptxlab import registry
from ptxlab.runtime.launching import Launches
from ptxlab.spec import Arrays, KernelSpec

Shape = Mapping[str, Any]  # sizes as a command line gives them


@dataclass(frozen=True)
class SizedProblem:
    """Inputs of one kernel, on the device.

    Attributes:
        chosen: the constants that the spec chooses.
        launches: prepares launches of the variant with these constants.
        check: raises BenchmarkError unless what such launches wrote is right.
    """

    chosen: dict[str, int]
    launches: Callable[[dict[str, int]], Launches]
    check: Callable[[Any], object]


@dataclass(frozen=True)
class Problems:
    """A family's problems. Without a family's own: the last example of the spec.

    Attributes:
        usual_sizes: (spec, backend) -> the sizes of a problem that says something of the kernel.
        check_sizes: (spec, sizes) -> None; raises ArgumentError for sizes that break a rule of the kernel.
        spec_sizes: (spec, sizes, backend) -> every symbol of the spec.
        example: (spec, rng, sizes, every symbol) -> logical inputs.
        sized: (spec, sizes, copies) -> the problem on the device, in as many copies, by default as exceed the L2; None
            of a kernel that has none but its example.
        weights: (sizes) -> how many weights, or elements of a cache, they speak of; None where that says nothing.
    """

    usual_sizes: Callable[[KernelSpec, str], dict[str, Any]]
    check_sizes: Callable[[KernelSpec, Shape], None]
    spec_sizes: Callable[[KernelSpec, Shape, str], dict[str, Any]]
    example: Callable[[KernelSpec, np.random.Generator, Shape, Shape], Arrays]
    sized: Callable[[KernelSpec, Shape, int | None], SizedProblem | None]
    weights: Callable[[Shape], int | None]


def weights_of(sizes: Shape) -> int | None:
    """Count the weights of a matrix, N x K or R x K; None for sizes of neither."""
    for symbols in (("N", "K"), ("R", "K")):
        if set(symbols) <= set(sizes):
            return prod(int(sizes[symbol]) for symbol in symbols)
    return None


EXAMPLES = Problems(
    usual_sizes=lambda spec, backend: dict(spec.example_sizes[-1]),
    check_sizes=lambda spec, sizes: spec.check_sizes(sizes),
    spec_sizes=lambda spec, sizes, backend: dict(sizes),
    example=lambda spec, rng, shape, sizes: spec.example(rng, **sizes),
    sized=lambda spec, sizes, copies: None,
    weights=weights_of,
)


def problems_of(spec: KernelSpec) -> Problems:
    """Find the problems of a spec's family, or the examples of the spec where the family registers none."""
    entry = registry.entries("problems").get(spec.family)
    return entry.load() if entry else EXAMPLES
