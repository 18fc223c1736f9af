"""`ReorderedWeight`: a weight of W4A4 with what its input needs: the order of the channels, clip, INT8 blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F32
from ptxlab.lowbit.layout.atom_operands import (
    ATOM_LAYOUTS,
    AtomWeight,
    atom_shapes,
    pack_atom,
    require_atom_rows,
    unpack_atom,
)
from ptxlab.lowbit.layout.comet_operands import BlockWeight, block_shapes, pack_block_weight, unpack_block_weight
from ptxlab.lowbit.layout.packings import Buffers, Shapes
from ptxlab.lowbit.quant.atom import ATOM_OUTLIERS, AtomRows, channel_places, quantize_atom_activations
from ptxlab.lowbit.quant.fmpq import BLOCK, BlockRows, quantize_blocks
from ptxlab.validate import is_integer, is_one_of, require_number

SCHEMES = ("atom", "fmpq")
VERSION = 2  # raised when the meaning of any stored byte changes
READ = (1, VERSION)  # versions of files; in the first, COMET's weights were packed as Atom's without outliers


@dataclass(frozen=True, eq=False, kw_only=True)
class ReorderedWeight:
    """A weight [N, K] of a layer in W4A4, K channels in all, the outliers among them.

    Raises ArgumentError if anything does not fit together.

    Attributes:
        scheme: of the input. `atom` (`quantize_atom_activations` by the paper's rules): INT4 in groups, the outliers
            at the end INT8. `fmpq` (`quantize_blocks`, COMET): INT4 or INT8 in blocks; the weight has no outliers.
        layout: of the weight, `strips` or `rows` (`AtomWeight`).
        N, K: rows and channels.
        outliers: INT8 channels at the end, 0, 64 or 128.
        group: channels per scale, 64 or 128.
        int8: with fmpq, how many groups of the input, the last ones, are INT8.
        clip: with atom, of a token's INT4 groups; else 1.
        buffers: of fmpq in groups of 128 those of a `BlockWeight`, else those of an `AtomWeight`; and `place` s16 [K],
            where every channel of the input goes.
    """

    scheme: str
    layout: str
    N: int
    K: int
    outliers: int
    group: int
    int8: int
    clip: float
    buffers: Mapping[str, npt.NDArray[Any]] = field(repr=False)
    version: int = VERSION

    def __post_init__(self) -> None:
        if not is_one_of(self.version, (VERSION,)):
            raise ArgumentError("version", f"must be {VERSION}", self.version)
        if not is_one_of(self.scheme, SCHEMES):
            raise ArgumentError("scheme", f"must be one of {', '.join(SCHEMES)}", self.scheme)
        check_reordered(self.K, self.outliers)
        dtype, shape = "int16", (self.K,)
        if not isinstance(self.buffers, Mapping):
            raise ArgumentError("buffers", "must be arrays by name", type(self.buffers).__name__)
        place: Any = self.buffers.get("place")
        if getattr(place, "dtype", None) != dtype or place.shape != shape:
            got = f"{place.dtype} {list(place.shape)}" if hasattr(place, "dtype") else type(place).__name__
            raise ArgumentError("buffers[place]", f"must be {dtype} {list(shape)}", got)
        if isinstance(place, np.ndarray) and not np.array_equal(np.sort(place), np.arange(self.K)):
            raise ArgumentError("buffers[place]", f"must be a permutation of 0..{self.K - 1}", "none")
        blocks = self.K // self.group if self.scheme == "fmpq" else 0
        if not is_integer(self.int8) or not 0 <= self.int8 <= blocks:
            raise ArgumentError("int8", f"must be 0..{blocks} with {self.scheme}, K={self.K}", self.int8)
        if self.scheme == "fmpq" and self.outliers:
            raise ArgumentError("outliers", "must be 0 with fmpq", self.outliers)
        require_number("clip", self.clip, 1 if self.scheme == "fmpq" else 0.01, 1)
        _ = self.weight  # checks the other buffers

    @property
    def weight(self) -> AtomWeight | BlockWeight:
        """Return the weight alone, as `gemm_w4a4` takes it, or `gemm_w4ax` in blocks of 128.

        COMET's in groups of 64 is an `AtomWeight` without outliers, and no kernel takes it.
        """
        buffers = {name: array for name, array in self.buffers.items() if name != "place"}
        common: dict[str, Any] = {"layout": self.layout, "N": self.N, "buffers": buffers}
        if _in_blocks(self.scheme, self.group):
            return BlockWeight(**common, K4=self.K - self.int8 * BLOCK, K8=self.int8 * BLOCK)
        return AtomWeight(**common, K=self.K - self.outliers, outliers=self.outliers, group=self.group)

    @property
    def rows(self) -> AtomRows:
        """The quantised weight, its columns in `order`."""
        weight = self.weight
        if isinstance(weight, AtomWeight):
            return unpack_atom(weight)
        blocks = unpack_block_weight(weight)
        return AtomRows(blocks.q, blocks.scale, blocks.q[:, :0], np.ones_like(blocks.scale[:, 0]))

    @property
    def arch(self) -> str:
        """The first architecture whose kernel reads the layout; `a` marks one that runs nowhere else."""
        return ATOM_LAYOUTS[self.layout]

    @property
    def order(self) -> npt.NDArray[np.intp]:
        """The channels in the order of the weight's columns, [K]."""
        order: npt.NDArray[np.intp] = np.argsort(self.buffers["place"])
        return order

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, padding included."""
        return sum(int(array.nbytes) for array in self.buffers.values())

    def quantize_input(self, x: npt.NDArray[Any]) -> AtomRows | BlockRows:
        """Reorder and quantise an input x float [M, K] as the GEMM reads it."""
        ordered_input = x[:, self.order]
        if self.scheme == "fmpq":
            return quantize_blocks(ordered_input, self.int8, self.group)
        return quantize_atom_activations(ordered_input, self.group, self.outliers, clip=self.clip)

    def in_layout(self, layout: str) -> "ReorderedWeight":
        """Pack the same weight in another layout, bit for bit."""
        int8 = self.int8 if self.scheme == "fmpq" else None
        return pack_reordered(self.rows, self.order, layout, int8=int8, clip=self.clip)

    def dequantize(self) -> F32:
        """Dequantise to f32 [N, K], the columns in the input's own order."""
        places = self.buffers["place"].astype(np.intp)
        numbers: F32 = self.rows.dequantize()[:, places]
        return numbers


def check_reordered(K: int, outliers: int) -> None:
    """Raise ArgumentError for outliers not 0, 64 or 128, and for K no larger."""
    if not is_one_of(outliers, ATOM_OUTLIERS):
        raise ArgumentError("outliers", f"must be one of {', '.join(map(str, ATOM_OUTLIERS))}", outliers)
    if not is_integer(K) or outliers >= K:
        raise ArgumentError("K", f"must be more than the {outliers} outliers", repr(K))


def reordered_shapes(
    scheme: str, layout: str, N: int, K: int, outliers: int, group: int, int8: int, *, version: int = VERSION
) -> Shapes:
    """Return the buffers of a `ReorderedWeight` in files of a version: name -> (dtype, shape).

    Raises ArgumentError as `check_reordered`, `atom_shapes` and `block_shapes` do.
    """
    check_reordered(K, outliers)
    place: Shapes = {"place": ("int16", (K,))}
    if version == VERSION and _in_blocks(scheme, group):
        return {**block_shapes(layout, N, K - int8 * BLOCK, int8 * BLOCK), **place}
    return {**atom_shapes(layout, N, K - outliers, outliers, group), **place}


def renew_buffers(
    buffers: Buffers, scheme: str, layout: str, N: int, K: int, outliers: int, group: int, int8: int
) -> Buffers:
    """Pack the buffers of a file of the first version as this version does."""
    if not _in_blocks(scheme, group):
        return buffers
    atom_buffers = {name: array for name, array in buffers.items() if name != "place"}
    rows = unpack_atom(AtomWeight(layout=layout, N=N, K=K, outliers=outliers, group=group, buffers=atom_buffers))
    packed_weight = pack_block_weight(BlockRows(rows.q4, rows.scale4), int8, layout)
    return {**packed_weight.buffers, "place": buffers["place"]}


def _in_blocks(scheme: str, group: int) -> bool:
    """Tell whether the weight is packed as COMET's kernels read it, which take blocks of 128 alone."""
    return scheme == "fmpq" and is_one_of(group, (BLOCK,))


def pack_reordered(
    weight: AtomRows, order: npt.NDArray[Any], layout: str = "strips", *, int8: int | None = None, clip: float = 1.0
) -> ReorderedWeight:
    """Pack a quantised weight of NumPy or CuPy arrays, whose columns are in `order`.

    The scheme is COMET's with `int8`, otherwise Atom's.
    """
    (N, K), outliers, group = require_atom_rows("weight", weight).shape, weight.q8.shape[1], weight.group
    packed: AtomWeight | BlockWeight
    if int8 is not None and _in_blocks("fmpq", group) and not outliers:
        packed = pack_block_weight(BlockRows(weight.q4, weight.scale4), int8, layout)
    else:
        packed = pack_atom(weight, layout)
    host_order = order.get() if hasattr(order, "ndim") and hasattr(order, "get") else order  # CuPy's
    place = np.asarray(channel_places(host_order), like=weight.q4)
    return ReorderedWeight(
        scheme="atom" if int8 is None else "fmpq",
        layout=layout,
        N=N,
        K=K,
        outliers=outliers,
        group=group,
        int8=0 if int8 is None else int8,
        clip=clip if int8 is None else 1.0,
        buffers={**packed.buffers, "place": place},
    )
