"""Where QServe's, GPTQ's and AWQ's files have the nibbles of a matrix."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptxlab.hardware.words import U8

Array: TypeAlias = npt.NDArray[Any]

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_qserve(qweight: Array) -> U8:
    """Unpack the nibbles u8 [N, K] of QServe's qweight s8 [N, K/2]; N and K are multiples of 32."""
    N, K = qweight.shape[0], 2 * qweight.shape[1]
    tiles = qweight.view(np.uint8).reshape(N // 32, K // 32, 8, 4, 2, 2, 4)  # tile, lane r, c, half of k, 8 rows, k
    halves = np.stack([tiles & 15, tiles >> 4])  # of 16 rows
    return np.ascontiguousarray(halves.transpose(1, 0, 6, 3, 2, 5, 4, 7)).reshape(N, K)


def qserve_rows(constants: Array) -> Array:
    """Reorder QServe's constants [G, N] to [N, G]."""
    G, N = constants.shape
    return np.ascontiguousarray(constants.reshape(G, N // 32, 8, 4).transpose(1, 3, 2, 0)).reshape(N, G)


def unpack_words(words: Array, axis: int, order: tuple[int, ...] = tuple(range(8))) -> U8:
    """Unpack the nibbles u8 of words s32 [a, b], eight along `axis`; nibble i from the lowest is element `order[i]`."""
    shifts = 4 * np.argsort(order).astype(np.uint32)
    spread_nibbles = words.view(np.uint32)[..., None] >> shifts & np.uint32(15)
    nibbles = spread_nibbles.astype(np.uint8)
    if axis == 0:
        nibbles = nibbles.transpose(0, 2, 1)
    return nibbles.reshape(words.shape[0] * (8 if axis == 0 else 1), -1)
