"""A float matrix in PyTorch's memory, quantised and packed where it lies."""

import torch
from torch import Tensor

from ptxlab import gpu
from ptxlab.llm.model.weights import quantiser
from ptxlab.lowbit.layout import pack
from ptxlab.lowbit.quant.inputs import DEVICE_STRIP

LAYOUT = "strips"
_ROWS = 16  # of a strip: pieces of a matrix are packed apart at its multiples


def quantise_and_pack(weight: Tensor, scheme: str, group: int, elements: int = DEVICE_STRIP) -> dict[str, Tensor]:
    """Return the buffers of the weight [N, K], rounded to nearest and packed in `strips`, on its device.

    Rows are quantised by themselves, so a piece of about `elements` of them is worked on at a time: that bounds the
    memory besides. On a GPU CuPy does it, on PyTorch's current stream.

    Raises ArgumentError for a weight that is not finite, or whose scales no kernel supports.
    """
    rows = max(_ROWS, elements // weight.shape[1] // _ROWS * _ROWS)
    pieces = [_pack_rows(piece, scheme, group) for piece in weight.split(rows)]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _pack_rows(weight: Tensor, scheme: str, group: int) -> dict[str, Tensor]:
    if not weight.is_cuda:
        return _pack_array(weight.float(), scheme, group)
    with gpu.caller_stream():
        return _pack_array(weight.float(), scheme, group)


def _pack_array(floats: Tensor, scheme: str, group: int) -> dict[str, Tensor]:
    packed = pack(quantiser(scheme)(gpu.as_array("weight", floats), group), LAYOUT)
    return {name: gpu.like(array, floats) for name, array in packed.buffers.items()}
