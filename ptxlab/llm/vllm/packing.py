"""A matrix in PyTorch's memory, quantised and packed where it lies."""

from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm.model.weights import quantiser
from ptxlab.llm.vllm.kernels import MatrixShape
from ptxlab.lowbit.layout import PackedWeight, pack, unpack
from ptxlab.lowbit.layout.packed_weight import QuantizedWeight
from ptxlab.lowbit.quant.affine import AffineWeight
from ptxlab.lowbit.quant.inputs import DEVICE_STRIP
from ptxlab.lowbit.quant.tiled import with_arrays

_ROWS = 32  # of a tile of `qserve`, of two of `strips`: pieces of a matrix are packed apart at its multiples


def quantise_and_pack(
    weight: Tensor, scheme: str, group: int, layout: str, elements: int = DEVICE_STRIP
) -> dict[str, Tensor]:
    """Return the buffers of the weight [N, K], rounded to nearest and packed in a layout, on its device.

    Rows are quantised by themselves, so a piece of about `elements` of them is worked on at a time: that bounds the
    memory besides. On a GPU CuPy does it, on PyTorch's current stream.

    Raises ArgumentError for a weight that is not finite, or whose scales no kernel supports.
    """
    rows = max(_ROWS, elements // weight.shape[1] // _ROWS * _ROWS)
    pieces = [_pack_rows(piece, scheme, group, layout) for piece in weight.split(rows)]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def pack_integers(
    q: Tensor, scale: Tensor, group: int | None, layout: str, elements: int = DEVICE_STRIP
) -> tuple[dict[str, Tensor], float]:
    """Return the buffers of the weight q·scale, packed in a layout on its device, and the relative error of packing.

    q is s8 [N, K] in -8..7, scale [N, G] a float per group of K/G columns. One scale per row is exact as `qoq_channel`.
    Scales of groups become integers of a row's unit, in `lqq` with groups of `group` (`AffineWeight.nearest_lqq`),
    exactly where they are multiples of one number.

    Raises ArgumentError for integers of more bits.
    """
    rows = max(_ROWS, elements // q.shape[1] // _ROWS * _ROWS)
    pieces, squares = [], np.zeros(2)
    for integers, scales in zip(q.split(rows), scale.float().split(rows), strict=True):
        with gpu.caller_stream() if q.is_cuda else nullcontext():
            packed_weight, error = _pack_affine(integers, scales, group, layout)
            pieces.append({name: gpu.like(array, q) for name, array in packed_weight.buffers.items()})
        squares += error
    relative = float(np.sqrt(squares[0] / max(squares[1], np.finfo(np.float64).tiny)))
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}, relative


def pack_quantised(weight: QuantizedWeight, loaded: Tensor, layout: str) -> dict[str, Tensor]:
    """Return the buffers of a quantised weight of NumPy arrays, packed in a layout on the device of `loaded`.

    Raises ArgumentError for a weight of which the kernels would restore a group wrong.
    """
    if not loaded.is_cuda:
        return {name: gpu.like(array, loaded) for name, array in pack(weight, layout).buffers.items()}
    with gpu.caller_stream():
        packed_weight = pack(with_arrays(weight, gpu.to_device), layout)
        return {name: gpu.like(array, loaded) for name, array in packed_weight.buffers.items()}


def repack(loaded: dict[str, Tensor], matrix: MatrixShape, layout: str) -> dict[str, Tensor]:
    """Return the buffers of a packed matrix in another layout, bit for bit, on its device."""
    buffer = next(iter(loaded.values()))
    with gpu.caller_stream() if buffer.is_cuda else nullcontext():
        weight = unpack(matrix.weight({name: gpu.as_array(name, tensor) for name, tensor in loaded.items()}))
        return {name: gpu.like(array, buffer) for name, array in pack(weight, layout).buffers.items()}


def _pack_affine(
    q: Tensor, scale: Tensor, group: int | None, layout: str
) -> tuple[PackedWeight, npt.NDArray[np.float64]]:
    """Return packed rows, and the sums of squares of their error and of their weights."""
    integers, scales = gpu.as_array("weight", q), gpu.as_array("weight_scale", scale)
    if int(integers.min()) < -8 or int(integers.max()) > 7:
        raise ArgumentError("weight", "must be of 4 bits, -8..7", f"{int(integers.min())}..{int(integers.max())}")
    columns, zero = integers.shape[1], np.full_like(scales, 8)
    group_indices = np.arange(columns, dtype=np.int32, like=integers) // np.int32(columns // scales.shape[1])
    affine = AffineWeight(q4=(integers + np.int8(8)).astype(np.uint8), scale=scales, zero=zero, group_of=group_indices)
    weight = affine.per_channel() if group is None else affine.nearest_lqq(group)[0]
    assert weight is not None  # the zero is 8
    exact_weight = affine.dequantize()
    error = weight.dequantize() - exact_weight
    return pack(weight, layout), np.array(
        [float((array.astype(np.float64) ** 2).sum()) for array in (error, exact_weight)]
    )


def _pack_rows(weight: Tensor, scheme: str, group: int, layout: str) -> dict[str, Tensor]:
    if not weight.is_cuda:
        return _pack_array(weight.float(), scheme, group, layout)
    with gpu.caller_stream():
        return _pack_array(weight.float(), scheme, group, layout)


def _pack_array(floats: Tensor, scheme: str, group: int, layout: str) -> dict[str, Tensor]:
    packed_weight = pack(quantiser(scheme)(gpu.as_array("weight", floats), group), layout)
    return {name: gpu.like(array, floats) for name, array in packed_weight.buffers.items()}
