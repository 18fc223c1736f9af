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
from ptxlab.emulator.alu import UnknownOpcode
from ptxlab.emulator.ir import Instruction
from ptxlab.emulator.operation import bind_operation
from ptxlab.emulator.peers import Peers
from ptxlab.emulator.pending import Pending
from ptxlab.emulator.standstill import Standstill
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
# Steps that lanes are held back at most: who looks at what they store may get there long after them.
LONGEST_HOLD = 1 << 14
MOST_PLACES = 8  # that a message names

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
        # lanes that are yet to execute a strong store, and since when they may (mode "late")
        self.held: list[tuple[int, Lanes]] = []
        self.held_until = 0
        self.was_held = np.zeros(self.lanes, bool)
        self.random = np.random.default_rng((launch.seed, 1))
        self.standstill = Standstill(self, 4 * TURN)
        self.last_step = launch.steps + launch.max_steps
        everybody, _ = split(slice(0, self.lanes), self.alive)
        assert everybody is not None
        self.ready: dict[int, Lanes] = {0: everybody}
        self.done_before = 0  # while binding: instructions before this one are part of an earlier one's step

    # Binding

    @cached_property
    def targets(self) -> frozenset[int]:
        """Instructions that somebody may branch to."""
        return frozenset(label.index for instruction in self.code for label in ir.labels(instruction.operands))

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

    def in_parts(self, step: Step, pc: int) -> Step:
        """The step of strong stores: in mode "late" some lanes execute it later, so that others see a part of them."""
        if self.launch.mode != "late":
            return step

        def run(lanes: Lanes) -> Outcome:
            now, later = split(lanes, self.was_held[lanes] | (self.random.random(count_of(lanes)) < 0.5))
            self.was_held[lanes] = False
            if later is None:
                return step(lanes)
            self.was_held[later] = True
            if not self.held:
                self.held_until = self.launch.steps + int(self.random.integers(LONGEST_HOLD))
            self.held.append((pc, later))
            if now is None:
                return []
            step(now)
            return [(pc + 1, now)]

        return run

    # Scheduling

    def let_go(self) -> bool:
        """Let lanes go on that were held back; False if there are none."""
        held, self.held = self.held, []
        for pc, lanes in held:
            self.put(pc, lanes)
        return bool(held)

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
        while self.pending.advance() or self.let_go() or self.answer_in_vain():
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
            if self.held and launch.steps >= self.held_until:
                self.let_go()
            if (
                launch.steps >= self.standstill.due
                and not self.held
                and self.standstill.look(last)
                and not self.answer_in_vain()
            ):
                self.deadlock()
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
            if launch.steps > self.last_step:
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
        """Raise: the wave has taken too many steps."""
        where = "; ".join(self.running(ready))
        raise EmulationError(f"still running after {self.launch.max_steps} steps: {where}; max_steps allows more")

    def running(self, ready: dict[int, Lanes]) -> list[str]:
        """The places of lanes that can run, or some of them."""
        places = [self.place(self.code[min(pc, len(self.code) - 1)], those) for pc, those in sorted(ready.items())]
        more = [f"and {len(places) - MOST_PLACES} places more"] if len(places) > MOST_PLACES else []
        return places[:MOST_PLACES] + more

    def deadlock(self) -> NoReturn:
        """Raise: everybody waits, or spins on what nobody will change; with every waiter's line."""
        waiting = [Parked(pc, lanes, "the rest of its warp") for m in self.meetings.values() for pc, lanes, _ in m]
        waiting += [parked for barrier in self.barriers.values() for parked in barrier.waiting]
        waiting += [parked for barrier in self.cluster_barriers.values() for parked in barrier.waiting]
        waiting += [parked for barrier in self.mbarriers.values() for parked in barrier.waiters()]
        lines = [f"{place} spins" for place in self.running(self.ready)]
        lines += [f"{self.place(self.code[p.pc], p.lanes)} waits for {p.why}" for p in waiting]
        problem = "threads spin on what no other will change" if self.ready else "no thread can run"
        raise Deadlock(f"deadlock: {problem}\n  " + "\n  ".join(lines))

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
