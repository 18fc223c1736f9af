"""Claims on a kernel's code: from a spec's `claims`, or from expressions given with a file."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import z3

from ptxlab import registry, toolchain
from ptxlab.emulator import LaneType
from ptxlab.emulator.front.lane_annotation import operation_of
from ptxlab.errors import ArgumentError, UnknownKernel
from ptxlab.prove.bitvectors import SORTS, split_fields
from ptxlab.prove.claims import Claim, Decision, decide
from ptxlab.prove.execute import LaneStep
from ptxlab.prove.expressions import Elements, formula, split_equation, term
from ptxlab.prove.integers import Integer
from ptxlab.prove.solve import Explanation, Query, Verdict, check_solver, symbols_of
from ptxlab.prove.symbolic_launch import SymbolicLaunch, launch_file, launch_spec
from ptxlab.runtime import Kernel, load
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec, Launch
from ptxlab.spec.claims import KernelClaim


def claims_of(spec: KernelSpec, sources: Sequence[Source]) -> Iterator[Claim]:
    """Yield the claims on each source of a kernel.

    They are those of its spec, its `@lanes` annotations, and that a `.cu`, as NVRTC compiles it, stores what the `.ptx`
    does.
    """
    if not spec.claims:
        return
    usable_sources = [s for s in sources if s.language == "ptx" or "nvrtc" not in toolchain.missing()]
    for source in usable_sources:
        # Its quick claim is that it stores what the .ptx does.
        has_ptx = source.language == "cu" and sources[0].language == "ptx"
        for claim in spec.claims:
            build, is_quick = partial(query, spec, source, claim), not (has_ptx or claim.alone)
            yield Claim(source.label, claim.name, claim.text, build, claim.expect, is_quick)
        if (launch := launch_spec(spec, source)).trace.steps:
            lanes_claim = KernelClaim(
                "@lanes", "no annotated lane carries, borrows or leaves its type", spec.value_rules
            )
            expect: Verdict = "refuted" if spec.wrong and spec.wrong.overflows else "proved"
            yield Claim(
                source.label,
                lanes_claim.name,
                lanes_claim.text,
                partial(lane_queries, launch, lanes_claim),
                expect,
                not has_ptx,
            )
        if has_ptx:
            equality_claim = KernelClaim("equals the .ptx", "out == other.out", equals=f"{spec.name}.ptx")
            text = f"every byte equals {spec.name}.ptx's, for all inputs"
            yield Claim(source.label, equality_claim.name, text, partial(query, spec, source, equality_claim))


def claims_on_spec(
    spec: KernelSpec,
    sources: Sequence[Source],
    claims: Sequence[str],
    assume: Sequence[str],
    equals: str = "",
    unchecked: bool = False,
) -> Iterator[Claim]:
    """Yield claims given with a kernel that has a spec, on each source that was named.

    Its rules on values are assumed, as a launch refuses what breaks them; with `unchecked` they are not.
    """
    assumptions = (*assume, *(() if unchecked else spec.value_rules))
    if equals and not claims:
        _check_same_outputs(
            spec.name, *([arg.name for arg in s.outputs] for s in (spec, other_kernel(spec, equals)[0]))
        )
    for source in sources:
        for number, text in enumerate(claims or [f"{arg.name} == other.{arg.name}" for arg in spec.outputs], 1):
            claim = KernelClaim(f"claim {number}", text, assumptions, equals=equals)
            yield Claim(source.label, claim.name, claim.text, partial(query, spec, source, claim))


def claims_on_file(
    kernel: Kernel,
    claims: Sequence[str],
    assume: Sequence[str],
    geometry: Launch,
    compared_kernel: Kernel | None = None,
    advance: Callable[[str], object] = lambda _: None,
) -> Iterator[Claim]:
    """Yield claims on a kernel without a spec.

    Without `claims`, they are that it stores what `compared_kernel` does, or its `@lanes` annotations. `advance` is
    told the line of each instruction that is followed.
    """
    label, launch = kernel.source.label, launch_file(kernel, geometry=geometry, assume=assume, advance=advance)
    if not claims and compared_kernel is None:
        if not launch.trace.steps:
            raise ArgumentError(label, "--claim, --equals, or an instruction with // @lanes", "none")
        text = ", ".join([*assume, "@lanes"])
        yield Claim(label, "@lanes", text, partial(lane_queries, launch, KernelClaim("@lanes", "", tuple(assume))))
        return
    compared_launch = compared_kernel and launch_file(
        compared_kernel, geometry=geometry, assume=assume, parameters=kernel.parameters, advance=advance
    )
    if compared_launch and not claims:
        _check_same_outputs(label, launch.outputs, compared_launch.outputs)
    for number, text in enumerate(claims or [f"{name}.u8[i] == other.{name}.u8[i]" for name in launch.outputs], 1):
        claim_launch = launch.for_claim(text)
        combined_launch = (
            combine_launches(claim_launch, compared_launch.for_claim(text)) if compared_launch else claim_launch
        )
        claim = KernelClaim(f"claim {number}", text, tuple(assume))
        yield Claim(label, claim.name, claim.text, partial(queries, combined_launch, claim))


def _check_same_outputs(label: str, outputs: Iterable[str], expected: Iterable[str]) -> None:
    """Check that two kernels store to the same arguments.

    Stores of only one of them would not be compared.
    """
    if {*outputs} != {*expected}:
        raise ArgumentError(label, f"stores to {', '.join(expected)}, as --equals does", ", ".join(outputs))


def query(spec: KernelSpec, source: Source, claim: KernelClaim) -> list[Query]:
    """Build the formulas of one claim on one source."""
    launch = launch_spec(spec, source, alone=claim.alone)
    if not claim.equals:
        return queries(launch, claim)
    other_spec, other_source, entry = other_kernel(spec, claim.equals)
    return queries(
        combine_launches(launch, launch_spec(other_spec, other_source, alone=claim.alone, entry=entry)), claim
    )


def other_kernel(spec: KernelSpec, equals: str) -> tuple[KernelSpec, Source, str]:
    """Find the kernel that `equals` names: its spec, source and entry.

    `FILE[:entry]` takes what the spec's kernel does.
    """
    try:
        other_spec, (source, *_) = registry.find(equals)
        return other_spec, source, other_spec.name
    except UnknownKernel:
        if Path(equals.partition(":")[0]).suffix not in (".ptx", ".cu"):
            raise
    _, source, entry = registry.resolve(equals)
    return spec, source, load(source, entry).entry


def combine_launches(launch: SymbolicLaunch, other_launch: SymbolicLaunch) -> SymbolicLaunch:
    """Combine a launch with another on the same inputs, whose outputs become `other.NAME`.

    Both have to store the same elements.
    """
    outputs = {name: other_launch.names[name] for name in other_launch.outputs}
    run = replace(launch.trace, faults=[*launch.trace.faults, *other_launch.trace.faults])
    names, expected = {**launch.names, "other": outputs}, (*launch.expected, *other_launch.stored)
    return replace(launch, names=names, expected=expected, trace=run)


def queries(launch: SymbolicLaunch, claim: KernelClaim) -> list[Query]:
    """Build the formulas of a claim on what a launch stored: nothing goes wrong, and each stored word is right.

    There is one formula per word, because a solver is quick with a few lanes and slow with more.
    """
    limits: list[Any] = []
    unknowns = {name: _unknown_integers(name, low, high, limits) for name, (low, high) in claim.unknowns.items()}
    claim_names, assumption_names = {**launch.names, **unknowns}, {**launch.inputs, **unknowns}
    words: dict[int, list[int]] = {}
    for i in launch.stored:
        words.setdefault(i * launch.bits // 32, []).append(i)
    word_queries = [_word_query(launch, claim_names, assumption_names, claim, elements) for elements in words.values()]
    assumptions = [assumption for word_query in word_queries for assumption in word_query.assume]
    faults = [
        Query(z3.Not(guard), [*limits, *assumptions], {}, partial(_explain_fault, reason))
        for guard, reason in launch.trace.faults
    ]
    return [*faults, *(replace(word_query, assume=[*limits, *word_query.assume]) for word_query in word_queries)]


def lane_queries(launch: SymbolicLaunch, claim: KernelClaim) -> list[Query]:
    """Build a formula for each annotated instruction of each thread: its lanes, computed wide, equal what it stores."""
    if launch.trace.missed:
        missed_place = launch.trace.missed[0].where
        raise ArgumentError(
            launch.label, "threads that come to every instruction with // @lanes", f"none at {missed_place}"
        )
    conditions = [formula(text, launch.inputs, i, launch.count) for i in launch.stored for text in claim.assume]
    assume = list({condition.get_id(): condition for condition in conditions}.values())
    return [_step_query(launch, step, assume) for step in launch.trace.steps]


def _step_query(launch: SymbolicLaunch, step: LaneStep, assume: list[Any]) -> Query:
    types, operation = step.instruction.lanes or {}, operation_of(step.instruction.opcode)
    conditions: list[Any] = []
    shown_values: Seen = {}
    if operation is not None and operation.compute is not None:
        target, text = types["d"], re.sub(r"\|(.*)\|", r"abs(\1)", re.sub(r"[{}]", "", operation.format))
        lanes = {letter: _lanes_of(step.sources[letter], types[letter]) for letter in operation.letters}
        for lane, stored_lane in enumerate(_lanes_of(step.output, target)):
            sources = {letter: integers[lane % len(integers)] for letter, integers in lanes.items()}
            exact_value = Integer.of(term(text, sources, lane))
            fits_lane = z3.BoolVal(True) if ".sat" in step.instruction.opcode else _fits_lane(exact_value, target)
            equals_modulo = (
                z3.BoolVal(True)
                if operation.simd
                else exact_value.modulo(target.bits) == stored_lane.modulo(target.bits)
            )
            conditions.append(z3.And(fits_lane, equals_modulo))
            shown_values |= {
                f"{n}[{lane}]": (str(types[n]).split("x")[0], x.bits) for n, x in (*sources.items(), ("d", stored_lane))
            }
            shown_values[f"exact[{lane}]"] = str(target).split("x")[0], exact_value.bits
        conditions += [_fits_lane(integers[0], types[n]) for n, integers in lanes.items() if not types[n].count]
    question = z3.Implies(step.guard, z3.And(conditions))

    def explain(model: Mapping[str, int]) -> Explanation:
        instruction = step.instruction
        lines = [f"{Path(instruction.path).name}:{instruction.line}: `{instruction.text}`"]
        for lane in range(types["d"].count):
            keys = [key for n in ("a", "b", "c", "d", "exact") if (key := f"{n}[{lane}]") in shown_values]
            cells = [f"{key.partition('[')[0]} = {_cell(shown_values[key], model[key])}" for key in keys]
            lines.append(f"lane {lane}: {', '.join(cells)}")
        return Explanation(lines, launch.arrays(model), f"{launch.command} --check lanes")

    symbols = symbols_of([question])
    assumptions = [a for a in assume if symbols_of([a]).keys() <= symbols.keys()]  # the rest speaks of other threads
    return Query(question, assumptions, {**{key: bits for key, (_, bits) in shown_values.items()}, **symbols}, explain)


def _lanes_of(bits: Any, lane_type: LaneType) -> list[Integer]:
    parts = split_fields(bits, lane_type.bits) if lane_type.count else [bits]
    return [Integer.from_signed(part) if lane_type.signed else Integer.from_unsigned(part) for part in parts]


def _fits_lane(x: Integer, lane_type: LaneType) -> Any:
    low, high = lane_type.limits
    return z3.And(x >= low, x <= high)


def _explain_fault(reason: str, model: Mapping[str, int]) -> Explanation:
    return Explanation([reason], {}, "")


def _word_query(
    launch: SymbolicLaunch,
    claim_names: Mapping[str, Any],
    assumption_names: Mapping[str, Any],
    claim: KernelClaim,
    elements: list[int],
) -> Query:
    assume, conditions, rows = dict[int, Any](), [], dict[int, Seen]()
    equation = split_equation(claim.holds)
    for i in elements:
        rows[i] = {}
        recording_names = _record_reads(claim_names, rows[i])
        for text in claim.assume:
            condition = formula(text, _record_reads(assumption_names, rows[i]), i, launch.count)
            assume[condition.get_id()] = condition
        conditions.append(z3.And(launch.stored_condition(i), formula(claim.holds, recording_names, i, launch.count)))
        if equation and (
            claimed := _claimed_bits(*(term(side, recording_names, i, launch.count) for side in equation))
        ):
            rows[i]["claimed"] = claimed
        rows[i]["wrong"] = "", z3.Not(conditions[-1])
    values = {_key(i, name): bits for i, row in rows.items() for name, (_, bits) in row.items()}
    values |= symbols_of([*conditions, *assume.values()])
    return Query(z3.And(conditions), list(assume.values()), values, partial(_explain, launch, rows))


Seen = dict[str, tuple[str, Any]]  # `name[index]` -> type, bits


def _key(i: int, name: str) -> str:
    return name if "[" in name else f"{name}[{i}]"


def _record_reads(names: Mapping[str, Any], seen: Seen) -> dict[str, Any]:
    """Return the names, with arrays wrapped to record in `seen` each element that is read."""
    recording = {}
    for name, x in names.items():
        if isinstance(x, Elements):
            x = replace(x, seen=seen)
        elif isinstance(x, Mapping):
            x = {key: replace(view, name=f"{name}.{view.name}") for key, view in _record_reads(x, seen).items()}
        recording[name] = x
    return recording


def _claimed_bits(left: Any, right: Any) -> tuple[str, Any] | None:
    """Return the type of an equation's left side, and its right side as bits; None if a side is no integer."""
    if not isinstance(left, Integer | int) or not isinstance(right, Integer | int):
        return None
    is_signed_claim, bits = Integer.of(left).low < 0, Integer.of(left).bits.size()
    return f"s{bits}" if is_signed_claim else f"u{bits - 1}", Integer.of(right).bits


