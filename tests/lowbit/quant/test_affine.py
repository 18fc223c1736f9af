"""One-level weights of other projects, and the nearest that kernels here take."""

from typing import Any

import numpy as np
import pytest

from ptxlab.lowbit.quant import AffineWeight, quantize_lqq


def made(N: int = 32, K: int = 256, group: int = 64, **changes: Any) -> AffineWeight:
    """Groups of scales up to 20 times apart."""
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
    weight = made(group=group)
    w, found = weight.dequantize(), weight.nearest_lqq()
    assert found is not None and found.group == group and found.protective_range == 119
    assert error(found, w) < 0.03 and error(found, w) < 0.8 * error(quantize_lqq(w, group, rounding="search"), w)
    distance = np.abs(found.exact_level1() - w / found.channel_scale[:, None])
    steps = np.repeat(found.group_scale, group, axis=1)
    inside = (found.q4 > 0) & (found.q4 < 15)
    assert (distance <= steps / 2 + 1e-3)[inside].all()


@pytest.mark.parametrize("zero", [-3, 0, 8, 15, 40])
def test_no_nibble_of_a_group_can_overflow(zero: int) -> None:
    """Whatever the zeros are, of one-sided groups too."""
    found = made(zero=np.full((32, 4), zero, np.float32)).nearest_lqq()
    assert found is not None
    for nibble in (0, 15):
        restored = found.restored(np.full((32, 4), nibble, np.uint8))
        assert restored.min() >= -128 and restored.max() <= 127


def test_what_has_no_nearest() -> None:
    assert made(K=512, group=256).nearest_lqq() is None and made(group=16).nearest_lqq() is None
    assert made(group_of=np.zeros(256, np.int32)).nearest_lqq() is None
    for bad in (0, -1):
        scale = np.ones((32, 4), np.float32)
        scale[3, 2] = bad
        assert made(scale=scale).nearest_lqq() is None


def test_per_channel() -> None:
    weight = made(group=256)
    found = weight.per_channel()
    assert found is not None
    np.testing.assert_array_equal(found.dequantize(), weight.dequantize())
    assert made(group=128).per_channel() is None
    for zero in (16, -1, 7.5):
        assert made(group=256, zero=np.full((32, 1), zero, np.float32)).per_channel() is None
