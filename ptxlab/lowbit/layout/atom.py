"""How `AtomRows` lie in memory: as rows for mma.sync, the weights as strips for wgmma.

**Rows** (weights and activations alike): INT4 channels two a byte, the even one in the low nibble, as mma.m16n8k64
takes them; INT8 channels as bytes; scales f16 [R, S], one per group and then that of the outliers, with ones up to a
whole number of eights, so that a row of them is a multiple of 16 bytes.

**Strips** (weights for wgmma): 16 rows over all channels, contiguous. A block of 128 INT4 channels is 1,024 bytes as in
the packing `strips` (`layout.packings`), but each nibble signed and in COMET's order: the high nibbles are the first
four of a word, so that one AND leaves 16 w in every byte. Then 32 bytes per group: the f16 scales of rows g and g + 8
are one 32-bit load at 4·g. Behind these blocks one of the outliers, padded to 128 channels with zeros: per k32 step 16
bytes a lane, operand A of the MMA as it is, 2,048 bytes, and 32 of scales.
"""

import numpy as np
import numpy.typing as npt

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F16, S8, U8, as_bytes, as_words
from ptxlab.lowbit.layout.nibbles import exchange_nibbles, pack_mma, pack_s4, unpack_mma
from ptxlab.lowbit.layout.order import Order
from ptxlab.lowbit.quant.atom import ATOM_GROUPS, AtomRows
from ptxlab.lowbit.quant.fmpq import BlockRows

BLOCK = 128  # channels
OUTLIER_BYTES = 2048 + 32  # of a strip's block of outliers
_NIBBLES = Order("Nhg Kumt", "NKugtmh", h=2, g=8, u=2, m=2, t=4)  # words of eight
_BYTES = Order("Nhg Kuct", "NKugtch", h=2, g=8, u=4, c=2, t=4)  # words of four
_SCALES = Order("Nhg K", "NKgh", h=2, g=8)


def pack_pairs(q4: S8) -> U8:
    """Pack s8 [..., K] in -8..7 to u8 [..., K/2]: two neighbours per byte, the first in the low nibble.

    Raises ArgumentError for another dtype, a value outside, or K no positive multiple of 8.
    """
    pack_s4(q4)  # refuses what is none
    nibbles = q4.view(np.uint8) & np.uint8(15)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << np.uint8(4)


def unpack_pairs(pairs: U8) -> S8:
    """Unpack pairs u8 [..., K/2] to s8 [..., K]; the inverse of `pack_pairs`."""
    nibbles = np.stack([pairs << np.uint8(4), pairs & np.uint8(0xF0)], axis=-1)
    return nibbles.reshape(*pairs.shape[:-1], -1).view(np.int8) >> np.int8(4)


def scale_rows(rows: AtomRows) -> F16:
    """Return the scales f16 [R, S]: those of all groups, that of the outliers, then ones up to a multiple of 8."""
    return pad_scales(rows.scales)


def pad_scales(scale: F16) -> F16:
    """Pad scales f16 [R, G] with ones to a multiple of 8 columns."""
    return np.concatenate([scale, np.ones_like(scale, shape=(len(scale), -scale.shape[1] % 8))], axis=1)