def _unknown_integers(name: str, low: int, high: int, limits: list[Any]) -> Elements:
    """Make an array of unknown integers in [low, high], created on first use; appends their bounds to `limits`."""
    elements: dict[int, Integer] = {}

    def element(index: int, bits: int) -> Any:
        if index not in elements:
            elements[index], element_limits = Integer.within(f"{name}[{index}]", low, high)
            limits.extend(element_limits)
        return elements[index].extend_to(bits)

    bits = max(Integer.of(n).bits.size() for n in (low, high))
    return Elements(name, element, f"s{bits}")


def _explain(launch: SymbolicLaunch, rows: Mapping[int, Seen], model: Mapping[str, int]) -> Explanation:
    """Explain a counterexample of a word: for each of its lanes the values that the claim names.

    Values that all lanes share come first.
    """

    def cells(i: int, is_shown: Callable[[str], bool]) -> str:
        return ", ".join(f"{n} = {_cell(x, model[_key(i, n)])}" for n, x in rows[i].items() if x[0] and is_shown(n))

    shared_names = {name for name in set[str].intersection(*map(set, rows.values())) if "[" in name and len(rows) > 1}
    lines = [f"all    {cells(min(rows), shared_names.__contains__)}"] if shared_names else []
    for i in rows:
        verdict = "wrong" if model[_key(i, "wrong")] else "right"
        lines.append(f"{verdict}  i = {i}: {cells(i, lambda name: name not in shared_names)}")
    return Explanation(lines, launch.arrays(model), launch.command)


