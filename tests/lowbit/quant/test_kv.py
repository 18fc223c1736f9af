"""The KV quantisers against the formula, element by element, at ties and float16's ends; and what they refuse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxlab.errors import ArgumentError
from ptxlab.lowbit.quant import KV_SCHEMES, QuantizedKV, calibrate_kv, quantize_kv

F = np.float32
BY_TOKEN = [name for name, kv_format in KV_SCHEMES.items() if not kv_format.by_channel]
BY_CHANNEL = [name for name, kv_format in KV_SCHEMES.items() if kv_format.by_channel]
every_scheme = pytest.mark.parametrize("scheme", KV_SCHEMES)
by_token = pytest.mark.parametrize("scheme", BY_TOKEN)


def tokens(n=5, heads=2, D=16, seed=0):
    return np.random.default_rng(seed).standard_normal((n, heads, D)).astype(F)


def formula(row, levels):
    """Compute (values, scale, zero) of one token and head, one element at a time: the contract, spelled out."""
    low, high = F(0), F(0)
    for x in row:
        low, high = min(low, x), max(high, x)
    scale = np.float16(F(high - low) / F(levels))
    if scale == 0:
        scale = np.float16(1)
    zero = min(max(np.rint(F(0 - low) / F(scale)), 0), levels)
    return [int(min(max(np.rint(x / F(scale)) + zero, 0), levels)) for x in row], scale, zero


def assert_is_the_formula(x, scheme):
    quantized = quantize_kv(x, scheme)
    assert (quantized.values.dtype, quantized.scale.dtype, quantized.zero.dtype) == (np.uint8, np.float16, np.float16)
    levels = KV_SCHEMES[scheme].high
    for t, h in np.ndindex(*x.shape[:2]):
        values, scale, zero = formula(x[t, h].astype(F), levels)
        assert quantized.values[t, h].tolist() == values
        assert (quantized.scale[t, h], quantized.zero[t, h]) == (scale, zero)
    assert not np.signbit(quantized.zero).any()  # a kernel's bytes are compared with these
    return quantized


@pytest.mark.default_cases("kv8")
@by_token
@given(data=st.data())
def test_the_formula_on_any_float16(scheme, data):
    """Constant rows, denormals, one sign, zeros of both signs: whatever hypothesis makes of 16 bits."""
    finite = st.integers(0, 0x7BFF) | st.integers(0x8000, 0xFBFF)
    bits = data.draw(st.lists(finite | st.sampled_from([0, 0x8000, 1, 0x8001, 0x7BFF]), min_size=16, max_size=16))
    assert_is_the_formula(np.array(bits, np.uint16).view(np.float16).reshape(2, 1, 8), scheme)


@pytest.mark.smoke
@by_token
@given(scale=st.integers(1, 0x7BFF), zero=st.integers(0, 15), seed=st.integers(0, 2**32 - 1))
def test_the_formula_at_ties(scheme, scale, zero, seed):
    """Any scale that float16 has, elements that are its halves: all is exact, every quotient an integer or a tie."""
    levels, scale = KV_SCHEMES[scheme].high, np.uint16(scale).view(np.float16)
    rng = np.random.default_rng(seed)
    halves = rng.integers(-2 * zero, 2 * (levels - zero) + 1, (2, 2, 32)).astype(F) / 2
    halves[..., 0], halves[..., 1] = -zero, levels - zero
    quantized = assert_is_the_formula(halves * F(scale), scheme)
    assert (quantized.scale == scale).all() and (quantized.zero == zero).all()


@by_token
def test_zeros_are_clipped_where_the_scale_was_rounded_down(scheme):
    """1.4 times float16's smallest denormal becomes that, and -min is 1.4 times as many steps of it as there are."""
    levels, smallest = KV_SCHEMES[scheme].high, F(2.0**-24)
    x = np.array([[[-1.4 * levels, -1, 0, -0.6 * levels] * 2]], F) * smallest
    quantized = assert_is_the_formula(x, scheme)
    assert quantized.scale == smallest and quantized.zero == levels and quantized.values.min() == 0


def test_ties_go_to_even_before_the_zero_is_added():
    row = np.array([[[-3, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 12]]], F)
    assert quantize_kv(row).values.tolist() == [[[0, 1, 1, 3, 3, 5, 5, 15]]]


