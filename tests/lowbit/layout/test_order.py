import numpy as np

from ptxlab.lowbit.layout.order import Order

ROW_OF_TWO = Order("Na Kbc", "NKbac", a=2, b=2, c=2)


def test_order_of_one_tile() -> None:
    matrix = np.arange(8).reshape(2, 4)
    np.testing.assert_array_equal(ROW_OF_TWO.store(matrix), [[[0, 1, 4, 5, 2, 3, 6, 7]]], strict=True)


def test_tiles_and_padding() -> None:
    matrix = np.arange(3 * 5, dtype=np.uint8).reshape(3, 5)
    assert ROW_OF_TWO.tile == (2, 4) and ROW_OF_TWO.tiles(3, 5) == (2, 2)
    stored = ROW_OF_TWO.store(matrix, fill=99)
    assert stored.shape == ROW_OF_TWO.shape(3, 5) == (2, 2, 8) and stored.flags.c_contiguous
    assert stored[1, 1].tolist() == [14, 99, 99, 99, 99, 99, 99, 99]
    assert (stored == 99).sum() == stored.size - matrix.size
    np.testing.assert_array_equal(ROW_OF_TWO.restore(stored, 3, 5), matrix, strict=True)


def test_strides_of_the_input_do_not_matter() -> None:
    matrix = np.arange(4 * 8).reshape(8, 4).T
    np.testing.assert_array_equal(ROW_OF_TWO.store(matrix), ROW_OF_TWO.store(matrix.copy()))
    in_place = Order("N K", "NK").store(matrix)
    assert in_place.flags.c_contiguous and in_place.tolist() == matrix.tolist()
