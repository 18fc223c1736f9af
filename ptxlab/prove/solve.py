"""One question to a solver: does a formula hold for all inputs that the assumptions admit?

z3 is asked through its API, bitwuzla and cvc5 through the SMT-LIB text that z3 writes.
"""

import _thread
import importlib.util
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from threading import Event, Thread
from typing import Any, Literal

from ptxlab.errors import ArgumentError, OutOfTime, UnavailableError
from ptxlab.validate import is_one_of

Verdict = Literal["proved", "refuted", "undecided"]
SOLVERS = ("z3", "bitwuzla", "cvc5")
INSTALL = "python -m pip install 'ptxlab[prove]'"
_INTERRUPT_INTERVAL = 0.05  # seconds between two interrupts of what is out of time


@dataclass(frozen=True)
class Query:
    """A formula to refute: is there an input that satisfies all of `assume`, and not `holds`?

    Attributes:
        holds: the formula (z3 Bool) that is to be true for every admitted input.
        assume: formulas (z3 Bool) that every input satisfies.
        values: what a counterexample shows: name -> z3 bitvector, float or Bool over the inputs.
        explain: a counterexample -> what it looks like, and the arrays that show it in a run.
    """

    holds: Any
    assume: Sequence[Any] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    explain: Callable[[Mapping[str, int]], "Explanation"] | None = None


@dataclass(frozen=True)
class Explanation:
    """A counterexample for people, line by line, and for a machine: arguments by name, which `ptxlab run` takes."""

    lines: Sequence[str]
    arrays: Mapping[str, Any]
    command: str


@dataclass(frozen=True)
class Enumeration:
    """A claim over finitely many cases that were all tried: how many, and the first case where it fails, if one does.

    `counterexample` are integers by name.
    """

    cases: int
    counterexample: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Answer:
    """A solver's verdict; `model` has the bits of every value of a refuted query, as unsigned integers."""

    verdict: Verdict
    model: Mapping[str, int] = field(default_factory=dict)


def check_solver(solver: str) -> str:
    """Return the name of an installed solver.

    Raises ArgumentError for an unknown one, UnavailableError for one to install.
    """
    if not is_one_of(solver, SOLVERS):
        raise ArgumentError("solver", f"one of {', '.join(SOLVERS)}", solver)
    for module in ("z3", solver):  # formulas are z3's, whoever solves them
        if importlib.util.find_spec(module) is None:
            raise UnavailableError(f"{module}: not installed; {INSTALL if module == 'z3' else f'pip install {module}'}")
    return solver


def version_of(solver: str) -> str:
    """Return the name and version of an installed solver, for records: `z3 5.4.1`."""
    return f"{solver} {version('z3-solver' if solver == 'z3' else solver)}"


@contextmanager
def time_limit(seconds: float | None, unfinished: str) -> Iterator[None]:
    """Interrupt the code inside after `seconds` (None: never); works in the main thread only.

    Raises OutOfTime with `unfinished`, which says what was not done. It ends as Ctrl-C would, also within z3, and also
    in a job in the background, which ignores SIGINT.
    """
    if seconds is None:
        yield
        return
    done_event, expiry_event = Event(), Event()

    def expire() -> None:
        if done_event.wait(seconds):
            return
        expiry_event.set()
        # A destructor may have swallowed the last one, or z3 not have begun.
        while not done_event.wait(_INTERRUPT_INTERVAL):
            _thread.interrupt_main(signal.SIGUSR2)
            if "z3" in sys.modules:
                sys.modules["z3"].main_ctx().interrupt()

    timer = Thread(target=expire, daemon=True)
    previous_handler = signal.signal(signal.SIGUSR2, signal.default_int_handler)
    try:
        try:
            timer.start()
            yield
        finally:
            done_event.set()
            timer.join()  # from here on no interrupt can come that is the timer's
    except KeyboardInterrupt:
        if not expiry_event.is_set():
            raise
        raise OutOfTime(unfinished) from None
    finally:
        signal.signal(signal.SIGUSR2, previous_handler)


def check(solver: Any, *assumptions: Any, seconds: float) -> Any:
    """Ask a z3 solver, for at most `seconds`, whether its formulas and the assumptions can hold; return its verdict.

    Raises KeyboardInterrupt after a Ctrl-C, which z3 takes for itself, and which it answers as if time were over.
    """
    solver.set("timeout", max(1, int(seconds * 1000)))
    verdict = solver.check(*assumptions)
    if str(verdict) == "unknown" and solver.reason_unknown() == "interrupted from keyboard":
        raise KeyboardInterrupt
    return verdict


