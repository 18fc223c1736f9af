"""COMET's mixed precision: outliers in few blocks, blocks in INT4 or INT8."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ptxlab.errors import ArgumentError
from ptxlab.lowbit import quant
from ptxlab.lowbit.quant import BlockRows
from tests.support.dispatching_array import DispatchingArray


@pytest.mark.full
@given(data=st.data(), blocks=st.integers(1, 4), rows=st.integers(1, 3), block=st.sampled_from((64, 128)))
def test_every_number_is_within_half_a_step(data: st.DataObject, blocks: int, rows: int, block: int) -> None:
    floats = st.floats(-1000, 1000, width=32)
    x = data.draw(hnp.arrays(np.float32, (rows, block * blocks), elements=floats, fill=floats))
    int8 = data.draw(st.integers(0, blocks))
    quantised = quant.quantize_blocks(x, int8, block)
    assert quantised.shape == x.shape and quantised.channels4 == block * (blocks - int8) and quantised.block == block
    step = np.repeat(quantised.scale.astype(np.float64), block, axis=1)
    highest = np.where(np.arange(x.shape[1]) < quantised.channels4, 7, 127)
    assert (quantised.q >= -highest - 1).all() and (quantised.q <= highest).all()
    inside = np.clip(x, (-highest - 1) * step, highest * step)
    assert (np.abs(quantised.dequantize() - inside) <= step / 2 * (1 + 1e-6)).all()
    largest = np.abs(x).reshape(rows, blocks, block).max(axis=2)
    scales = (largest / np.float32([7] * (blocks - int8) + [127] * int8)).astype(np.float16)
    expected = np.where(largest == 0, np.float16(1), np.maximum(scales, np.float16(2.0**-24)))
    np.testing.assert_array_equal(quantised.scale, expected, strict=True)


def test_outliers_fill_few_blocks() -> None:
    """Thirty outliers all over 2048 channels: one block of sixteen is INT8, and holds them all."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 2048), dtype=np.float32)
    places = rng.choice(2048, 30, replace=False)
    x[:, places] *= 40
    sizes = quant.channel_sizes(x, "max")
    blocks = quant.int8_blocks(sizes)
    order = quant.outlier_order(sizes, 128 * blocks)
    assert blocks == 1 and set(places) <= set(order[-128:].tolist())

    def error(rows: BlockRows, right: np.ndarray) -> float:
        return float(np.linalg.norm(rows.dequantize() - right) / np.linalg.norm(right))

    permuted = error(quant.quantize_blocks(x[:, order], 1), x[:, order])
    in_place = error(quant.quantize_blocks(x, 1), x)
    assert permuted < in_place / 2


def test_at_most_a_fifth_of_the_blocks_is_int8() -> None:
    sizes = np.ones(1280)
    assert quant.int8_blocks(sizes) == 0
    sizes[:400] = 100
    assert quant.int8_blocks(sizes) == 2 and quant.int8_blocks(sizes, most=1.0) == 4
    assert quant.int8_blocks(sizes, outlier=200) == 0


def test_a_share_of_the_blocks_is_rounded_down_but_not_by_the_last_bit_of_a_float() -> None:
    sizes = np.ones(6400)
    assert 100 * 0.57 < 57 == quant.int8_blocks(sizes, 0, 0.57, block=64)
    assert quant.int8_blocks(sizes, 0, 0.575, block=64) == 57
    assert quant.int8_blocks(sizes[:1920], 0, 0.1) == 1 and quant.int8_blocks(sizes[:1920], 0, 0.0) == 0


def test_outliers_of_several_blocks_have_an_order() -> None:
    """Two blocks of ten: any number of channels can go to the end, not only Atom's 64 or 128."""
    sizes = np.ones(1280)
    sizes[::6] = 100
    blocks = quant.int8_blocks(sizes)
    assert blocks == 2
    order = quant.outlier_order(sizes, 128 * blocks)
    assert {*np.flatnonzero(sizes == 100)} <= {*order[-256:].tolist()}


def test_weights_are_int4_throughout_and_any_array_will_do() -> None:
    w = np.random.default_rng(0).standard_normal((5, 384), dtype=np.float32)
    weight = quant.quantize_block_weight(w)
    assert weight.int8 == 0 and np.abs(weight.q).max() == 7
    for quantise in (quant.quantize_block_weight, lambda w: quant.quantize_blocks(w, 1)):
        on_device, on_host = quantise(DispatchingArray(w)), quantise(w)
        for name in ("q", "scale"):
            np.testing.assert_array_equal(getattr(on_device, name).array, getattr(on_host, name), strict=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quant.quantize_blocks(np.ones((2, 192)), 0), r"x: channels must be a positive multiple of 128"),
        (lambda: quant.quantize_blocks(np.ones((2, 256)), 3), r"int8: must be 0..2 blocks \(got 3\)"),
        (lambda: quant.quantize_blocks(np.ones((2, 256)), 1.0), r"int8: must be 0..2 blocks \(got 1.0\)"),
        (lambda: quant.quantize_block_weight(np.full((2, 128), np.inf)), r"w: must be finite in float32"),
        (lambda: quant.quantize_block_weight(np.full((2, 128), 1e6)), r"w: a group's largest magnitude over 7 must"),
        (lambda: quant.quantize_blocks(np.ones((2, 256)), 0, 32), r"block: must be one of 64, 128 \(got 32\)"),
        (lambda: quant.int8_blocks(np.full(128, np.nan)), r"sizes: must be finite \(got channel 0\)"),
        (lambda: quant.int8_blocks(np.ones(128), outlier=float("nan")), r"outlier: must be a number in 0..inf"),
        (lambda: quant.int8_blocks(np.ones(100)), r"sizes: channels must be a positive multiple of 128"),
        (lambda: quant.int8_blocks(np.ones(128), most=1.5), r"most: must be a number in 0..1 \(got 1.5\)"),
    ],
)
def test_refuses(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
