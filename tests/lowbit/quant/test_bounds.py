"""The bounds that make the packed arithmetic safe, over every group there can be.

What a quantiser makes of a value depends on the value and on its group's smallest and largest. So one group per pair
(smallest, largest) that holds every value in between covers all groups; only the search looks at the rest of a group.
"""

import random

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit import reference
from ptxlab.lowbit.quant import lqq_groups, qoq_groups


def all_groups(limit):
    """List all groups s8 [pairs, 2·limit + 1].

    For every -limit <= low <= high <= limit there is a row with every value in low..high.
    """
    values = np.arange(-limit, limit + 1, dtype=np.int8)
    low, high = (values[i] for i in np.triu_indices(values.size))
    return values.clip(low[:, None], high[:, None])


def distance(q8, exact):
    return np.abs(exact - q8.astype(np.int32))


def clips(q8, exact, scale):
    """Tell where the clamp of q4 costs more than rounding may."""
    return 2 * distance(q8, exact) > scale


def test_level_2_follows_the_formulas():
    """Scales, zero points and both ends of every group, by Python's own round (ties to even) and integer division."""
    q8 = all_groups(119)
    low, high = q8.min(axis=1).tolist(), q8.max(axis=1).tolist()
    q4, scale, zero = qoq_groups(q8, q8.shape[1])
    expected = []
    for a, b in zip(low, high, strict=True):
        s = max(round((max(b, 0) - min(a, 0)) / 15), 1)
        z = min(round(-min(a, 0) / s), 15)
        expected.append([s, z, *(min(max(round(end / s) + z, 0), 15) for end in (a, b))])
    assert np.stack([scale[:, 0], zero[:, 0], q4[:, 0], q4[:, -1]], axis=1).tolist() == expected

    for rounding, divide in (
        ("nearest", lambda extent: round(extent / 15)),
        ("ceiling", lambda extent: ceil_div(extent, 15)),
    ):
        q4, scale, minimum = lqq_groups(q8, q8.shape[1], rounding)
        expected = []
        for a, b in zip(low, high, strict=True):
            s = max(divide(b - a), 1)
            expected.append([s, a, 0, min(round((b - a) / s), 15)])
        actual = np.stack([scale[:, 0], minimum[:, 0], q4[:, 0], q4[:, -1]], axis=1, dtype=np.int64)
        assert actual.tolist() == expected


def test_qoq_at_range_119():
    q8 = all_groups(119)
    q4, scale, zero = qoq_groups(q8, q8.shape[1])
    exact = reference.exact_qoq(q4, scale, zero)
    assert scale.min() == 1 and scale.max() == 16
    assert q4.max() == 15 and zero.max() == 15
    assert (q4.astype(int) * scale).max() == 225
    assert exact.min() == -121 and exact.max() == 121
    assert (zero.astype(int) * scale).max() == 121
    assert (2 * distance(q8, exact) <= scale.astype(int) + 14).all()  # s1/2 for rounding, 7 for a clipped end


@pytest.mark.parametrize("rounding", ["nearest", "ceiling"])
def test_lqq_at_range_119(rounding):
    q8 = all_groups(119)
    q4, scale, minimum = lqq_groups(q8, q8.shape[1], rounding)
    offset = minimum.astype(int) + 128
    products = q4.astype(int) * scale
    assert scale.min() == 1 and scale.max() == 16 and q4.max() == 15
    assert products.max() == 240
    assert offset.min() == 9 and offset.max() == 247
    assert (products + offset).min() == 9 and (products + offset).max() == 254
    exact = products + minimum
    assert (2 * distance(q8, exact) <= np.maximum(scale, 14 * (rounding == "nearest"))).all()


def test_lqq_at_range_119_whatever_scale_a_search_may_choose():
    for scale in range(1, 17):
        for extent in range(239):
            shifted = np.arange(extent + 1)
            product = (np.rint(shifted / scale).clip(0, 15) * scale).max()
            assert product <= 240
            # The largest offset that leaves room for this extent below 119:
            assert product + 128 + (119 - extent) <= 255


@pytest.mark.default_cases("118", "119", "120")
@pytest.mark.parametrize("limit", [118, 119, 120, 121, 123, 124, 127])
def test_smallest_range_that_overflows(limit):
    q8 = all_groups(limit)
    q4, scale, zero = qoq_groups(q8, q8.shape[1])
    assert reference.fits_s8(reference.exact_qoq(q4, scale, zero)).all() == (limit < 120)
    assert scale.max() == (16 if limit < 124 else 17)
    for rounding in ("nearest", "ceiling"):
        q4, scale, minimum = lqq_groups(q8, q8.shape[1], rounding)
        assert reference.fits_s8(q4 * scale.astype(int) + minimum).all() == (limit < 121)
        assert scale.max() == 16


def test_search_overflows_from_range_120_on():
    """216 = 13.5·16 rounds up to 14·16; enough multiples of 16 beside it make 16 the best scale."""
    for limit, largest in ((119, 127), (120, 128)):
        q8 = (limit - 216 + np.array([[*range(0, 209, 16), 216] + [0, 16] * 9])).astype(np.int8)
        q4, scale, minimum = lqq_groups(q8, q8.shape[1], "search")
        assert scale.tolist() == [[16]]
        assert (q4 * scale.astype(int) + minimum).max() == largest


@pytest.mark.full
def test_hypothesis_finds_a_qoq_overflow_at_range_120():
    def overflows(ends):
        q4, scale, zero = qoq_groups(np.array([ends], np.int8), 2)
        return not reference.fits_s8(reference.exact_qoq(q4, scale, zero)).all()

    ends = st.tuples(st.integers(-120, 120), st.integers(-120, 120))
    settings = hypothesis.settings(max_examples=20_000, database=None)
    low, high = sorted(hypothesis.find(ends, overflows, settings=settings, random=random.Random(0)))
    assert high == 120 and low <= -113


def test_qserves_example_overflows():
    """QServe §4.1: in -113..120 the largest weight comes back as 128."""
    q4, scale, zero = qoq_groups(np.array([[-113, 120]], np.int8), 2)
    assert (scale, zero, q4[0, 1]) == (16, 7, 15) and reference.exact_qoq(q4, scale, zero)[0, 1] == 128


def test_nearest_clips_where_ceiling_does_not():
    q4, scale, _ = lqq_groups(np.array([[0, 22]], np.int8), 2)
    assert scale == 1 and q4[0, 1] == 15  # rounding the scale down clips 22 to 15
    q4, scale, _ = lqq_groups(np.array([[0, 22]], np.int8), 2, "ceiling")
    assert scale == 2 and q4[0, 1] == 11


@pytest.mark.default_cases("119")
@pytest.mark.parametrize("limit", [119, 120, 127])
def test_what_the_clamp_costs(limit):
    q8 = all_groups(limit)
    q4, scale, minimum = lqq_groups(q8, q8.shape[1], "ceiling")
    clipped = clips(q8, q4 * scale.astype(int) + minimum, scale)
    assert clipped.any() == (limit > 120)  # beyond 15·16 = 240 there is no scale left to round up to
    q4, scale, minimum = lqq_groups(q8, q8.shape[1], "nearest")
    assert clips(q8, q4 * scale.astype(int) + minimum, scale).any()
