"""`Server`: requests that come and go between steps, over the pages of one runner (continuous batching)."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm.model.generate import finite_only
from ptxlab.llm.model.runner import PAGE, Runner
from ptxlab.llm.model.sampling import Sampling, adjust, tokens_mask
from ptxlab.validate import is_integer, require_integer

_AT_ONCE = 16  # sequences at a time: the float64 of a large vocabulary take megabytes each


@dataclass(eq=False)
class Request:
    """A prompt, and what follows it so far.

    Attributes:
        prompt: its tokens.
        most: tokens to generate at most.
        ends: tokens that end it; such a one is the last of `tokens`.
        sampling: how its tokens are chosen. The n-th draw depends on the seed, n and the logits alone.
        tokens: generated so far.
        done: whether it has ended, was cancelled or failed.
        error: why it failed, or None.
    """

    prompt: list[int]
    most: int
    ends: Collection[int] = ()
    sampling: Sampling = field(default_factory=Sampling)
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    error: str | None = None

    @property
    def known(self) -> list[int]:
        """All its tokens."""
        return self.prompt + self.tokens


class Server:
    """Serves requests, oldest first, as many at a time as the runner has sequences and pages for.

    A step makes a token of every sequence whose tokens are in the cache but for the last one; then it takes a chunk of
    the prompts that are not there yet, oldest first. A request takes the pages of its prompt when it is admitted and
    the others as it grows. Where they run out, the youngest request gives its pages back, waits, and is computed again
    from its tokens. With a `batch_invariant` runner every request gets the very tokens that it gets alone.

    One thread at a time may use it, and nothing else the runner.

    Attributes:
        runner: whose sequences it takes.
        waiting: requests without a sequence, oldest first.
        running: the others by their sequence, oldest first.
    """

    def __init__(self, runner: Runner) -> None:
        if not isinstance(runner, Runner):
            raise ArgumentError("runner", "must be a Runner", type(runner).__name__)
        self.runner = runner
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        for b in range(runner.batch):
            runner.release(b)

    def submit(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        ends: Collection[int] = (),
        **sampling: Any,
    ) -> Request:
        """A request that waits for its turn; see `Request`. Raises ArgumentError for one that can never be served.

        `sampling` are the attributes of `Sampling`: `temperature`, `seed`, `top_k`, `top_p`, `min_p`,
        `repetition_penalty`; by default the likeliest token is taken.
        """
        require_integer("tokens", tokens, 1)
        chosen_by = Sampling(**sampling)
        listed = isinstance(ends, Collection) and not isinstance(ends, np.ndarray)
        if not listed or not all(map(is_integer, ends)):
            raise ArgumentError("ends", "must be a collection of tokens", repr(ends)[:40])
        known, room = self.runner.check_prompt(prompt), min(self.runner.context, self.runner.pages * PAGE)
        if len(known) + tokens > room:
            rule = f"prompt and tokens must fit the {room} tokens of a sequence"
            raise ArgumentError("tokens", rule, f"{len(known)} + {tokens}")
        self.waiting.append(Request(known, int(tokens), frozenset(ends), chosen_by))
        return self.waiting[-1]

    def cancel(self, request: Request) -> None:
        """End a request, wherever it is; its pages are free."""
        request.done = True
        self.waiting = [other for other in self.waiting if other is not request]
        for b in [b for b, other in self.running.items() if other is request]:
            self._leave(b)

    def step(self) -> list[Request]:
        """The requests that have one more token, or an error.

        If it fails or is interrupted, the next one computes all that were running again from their tokens.
        """
        try:
            return self._step()
        except BaseException:
            self.waiting[:0] = [self._leave(b) for b in list(self.running)]
            raise

    def _step(self) -> list[Request]:
        self._admit()
        advanced, ready = [], [b for b in self.running if self._missing(b) == 1]
        for b in ready:
            self._make_room(b)
        live = [b for b in ready if b in self.running]
        if live:
            tokens = np.array([self.running[b].known[-1] for b in live], np.int32)
            advanced += self._append(live, self.runner.decode(tokens, live))
        if part := self._part():
            logits = self.runner.extend(part)
            through = [i for i, b in enumerate(part) if not self._missing(b)]
            if through:
                advanced += self._append([list(part)[i] for i in through], logits[through])
        return advanced

    def run(self) -> None:
        """Steps until every request is done."""
        while self.waiting or self.running:
            self.step()

    def stream(self, request: Request) -> Iterator[int]:
        """The tokens of a request as soon as they are there; the others go on meanwhile."""
        if not request.done and all(other is not request for other in (*self.waiting, *self.running.values())):
            raise ArgumentError("request", "must be one of this server's", f"prompt of {len(request.prompt)} tokens")
        given = 0
        while True:
            yield from request.tokens[given:]
            given = len(request.tokens)
            if request.done:
                return
            self.step()

    def _admit(self) -> None:
        """Give sequences, and pages for what is known and a token more, to those that wait."""
        free = [b for b in range(self.runner.batch) if b not in self.running]
        while free and self.waiting and self.runner.reserve(free[0], len(self.waiting[0].known) + 1):
            self.running[free.pop(0)] = self.waiting.pop(0)

    def _missing(self, b: int) -> int:
        """Tokens of a sequence that its cache lacks."""
        request = self.running[b]
        return len(request.prompt) + len(request.tokens) - int(self.runner.lengths[b])

    def _part(self) -> dict[int, list[int]]:
        """Up to a chunk of tokens that caches lack, by sequence; a sequence that lacks one decodes in the next step."""
        part: dict[int, list[int]] = {}
        room = self.runner.chunk
        for b, request in self.running.items():
            if self._missing(b) > 1 and room:
                there = int(self.runner.lengths[b])
                part[b] = request.known[there : there + room]
                room -= len(part[b])
        return part

    def _make_room(self, b: int) -> None:
        """A page for the next token of b where it needs one: of the youngest if none is free, be it b itself."""
        while b in self.running and not self.runner.reserve(b, 1):
            self.waiting.insert(0, self._leave(next(reversed(self.running))))

    def _append(self, at: list[int], logits: Any) -> list[Request]:
        """The next tokens of sequences, of their logits [n, V]; what is not finite ends a request with an error."""
        requests = [self.running[b] for b in at]
        for b, request, token in zip(at, requests, chosen_tokens(requests, logits), strict=True):
            if token < 0:
                request.error = f"logits are not finite at token {len(request.tokens)}"
            else:
                request.tokens.append(token)
            if token < 0 or len(request.tokens) >= request.most or token in request.ends:
                request.done = True
                self._leave(b)
        return requests

    def _leave(self, b: int) -> Request:
        self.runner.release(b)
        return self.running.pop(b)


def chosen_tokens(requests: Sequence[Request], logits: Any) -> list[int]:
    """The next token of each request, of its logits [n, V]; -1 where the largest of these is not finite."""
    tokens = logits.argmax(axis=-1)
    adjusted = [i for i, request in enumerate(requests) if not request.sampling.takes_largest]
    for start in range(0, len(adjusted), _AT_ONCE):
        rows = adjusted[start : start + _AT_ONCE]
        tokens[rows] = _choose([requests[i] for i in rows], logits[rows])
    tokens = finite_only(tokens, logits)
    found = gpu.fetch(tokens)() if gpu.is_device_array(tokens) else tokens
    chosen: list[int] = found.tolist()
    return chosen


def _choose(requests: Sequence[Request], logits: Any) -> Any:
    """Draw tokens [n] from logits [n, V], or take the likeliest after a penalty."""
    scores = adjusted_scores(requests, logits)
    drawn = np.array([bool(request.sampling.temperature) for request in requests])
    uniform = np.array([[share_drawn(request)] for request in requests])
    if gpu.is_device_array(logits):
        drawn, uniform = gpu.to_device(drawn), gpu.to_device(uniform)
    return np.where(drawn, _drawn(scores, uniform), scores.argmax(axis=-1))


def adjusted_scores(requests: Sequence[Request], logits: Any) -> Any:
    """Return the scores f64 [n, V] that the next tokens of requests are chosen by, of their logits [n, V].

    In float64, where another order of additions decides a token otherwise once in 10^12 draws or so.
    """
    samplings = [request.sampling for request in requests]
    penalized = any(by.penalizes for by in samplings)
    seen = tokens_mask([request.known for request in requests], logits) if penalized else None
    return adjust(logits.astype(np.float64), samplings, seen)


def share_drawn(request: Request) -> float:
    """The share of the likelihood in [0, 1) at which its next token is drawn: the same for every vocabulary and GPU."""
    return float(np.random.default_rng((request.sampling.seed, len(request.tokens))).random())


def _drawn(scores: Any, uniform: Any) -> Any:
    """Tokens [n] at which the sum of the likelihoods of scores [n, V] passes a share [n, 1] of the whole."""
    total = np.exp(scores - scores.max(axis=-1, keepdims=True)).cumsum(axis=-1)
    return (total <= uniform * total[:, -1:]).sum(axis=-1)
