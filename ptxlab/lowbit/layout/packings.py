"""The packings of 4-bit weights: where each weight and each level-2 constant lies in memory.

A lane of an 8-bit MMA needs strided bytes: rows g and g + 8, weights 4·t..4·t+3 and 16+4·t..16+4·t+3 of each k32 step.
All packings but `row_major` store MMA words (`layout.nibbles`), eight weights of one row that one lane needs together,
and differ only in the order of these words. N and K are padded to whole tiles with weights that dequantise to zero.

`row_major`   micro-kernel words as they come; constants [N, K/g].

`qserve`      QServe's compute-aware reorder (QServe §5.2.1), tiles of 32 rows x 32 k. The 32 weights that lane
              4·g + t needs of a tile are one 128-bit word, lanes in order, 512 bytes in all:

                  bytes 16·lane + 0-3: row g | 4-7: row g+8 | 8-11: row g+16 | 12-15: row g+24

              Scales, and offsets likewise, per tile of 32 rows and group: byte 4·g + q is row g + 8·q, so that a lane
              reads its four with one 32-bit load. (The paper leaves the order inside a lane's 128 bits open; the
              public code pairs rows g and g + 16 in a word, here a word stays in one row and takes one scale.)

`dual_mma`    LiquidGEMM's dual-MMA packed layout (LiquidGEMM §5.2), units of 64 rows x 64 k: 2048 bytes, of which
              thread i = 32·w + 4·g + t of a warp group loads bytes 16·i to 16·i+15 with one LDS.128. Its four words are
              operand A of two wgmma m64nNk32 (row r = 16·w + g):

                  word         0          1          2          3
                  row          r         r+8         r         r+8
                  k within  |------ MMA 0: 0-31 -----|----- MMA 1: 32-63 -----|
                  unit      low nibbles: A registers of k 0-15, high nibbles: of k 16-31 of the MMA

              A *block* is 64 rows x max(64, g) k: its units (two for g = 128), then its constants, one
              (scale, offset) pair of bytes per row and group. Those of rows r and r+8 are one 32-bit load:

                  32 bits at 4·(8·w + g), times the number of groups (two for g = 32: a 64-bit load)
                  bits  31-24 offset of r+8 | 23-16 scale of r+8 | 15-8 offset of r | 7-0 scale of r

              Blocks run along K, then over N. A block is 2176 bytes (g = 64), 4224 (g = 128) or 2304 (g = 32), always
              a multiple of 128: one bulk copy brings any number of neighbouring blocks of 64 rows, weights and
              constants; nothing is stored twice.

`comet`       COMET's weight interleave (COMET §4.3), tiles of 16 rows x 64 k, in COMET's nibble order: a k32 step of a
              row is 16 bytes, word t holding what lane t of the quad needs (the paper draws a smaller MMA, whose thread
              0 takes 0-3 and 8-11; for m16n8k32 it is 0-3 and 16-19). The four 8 x 8 matrices of one ldmatrix.x4 are
              (k 0-31, rows 0-7), (k 0-31, rows 8-15), (k 32-63, rows 0-7), (k 32-63, rows 8-15), so that
              lane i addresses byte 16·i and receives the words that `dual_mma` gives it. Constants [N, K/g].

`strips`      for kernels that feed the MMA *unsigned* bytes. A *strip* is 16 rows over all of K, contiguous: what
              one warp takes, for mma.sync m16n8k32 or for its quarter of a wgmma m64nNk32, so that one packed weight
              serves every number of tokens. A *block* of it is 16 rows x 128 k: two units of 64 k, 512 bytes each, of
              which lane 4·g + t loads bytes 16·lane to 16·lane+15 with one LDS.128, the words that `dual_mma` gives it:

                  bytes         0-3        4-7        8-11       12-15
                  row           g          g+8        g          g+8
                  k within  |------ MMA 0: 0-31 -----|----- MMA 1: 32-63 -----|
                  unit

              Then the constants, 32 bytes per group of the block (one for g = 128, two for g = 64, four for g = 32),
              groups in order. Those of rows g and g+8 are one 32-bit load:

                  32 bits at 1024 + 32·group + 4·g
                  bits  31-24 offset of g+8 | 23-16 scale of g+8 | 15-8 offset of g | 7-0 scale of g

              A block is 1056 bytes (g = 128), 1088 (g = 64), 1152 (g = 32) or 1024 (no groups), a multiple of 32: one
              bulk copy brings any number of neighbouring blocks of a strip. The stored offset is that of the unsigned
              form in every scheme with groups, w + 128 = q4·scale + offset: 128 + min for LQQ, 128 - z·scale for QoQ,
              modulo 256. No byte carries at protective range 119. The epilogue takes 128 times the token sum off again;
              without groups the MMA is fed q4 itself, and the zero point times the token sum leaves.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptxlab.hardware.words import U8, U32, as_bytes, as_words
from ptxlab.lowbit.layout.nibbles import exchange_nibbles, pack_mma, pack_u4, unpack_mma, unpack_u4
from ptxlab.lowbit.layout.order import Order

Buffers: TypeAlias = dict[str, npt.NDArray[Any]]
Pair: TypeAlias = tuple[U8, U8]
Shapes: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]  # buffer -> (dtype, shape)


@dataclass(frozen=True)
class Size:
    """A matrix [N, K] with a pair of constants per `group` weights, or none (`group` None).

    With scale 1 and offset `zero`, q4 = 0 stands for the weight 0: what padding is made of.
    """

    N: int
    K: int
    group: int | None
    zero: int = 0

    @property
    def groups(self) -> int:
        """K/g; 0 without constants."""
        return self.K // self.group if self.group else 0


class Packing(ABC):
    """A packing and its inverse. `arch` is the first architecture whose MMA it feeds."""

    name: str
    arch: str

    @abstractmethod
    def shapes(self, size: Size) -> Shapes:
        """Return the shapes of the buffers of a packed matrix of this size."""

    @abstractmethod
    def pack(self, q4: U8, constants: Pair | None, size: Size) -> Buffers:
        """Pack q4 u8 [N, K], K a multiple of 32, and its constants (scale, offset), u8 [N, K/g].

        Raises ArgumentError for values above 15.
        """

    @abstractmethod
    def unpack(self, buffers: Mapping[str, npt.NDArray[Any]], size: Size) -> tuple[U8, Pair | None]:
        """Unpack buffers of `pack` to q4 and its constants."""


@dataclass(frozen=True)
class Separate(Packing):
    """Words in one buffer, scales and offsets in two more, each in its own order."""

    name: str
    arch: str
    to_words: Callable[[U8], U32]
    from_words: Callable[[U32], U8]
    words: Order
    constants: Order

    def shapes(self, size: Size) -> Shapes:
        """See `Packing.shapes`."""
        words: Shapes = {"qweight": ("uint32", self.words.shape(size.N, size.K // 8))}
        constants = ("uint8", self.constants.shape(size.N, size.groups))
        return words | ({"scale": constants, "offset": constants} if size.group else {})

    def pack(self, q4: U8, constants: Pair | None, size: Size) -> Buffers:
        """See `Packing.pack`."""
        buffers: Buffers = {"qweight": self.words.store(self.to_words(q4))}
        if constants is not None:
            buffers["scale"] = self.constants.store(constants[0], fill=1)
            buffers["offset"] = self.constants.store(constants[1], fill=size.zero)
        return buffers

    def unpack(self, buffers: Mapping[str, npt.NDArray[Any]], size: Size) -> tuple[U8, Pair | None]:
        """See `Packing.unpack`."""
        q4 = self.from_words(self.words.restore(buffers["qweight"], size.N, size.K // 8))
        if not size.group:
            return q4, None
        scale, offset = (self.constants.restore(buffers[name], size.N, size.groups) for name in ("scale", "offset"))
        return q4, (scale, offset)


@dataclass(frozen=True)
class Blocks(Packing):
    """Words and constants of each block beside each other in one buffer, u8 [blocks along N, along K, bytes].

    `orders` gives those of MMA words and of constants for a group (None: no constants). With `unsigned`, offsets are
    stored such that q4 = 0 stands for the weight 0 at offset 128, whatever the scheme's own `zero`.
    """

    name: str
    arch: str
    buffer: str
    orders: Callable[[int | None], tuple[Order, Order]]
    unsigned: bool = False

    def shapes(self, size: Size) -> Shapes:
        """See `Packing.shapes`."""
        words, constants = self.orders(size.group)
        row_tiles, k_tiles, block_words = words.shape(size.N, size.K // 8)
        constant_bytes = 2 * prod(constants.tile) if size.group else 0
        return {self.buffer: ("uint8", (row_tiles, k_tiles, 4 * block_words + constant_bytes))}

    def pack(self, q4: U8, constants: Pair | None, size: Size) -> Buffers:
        """See `Packing.pack`."""
        word_order, constant_order = self.orders(size.group)
        blocks = as_bytes(word_order.store(pack_mma(q4)))
        if constants is not None:
            scale = constant_order.store(constants[0], fill=1)
            offset = constant_order.store(constants[1], fill=size.zero) ^ self._flip(size)
            pairs = np.stack([scale, offset], axis=-1).reshape(*blocks.shape[:2], -1)
            blocks = np.concatenate([blocks, pairs], axis=2)
        return {self.buffer: blocks}

    def unpack(self, buffers: Mapping[str, npt.NDArray[Any]], size: Size) -> tuple[U8, Pair | None]:
        """See `Packing.unpack`."""
        word_order, constant_order = self.orders(size.group)
        blocks, tile_bytes = buffers[self.buffer], 4 * prod(word_order.tile)
        q4 = unpack_mma(word_order.restore(as_words(blocks[:, :, :tile_bytes]), size.N, size.K // 8))
        if not size.group:
            return q4, None
        pairs = blocks[:, :, tile_bytes:].reshape(*blocks.shape[:2], -1, 2)
        scale, offset = (constant_order.restore(pairs[..., i], size.N, size.groups) for i in (0, 1))
        return q4, (scale, offset ^ self._flip(size))

    def _flip(self, size: Size) -> np.uint8:
        """Return the bits in which a stored offset differs from the scheme's: 0x80, as adding 128 modulo 256, or 0."""
        return np.uint8(size.zero ^ 0x80 if self.unsigned else 0)


