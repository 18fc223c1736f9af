"""A mixture of experts: which experts a token takes, in which order its rows lie, and what they add up to."""

from typing import Any

import numpy as np


def top_experts(logits: Any, k: int) -> tuple[Any, Any]:
    """Find the k largest logits of every row of logits [M, E], the largest first, and their shares.

    Of equal logits the first expert wins. Shares are the softmax over all experts divided by its sum over the chosen
    ones (Mixtral), which is the softmax of the chosen logits.

    Returns:
        (s64 [M, k], [M, k] of the dtype of the logits).
    """
    chosen_experts = (-logits).argsort(axis=1, kind="stable")[:, :k]
    chosen_logits = np.take_along_axis(logits, chosen_experts, axis=1)
    weights = np.exp(chosen_logits - chosen_logits[:, :1])
    return chosen_experts, weights / weights.sum(axis=1, keepdims=True)


def rows_by_expert(chosen: Any, experts: int) -> tuple[Any, Any]:
    """Sort the rows of choices [M, k] by expert, then by token.

    Returns:
        (offsets s32 [experts + 1], where each expert's rows begin; place s32 [M, k], the row of each choice).
    """
    order = chosen.reshape(-1).argsort(kind="stable")
    place = order.argsort().reshape(chosen.shape)
    offsets = chosen.reshape(-1)[order].searchsorted(np.arange(experts + 1, like=chosen))
    return offsets.astype(np.int32), place.astype(np.int32)


def combine_expert_rows(results: Any, place: Any, share: Any) -> Any:
    """Compute Σ_c share[m, c] · results[place[m, c]] of results f32 [rows, H]: f32 [M, H], added in the order of c."""
    rows = results[place] * share[:, :, None]
    total = rows[:, 0]
    for c in range(1, share.shape[1]):
        total = total + rows[:, c]
    return total
