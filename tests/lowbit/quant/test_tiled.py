"""A block of weights, repeated."""

import numpy as np

from ptxlab.lowbit import quant
from ptxlab.lowbit.quant.tiled import repeat_to_shape


def test_a_tiled_weight_repeats_its_block() -> None:
    block = quant.quantize_qoq(np.random.default_rng(0).standard_normal((24, 384), np.float32), group=128)
    repeated = repeat_to_shape(block, 40, 512)
    assert repeated.shape == (40, 512) and repeated.group == 128
    exact = block.exact_level1()
    assert (repeated.exact_level1() == np.block([[exact, exact], [exact, exact]])[:40, :512]).all()
    assert (repeated.channel_scale == np.tile(block.channel_scale, 2)[:40]).all()


def test_a_weight_of_plain_arrays_is_tiled_likewise() -> None:
    """The arrays are those of 8-bit weights, which need no class of their own."""
    q, scale = np.arange(6, dtype=np.int8).reshape(2, 3), np.array([1.0, 2.0], np.float32)
    assert repeat_to_shape(q, 3, 4).tolist() == [[0, 1, 2, 0], [3, 4, 5, 3], [0, 1, 2, 0]]
    assert repeat_to_shape(scale, 3, 4).tolist() == [1.0, 2.0, 1.0]
