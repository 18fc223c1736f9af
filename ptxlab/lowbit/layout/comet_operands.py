"""COMET's operands as the kernels take them: packed weights (`BlockWeight`) and activations (`BlockActivations`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit.layout.atom import (
    BLOCK,
    join_blocks,
    pack_comet_rows,
    pack_comet_strips,
    pad_scales,
    pairs_of,
    strip_bytes,
    unpack_comet_rows,
    unpack_comet_strips,
    unpack_pairs,
)
from ptxlab.lowbit.layout.atom_operands import ATOM_LAYOUTS, VERSION, check_arrays, check_buffers, check_rows
from ptxlab.lowbit.layout.description import Described
from ptxlab.lowbit.layout.packings import Buffers, Shapes
from ptxlab.lowbit.quant.fmpq import BlockRows
from ptxlab.validate import is_integer, is_one_of

BLOCK_ORDERS = {"strips": "joined", "rows": "pairs"}  # of the activations that go with a weight's layout


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockWeight(Described):
    """An INT4 weight of COMET's W4Ax [N, K4 + K8], for activations with K4 channels in INT4 blocks, then K8 in INT8.

    `buffers` are NumPy or CuPy arrays. `strips`, for gemm_w4ax_sm90: `strips` u8. `rows`, for gemm_w4ax_naive_sm80:
    `w` u8 [N, (K4 + K8)/2], `w_scale` f16 [N, blocks in whole eights] (`layout.atom`). Raises ArgumentError if anything
    does not fit together.
    """

    layout: str
    N: int
    K4: int
    K8: int
    buffers: Mapping[str, npt.NDArray[Any]] = field(repr=False)
    version: int = VERSION

    def __post_init__(self) -> None:
        check_buffers(self, block_shapes(self.layout, self.N, self.K4, self.K8), f"K4={self.K4}, K8={self.K8}")

    @property
    def arch(self) -> str:
        """The first architecture whose kernel reads the layout; `a` marks one that runs nowhere else."""
        return ATOM_LAYOUTS[self.layout]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, padding included."""
        return sum(int(array.nbytes) for array in self.buffers.values())


