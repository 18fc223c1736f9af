"""`Server`: requests that come and go between steps, over the pages of one runner (continuous batching)."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm.model.generate import finite_only
from ptxlab.llm.model.pages import PAGE
from ptxlab.llm.model.runner import Runner
from ptxlab.llm.model.sampling import Sampling, adjust, tokens_mask
from ptxlab.runtime.arguments import check_flags
from ptxlab.validate import is_integer, require_integer

_ROWS_AT_ONCE = 16  # sequences at a time: the float64 of a large vocabulary take megabytes each


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
    def all_tokens(self) -> list[int]:
        """Tokens of the prompt and those generated."""
        return self.prompt + self.tokens


class Server:
    """Serves requests, oldest first, as many at a time as the runner has sequences and pages for.

    A step makes a token of every sequence whose prompt is in the cache, in one launch; then it takes a chunk of the
    prompts that are not there yet, oldest first, in another. A request takes the pages of its prompt when it is
    admitted and the others as it grows. Where they run out, the youngest request gives its pages back, waits, and is
    computed again from its tokens. Requests that begin with the same tokens share whole pages of 64 tokens, also those
    of requests that have ended, as long as nobody else has taken these.

    With a `batch_invariant` runner every request gets the very tokens that it gets alone. Prompts and decoding round
    attention differently. So a request that is computed again decodes the tokens that it has generated once more, and
    pages of these are not shared. Without `batch_invariant` such tokens are part of the prompt.

    One thread at a time may use it, and nothing else the runner.

    Attributes:
        runner: whose sequences it takes.
        share_prefixes: whether requests share pages.
        waiting: requests without a sequence, oldest first.
        running: the others by their sequence, oldest first.
    """

    def __init__(self, runner: Runner, *, share_prefixes: bool = True) -> None:
        """Prepare a server on a runner, whose sequences are emptied.

        `share_prefixes` lets requests share pages.
        """
        if not isinstance(runner, Runner):
            raise ArgumentError("runner", "must be a Runner", type(runner).__name__)
        check_flags(share_prefixes=share_prefixes)
        self.runner, self.share_prefixes = runner, share_prefixes
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
        """Queue a request; see `Request`. Raises ArgumentError for one that can never be served.

        `sampling` are the attributes of `Sampling`: `temperature`, `seed`, `top_k`, `top_p`, `min_p`,
        `repetition_penalty`; by default the likeliest token is taken.
        """
        require_integer("tokens", tokens, 1)
        rules = Sampling(**sampling)
        is_collection = isinstance(ends, Collection) and not isinstance(ends, np.ndarray)
        if not is_collection or not all(map(is_integer, ends)):
            raise ArgumentError("ends", "must be a collection of tokens", repr(ends)[:40])
        prompt_tokens = self.runner.check_prompt(prompt)
        free_tokens = min(self.runner.context, self.runner.pages * PAGE)
        if len(prompt_tokens) + tokens > free_tokens:
            rule = f"prompt and tokens must fit the {free_tokens} tokens of a sequence"
            raise ArgumentError("tokens", rule, f"{len(prompt_tokens)} + {tokens}")
        self.waiting.append(Request(prompt_tokens, int(tokens), frozenset(ends), rules))
        return self.waiting[-1]

    def cancel(self, request: Request) -> None:
        """End a request, wherever it is; its pages are free."""
        request.done = True
        self.waiting = [queued for queued in self.waiting if queued is not request]
        for b in [b for b, queued in self.running.items() if queued is request]:
            self._remove(b)

    def step(self) -> list[Request]:
        """Run one step; return the requests that got a token or an error.

        If it fails or is interrupted, the next one computes all that were running again from their tokens.
        """
        try:
            return self._step()
        except BaseException:
            self.waiting[:0] = [self._remove(b) for b in list(self.running)]
            raise

    def _step(self) -> list[Request]:
        self._admit()
        ready_sequences = [b for b in self.running if not self._missing_prompt(b)]
        for b in ready_sequences:
            self._make_room(b)
        advanced, decoding = [], [b for b in ready_sequences if b in self.running]
        if decoding:
            tokens = np.array([self.running[b].all_tokens[self.runner.lengths[b]] for b in decoding], np.int32)
            advanced += self._append_to_complete(decoding, self.runner.decode(tokens, decoding))
        if chunk := self._next_prompt_chunk():
            advanced += self._append_to_complete([*chunk], self.runner.extend(chunk))
        return advanced

    def run(self) -> None:
        """Run steps until every request is done."""
        while self.waiting or self.running:
            self.step()

    def stream(self, request: Request) -> Iterator[int]:
        """Yield a request's tokens as soon as they exist; the other requests go on meanwhile."""
        if not request.done and all(queued is not request for queued in (*self.waiting, *self.running.values())):
            raise ArgumentError("request", "must be one of this server's", f"prompt of {len(request.prompt)} tokens")
        yielded_tokens = 0
        while True:
            yield from request.tokens[yielded_tokens:]
            yielded_tokens = len(request.tokens)
            if request.done:
                return
            self.step()

    def _admit(self) -> None:
        """Give sequences, and pages for what is known and a token more, to those that wait."""
        free_sequences = [b for b in range(self.runner.batch) if b not in self.running]
        while free_sequences and self.waiting:
            b, request = free_sequences[0], self.waiting[0]
            if self.share_prefixes:
                self.runner.share(b, self._computable_as_prompt(request))
            if not self.runner.reserve(b, len(request.all_tokens) + 1 - int(self.runner.lengths[b])):
                return self.runner.release(b)
            self.running[free_sequences.pop(0)] = self.waiting.pop(0)

    def _computable_as_prompt(self, request: Request) -> list[int]:
        """Return the tokens of a request that a launch of prompts may compute; decoding computes the others.

        They are the prompt, and unless the runner is batch-invariant, all generated tokens but the last.
        """
        if self.runner.batch_invariant or not request.tokens:
            return request.prompt
        return request.all_tokens[:-1]

    def _missing_prompt(self, b: int) -> list[int]:
        """Return the tokens of a sequence's prompt that its cache lacks."""
        return self._computable_as_prompt(self.running[b])[self.runner.lengths[b] :]

    def _next_prompt_chunk(self) -> dict[int, list[int]]:
        """Return up to a chunk of tokens of prompts that caches lack, by sequence."""
        chunk: dict[int, list[int]] = {}
        free_tokens = self.runner.chunk
        for b in self.running:
            if free_tokens and (tokens := self._missing_prompt(b)[:free_tokens]):
                chunk[b] = tokens
                free_tokens -= len(tokens)
        return chunk

    def _make_room(self, b: int) -> None:
        """Reserve a page for the next token of b where it needs one.

        If none is free, the youngest request, be it b itself, gives up its pages and waits again.
        """
        while b in self.running and not self.runner.reserve(b, 1):
            self.waiting.insert(0, self._remove(next(reversed(self.running))))

    def _append_to_complete(self, sequences: list[int], logits: Any) -> list[Request]:
        """Append the next token to those sequences, of logits [n, V], all of whose tokens are in the cache."""
        complete_indices = [
            i for i, b in enumerate(sequences) if self.runner.lengths[b] == len(self.running[b].all_tokens)
        ]
        return (
            self._append([sequences[i] for i in complete_indices], logits[complete_indices]) if complete_indices else []
        )

    def _append(self, sequences: list[int], logits: Any) -> list[Request]:
        """Append the next token of each sequence, chosen from logits [n, V].

        Logits that are not finite end a request with an error.
        """
        requests = [self.running[b] for b in sequences]
        for b, request, token in zip(sequences, requests, choose_tokens(requests, logits), strict=True):
            if token < 0:
                request.error = f"logits are not finite at token {len(request.tokens)}"
            else:
                request.tokens.append(token)
                if len(request.tokens) == 1:
                    self._register_pages(b)
            if token < 0 or len(request.tokens) >= request.most or token in request.ends:
                request.done = True
                self._remove(b)
        return requests

    def _register_pages(self, b: int) -> None:
        """Let others share the pages of a sequence that has finite logits behind its tokens but the last."""
        if self.share_prefixes:
            tokens = self._computable_as_prompt(self.running[b])
            self.runner.register_pages(b, tokens[: self.runner.lengths[b]])

    def _remove(self, b: int) -> Request:
        if self.running[b].tokens and not self.running[b].error:
            self._register_pages(b)
        self.runner.release(b)
        return self.running.pop(b)


