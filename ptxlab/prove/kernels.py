"""Claims on a kernel's code: from a spec's `claims`, or from expressions given with a file."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import z3

from ptxlab import kernels, toolchain
from ptxlab.prove.claims import Claim, Query
from ptxlab.prove.expressions import View, formula, sides, term
from ptxlab.prove.integers import Integer
from ptxlab.prove.problem import Problem, of_spec
from ptxlab.prove.solve import Explanation
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec
from ptxlab.spec.claims import KernelClaim


def claims_of(spec: KernelSpec, sources: tuple[Source, ...]) -> Iterator[Claim]:
    """The claims on each source of a kernel; and that a `.cu`, as NVRTC compiles it, stores what the `.ptx` does."""
    usable = [s for s in sources if s.language == "ptx" or "nvrtc" not in toolchain.missing()]
    for source in usable:
        for claim in spec.claims:
            build = partial(query, spec, source, claim)
            yield Claim(source.label, claim.name, claim.text, build, claim.expect)
    if spec.claims and len(usable) == 2:
        same = KernelClaim("equal to the .ptx", "out == other.out", equals=spec.name)
        build = partial(query, spec, usable[1], same)
        yield Claim(usable[1].label, same.name, f"every byte equals {usable[0].label}'s, for all inputs", build)


def query(spec: KernelSpec, source: Source, claim: KernelClaim) -> list[Query]:
    """The formulas of one claim on one source."""
    problem = of_spec(spec, source)
    names = dict(problem.inputs) | {name: view for name, (view, _) in problem.outputs.items()}
    if claim.equals:
        other_spec, (other, *_) = kernels.find(claim.equals)
        names["other"] = {name: view for name, (view, _) in of_spec(other_spec, other).outputs.items()}
    return queries(problem, names, claim)


def queries(problem: Problem, names: Mapping[str, Any], claim: KernelClaim) -> list[Query]:
    """The formulas of a claim on what a launch stored: nothing goes wrong; and each word that it stores is right.

    One formula per word, for a solver is quick with a few lanes, and with more of them it is not.
    """
    limits: list[Any] = []
    unknowns = {name: _unknown(name, low, high, limits) for name, (low, high) in claim.unknowns.items()}
    names = {**names, **unknowns}
    words: dict[int, list[int]] = {}
    for i in problem.stored:
        words.setdefault(i * problem.bits // 32, []).append(i)
    found = [_of_word(problem, names, claim, elements) for elements in words.values()]
    whole = [assumption for one in found for assumption in one.assume]
    faults = [
        Query(z3.Not(guard), [*limits, *whole], {}, lambda _, why=why: Explanation([why], {}, ""))
        for guard, why in problem.trace.faults
    ]
    return [*faults, *(replace(one, assume=[*limits, *one.assume]) for one in found)]


def _of_word(problem: Problem, names: Mapping[str, Any], claim: KernelClaim, elements: list[int]) -> Query:
    assume, holds, rows = dict[int, Any](), [], dict[int, Seen]()
    right = sides(claim.holds)
    for i in elements:
        rows[i] = {}
        here = _watched(names, rows[i])
        for text in claim.assume:
            found = formula(text, here, i, problem.count)
            assume[found.get_id()] = found
        holds.append(z3.And(problem.written(i), formula(claim.holds, here, i, problem.count)))
        if right and (promised := _shown(term(right[1], here, i, problem.count))):
            rows[i]["claimed"] = promised
        rows[i]["wrong"] = "", z3.Not(holds[-1])
    values = {_key(i, name): bits for i, row in rows.items() for name, (_, bits) in row.items()}
    return Query(z3.And(holds), list(assume.values()), values, partial(_explain, problem, rows))


Seen = dict[str, tuple[str, Any]]  # `name[index]` -> type, bits


def _key(i: int, name: str) -> str:
    return name if "[" in name else f"{name}[{i}]"


def _watched(names: Mapping[str, Any], seen: Seen) -> dict[str, Any]:
    """The names, with what is asked of arrays entered into `seen`."""
    found = {}
    for name, x in names.items():
        if isinstance(x, View):
            x = replace(x, seen=seen)
        elif isinstance(x, Mapping):
            x = {key: replace(view, name=f"{name}.{view.name}") for key, view in _watched(x, seen).items()}
        found[name] = x
    return found


def _shown(x: Any) -> tuple[str, Any] | None:
    """Type and bits of one side of an equation."""
    if isinstance(x, Integer | int):
        bits = Integer.of(x).bits
        return f"s{bits.size()}", bits
    return None


def _unknown(name: str, low: int, high: int, limits: list[Any]) -> View:
    """An array of integers that nobody gave: each element is made when it is first spoken of."""
    made: dict[int, Integer] = {}

    def element(index: int, bits: int) -> Any:
        if index not in made:
            made[index], more = Integer.within(f"{name}[{index}]", low, high)
            limits.extend(more)
        return made[index].at(bits)

    bits = max(Integer.of(n).bits.size() for n in (low, high))
    return View(name, element, f"s{bits}")


def _explain(problem: Problem, rows: Mapping[int, Seen], model: Mapping[str, int]) -> Explanation:
    """The lanes of a word that has a wrong one: each with all that its claim speaks of."""
    lines = []
    for i, row in rows.items():
        cells = [f"{name} = {number(kind, model[_key(i, name)])}" for name, (kind, _) in row.items() if kind]
        lines.append(f"{'wrong' if model[_key(i, 'wrong')] else 'right'}  i = {i}: {', '.join(cells)}")
    return Explanation(lines, problem.arrays(model), problem.command)


def number(kind: str, bits: int) -> str:
    """`-3 (1101)`: what bits of a type say."""
    width = int(kind[1:])
    said: Any = bits - (1 << width if kind[0] == "s" and bits >> width - 1 else 0)
    if kind[0] == "f":
        said = np.array([bits], f"u{width // 8}").view(f"f{width // 8}")[0]
    return f"{said} ({bits:0{width}b})"
