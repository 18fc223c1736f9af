"""Channels of similar magnitude into the same group (QServe §4.3.3), for the inputs of o and down.

QServe does not restrict it to these. The inputs of q, k, v, gate and up are the residual stream, which is rotated: no
channel stands out there.

This costs nothing at run time, because the rows of the matrix before are permuted likewise. For o the order stays
within a head, and is the same for all query heads of a KV head.
"""

from typing import Any

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.llm.model.decoder import EXPERT_MATRICES, Layer, expert_part


def reorder_down(layer: Layer, salience: Any, expert: int | None = None) -> dict[str, Any]:
    """Sort the channels between gate, up and down by salience [F], the largest first.

    `expert` is the one whose matrices these are, None in a dense layer.
    """
    gate, up, down = (expert_part(part, expert) for part in EXPERT_MATRICES)
    order = descending("salience", salience, (layer[down].shape[1],))
    return {**layer, gate: layer[gate][order], up: layer[up][order], down: layer[down][:, order]}


def reorder_heads(layer: Layer, salience: Any) -> dict[str, Any]:
    """Sort the channels of every head of values by the salience [Hq, D] of o's input, the largest first.

    The query heads that share a KV head share its order: that of their largest salience.
    """
    Hq, D = salience.shape
    v, o = layer["v"], layer["o"]
    Hkv = len(v) // D
    order = descending("salience", salience.reshape(Hkv, -1, D).max(axis=1), (Hkv, D))
    rows = (order + D * np.arange(Hkv, like=order)[:, None]).reshape(-1)
    query_order = np.repeat(order, Hq // Hkv, axis=0)
    columns = (query_order + D * np.arange(Hq, like=order)[:, None]).reshape(-1)
    reordered = {**layer, "v": v[rows], "o": o[:, columns]}
    return reordered | ({"v_bias": layer["v_bias"][rows]} if "v_bias" in layer else {})


def descending(argument: str, salience: Any, shape: tuple[int, ...]) -> Any:
    """Return the order that sorts along the last axis, the largest first; ties keep their order."""
    if salience.shape != shape:
        raise ArgumentError(argument, f"must be {list(shape)}", f"shape {salience.shape}")
    return np.argsort(-salience, axis=-1, kind="stable")
