import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxlab.errors import ArgumentError
from ptxlab.hardware.descriptors import SPANS, MatrixDescriptor, swizzle

every_span = pytest.mark.parametrize("span", SPANS)


def test_swizzle_of_128_bytes_exchanges_columns_by_row() -> None:
    row, column = np.indices((8, 8))
    np.testing.assert_array_equal(swizzle(128 * row + 16 * column, 128), 128 * row + 16 * (column ^ row))


@every_span
def test_swizzle_is_its_own_inverse_and_keeps_atoms(span: int) -> None:
    addresses = np.arange(4096)
    swizzled = swizzle(addresses, span)
    np.testing.assert_array_equal(swizzle(swizzled, span), addresses)
    np.testing.assert_array_equal(swizzled // span, addresses // span)  # a row stays in its row
    np.testing.assert_array_equal(swizzled % 16, addresses % 16)


@pytest.mark.parametrize("span", [32, 64, 128])
def test_swizzle_spreads_a_column_over_bank_groups(span: int) -> None:
    """The 8 rows of a core matrix meet a 16-byte bank group span/16 times less often than without."""
    column = swizzle(np.arange(8) * span, span) % 128 // 16
    assert len(set(column)) == 8 and len(set(np.arange(8) * span % 128 // 16)) == 128 // span


def test_addresses_without_swizzle_are_core_matrices() -> None:
    addresses = MatrixDescriptor(start=1024, stride=256, leading=128).addresses(16)
    assert addresses[3, 5] == 1024 + 16 * 3 + 5
    assert addresses[3, 16 + 5] == 1024 + 128 + 16 * 3 + 5
    assert addresses[8 + 3, 5] == 1024 + 256 + 16 * 3 + 5


def test_addresses_under_the_128_byte_swizzle() -> None:
    second_step = MatrixDescriptor(start=2048 + 32, stride=1024, span=128).addresses(16)
    assert second_step[0, 0] == 2048 + 32
    assert second_step[3, 5] == 2048 + 128 * 3 + 16 * (2 ^ 3) + 5
    assert second_step[8 + 3, 17] == 2048 + 1024 + 128 * 3 + 16 * (3 ^ 3) + 1


@every_span
def test_an_operand_touches_each_byte_once(span: int) -> None:
    descriptor = MatrixDescriptor(start=0, stride=max(8 * span, 256), leading=128, span=span)
    assert len(np.unique(descriptor.addresses(64))) == 64 * 32


sizes = st.integers(0, 2**14 - 1).map(lambda units: 16 * units)


@given(st.builds(MatrixDescriptor, start=sizes, stride=sizes, leading=sizes, span=st.sampled_from(SPANS)))
def test_encoding_round_trip(descriptor: MatrixDescriptor) -> None:
    assert MatrixDescriptor.decode(descriptor.encode()) == descriptor


def test_encoding() -> None:
    bits = MatrixDescriptor(start=0x400, stride=1024, leading=16, span=128).encode()
    assert bits == 1 << 62 | 64 << 32 | 1 << 16 | 0x40


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: swizzle(0, 48), r"span: must be one of 16, 32, 64, 128 \(got 48\)"),
        (lambda: MatrixDescriptor(0, 0, span=0), r"span: must be one of"),
        (lambda: MatrixDescriptor(8, 0), r"start: must be a multiple of 16 below 2\^18 \(got 8\)"),
        (lambda: MatrixDescriptor(0, 1 << 18), r"stride: must be a multiple of 16 below 2\^18 \(got 262144\)"),
        (lambda: MatrixDescriptor(0, 0, leading=-16), r"leading: must be a multiple of 16"),
        (lambda: MatrixDescriptor.decode(1 << 49), r"descriptor: base offset must be 0"),
    ],
)
def test_refuses(call, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
