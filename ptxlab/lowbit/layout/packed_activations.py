"""Quantised activations in one of the orders that a GEMM reads them in (`layout.activations`), with scales and sums."""

from dataclasses import dataclass, field
from typing import Any

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.layout.activations import (
    SPAN,
    from_fragment_order,
    from_swizzled_tiles,
    to_fragment_order,
    to_swizzled_tiles,
)
from ptxlab.lowbit.layout.description import Described
from ptxlab.lowbit.quant.activations import QuantizedActivations
from ptxlab.validate import is_integer, is_one_of, shape_of

ORDERS = ("row_major", "fragment", "tiles")


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedActivations(Described):
    """INT8 activations [M, K] of any array library, in the order `layout`, with what an epilogue needs.

    `x_q` is s8: row_major [M, K]; fragment [ceil(K/64), ceil(M/8), 512]; tiles of `rows` tokens
    [ceil(M/rows), ceil(K/128), 128·rows]. `scale` is f32 [M], `token_sum` s32 [M], the sum of x_q over K. Raises
    ArgumentError if shapes do not fit together.
    """

    layout: str
    M: int
    K: int
    rows: int = 1  # tokens of a tile: 1 for row_major, 8 for fragment
    x_q: Any = field(repr=False)
    scale: Any = field(repr=False)
    token_sum: Any = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("M", "K"):
            if not is_integer(getattr(self, name)) or getattr(self, name) < 0:
                raise ArgumentError(name, "must be an integer, 0 or more", repr(getattr(self, name)))
        shape = stored_shape(self.layout, self.M, self.K, self.rows)
        for name, expected in (("x_q", shape), ("scale", (self.M,)), ("token_sum", (self.M,))):
            got = shape_of(getattr(self, name))
            if got != expected:
                rule = f"shape {list(expected)} for {self.layout}, M={self.M}, K={self.K}, rows={self.rows}"
                raise ArgumentError(name, rule, list(got))


def tile_of(layout: str, rows: int | None = None) -> tuple[int, int]:
    """Return the tokens and channels of a tile, to multiples of which an order pads; only `tiles` takes `rows`.

    Raises ArgumentError: an unknown order, or `rows` missing, superfluous, or not a multiple of 8 in 8..256.
    """
    if not is_one_of(layout, ORDERS):
        raise ArgumentError("layout", f"must be one of {', '.join(ORDERS)}", layout)
    if layout == "tiles":
        if not is_integer(rows) or rows % 8 or not 8 <= rows <= 256:
            raise ArgumentError("rows", "must be a multiple of 8 in 8..256 for tiles", rows)
        return int(rows), SPAN
    fixed, span = (1, 32) if layout == "row_major" else (8, 64)
    if not is_one_of(rows, (None, fixed)):
        raise ArgumentError("rows", f"{layout} has {fixed}", rows)
    return fixed, span


def stored_shape(layout: str, M: int, K: int, rows: int | None = None) -> tuple[int, ...]:
    """Return the shape of x_q in that order; see `PackedActivations`. Raises what `tile_of` raises."""
    tokens, span = tile_of(layout, rows)
    if layout == "row_major":
        return (M, K)
    if layout == "fragment":
        return (ceil_div(K, span), ceil_div(M, tokens), tokens * span)
    return (ceil_div(M, tokens), ceil_div(K, span), tokens * span)


def pack_activations(quantized: QuantizedActivations, layout: str, rows: int | None = None) -> PackedActivations:
    """Pack quantised activations (NumPy or CuPy) in another order; `unpack_activations` is the inverse."""
    tokens, _ = tile_of(layout, rows)
    if not isinstance(quantized, QuantizedActivations):
        raise ArgumentError("quantized", "must be QuantizedActivations", type(quantized).__name__)
    M, K = quantized.shape
    x_q = quantized.q
    if layout == "fragment":
        x_q = to_fragment_order(x_q)
    elif layout == "tiles":
        x_q = to_swizzled_tiles(x_q, tokens)
    return PackedActivations(
        layout=layout, M=M, K=K, rows=tokens, x_q=x_q, scale=quantized.scale, token_sum=quantized.token_sum
    )


def unpack_activations(packed: PackedActivations) -> QuantizedActivations:
    """Unpack the activations to a matrix."""
    x_q = packed.x_q
    if packed.layout == "fragment":
        x_q = from_fragment_order(x_q, packed.M, packed.K)
    elif packed.layout == "tiles":
        x_q = from_swizzled_tiles(x_q, packed.M, packed.K, packed.rows)
    return QuantizedActivations(x_q, packed.scale, packed.token_sum)
