"""What every quantiser refuses, and what it accepts."""

import re
import tracemalloc

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.lowbit.quant import quantize_activations, quantize_level1, quantize_lqq, quantize_qoq, quantize_qoq_channel
from ptxlab.lowbit.quant.inputs import row_scales

QUANTISERS = [quantize_level1, quantize_qoq, quantize_qoq_channel, quantize_lqq, quantize_activations]
TWO_LEVEL = [quantize_qoq, quantize_lqq]

every_quantiser = pytest.mark.parametrize("quantise", QUANTISERS)


def weights(N=3, K=256, seed=0):
    return np.random.default_rng(seed).standard_normal((N, K)).astype(np.float32)


def put(number, dtype=np.float32):
    w = weights().astype(dtype)
    w[1, 17] = number
    w[2, 3] = np.nan
    return w


BAD = {
    "nan": (put(np.nan), r"must be finite in float32 \(got [wx]\[1, 17\] is nan\)"),
    "infinity": (put(-np.inf), r"\[1, 17\] is -inf"),
    "f16 infinity": (put(np.inf, np.float16), r"\[1, 17\] is inf"),
    "float64 beyond float32": (put(1e39, np.float64), r"\[1, 17\] is 1e\+39"),
    "vector": (weights()[0], r"must be a non-empty matrix \[rows, K\] \(got shape \(256,\)\)"),
    "three axes": (weights()[None], "must be a non-empty matrix"),
    "no rows": (weights()[:0], r"non-empty matrix.*\(0, 256\)"),
    "no columns": (weights()[:, :0], "non-empty matrix"),
    "integers": (
        np.ones((2, 256), np.int32),
        r"dtype must be one of float16, bfloat16, float32, float64 \(got int32\)",
    ),
    "complex": (weights().astype(np.complex64), "dtype must be one of"),
    "list": ([[1.0, 2.0]], r"must be an array of NumPy, CuPy or PyTorch \(got list\)"),
    "scale underflows": (weights() * np.float32(1e-44), r"row scales must lie in .* row 0 has"),
    "scale is subnormal": (np.full((2, 256), 1e-37, np.float32) * [[1e9], [1]], "row 1 has"),
    "scale too large": (np.full((2, 256), 3.4e38, np.float32) * np.array([[-1], [1]]), "row 0 has"),
}


@every_quantiser
@pytest.mark.parametrize("case", BAD)
def test_refuses(quantise, case):
    array, message = BAD[case]
    with pytest.raises(ArgumentError, match=message) as error:
        quantise(array)
    assert "\n" not in str(error.value)
    assert error.value.argument == ("x" if quantise is quantize_activations else "w")


def test_channel_extent_beyond_float32_is_refused():
    with pytest.raises(ArgumentError, match="row 0 has inf"):
        quantize_qoq_channel(np.array([[3e38, -3e38]], np.float32))


@pytest.mark.parametrize("quantise", TWO_LEVEL)
@pytest.mark.parametrize("group", [0, -64, 16, 48, 256, 64.5, "64", None])
def test_refuses_an_unknown_group(quantise, group):
    with pytest.raises(ArgumentError, match="group: must be one of 32, 64, 128"):
        quantise(weights(), group=group)


@pytest.mark.parametrize("quantise", TWO_LEVEL)
def test_refuses_a_partial_group(quantise):
    with pytest.raises(ArgumentError, match=r"w: K must be a multiple of the group \(got K=192, group=128\)"):
        quantise(weights(K=192), group=128)


@pytest.mark.parametrize("quantise", [quantize_level1, *TWO_LEVEL])
@pytest.mark.parametrize("protective_range", [0, -1, 128, 118.5, "119", None])
def test_refuses_a_protective_range(quantise, protective_range):
    with pytest.raises(ArgumentError, match=r"protective_range: must be an integer in 1\.\.127"):
        quantise(weights(), protective_range=protective_range)


def test_refuses_an_unknown_rounding():
    with pytest.raises(ArgumentError, match=r"rounding: must be one of nearest, ceiling, search, levels \(got floor\)"):
        quantize_lqq(weights(), rounding="floor")