def block_shapes(layout: str, N: int, K4: int, K8: int) -> Shapes:
    """Return the buffers of a `BlockWeight`: name -> (dtype, shape).

    Raises ArgumentError: an unknown layout, N no positive multiple of 8, K4 and K8 as `check_blocks` refuses them.
    """
    check_rows(layout, N)
    check_blocks(K4, K8)
    if layout == "strips":
        return {"strips": ("uint8", (ceil_div(N, 16), strip_bytes(K4 + K8, 0, BLOCK)))}
    return {"w": ("uint8", (N, (K4 + K8) // 2)), "w_scale": ("float16", (N, _scale_columns(K4, K8)))}


def check_blocks(K4: int, K8: int) -> None:
    """Raise ArgumentError for K4 or K8 that are no multiples of 128, 0 or more, and for no channels at all."""
    for name, size in {"K4": K4, "K8": K8}.items():
        if not is_integer(size) or size < 0 or size % BLOCK:
            raise ArgumentError(name, f"must be a multiple of {BLOCK}, 0 or more", repr(size))
    if not K4 + K8:
        raise ArgumentError("K4 + K8", "must be positive", 0)


def _scale_columns(K4: int, K8: int) -> int:
    return ceil_div(ceil_div(K4 + K8, BLOCK), 8) * 8


@break_graph
def pack_block_weight(weight: BlockRows, int8: int, layout: str = "strips") -> BlockWeight:
    """Pack a quantised weight (NumPy or CuPy) for activations of which so many blocks, the last ones, are INT8.

    `unpack_block_weight` gives it back bit for bit. Raises ArgumentError: an unknown layout, N as in `block_shapes`, no
    BlockRows, other blocks than of 128, a weight with INT8 blocks, more INT8 blocks than there are.
    """
    blocks = _require_rows("weight", weight).scale.shape[1]
    if weight.int8:
        raise ArgumentError("weight", "must be INT4 throughout (quant.quantize_block_weight)", f"int8={weight.int8}")
    if not is_integer(int8) or not 0 <= int8 <= blocks:
        raise ArgumentError("int8", f"must be 0..{blocks} blocks", int8)
    N, K4, K8 = weight.shape[0], (blocks - int8) * BLOCK, int8 * BLOCK
    block_shapes(layout, N, K4, K8)
    if layout == "strips":
        buffers: Buffers = {"strips": pack_comet_strips(weight, int8)}
    else:
        buffers = {"w": pack_comet_rows(weight, int8), "w_scale": pad_scales(weight.scale)}
    return BlockWeight(layout=layout, N=N, K4=K4, K8=K8, buffers=_contiguous(buffers))


def unpack_block_weight(packed: BlockWeight) -> BlockRows:
    """Unpack the quantised weight, equal to the packed one in every bit."""
    if not isinstance(packed, BlockWeight):
        raise ArgumentError("packed", "must be a BlockWeight", type(packed).__name__)
    buffers, K, int8 = packed.buffers, packed.K4 + packed.K8, packed.K8 // BLOCK
    if packed.layout == "strips":
        return unpack_comet_strips(buffers["strips"], packed.N, K, int8)
    return BlockRows(unpack_comet_rows(buffers["w"], int8), buffers["w_scale"][:, : K // BLOCK].copy())


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockActivations(Described):
    """Activations of COMET's W4Ax [M, K4 + K8] of any array library, in the order that a kernel reads.

    `joined`, for weights in strips: `x` u8 [M, K4/2 + K8], of every token two INT4 a byte, then the INT8 channels; no
    `x8`. `pairs`, for weights in rows: `x` u8 [M, K4/2], two INT4 a byte, and `x8` s8 [M, K8]. `scale` f16 [M,
    blocks in whole eights]: one per block of 128, then ones. Raises ArgumentError if shapes do not fit together.
    """

    layout: str
    M: int
    K4: int
    K8: int
    x: Any = field(repr=False)
    scale: Any = field(repr=False)
    x8: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        shapes = block_activation_shapes(self.layout, self.M, self.K4, self.K8)
        check_arrays(self, shapes, f"K4={self.K4}, K8={self.K8}")
        if self.layout == "joined" and self.x8 is not None:
            raise ArgumentError("x8", "must be None: x has these channels too", type(self.x8).__name__)

    @property
    def arrays(self) -> dict[str, Any]:
        """`x`, `scale` and, of pairs, `x8`, by name."""
        return {name: getattr(self, name) for name in ("x", "scale", "x8") if getattr(self, name) is not None}


def block_activation_shapes(layout: str, M: int, K4: int, K8: int) -> Shapes:
    """Return the arrays of `BlockActivations`: name -> (dtype, shape).

    Raises ArgumentError for an unknown layout, and for what `check_blocks` refuses.
    """
    if not is_one_of(layout, BLOCK_ORDERS.values()):
        raise ArgumentError("layout", f"must be one of {', '.join(BLOCK_ORDERS.values())}", layout)
    check_blocks(K4, K8)
    scale = ("float16", (M, _scale_columns(K4, K8)))
    if layout == "joined":
        return {"x": ("uint8", (M, K4 // 2 + K8)), "scale": scale}
    return {"x": ("uint8", (M, K4 // 2)), "scale": scale, "x8": ("int8", (M, K8))}


def pack_block_activations(x: BlockRows, layout: str = "joined") -> BlockActivations:
    """Pack quantised activations (NumPy or CuPy) in a kernel's order; `unpack_block_activations` is the inverse.

    Raises ArgumentError: an unknown layout, no BlockRows, other blocks than of 128.
    """
    M, K4, K8 = _require_rows("x", x).shape[0], x.channels4, x.int8 * BLOCK
    block_activation_shapes(layout, M, K4, K8)
    arrays: Buffers = {"scale": pad_scales(x.scale)}
    if layout == "joined":
        arrays["x"] = join_blocks(x)
    else:
        arrays |= {"x": pairs_of(x), "x8": x.q[:, K4:]}
    return BlockActivations(layout=layout, M=M, K4=K4, K8=K8, **_contiguous(arrays))


def unpack_block_activations(packed: BlockActivations) -> BlockRows:
    """Unpack quantised activations to rows."""
    x8 = packed.x[:, packed.K4 // 2 :].view(np.int8) if packed.layout == "joined" else packed.x8
    q = np.concatenate([unpack_pairs(packed.x[:, : packed.K4 // 2]), x8], axis=1)
    return BlockRows(q, packed.scale[:, : q.shape[1] // BLOCK].copy(), packed.K8 // BLOCK)


def _contiguous(arrays: Buffers) -> Buffers:
    """Copy the arrays in C order, whatever the order of the originals."""
    return {name: array.copy(order="C") for name, array in arrays.items()}


def _require_rows(name: str, rows: BlockRows) -> BlockRows:
    if not isinstance(rows, BlockRows):
        raise ArgumentError(name, "must be BlockRows (quant.quantize_blocks)", type(rows).__name__)
    if rows.block != BLOCK:
        raise ArgumentError(name, f"must have blocks of {BLOCK} channels", rows.block)
    return rows
