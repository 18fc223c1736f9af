"""Values rotated head by head: the rotation is folded into the matrices before and behind attention.

A Hadamard matrix spreads a head's outliers over its channels, so that 4 bits hold them (QServe's code; its paper
rotates the residual stream alone). Keys are rotated by the kernels, behind RoPE.
"""

from functools import cache

import torch
from torch import Tensor

from ptxlab.llm.recipe.rotation import hadamard


def rotate_values(rows: Tensor, head_dim: int) -> Tensor:
    """Return the rows [Hkv·D, K] that make values, or their bias [Hkv·D], of rotated values; f32."""
    head_rows = rows.double().reshape(-1, head_dim, rows.numel() // len(rows))
    return (_rotation(head_dim, rows.device).T @ head_rows).reshape(rows.shape).float()


def rotate_back(weight: Tensor, head_dim: int) -> Tensor:
    """Return the matrix [N, Hq·D] after attention for rotated values; f32, computed a part of the rows at a time."""
    rotation = _rotation(head_dim, weight.device)
    rotated_chunks = [
        (row_chunk.double().unflatten(1, (-1, head_dim)) @ rotation).flatten(1).float()
        for row_chunk in weight.split(1024)
    ]
    return torch.cat(rotated_chunks)


@cache
def _rotation(head_dim: int, device: torch.device) -> Tensor:
    return torch.from_numpy(hadamard(head_dim)).to(device)
