"""Reorderings in one notation: axes are split into named parts, and the parts lie in memory in another order.

`Order("Nwhg Kmt", "NKwgtmh", w=4, h=2, g=8, m=2, t=4)` reads: the rows of a matrix are N x (4 x 2 x 8), its columns
K x (2 x 4), and memory runs over N, K, w, g, t, m, h with h fastest. Capital letters count tiles, as many as the matrix
needs, and come first in memory; the others are the parts of a tile. They mean the same in every layout:

    w     warp of a warp group            m  MMA (k32 step) of two        u  unit of a block
    g, t  lane 4·g + t of a warp          h, q  row g + 8·h, g + 8·q      c  group of a block
"""

from math import prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ptxlab.arithmetic import ceil_div

_Scalar = TypeVar("_Scalar", bound=np.generic)


class Order:
    """`logical`: the parts of each axis, outermost first, axes apart by spaces; `stored`: all parts as they lie."""

    def __init__(self, logical: str, stored: str, **sizes: int) -> None:
        self.logical, self.stored, self.sizes = logical, stored, sizes

    @property
    def tile(self) -> tuple[int, ...]:
        """Elements of one tile along each logical axis."""
        return tuple(prod(self.sizes.get(part, 1) for part in axis) for axis in self.logical.split())

    def tiles(self, *shape: int) -> tuple[int, ...]:
        """Count the tiles that cover an array of `shape`, along each axis."""
        return tuple(ceil_div(size, tile) for size, tile in zip(shape, self.tile, strict=True))

    def shape(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of a stored array of `shape`: tiles in stored order, then the elements of a tile."""
        counts = self.tiles(*shape)
        tiles = tuple(self._size(part, counts) for part in self.stored if part not in self.sizes)
        return (*tiles, prod(self.tile)) if self.sizes else tiles

    def store(self, array: npt.NDArray[_Scalar], fill: int = 0) -> npt.NDArray[_Scalar]:
        """Reorder the array into stored order, padded with `fill` to whole tiles; see `shape`."""
        counts, shape = self.tiles(*array.shape), self.shape(*array.shape)
        missing_sizes = [n * t - size for n, t, size in zip(counts, self.tile, array.shape, strict=True)]
        if any(missing_sizes):
            array = np.pad(array, [(0, missing_size) for missing_size in missing_sizes], constant_values=fill)
        parts = self.logical.replace(" ", "")
        split_array = array.reshape(tuple(self._size(part, counts) for part in parts))
        stored_array = split_array.transpose(tuple(parts.index(part) for part in self.stored))
        return _contiguous(stored_array).reshape(shape)

    def restore(self, stored: npt.NDArray[Any], *shape: int) -> npt.NDArray[Any]:
        """Restore the array of `shape`, contiguous, from what `store` returned."""
        counts = self.tiles(*shape)
        parts = self.logical.replace(" ", "")
        split_array = stored.reshape(tuple(self._size(part, counts) for part in self.stored))
        logical_array = split_array.transpose(tuple(self.stored.index(part) for part in parts))
        padded_array = logical_array.reshape(tuple(n * t for n, t in zip(counts, self.tile, strict=True)))
        return _contiguous(padded_array[tuple(slice(size) for size in shape)])

    def _size(self, part: str, counts: tuple[int, ...]) -> int:
        if part in self.sizes:
            return self.sizes[part]
        return next(n for n, axis in zip(counts, self.logical.split(), strict=True) if part in axis)


def _contiguous(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    return array if array.flags.c_contiguous else array.copy(order="C")