def _of_warp_group(group: int | None) -> tuple[Order, Order]:
    """Build the orders of words and constants in blocks of 64 rows, u units of 64 k, c groups."""
    group = group or 64
    words = Order("Nwhg Kumt", "NKuwgtmh", w=4, h=2, g=8, u=max(1, group // 64), m=2, t=4)
    return words, Order("Nwhg Kc", "NKwgch", w=4, h=2, g=8, c=max(1, 64 // group))


def _of_warp(group: int | None) -> tuple[Order, Order]:
    """Build the orders of words and constants in blocks of 16 rows, two units of 64 k, c groups."""
    words = Order("Nhg Kumt", "NKugtmh", h=2, g=8, u=2, m=2, t=4)
    return words, Order("Nhg Kc", "NKcgh", h=2, g=8, c=128 // (group or 128))


_IN_PLACE = Order("N K", "NK")

PACKINGS: dict[str, Packing] = {
    packing.name: packing
    for packing in (
        Separate("row_major", "sm_80", pack_u4, unpack_u4, _IN_PLACE, _IN_PLACE),
        Separate(
            "qserve",
            "sm_80",
            pack_mma,
            unpack_mma,
            Order("Nqg Kt", "NKgtq", q=4, g=8, t=4),
            Order("Nqg K", "NKgq", q=4, g=8),
        ),
        Blocks("dual_mma", "sm_90a", "blocks", _of_warp_group),
        Separate(
            "comet",
            "sm_80",
            lambda q4: exchange_nibbles(pack_mma(q4)),
            lambda words: unpack_mma(exchange_nibbles(words)),
            Order("Nhg Kmt", "NKmhgt", h=2, g=8, m=2, t=4),
            _IN_PLACE,
        ),
        Blocks("strips", "sm_90a", "strips", _of_warp, unsigned=True),
    )
}
