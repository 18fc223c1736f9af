"""Fragment maps as data: bijections, inverses, and the entries that the PTX ISA prints."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxlab.errors import ArgumentError
from ptxlab.hardware.fragments import MMA_K, WGMMA_N, Fragment, ldmatrix, mma_a, mma_b, mma_c, wgmma_a, wgmma_d

FRAGMENTS = [
    *(ldmatrix(count, trans) for count in (1, 2, 4) for trans in (False, True)),
    *(operand(k) for operand in (mma_a, mma_b) for k in MMA_K),
    *(operand(bits, 128 // bits) for operand in (mma_a, mma_b) for bits in (8, 16, 32)),
    *(mma_c(bits) for bits in (16, 32)),
    wgmma_a(),
    *(wgmma_d(n) for n in WGMMA_N),
]
every_fragment = pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda f: f.name)


def test_what_integer_wgmma_allows() -> None:
    assert WGMMA_N == (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)


@every_fragment
def test_every_element_lies_in_exactly_one_place(fragment: Fragment) -> None:
    rows, columns = fragment.shape
    places = set(zip(fragment.rows.flat, fragment.cols.flat, strict=True))
    assert places == {(row, column) for row in range(rows) for column in range(columns)}
    assert fragment.rows.size == rows * columns == fragment.lanes * fragment.registers * 32 // fragment.bits


@pytest.mark.parametrize(
    ("fragment", "shape", "registers"),
    [
        (ldmatrix(2), (16, 8), 2),
        (mma_a(16), (16, 16), 4),
        (mma_a(32), (16, 32), 4),
        (mma_a(64), (16, 64), 4),
        (mma_b(16), (16, 8), 2),
        (mma_b(32), (32, 8), 2),
        (mma_b(64), (64, 8), 2),
        (mma_a(32, 4), (16, 32), 2),
        (mma_b(32, 4), (32, 8), 1),
        (mma_c(), (16, 8), 4),
        (mma_c(16), (16, 8), 2),
        (wgmma_a(), (64, 32), 4),
        (wgmma_d(24), (64, 24), 12),
    ],
    ids=lambda x: x.name if isinstance(x, Fragment) else "",
)
def test_shapes(fragment: Fragment, shape: tuple[int, int], registers: int) -> None:
    assert fragment.shape == shape and fragment.registers == registers


@pytest.mark.parametrize(
    ("fragment", "place", "expected"),
    [
        # lane 6 is groupID 1, threadID_in_group 2; a5 of m16n8k32 is register 1, element 1
        (ldmatrix(4), (6, 3, 1), (8 * 3 + 1, 5)),
        (ldmatrix(4, True), (6, 3, 1), (8 * 3 + 5, 1)),
        (mma_a(16), (6, 1, 1), (1 + 8, 5)),
        (mma_a(16), (6, 2, 0), (1, 4 + 8)),
        (mma_a(32), (6, 1, 1), (1 + 8, 2 * 4 + 1)),
        (mma_a(32), (6, 2, 3), (1, 2 * 4 + 3 + 16)),
        (mma_a(64), (6, 3, 7), (1 + 8, 2 * 8 + 7 + 32)),
        (mma_b(16), (6, 1, 1), (2 * 2 + 1 + 8, 1)),
        (mma_b(32), (6, 1, 2), (2 * 4 + 2 + 16, 1)),
        (mma_b(64), (6, 0, 5), (2 * 8 + 5, 1)),
        (mma_c(), (6, 3, 0), (1 + 8, 2 * 2 + 1)),
        (mma_c(16), (6, 1, 0), (1 + 8, 2 * 2)),
        (wgmma_a(), (32 * 3 + 6, 2, 3), (16 * 3 + 1, 2 * 4 + 3 + 16)),
        (wgmma_d(64), (32 * 2 + 6, 4 * 5 + 3, 0), (16 * 2 + 1 + 8, 8 * 5 + 2 * 2 + 1)),
    ],
    ids=lambda x: x.name if isinstance(x, Fragment) else str(x),
)
def test_entries_of_the_manual(fragment: Fragment, place: tuple[int, int, int], expected: tuple[int, int]) -> None:
    assert fragment.index(*place) == expected


@every_fragment
def test_scatter_and_gather_are_inverse(fragment: Fragment) -> None:
    bits = max(fragment.bits, 8)
    matrix = np.random.default_rng(0).integers(0, 2**fragment.bits, (3, 2, *fragment.shape), f"u{bits // 8}")
    registers = fragment.scatter(matrix)
    assert registers.shape == (3, 2, fragment.lanes, fragment.registers) and registers.dtype == np.uint32
    np.testing.assert_array_equal(fragment.gather(registers), matrix, strict=True)
    lane, register, element = fragment.lanes - 3, fragment.registers - 1, 32 // fragment.bits - 1
    row, column = fragment.index(lane, register, element)
    shifted = int(registers[2, 1, lane, register]) >> fragment.bits * element
    assert shifted & (2**fragment.bits - 1) == matrix[2, 1, row, column]


@given(st.sampled_from(FRAGMENTS), st.integers(0, 2**32 - 1))
def test_every_register_file_is_a_matrix(fragment: Fragment, seed: int) -> None:
    registers = np.random.default_rng(seed).integers(0, 2**32, (fragment.lanes, fragment.registers), np.uint32)
    np.testing.assert_array_equal(fragment.scatter(fragment.gather(registers)), registers, strict=True)


def test_signed_and_floating_elements() -> None:
    rng = np.random.default_rng(0)
    nibbles = rng.integers(-8, 8, (16, 64), np.int8)
    np.testing.assert_array_equal(mma_a(64).gather(mma_a(64).scatter(nibbles), np.int8), nibbles, strict=True)
    np.testing.assert_array_equal(mma_a(64).scatter(nibbles), mma_a(64).scatter(nibbles.view(np.uint8) & 15))
    bytes_ = rng.integers(-128, 128, (64, 32), np.int8)
    np.testing.assert_array_equal(wgmma_a().gather(wgmma_a().scatter(bytes_), np.int8), bytes_, strict=True)
    halves = rng.standard_normal((16, 8)).astype(np.float16)
    np.testing.assert_array_equal(mma_b(16).gather(mma_b(16).scatter(halves), np.float16), halves, strict=True)


def test_strides_do_not_matter() -> None:
    matrix = np.random.default_rng(0).integers(0, 256, (32, 64), np.uint8).T
    np.testing.assert_array_equal(wgmma_a().scatter(matrix), wgmma_a().scatter(matrix.copy()))
    registers = np.random.default_rng(0).integers(0, 2**32, (4, 128), np.uint32).T
    np.testing.assert_array_equal(wgmma_a().gather(registers), wgmma_a().gather(registers.copy()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ldmatrix(3), r"count: must be 1, 2 or 4 \(got 3\)"),
        (lambda: mma_a(8), r"k: must be one of 16, 32, 64 \(got 8\)"),
        (lambda: mma_b(8), r"k: must be one of 16, 32, 64 \(got 8\)"),
        (lambda: mma_a(64, 8), r"k: 32, 16, 8 or 4 bits, of which k are 128 or 256 \(got k=64, bits=8\)"),
        (lambda: mma_c(8), r"bits: must be 16 or 32 \(got 8\)"),
        (lambda: wgmma_d(40), r"n: integer wgmma takes 8, 16, 24, 32 .* \(got 40\)"),
        (lambda: wgmma_a().scatter(np.zeros((64, 64), np.uint8)), r"matrix: wgmma.m64k32.a is 64 x 32 .*\(64, 64\)"),
        (lambda: wgmma_a().scatter(np.zeros((64, 32), np.int16)), r"matrix: wgmma.m64k32.a has 8-bit .*got int16"),
        (lambda: wgmma_a().gather(np.zeros((64, 4), np.uint32)), r"registers: .* is uint32 \[128, 4\] .*\(64, 4\)"),
        (lambda: wgmma_a().gather(np.zeros((128, 4), np.int32)), r"registers: .* \(got int32 "),
    ],
)
def test_refuses(call, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
