"""The scheduler: runs the lanes of a wave.

Each instruction is bound once to a *handler*, a function of the lanes that run it, with its operands resolved to rows.
A handler returns None when all its lanes go on to the next instruction, else a list of (instruction index, lanes) to go
on with; lanes that it leaves out have ended or are parked.

What an instruction needs beside lanes and memory is a *unit*; this module knows none of them by name, as it knows no
instruction: these enter themselves with `binder`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, TypeVar

import numpy as np

from ptxlab.emulator.core.cluster_memory import ClusterMemory
from ptxlab.emulator.core.lanes import Handler, Lanes, Reader, Successors, count_of, merge, split
from ptxlab.emulator.core.livelock import LivelockDetector
from ptxlab.emulator.core.watcher import Watcher
from ptxlab.emulator.core.wave import LaunchState, Wave
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import UnknownOpcode
from ptxlab.emulator.front.refusals import reason_for
from ptxlab.emulator.front.types import Array
from ptxlab.errors import Deadlock, EmulationError, SourceError, UnknownInstruction

# So many instructions are dispatched lowest-pc-first, which reconverges lanes; then as many in turn, so that lanes
# spinning on a flag cannot starve the one that will set it.
TURN = 2000
# What lanes wait for at an mbarrier lands after so many at the latest: lanes that spin on a flag may wait for these.
LANDING_INTERVAL = 250
# Steps that lanes are held back at most: who looks at what they store may get there long after them.
LONGEST_HOLD = 1 << 14
MOST_PLACES = 8  # that a message names
UNKNOWN = "the emulator does not know this instruction"

Binder = Callable[["Machine", Instruction, int], Handler]
BINDERS: dict[str, Binder] = {}
ANY_OTHER = ""  # the name that a binder of all other opcodes is entered with


def binder(*names: str) -> Callable[[Binder], Binder]:
    """Decorate a function (machine, instruction, index) -> handler that binds opcodes of these names.

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