@by_token
@given(exponent=st.integers(-149, 18), seed=st.integers(0, 2**32 - 1))
def test_the_formula_at_every_magnitude(scheme, exponent, seed):
    """The magnitudes begin at float32's denormals, whose scales vanish.

    They pass denormal scales of float16, where much is clipped.
    """
    x = np.ldexp(tokens(2, 1, 8, seed).clip(-2, 2), exponent - 1)
    assert_is_the_formula(x, scheme)


@by_token
def test_quotients_are_divided_by_the_rounded_scale(scheme):
    """Enough elements that the scale before rounding, or a reciprocal, would give others somewhere."""
    x = tokens(200, 2, 128)
    quantized = quantize_kv(x, scheme)
    levels = F(KV_SCHEMES[scheme].high)
    exact = (np.maximum(x.max(-1), 0) - np.minimum(x.min(-1), 0)) / levels
    scale, zero = (c.astype(F)[..., None] for c in (quantized.scale, quantized.zero))
    values = (np.rint(x / scale) + zero).clip(0, levels)
    np.testing.assert_array_equal(quantized.values, values)
    assert (values != (np.rint(x / exact[..., None]) + zero).clip(0, levels)).any()


@by_token
def test_error_is_half_a_step(scheme):
    """And half a step more where the rounded scale pushed an end beyond the last integer."""
    x = tokens(50, 4, 128)
    quantized = quantize_kv(x, scheme)
    error = np.abs(quantized.dequantize() - x) / quantized.scale.astype(F)[..., None]
    assert error.max() < 1.0 and np.quantile(error, 0.99) <= 0.5


@by_token
@pytest.mark.parametrize("constant", [-3.0, 0.0, -0.0, 2.0, 65504.0, 6e-8])
def test_constant_rows(scheme, constant):
    """0 is in the range, so a constant is its end, and comes back as exactly as the scale allows."""
    x = np.full((1, 1, 8), constant, np.float16)
    quantized = assert_is_the_formula(x, scheme)
    restored = quantized.dequantize()
    assert (np.abs(restored - x) <= np.abs(x) * 2.0**-11 + 1e-7 * KV_SCHEMES[scheme].high).all()
    if constant == 0:
        assert quantized.scale == 1 and quantized.zero == 0 and not restored.any()


@by_token
def test_all_negative(scheme):
    x = -np.abs(tokens()) - 1
    quantized = assert_is_the_formula(x, scheme)
    assert (quantized.zero == KV_SCHEMES[scheme].high).all()
    assert (quantized.dequantize() <= 0).all()


@by_token
def test_scales_end_where_float16_does(scheme):
    levels = KV_SCHEMES[scheme].high
    x = tokens()
    x[3, 1, 7] = np.nextafter(F(65520), F(0)) * levels  # the last that rounds to 65504
    x[3, 1, :7] = 0
    x[3, 1, 8:] = 0
    assert quantize_kv(x, scheme).scale[3, 1] == 65504
    x[3, 1, 7] = F(65520) * levels
    rule = r"the scale of a token and head must be finite in float16 \(got x\[3, 1\] has 65520\)"
    with pytest.raises(ArgumentError, match=rule) as error:
        quantize_kv(x, scheme)
    assert "\n" not in str(error.value)
    x[3, 1, :2] = 3e38, -3e38  # even the range overflows
    with pytest.raises(ArgumentError, match=r"x\[3, 1\] has inf"):
        quantize_kv(x, scheme)


def formula_by_channel(column, kv_format):
    low, high = min(F(0), *column), max(F(0), *column)
    scale = max(-low, high) / F(127) if kv_format.low else F(high - low) / F(15)
    if scale == 0:
        scale = F(1)
    zero = 0 if kv_format.low else np.rint(F(0 - low) / scale)
    return [int(min(max(np.rint(x / scale) + zero, kv_format.low), kv_format.high)) for x in column], scale, zero


