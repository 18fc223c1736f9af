"""Operators of W4A4 (Atom) and W4Ax (COMET): the quantisers that put channels in order, and the products.

They are as those of `operators`. Activations are three tensors, as the kernels write them: x, scale and x8, which is
empty but for activations in pairs. A weight is the list of its buffers in the order of `layout.atom_operands` and
`layout.comet_operands`, beside its number of rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptxlab.errors import ArgumentError, naming
from ptxlab.llm.torch.operators import array_of, define, norm_rows, tensor_of
from ptxlab.lowbit import reference
from ptxlab.lowbit.kernels import gemm, quantize
from ptxlab.lowbit.kernels.gemm.common import DTYPES, FLOATS
from ptxlab.lowbit.kernels.gemm.w4a4 import gemm_atom
from ptxlab.lowbit.kernels.gemm.w4ax import gemm_blocks
from ptxlab.lowbit.kernels.quantize.atom import COMET, check_place, ordered_rows
from ptxlab.lowbit.kernels.quantize.atom_api import activation_fields
from ptxlab.lowbit.kernels.quantize.gated import compute_gate
from ptxlab.lowbit.kernels.quantize.options import ReorderOptions
from ptxlab.lowbit.layout import (
    ATOM_ORDERS,
    BLOCK_ORDERS,
    AtomActivations,
    AtomWeight,
    BlockActivations,
    BlockWeight,
    pack_atom_activations,
    pack_block_activations,
    unpack_atom,
    unpack_atom_activations,
    unpack_block_activations,
    unpack_block_weight,
)
from ptxlab.lowbit.layout.atom_operands import ATOM_LAYOUTS, VERSION, activation_shapes, atom_shapes
from ptxlab.lowbit.layout.comet_operands import block_activation_shapes, block_shapes
from ptxlab.lowbit.layout.packings import Shapes
from ptxlab.lowbit.quant import BlockRows
from ptxlab.lowbit.quant.atom import ACTIVATION_CLIP
from ptxlab.lowbit.quant.fmpq import BLOCK
from ptxlab.lowbit.quant.inputs import extremes
from ptxlab.spec.dtypes import floats, name_of
from ptxlab.validate import is_one_of

Ordered = tuple[Tensor, Tensor, Tensor]  # x, scale f16, x8 s8
_ORDER_SCHEMA = (
    f"int outliers=128, int group=128, str? layout=None, float clip={ACTIVATION_CLIP}, int? int8=None)"
    " -> (Tensor x, Tensor scale, Tensor x8)"
)
_HALVES = ("float16", "bfloat16")


# Quantisers


def _new_tensors(
    x: Tensor, channels: Any, outliers: int = 128, group: int = 128, layout: str | None = None,
    clip: float = ACTIVATION_CLIP, int8: int | None = None,
) -> Ordered:  # fmt: skip
    """Make empty results; sizes may be symbols, so nothing is checked."""
    M, are_pairs = x.shape[0], layout == "pairs"
    if int8 is None:
        bytes4 = (channels - outliers) // 2 if are_pairs else channels
        bytes8, scales = outliers if are_pairs else 0, (channels - outliers) // group + 1
    else:
        outliers = int8 * BLOCK
        bytes4 = (channels - outliers) // 2 + (0 if are_pairs else outliers)
        bytes8, scales = outliers if are_pairs else 0, channels // BLOCK
    dtype = torch.int8 if int8 is None and not are_pairs else torch.uint8
    scale = x.new_empty((M, (scales + 7) // 8 * 8), dtype=torch.float16)
    return x.new_empty((M, bytes4), dtype=dtype), scale, x.new_empty((M, bytes8), dtype=torch.int8)


def _quantize_on_cuda(
    call: Callable[..., Any],
    x: Tensor,
    channels: int,
    operands: Sequence[Any],
    order: Mapping[str, Any],
    **options: Any,
) -> Ordered:
    """Make what a quantiser makes of x, in new tensors."""
    fields = _fields(call.__name__, channels, order)
    outputs = _new_tensors(x, channels, **{**order, "layout": fields["layout"]})
    kind = AtomActivations if order.get("int8") is None else BlockActivations
    x8 = outputs[2] if fields["layout"] == "pairs" else None
    call(x, *operands, **order, **options, out=kind(M=len(x), **fields, x=outputs[0], scale=outputs[1], x8=x8))
    return outputs


def _fields(name: str, channels: int, order: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the activations besides M; ArgumentError as the public calls raise it."""
    return activation_fields(name, channels, ReorderOptions(**order))


