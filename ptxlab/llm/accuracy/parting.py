"""`parting`: where a request that was served among others first has another token than alone, and by how much."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm.model.runner import Runner
from ptxlab.llm.server import Request, adjust_scores, choose_tokens, draw_share


@dataclass(frozen=True)
class Parting:
    """The first token at which two runs of a request differ.

    Attributes:
        position: of the token among those generated, from 0.
        token: what the request got.
        alone: what it gets alone behind the same tokens.
        margin: by how much. Of the likeliest token: its logit less the other's. Of a drawn one: the share of the
            likelihood by which the draw lies beside the other's.
        spread: standard deviation of the logits there.
    """

    position: int
    token: int
    alone: int
    margin: float
    spread: float


def parting(runner: Runner, request: Request) -> Parting | None:
    """Find the first token of a request that differs from a runner of one sequence; return None if all agree.

    The runner goes over the request's own tokens, so only the first difference is reported. A request that was
    cancelled or failed is compared as far as it came. Raises ArgumentError for a runner of several sequences, and
    what the runner refuses.
    """
    if not isinstance(runner, Runner) or runner.batch != 1:
        got = f"{runner.batch} sequences" if isinstance(runner, Runner) else type(runner).__name__
        raise ArgumentError("runner", "must be a Runner of 1 sequence", got)
    if not isinstance(request, Request):
        raise ArgumentError("request", "must be a Request", type(request).__name__)
    if not request.tokens:
        return None
    logits = runner.prefill([request.prompt])
    for position, token in enumerate(request.tokens):
        probe = replace(request, tokens=request.tokens[:position])
        (alone,) = choose_tokens([probe], logits)
        if alone != token:
            row_logits = (gpu.to_host(logits) if gpu.is_device_array(logits) else logits)[0].astype(np.float64)
            return Parting(position, token, alone, _margin(probe, row_logits, token, alone), float(row_logits.std()))
        if position + 1 < len(request.tokens):
            logits = runner.decode(np.array([token], np.int32))
    return None


def _margin(request: Request, logits: Any, token: int, alone: int) -> float:
    (scores,) = adjust_scores([request], logits[None])
    if not request.sampling.temperature:
        return float(scores[alone] - scores[token])
    cumulative_shares = np.exp(scores - scores.max()).cumsum()
    cumulative_shares, drawn_share = cumulative_shares / cumulative_shares[-1], draw_share(request)
    return float(
        max(drawn_share - cumulative_shares[token], (cumulative_shares[token - 1] if token else 0.0) - drawn_share)
    )