class Unit:
    """A part of a machine beside its lanes, such as barriers or a queue of copies: see `Machine.unit`."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine

    def waiters(self) -> Iterator[Parked]:
        """Yield the lanes that are parked here."""
        yield from ()

    def recheck(self) -> None:
        """Release parked lanes that waited only for lanes that have now ended."""

    def advance(self, only_awaited: bool = False) -> bool:
        """Complete one pending effect (`only_awaited`: one that lanes wait for); False if there is none."""
        return False

    def answer_not_yet(self) -> bool:
        """Let polling waits return "not yet"; False if no lane waits or too many such answers changed nothing."""
        return False

    def state(self) -> object:
        """Return an object whose `repr` changes whenever anything happens in this unit."""
        return None

    def finish(self) -> None:
        """Finish the wave: all lanes have ended."""


AnyUnit = TypeVar("AnyUnit", bound=Unit)


class Machine(Wave):
    """A wave with the scheduler that runs its lanes."""

    def __init__(self, launch: LaunchState, blocks: Array) -> None:
        super().__init__(launch, blocks)
        self.watchers: tuple[Watcher, ...] = ()
        self.handlers: list[Handler] = []
        # who waits for the rest of its warp: place -> (instruction index, lanes, masks of those they wait for)
        self.meetings: dict[Any, list[tuple[int, Lanes, Array]]] = {}
        self.cluster_memory = ClusterMemory(self)
        self.units: dict[type[Unit], Unit] = {}
        self.next_landing = launch.steps + LANDING_INTERVAL
        # lanes that are yet to execute a strong store, and since when they may (mode "late")
        self.held_stores: list[tuple[int, Lanes]] = []
        self.held_until = 0
        self.was_held = np.zeros(self.lanes, bool)
        self.random = np.random.default_rng((launch.options.seed, 1))
        self.last_step = launch.steps + launch.options.max_steps
        living_lanes, _ = split(slice(0, self.lanes), self.alive)
        assert living_lanes is not None
        self.ready: dict[int, Lanes] = {0: living_lanes}
        self.livelock = LivelockDetector(self, self.ready, self.state, 4 * TURN)
        self.done_before = 0  # while binding: instructions before this one are done by an earlier one's handler

    def unit(self, kind: type[AnyUnit]) -> AnyUnit:
        """Return the machine's unit of a kind, made when an instruction or a check first asks for it."""
        if kind not in self.units:
            self.units[kind] = kind(self)
        unit = self.units[kind]
        assert isinstance(unit, kind)
        return unit

    def state(self) -> object:
        """Return an object whose `repr` changes whenever anything happens, registers, memory and places apart."""
        return self.living, [unit.state() for unit in self.units.values()]

    # Binding

    @cached_property
    def targets(self) -> frozenset[int]:
        """Indices of instructions that a branch may go to, or that a debugger may stop at."""
        return self.launch.entry.targets

    def bind(self, instruction: Instruction, pc: int) -> Handler:
        """Bind one instruction to its handler, wrapped in the checks that were asked for and in its guard."""
        head, *modifiers = instruction.opcode.split(".")
        try:
            bind = BINDERS.get(".".join((head, *modifiers[:1]))) or BINDERS.get(head) or BINDERS[ANY_OTHER]
            handler = bind(self, instruction, pc)
            # inside the guard: these see the lanes that execute it; `wrap_guarded` sees all that come there
            for watcher in self.watchers:
                handler = watcher.wrap_handler(instruction, handler)
            if instruction.guard is not None:
                handler = self.guard_handler(handler, self.reader(instruction.guard, "pred"), pc)
                for watcher in self.watchers:
                    handler = watcher.wrap_guarded(instruction, handler)
        except (UnknownOpcode, KeyError):  # KeyError: a type that there is not
            operation_name = instruction.text if head == "call" else instruction.opcode
            raise UnknownInstruction(f"{instruction.where}: {reason_for(operation_name) or UNKNOWN}") from None
        except IndexError:
            raise SourceError(instruction.path, instruction.line, "operands are missing", instruction.text) from None
        except ValueError as error:
            raise SourceError(instruction.path, instruction.line, str(error), instruction.text) from None
        return handler

    def guard_handler(self, handler: Handler, predicate: Reader, pc: int) -> Handler:
        """Wrap a handler so that the lanes whose predicate holds run it and the others go on."""

        def run(lanes: Lanes) -> Successors:
            executing_lanes, skipping_lanes = split(lanes, predicate(lanes))
            if executing_lanes is None:
                return None
            successors = handler(executing_lanes)
            return (
                successors if successors is None or skipping_lanes is None else [*successors, (pc + 1, skipping_lanes)]
            )

        return run

    def split_strong_store(self, handler: Handler, pc: int) -> Handler:
        """Wrap the handler of a strong store so that, in mode "late", some lanes execute it later.

        Other lanes then see a part of the warp's stores.
        """
        if self.launch.options.mode != "late":
            return handler

        def run(lanes: Lanes) -> Successors:
            storing_lanes, held_lanes = split(lanes, self.was_held[lanes] | (self.random.random(count_of(lanes)) < 0.5))
            self.was_held[lanes] = False
            if held_lanes is None:
                return handler(lanes)
            self.was_held[held_lanes] = True
            if not self.held_stores:
                self.held_until = self.launch.steps + int(self.random.integers(LONGEST_HOLD))
            self.held_stores.append((pc, held_lanes))
            if storing_lanes is None:
                return []
            handler(storing_lanes)
            return [(pc + 1, storing_lanes)]

        return run

    # Scheduling

    def release_held(self) -> bool:
        """Make the lanes ready whose strong stores were held back; False if there are none."""
        held_stores, self.held_stores = self.held_stores, []
        for pc, lanes in held_stores:
            self.make_ready(pc, lanes)
        return bool(held_stores)

    def make_ready(self, pc: int, lanes: Lanes) -> None:
        """Schedule lanes at an instruction, merged with the lanes that are ready there."""
        ready_lanes = self.ready.get(pc)
        self.ready[pc] = lanes if ready_lanes is None else merge(ready_lanes, lanes)

    def end(self, lanes: Lanes) -> None:
        """End lanes that leave the kernel, and recheck everything that waits for them."""
        self.alive[lanes] = False
        self.living -= count_of(lanes)
        for watcher in self.watchers:
            watcher.exit(lanes)
        open_meetings, self.meetings = self.meetings, {}  # who has ended is not waited for: maybe all have come now
        for meeting in open_meetings.values():
            for pc, meeting_lanes, _ in meeting:
                self.make_ready(pc, meeting_lanes)
        for unit in self.units.values():
            unit.recheck()

    def run(self) -> None:
        """Bind the code, then run all lanes and their pending effects to the end; raise what they run into."""
        self.handlers = [self.bind(instruction, pc) for pc, instruction in enumerate(self.code)]
        self.run_ready()
        # nobody can run: something lands, else held stores are done, and only then do waiters hear "not yet"
        while self.advance() or self.release_held() or self.answer_not_yet():
            self.run_ready()
        if self.living:
            self.deadlock()
        for unit in self.units.values():
            unit.finish()
        for watcher in self.watchers:
            watcher.end()

    def run_ready(self) -> None:
        """Run until all lanes have ended or are parked."""
        launch, handlers, ready = self.launch, self.handlers, self.ready
        end = len(handlers)
        last = -1
        while ready:
            if self.held_stores and launch.steps >= self.held_until:
                self.release_held()
            spins = launch.steps >= self.livelock.due and not self.held_stores and self.livelock.has_repeated(last)
            if spins and not self.answer_not_yet():
                self.deadlock()
            if launch.steps >= self.next_landing:
                self.next_landing = launch.steps + LANDING_INTERVAL
                self.advance(only_awaited=True)
            round_number = launch.steps // TURN
            pc = min((p for p in ready if p > last), default=min(ready)) if round_number & 1 else min(ready)
            lanes = ready.pop(pc)
            last, start, successors = pc, pc, None
            # straight on, without a way through `ready`, up to a branch or to where other lanes wait to be joined
            while successors is None:
                if pc == end:
                    self.end(lanes)
                    break
                successors = handlers[pc](lanes)
                pc += 1
                if successors is None and pc in ready:
                    successors = [(pc, lanes)]
            launch.steps += pc - start
            launch.lane_instructions += (pc - start) * count_of(lanes)
            for target, target_lanes in successors or ():
                self.make_ready(target, target_lanes)
            if launch.steps > self.last_step:
                running_text = "; ".join(self.name_running(ready or {last: lanes}))
                limit = launch.options.max_steps
                raise EmulationError(f"still running after {limit} steps: {running_text}; max_steps allows more")

    def advance(self, only_awaited: bool = False) -> bool:
        """Complete one pending effect of some unit; False if there is none."""
        return any(unit.advance(only_awaited) for unit in self.units.values())

    def answer_not_yet(self) -> bool:
        """Let a unit's polling waits return "not yet"; False if no unit has any, or if it changed nothing for long."""
        return any(unit.answer_not_yet() for unit in self.units.values())

    def name_running(self, ready: dict[int, Lanes]) -> list[str]:
        """Name the places of lanes that can run, at most `MOST_PLACES` of them."""
        last = len(self.code) - 1
        places = [self.place(self.code[min(pc, last)], lanes) for pc, lanes in sorted(ready.items())]
        remainder = [f"and {len(places) - MOST_PLACES} places more"] if len(places) > MOST_PLACES else []
        return places[:MOST_PLACES] + remainder

    def deadlock(self) -> NoReturn:
        """Raise Deadlock with the source line of all lanes that wait or spin."""
        waiting_groups = [
            Parked(pc, lanes, "the rest of its warp") for m in self.meetings.values() for pc, lanes, _ in m
        ]
        waiting_groups += [waiting_group for unit in self.units.values() for waiting_group in unit.waiters()]
        lines = [f"{place} spins" for place in self.name_running(self.ready)]
        lines += [f"{self.place(self.code[p.pc], p.lanes)} waits for {p.why}" for p in waiting_groups]
        problem = "threads spin on what no other will change" if self.ready else "no thread can run"
        raise Deadlock(f"deadlock: {problem}\n  " + "\n  ".join(lines))
