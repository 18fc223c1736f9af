"""Signed INT4 with a float scale per group: floats in, nibbles and scales out, floats back."""

import numpy as np
import pytest
from hypothesis import given

from ptxlab.errors import ArgumentError
from ptxlab.lowbit import reference
from ptxlab.lowbit.layout import pack_s4, unpack_s4
from ptxlab.lowbit.quant import quantize_int4
from tests.support import strategies


@pytest.mark.full
@given(case=strategies.weight_groups())
def test_every_weight_is_within_half_a_step(case):
    w = np.ldexp(case.w, -12)  # of all magnitudes that FP16 scales reach, subnormal ones among them
    weight = quantize_int4(w, case.group)
    N, K = w.shape
    assert weight.shape == (N, K) and weight.q4.dtype == np.int8 and weight.scale.dtype == np.float16
    assert weight.q4.min() >= -8 and weight.q4.max() <= 7
    step = np.repeat(weight.scale.astype(np.float64), case.group, axis=1)
    clipped = 7 * 2.0**-11 * step + 2.0**-22  # the scale is rounded to FP16, below 2^-14 by up to 2^-25, times 7 steps
    assert (np.abs(weight.q4 * step - w) <= step / 2 + clipped).all()
    assert (np.abs(weight.dequantize() - weight.q4 * step) <= np.abs(weight.q4 * step) * 2.0**-11 + 2.0**-25).all()


@given(strategies.int4_inputs())
def test_reference_rounds_the_exact_product_once(inputs):
    q4, scale = inputs["q4"], inputs["scale"]
    wide = q4.astype(np.float64) * np.repeat(scale.astype(np.float64), q4.shape[1] // scale.shape[1], axis=1)
    np.testing.assert_array_equal(reference.dequant_s4_f16(q4, scale), wide.astype(np.float16), strict=True)


@pytest.mark.full
@given(strategies.int4_inputs())
def test_words_hold_twos_complement_nibbles(inputs):
    words = pack_s4(inputs["q4"])
    np.testing.assert_array_equal(unpack_s4(words), inputs["q4"], strict=True)
    first = inputs["q4"][0, :8]
    nibbles = [int(words[0, 0]) >> 8 * (i % 4) + 4 * (i // 4) & 15 for i in range(8)]
    assert [n - 16 * (n > 7) for n in nibbles] == first.tolist()


def test_groups_of_zeros_and_of_almost_nothing():
    w = np.zeros((1, 64), np.float32)
    w[0, 32] = 1e-30
    weight = quantize_int4(w, 32)
    np.testing.assert_array_equal(weight.scale, np.array([[1, 2**-24]], np.float16))
    assert not weight.q4.any() and not weight.dequantize().any()


def test_all_levels_are_used_where_the_scale_is_rounded_down():
    """The scale is rounded down to a subnormal FP16: the largest magnitudes are beyond 7 steps."""
    w = np.zeros((1, 32), np.float32)
    w[0, :2] = -9.8 * 2.0**-24, 9.8 * 2.0**-24
    assert quantize_int4(w, 32).q4[0, :2].tolist() == [-8, 7]


@pytest.mark.parametrize(
    ("w", "group", "message"),
    [
        (np.ones((2, 48), np.float32), 32, r"K must be a multiple of the group \(got K=48, group=32\)"),
        (np.ones((2, 48), np.float32), 48, r"group: must be one of 32, 64, 128"),
        (np.full((2, 64), np.nan, np.float32), 32, r"must be finite in float32 \(got w\[0, 0\] is nan\)"),
        (np.full((2, 64), 57400, np.float32), 32, r"over 7 must be at most 8188 \(got 57400 in row 0, group 0\)"),
        (np.ones((2, 64), np.int32), 32, r"w: dtype must be one of float16"),
    ],
)
def test_refuses(w, group, message):
    with pytest.raises(ArgumentError, match=message):
        quantize_int4(w, group)


def test_the_largest_scale_is_accepted():
    weight = quantize_int4(np.full((1, 32), -7 * 8188, np.float32), 32)
    assert weight.scale[0, 0] == 8188 and np.isfinite(weight.dequantize()).all()