def fields(quantised):
    return {name: field for name, field in vars(quantised).items() if isinstance(field, np.ndarray)}


def assert_same(a, b):
    assert fields(a).keys() == fields(b).keys()
    for name, array in fields(a).items():
        np.testing.assert_array_equal(fields(b)[name], array, strict=True, err_msg=name)


@every_quantiser
def test_float16_and_float64_give_what_the_same_float32_values_give(quantise):
    half = weights().astype(np.float16)
    assert_same(quantise(half), quantise(half.astype(np.float32)))
    assert_same(quantise(weights().astype(np.float64)), quantise(weights()))


@every_quantiser
def test_bfloat16_gives_what_the_same_float32_values_give(quantise):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    brain = weights().astype(ml_dtypes.bfloat16)
    assert_same(quantise(brain), quantise(brain.astype(np.float32)))


@every_quantiser
def test_strides_do_not_matter(quantise):
    w = weights(N=256, K=3).T
    assert not w.flags.c_contiguous
    assert_same(quantise(w), quantise(w.copy()))


@pytest.mark.parametrize("strip", [1, 256, 700])
@every_quantiser
def test_strips_do_not_matter(quantise, strip, monkeypatch):
    w = weights(N=7)
    whole = quantise(w)
    monkeypatch.setattr("ptxlab.lowbit.quant.inputs.STRIP", strip)
    assert_same(quantise(w), whole)
    w[5, 17] = np.inf
    with pytest.raises(ArgumentError, match=r"\[5, 17\] is inf"):
        quantise(w)


@every_quantiser
def test_memory_is_bounded_by_strips(quantise, monkeypatch):
    """Integers twice (strips and their whole) and at most level 1 beside them, but no float32 copy."""
    w = weights(N=2048, K=512)
    monkeypatch.setattr("ptxlab.lowbit.quant.inputs.STRIP", 1 << 14)
    tracemalloc.start()
    quantise(w)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3.6 * w.size


@every_quantiser
def test_input_is_left_alone(quantise):
    w = weights()
    w.flags.writeable = False
    quantise(w)
    np.testing.assert_array_equal(w, weights())


@every_quantiser
def test_zero_rows(quantise):
    w = weights()
    w[1] = 0
    quantised = quantise(w)
    scale = getattr(quantised, "channel_scale", None)
    scale = quantised.scale if scale is None else scale
    assert scale.dtype == np.float32 and scale[1] == 1 and 0 < scale[0] < 1
    np.testing.assert_array_equal(quantised.dequantize()[1], np.zeros(256, np.float32), strict=True)
    np.testing.assert_array_equal(quantise(w * 0).dequantize(), w * 0, strict=True)


def test_usable_scales_end_where_the_refusal_begins():
    smallest = np.finfo(np.float32).tiny
    largest = np.finfo(np.float32).max / np.float32(128)
    edges = np.array([smallest, 0, largest], np.float32)
    assert row_scales("w", edges, 1).tolist() == [smallest, 1, largest]
    for beyond in (np.nextafter(smallest, np.float32(0)), np.nextafter(largest, np.float32(np.inf))):
        with pytest.raises(ArgumentError, match=re.escape(f"row 1 has {beyond:.3g}")):
            row_scales("w", np.array([1, beyond], np.float32), 1)
    with pytest.raises(ArgumentError, match="row 0 has 2e-40"):
        row_scales("w", np.array([3e-39], np.float32), 15)


@every_quantiser
def test_the_largest_and_smallest_weights_come_back_finite(quantise):
    w = weights()
    w *= 100 / np.abs(w).max(axis=1, keepdims=True)
    for factor in (1e-36, 1e34):
        restored = quantise(w * np.float32(factor)).dequantize()
        assert np.isfinite(restored).all() and restored.any()


@every_quantiser
def test_results_are_frozen(quantise):
    quantised = quantise(weights())
    assert quantised.shape == (3, 256)
    with pytest.raises(AttributeError):
        quantised.scale = None