@pytest.mark.parametrize("scheme", BY_CHANNEL)
@given(seed=st.integers(0, 2**32 - 1), sign=st.sampled_from([None, -1, 1]))
def test_the_formula_by_channel(scheme, seed, sign):
    x = tokens(7, 2, 8, seed) * F(10) ** np.random.default_rng(seed).integers(-8, 8, 8).astype(F)
    x = x if sign is None else sign * np.abs(x)
    x[:, 1, 3] = 0
    quantized = quantize_kv(x, scheme)
    assert (quantized.values.dtype, quantized.scale.dtype) == (KV_SCHEMES[scheme].dtype, np.float32)
    for h, d in np.ndindex(2, 8):
        values, scale, zero = formula_by_channel(x[:, h, d], KV_SCHEMES[scheme])
        assert quantized.values[:, h, d].tolist() == values
        assert (quantized.scale[h, d], quantized.zero[h, d]) == (scale, zero)
    assert not np.signbit(quantized.zero).any()
    assert (np.abs(quantized.dequantize() - x) <= 1.01 * quantized.scale).all()  # half for the zero, half for x


def test_levels_of_every_scheme():
    """Other tests ask the scheme itself."""
    levels = {name: (kv_format.low, kv_format.high) for name, kv_format in KV_SCHEMES.items()}
    assert levels == {"kv4": (0, 15), "kv8": (0, 255), "kv4_channel": (0, 15), "kv8_channel": (-127, 127)}


@pytest.mark.parametrize("scheme", BY_CHANNEL)
def test_calibrated_constants_clip_what_lies_beyond(scheme):
    kv_format = KV_SCHEMES[scheme]
    channel = calibrate_kv(tokens(), scheme)
    quantized = quantize_kv(tokens(3, seed=1) * F(1e38), scheme, channel)
    assert set(np.unique(quantized.values)) <= {kv_format.low, kv_format.high}
    assert quantized.scale is channel[0] and quantized.zero is channel[1]
    again = quantize_kv(tokens(), scheme, channel)
    np.testing.assert_array_equal(again.values, quantize_kv(tokens(), scheme).values, strict=True)


@every_scheme
def test_every_sequence_of_a_batch_for_itself(scheme):
    x = tokens(12).reshape(3, 4, 2, 16)
    channel = calibrate_kv(x, scheme) if KV_SCHEMES[scheme].by_channel else None
    batch = quantize_kv(x, scheme, channel)
    assert batch.shape == x.shape and batch.dequantize().shape == x.shape
    for b in range(3):
        one = quantize_kv(x[b], scheme, channel)
        np.testing.assert_array_equal(batch.values[b], one.values, strict=True)
        np.testing.assert_array_equal(batch.dequantize()[b], one.dequantize(), strict=True)


@every_scheme
def test_no_tokens(scheme):
    channel = calibrate_kv(tokens(), scheme) if KV_SCHEMES[scheme].by_channel else None
    assert quantize_kv(tokens()[:0], scheme, channel).dequantize().shape == (0, 2, 16)


@every_scheme
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_floats_give_what_the_same_float32_values_give(scheme, dtype):
    x = tokens().astype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    a, b = quantize_kv(x, scheme), quantize_kv(x.astype(F), scheme)
    for name in ("values", "scale", "zero"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), strict=True)


@every_scheme
def test_strides_do_not_matter_and_input_is_left_alone(scheme):
    x = tokens().swapaxes(0, 1)
    x.flags.writeable = False
    contiguous = x.copy()
    a, b = quantize_kv(x, scheme), quantize_kv(contiguous, scheme)
    np.testing.assert_array_equal(a.values, b.values, strict=True)
    np.testing.assert_array_equal(x, contiguous)


def put(number, dtype=F):
    x = tokens().astype(dtype)
    x[1, 0, 3], x[2, 1, 7] = number, np.nan
    return x


REFUSED = {
    "nan": (put(np.nan), r"^x: must be finite in float32 \(got x\[1, 0, 3\] is nan\)"),
    "infinity": (put(-np.inf), r"x\[1, 0, 3\] is -inf"),
    "float64 beyond float32": (put(1e39, np.float64), r"x\[1, 0, 3\] is 1e\+39"),
    "in a batch": (put(np.inf)[None], r"x\[0, 1, 0, 3\] is inf"),
    "matrix": (tokens()[0], r"x: must be \[..., tokens, heads, D\] with heads and dims \(got shape \(2, 16\)\)"),
    "no dims": (tokens()[:, :, :0], "with heads and dims"),
    "integers": (np.ones((1, 1, 8), np.int8), "dtype must be one of float16, bfloat16, float32, float64"),
    "list": ([[[1.0]]], r"must be an array of NumPy, CuPy or PyTorch \(got list\)"),
}


