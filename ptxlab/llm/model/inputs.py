"""What the matrices of a layer read, by the kind of their weight: room for it, the calls that write it, the product.

W4A8 reads INT8 rows (`PackedActivations`). Atom's W4A4 reads INT4 in groups, and outliers in INT8 (`AtomActivations`);
COMET's W4Ax reads blocks in INT4 or INT8 (`BlockRoom`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np

from ptxlab.lowbit.kernels.gemm import gemm_w4a4, gemm_w4a8, gemm_w4ax
from ptxlab.lowbit.kernels.quantize import (
    quantize_activations,
    reorder_quantize,
    rmsnorm_quantize,
    rmsnorm_reorder_quantize,
    silu_mul_quantize,
    silu_mul_reorder_quantize,
)
from ptxlab.lowbit.layout import ATOM_ORDERS, BLOCK_ORDERS, AtomActivations, BlockActivations, PackedActivations
from ptxlab.lowbit.layout.atom_operands import activation_shapes
from ptxlab.lowbit.layout.comet_operands import block_activation_shapes
from ptxlab.lowbit.layout.packed_activations import stored_shape, tile_of
from ptxlab.lowbit.layout.packings import Shapes
from ptxlab.lowbit.layout.reordered import ReorderedWeight
from ptxlab.lowbit.quant.fmpq import BLOCK
from ptxlab.spec.dtypes import storage


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockRoom:
    """Room for W4Ax's activations of M tokens and K channels, of which each layer has its own number in INT8 blocks.

    Arrays are flat, and as large as the largest of those numbers needs; `scale` is as every one needs it.
    """

    layout: str
    M: int
    K: int
    x: Any
    scale: Any
    x8: Any = None

    def activations(self, int8: int) -> BlockActivations:
        """Return the activations with so many blocks in INT8, at the beginning of the arrays."""
        K8 = int8 * BLOCK
        shapes = block_activation_shapes(self.layout, self.M, self.K - K8, K8)
        arrays = {name: getattr(self, name)[: prod(shape)].reshape(shape) for name, (_, shape) in shapes.items()}
        return BlockActivations(layout=self.layout, M=self.M, K4=self.K - K8, K8=K8, **arrays)


Inputs: TypeAlias = PackedActivations | AtomActivations | BlockRoom
NewArray: TypeAlias = Callable[..., Any]  # of a shape, and a dtype by the keyword `of`


@dataclass(frozen=True)
class Calls:
    """The calls around a product: quantisers of plain, normalised and gated rows, and the product itself."""

    plain: Callable[..., Any]
    normed: Callable[..., Any]
    gated: Callable[..., Any]
    product: Callable[..., Any]


_W4A8 = Calls(quantize_activations, rmsnorm_quantize, silu_mul_quantize, gemm_w4a8)
_REORDERING = {
    scheme: Calls(reorder_quantize, rmsnorm_reorder_quantize, silu_mul_reorder_quantize, product)
    for scheme, product in (("atom", gemm_w4a4), ("fmpq", gemm_w4ax))
}


def calls_of(weight: Any) -> Calls:
    """Choose the calls for this weight."""
    return _REORDERING[weight.scheme] if isinstance(weight, ReorderedWeight) else _W4A8


def new_inputs(weight: Any, M: int, K: int, array: NewArray, *, order: str, rows: int | None) -> Inputs:
    """Make room for what this weight reads of M tokens; `order` and `rows` are of W4A8's activations."""

    def arrays(shapes: Shapes) -> dict[str, Any]:
        return {name: array(*shape, of=dtype) for name, (dtype, shape) in shapes.items()}

    if not isinstance(weight, ReorderedWeight):
        return new_rows(M, K, array, order=order, rows=rows)
    if weight.scheme == "atom":
        sizes: dict[str, Any] = {"layout": ATOM_ORDERS[weight.layout], "M": M, "K": K - weight.outliers}
        sizes |= {"outliers": weight.outliers, "group": weight.group}
        return AtomActivations(**sizes, **arrays(activation_shapes(**sizes)))
    layout = BLOCK_ORDERS[weight.layout]
    ends = block_activation_shapes(layout, M, K, 0), block_activation_shapes(layout, M, 0, K)
    largest_shapes: Shapes = {
        name: (dtype, (max(prod(shapes[name][1]) for shapes in ends),)) for name, (dtype, _) in ends[0].items()
    }
    return BlockRoom(layout=layout, M=M, K=K, **arrays(largest_shapes))


def new_rows(M: int, K: int, array: NewArray, *, order: str, rows: int | None) -> PackedActivations:
    """Make room for what W4A8's weights read."""
    x_q, scale = array(*stored_shape(order, M, K, rows), of="int8"), array(M, of="float32")
    sizes: dict[str, Any] = {"layout": order, "M": M, "K": K, "rows": tile_of(order, rows)[0]}
    return PackedActivations(**sizes, x_q=x_q, scale=scale, token_sum=array(M, of="int32"))


def input_bytes(weight: Any, K: int) -> int:
    """Count the bytes that `new_inputs` takes for a token, W4A8's in rows."""
    sizes: list[int] = []

    def count(*shape: int, of: str) -> Any:
        array = np.empty(shape, storage(of))
        sizes.append(array.nbytes)
        return array

    new_inputs(weight, 1, K, count, order="row_major", rows=None)
    return sum(sizes)


def can_read(weight: Any, inputs: Inputs) -> bool:
    """Check whether a weight can read these inputs: their type, order and sizes must be its own."""
    if not isinstance(weight, ReorderedWeight):
        return isinstance(inputs, PackedActivations)
    if weight.scheme == "fmpq":
        return isinstance(inputs, BlockRoom) and (inputs.layout, inputs.K) == (BLOCK_ORDERS[weight.layout], weight.K)
    expected_fields = ATOM_ORDERS[weight.layout], weight.K - weight.outliers, weight.outliers, weight.group
    return (
        isinstance(inputs, AtomActivations)
        and (inputs.layout, inputs.K, inputs.outliers, inputs.group) == expected_fields
    )


def operand(weight: Any, inputs: Inputs) -> Any:
    """Return the inputs as the product with this weight takes them."""
    return inputs.activations(weight.int8) if isinstance(inputs, BlockRoom) else inputs


def output_arguments(weight: Any, inputs: Inputs) -> dict[str, Any]:
    """Return the arguments of a quantiser that writes into the inputs of this weight."""
    out = operand(weight, inputs)
    if not isinstance(weight, ReorderedWeight):
        return {"layout": out.layout, "rows": out.rows, "out": out}
    arguments = {"place": weight.buffers["place"], "layout": out.layout, "out": out}
    if weight.scheme == "fmpq":
        return {**arguments, "int8": weight.int8}
    return {**arguments, "outliers": weight.outliers, "group": weight.group, "clip": weight.clip}


def multiplicand(weight: Any) -> Any:
    """Return the weight as the product takes it."""
    return weight.weight if isinstance(weight, ReorderedWeight) else weight