def scale_columns(K: int, group: int) -> int:
    """Return the number of columns of a row of `scale_rows`."""
    return ceil_div(K // group + 1, 8) * 8


def pack_comet_rows(weight: BlockRows, int8: int) -> U8:
    """Pack a weight as rows u8 [N, K/2] for activations whose last `int8` blocks are INT8.

    Blocks for INT4 are pairs (`pack_pairs`). In those for INT8, 16 bytes are a k32 step; word t is what lane t of four
    needs of it as operand A of m16n8k32. Its high nibbles are channels 4·t.., its low nibbles channels 16 + 4·t..
    (COMET's location switch).
    """
    first_int8 = weight.shape[1] - int8 * BLOCK
    parts = [pack_pairs(weight.q[:, :first_int8])] if first_int8 else []
    if int8:
        nibbles = weight.q[:, first_int8:].view(np.uint8) & np.uint8(15)
        parts.append(as_bytes(exchange_nibbles(pack_mma(nibbles))))
    return np.concatenate(parts, axis=1)


def pairs_of(x: BlockRows) -> U8:
    """Pack the INT4 channels of activations as pairs u8 [M, K4/2]; K4 may be 0."""
    q4 = x.q[:, : x.channels4]
    return pack_pairs(q4) if x.channels4 else q4.copy().view(np.uint8)


def join_blocks(x: BlockRows) -> U8:
    """Pack activations as u8 [M, K4/2 + K8]: per token its INT4 channels as pairs, then its INT8 channels."""
    return np.concatenate([pairs_of(x), x.q[:, x.channels4 :].view(np.uint8)], axis=1)


def pack_comet_strips(weight: BlockRows, int8: int) -> U8:
    """Pack a weight in strips u8 [ceil(N/16), K/128·1056] for activations whose last `int8` blocks are INT8.

    Blocks are those of `pack_atom_strips`. The channels of blocks for INT4 are in the order of `unpacked_pairs`.
    """
    first_int8 = weight.shape[1] - int8 * BLOCK
    q4 = np.concatenate([unpacked_pairs(weight.q[:, :first_int8]), weight.q[:, first_int8:]], axis=1)
    return pack_atom_strips(AtomRows(q4, weight.scale, q4[:, :0], weight.scale[:, 0]))


def unpacked_pairs(q: S8) -> S8:
    """Reorder channels [R, K] as `gemm_w4ax_sm90` unpacks pairs: of every 32 channels the even ones first."""
    halves = q.reshape(len(q), q.shape[1] // 32, 16, 2)
    ordered_values: S8 = halves.swapaxes(2, 3).reshape(q.shape)
    return ordered_values


def unpack_comet_rows(rows: U8, int8: int) -> S8:
    """Unpack rows of `pack_comet_rows` to s8 [N, K]; scales are not part of them."""
    int4_bytes = rows.shape[1] - int8 * BLOCK // 2
    parts = [unpack_pairs(rows[:, :int4_bytes])]
    if int8:
        nibbles = unpack_mma(exchange_nibbles(as_words(rows[:, int4_bytes:].copy())))
        parts.append((nibbles << np.uint8(4)).view(np.int8) >> np.int8(4))
    return np.concatenate(parts, axis=1)


def unpack_comet_strips(strips: U8, N: int, K: int, int8: int) -> BlockRows:
    """Unpack strips of `pack_comet_strips`; raise ArgumentError for another number of bytes."""
    rows = unpack_atom_strips(strips, N, K, 0, BLOCK)
    first_int8 = K - int8 * BLOCK
    halves = rows.q4[:, :first_int8].reshape(N, first_int8 // 32, 2, 16)
    q = np.concatenate([halves.swapaxes(2, 3).reshape(N, first_int8), rows.q4[:, first_int8:]], axis=1)
    return BlockRows(q, rows.scale4)


def pack_atom_strips(weight: AtomRows) -> U8:
    """Pack a weight in strips: u8 [ceil(N/16), bytes of a strip]; rows behind N are zeros with scale 0.

    Raises ArgumentError for a group other than 64 and 128.
    """
    N, K = weight.q4.shape
    if weight.group not in ATOM_GROUPS:
        raise ArgumentError("weight", "group must be 64 or 128", weight.group)
    strips, blocks = ceil_div(N, 16), ceil_div(K, BLOCK)
    q4 = np.pad(weight.q4, [(0, 0), (0, -K % BLOCK)])
    words = exchange_nibbles(pack_mma(q4.view(np.uint8) & np.uint8(15)))
    scales = np.pad(weight.scale4, [(0, 0), (0, -weight.scale4.shape[1] % (BLOCK // weight.group))])
    parts = [
        as_bytes(_NIBBLES.store(words)).reshape(strips, blocks, -1),
        _SCALES.store(scales).view(np.uint8).reshape(strips, blocks, -1),
    ]
    strip = np.concatenate(parts, axis=2).reshape(strips, -1)
    if not weight.q8.shape[1]:
        return strip
    q8 = np.pad(weight.q8, [(0, 0), (0, -weight.q8.shape[1] % BLOCK)])
    tail = as_bytes(_BYTES.store(as_words(q8.view(np.uint8)))).reshape(strips, -1)
    return np.concatenate(
        [strip, tail, _SCALES.store(weight.scale8[:, None]).view(np.uint8).reshape(strips, -1)], axis=1
    )


def unpack_atom_strips(strips: U8, N: int, K: int, outliers: int, group: int) -> AtomRows:
    """Unpack strips of `pack_atom_strips`; raise ArgumentError for another group or number of bytes."""
    expected_shape = (ceil_div(N, 16), strip_bytes(K, outliers, group))
    blocks, size = ceil_div(K, BLOCK), _block_bytes(group)
    int4_end = blocks * size
    if strips.shape != expected_shape:
        raise ArgumentError("strips", f"u8 {list(expected_shape)} for N={N}, K={K}", f"shape {strips.shape}")
    body = strips[:, :int4_end].reshape(expected_shape[0], blocks, size)
    words = _NIBBLES.restore(as_words(body[:, :, :1024]), N, blocks * BLOCK // 8)
    q4 = (unpack_mma(exchange_nibbles(words)) << np.uint8(4)).view(np.int8) >> np.int8(4)
    scale4 = _SCALES.restore(_halves(body[:, :, 1024:]), N, blocks * (BLOCK // group))
    if not outliers:
        return AtomRows(q4[:, :K], scale4[:, : K // group], q4[:, :0], np.ones_like(scale4[:, 0]))
    q8 = as_bytes(_BYTES.restore(as_words(strips[:, int4_end:-32]), N, BLOCK // 4)).view(np.int8)
    scale8 = _SCALES.restore(_halves(strips[:, -32:]), N, 1)
    return AtomRows(q4[:, :K], scale4[:, : K // group], q8[:, :outliers], scale8[:, 0])


def strip_bytes(K: int, outliers: int, group: int) -> int:
    """Count the bytes of a strip of K INT4 channels and the outliers, if there are any.

    Raises ArgumentError for a group other than 64 and 128.
    """
    if group not in ATOM_GROUPS:
        raise ArgumentError("group", "must be 64 or 128", group)
    return ceil_div(K, BLOCK) * _block_bytes(group) + (OUTLIER_BYTES if outliers else 0)


def _block_bytes(group: int) -> int:
    return 1024 + BLOCK // group * 32


def _halves(raw: U8) -> npt.NDArray[np.float16]:
    return raw.copy(order="C").view(np.float16)  # np.ascontiguousarray refuses CuPy's
