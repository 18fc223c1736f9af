"""Schedules of requests on a server, each of which must get the tokens that it gets alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxlab.llm.accuracy.parting import Parting, parting
from ptxlab.llm.model import Runner
from ptxlab.llm.server import Request, Server


@dataclass
class Served:
    """A server, and all requests that it has had.

    Attributes:
        alone: a runner of one sequence that is batch-invariant, too.
        requests: with how `submit` was called.
        cancelled: those that had not ended by themselves.
        preempted: those that waited once more.
        may_part: whether tokens may be others than those of the request alone (a runner that is not batch-invariant).
        parted: where they were: of requests whose tokens are the likeliest, and of those that are drawn.
    """

    server: Server
    alone: Runner
    requests: list[tuple[dict[str, Any], Request]] = field(default_factory=list)
    cancelled: list[Request] = field(default_factory=list)
    preempted: set[Request] = field(default_factory=set)
    may_part: bool = False
    parted: tuple[list[Parting], list[Parting]] = field(default_factory=lambda: ([], []))
    _tokens_by_request: dict[str, list[int]] = field(default_factory=dict)

    def submit(self, **arguments: Any) -> Request:
        request = self.server.submit(**arguments)
        self.requests.append((arguments, request))
        return request

    def cancel(self, request: Request) -> None:
        if not request.done:
            self.cancelled.append(request)
        self.server.cancel(request)
        self.check_pages()

    def step(self) -> None:
        self.server.step()
        self.preempted |= {request for request in self.server.waiting if request.tokens}
        self.check_pages()

    def finish(self) -> None:
        """Run steps until all requests are done, and check them.

        Every page is free then, and every token is the one that the request gets alone. If tokens may part, the first
        difference is noted instead.
        """
        while self.server.running or self.server.waiting:
            self.step()
        assert sorted(self.server.runner.page_pool.free) == list(range(self.server.runner.pages))
        for arguments, request in self.requests:
            assert request.done and request.error is None
            if self.may_part:
                if difference := parting(self.alone, request):
                    self.parted[request.sampling.temperature > 0].append(difference)
                continue
            right = self.tokens_alone(arguments)
            if request in self.cancelled:
                right = right[: len(request.tokens)]
            assert request.tokens == right, arguments

    def tokens_alone(self, arguments: dict[str, Any]) -> list[int]:
        """Return the tokens that a request gets on a runner of its own."""
        key = str(arguments)
        if key not in self._tokens_by_request:
            server = Server(self.alone, share_prefixes=False)
            request = server.submit(**arguments)
            server.run()
            self._tokens_by_request[key] = request.tokens
        return self._tokens_by_request[key]

    def summary(self) -> str:
        """Describe in a sentence how many requests there were, and where their tokens parted."""
        parts = [f"{len(self.preempted)} preempted", f"{len(self.cancelled)} cancelled"]
        for kind, parted in zip(("likeliest", "drawn"), self.parted, strict=True):
            first = sorted(place.position for place in parted)[:8]
            farthest = max((place.margin / (1 if kind == "drawn" else place.spread) for place in parted), default=0.0)
            unit = "the likelihood" if kind == "drawn" else "the logits' deviation"
            parts.append(
                f"{len(parted)} {kind} parted"
                + (f", first at {first}, by up to {farthest:.3f} of {unit}" * bool(first))
            )
        return f"{len(self.requests)} requests: {'; '.join(parts)}"

    def check_pages(self) -> None:
        """Assert that every page is free or belongs to running sequences, as many as are counted.

        Sequences have the pages that their lengths need. A shared page is no longer written to.
        """
        runner = self.server.runner
        used_pages = [page for b in range(runner.batch) for page in runner.table[b, : runner.page_counts[b]].tolist()]
        users = runner.page_pool.users
        assert np.array_equal(users, np.bincount(used_pages, minlength=runner.pages))
        assert sorted(runner.page_pool.free) == np.flatnonzero(users == 0).tolist()
        for b in range(runner.batch):
            assert (users[runner.table[b, runner.lengths[b] // 64 : runner.page_counts[b]]] == 1).all()
        for b in range(runner.batch):
            if b not in self.server.running:
                assert not runner.page_counts[b] and not runner.lengths[b]
            assert runner.page_counts[b] * 64 >= runner.lengths[b]


def random_requests(count: int, vocabulary: int, max_tokens: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield random prompts and lengths that fit `max_tokens` tokens together.

    Half of the requests are drawn, some may end early. Every third prompt begins with the same tokens.
    """
    rng = np.random.default_rng(seed)
    common = rng.integers(0, vocabulary, max_tokens)
    for i in range(count):
        prompt = int(rng.integers(1, max_tokens - 2))
        prefix = common[: 2 * prompt // 3 if i % 3 == 0 else 0].tolist()
        yield {
            "prompt": [*prefix, *rng.integers(0, vocabulary, prompt - len(prefix)).tolist()],
            "tokens": int(rng.integers(1, min(64, max_tokens - prompt))),
            "ends": range(vocabulary // 50),
            "temperature": 20.0 * (i % 2),
            "seed": i,
        }


def soak(served: Served, requests: Iterable[dict[str, Any]], cancels: float = 0.05, seed: int = 0) -> Iterator[Request]:
    """Submit requests in bursts while others are served, cancel some, and yield each one as it is submitted."""
    rng = np.random.default_rng(seed)
    for arguments in requests:
        yield served.submit(**arguments)
        for _ in range(int(rng.geometric(0.3)) - 1):
            served.step()
        if rng.random() < cancels:
            unfinished = [request for _, request in served.requests if not request.done]
            if unfinished:
                served.cancel(unfinished[int(rng.integers(len(unfinished)))])
