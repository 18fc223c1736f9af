import numpy as np
import pytest
from hypothesis import given

from ptxlab.lowbit.reference import as_bytes, as_words, replicate
from tests.support import strategies


def test_byte_0_is_the_least_significant():
    assert as_words(np.array([[0x11, 0x22, 0x33, 0x44]], np.uint8)).tolist() == [[0x44332211]]


@given(strategies.words(2, 6))
def test_round_trip(words):
    assert as_bytes(words).shape == (2, 24)
    np.testing.assert_array_equal(as_words(as_bytes(words)), words, strict=True)


def test_strided_arrays():
    values = np.arange(64, dtype=np.uint8).reshape(8, 8).T
    np.testing.assert_array_equal(as_words(values), as_words(values.copy()))
    words = as_words(values).T
    np.testing.assert_array_equal(as_bytes(words), as_bytes(words.copy()))


def test_replicate():
    assert replicate(np.array([0, 1, 0x80, 0xFF], np.uint8)).tolist() == [0, 0x01010101, 0x80808080, 0xFFFFFFFF]


def test_refuses_other_dtypes_and_lengths():
    with pytest.raises(TypeError, match="values: dtype must be uint8"):
        as_words(np.zeros(4, np.int8))
    with pytest.raises(TypeError, match="words: dtype must be uint32"):
        as_bytes(np.zeros(4, np.int32))
    with pytest.raises(TypeError, match="values: dtype must be uint8"):
        replicate(np.zeros(4, np.uint32))
    with pytest.raises(ValueError, match="multiple of 4"):
        as_words(np.zeros(6, np.uint8))
