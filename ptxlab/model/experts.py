"""Mixture of experts between the grouped GEMMs: which tokens go where, and what comes back, by plain array operations.

They run on NumPy and CuPy arrays; nothing is sorted or looked at on the host, so that they can be captured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ptxlab import gpu
from ptxlab.kernels.operation import dtype_of
from ptxlab.layout import PackedActivations
from ptxlab.model.config import Config
from ptxlab.spec.dtypes import floats, stored


@dataclass(frozen=True, eq=False, kw_only=True)
class Routing:
    """Rows of experts: token t's choice c lies in row `place[t, c]`; rows are in the order of experts, then of tokens.

    Attributes:
        tokens: normalised and quantised, row-major [M, H].
        normed: the same before quantisation, f16 or bf16 [M, H], which the router looks at.
        place: s64 [M, chosen].
        share: how much of the token's result each expert gives, f32 [M, chosen]; of a token they add up to 1.
        offsets: where each expert's rows begin, s32 [E + 1].
        results: what the experts give, [M·chosen, H].
    """

    tokens: PackedActivations
    normed: Any
    place: Any
    share: Any
    offsets: Any
    results: Any

    @classmethod
    def empty(cls, config: Config, tokens: PackedActivations, array: Callable[..., Any]) -> Self | None:
        """Room for the rows of these tokens; None for a dense model. `array(*shape, of=dtype)` makes an array."""
        if not config.experts:
            return None
        M, chosen = tokens.M, config.chosen_experts
        return cls(
            tokens=tokens,
            normed=array(M, config.hidden),
            place=array(M, chosen, of="int64"),
            share=array(M, chosen, of="float32"),
            offsets=array(config.experts + 1, of="int32"),
            results=array(M * chosen, config.hidden),
        )

    def choose(self, router: Any, rows: PackedActivations) -> None:
        """Choose the experts of every token (`router` f32 [E, H]), and copy its activations to their rows."""
        place, offsets = _shared(self.place), _shared(self.offsets)
        chosen, _shared(self.share)[...] = top(floats(_shared(self.normed)) @ _shared(router).T, place.shape[1])
        taken = chosen.reshape(-1, 1) == np.arange(len(router), like=place)  # bool [M·chosen, E]
        ends = taken.sum(axis=0).cumsum()
        offsets[0], offsets[1:] = 0, ends
        rank = taken.cumsum(axis=0) - 1 + (ends - taken.sum(axis=0))  # of a row, among all that take that expert
        place[...] = (taken * rank).sum(axis=1).reshape(place.shape)
        for name in ("x_q", "scale", "token_sum"):
            source, target = _shared(getattr(self.tokens, name)), _shared(getattr(rows, name))
            for c in range(place.shape[1]):
                target[place[:, c]] = source

    def combine(self, out: Any) -> None:
        """Add up what a token's experts gave, in float32 in the order of their choice, and round once: out [M, H]."""
        share, rows = _shared(self.share), floats(_shared(self.results))[_shared(self.place)]
        total = rows[:, 0] * share[:, :1]
        for c in range(1, share.shape[1]):
            total = total + rows[:, c] * share[:, c : c + 1]
        _shared(out)[...] = stored(total, dtype_of(self.results))


def top(logits: Any, k: int) -> tuple[Any, Any]:
    """The k largest of each row of logits f32 [M, E], the largest first, of equal ones the first, and their softmax.

    Returns:
        (s64 [M, k], f32 [M, k]).
    """
    places, left = [], logits
    for _ in range(k):
        places.append(left.argmax(axis=1))
        left = np.where(np.arange(logits.shape[1], like=logits) == places[-1][:, None], np.float32(-np.inf), left)
    chosen = np.stack(places, axis=1)
    weights = np.exp(np.take_along_axis(logits, chosen, axis=1) - logits.max(axis=1, keepdims=True))
    return chosen, weights / weights.sum(axis=1, keepdims=True)


def _shared(array: Any) -> Any:
    """On the same memory, NumPy's or CuPy's."""
    return gpu.as_array("experts", array)
