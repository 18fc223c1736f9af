"""Each packing as its kernel meets it: loads of one lane -> reference dequantiser -> registers -> the fragment map.

The kernels are simulated in NumPy from the bytes of the buffers and the offsets that the documentation states, so the
packing code itself is used for nothing but packing.
"""

import numpy as np
import pytest
from hypothesis import given

from ptxlab.arithmetic import ceil_div
from ptxlab.hardware.fragments import Fragment, ldmatrix, mma_a, wgmma_a
from ptxlab.lowbit import reference
from ptxlab.lowbit.layout import pack, pack_u4
from ptxlab.lowbit.layout.nibbles import exchange_nibbles
from ptxlab.lowbit.quant import LQQWeight, QoQChannelWeight, QoQWeight, quantize_lqq, quantize_qoq
from tests.support import strategies
from tests.support.random_weights import random_weight, weights

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4
DEQUANT = {LQQWeight: reference.dequant_lqq, QoQWeight: reference.dequant_qoq_vadd4}


grouped = weights.filter(lambda weight: not isinstance(weight, QoQChannelWeight))


def registers(words: np.ndarray, scale: np.ndarray, offset: np.ndarray, dequant) -> np.ndarray:
    """Build operand A [lanes, 4] of one MMA from two words [lanes, 2] (rows r, r+8) and their constants [lanes, 2]."""
    a = np.empty((len(words), 4), np.uint32)
    for half in (0, 1):
        for nibble in (0, 1):
            q4 = reference.as_bytes(words[:, [half]] >> np.uint32(4 * nibble) & np.uint32(0x0F0F0F0F))
            weights = dequant(q4, scale[:, [half]], offset[:, [half]])
            a[:, half + 2 * nibble] = weights.view(np.uint32)[:, 0]
    return a


def tile_of(matrix: np.ndarray, row: int, column: int, fragment: Fragment) -> np.ndarray:
    """Return the part of a matrix that a fragment holds, padded with zeros beyond the matrix."""
    rows, columns = fragment.shape
    part = matrix[row : row + rows, column : column + columns]
    return np.pad(part, ((0, rows - part.shape[0]), (0, columns - part.shape[1])))


