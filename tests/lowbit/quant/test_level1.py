import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxlab.lowbit.quant import quantize_activations, quantize_level1
from tests.support import strategies


@pytest.mark.full
@given(strategies.weight_groups())
def test_known_integers(case):
    level1 = quantize_level1(case.w)
    np.testing.assert_array_equal(level1.q8, case.q8, strict=True)
    np.testing.assert_array_equal(level1.dequantize(), case.w, strict=True)


@given(st.integers(1, 127), st.integers(0, 2**32 - 1))
def test_error_is_half_a_step(protective_range, seed):
    w = np.random.default_rng(seed).standard_normal((3, 40)).astype(np.float32)
    level1 = quantize_level1(w, protective_range)
    assert np.abs(level1.q8).max(axis=1).tolist() == [protective_range] * 3
    error = np.abs(level1.dequantize() - w.astype(np.float64))
    assert (error <= 0.5 * level1.scale[:, None] * (1 + 1e-5)).all()


def test_halves_round_to_even():
    w = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 119]], np.float32)
    assert quantize_level1(w).q8.tolist() == [[0, 2, 2, 0, -2, -2, 119]]
    assert quantize_activations(w / 119 * 127).q.tolist() == [[1, 2, 3, -1, -2, -3, 127]]
    x = np.array([[0.5, 1.5, 2.5, 127], [-0.5, -1.5, -2.5, -127]], np.float32)
    assert quantize_activations(x).q.tolist() == [[0, 2, 2, 127], [0, -2, -2, -127]]


def test_quotients_are_divided_not_multiplied_by_a_reciprocal():
    """Scales whose rounded reciprocal puts some element on the other side of a half."""
    rng = np.random.default_rng(7)
    x = (rng.integers(-126, 127, (2000, 64)) + 0.5).astype(np.float32)
    x[:, 0] = 127
    x *= rng.uniform(0.5, 1, (2000, 1)).astype(np.float32)
    quantised = quantize_activations(x)
    scale = (np.abs(x).max(axis=1) / np.float32(127))[:, None]
    np.testing.assert_array_equal(quantised.q, np.rint(x / scale))
    assert (quantised.q != np.rint(x * (1 / scale))).any(), "the example no longer tells the two apart"


@given(st.integers(0, 2**32 - 1))
def test_activations(seed):
    x = np.random.default_rng(seed).standard_normal((4, 96)).astype(np.float16)
    quantised = quantize_activations(x)
    assert (quantised.q.dtype, quantised.scale.dtype, quantised.token_sum.dtype) == (np.int8, np.float32, np.int32)
    np.testing.assert_array_equal(quantised.token_sum, quantised.q.astype(np.int64).sum(axis=1))
    assert np.abs(quantised.q.astype(int)).max(axis=1).tolist() == [127] * 4
    error = np.abs(quantised.dequantize() - x.astype(np.float64))
    assert (error <= 0.5 * quantised.scale[:, None] * (1 + 1e-5)).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_token_sum_of_long_rows_is_wider_than_a_byte(sign):
    assert quantize_activations(np.full((1, 50_000), sign, np.float32)).token_sum.tolist() == [sign * 127 * 50_000]