def ask(query: Query, *, seconds: float = 60.0, solver: str = "z3") -> Answer:
    """Ask a solver; `undecided` where it needs longer than `seconds`."""
    import z3

    check_solver(solver)
    z3_solver = z3.Solver()
    z3_solver.add(*query.assume, z3.Not(query.holds))
    names = {f"value!{i}": name for i, name in enumerate(query.values)}
    constants = []
    for label, term in zip(names, query.values.values(), strict=True):
        bits = _bits(z3, term)
        constants.append(z3.BitVec(label, bits.size()))
        z3_solver.add(constants[-1] == bits)
    if solver != "z3":
        text_verdict, text_model = _BY_TEXT[solver](
            z3_solver.to_smt2().replace("(check-sat)\n", ""), [c.sexpr() for c in constants], seconds
        )
        return Answer(text_verdict, {name: text_model[label] for label, name in names.items()} if text_model else {})
    verdict = check(z3_solver, seconds=seconds)
    if verdict == z3.unsat:
        return Answer("proved")
    if verdict == z3.unknown:
        return Answer("undecided")
    model = z3_solver.model()
    model_bits = (model.eval(c, model_completion=True).as_long() for c in constants)
    return Answer("refuted", dict(zip(names.values(), model_bits, strict=True)))


def distinct_queries(queries: Sequence[Query]) -> list[Query]:
    """Keep one of several queries that differ only in the names of their unknowns.

    Most threads, words and registers go through the same formulas.
    """
    import z3

    query_by_form: dict[tuple[str, ...], Query] = {}
    for query in queries:
        formula = z3.And(query.holds, *query.assume)
        renamed_symbols = [(x, z3.Const(f"x{n}", x.sort())) for n, x in enumerate(symbols_of([formula]).values())]
        sorts = (str(x.sort()) for x, _ in renamed_symbols)
        query_by_form.setdefault((z3.substitute(formula, *renamed_symbols).sexpr(), *sorts), query)
    return list(query_by_form.values())


def symbols_of(formulas: Iterable[Any]) -> dict[str, Any]:
    """Return the unknowns of formulas, by name."""
    import z3

    symbols, seen_ids, pending_terms = {}, set[int](), list(formulas)
    while pending_terms:
        term = pending_terms.pop()
        if term.get_id() in seen_ids:
            continue
        seen_ids.add(term.get_id())
        pending_terms += term.children()
        if z3.is_const(term) and term.decl().kind() == z3.Z3_OP_UNINTERPRETED:
            symbols[str(term)] = term
    return symbols


def contradict(assumptions: Sequence[Any]) -> bool:
    """Check whether no input satisfies all assumptions."""
    import z3

    return bool(check(z3.Solver(), *assumptions, seconds=10) == z3.unsat)


def _bits(z3: Any, term: Any) -> Any:
    if z3.is_bool(term):
        return z3.If(term, z3.BitVecVal(1, 1), z3.BitVecVal(0, 1))
    return z3.fpToIEEEBV(term) if z3.is_fp(term) else term


def _bitwuzla(text: str, constants: list[str], seconds: float) -> tuple[Verdict, dict[str, int]]:
    import bitwuzla

    term_manager, options = bitwuzla.TermManager(), bitwuzla.Options()
    options.set(bitwuzla.Option.PRODUCE_MODELS, True)
    options.set(bitwuzla.Option.TIME_LIMIT_PER, max(1, int(seconds * 1000)))
    parser = bitwuzla.Parser(term_manager, options)
    parser.parse(text, True, False)
    solver = parser.bitwuzla()
    verdict = solver.check_sat()
    if verdict != bitwuzla.Result.SAT:
        return "proved" if verdict == bitwuzla.Result.UNSAT else "undecided", {}
    return "refuted", {c: int(solver.get_value(parser.parse_term(c)).value(2), 2) for c in constants}


def _cvc5(text: str, constants: list[str], seconds: float) -> tuple[Verdict, dict[str, int]]:
    import cvc5

    solver = cvc5.Solver()
    solver.setOption("produce-models", "true")
    solver.setOption("tlimit-per", str(max(1, int(seconds * 1000))))
    parser = cvc5.InputParser(solver)
    values = f"(get-value ({' '.join(constants)}))\n" if constants else ""
    parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, f"(set-logic ALL)\n{text}(check-sat)\n{values}", "query")
    replies = []
    while not (command := parser.nextCommand()).isNull():
        replies.append(command.invoke(solver, parser.getSymbolManager()).strip())
        if replies[-1] in ("unsat", "unknown"):
            return "proved" if replies[-1] == "unsat" else "undecided", {}
    assignments = re.findall(r"\((value!\d+) #([bx])([0-9a-f]+)\)", replies[-1] if constants else "")
    return "refuted", {name: int(digits, 2 if base == "b" else 16) for name, base, digits in assignments}


_BY_TEXT = {"bitwuzla": _bitwuzla, "cvc5": _cvc5}
