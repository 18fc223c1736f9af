"""Twins of a layer's quantisers and products by the kind of weight, in the very integers that the kernels compute.

Inputs of W4A8 are `QuantizedActivations`, those of W4A4 and W4Ax packed as the kernels write them. Arrays are NumPy's
or CuPy's; what is written for NumPy is computed there.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from ptxlab import gpu
from ptxlab.llm.model.inputs import operand
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.kernels.gemm.common import DTYPES, gemm, gemm_channel
from ptxlab.lowbit.kernels.gemm.w4a4 import gemm_atom
from ptxlab.lowbit.kernels.gemm.w4ax import gemm_blocks
from ptxlab.lowbit.kernels.quantize.atom import BY_PAIRS, COMET, RULES, SILU_MUL_REORDER
from ptxlab.lowbit.kernels.quantize.gated import SILU_MUL
from ptxlab.lowbit.layout import (
    ATOM_ORDERS,
    BLOCK_ORDERS,
    AtomActivations,
    BlockActivations,
    ReorderedWeight,
    pack_atom_activations,
    pack_block_activations,
    unpack,
    unpack_atom_activations,
    unpack_block_activations,
)
from ptxlab.lowbit.layout.packed_activations import unpack_activations
from ptxlab.lowbit.quant import AtomRows, BlockRows, QoQChannelWeight, QuantizedActivations
from ptxlab.lowbit.quant.atom import ATOM_PAPER
from ptxlab.lowbit.quant.fmpq import BLOCK
from ptxlab.lowbit.quant.tiled import with_arrays
from ptxlab.spec.dtypes import floats
from ptxlab.spec.tolerance import Allowed

QuantizedInput: TypeAlias = QuantizedActivations | AtomActivations | BlockActivations
_WRITTEN = {"x": "x_q", "x8": "x8", "scale": "x_scale"}  # parts of packed activations, by the kernels' names


def is_quantized_input(x: Any) -> bool:
    """Check whether x is of a type that a product reads: quantised activations."""
    return isinstance(x, QuantizedActivations | AtomActivations | BlockActivations)


def arrays_of(x: QuantizedInput) -> dict[str, Any]:
    """Return the arrays of quantised activations by name."""
    if isinstance(x, QuantizedActivations):
        return {name: getattr(x, name) for name in ("q", "scale", "token_sum")}
    return x.arrays


def quantize_input(weight: Any, y: Any) -> QuantizedInput:
    """Quantise the input y f32 [M, K] as this weight reads it."""
    rows = to_numpy(y)
    if not isinstance(weight, ReorderedWeight):
        return _arrays_like(quant.quantize_activations(rows), y)
    return _arrays_like(_pack_rows(weight, with_arrays(weight, to_numpy).quantize_input(rows)), y)


def gate_inputs(weight: Any, gate_up: Any, activation: str, dtype: str) -> tuple[QuantizedInput, tuple[Allowed, ...]]:
    """Return the gate of gate_up [M, 2·K] as this weight reads it, and how far each of its parts may be from that."""
    logical: dict[str, Any] = {"gate_up": floats(to_numpy(gate_up))}
    logical["activation"] = reference.ACTIVATIONS.index(activation)
    config = {"IN": DTYPES.index(dtype)}
    if not isinstance(weight, ReorderedWeight):
        logical |= {"rows": 1, "span": 32}
        right, allowed = SILU_MUL.expected(logical, config), SILU_MUL.allowed(logical, config)
        kinds = {"x_q": np.int8, "scale": np.float32, "token_sum": np.int32}
        eight = QuantizedActivations(*(right[name].astype(kind) for name, kind in kinds.items()))
        return _arrays_like(eight, gate_up), tuple(allowed[name] for name in kinds)
    logical["place"] = to_numpy(weight.buffers["place"])
    if weight.scheme == "atom":
        rules = {"outliers": weight.outliers, "g": weight.group, "code": RULES.index(ATOM_PAPER), "clip": weight.clip}
        logical |= {**rules, "pairs": BY_PAIRS.index(ATOM_ORDERS[weight.layout])}
        make_empty: Any = AtomActivations
        fields = {"K": weight.K - weight.outliers, "outliers": weight.outliers, "group": weight.group}
    else:
        logical |= {"outliers": weight.int8 * BLOCK, "g": BLOCK, "code": COMET, "clip": 1.0}
        logical["pairs"] = BY_PAIRS.index(BLOCK_ORDERS[weight.layout])
        make_empty = BlockActivations
        fields = {"K4": weight.K - weight.int8 * BLOCK, "K8": weight.int8 * BLOCK}
    right, allowed = SILU_MUL_REORDER.expected(logical, config), SILU_MUL_REORDER.allowed(logical, config)
    layout = BY_PAIRS[logical["pairs"]]
    arrays = {part: right[name] for part, name in _WRITTEN.items() if part != "x8" or layout == "pairs"}
    packed_inputs = make_empty(layout=layout, M=len(gate_up), **fields, **arrays)
    return _arrays_like(packed_inputs, gate_up), tuple(allowed[_WRITTEN[part]] for part in packed_inputs.arrays)


def multiply(x: QuantizedInput, weight: Any, dtype: str, bias: Any = None) -> Any:
    """Return the product as its kernel stores it, [M, N]."""
    out = DTYPES.index(dtype)
    if isinstance(x, QuantizedActivations):
        unpacked_weight = unpack(weight)
        if isinstance(unpacked_weight, QoQChannelWeight):
            return gemm_channel(unpacked_weight, x.q, x.scale, bias, x.token_sum, OUT=out)
        return gemm(unpacked_weight, x.q, x.scale, bias, OUT=out)
    rows, inputs = with_arrays(weight, to_numpy).rows, with_arrays(x, to_numpy)
    bias = None if bias is None else to_numpy(bias)
    if isinstance(inputs, AtomActivations):
        y = gemm_atom(rows, unpack_atom_activations(inputs), bias, OUT=out)
    else:
        y = gemm_blocks(BlockRows(rows.q4, rows.scale4), unpack_block_activations(inputs), bias, OUT=out)
    return match_device(y, x.x)


def read_outputs(weight: Any, inputs: Any) -> QuantizedInput:
    """Return what a quantiser has left in a layer's buffers for this weight, as NumPy's or CuPy's arrays."""
    x = operand(weight, inputs)
    if isinstance(x, AtomActivations | BlockActivations):
        return replace(x, **{name: as_view(array) for name, array in x.arrays.items()})
    arrays = {name: as_view(getattr(x, name)) for name in ("x_q", "scale", "token_sum")}
    return unpack_activations(replace(x, **arrays))


def _pack_rows(weight: ReorderedWeight, rows: AtomRows | BlockRows) -> AtomActivations | BlockActivations:
    if isinstance(rows, BlockRows):
        return pack_block_activations(rows, BLOCK_ORDERS[weight.layout])
    return pack_atom_activations(rows, ATOM_ORDERS[weight.layout])


def _arrays_like(x: QuantizedInput, example: Any) -> QuantizedInput:
    """Put the arrays of x where the example is."""
    arrays: Mapping[str, Any] = {name: match_device(array, example) for name, array in arrays_of(x).items()}
    placed_input: QuantizedInput = replace(x, **arrays)
    return placed_input


# Arrays of both libraries


def as_view(array: Any) -> Any:
    """View an array of any library as NumPy's or CuPy's."""
    return gpu.as_array("reference", array)


def to_numpy(array: Any) -> Any:
    """Return an array as NumPy's, copied from the GPU if it lies there."""
    return gpu.to_host(as_view(array)) if gpu.is_device_array(array) else array


def match_device(array: Any, example: Any) -> Any:
    """Copy a NumPy array to the device if the example lies there."""
    return array if isinstance(example, np.ndarray) else gpu.to_device(array)
