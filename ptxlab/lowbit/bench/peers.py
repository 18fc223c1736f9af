"""`Peers`: how other projects' kernels are timed in the same run; who has some passes them to a suite."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ptxlab.lowbit.bench.shapes import Batch

Times = dict[int, dict[str, float]]  # microseconds by number of tokens and name


def _none_at(tokens: Sequence[int]) -> Times:
    return {M: {} for M in tokens}


@dataclass(frozen=True)
class Peers:
    """Functions that time peers: each returns microseconds by name, none if the library is not installed.

    Attributes:
        cublas: of GEMMs with a weight [N, K]: (N, K, tokens, names or None for all).
        cublas_chain: of GEMMs one after the other: (weights by (N, K), tokens).
        humming: of W4A8 GEMMs: (N, K, tokens).
        attention: of decode attention: (batch).
    """

    cublas: Callable[[int, int, Sequence[int], Iterable[str] | None], Times]
    cublas_chain: Callable[[Sequence[tuple[int, int]], Sequence[int]], Times]
    humming: Callable[[int, int, Sequence[int]], Times]
    attention: Callable[[Batch], dict[str, float]]


NO_PEERS = Peers(
    cublas=lambda N, K, tokens, names: _none_at(tokens),
    cublas_chain=lambda matrices, tokens: _none_at(tokens),
    humming=lambda N, K, tokens: _none_at(tokens),
    attention=lambda batch: {},
)
