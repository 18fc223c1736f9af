"""Find unneeded fences and waits: leave out each in turn and run the kernel again with its checks on.

A statement is needed if some run without it has a finding, an error, or another result than the same run with it. The
checks "race" and "async" follow what orders accesses, not what happens to come first, so that most needed statements
are found by the first run. "No run needed it" is evidence, no proof: it holds for these inputs and this launch, for
paths that were taken, and for what the checks model. They do not model the order that `fence.sc` (and `membar`) gives
to strong accesses of different addresses; nor do they ask for a proxy fence between a thread's read and a copy over it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ptxlab.emulator.front.ir import Entry, Immediate, Instruction, Operands, called_from
from ptxlab.errors import EmulationError

SEEDS = 20

# Opcodes by their beginnings: what can be left out alone, what cannot (or is modelled too coarsely to tell).
_TRIED = (
    "fence.proxy.async", "fence.mbarrier_init", "fence.acq_rel", "fence.acquire", "fence.release", "fence.sc", "membar",
    "bar.sync", "barrier.sync", "barrier.cta.sync", "bar.cta.sync", "bar.warp.sync", "cp.async.wait", "wgmma.fence",
    "cp.async.bulk.wait_group", "wgmma.wait_group", "mbarrier.try_wait", "mbarrier.test_wait",
)  # fmt: skip
_NOT_TRIED = ("fence", "bar.", "barrier.", "griddepcontrol.wait")


@dataclass(frozen=True)
class Statement:
    """A fence or wait of the source: all instructions of one opcode that come from one line, by the same calls."""

    path: str
    line: int
    callers: tuple[tuple[str, int], ...]
    opcode: str

    @classmethod
    def of(cls, instruction: Instruction) -> "Statement":
        """Return the statement that an instruction belongs to."""
        return cls(instruction.path, instruction.line, instruction.callers, instruction.opcode)

    @property
    def is_tried(self) -> bool:
        """True if it can be left out; a barrier of a cluster cannot, say, as its halves count each other."""
        return self.opcode.startswith(_TRIED)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}{called_from(self.path, self.callers)}: `{self.opcode}`"


@dataclass(frozen=True)
class Need:
    """Consequence of leaving a statement out: `why` it is needed, or "" if no run needed it.

    `stands_in` is set where no run needs the statement, but some run needs it or one of those listed before it.
    """

    statement: Statement
    why: str
    stands_in: bool = False


@dataclass(frozen=True)
class Ran:
    """Outcome of a run: its findings, and all bytes of its outputs."""

    findings: tuple[str, ...]
    outputs: bytes


Attempt = Callable[[str, int, frozenset[Statement]], Ran]  # (mode, seed, what is left out)


def statements_of(entry: Entry) -> list[Statement]:
    """List every fence and wait of a kernel, in the order of its code."""
    fences_and_waits = (i for i in entry.instructions if i.opcode.startswith((*_TRIED, *_NOT_TRIED)))
    return list(dict.fromkeys(map(Statement.of, fences_and_waits)))


def leave_out(entry: Entry, statements: Iterable[Statement]) -> Entry:
    """Return the kernel without these statements; the wait for an mbarrier is told that the phase is complete."""
    left_out_statements = frozenset(statements)

    def replace_if_left_out(instruction: Instruction) -> Instruction:
        if Statement.of(instruction) not in left_out_statements:
            return instruction
        if not instruction.opcode.startswith("mbarrier"):
            return replace(instruction, opcode="nanosleep.u32", operands=(Immediate(0),), guard=None)
        always_operands: Operands = (instruction.operands[0], Immediate(0), Immediate(0))
        return replace(instruction, opcode="setp.eq.u32", operands=always_operands)

    return replace(entry, instructions=[replace_if_left_out(instruction) for instruction in entry.instructions])


def needs_of(statements: Iterable[Statement], attempt: Attempt, seeds: int = SEEDS) -> Iterator[Need]:
    """Yield for each statement that can be left out why it is needed, if it is.

    The runs are early, late and `seeds` more late ones, until one needs the statement. `attempt` runs the kernel; it
    raises `EmulationError` as `run` does. Raises EmulationError where the kernel itself has findings: these are to be
    fixed first.
    """
    schedules = [("early", 0), *(("late", seed) for seed in range(seeds + 1))]
    usual_runs: dict[tuple[str, int], Ran] = {}

    def find_problem(without: frozenset[Statement]) -> str:
        for mode, seed in schedules:
            if (mode, seed) not in usual_runs:
                usual_runs[mode, seed] = attempt(mode, seed, frozenset())
                if findings := usual_runs[mode, seed].findings:
                    raise EmulationError(f"there is a finding with all fences and waits in place: {findings[0]}")
            schedule_name = f"{mode}, seed {seed}" if seed else mode
            try:
                run = attempt(mode, seed, without)
            except EmulationError as error:
                return f"{schedule_name}: {str(error).splitlines()[0]}"
            if run.findings:
                return f"{schedule_name}: {run.findings[0]}"
            if run.outputs != usual_runs[mode, seed].outputs:
                return f"{schedule_name}: another result"
        return ""

    left_out: frozenset[Statement] = frozenset()
    for statement in statements:
        if not statement.is_tried:
            continue
        problem = find_problem(frozenset({statement}))
        stands_in = not problem and bool(left_out) and bool(find_problem(left_out | {statement}))
        if not problem and not stands_in:
            left_out |= {statement}
        yield Need(statement, problem, stands_in)