def _quantize_on_cpu(name: str, y: Any, place: Tensor, order: Mapping[str, Any]) -> Ordered:
    """Quantise y f32 [M, C] with the NumPy reference."""
    fields, int8 = _fields(name, y.shape[1], order), order.get("int8")
    places = array_of(f"{name}: place", place, "int16", y.shape[1])
    check_place(name, {"place": places})
    rules = {"outliers": order.get("outliers", 128), "g": order.get("group", 128), "code": 0}
    rules["clip"] = order.get("clip", ACTIVATION_CLIP)
    if int8 is not None:
        rules = {"outliers": int8 * BLOCK, "g": BLOCK, "code": COMET, "clip": 1.0}
    with naming(name):
        rows = ordered_rows(y, places, **rules)
    packed: Any
    if isinstance(rows, BlockRows):
        packed = pack_block_activations(rows, fields["layout"])
    else:
        packed = pack_atom_activations(rows, fields["layout"])
    x8 = np.empty((len(y), 0), np.int8) if packed.x8 is None else packed.x8
    return torch.from_numpy(packed.x), torch.from_numpy(packed.scale), torch.from_numpy(x8)


def _plain_on_cpu(x: Tensor, place: Tensor, **order: Any) -> Ordered:
    name = "reorder_quantize"
    y = floats(array_of(f"{name}: x", x, (*_HALVES, "float32"), "M", "C"))
    extremes(f"{name}: x", y)
    return _quantize_on_cpu(name, y, place, order)


def _normed_on_cpu(
    x: Tensor, gamma: Tensor, place: Tensor, residual: Tensor | None = None, eps: float = 1e-5,
    normed: Tensor | None = None, **order: Any,
) -> Ordered:  # fmt: skip
    name = "rmsnorm_reorder_quantize"
    with norm_rows(name, x, gamma, residual, eps, normed, columns="C") as y:
        return _quantize_on_cpu(name, y, place, order)


def _gated_on_cpu(gate_up: Tensor, place: Tensor, activation: str = "silu", **order: Any) -> Ordered:
    name = "silu_mul_reorder_quantize"
    array = floats(array_of(f"{name}: gate_up", gate_up, _HALVES, "M", "2·C"))
    if gate_up.shape[1] % 2:
        raise ArgumentError(f"{name}: gate_up", "width % 2 == 0", gate_up.shape[1])
    if not is_one_of(activation, reference.ACTIVATIONS):
        raise ArgumentError(f"{name}: activation", f"must be one of {', '.join(reference.ACTIVATIONS)}", activation)
    extremes(f"{name}: gate_up", array)
    kinds = reference.ACTIVATIONS.index(activation), DTYPES.index(name_of(gate_up.dtype))
    return _quantize_on_cpu(name, compute_gate(array, *kinds)[0].astype(np.float32), place, order)


