"""Atom's operands as the kernels take them: packed weights (`AtomWeight`) and activations (`AtomActivations`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F16, S8
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit.layout.atom import (
    pack_atom_strips,
    pack_pairs,
    scale_columns,
    scale_rows,
    strip_bytes,
    unpack_atom_strips,
    unpack_pairs,
)
from ptxlab.lowbit.layout.description import Described
from ptxlab.lowbit.layout.packings import Buffers, Shapes
from ptxlab.lowbit.quant.atom import ATOM_GROUPS, ATOM_OUTLIERS, AtomRows
from ptxlab.validate import is_integer, is_one_of, shape_of

ATOM_LAYOUTS = {"strips": "sm_90a", "rows": "sm_80"}  # of weights, with the first architecture whose kernel reads it
ATOM_ORDERS = {"strips": "bytes", "rows": "pairs"}  # of the activations that go with them
VERSION = 1  # raised when the meaning of any stored byte changes


@dataclass(frozen=True, eq=False, kw_only=True)
class AtomWeight(Described):
    """A weight of Atom's W4A4 [N, K + outliers]: K INT4 channels in groups, then the outliers in INT8.

    `buffers` are NumPy or CuPy arrays. `strips`, for gemm_w4a4_sm90: `strips` u8. `rows`, for gemm_w4a4_atom_sm80:
    `w4` u8 [N, K/2], `w8` s8 [N, outliers], `w_scale` f16 [N, K/g + 1 in whole eights] (`layout.atom`). Raises
    ArgumentError if anything does not fit together.
    """

    layout: str
    N: int
    K: int
    outliers: int
    group: int
    buffers: Mapping[str, npt.NDArray[Any]] = field(repr=False)
    version: int = VERSION

    def __post_init__(self) -> None:
        check_buffers(self, atom_shapes(self.layout, self.N, self.K, self.outliers, self.group), f"K={self.K}")

    @property
    def arch(self) -> str:
        """The first architecture whose kernel reads the layout; `a` marks one that runs nowhere else."""
        return ATOM_LAYOUTS[self.layout]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, padding included."""
        return sum(int(array.nbytes) for array in self.buffers.values())


def check_buffers(weight: Any, shapes: Shapes, channels: str) -> None:
    """Raise ArgumentError for a packed weight of another version, or whose `buffers` are not of these shapes."""
    if not is_one_of(weight.version, (VERSION,)):
        raise ArgumentError("version", f"must be {VERSION}", weight.version)
    if not isinstance(weight.buffers, Mapping):
        raise ArgumentError("buffers", "must be arrays by name", type(weight.buffers).__name__)
    if set(weight.buffers) != set(shapes):
        raise ArgumentError("buffers", f"must be {', '.join(shapes)}", ", ".join(map(str, weight.buffers)) or "none")
    for name, (dtype, shape) in shapes.items():
        array = weight.buffers[name]
        if getattr(array, "dtype", None) != dtype or array.shape != shape:
            rule = f"must be {dtype} {list(shape)} for {weight.layout}, N={weight.N}, {channels}"
            got = f"{array.dtype} {list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
            raise ArgumentError(f"buffers[{name}]", rule, got)


