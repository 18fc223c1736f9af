import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.hardware.descriptors import MatrixDescriptor
from ptxlab.hardware.fragments import mma_b
from ptxlab.lowbit.layout.activations import (
    from_fragment_order,
    from_swizzled_tiles,
    to_fragment_order,
    to_swizzled_tiles,
)


def random_x(M: int, K: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-128, 128, (M, K), np.int8)


matrices = st.builds(random_x, st.integers(1, 40), st.integers(1, 300), st.integers(0, 2**32 - 1))
tile_rows = st.sampled_from([8, 16, 24, 64, 256])


@given(matrices)
def test_fragment_order_feeds_mma_sync(x: np.ndarray) -> None:
    M, K = x.shape
    fragments = to_fragment_order(x)
    assert fragments.shape == (ceil_div(K, 64), ceil_div(M, 8), 512) and fragments.dtype == np.int8
    padded = np.pad(x, ((0, -M % 8), (0, -K % 64)))
    for step, tokens in np.ndindex(fragments.shape[:2]):
        lds128 = fragments[step, tokens].view(np.uint32).reshape(32, 4)
        for mma in (0, 1):
            b = mma_b(32).gather(lds128[:, 2 * mma : 2 * mma + 2], np.int8)
            k = 64 * step + 32 * mma
            np.testing.assert_array_equal(b.T, padded[8 * tokens : 8 * tokens + 8, k : k + 32])
    np.testing.assert_array_equal(from_fragment_order(fragments, M, K), x, strict=True)


@pytest.mark.full
@given(matrices, tile_rows)
def test_swizzled_tiles_feed_wgmma(x: np.ndarray, rows: int) -> None:
    M, K = x.shape
    tiles = to_swizzled_tiles(x, rows)
    assert tiles.shape == (ceil_div(M, rows), ceil_div(K, 128), 128 * rows) and tiles.dtype == np.int8
    padded = np.pad(x, ((0, -M % rows), (0, -K % 128)))
    for block, column in np.ndindex(tiles.shape[:2]):
        for step in range(4):
            descriptor = MatrixDescriptor(start=32 * step, stride=1024, span=128)
            b = tiles[block, column][descriptor.addresses(rows)]
            k = 128 * column + 32 * step
            np.testing.assert_array_equal(b, padded[rows * block : rows * (block + 1), k : k + 32])
    np.testing.assert_array_equal(from_swizzled_tiles(tiles, M, K, rows), x, strict=True)


def test_where_one_activation_lies() -> None:
    x = np.zeros((16, 256), np.int8)
    x[11, 64 + 32 + 16 + 6] = 7  # token 3 of the second eight; second step, MMA 1, register 1, lane 1 of the quad
    assert np.flatnonzero(to_fragment_order(x)).tolist() == [512 * (2 * 1 + 1) + 16 * (4 * 3 + 1) + 8 + 4 + 2]
    x = np.zeros((16, 256), np.int8)
    x[11, 128 + 16 * 5 + 6] = 7  # row 3 of the second atom, column 5
    assert np.flatnonzero(to_swizzled_tiles(x, 16)).tolist() == [128 * 16 + 128 * 11 + 16 * (5 ^ 3) + 6]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: to_fragment_order(random_x(2, 64).view(np.uint8)), r"x_q: dtype must be int8 \(got uint8\)"),
        (lambda: to_fragment_order([1]), r"x_q: dtype must be int8 \(got list\)"),
        (lambda: to_fragment_order(random_x(2, 64)[0]), r"x_q: must be a non-empty matrix \[M, K\] .*\(64,\)"),
        (lambda: to_swizzled_tiles(random_x(0, 64), 8), r"x_q: must be a non-empty matrix .*\(0, 64\)"),
        (lambda: to_swizzled_tiles(random_x(2, 64), 12), r"rows: must be a multiple of 8 in 8..256 \(got 12\)"),
        (lambda: to_swizzled_tiles(random_x(2, 64), 0), r"rows: must be a multiple of 8 in 8..256 \(got 0\)"),
        (lambda: to_swizzled_tiles(random_x(2, 64), 264), r"rows: must be a multiple of 8 in 8..256 \(got 264\)"),
        (
            lambda: from_fragment_order(np.zeros((1, 1, 512), np.int8), 9, 64),
            r"fragments: must be int8 \[1, 2, 512\] for M=9, K=64 \(got int8 \[1, 1, 512\]\)",
        ),
        (lambda: from_fragment_order(np.zeros((1, 1, 512), np.int8), 0, 64), r"fragments: M and K must be positive"),
        (
            lambda: from_swizzled_tiles(np.zeros((1, 1, 1024), np.uint8), 8, 128, 8),
            r"tiles: must be int8 \[1, 1, 1024\] for M=8, K=128 \(got uint8 \[1, 1, 1024\]\)",
        ),
        (lambda: from_swizzled_tiles(None, 8, 128, 8), r"tiles: must be int8 .* \(got NoneType \[\]\)"),
    ],
)
def test_refuses(call, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
