import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ptxlab.lowbit import reference


@given(bits=hnp.arrays(np.uint32, 64, elements=st.integers(0, 2**32 - 1)))
def test_bfloat16_rounds_as_ml_dtypes_does(bits: np.ndarray) -> None:
    values = bits.view(np.float32)
    got = reference.bfloat16_bits(values)
    finite = ~np.isnan(values)
    assert np.array_equal(got[finite], values[finite].astype(ml_dtypes.bfloat16).view(np.uint16))
    assert np.isnan(reference.from_bfloat16_bits(got[~finite])).all()


def test_every_bfloat16_comes_back() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = reference.from_bfloat16_bits(bits)
    numbers = ~np.isnan(values)
    assert np.array_equal(reference.bfloat16_bits(values)[numbers], bits[numbers])


def test_ties_go_to_even() -> None:
    values = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF], np.uint32).view(np.float32)
    assert reference.bfloat16_bits(values).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80]


def test_another_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match="values: dtype must be float32"):
        reference.bfloat16_bits(np.zeros(3))


@given(bits=hnp.arrays(np.uint32, (3, 64), elements=st.integers(0, 2**32 - 1)), shift=st.integers(-60, 60))
def test_fma_is_rounded_once(bits: np.ndarray, shift: int) -> None:
    """The results equal exact fractions.

    The addend is near the product, so that both have a say in the last bit.
    """
    a, b = (1 + (raw & 0x7FFFFF) * np.float32(2.0**-23) for raw in bits[:2])
    c = np.ldexp(bits[2].astype(np.int32).astype(np.float32), shift - 31)
    for x, y, z, got in zip(a, -b, c, reference.fma(a, -b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert got == rounded_to_single(exact), (x, y, z)


def rounded_to_single(exact: Fraction) -> np.float32:
    """Round to the nearest f32, ties to the even significand; there are no subnormals."""
    if exact == 0:
        return np.float32(0)
    exponent = math.frexp(float(abs(exact)))[1] - 24
    while abs(exact) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    return np.float32(math.ldexp(round(exact / Fraction(2) ** exponent), exponent))


def test_fma_where_rounding_twice_goes_wrong() -> None:
    """The sum of 1 + 2^-23 and a product of 2^-24 (1 - 2^-36) lies beside a tie.

    The tie is all that float64 keeps of the sum.
    """
    a, b, c = np.float32([2.0**-24 * (1 + 2.0**-18)]), np.float32([1 - 2.0**-18]), np.float32([1 + 2.0**-23])
    for sign, twice in ((1, 1 + 2.0**-22), (-1, 1.0)):
        wide = (sign * a).astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
        assert wide.astype(np.float32) == twice and reference.fma(sign * a, b, c) == c
