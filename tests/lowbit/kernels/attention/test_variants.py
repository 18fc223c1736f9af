"""What holds of attention on Ampere and on Hopper alike: the bound in hard cases and at edges, with and without lse."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from ptxlab.runtime import Kernel
from tests.support import attention_problems as problems
from tests.support.attention_variants import AMPERE, HOPPER, Variant, parametrize_variants, problem_strategies
from tests.support.axes import on_every_backend


@pytest.mark.full
@on_every_backend
@parametrize_variants(*AMPERE[:3], *HOPPER[:3])
@pytest.mark.parametrize("change", problems.CASES, ids=lambda change: change.__name__)
def test_near_float64_in_hard_cases(variant: Variant, change: problems.Change, backend: str) -> None:
    logical, arrays = variant.problem(1, (75, 0, 1, 130), change, blocks=2)
    problems.check_empty_sequence(variant, logical, variant.check(logical, arrays, backend))


@pytest.mark.full
@on_every_backend
@parametrize_variants(*AMPERE, *HOPPER)
def test_near_float64_at_the_edges_of_pages_and_tiles(variant: Variant, backend: str) -> None:
    variant.check(*variant.problem(4, problems.edge_lengths(variant.page), blocks=3), backend)


@pytest.mark.full
@parametrize_variants(*AMPERE, *HOPPER)
@settings(max_examples=4)
@given(**problem_strategies(300, 4))
def test_near_float64_in_the_emulator(variant: Variant, seed: int, mode: str, **how: Any) -> None:
    variant.check(*variant.problem(seed, **how), mode=mode, seed=seed)


@pytest.mark.default_cases("sm80-128-64-4-0-1-1-0")
@parametrize_variants(AMPERE[0], HOPPER[0])
def test_the_logarithms_may_be_left_out(variant: Variant) -> None:
    """The kernel is given a null pointer."""
    logical, arrays = variant.problem(0, (70, 0), blocks=2)
    expected, spec = variant.check(logical, arrays), variant.spec
    sizes = spec.sizes_of({n: a.shape for n, a in arrays.items()}, variant.sizes(blocks=logical.get("blocks", 1)))
    scratch = {arg.name: np.zeros(arg.resolve(sizes), arg.dtype) for arg in spec.args if arg.role == "scratch"}
    arrays |= {"out": np.zeros_like(expected["out"]), **scratch}
    sizes |= variant.config
    kernel = Kernel.of(spec, variant.source, variant.config)
    kernel.launch(spec.arguments(arrays, sizes), spec.launch(sizes), backend="emulator")
    assert np.array_equal(arrays["out"], expected["out"])