@every_scheme
@pytest.mark.parametrize("case", REFUSED)
def test_refuses(scheme, case):
    x, message = REFUSED[case]
    with pytest.raises(ArgumentError, match=message) as error:
        quantize_kv(x, scheme)
    assert "\n" not in str(error.value)


def test_refuses_a_nan_under_given_constants():
    with pytest.raises(ArgumentError, match=r"x\[1, 0, 3\] is nan"):
        quantize_kv(put(np.nan), "kv8_channel", calibrate_kv(tokens(), "kv8_channel"))


ONES, ZEROS = np.ones((2, 16), F), np.zeros((2, 16), F)


def change_element(array, number):
    array = array.copy()
    array[1, 5] = number
    return array


@pytest.mark.parametrize(
    ("scheme", "channel", "message"),
    [
        ("kv4", (ONES, ZEROS), "channel: kv4 has constants of its own: must be None"),
        ("kv4_channel", ONES, r"channel: must be \(scale, zero\) for kv4_channel \(got ndarray\)"),
        ("kv4_channel", (ONES[:1], ZEROS), r"channel scale: must be float32 \[2, 16\] \(got float32 \[1, 16\]\)"),
        ("kv4_channel", (ONES, ZEROS.astype(np.uint8)), r"channel zero: must be float32 .*uint8"),
        ("kv4_channel", (change_element(ONES, 0), ZEROS), r"channel scale: scales by .*channel \[1, 5\] has 0"),
        ("kv8_channel", (change_element(ONES, np.inf), ZEROS), r"channel \[1, 5\] has inf"),
        ("kv8_channel", (change_element(ONES, np.nan), ZEROS), r"channel \[1, 5\] has nan"),
        ("kv4_channel", (change_element(ONES, 1e-40), ZEROS), r"channel \[1, 5\] has 1e-40"),
        (
            "kv4_channel",
            (ONES, change_element(ZEROS, 16)),
            r"channel zero: must be integers in 0..15 .*\[1, 5\] has 16",
        ),
        ("kv4_channel", (ONES, change_element(ZEROS, 0.5)), "must be integers in 0..15"),
        ("kv4_channel", (ONES, change_element(ZEROS, np.nan)), "must be integers in 0..15"),
        ("kv8_channel", (ONES, change_element(ZEROS, 1)), r"must be integers in 0..0"),
        ("kv5", None, "scheme: must be one of kv4, kv8, kv4_channel, kv8_channel .got kv5"),
    ],
)
def test_refuses_constants(scheme, channel, message):
    with pytest.raises(ArgumentError, match=message):
        quantize_kv(tokens(), scheme, channel)


@pytest.mark.parametrize("scheme", BY_CHANNEL)
def test_refuses_to_calibrate(scheme):
    with pytest.raises(ArgumentError, match="must have a token to calibrate on"):
        calibrate_kv(tokens()[:0], scheme)
    with pytest.raises(ArgumentError, match=r"x\[1, 0, 3\] is nan"):
        calibrate_kv(put(np.nan), scheme)
    for factor in (1e-40, 3.78e37):
        x = tokens()
        x[:, 1, 3] = factor * np.array([1, -1, 9, -9, 0])
        with pytest.raises(ArgumentError, match=r"x: scales by channel must lie in .*channel \[1, 3\] has"):
            calibrate_kv(x, scheme)


def test_refuses_to_calibrate_by_token():
    with pytest.raises(ArgumentError, match=r"scheme: must be one by channel \(got kv4\)"):
        calibrate_kv(tokens(), "kv4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": np.zeros((5, 2, 16), np.int8)}, r"values: must be uint8 \[5, 2, 16\] \(got int8 \[5, 2, 16\]\)"),
        ({"values": np.zeros((2, 16), np.uint8)}, r"values: must be \[..., tokens, heads, D\]"),
        ({"values": None}, r"values: must be \[..., tokens, heads, D\]"),
        ({"scale": np.ones((5, 2), F)}, r"scale: must be float16 \[5, 2\] \(got float32 \[5, 2\]\)"),
        ({"zero": np.ones((5, 1), np.float16)}, r"zero: must be float16 \[5, 2\] \(got float16 \[5, 1\]\)"),
        ({"zero": 0}, "zero: must be float16 .*got int"),
    ],
)
def test_what_does_not_fit_together(change, message):
    with pytest.raises(ArgumentError, match=message):
        QuantizedKV(**vars(quantize_kv(tokens())) | change)