define(
    f"reorder_quantize(Tensor x, Tensor place, *, {_ORDER_SCHEMA}",
    cuda=lambda x, place, **order: _quantize_on_cuda(quantize.reorder_quantize, x, x.shape[-1], (place,), order),
    cpu=_plain_on_cpu,
    fake=lambda x, place, **order: _new_tensors(x, x.shape[1], **order),
)
define(
    "rmsnorm_reorder_quantize(Tensor x, Tensor gamma, Tensor place, Tensor(a!)? residual=None, float eps=1e-5,"
    f" Tensor(b!)? normed=None, *, {_ORDER_SCHEMA}",
    cuda=lambda x, gamma, place, residual=None, eps=1e-5, normed=None, **order: _quantize_on_cuda(
        quantize.rmsnorm_reorder_quantize, x, x.shape[-1], (gamma, place), order,
        residual=residual, eps=eps, normed=normed,
    ),
    cpu=_normed_on_cpu,
    fake=lambda x, gamma, place, residual=None, eps=1e-5, normed=None, **order: _new_tensors(x, x.shape[1], **order),
)  # fmt: skip
define(
    f'silu_mul_reorder_quantize(Tensor gate_up, Tensor place, str activation="silu", *, {_ORDER_SCHEMA}',
    cuda=lambda gate_up, place, activation="silu", **order: _quantize_on_cuda(
        quantize.silu_mul_reorder_quantize, gate_up, gate_up.shape[-1] // 2, (place,), order, activation=activation
    ),
    cpu=_gated_on_cpu,
    fake=lambda gate_up, place, activation="silu", **order: _new_tensors(gate_up, gate_up.shape[1] // 2, **order),
)


# Products


def _operands(
    name: str, tensors: Sequence[Tensor], weight: Sequence[Tensor], layout: str, N: int, given_sizes: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return fields of activations and weight, in tensors of the right dtypes and shapes; or ArgumentError."""
    x, scale, x8 = tensors
    if not is_one_of(layout, ATOM_LAYOUTS):
        raise ArgumentError(f"{name}: layout", f"must be one of {', '.join(ATOM_LAYOUTS)}", layout)
    is_atom, is_in_strips = "outliers" in given_sizes, layout == "strips"
    width8 = given_sizes["outliers"] if is_atom else given_sizes["K8"]
    shapes_x: Callable[..., Shapes]
    shapes_w: Callable[..., Shapes]
    if is_atom:
        width4 = x.shape[-1] - width8 if is_in_strips else 2 * x.shape[-1]
        sizes: dict[str, Any] = {"K": width4, **given_sizes}
        order, shapes_x, shapes_w = ATOM_ORDERS[layout], activation_shapes, atom_shapes
    else:
        width4 = 2 * (x.shape[-1] - width8) if is_in_strips else 2 * x.shape[-1]
        sizes = {"K4": width4, **given_sizes}
        order, shapes_x, shapes_w = BLOCK_ORDERS[layout], block_activation_shapes, block_shapes
    with naming(name):
        expected_x, expected_w = shapes_x(order, len(x), **sizes), shapes_w(layout, N, **sizes)
    if len(weight) != len(expected_w):
        raise ArgumentError(f"{name}: weight", f"must be {', '.join(expected_w)}", f"{len(weight)} tensors")
    arrays = {"x": x, "scale": scale, **({"x8": x8} if "x8" in expected_x else {})}
    buffers = dict(zip(expected_w, weight, strict=True))
    for label, parts, shapes in (("x", arrays, expected_x), ("weight", buffers, expected_w)):
        for part, (dtype, shape) in shapes.items():
            if name_of(parts[part].dtype) != dtype or tuple(parts[part].shape) != shape:
                got = f"{name_of(parts[part].dtype)} {list(parts[part].shape)}"
                raise ArgumentError(f"{name}: {label}: {part}", f"must be {dtype} {list(shape)}", got)
    activations = {"layout": order, "M": len(x), **sizes, "x8": None, **arrays}
    return activations, {"layout": layout, "N": N, **sizes, "buffers": buffers, "version": VERSION}


def _multiply_on_cuda(
    kinds: tuple[type, type], call: Callable[..., Any], tensors: Sequence[Tensor], weight: Sequence[Tensor],
    bias: Tensor | None, layout: str, N: int, out_dtype: torch.dtype, **sizes: int,
) -> Tensor:  # fmt: skip
    x_fields, weight_fields = _operands(call.__name__, tensors, weight, layout, N, sizes)
    operands = []
    for kind, fields in zip(kinds, (x_fields, weight_fields), strict=True):
        operand: Any = object.__new__(kind)  # its own checks take no tensors, and `_operands` has checked these
        vars(operand).update(fields)
        operands.append(operand)
    out = tensors[0].new_empty((len(tensors[0]), N), dtype=out_dtype)
    product: Tensor = call(*operands, bias=bias, out=out)
    return product


def _multiply_on_cpu(
    name: str, tensors: Sequence[Tensor], weight: Sequence[Tensor], bias: Tensor | None, layout: str, N: int,
    out_dtype: torch.dtype, **sizes: int,
) -> Tensor:  # fmt: skip
    if name_of(out_dtype) not in FLOATS:
        raise ArgumentError(f"{name}: out_dtype", f"must be one of {', '.join(FLOATS)}", name_of(out_dtype))
    x_fields, weight_fields = _operands(name, tensors, weight, layout, N, sizes)
    arrays = {part: tensor.detach().numpy() for part, tensor in x_fields.items() if isinstance(tensor, Tensor)}
    buffers = {part: tensor.detach().numpy() for part, tensor in weight_fields["buffers"].items()}
    bias_array = None if bias is None else array_of(f"{name}: bias", bias, "float32", N)
    OUT = FLOATS.index(name_of(out_dtype))
    if name == "gemm_w4a4":
        x = AtomActivations(**{**x_fields, **arrays})
        rows = unpack_atom(AtomWeight(**{**weight_fields, "buffers": buffers}))
        y = gemm_atom(rows, unpack_atom_activations(x), bias_array, OUT=OUT)
    else:
        blocks = BlockActivations(**{**x_fields, **arrays})
        weight_blocks = unpack_block_weight(BlockWeight(**{**weight_fields, "buffers": buffers}))
        y = gemm_blocks(weight_blocks, unpack_block_activations(blocks), bias_array, OUT=OUT)
    return tensor_of(y, out_dtype)


def _empty_product(x: Tensor, *_: Any, N: int, out_dtype: torch.dtype, **sizes: Any) -> Tensor:
    return x.new_empty((x.shape[0], N), dtype=out_dtype)


_PRODUCT_SCHEMA = "Tensor x, Tensor scale, Tensor x8, Tensor[] weight, Tensor? bias=None, *, str layout, int N,"
for _name, _kinds, _call, _sizes in (
    ("gemm_w4a4", (AtomActivations, AtomWeight), gemm.gemm_w4a4, "int outliers=128, int group=128"),
    ("gemm_w4ax", (BlockActivations, BlockWeight), gemm.gemm_w4ax, "int K8"),
):
    _defaults = {"outliers": 128, "group": 128} if "group" in _sizes else {}
    define(
        f"{_name}({_PRODUCT_SCHEMA} {_sizes}, ScalarType out_dtype) -> Tensor",
        cuda=lambda x, scale, x8, weight, bias=None, kinds=_kinds, call=_call, defaults=_defaults, **options: (
            _multiply_on_cuda(kinds, call, (x, scale, x8), weight, bias, **{**defaults, **options})
        ),
        cpu=lambda x, scale, x8, weight, bias=None, name=_name, defaults=_defaults, **options: _multiply_on_cpu(
            name, (x, scale, x8), weight, bias, **{**defaults, **options}
        ),
        fake=_empty_product,
    )
