import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ptxlab import reference


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
