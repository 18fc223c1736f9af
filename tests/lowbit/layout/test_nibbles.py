import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ptxlab.errors import ArgumentError
from ptxlab.lowbit.layout import pack_comet, pack_u4, unpack_comet, unpack_u4
from ptxlab.lowbit.layout.nibbles import exchange_nibbles, pack_mma, unpack_mma
from ptxlab.lowbit.reference import as_words, dequant_comet
from tests.support import strategies

MATRICES = strategies.shapes().flatmap(lambda shape: strategies.q4_matrix(shape.rows, shape.K))
SIGNED = hnp.arrays(np.int8, st.tuples(st.integers(1, 4), st.just(32)), elements=st.integers(-8, 7))


def test_order_of_the_micro_kernel_word():
    assert pack_u4(np.arange(8, dtype=np.uint8)).tolist() == [0x73625140]


def test_order_of_the_comet_word():
    assert pack_comet(np.arange(8, dtype=np.int8)).tolist() == [0x37261504]


def test_order_of_the_mma_word():
    """Word t of a k32 step: weights 4t..4t+3 low, 16+4t..19+4t high."""
    words = pack_mma(np.arange(64, dtype=np.uint8)[None] % 16 // np.array([[1], [4]], np.uint8))
    assert [f"{word:08x}" for word in words[0]] == ["33221100", "77665544", "bbaa9988", "ffeeddcc"] * 2
    assert [f"{word:08x}" for word in words[1]] == ["00000000", "11111111", "22222222", "33333333"] * 2
    step = np.zeros((1, 32), np.uint8)
    step[0, [5, 17, 31]] = 1, 2, 3
    assert [f"{word:08x}" for word in pack_mma(step)[0]] == ["00002000", "00000100", "00000000", "30000000"]


@pytest.mark.full
@given(MATRICES)
def test_mma_round_trip(q4):
    words = pack_mma(q4)
    np.testing.assert_array_equal(unpack_mma(words), q4, strict=True)
    exchanged = exchange_nibbles(words)
    np.testing.assert_array_equal(exchange_nibbles(exchanged), words, strict=True)
    np.testing.assert_array_equal(exchanged >> np.uint32(4) & 0x0F0F0F0F, words & 0x0F0F0F0F)


@pytest.mark.full
@given(MATRICES)
def test_u4_round_trip(q4):
    words = pack_u4(q4)
    assert words.dtype == np.uint32 and words.shape == (q4.shape[0], q4.shape[1] // 8)
    np.testing.assert_array_equal(unpack_u4(words), q4, strict=True)


@pytest.mark.full
@given(strategies.words(3, 5))
def test_every_word_is_a_packed_matrix(words):
    np.testing.assert_array_equal(pack_u4(unpack_u4(words)), words, strict=True)
    np.testing.assert_array_equal(pack_comet(unpack_comet(words)), words, strict=True)


@pytest.mark.full
@given(SIGNED)
def test_comet_round_trip(q4):
    np.testing.assert_array_equal(unpack_comet(pack_comet(q4)), q4, strict=True)


@pytest.mark.full
@given(SIGNED)
def test_comet_word_dequantises_with_two_masks_and_a_shift(q4):
    words = pack_comet(q4)
    mask = np.uint32(0xF0F0F0F0)
    halves = np.stack([words & mask, (words << np.uint32(4)) & mask], axis=-1).reshape(len(q4), -1)
    np.testing.assert_array_equal(halves, as_words(dequant_comet(q4).view(np.uint8)))


def test_any_number_of_axes_and_any_strides():
    q4 = np.random.default_rng(0).integers(0, 16, (2, 16, 3), dtype=np.uint8).transpose(2, 0, 1)
    np.testing.assert_array_equal(unpack_u4(pack_u4(q4)), q4)
    np.testing.assert_array_equal(unpack_u4(pack_u4(q4[0, 0])), q4[0, 0])
    signed = q4.astype(np.int8) - np.int8(8)
    np.testing.assert_array_equal(unpack_comet(pack_comet(signed)), signed)


@pytest.mark.parametrize(
    ("pack", "values", "message"),
    [
        (
            pack_u4,
            np.array([[0] * 8, [0, 0, 15, 16, 0, 16, 0, 0]], np.uint8),
            r"qw: must be at most 15 .*qw\[1, 3\] is 16",
        ),
        (pack_u4, np.zeros((2, 12), np.uint8), r"qw: the last axis must be a positive multiple of 8 .*\(2, 12\)"),
        (pack_u4, np.zeros((2, 0), np.uint8), "positive multiple of 8"),
        (pack_u4, np.array(3, np.uint8), "positive multiple of 8"),
        (pack_u4, np.zeros((2, 8), np.int8), r"qw: dtype must be uint8 \(got int8\)"),
        (pack_u4, [0] * 8, r"qw: dtype must be uint8 \(got list\)"),
        (pack_mma, np.full((1, 32), 16, np.uint8), r"qw: must be at most 15 .*qw\[0, 0\] is 16"),
        (pack_mma, np.zeros((1, 40), np.uint8), r"qw: the last axis must be a multiple of 32 .*\(1, 40\)"),
        (pack_comet, np.array([[0] * 7 + [8]], np.int8), r"qw: must lie in -8\.\.7 .*qw\[0, 7\] is 8"),
        (pack_comet, np.full((1, 8), -9, np.int8), r"qw\[0, 0\] is -9"),
        (pack_comet, np.zeros((2, 8), np.uint8), "dtype must be int8"),
        (pack_comet, np.zeros((2, 4), np.int8), "positive multiple of 8"),
    ],
)
def test_refuses(pack, values, message):
    with pytest.raises(ArgumentError, match=message):
        pack(values, "qw")


@pytest.mark.parametrize("unpack", [unpack_u4, unpack_comet, unpack_mma, exchange_nibbles])
def test_unpacking_refuses_other_dtypes(unpack):
    with pytest.raises(ArgumentError, match="words: dtype must be uint32"):
        unpack(np.zeros(2, np.int32))


def test_unpacking_mma_words_refuses_part_of_a_step():
    for words in (np.zeros((2, 6), np.uint32), np.array(0, np.uint32)):
        with pytest.raises(ArgumentError, match="words: the last axis must be a multiple of 4"):
            unpack_mma(words)
    assert unpack_mma(np.zeros((3, 0), np.uint32)).shape == (3, 0)
