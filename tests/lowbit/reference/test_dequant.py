"""The word arithmetic against lane arithmetic (`reference.exact`) and against Python's own integers."""

import numpy as np
import pytest
from hypothesis import given

from ptxlab.lowbit import reference
from tests.support import strategies

NEIGHBOURS = (0, 6, 15)


def wrap(integers):
    return integers.astype(np.int64).astype(np.uint8).view(np.int8)


def every_case(scales, constants):
    """Yield every (q4, scale, constant) in each lane of a word, beside neighbours that all hold 0, 6 or 15.

    q4 u8 [R, 4]; scale and constant u8 [R, 1].
    """
    q4, scale, constant = (grid.ravel() for grid in np.meshgrid(np.arange(16), scales, constants, indexing="ij"))
    for lane in range(4):
        for neighbour in NEIGHBOURS:
            lanes = np.full((q4.size, 4), neighbour, np.uint8)
            lanes[:, lane] = q4
            yield lanes, scale.astype(np.uint8)[:, None], constant.astype(np.uint8)[:, None]


def words_of(matrix):
    """Return the words of a byte matrix as Python integers, four lanes each."""
    return [[int.from_bytes(row[i : i + 4].tobytes(), "little") for i in range(0, row.size, 4)] for row in matrix]


def per_word(per_group, K):
    return np.repeat(per_group, K // 4 // per_group.shape[1], axis=1).tolist()


def bytes_of(words, dtype):
    return np.array([[word % 2**32 for word in row] for row in words], np.uint32).view(dtype)


def test_lqq_is_exact_in_every_case_without_overflow():
    checked = 0
    for q4, scale, offset in every_case(range(1, 17), range(256)):
        exact = reference.exact_lqq(q4, scale, offset)
        whole = (exact <= 127).all(axis=1)
        np.testing.assert_array_equal(reference.dequant_lqq(q4, scale, offset)[whole], exact[whole])
        np.testing.assert_array_equal(reference.dequant_lqq_unsigned(q4, scale, offset)[whole], exact[whole] + 128)
        checked += whole.sum()
    assert checked > 300_000


def test_qoq_is_exact_modulo_256_in_every_case_up_to_scale_17():
    """15·17 = 255: the packed multiplication never carries, whatever the protective range was."""
    for q4, scale, zero in every_case(range(1, 18), range(16)):
        offset = wrap(-(zero.astype(int) * scale))
        exact = reference.exact_qoq(q4, scale, zero)
        np.testing.assert_array_equal(reference.dequant_qoq_vadd4(q4, scale, offset), wrap(exact), strict=True)


def test_presub_is_wrong_in_exactly_the_predicted_lanes_in_every_case():
    wrong = 0
    for q4, scale, zero in every_case((1, 2, 15, 16, 17, 64, 255), range(16)):
        missed = reference.dequant_qoq_presub(q4, scale, zero) != reference.exact_qoq(q4, scale, zero)
        np.testing.assert_array_equal(reference.presub_wrong(q4, scale, zero), missed, strict=True)
        wrong += missed.sum()
    assert wrong > 1000


@pytest.mark.full
@given(strategies.lqq_inputs())
def test_lqq_is_exact_on_checked_inputs(inputs):
    exact = reference.exact_lqq(**inputs)
    assert exact.min() >= 9 - 128 and exact.max() <= 127
    np.testing.assert_array_equal(reference.dequant_lqq(**inputs), exact)


@pytest.mark.smoke
@given(strategies.lqq_inputs(checked=False))
def test_lqq_models_the_whole_word(inputs):
    q4, scale, offset = inputs["q4"], inputs["scale"], inputs["offset"]
    rows = zip(words_of(q4), per_word(scale, q4.shape[1]), per_word(offset, q4.shape[1]), strict=True)
    sums = [[q * s + a * 0x01010101 for q, s, a in zip(*row, strict=True)] for row in rows]
    np.testing.assert_array_equal(reference.dequant_lqq_unsigned(**inputs), bytes_of(sums, np.uint8), strict=True)
    flipped = [[word % 2**32 ^ 0x80808080 for word in row] for row in sums]
    np.testing.assert_array_equal(reference.dequant_lqq(**inputs), bytes_of(flipped, np.int8), strict=True)


@pytest.mark.full
@given(strategies.lqq_inputs(checked=False))
def test_flipping_the_top_bit_adds_128_modulo_256(inputs):
    unsigned = reference.dequant_lqq_unsigned(**inputs)
    np.testing.assert_array_equal(reference.dequant_lqq(**inputs).view(np.uint8), unsigned + np.uint8(128))


@pytest.mark.full
@given(strategies.qoq_inputs())
def test_qoq_is_exact_on_checked_inputs(inputs):
    zero = inputs.pop("zero")
    exact = reference.exact_qoq(inputs["q4"], inputs["scale"], zero)
    np.testing.assert_array_equal(reference.dequant_qoq_vadd4(**inputs), exact)
    np.testing.assert_array_equal(reference.dequant_qoq_vadd4_s32(**inputs), exact)


@pytest.mark.full
@given(strategies.qoq_inputs(checked=False))
def test_qoq_models_the_whole_word(inputs):
    q4, scale, zero, offset = inputs["q4"], inputs["scale"], inputs["zero"], inputs["offset"]
    K = q4.shape[1]
    products = [
        [q * s for q, s in zip(*row, strict=True)] for row in zip(words_of(q4), per_word(scale, K), strict=True)
    ]
    added = wrap(bytes_of(products, np.uint8) + np.repeat(offset.astype(int), K // offset.shape[1], axis=1))
    np.testing.assert_array_equal(reference.dequant_qoq_vadd4(q4, scale, offset), added, strict=True)

    rows = zip(words_of(q4), per_word(scale, K), per_word(zero, K), strict=True)
    presub = [[(q - z * 0x01010101) * s for q, s, z in zip(*row, strict=True)] for row in rows]
    np.testing.assert_array_equal(reference.dequant_qoq_presub(q4, scale, zero), bytes_of(presub, np.int8), strict=True)
    zeros = [
        [z * s * 0x01010101 for s, z in zip(*row, strict=True)]
        for row in zip(per_word(scale, K), per_word(zero, K), strict=True)
    ]
    clamped = (bytes_of(products, np.uint8).astype(int) - bytes_of(zeros, np.uint8)).clip(-128, 127)
    saturating = reference.dequant_qoq_saturating(q4, scale, zero)
    np.testing.assert_array_equal(saturating, clamped.astype(np.int8), strict=True)
    missed = bytes_of(presub, np.int8) != reference.exact_qoq(q4, scale, zero)
    np.testing.assert_array_equal(reference.presub_wrong(q4, scale, zero), missed)


def test_saturating_is_the_clamped_product_in_every_case():
    """Clamp exactly for any scale that keeps its products bytes: no protective range is needed."""
    for q4, scale, zero in every_case((1, 2, 15, 16, 17), range(16)):
        clamped = reference.exact_qoq(q4, scale, zero).clip(-128, 127).astype(np.int8)
        np.testing.assert_array_equal(reference.dequant_qoq_saturating(q4, scale, zero), clamped, strict=True)


def test_saturation_replaces_the_protective_range():
    """QServe §4.1's group of -113..120: 120 becomes (15 - 7)·16 = 128, which wraps to -128, or is cut to 127."""
    q4, scale, zero = np.array([[15, 0, 7, 8]], np.uint8), np.array([[16]], np.uint8), np.array([[7]], np.uint8)
    offset = np.array([[-112]], np.int8)
    assert reference.exact_qoq(q4, scale, zero).tolist() == [[128, -112, 0, 16]]
    assert reference.dequant_qoq_vadd4(q4, scale, offset).tolist() == [[-128, -112, 0, 16]]
    assert reference.dequant_qoq_saturating(q4, scale, zero).tolist() == [[127, -112, 0, 16]]


def test_presub_borrows_from_the_lane_above():
    q4, scale, zero = np.array([[7, 8, 9, 8]], np.uint8), np.array([[2]], np.uint8), np.array([[8]], np.uint8)
    assert reference.exact_qoq(q4, scale, zero).tolist() == [[-2, 0, 2, 0]]
    assert reference.dequant_qoq_presub(q4, scale, zero).tolist() == [[-2, -1, 1, 0]]
    assert reference.presub_wrong(q4, scale, zero).tolist() == [[False, True, True, False]]


def test_lqq_overflow_reaches_the_neighbour():
    q4, scale, offset = np.array([[15, 0, 0, 0]], np.uint8), np.array([[16]], np.uint8), np.array([[16]], np.uint8)
    assert reference.exact_lqq(q4, scale, offset).tolist() == [[128, -112, -112, -112]]
    assert reference.dequant_lqq(q4, scale, offset).tolist() == [[-128, -111, -112, -112]]


def test_a_carry_out_of_the_fourth_lane_is_lost_not_passed_on():
    q4 = np.array([[0, 0, 0, 15, 0, 0, 0, 0]], np.uint8)
    values = reference.dequant_lqq(q4, np.array([[16]], np.uint8), np.array([[16]], np.uint8))
    assert values.tolist() == [[-112, -112, -112, -128, -112, -112, -112, -112]]


def test_conversions_of_every_nibble():
    nibbles = np.arange(16, dtype=np.uint8).reshape(2, 8)
    signed = np.where(nibbles < 8, nibbles.astype(int), nibbles.astype(int) - 16)
    cases = [
        (reference.dequant_qoq_channel, nibbles, nibbles),
        (reference.dequant_int4_naive, nibbles, signed.astype(np.int8)),
        (reference.dequant_comet, nibbles, (16 * signed).astype(np.int8)),
        (reference.dequant_comet, signed.astype(np.int8), (16 * signed).astype(np.int8)),
        (reference.dequant_u4_f16, nibbles, nibbles.astype(np.float16)),
        (reference.dequant_u4_f16_subnormal, nibbles, np.ldexp(nibbles.astype(np.float32), -24).astype(np.float16)),
    ]
    for dequant, q4, expected in cases:
        np.testing.assert_array_equal(dequant(q4), expected, strict=True, err_msg=dequant.__name__)
    assert reference.dequant_u4_f16_subnormal(nibbles)[0, 1] == 2.0**-24


def test_channel_result_is_a_copy():
    q4 = np.zeros((1, 8), np.uint8)
    reference.dequant_qoq_channel(q4)[0, 0] = 1
    assert q4[0, 0] == 0


def test_fits_s8():
    assert reference.fits_s8(np.array([-129, -128, 0, 127, 128], np.int32)).tolist() == [False, True, True, True, False]


def test_scale_rows():
    scaled = reference.scale_rows(np.array([[1, -2], [3, 4]], np.int8), np.array([0.5, 2], np.float32))
    np.testing.assert_array_equal(scaled, np.array([[0.5, -1], [6, 8]], np.float32), strict=True)


def test_wrong_dtypes_and_shapes_are_errors_not_wrong_numbers():
    q4, scale = np.zeros((1, 64), np.uint8), np.ones((1, 2), np.uint8)
    with pytest.raises(TypeError, match="offset: dtype must be int8"):
        reference.dequant_qoq_vadd4(q4, scale, scale)
    with pytest.raises(TypeError, match="values: dtype must be uint8"):
        reference.dequant_lqq(q4, scale, scale.view(np.int8))
    with pytest.raises(TypeError, match="scale: dtype must be uint8"):
        reference.dequant_lqq(q4, scale.astype(np.int32), scale)
    with pytest.raises(ValueError, match="do not divide into 3 groups"):
        reference.dequant_lqq(q4, np.ones((1, 3), np.uint8), np.ones((1, 3), np.uint8))
