"""The scheduler: runs the lanes of a wave.

Each instruction is bound once to a *step*, a function of the lanes that run it, with its operands resolved to rows. A
step returns None when all its lanes go on to the next instruction, else a list of (instruction index, lanes) to go on
with; lanes that it leaves out have ended or are parked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ptxlab.emulator import ir
from ptxlab.emulator.alu import UnknownOpcode, form
from ptxlab.emulator.ir import Instruction
from ptxlab.emulator.kinds import check_operands, require_kinds
from ptxlab.emulator.peers import Peers
from ptxlab.emulator.pending import Pending
from ptxlab.emulator.types import Array, Lanes, count_of, indices_of, merge, split
from ptxlab.emulator.wave import Launch, Reader, Wave
from ptxlab.errors import Deadlock, EmulationError, SourceError, UnknownInstruction

if TYPE_CHECKING:
    from ptxlab.emulator.check import Watcher
    from ptxlab.emulator.clusters import ClusterBarrier
    from ptxlab.emulator.maxnreg import RegisterBudget
    from ptxlab.emulator.mbarrier import MBarrier
    from ptxlab.emulator.sync import Barrier

Outcome = list[tuple[int, Lanes]] | None
Step = Callable[[Lanes], Outcome]

# So many instructions are dispatched lowest-pc-first, which reconverges lanes; then as many in turn, so that lanes
# spinning on a flag cannot starve the one that will set it.
TURN = 2000
# What lanes wait for at an mbarrier lands after so many at the latest: lanes that spin on a flag may wait for these.
SOON = 250
# So often in a row, when nothing else can run, whoever waits at an mbarrier is told "not yet" before that counts as
# a deadlock.
PATIENCE = 50

Binder = Callable[["Machine", Instruction, int], Step]
BINDERS: dict[str, Binder] = {}


def binder(*names: str) -> Callable[[Binder], Binder]:
    """Enter a function (machine, instruction, its index) -> step for opcodes that begin with these names.

    A name is the first word of an opcode, or the first two where these are to be told apart.
    """

    def enter(function: Binder) -> Binder:
        BINDERS.update(dict.fromkeys(names, function))
        return function

    return enter


@dataclass
class Parked:
    """Lanes that wait at an instruction; `why` says for what."""

    pc: int
    lanes: Lanes
    why: str


class Machine(Wave):
    """A wave that runs: `bind`, then `run`."""

    def __init__(self, launch: Launch, blocks: Array) -> None:
        super().__init__(launch, blocks)
        self.watchers: tuple[Watcher, ...] = ()
        self.steps: list[Step] = []
        self.alive = self.thread < launch.threads
        self.living = int(np.count_nonzero(self.alive))
        # who waits for the rest of its warp: place -> (instruction index, lanes, masks of those they wait for)
        self.meetings: dict[Any, list[tuple[int, Lanes, Array]]] = {}
        self.peers = Peers(self)
        self.barriers: dict[tuple[int, int], Barrier] = {}  # (block, number) -> a barrier with somebody at it
        self.cluster_barriers: dict[int, ClusterBarrier] = {}  # by cluster of the wave
        self.mbarriers: dict[int, MBarrier] = {}  # by arena offset
        self.pending = Pending(self)
        self.budget: RegisterBudget | None = None  # of a kernel that has setmaxnreg
        self.soon = launch.steps + SOON
        self.vain = 0
        everybody, _ = split(slice(0, self.lanes), self.alive)
        assert everybody is not None
        self.ready: dict[int, Lanes] = {0: everybody}
        self.done_before = 0  # while binding: instructions before this one are part of an earlier one's step

    # Binding

    @cached_property
    def targets(self) -> frozenset[int]:
        """Instructions that somebody may branch to."""
        operands = [o for i in self.code for operand in i.operands for o in getattr(operand, "items", (operand,))]
        return frozenset(o.index for o in operands if isinstance(o, ir.Label))

    def bind(self) -> None:
        """Resolve every instruction to its step, and the checks that were asked for around it."""
        self.steps = [self.bound(instruction, pc) for pc, instruction in enumerate(self.code)]

    def bound(self, instruction: Instruction, pc: int) -> Step:
        """The step of one instruction, behind its guard."""
        head, *more = instruction.opcode.split(".")
        try:
            step = (BINDERS.get(".".join((head, *more[:1]))) or BINDERS.get(head) or bind_operation)(
                self, instruction, pc
            )
            for watcher in self.watchers:
                step = watcher.around(instruction, step)
            if instruction.guard is not None:
                step = self.guarded(step, self.reader(instruction.guard, "pred"), pc)
                for watcher in self.watchers:
                    step = watcher.around_guard(instruction, step)
        except (UnknownOpcode, KeyError):  # KeyError: a type that there is not
            raise UnknownInstruction(f"{instruction.where}: the emulator does not know this instruction") from None
        except IndexError:
            raise SourceError(instruction.path, instruction.line, "operands are missing", instruction.text) from None
        except ValueError as error:
            raise SourceError(instruction.path, instruction.line, str(error), instruction.text) from None
        return step

    def guarded(self, step: Step, predicate: Reader, pc: int) -> Step:
        """The step for those lanes whose predicate holds; the others go on."""

        def run(lanes: Lanes) -> Outcome:
            chosen, others = split(lanes, predicate(lanes))
            if chosen is None:
                return None
            outcome = step(chosen)
            return outcome if outcome is None or others is None else [*outcome, (pc + 1, others)]

        return run

    # Scheduling

    def put(self, pc: int, lanes: Lanes) -> None:
        """Let lanes go on at an instruction, together with those that are there already."""
        known = self.ready.get(pc)
        self.ready[pc] = lanes if known is None else merge(known, lanes)

    def end(self, lanes: Lanes) -> None:
        """Lanes that leave the kernel; who waits for them looks again."""
        self.alive[lanes] = False
        self.living -= count_of(lanes)
        for watcher in self.watchers:
            watcher.exit(lanes)
        parked, self.meetings = self.meetings, {}
        for waiting in parked.values():
            for pc, those, _ in waiting:
                self.put(pc, those)
        for barrier in list(self.barriers.values()):
            barrier.look_again(self)
        for of_cluster in self.cluster_barriers.values():
            of_cluster.look_again()

    def run(self) -> None:
        """Run all lanes, and what they have asked for, to their end; raises what they run into."""
        self.run_ready()
        while self.pending.advance() or self.answer_in_vain():
            self.run_ready()
        if self.living:
            self.deadlock()
        if self.budget is not None:
            self.budget.check_groups()
        for watcher in self.watchers:
            watcher.end()

    def run_ready(self) -> None:
        """Run until all lanes have ended or are parked."""
        launch, steps, ready = self.launch, self.steps, self.ready
        end = len(steps)
        last = -1
        while ready:
            if launch.steps >= self.soon:
                self.soon = launch.steps + SOON
                self.pending.advance(only_awaited=True)
            turn = launch.steps // TURN
            pc = min((p for p in ready if p > last), default=min(ready)) if turn & 1 else min(ready)
            lanes = ready.pop(pc)
            last, start, outcome = pc, pc, None
            while outcome is None:
                if pc == end:
                    self.end(lanes)
                    break
                outcome = steps[pc](lanes)
                pc += 1
                if outcome is None and pc in ready:
                    outcome = [(pc, lanes)]
            launch.steps += pc - start
            launch.lane_instructions += (pc - start) * count_of(lanes)
            for target, those in outcome or ():
                self.put(target, those)
            if launch.max_steps is not None and launch.steps > launch.max_steps:
                self.exhausted(ready or {last: lanes})

    def answer_in_vain(self) -> bool:
        """Tell whoever waits at an mbarrier "not yet"; False if nobody does, or if that has been in vain for long."""
        waited_at = [barrier for barrier in self.mbarriers.values() if barrier.waiting]
        self.vain += 1
        if not waited_at or self.vain > PATIENCE:
            return False
        for barrier in waited_at:
            barrier.answer(False)
        return True

    def exhausted(self, ready: dict[int, Lanes]) -> NoReturn:
        """Raise: the kernel has taken too many steps."""
        where = "; ".join(
            self.place(self.code[min(pc, len(self.code) - 1)], lanes) for pc, lanes in sorted(ready.items())
        )
        raise EmulationError(f"still running after {self.launch.max_steps} steps: {where}")

    def deadlock(self) -> NoReturn:
        """Raise: everybody waits; with every waiter's line."""
        waiting = [Parked(pc, lanes, "the rest of its warp") for m in self.meetings.values() for pc, lanes, _ in m]
        waiting += [parked for barrier in self.barriers.values() for parked in barrier.waiting]
        waiting += [parked for barrier in self.cluster_barriers.values() for parked in barrier.waiting]
        waiting += [parked for barrier in self.mbarriers.values() for parked in barrier.waiters()]
        lines = [f"{self.place(self.code[p.pc], p.lanes)} waits for {p.why}" for p in waiting]
        raise Deadlock("deadlock: no thread can run\n  " + "\n  ".join(lines))

    # Places

    def place_of(self, lane: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """(block index, thread index) of a lane."""
        x, y, _ = self.launch.block
        block, thread = divmod(int(lane), self.stride)
        bx, by, bz = (int(i) for i in self.blocks[block])
        return (bx, by, bz), (thread % x, thread // x % y, thread // (x * y))

    def place(self, instruction: Instruction, lanes: Lanes) -> str:
        """`path:line: `text`: block (0,0,0) thread (3,0,0) and 31 more`."""
        more = count_of(lanes) - 1
        return f"{self.fault_place(instruction, int(indices_of(lanes)[0]))}" + (f" and {more} more" if more else "")

    def fault_place(self, instruction: Instruction, lane: int) -> str:
        """`path:line: `text`: block (0,0,0) thread (3,0,0)`."""
        block, thread = ("({},{},{})".format(*index) for index in self.place_of(lane))
        return f"{instruction.where}: block {block} thread {thread}"


def bind_operation(machine: Machine, instruction: Instruction, pc: int) -> Step:
    """Step of a register-to-register operation of the `alu` table."""
    check_operands(instruction)
    selectors = tuple(getattr(operand, "selector", "") for operand in instruction.operands)
    known = form(instruction.opcode, selectors if any(selectors) else ())
    operands = list(instruction.operands)
    explicit = [t for t in known.out if t != "cc"]
    if operands and isinstance(operands[0], ir.Vector) and operands[0].pair:
        operands[:1] = operands[0].items
    elif explicit[1:] == ["pred"]:
        operands.insert(1, ir.Sink())
    sources = [t for t in known.sources if t != "cc"]
    if len(operands) != len(explicit) + len(sources):
        raise ValueError(f"{instruction.opcode} takes {len(explicit) + len(sources)} operands, not {len(operands)}")
    require_kinds(operands, (*explicit, *sources))
    if explicit != ["pred", "pred"] and isinstance(instruction.operands[0], ir.Sink):
        raise ValueError("the result cannot be discarded")
    relaxed = instruction.opcode.startswith("cvt.") and ".bf16" not in instruction.opcode
    writers = [machine.writer(o, t, relaxed) for o, t in zip(operands, explicit, strict=False)]
    readers = [machine.reader(o, t, relaxed) for o, t in zip(operands[len(explicit) :], sources, strict=True)]
    if "cc" in known.sources:
        readers.append(machine.carry.__getitem__)
    if "cc" in known.out:
        writers.append(machine.carry.__setitem__)
    compute = known.compute
    if len(writers) == 1:
        write = writers[0]
        if len(readers) == 1:
            (read,) = readers
            return lambda lanes: write(lanes, compute(read(lanes)))
        if len(readers) == 2:
            first, second = readers
            return lambda lanes: write(lanes, compute(first(lanes), second(lanes)))
        return lambda lanes: write(lanes, compute(*[read(lanes) for read in readers]))

    def several(lanes: Lanes) -> None:
        for write, values in zip(writers, compute(*[read(lanes) for read in readers]), strict=True):
            write(lanes, values)

    return several