def atom_shapes(layout: str, N: int, K: int, outliers: int, group: int) -> Shapes:
    """Return the buffers of an `AtomWeight`: name -> (dtype, shape).

    Raises ArgumentError: an unknown layout, N no positive multiple of 8, and for what `check_channels` refuses.
    """
    check_rows(layout, N)
    check_channels(K, outliers, group)
    if layout == "strips":
        return {"strips": ("uint8", (ceil_div(N, 16), strip_bytes(K, outliers, group)))}
    return {
        "w4": ("uint8", (N, K // 2)),
        "w8": ("int8", (N, outliers)),
        "w_scale": ("float16", (N, scale_columns(K, group))),
    }


def check_rows(layout: str, N: int) -> None:
    """Raise ArgumentError for a weight's layout that there is not, N no positive multiple of 8."""
    if not is_one_of(layout, ATOM_LAYOUTS):
        raise ArgumentError("layout", f"must be one of {', '.join(ATOM_LAYOUTS)}", layout)
    if not is_integer(N) or N <= 0 or N % 8:
        raise ArgumentError("weight", "N must be a positive multiple of 8", f"N={N}")


def check_channels(K: int, outliers: int, group: int) -> None:
    """Raise ArgumentError for a group not 64 or 128, K no positive multiple of it, outliers not 0, 64 or 128."""
    if not is_one_of(group, ATOM_GROUPS):
        raise ArgumentError("group", f"must be one of {', '.join(map(str, ATOM_GROUPS))}", group)
    if not is_one_of(outliers, ATOM_OUTLIERS):
        raise ArgumentError("outliers", f"must be one of {', '.join(map(str, ATOM_OUTLIERS))}", outliers)
    if not is_integer(K) or K <= 0 or K % group:
        raise ArgumentError("K", f"must be a positive multiple of the group {group}", repr(K))


@break_graph
def pack_atom(weight: AtomRows, layout: str = "strips") -> AtomWeight:
    """Pack a quantised weight of NumPy or CuPy arrays; `unpack_atom` gives it back bit for bit.

    Raises ArgumentError: an unknown layout, N, K, group or outliers as in `atom_shapes`, no AtomRows.
    """
    (N, _), K, outliers = require_atom_rows("weight", weight).shape, weight.q4.shape[1], weight.q8.shape[1]
    atom_shapes(layout, N, K, outliers, weight.group)
    buffers: Buffers = {"strips": pack_atom_strips(weight)} if layout == "strips" else {}
    if layout == "rows":
        buffers = {"w4": pack_pairs(weight.q4), "w8": weight.q8, "w_scale": scale_rows(weight)}
    buffers = {name: array.copy(order="C") for name, array in buffers.items()}  # of columns in another order it is not
    return AtomWeight(layout=layout, N=N, K=K, outliers=outliers, group=weight.group, buffers=buffers)


def unpack_atom(packed: AtomWeight) -> AtomRows:
    """Unpack the quantised weight, equal to the packed one in every bit."""
    if not isinstance(packed, AtomWeight):
        raise ArgumentError("packed", "must be an AtomWeight", type(packed).__name__)
    buffers = packed.buffers
    if packed.layout == "strips":
        return unpack_atom_strips(buffers["strips"], packed.N, packed.K, packed.outliers, packed.group)
    return _rows(unpack_pairs(buffers["w4"]), buffers["w8"], buffers["w_scale"], packed.group)


@dataclass(frozen=True, eq=False, kw_only=True)
class AtomActivations(Described):
    """Activations of Atom's W4A4 [M, K + outliers] of any array library, in the order that a kernel reads.

    `bytes`, for weights in strips: `x` s8 [M, K + outliers], INT4 a byte each, no `x8`. `pairs`, for weights in rows:
    `x` u8 [M, K/2], two INT4 a byte, and `x8` s8 [M, outliers]. `scale` f16 [M, K/g + 1 in whole eights]: one per
    group, that of the outliers (1 if there are none), then ones. Raises ArgumentError if shapes do not fit together.
    """

    layout: str
    M: int
    K: int
    outliers: int
    group: int
    x: Any = field(repr=False)
    scale: Any = field(repr=False)
    x8: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        channels = f"K={self.K}, outliers={self.outliers}, group={self.group}"
        check_arrays(self, activation_shapes(self.layout, self.M, self.K, self.outliers, self.group), channels)
        if self.layout == "bytes" and self.x8 is not None:
            raise ArgumentError("x8", "must be None: x has the outliers too", type(self.x8).__name__)

    @property
    def arrays(self) -> dict[str, Any]:
        """`x`, `scale` and, of pairs, `x8`, by name."""
        return {name: getattr(self, name) for name in ("x", "scale", "x8") if getattr(self, name) is not None}


def check_arrays(x: Any, shapes: Shapes, channels: str) -> None:
    """Raise ArgumentError for packed activations of no number of tokens, or whose arrays have other shapes."""
    if not is_integer(x.M) or x.M < 0:
        raise ArgumentError("M", "must be an integer, 0 or more", repr(x.M))
    for name, (_, shape) in shapes.items():
        got = shape_of(getattr(x, name))
        if got != shape:
            raise ArgumentError(name, f"shape {list(shape)} for {x.layout}, M={x.M}, {channels}", list(got))


def activation_shapes(layout: str, M: int, K: int, outliers: int, group: int) -> Shapes:
    """Return the arrays of `AtomActivations`: name -> (dtype, shape).

    Raises ArgumentError for an unknown layout, and for what `check_channels` refuses.
    """
    if not is_one_of(layout, ATOM_ORDERS.values()):
        raise ArgumentError("layout", f"must be one of {', '.join(ATOM_ORDERS.values())}", layout)
    check_channels(K, outliers, group)
    scale = ("float16", (M, scale_columns(K, group)))
    if layout == "bytes":
        return {"x": ("int8", (M, K + outliers)), "scale": scale}
    return {"x": ("uint8", (M, K // 2)), "scale": scale, "x8": ("int8", (M, outliers))}


def pack_atom_activations(x: AtomRows, layout: str = "bytes") -> AtomActivations:
    """Lay out quantised activations (NumPy or CuPy) as a kernel reads them; the channels keep their order.

    `bytes`: INT4 a byte each, then INT8. `pairs`: INT4 two a byte, and INT8 beside. `unpack_atom_activations` is the
    inverse. Raises ArgumentError: an unknown layout, no AtomRows, another group.
    """
    (M, _), K, outliers = require_atom_rows("x", x).shape, x.q4.shape[1], x.q8.shape[1]
    activation_shapes(layout, M, K, outliers, x.group)
    arrays: Buffers
    if layout == "bytes":
        arrays = {"x": np.concatenate([x.q4, x.q8], axis=1), "scale": scale_rows(x)}
    else:
        arrays = {"x": pack_pairs(x.q4), "x8": x.q8, "scale": scale_rows(x)}
    arrays = {name: array.copy(order="C") for name, array in arrays.items()}
    return AtomActivations(layout=layout, M=M, K=K, outliers=outliers, group=x.group, **arrays)


def unpack_atom_activations(packed: AtomActivations) -> AtomRows:
    """Unpack quantised activations to rows."""
    if packed.layout == "bytes":
        return _rows(packed.x[:, : packed.K], packed.x[:, packed.K :], packed.scale, packed.group)
    return _rows(unpack_pairs(packed.x), packed.x8, packed.scale, packed.group)


def _rows(q4: S8, q8: S8, scale: F16, group: int) -> AtomRows:
    groups = q4.shape[1] // group
    return AtomRows(q4, scale[:, :groups].copy(), q8, scale[:, groups].copy())


def require_atom_rows(name: str, rows: AtomRows) -> AtomRows:
    """Raise ArgumentError for anything else than AtomRows; return them."""
    if not isinstance(rows, AtomRows):
        raise ArgumentError(name, "must be AtomRows (quant.quantize_atom_weight)", type(rows).__name__)
    return rows
