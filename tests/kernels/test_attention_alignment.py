"""The bound allows for what tensor cores cut off: kernels in an emulator whose MMA aligns its products as they do."""

import numpy as np
import pytest

from ptxlab.kernels.attention.sm90 import SM90
from ptxlab.reference.tensor_cores import hopper_mma
from tests.support import attention_problems as problems
from tests.support import attention_sm80 as sm80
from tests.support import attention_sm90 as sm90
from tests.support import tensor_cores
from tests.support.tensor_cores import ampere_mma


def test_an_h200_cuts_off_as_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heaviest token's value is 0, with a zero point of 2: of the others' part of the sum 2⁻¹⁵ is the last bit.

    This very number came out on an H200. Sums that are rounded only once are far nearer.
    """
    tensor_cores.in_the_emulator(hopper_mma, monkeypatch)
    variant, at = sm90.VARIANTS[3], (0, 6, 3, 25)
    logical, arrays = variant.problem(1, (5,), problems.one_dominant_score, 3, window=0, blocks=1)
    out = sm90.check(variant, logical, arrays, "emulator")["out"]
    assert out[at] == np.float16(2.2470951080322266e-05)
    assert SM90.reference is not None
    assert abs(float(out[at]) - SM90.reference(**logical)[0][at]) > 1e-6


# Where products differ most in size, and subnormal ones meet ordinary ones; and nothing of the kind.
CHANGES = (problems.nothing, problems.queries_below_fp16, problems.large_and_small_values)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@sm90.every_variant
def test_hopper_stays_within_the_bound(
    variant: sm90.Variant, change: problems.Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor_cores.in_the_emulator(hopper_mma, monkeypatch)
    for lengths, Hkv in (((5,), 3), ((75, 0, 1), 1)):
        sm90.check(variant, *variant.problem(1, lengths, change, Hkv, window=0, blocks=1), "emulator")


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@sm80.every_variant
def test_ampere_stays_within_the_bound(
    variant: sm80.Variant, change: problems.Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor_cores.in_the_emulator(ampere_mma, monkeypatch)
    for lengths, Hkv in (((5,), 3), ((75, 0, 1), 1)):
        sm80.check(variant, *variant.problem(1, lengths, change, Hkv, window=0), "emulator")