def choose_tokens(requests: Sequence[Request], logits: Any) -> list[int]:
    """Choose the next token of each request from logits [n, V]; -1 where the largest of a row is not finite."""
    tokens = logits.argmax(axis=1)
    adjusted = [i for i, request in enumerate(requests) if not request.sampling.takes_largest]
    for start in range(0, len(adjusted), _ROWS_AT_ONCE):
        rows = adjusted[start : start + _ROWS_AT_ONCE]
        tokens[rows] = _choose([requests[i] for i in rows], logits[rows])
    tokens = finite_only(tokens, logits)
    host_tokens = gpu.fetch(tokens)() if gpu.is_device_array(tokens) else tokens
    chosen_tokens: list[int] = host_tokens.tolist()
    return chosen_tokens


def _choose(requests: Sequence[Request], logits: Any) -> Any:
    """Draw tokens [n] from logits [n, V], or take the likeliest after a penalty."""
    scores = adjust_scores(requests, logits)
    is_drawn = np.array([bool(request.sampling.temperature) for request in requests])
    uniform = np.array([[draw_share(request)] for request in requests])
    if gpu.is_device_array(logits):
        is_drawn, uniform = gpu.to_device(is_drawn), gpu.to_device(uniform)
    return np.where(is_drawn, _draw_tokens(scores, uniform), scores.argmax(axis=1))


def adjust_scores(requests: Sequence[Request], logits: Any) -> Any:
    """Return the scores f64 [n, V] that the next tokens of requests are chosen by, of their logits [n, V].

    In float64, where another order of additions decides a token otherwise once in 10^12 draws or so.
    """
    samplings = [request.sampling for request in requests]
    is_penalized = any(sampling.penalizes for sampling in samplings)
    seen_mask = tokens_mask([request.all_tokens for request in requests], logits) if is_penalized else None
    return adjust(logits.astype(np.float64), samplings, seen_mask)


def draw_share(request: Request) -> float:
    """Draw the share of the likelihood, in [0, 1), at which a request's next token lies.

    It is the same for every vocabulary and GPU.
    """
    return float(np.random.default_rng((request.sampling.seed, len(request.tokens))).random())


def _draw_tokens(scores: Any, uniform: Any) -> Any:
    """Return tokens [n] at which the sum of the likelihoods of scores [n, V] passes a share [n, 1] of the whole."""
    cumulative_shares = np.exp(scores - scores.max(axis=1, keepdims=True)).cumsum(axis=1)
    return (cumulative_shares <= uniform * cumulative_shares[:, -1:]).sum(axis=1)
