"""Activations in the order that a GEMM reads them: MMA fragments, or swizzled tiles.

`fragment order` is operand B of mma.sync m16n8k32 (tokens are its 8 columns): for a step of 64 k and 8 tokens, lane
4·g + t holds 16 bytes, one 128-bit load, of token g:

    bytes 16·lane + 0-3: k 4t..4t+3 | 4-7: k 16+4t.. | 8-11: k 32+4t.. | 12-15: k 48+4t..     (two MMAs of k 32)

512 bytes per step and 8 tokens; all tokens of a step follow each other, then the next step, so that a slice of K is
contiguous.

`swizzled tiles` are operand B of wgmma, K-major under the 128-byte swizzle (`hardware.descriptors`): `rows` tokens x
128 k, byte 128·r + 16·(c XOR r mod 8) + b of a tile being token r, k 16·c + b. A tile is what a descriptor with span
128 and stride 1024 describes and, being contiguous, what one bulk copy brings; tiles of a block of tokens run along K.

Tokens and K are padded to whole tiles with zeros, which change no product.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.hardware.descriptors import swizzle
from ptxlab.hardware.words import S8
from ptxlab.lowbit.layout.order import Order

SPAN = 128  # bytes of a row of a swizzled tile
_FRAGMENTS = Order("Mg Kmrtb", "KMgtmrb", g=8, m=2, r=2, t=4, b=4)


def to_fragment_order(x_q: S8) -> S8:
    """Reorder x_q s8 [M, K] into fragment order: s8 [ceil(K/64), ceil(M/8), 512].

    Raises ArgumentError unless `x_q` is a non-empty s8 matrix.
    """
    _require_matrix("x_q", x_q)
    return _FRAGMENTS.store(x_q)


def from_fragment_order(fragments: S8, M: int, K: int) -> S8:
    """Restore the matrix s8 [M, K] from `to_fragment_order`; raise ArgumentError for another shape."""
    _require_shape("fragments", fragments, _FRAGMENTS.shape(M, K), M, K)
    return _FRAGMENTS.restore(fragments, M, K)


def to_swizzled_tiles(x_q: S8, rows: int) -> S8:
    """Reorder x_q s8 [M, K] into swizzled tiles of `rows` tokens: s8 [ceil(M/rows), ceil(K/128), 128·rows].

    Raises ArgumentError unless `x_q` is a non-empty s8 matrix and `rows` a multiple of 8 in 8..256.
    """
    _require_matrix("x_q", x_q)
    return _swizzle(_tiles(rows).store(x_q))


def from_swizzled_tiles(tiles: S8, M: int, K: int, rows: int) -> S8:
    """Restore the matrix s8 [M, K] from `to_swizzled_tiles`; raise ArgumentError for another shape."""
    order = _tiles(rows)
    _require_shape("tiles", tiles, order.shape(M, K), M, K)
    return order.restore(_swizzle(tiles), M, K)


def _tiles(rows: int) -> Order:
    if not 8 <= rows <= 256 or rows % 8:
        raise ArgumentError("rows", "must be a multiple of 8 in 8..256", rows)
    return Order("Mr Kb", "MKrb", r=rows, b=SPAN)


def _swizzle(tiles: S8) -> S8:
    """Exchange the 16-byte columns of tiles; doing it twice undoes it."""
    columns = swizzle(np.arange(0, 8 * SPAN, 16), SPAN) // 16
    atoms = tiles.reshape(-1, len(columns), 16)
    return atoms[:, columns.tolist()].reshape(tiles.shape)


def _require_matrix(argument: str, x: npt.NDArray[Any]) -> None:
    if getattr(x, "dtype", None) != np.int8:
        raise ArgumentError(argument, "dtype must be int8", getattr(x, "dtype", type(x).__name__))
    if x.ndim != 2 or 0 in x.shape:
        raise ArgumentError(argument, "must be a non-empty matrix [M, K]", f"shape {x.shape}")


def _require_shape(argument: str, x: npt.NDArray[Any], shape: tuple[int, ...], M: int, K: int) -> None:
    if min(M, K) < 1:
        raise ArgumentError(argument, "M and K must be positive", f"M={M}, K={K}")
    if getattr(x, "dtype", None) != np.int8 or x.shape != shape:
        got = f"{getattr(x, 'dtype', type(x).__name__)} {list(getattr(x, 'shape', ()))}"
        raise ArgumentError(argument, f"must be int8 {list(shape)} for M={M}, K={K}", got)
