"""COMET's fine-grained mixed precision: activations in blocks of channels, INT4 or INT8; weights INT4 (COMET §3.2).

A block has 128 channels, as in the paper and in the kernels, or 64, for models whose width is no multiple of 128.

Channels with outliers are permuted together, so that few blocks have any, and those blocks are INT8. Here they are the
last ones, which a kernel may take in any order. A block of a token has one scale, and so has a block of a weight's row.
The permutation goes into the weights and into the layer before.

COMET does not say from where on a channel is an outlier, nor does it bound the share of INT8 blocks: it finds less than
20% (COMET §3.2). `OUTLIER` and `MOST_INT8` are choices of this project. COMET's weights are OmniQuant's (COMET §6.1);
here they are rounded, or in a recipe quantised by GPTQ with clipping, as those of all other schemes are.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F16, F32, S8
from ptxlab.lowbit.quant.groups import dequantize_groups, integer_groups
from ptxlab.lowbit.quant.inputs import channel_vector, extremes, float_matrix
from ptxlab.validate import is_integer, is_one_of, require_number

BLOCK = 128  # channels, what the kernels take
BLOCKS = (64, 128)
MOST_INT8 = 0.2  # of all blocks
OUTLIER = 6.0  # times the median of the channels' largest magnitudes: from there on a channel is one


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Rows in blocks of channels, of which the last `int8` are INT8, the others INT4; weights are INT4 throughout.

    `q` s8 [R, K], `scale` f16 [R, K/block].
    """

    q: S8
    scale: F16
    int8: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, channels)."""
        rows, K = self.q.shape
        return rows, K

    @property
    def block(self) -> int:
        """Channels of a block."""
        return int(self.q.shape[1] // self.scale.shape[1])

    @property
    def channels4(self) -> int:
        """Channels of the INT4 blocks."""
        return int(self.scale.shape[1] - self.int8) * self.block

    def dequantize(self) -> F32:
        """Compute q·scale as f32 [R, K]."""
        return dequantize_groups(self.q, self.scale)


def int8_blocks(
    sizes: npt.NDArray[Any], outlier: float = OUTLIER, most: float = MOST_INT8, *, block: int = BLOCK
) -> int:
    """Count the blocks that must be INT8 to hold every outlier: at most `most` of all blocks, rounded down.

    Args:
        sizes: the largest magnitude of every channel, float [K] (`channel_sizes(x, "max")`).
        outlier: a channel is one if it is larger than so many times the median channel; with 0 every channel that is
            not zero is one.
        most: a fraction of all blocks.
        block: channels of a block, 64 or 128.

    Raises:
        ArgumentError: K is no positive multiple of the block; sizes that are not finite; `outlier` that is no number of
            0 or more; `most` outside 0..1.
    """
    sizes = channel_vector("sizes", sizes)
    _check_channels("sizes", sizes.shape, block)
    require_number("outlier", outlier, 0, np.inf)
    require_number("most", most, 0, 1)
    outliers = int((sizes > outlier * np.median(sizes)).sum())
    return min(ceil_div(outliers, block), int(len(sizes) // block * most + 1e-9))  # 0.57 of 100 is 57, not 56.999..


def quantize_blocks(x: npt.NDArray[Any], int8: int, block: int = BLOCK) -> BlockRows:
    """Quantise activations x float [M, K], in the order of `outlier_order`, with the last `int8` blocks in INT8.

    Scales are max|x| / 7 or / 127 per token and block in FP16, q = round(x / scale), ties to even. Raises ArgumentError
    for bad input (`inputs.as_float_matrix`), a block other than 64 and 128, K that is no multiple of it, more INT8
    blocks than there are, and a scale beyond FP16.
    """
    x = float_matrix("x", x)
    _check_channels("x", x.shape[1:], block)
    if not is_integer(int8) or not 0 <= int8 <= x.shape[1] // block:
        raise ArgumentError("int8", f"must be 0..{x.shape[1] // block} blocks", int8)
    return _quantize("x", x, int8, block)


def quantize_block_weight(w: npt.NDArray[Any], block: int = BLOCK) -> BlockRows:
    """Quantise a weight w float [N, K], whose columns are in the activations' order: INT4 throughout.

    Raises ArgumentError as `quantize_blocks` does.
    """
    w = float_matrix("w", w)
    _check_channels("w", w.shape[1:], block)
    return _quantize("w", w, 0, block)


def _quantize(name: str, x: npt.NDArray[Any], int8: int, block: int) -> BlockRows:
    extremes(name, x)
    rows, first_int8 = x.shape[0], x.shape[1] - int8 * block
    parts = [
        integer_groups(name, part.reshape(rows, -1, block), bits, steps)
        for part, bits, steps in ((x[:, :first_int8], 4, 7), (x[:, first_int8:], 8, 127))
        if part.shape[1]
    ]
    q, scale = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    return BlockRows(q.reshape(x.shape), scale, int8)


def _check_channels(name: str, shape: tuple[int, ...], block: int) -> None:
    if not is_one_of(block, BLOCKS):
        raise ArgumentError("block", f"must be one of {', '.join(map(str, BLOCKS))}", block)
    if len(shape) != 1 or not shape[0] or shape[0] % block:
        raise ArgumentError(name, f"channels must be a positive multiple of {block}", shape)