def _cell(seen: tuple[str, Any], bits: int) -> str:
    return format_number(seen[0], bits, seen[1].size())


def format_number(kind: str, bits: int, size: int) -> str:
    """Format a number of a type, given by `size` bits, as `-3 (1101)`.

    An integer that the type does not hold has more digits.
    """
    if kind in SORTS:
        raw = np.array([bits << 16], np.uint32) if kind == "bf16" else np.array([bits], f"u{size // 8}")
        return f"{raw.view(f'f{raw.itemsize}')[0]} ({bits:0{size}b})"
    digits, signed = int(kind[1:]), kind[0] == "s"
    integer = bits - (1 << size if (signed or size > digits) and bits >> size - 1 else 0)
    digits = max(digits, (integer if integer >= 0 else ~integer).bit_length() + (signed or integer < 0))
    return f"{integer} ({integer & (1 << digits) - 1:0{digits}b})"


def prove_kernel(
    kernel: Kernel | str,
    claim: str,
    *,
    assume: str | Sequence[str] = (),
    equals: Kernel | str | None = None,
    seconds: float = 60.0,
    solver: str = "z3",
    unchecked: bool = False,
) -> Decision:
    """Decide a claim on a kernel: a project kernel's name, or one of a file or a notebook's cell, for one thread.

    `other.out` in the claim is the output of `equals`, a kernel given the same way, on the same inputs. The rules of a
    project kernel on its values are assumed, unless `unchecked`.
    """
    check_solver(solver)
    assume = [assume] if isinstance(assume, str) else assume
    if isinstance(kernel, Kernel) and not isinstance(equals, str):
        claims = claims_on_file(kernel, [claim], assume, Launch((1, 1, 1), (1, 1, 1)), equals)
    elif isinstance(kernel, str) and not isinstance(equals, Kernel):
        spec, sources = registry.find(kernel)
        claims = claims_on_spec(spec, sources[:1], [claim], assume, equals or "", unchecked)
    else:
        raise ArgumentError("equals", "a name beside a name, a Kernel beside a Kernel", type(equals).__name__)
    return decide(next(claims), seconds=seconds, solver=solver)