@pytest.mark.full
@given(grouped)
def test_dual_mma_feeds_wgmma(weight) -> None:
    blocks, logical = pack(weight, "dual_mma").buffers["blocks"], weight.level1()
    thread = np.arange(128)
    w, g = thread // 32, thread % 32 // 4
    groups, units = max(1, 64 // weight.group), max(1, weight.group // 64)
    for (row_tile, k_block), block in np.ndenumerate(blocks.view(f"V{blocks.shape[2]}")[..., 0]):
        memory = np.frombuffer(block.item(), np.uint8)
        constants = memory[2048 * units :].reshape(-1, groups, 2, 2)[8 * w + g]  # [thread, group, row half, pair]
        for unit in range(units):
            lds128 = memory[2048 * unit :][16 * thread[:, None] + np.arange(16)].view(np.uint32)
            for mma in (0, 1):
                pairs = constants[:, mma if groups == 2 else 0]
                offset = pairs[..., 1].view(np.int8) if isinstance(weight, QoQWeight) else pairs[..., 1]
                a = registers(lds128[:, 2 * mma : 2 * mma + 2], pairs[..., 0], offset, DEQUANT[type(weight)])
                k = 64 * (units * k_block + unit) + 32 * mma
                expected = tile_of(logical, 64 * row_tile, k, wgmma_a())
                np.testing.assert_array_equal(wgmma_a().gather(a, np.int8), expected)


@pytest.mark.full
@given(grouped)
def test_qserve_feeds_mma_sync(weight) -> None:
    buffers, logical = pack(weight, "qserve").buffers, weight.level1()
    offsets = buffers["offset"].view(np.int8) if isinstance(weight, QoQWeight) else buffers["offset"]
    for row_tile, k_tile in np.ndindex(buffers["qweight"].shape[:2]):
        lds128 = buffers["qweight"][row_tile, k_tile].reshape(32, 4)
        group = 32 * k_tile // weight.group
        scale, offset = (c[row_tile, group].reshape(8, 4)[G] for c in (buffers["scale"], offsets))  # four rows each
        for half in (0, 1):
            rows = slice(2 * half, 2 * half + 2)
            a = registers(lds128[:, rows], scale[:, rows], offset[:, rows], DEQUANT[type(weight)])
            expected = tile_of(logical, 32 * row_tile + 16 * half, 32 * k_tile, mma_a(32))
            np.testing.assert_array_equal(mma_a(32).gather(a, np.int8), expected)


@pytest.mark.full
@given(weights)
def test_comet_reaches_the_lanes_by_ldmatrix(weight) -> None:
    """A single ldmatrix.x4 gives each lane the words of dual_mma's LDS.128, in COMET's nibble order."""
    tiles, logical = pack(weight, "comet").buffers["qweight"], weight.q4
    unscaled = {"scale": np.ones((32, 2), np.uint8), "offset": np.zeros((32, 2), np.int8)}
    for row_tile, k_tile in np.ndindex(tiles.shape[:2]):
        rows_of_16_bytes = tiles[row_tile, k_tile].view(np.uint16).reshape(32, 8)
        words = exchange_nibbles(ldmatrix(4).scatter(rows_of_16_bytes))
        for mma in (0, 1):
            a = registers(words[:, 2 * mma : 2 * mma + 2], **unscaled, dequant=reference.dequant_qoq_vadd4)
            expected = tile_of(logical, 16 * row_tile, 64 * k_tile + 32 * mma, mma_a(32))
            np.testing.assert_array_equal(mma_a(32).gather(a), expected)


@pytest.mark.full
@given(grouped)
def test_strips_feeds_one_warp_with_unsigned_bytes(weight) -> None:
    strips, logical = pack(weight, "strips").buffers["strips"], weight.level1()
    for row_tile, k_block in np.ndindex(strips.shape[:2]):
        memory = strips[row_tile, k_block]
        constants = memory[1024:].reshape(-1, 8, 2, 2)[:, G]  # [group of the block, lane, row half, pair]
        for unit, mma in np.ndindex(2, 2):
            k = 64 * unit + 32 * mma
            pairs = constants[k // weight.group]
            lds128 = memory[512 * unit :][16 * LANE[:, None] + np.arange(16)].view(np.uint32)
            words = lds128[:, 2 * mma : 2 * mma + 2]
            a = registers(words, pairs[..., 0], pairs[..., 1], reference.dequant_lqq_unsigned)
            expected = tile_of(logical, 16 * row_tile, 128 * k_block + k, mma_a(32)).view(np.uint8) ^ np.uint8(0x80)
            np.testing.assert_array_equal(mma_a(32).gather(a), expected)  # weight + 128, padding too


@pytest.mark.parametrize("kind", [LQQWeight, QoQWeight])
@pytest.mark.parametrize(("group", "K"), [(32, 96), (32, 160), (64, 64), (64, 192), (128, 128), (128, 384)])
def test_strips_by_hand(kind: type, group: int, K: int) -> None:
    """The definition says which byte and nibble holds weight (row, k), where its constants lie, and what pads."""
    weight = random_weight(kind, 24, K, group, 0)
    strips = pack(weight, "strips").buffers["strips"]
    assert strips.shape == (2, ceil_div(K, 128), 1024 + 32 * (128 // group)) and strips.flags.c_contiguous
    q4, scale, offset = read_strips(strips, group)
    spread = [
        np.repeat(constants.astype(int), group, axis=1) for constants in (weight.group_scale, unsigned_offsets(weight))
    ]
    for actual, expected, padding in zip((q4, scale, offset), (weight.q4, *spread), (0, 1, 128), strict=True):
        np.testing.assert_array_equal(actual[:24, :K], expected)
        assert (actual[24:] == padding).all() and (actual[:, K:] == padding).all()


@pytest.mark.full
@pytest.mark.parametrize("quantise", [quantize_lqq, quantize_qoq])
@given(case=strategies.weight_groups())
def test_unsigned_form_never_carries_at_range_119(quantise, case) -> None:
    weight = quantise(np.tile(case.w, (8, 1)), case.group)
    assert (
        (unsigned_offsets(weight) >= 0) & (unsigned_offsets(weight) <= 255)
    ).all()  # so nothing was lost to the modulo either
    q4, scale, offset = read_strips(pack(weight, "strips").buffers["strips"], case.group)
    sums = q4.astype(int) * scale + offset
    assert sums.min() >= 0 and sums.max() <= 255
    N, K = weight.shape
    np.testing.assert_array_equal(sums[:N, :K], weight.exact_level1() + 128)
    np.testing.assert_array_equal(reference.dequant_lqq_unsigned(q4, scale[:, ::32], offset[:, ::32]), sums)


def read_strips(strips: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read q4, scale and stored offset of every weight of a buffer, padding included, all u8 [rows, k]."""
    row, k = np.indices((16 * strips.shape[0], 128 * strips.shape[1]))
    half, g = row % 16 // 8, row % 8
    unit, step, high, t, byte = k % 128 // 64, k % 64 // 32, k % 32 // 16, k % 16 // 4, k % 4
    pairs = strips[row // 16, k // 128, 512 * unit + 16 * (4 * g + t) + 4 * (2 * step + half) + byte]
    scale_at = 1024 + 32 * (k % 128 // group) + 4 * g + 2 * half
    scale, offset = (strips[row // 16, k // 128, scale_at + i] for i in (0, 1))
    return pairs >> (4 * high).astype(np.uint8) & np.uint8(15), scale, offset


def unsigned_offsets(weight) -> np.ndarray:
    """Return the offsets of the unsigned form in wide arithmetic, [N, K/g]."""
    if isinstance(weight, LQQWeight):
        return 128 + weight.minimum.astype(int)
    return 128 - weight.zero.astype(int) * weight.group_scale


@given(weights)
def test_row_major_is_words_in_place(weight) -> None:
    buffers = pack(weight, "row_major").buffers
    np.testing.assert_array_equal(buffers["qweight"], pack_u4(weight.q4), strict=True)
    if not isinstance(weight, QoQChannelWeight):
        np.testing.assert_array_equal(buffers["scale"], weight.group_scale, strict=True)
        np.testing.assert_array_equal(buffers["offset"], weight.offset.view(np.uint8), strict=True)


@pytest.mark.parametrize(("group", "size"), [(32, 2048 + 256), (64, 2048 + 128), (128, 4096 + 128)])
def test_blocks_are_bulk_copies(group: int, size: int) -> None:
    blocks = pack(random_weight(LQQWeight, 128, 256, group, 0), "dual_mma").buffers["blocks"]
    assert blocks.shape == (2, 256 // max(64, group), size) and size % 128 == 0 and blocks.flags.c_contiguous


def test_channel_blocks_have_no_constants() -> None:
    weight = random_weight(QoQChannelWeight, 72, 96, 96, 0)
    assert pack(weight, "dual_mma").buffers["blocks"].shape == (2, 2, 2048)
    assert pack(weight, "strips").buffers["strips"].shape == (5, 1, 1024)


@pytest.mark.parametrize("layout", ["qserve", "dual_mma", "comet", "strips"])
def test_two_weights_lie_where_the_diagrams_say(layout: str) -> None:
    """Row 9 = g 1 of the upper half, k 21 = second half of MMA 0, lane 1 of the quad, byte 1."""
    weight = random_weight(QoQChannelWeight, 64, 128, 128, 0)
    weight.q4[:] = 0
    weight.q4[9, 21] = 0xB
    word, nibble = (32 + 4 * 1 + 1, 2) if layout == "comet" else (4 * (4 * 1 + 1) + 1, 3)
    stored = next(iter(pack(weight, layout).buffers.values())).reshape(-1).view(np.uint32)
    assert np.flatnonzero(stored).tolist() == [word] and stored[word] == 0xB << 4 * nibble
    assert stored.size * 8 == 64 * 128
