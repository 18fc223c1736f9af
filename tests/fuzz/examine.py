"""One program: run by the emulator in its modes and by a GPU, compared, and what differs reduced."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxlab import emulator
from ptxlab.errors import CompileError, LaunchError, PtxlabError, SourceError, UnknownInstruction
from ptxlab.spec import Launch
from tests.fuzz import gpu
from tests.fuzz.categories import generate
from tests.fuzz.compare import compare
from tests.fuzz.domains import Values
from tests.fuzz.program import Program
from tests.fuzz.reduce import reduce_to_instruction

MAX_STEPS = 400_000
LATE_SEEDS = (1, 2)


@dataclass(frozen=True)
class Mismatch:
    """A result for which no entry accounts; `level0` is what the driver's optimisation level 0 makes of it."""

    form: str
    threads: int
    example: str
    level0: str  # "right", "same", "other", or "unknown" where the GPU has stopped


@dataclass
class Evidence:
    """A program with a mismatch, as it is written down; the reduced one has inputs of its own.

    Of a program that stops the GPU there are no outputs, and no reduction.
    """

    program: str
    inputs: Values
    emulator: Values
    gpu: Values = field(default_factory=lambda: np.zeros(0, np.uint64))
    reduced: str = ""
    reduced_inputs: Values = field(default_factory=lambda: np.zeros(0, np.uint64))


@dataclass
class Outcome:
    """The outcome of one program.

    Attributes:
        values: results compared between emulator and GPU, or between modes without a GPU.
        nans: of these, NaNs whose bits differ.
        failures: pairs of a kind and a text: "refused", "error" or "crash" of the emulator, "modes" that differ,
            a "finding" of the checks, "ptxas" that refuses the program.
        stops_gpu: whether the GPU takes no more work of this process.
    """

    category: str
    number: int
    values: int = 0
    nans: int = 0
    avoided: dict[str, int] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    evidence: Evidence | None = None
    stops_gpu: bool = False


def build(seed: int, number: int, category: str = "") -> Program:
    """Make a program from the seed and its number alone; of a category, or of any."""
    return generate(np.random.default_rng((seed, number)), category)


def examine(seed: int, number: int, category: str = "", on_gpu: bool = False) -> Outcome:
    """Run a program and compare."""
    program = build(seed, number, category)
    outcome = Outcome(program.category, number, avoided=dict(program.avoided))
    text = program.render()
    right = _emulate(program, text, outcome)
    if right is None:
        return outcome
    _compare_modes(program, text, right, outcome)
    if on_gpu:
        _compare_with_gpu(program, text, right, outcome)
    return outcome


def emulate(program: Program, text: str, **options: Any) -> tuple[Values, tuple[Any, ...]]:
    """Run the text in the emulator; return the slots, and the findings."""
    inputs, slots = program.arguments
    args, module = [inputs, slots, *program.extras()], emulator.parse(text, "k.ptx")

    def run(name: str, **options: Any) -> tuple[Any, ...]:
        return emulator.run(module, name, args, grid=program.blocks, block=program.threads, cluster=program.cluster,
                            max_steps=MAX_STEPS, **options).findings  # fmt: skip

    if program.kernels == 1:
        return slots, run("k", **options)
    with emulator.chain(options.pop("checks", ()), given=args, **options) as chain:
        for i, name in enumerate(program.names):
            run(name, programmatic=i > 0)
    return slots, tuple(chain.findings)


def run_on_gpu(program: Program, text: str, level: int = gpu.LEVEL) -> Values:
    """Run the text on the GPU; return the slots."""
    inputs, slots = program.arguments
    geometry = Launch((program.blocks, 1, 1), (program.threads, 1, 1), cluster=(program.cluster, 1, 1))
    with gpu.kernels(text, program.names, level) as kernels:
        gpu.run(kernels, [inputs, slots, *program.extras()], geometry)
    return slots


def _emulate(program: Program, text: str, outcome: Outcome, **options: Any) -> Values | None:
    """Run the text in the emulator and return the slots; None if it cannot, which the outcome then says."""
    try:
        slots, findings = emulate(program, text, **options)
    except (UnknownInstruction, SourceError) as error:
        outcome.failures.append(("refused", str(error)))
    except PtxlabError as error:
        outcome.failures.append(("error", str(error)))
    except Exception as error:  # whatever it is, it is a fault of the emulator
        outcome.failures.append(("crash", f"{type(error).__name__}: {error}"))
    else:
        outcome.failures += [("finding", str(finding)) for finding in findings[:1]]
        return slots
    return None


def _compare_modes(program: Program, text: str, right: Values, outcome: Outcome) -> None:
    """Run the program in mode late too, and a tenth with all checks; no result may change, no check find anything."""
    late = program.is_asynchronous or program.chance(0.1)
    ways: list[dict[str, Any]] = [{"mode": "late", "seed": seed} for seed in LATE_SEEDS] if late else []
    ways += [{"begin": "late"}] if program.kernels > 1 else []
    if program.chance(0.1):
        ways.append({"checks": "all"})
    for options in ways:
        slots = _emulate(program, text, outcome, **options)
        if slots is None:
            continue
        differing = compare(program, right, slots).differences
        outcome.values += len(program.slots) * program.total
        if differing:
            first = program.slots[differing[0].slot]
            outcome.failures.append(("modes", f"{first.form} differs with {options}"))


def _compare_with_gpu(program: Program, text: str, right: Values, outcome: Outcome) -> None:
    """Run the program on the GPU at both levels; list and reduce what differs.

    A program that the GPU cannot run is a mismatch.
    """
    inputs = program.arguments[0]
    try:
        slots = run_on_gpu(program, text)
        outcome.values = len(program.slots) * program.total
        comparison = compare(program, right, slots, models=True)
        outcome.nans = comparison.nans
        if not comparison.differences:
            return
        level0 = run_on_gpu(program, text, level=0)
        rows = [values.reshape(-1, program.total) for values in (right, slots, level0)]
        for difference in comparison.differences:
            slot, at = program.slots[difference.slot], difference.threads
            r, g, z = (row[difference.slot][at] for row in rows)
            verdict = "right" if (z == r).all() else "same" if (z == g).all() else "other"
            example = f"thread {at[0]}: emulator {r[0]:#x}, GPU {g[0]:#x}, level 0 {z[0]:#x}"
            outcome.mismatches.append(Mismatch(slot.form, len(at), example, verdict))
        outcome.evidence = Evidence(text, inputs, right, slots)
        outcome.evidence.reduced = reduce_to_instruction(
            program, comparison.differences[0].slot, lambda p, t: emulate(p, t)[0], lambda p, t: run_on_gpu(p, t)
        )
        outcome.evidence.reduced_inputs = program.arguments[0]
    except CompileError as error:
        outcome.failures.append(("ptxas", f"{error.log or error}"))
    except LaunchError as error:
        outcome.stops_gpu = True
        outcome.mismatches.append(Mismatch(f"{program.category} stopped", program.total, str(error), "unknown"))
        outcome.evidence = outcome.evidence or Evidence(text, inputs, right)
