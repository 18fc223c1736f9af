"""One-level weights of other projects, and the nearest that kernels here take."""

from typing import Any

import numpy as np
import pytest

from ptxlab.lowbit.quant import AffineWeight, lqq_group, quantize_lqq


def make_weight(N: int = 32, K: int = 256, group: int = 64, **changes: Any) -> AffineWeight:
    """Make a weight whose groups have scales up to 20 times apart."""
    rng = np.random.default_rng(0)
    scale = (rng.uniform(0.5, 2, (N, K // group)) * rng.choice([0.05, 1], (N, K // group), p=[0.1, 0.9])) / 100
    q4, zero = (rng.integers(0, 16, shape) for shape in ((N, K), (N, K // group)))
    fields = {"q4": q4.astype(np.uint8), "scale": scale.astype(np.float32), "zero": zero.astype(np.float32)}
    return AffineWeight(**(fields | changes))


def error(weight: Any, w: np.ndarray) -> float:
    return float(np.linalg.norm(weight.dequantize() - w) / np.linalg.norm(w))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_nearest_lqq(group: int) -> None:
    """Less error than quantising from the beginning has, and every nibble the nearest."""
    weight = make_weight(group=group)
    w, (lqq, requantised) = weight.dequantize(), weight.nearest_lqq(group)
    assert lqq.group == group and lqq.protective_range == 119 and requantised == 0
    assert error(lqq, w) < 0.03 and error(lqq, w) < 0.8 * error(quantize_lqq(w, group, rounding="search"), w)
    distance = np.abs(lqq.exact_level1() - w / lqq.channel_scale[:, None])
    steps = np.repeat(lqq.group_scale, group, axis=1)
    inside = (lqq.q4 > 0) & (lqq.q4 < 15)
    assert (distance <= steps / 2 + 1e-3)[inside].all()


@pytest.mark.parametrize("zero", [-3, 0, 8, 15, 40])
def test_no_nibble_of_a_group_can_overflow(zero: int) -> None:
    """Whatever the zeros are, of one-sided groups too."""
    lqq, _ = make_weight(zero=np.full((32, 4), zero, np.float32)).nearest_lqq(64)
    for nibble in (0, 15):
        level1 = lqq.restore(np.full((32, 4), nibble, np.uint8))
        assert level1.min() >= -128 and level1.max() <= 127


def test_a_negative_scale_costs_what_its_mirror_costs() -> None:
    """Half of the scales of AutoRound's symmetric files are negative."""
    weight = make_weight()
    sign = np.random.default_rng(1).choice(np.float32([-1, 1]), weight.scale.shape)
    mirrored = np.repeat(sign < 0, 64, axis=1)
    with_mirrors = make_weight(
        q4=np.where(mirrored, 15 - weight.q4, weight.q4),
        scale=weight.scale * sign,
        zero=np.where(sign < 0, 15 - weight.zero, weight.zero),
    )
    np.testing.assert_array_equal(with_mirrors.dequantize(), weight.dequantize())
    lqq, lqq_of_mirrors = (affine.nearest_lqq(64)[0] for affine in (weight, with_mirrors))
    np.testing.assert_allclose(lqq.dequantize(), lqq_of_mirrors.dequantize(), rtol=1e-6)


def test_groups_of_scale_0_are_zero() -> None:
    """A group of zeros, and a row of nothing else."""
    weight = make_weight()
    weight.scale[3, 2], weight.scale[5] = 0, 0
    lqq, requantised = weight.nearest_lqq(64)
    assert requantised == 0 and not lqq.dequantize()[3, 128:192].any() and not lqq.dequantize()[5].any()
    assert error(lqq, weight.dequantize()) < 0.03


def test_larger_groups_are_split_and_mixed_ones_quantised_again() -> None:
    """A group of 256 as two of 128; 160 columns in groups of 128 as five of 32; of others only those that are mixed."""
    weight = make_weight(K=512, group=256)
    assert lqq_group(weight.column_groups) == 128
    lqq, requantised = weight.nearest_lqq(128)
    assert requantised == 0 and error(lqq, weight.dequantize()) < 0.03
    short = make_weight(K=160, group=160)
    short = make_weight(
        q4=short.q4,
        scale=np.tile(short.scale, 2),
        zero=np.tile(short.zero, 2),
        group_of=(np.arange(160) // 128).astype(np.int32),
    )
    assert lqq_group(short.column_groups) == 32 and short.nearest_lqq(32)[1] == 0
    order = (np.arange(256) // 64).astype(np.int32)
    order[[0, 255]] = order[[255, 0]]  # the first and the last group each have a column of the other
    swapped = make_weight(group_of=order)
    w, (lqq, requantised) = swapped.dequantize(), swapped.nearest_lqq(64)
    assert lqq_group(order) == 32 and requantised == 2 * 32
    assert error(lqq, w) < error(quantize_lqq(w, 64, rounding="search"), w)
    with_none = make_weight(group_of=np.random.default_rng(0).permutation(order))
    again = quantize_lqq(with_none.dequantize(), 64, rounding="search")
    np.testing.assert_array_equal(with_none.nearest_lqq(64)[0].dequantize(), again.dequantize())


def test_per_channel() -> None:
    weight = make_weight(group=256)
    for sign in (1, -1):  # a negative scale is mirrored
        signed = make_weight(group=256, scale=weight.scale * np.float32(sign))
        per_channel = signed.per_channel()
        assert per_channel is not None and (per_channel.scale > 0).all()
        np.testing.assert_array_equal(per_channel.dequantize(), signed.dequantize())
    assert make_weight(group=128).per_channel() is None
    for zero in (16, -1, 7.5):
        assert make_weight(group=256, zero=np.full((32, 1), zero, np.float32)).per_channel() is None
