"""Claims: statements that must hold for all inputs, by subject; and the run that decides them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import process_time
from typing import Any

from ptxlab import _moved, registry
from ptxlab.errors import ArgumentError
from ptxlab.prove.solve import (
    Answer,
    Enumeration,
    Explanation,
    Query,
    Verdict,
    ask,
    check_solver,
    contradict,
    distinct_queries,
    version_of,
)


@dataclass(frozen=True)
class Claim:
    """A statement, and the formula that proves it.

    Attributes:
        subject: what it speaks of: a kernel's source (`dequant_lqq.ptx`), or a topic (`quantiser lqq`).
        name: short, unique within the subject.
        text: the statement in one line, with its precondition.
        build: makes the formula, or several that must all hold, or tries all cases.
        expect: `refuted` for a claim that shows where the precondition ends.
        quick: whether it is in the quick half: the others repeat it, or take longer to say more.
    """

    subject: str
    name: str
    text: str
    build: Callable[[], Query | Sequence[Query] | Enumeration]
    expect: Verdict = "proved"
    quick: bool = True


@dataclass(frozen=True)
class Decision:
    """The decision on a claim: by which solver, or by trying all `cases`, in how many seconds of CPU time."""

    claim: Claim
    verdict: Verdict
    seconds: float
    solver: str
    cases: int = 0
    counterexample: Mapping[str, int] = field(default_factory=dict)
    explanation: Explanation | None = None

    @property
    def as_expected(self) -> bool:
        """True if the claim was decided as it expects."""
        return self.verdict == self.claim.expect

    def __str__(self) -> str:
        """Format the verdict, the claim, and each lane of a counterexample's word."""
        lines = self.explanation.lines if self.explanation else ()
        return "\n  ".join([f"{self.claim.subject}: {self.verdict}", self.claim.text, *lines])

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON-ready values."""
        claim_fields = {key: getattr(self.claim, key) for key in ("subject", "name", "text", "expect")}
        decision_fields = {"verdict": self.verdict, "seconds": round(self.seconds, 3), "solver": self.solver}
        lines = list(self.explanation.lines) if self.explanation else []
        return {
            **claim_fields,
            **decision_fields,
            "cases": self.cases,
            "counterexample": dict(self.counterexample),
            "lines": lines,
        }


Maker = Callable[[], Iterable[Claim]]
_MAKERS: list[Maker] = []


def register(maker: Maker) -> Maker:
    """Register a function, as a decorator, that returns claims on something other than a kernel's code."""
    _MAKERS.append(maker)
    return maker


def registered_claims() -> list[Claim]:
    """Return every registered claim: of the registry's modules, of this project and others, and of the caller's own."""
    for _ in registry.load_all("claims"):
        pass  # a module enters its claims when it is imported
    return [claim for maker in _MAKERS for claim in maker()]


def decide(
    claim: Claim, *, seconds: float = 60.0, solver: str = "z3", say: Callable[[str], object] = lambda _: None
) -> Decision:
    """Decide one claim; `undecided` where the solver needs longer than `seconds`.

    `say` is told which of its formulas is being decided. ArgumentError: no input satisfies its assumptions, so that it
    would hold of nothing.
    """
    check_solver(solver)
    start = process_time()
    question = claim.build()
    if isinstance(question, Enumeration):
        counterexample = question.counterexample
        verdict: Verdict = "proved" if counterexample is None else "refuted"
        return Decision(claim, verdict, process_time() - start, "enumeration", question.cases, counterexample or {})
    answer, explanation = Answer("proved"), None
    queries = [question] if isinstance(question, Query) else question
    if not queries:
        raise ArgumentError(claim.subject, "something to decide", f"nothing, for {claim.text}")
    formulas = distinct_queries(queries)
    for number, query in enumerate(formulas, 1):
        say(f"{claim.subject}: {claim.name}, formula {number} of {len(formulas)}")
        remaining_seconds = seconds - (process_time() - start)
        answer = ask(query, seconds=remaining_seconds, solver=solver) if remaining_seconds > 0 else Answer("undecided")
        if answer.verdict == "refuted" and query.explain:
            explanation = query.explain(answer.model)
        if answer.verdict != "proved":
            break
    if answer.verdict == "proved" and contradict([assumption for query in queries for assumption in query.assume]):
        raise ArgumentError(claim.subject, "assumptions that some input satisfies", claim.text)
    return Decision(claim, answer.verdict, process_time() - start, version_of(solver), 0, answer.model, explanation)


def prove(claims: Iterable[Claim], *, seconds: float = 60.0, solver: str = "z3") -> Iterator[Decision]:
    """Decide claims one after the other."""
    for claim in claims:
        yield decide(claim, seconds=seconds, solver=solver)


def __getattr__(name: str) -> Any:
    """Look up a name that has moved."""
    return _moved.name_in(__name__, name)
