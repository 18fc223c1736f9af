"""The bound allows for what tensor cores cut off: kernels in an emulator whose MMA aligns its products as they do."""

from functools import partial

import numpy as np
import pytest

from ptxlab.emulator.ops import mma
from ptxlab.kernels.attention.sm90 import SM90
from tests.kernels import test_attention_mma as sm80
from tests.kernels import test_attention_sm90 as sm90
from tests.support import attention_problems as problems

AMPERE, HOPPER = (24, 8), (25, 16)  # bits below the largest exponent, products at a time (Fasi et al. 2021)
SMALLEST = -14  # the exponent of FP16's subnormals, and of zero


def aligned_dots(bits: int, together: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`mma.dots` of FP16 as tensor cores sum it up: every product cut off below the largest sum of exponents."""
    if not (a % 1).any() and not (b % 1).any():
        return np.matmul(a, b.swapaxes(-1, -2))  # of integers nothing is cut off
    a, b = a[:, :, None].astype(np.float64), b[:, None].astype(np.float64)
    exponents = [np.where(x == 0, SMALLEST, np.maximum(np.frexp(x)[1] - 1, SMALLEST)) for x in (a, b)]
    total = np.zeros(np.broadcast_shapes(a.shape, b.shape)[:-1])
    for k in range(0, a.shape[-1], together):
        part = (..., slice(k, k + together))
        unit = np.exp2((exponents[0][part] + exponents[1][part]).max(axis=-1) - float(bits))[..., None]
        total += (np.trunc(a[part] * b[part] / unit) * unit).sum(axis=-1)
    return total


def test_an_h200_cuts_off_as_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heaviest token's value is 0, with a zero point of 2: of the others' part of the sum 2⁻¹⁵ is the last bit.

    This very number came out on an H200. Sums that are rounded only once are far nearer.
    """
    monkeypatch.setattr(mma, "dots", partial(aligned_dots, *HOPPER))
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
    monkeypatch.setattr(mma, "dots", partial(aligned_dots, *HOPPER))
    for lengths, Hkv in (((5,), 3), ((75, 0, 1), 1)):
        sm90.check(variant, *variant.problem(1, lengths, change, Hkv, window=0, blocks=1), "emulator")


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@sm80.every_variant
def test_ampere_stays_within_the_bound(
    variant: sm80.Variant, change: problems.Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mma, "dots", partial(aligned_dots, *AMPERE))
    for lengths, Hkv in (((5,), 3), ((75, 0, 1), 1)):
        sm80.check(variant, *variant.problem(1, lengths, change, Hkv, window=0), "emulator")
