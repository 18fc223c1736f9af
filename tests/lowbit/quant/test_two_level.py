"""QoQ and LQQ weights end to end: float matrix in, integers within their bounds, float matrix back."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given

from ptxlab.lowbit import reference
from ptxlab.lowbit.quant import (
    lqq_groups,
    qoq_groups,
    quantize_level1,
    quantize_lqq,
    quantize_qoq,
    quantize_qoq_channel,
)
from tests.support import strategies

FROM_THE_SMALLEST = ("nearest", "ceiling", "search")  # roundings whose levels begin at the smallest weight of a group
ROUNDINGS = (*FROM_THE_SMALLEST, "levels")
QUANTISERS = {"qoq": quantize_qoq, **{f"lqq {r}": partial(quantize_lqq, rounding=r) for r in ROUNDINGS}}
every_scheme = pytest.mark.parametrize("quantise", QUANTISERS.values(), ids=QUANTISERS.keys())


def by_group(per_group, K):
    return np.repeat(per_group.astype(np.int32), K // per_group.shape[1], axis=1)


@pytest.mark.full
@every_scheme
@given(case=strategies.weight_groups())
def test_integers_at_range_119(quantise, case):
    weight = quantise(case.w, group=case.group)
    N, K = case.w.shape
    assert weight.shape == (N, K) and weight.group == case.group and weight.protective_range == 119
    assert weight.q4.dtype == np.uint8 and weight.q4.max() <= 15
    assert weight.group_scale.dtype == np.uint8 and weight.group_scale.shape == (N, K // case.group)
    assert weight.group_scale.min() >= 1 and weight.group_scale.max() <= 16
    assert (weight.q4 * by_group(weight.group_scale, K)).max() <= 240
    assert not weight.overflows().any()
    np.testing.assert_array_equal(weight.level1(), weight.exact_level1())
    exact = weight.exact_level1().astype(np.float32) * weight.channel_scale[:, None]
    np.testing.assert_array_equal(weight.dequantize(), exact, strict=True)


# In level-1 steps, by group scale: half of it for rounding, and what clipping an end of the group may cost. The search
# has no bound per weight: it may give one up for the others (see `test_search_is_the_best_of_all_scales`).
ERROR_BOUNDS = {
    "qoq": lambda scale: scale / 2 + 7,
    "lqq nearest": lambda scale: np.maximum(scale / 2, 7),
    "lqq ceiling": lambda scale: scale / 2,
}


@pytest.mark.full
@pytest.mark.parametrize("scheme", ERROR_BOUNDS)
@given(case=strategies.weight_groups())
def test_error_bound(scheme, case):
    weight = QUANTISERS[scheme](case.w, group=case.group)
    steps = np.abs(case.w - weight.dequantize()) / weight.channel_scale[:, None]
    assert (steps <= np.repeat(ERROR_BOUNDS[scheme](weight.group_scale), case.group, axis=1)).all()


@pytest.mark.full
@given(case=strategies.weight_groups())
def test_fields_of_qoq(case):
    weight = quantize_qoq(case.w, case.group)
    assert weight.zero.dtype == np.uint8 and weight.zero.max() <= 15
    assert weight.offset.dtype == np.int8
    np.testing.assert_array_equal(weight.offset, -(weight.zero.astype(int) * weight.group_scale))
    zeros = case.w == 0
    assert (weight.dequantize()[zeros] == 0).all()  # an integer zero point keeps zero exact


@pytest.mark.full
@pytest.mark.parametrize("rounding", FROM_THE_SMALLEST)
@given(case=strategies.weight_groups())
def test_fields_of_lqq(rounding, case):
    weight = quantize_lqq(case.w, case.group, rounding=rounding)
    groups = case.q8.reshape(len(case.q8), -1, case.group)
    np.testing.assert_array_equal(weight.minimum, groups.min(axis=2), strict=True)
    assert weight.offset.dtype == np.uint8
    np.testing.assert_array_equal(weight.offset, weight.minimum.astype(int) + 128)
    assert weight.offset.min() >= 9 and weight.offset.max() <= 247
    K = case.w.shape[1]
    lanes = weight.q4 * by_group(weight.group_scale, K) + by_group(weight.offset, K)
    assert lanes.min() >= 9 and lanes.max() <= 255
    smallest = case.q8 == np.repeat(weight.minimum, case.group, axis=1)
    assert (weight.q4[smallest] == 0).all()


@pytest.mark.full
@given(case=strategies.integer_groups())
def test_search_is_the_best_of_all_scales(case):
    groups = case.q8.reshape(len(case.q8), -1, case.group).astype(int)
    shifted = groups - groups.min(axis=2, keepdims=True)
    squared_errors = []  # of each scale from 1 to 16: an array [row, group]
    for scale in range(1, 17):
        q4 = np.rint(shifted / scale).clip(0, 15)
        squared_errors.append(((q4 * scale - shifted) ** 2).sum(axis=2))
    _, scale, _ = lqq_groups(case.q8, case.group, "search")
    np.testing.assert_array_equal(scale, np.argmin(squared_errors, axis=0) + 1)


@pytest.mark.full
@given(case=strategies.integer_groups(-127, 127))
def test_every_weight_is_at_the_nearest_level_of_its_group(case):
    q4, scale, minimum = (array.astype(int) for array in lqq_groups(case.q8, case.group, "levels"))
    K = case.q8.shape[1]
    values = by_group(minimum, K)[:, :, None] + by_group(scale, K)[:, :, None] * np.arange(16)
    distance = np.abs(values - case.q8[:, :, None])
    np.testing.assert_array_equal(np.take_along_axis(distance, q4[:, :, None], 2)[:, :, 0], distance.min(axis=2))


@pytest.mark.parametrize("steps", range(8, 16))
def test_levels_that_are_integers_stay(steps):
    """The rule holds with any scale, at either end of the range."""
    places = np.random.default_rng(steps).integers(0, steps + 1, 32)
    places[[3, 20]] = 0, steps
    for scale in range(1, min(16, 238 // steps) + 1):
        for low in (-119, 119 - steps * scale):
            q8 = (low + scale * places)[None].astype(np.int8)
            q4, group_scale, minimum = lqq_groups(q8, 32, "levels")
            np.testing.assert_array_equal(q4 * group_scale.astype(int) + minimum, q8)


def relative_error(weight, w):
    return float(np.linalg.norm(weight.dequantize() - w) / np.linalg.norm(w))


def weights_on_16_levels(symmetric, size):
    """Make weights [64, 512] as files hold them, on 16 levels of float scales.

    The levels are -8 to 7 times a scale, or begin at any float.
    """
    w = np.random.default_rng(0).standard_normal((64, 512 // size, size))
    if symmetric:
        scale = np.abs(w).max(axis=2, keepdims=True) / 8
        start = -8 * scale
    else:
        scale = np.ptp(w, axis=2, keepdims=True) / 15
        start = w.min(axis=2, keepdims=True)
    levels = np.rint((w - start) / scale).clip(0, 15) * scale + start
    return levels.reshape(64, 512).astype(np.float32)


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [False, True], ids=["affine", "symmetric"])
def test_weights_that_were_in_4_bits_keep_more_by_their_levels(symmetric, size):
    w = weights_on_16_levels(symmetric, size)
    levels, search = (relative_error(quantize_lqq(w, 32, rounding=rounding), w) for rounding in ("levels", "search"))
    assert levels < 0.045 and levels < (0.6 if size == 32 else 0.9) * search


def test_other_weights_lose_no_more_by_levels_than_by_a_search_of_scales():
    w = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    levels, search = (relative_error(quantize_lqq(w, 32, rounding=rounding), w) for rounding in ("levels", "search"))
    assert levels < search < 0.08


@pytest.mark.full
@given(case=strategies.integer_groups(-127, 127))
def test_beyond_the_protective_range(case):
    """An overflow is reported, and reaches no other word: words without overflow are exact."""
    scale = np.ones(len(case.q8), np.float32)
    w = case.q8 * scale[:, None]
    w[:, 0] = 127
    for weight in (quantize_qoq(w, case.group, 127), quantize_lqq(w, case.group, 127)):
        exact = weight.exact_level1()
        overflows = (exact < -128) | (exact > 127)
        by_group = overflows.reshape(len(w), -1, case.group).any(axis=2)
        np.testing.assert_array_equal(weight.overflows(), by_group)
        quiet = np.repeat(~overflows.reshape(len(w), -1, 4).any(axis=2), 4, axis=1)
        np.testing.assert_array_equal(weight.level1()[quiet], exact[quiet])
        np.testing.assert_array_equal(weight.dequantize(), weight.level1().astype(np.float32))


def test_overflow_shows_in_the_dequantised_weights():
    w = np.zeros((1, 128), np.float32)
    w[0, :2] = -113, 120
    weight = quantize_qoq(w, protective_range=120)
    assert weight.overflows().sum() == 1 and weight.exact_level1()[0, 1] == 128
    assert weight.dequantize()[0, 1] == -128


@every_scheme
def test_groups_of_equal_values(quantise):
    w = np.repeat(np.array([[0, -119, 119, 1]], np.float32), 64, axis=1)
    weight = quantise(w, group=64)
    assert weight.group_scale[0, 0] == 1 and (weight.q4[0, :64] == weight.q4[0, 0]).all()
    if isinstance(quantise, partial):  # LQQ keeps a constant group exactly, QoQ only as well as a range from 0 allows
        np.testing.assert_array_equal(weight.dequantize(), w)
    else:
        np.testing.assert_array_equal(weight.dequantize()[0, ::64], [0, -120, 120, 1])


def test_one_sided_groups_are_lqqs_advantage():
    w = np.linspace(100, 119, 128, dtype=np.float32)[None]
    qoq, lqq = quantize_qoq(w), quantize_lqq(w, group=128)
    assert qoq.zero.tolist() == [[0]] and qoq.group_scale.tolist() == [[8]]
    assert lqq.minimum.tolist() == [[100]] and lqq.group_scale.tolist() == [[1]]


def test_group_sizes_are_independent_along_k():
    w = np.random.default_rng(0).standard_normal((2, 256)).astype(np.float32)
    q8 = quantize_level1(w).q8
    for group in (32, 64, 128):
        whole, half = qoq_groups(q8, group), qoq_groups(q8[:, 128:].copy(), group)
        for a, b in zip(whole, half, strict=True):
            np.testing.assert_array_equal(a[:, a.shape[1] // 2 :], b)


def test_channel_form_rounds_and_clamps():
    weight = quantize_qoq_channel(np.array([[-1.5, 13.5, 0.5, 2.6, 0]], np.float32))
    assert (weight.scale, weight.zero) == (1, 2)
    assert weight.q4.tolist() == [[0, 15, 2, 5, 2]]  # 13.5 and the zero point both round up: 16, clamped


def test_channel_form():
    w = np.random.default_rng(0).standard_normal((5, 48)).astype(np.float32)
    w[1], w[2], w[3] = 0, np.abs(w[2]) + 1, -np.abs(w[3])
    weight = quantize_qoq_channel(w)
    assert (weight.q4.dtype, weight.zero.dtype, weight.scale.dtype) == (np.uint8, np.uint8, np.float32)
    assert weight.q4.max() == 15 and weight.zero[2] == 0 and weight.zero[3] == 15
    extent = np.maximum(w.max(axis=1), 0) - np.minimum(w.min(axis=1), 0)
    np.testing.assert_array_equal(weight.scale, np.where(extent == 0, np.float32(1), extent / np.float32(15)))
    error = np.abs(weight.dequantize() - w)
    assert (error <= weight.scale[:, None] * (1 + 1e-5)).all()  # half a step, and half for the rounded zero point
    np.testing.assert_array_equal(
        weight.dequantize(),
        reference.scale_rows(weight.q4.astype(np.int32) - weight.zero[:, None].astype(np.int32), weight.scale),
    )
