"""mbarrier: barriers in shared memory that count arrivals and bytes, phase by phase.

The state is kept here, by the object's place in the arena; memory holds a mark that shows whether something wrote over
it. A lane whose test_wait or try_wait fails is parked until the phase completes. If nothing else can run, it goes on
with "not yet", as hardware does after a while; a deadlock is reported once that has been in vain for long.
"""

from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np

from ptxlab.emulator.core.access import SCOPES, MemoryAccess
from ptxlab.emulator.core.addressing import locator
from ptxlab.emulator.core.effect_queue import EffectQueue
from ptxlab.emulator.core.lanes import Handler, Lanes, Successors, as_lanes, indices_of
from ptxlab.emulator.core.machine import Machine, Parked, Unit, binder
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import Array
from ptxlab.errors import EmulationError

Finish = Callable[[int, Lanes, bool], None]  # tells lanes that wait at a place whether the phase is complete

# So often in a row, when nothing else can run, whoever waits is told "not yet" before that counts as a deadlock.
PATIENCE = 50
LARGEST = (1 << 20) - 1  # arrivals, and bytes in flight
_MARK = np.uint64(0x6D62_6172_7269_6572)
_PENDING = 20  # bits of a state token below its phase


class MBarrier:
    """An mbarrier in shared memory: `count` arrivals and all bytes complete a phase."""

    def __init__(self, machine: Machine, place: int, count: int, instruction: Instruction) -> None:
        self.machine, self.place, self.instruction = machine, place, instruction
        self.count = self.missing = count
        self.bytes = 0  # expected and not yet copied; negative if the copy came first
        self.expected, self.expected_by = 0, instruction  # bytes in this phase, and the last to expect some
        self.phase = 0  # phases completed so far
        self.waiting: list[tuple[Parked, Finish]] = []  # for the current phase
        self.several = ""  # who has completed several phases with one instruction, which nobody can wait for

    def arrive(self, count: int, drop: bool = False) -> None:
        """Count arrivals of threads; with `drop` they will not be expected in later phases."""
        if not 1 <= count <= self.missing:
            raise ValueError(f"{count} arrivals, but {self} expects {self.missing} more in this phase")
        self.missing -= count
        self.count -= count if drop else 0
        self.complete_if_due()

    def expect(self, size: int) -> None:
        """Add bytes that are expected; a negative size counts bytes that have landed."""
        self.bytes += size
        self.expected += max(size, 0)
        if abs(self.bytes) > LARGEST:
            raise ValueError(f"{self} expects {self.bytes} bytes, beyond {LARGEST}")
        self.complete_if_due()

    def complete_if_due(self) -> None:
        """Complete the phase if no arrivals and bytes are missing, and release the lanes that wait for it."""
        self.machine.unit(MBarriers).vain_answers = 0
        if self.missing or self.bytes:
            return
        self.phase, self.missing, self.expected = self.phase + 1, self.count, 0
        for watcher in self.machine.watchers:
            watcher.phase_complete(self.place)
        self.release_waiters(True)

    def release_waiters(self, done: bool) -> None:
        """Release the waiting lanes with `done` as the result of their wait."""
        waiting, self.waiting = self.waiting, []
        for parked, finish in waiting:
            finish(self.place, parked.lanes, done)
            self.machine.make_ready(parked.pc + 1, parked.lanes)

    def __str__(self) -> str:
        return f"the mbarrier at {self.machine.memory.name_byte(self.place)}"

    def waiters(self) -> Iterator[Parked]:
        """Yield a `Parked` for each group of lanes that waits for the current phase, with the reason in words."""
        reason = f"phase {self.phase} of {self}: {self.missing} of {self.count} arrivals are missing"
        if self.bytes > 0:
            reason += f", and {self.bytes} bytes"
        elif self.bytes < 0:
            reason += f"; {-self.bytes} bytes came that nobody expected"
        reason += self.several
        for parked, _ in self.waiting:
            yield Parked(parked.pc, parked.lanes, reason)


class MBarriers(Unit):
    """The mbarriers of a wave."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.by_place: dict[int, MBarrier] = {}  # by arena offset
        self.vain_answers = 0  # how often in a row whoever waits has been told "not yet"
        machine.unit(EffectQueue).mbarriers = self.by_place

    def answer_not_yet(self) -> bool:
        """Let all polling waits return False ("not yet"), as hardware does after a time limit."""
        awaited_barriers = [barrier for barrier in self.by_place.values() if barrier.waiting]
        self.vain_answers += 1
        if not awaited_barriers or self.vain_answers > PATIENCE:
            return False
        for barrier in awaited_barriers:
            barrier.release_waiters(False)
        return True

    def waiters(self) -> Iterator[Parked]:
        """Return the lanes that are parked at all mbarriers."""
        return (parked for barrier in self.by_place.values() for parked in barrier.waiters())

    def state(self) -> object:
        """List the counts of each mbarrier: arrivals and bytes missing, phases completed, waiters."""
        return [(b.place, b.missing, b.bytes, b.phase, len(b.waiting)) for b in self.by_place.values()]


class MBarrierOperand:
    """Resolves an address operand to the mbarriers at it."""

    def __init__(self, machine: Machine, instruction: Instruction, space: str, address: ir.Operand, kind: str) -> None:
        order = "relaxed" if kind == "load" else "weak"
        self.machine, self.instruction, self.mbarriers = machine, instruction, machine.unit(MBarriers)
        self.access = MemoryAccess(instruction, kind, space, order, "b64", 1, ())
        self.locate = locator(machine, self.access, address)

    def fail(self, lane: int, problem: str) -> NoReturn:
        """Raise for a lane."""
        raise EmulationError(f"{self.machine.fault_place(self.instruction, lane)}: {problem}")

    def objects(self, lanes: Lanes, offsets: Array | None = None) -> Iterator[tuple[MBarrier, Array]]:
        """Yield the mbarriers that lanes point to, or that are at these offsets.

        Each comes with the positions of its lanes.
        """
        offsets = self.locate(lanes) if offsets is None else offsets
        for watcher in self.machine.watchers:
            watcher.load(self.access, lanes, offsets)
        order = np.argsort(offsets, kind="stable")
        places, first = np.unique(offsets[order], return_index=True)
        for place, positions in zip(places.tolist(), np.split(order, first[1:]), strict=True):
            barrier = self.mbarriers.by_place.get(place)
            if barrier is None:
                place_text = self.machine.memory.name_byte(place)
                self.fail(indices_of(lanes)[positions[0]], f"there is no initialised mbarrier at {place_text}")
            if self.machine.memory.view[8][place // 8] != _MARK:
                self.fail(indices_of(lanes)[positions[0]], f"something has written over {barrier}")
            yield barrier, positions


@binder("mbarrier")
def _mbarrier(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    opcode = Opcode(instruction.opcode)
    action = opcode.choice(*_ACTIONS)
    space = opcode.choice("shared", "shared::cta", "shared::cluster", default="generic")
    if not opcode.flag("b64"):
        raise UnknownOpcode(instruction.opcode)
    handler = _ACTIONS[action](machine, instruction, pc, opcode, space)
    if opcode.modifiers:
        raise UnknownOpcode(instruction.opcode)
    return handler


def _init(machine: Machine, instruction: Instruction, pc: int, opcode: Opcode, space: str) -> Handler:
    operand = MBarrierOperand(machine, instruction, space, instruction.operands[0], "store")
    read = machine.reader(instruction.operands[1], "u32")

    def init(lanes: Lanes) -> None:
        offsets = operand.locate(lanes)
        for watcher in machine.watchers:
            watcher.store(operand.access, lanes, offsets, np.full(len(offsets), _MARK))
            watcher.begin(instruction, lanes, offsets)
        counts = np.broadcast_to(read(lanes), offsets.shape)
        for lane, place, count in zip(indices_of(lanes).tolist(), offsets.tolist(), counts.tolist(), strict=True):
            if not 1 <= count <= LARGEST:
                operand.fail(lane, f"an mbarrier expects 1 to {LARGEST} arrivals, not {count}")
            if place in operand.mbarriers.by_place:
                line = operand.mbarriers.by_place[place].instruction.line
                operand.fail(
                    lane, f"the mbarrier at {machine.memory.name_byte(place)} is initialised already, by line {line}"
                )
            operand.mbarriers.by_place[place] = MBarrier(machine, place, count, instruction)
        machine.memory.view[8][offsets // 8] = _MARK

    return init


def _invalidate(machine: Machine, instruction: Instruction, pc: int, opcode: Opcode, space: str) -> Handler:
    operand = MBarrierOperand(machine, instruction, space, instruction.operands[0], "store")

    def invalidate(lanes: Lanes) -> None:
        offsets = operand.locate(lanes)
        for barrier, positions in operand.objects(lanes, offsets):
            if barrier.waiting:
                operand.fail(indices_of(lanes)[positions[0]], f"threads still wait at {barrier}")
            del operand.mbarriers.by_place[barrier.place]
        for watcher in machine.watchers:  # whoever uses it has to be done
            watcher.store(operand.access, lanes, offsets, np.zeros(len(offsets), np.uint64))

    return invalidate


def _transactions(machine: Machine, instruction: Instruction, pc: int, opcode: Opcode, space: str) -> Handler:
    """Bind expect_tx and complete_tx."""
    opcode.flag("relaxed")
    opcode.choice(*SCOPES, default="cta")
    operand = MBarrierOperand(machine, instruction, space, instruction.operands[0], "load")
    read = machine.reader(instruction.operands[1], "u32")
    sign = 1 if "expect_tx" in instruction.opcode else -1

    def transact(lanes: Lanes) -> None:
        sizes = np.broadcast_to(read(lanes), len(indices_of(lanes))).astype(np.int64)
        for barrier, positions in operand.objects(lanes):
            barrier.expected_by = instruction if sign > 0 else barrier.expected_by
            for i in positions:
                try:
                    barrier.expect(sign * int(sizes[i]))
                except ValueError as error:
                    operand.fail(indices_of(lanes)[i], str(error))

    return transact


def _arrive(machine: Machine, instruction: Instruction, pc: int, opcode: Opcode, space: str) -> Handler:
    """Bind arrive and arrive_drop, perhaps with expect_tx or noComplete."""
    drops_out = "arrive_drop" in instruction.opcode
    expects_bytes = opcode.flag("expect_tx")
    is_partial = opcode.flag("noComplete")
    opcode.choice("release", "relaxed", default="release")
    opcode.choice(*SCOPES, default="cta")
    state, address, *argument = instruction.operands
    operand = MBarrierOperand(machine, instruction, space, address, "load")
    write = machine.writer(state, "u64")
    read = machine.reader(argument[0] if argument else ir.Immediate(1), "u32")
    if (expects_bytes or is_partial) and not argument:
        raise ValueError("the count is missing")

    def change(barrier: MBarrier, argument: int) -> None:
        if is_partial and argument >= barrier.missing:
            raise ValueError(f"{instruction.opcode} would complete a phase of {barrier}")
        if expects_bytes:
            barrier.expected_by = instruction
            barrier.expect(argument)
        barrier.arrive(1 if expects_bytes else argument, drops_out)

    def arrive(lanes: Lanes) -> None:
        indices = indices_of(lanes)
        arguments = np.broadcast_to(read(lanes), indices.shape).tolist()
        tokens = np.zeros(len(indices), np.uint64)
        for barrier, positions in operand.objects(lanes):
            for watcher in machine.watchers:
                watcher.phase_arrive(instruction, barrier.place, as_lanes(indices[positions]))
            # One arrival each, all of the same phase.
            if not (drops_out or expects_bytes or is_partial or argument) and len(positions) <= barrier.missing:
                tokens[positions] = barrier.phase << _PENDING | barrier.missing - np.arange(len(positions))
                barrier.arrive(len(positions))
                continue
            first_phase = barrier.phase
            for i in positions.tolist():
                tokens[i] = barrier.phase << _PENDING | barrier.missing
                try:
                    change(barrier, arguments[i])
                except ValueError as error:
                    operand.fail(indices[i], str(error))
            if (phases := barrier.phase - first_phase) > 1:
                line = instruction.seen_from(barrier.instruction)
                arrivals = f"{len(positions)} threads that arrived at once, in {line},"
                barrier.several = f"; {arrivals} completed {phases} phases"
        write(lanes, tokens)

    return arrive


def _wait(machine: Machine, instruction: Instruction, pc: int, opcode: Opcode, space: str) -> Handler:
    """Bind test_wait and try_wait, by state or by parity; the hint how long to wait says nothing here."""
    parity = opcode.flag("parity")
    opcode.choice("acquire", "relaxed", default="acquire")
    opcode.choice(*SCOPES, default="cta")
    target, address, expected = instruction.operands[:3]
    effects = machine.unit(EffectQueue)
    operand = MBarrierOperand(machine, instruction, space, address, "load")
    write, read = machine.writer(target, "pred"), machine.reader(expected, "u32" if parity else "u64")

    def done(barrier: MBarrier, phases: Array) -> Array:
        if parity:  # the last phase of this parity is over while the other parity's is under way
            return np.asarray(phases & 1 != barrier.phase & 1)
        return np.asarray(phases >> np.uint64(_PENDING) < np.uint64(barrier.phase))

    def finish(place: int, lanes: Lanes, success: bool) -> None:
        if success:
            effects.observe(place)
        # all hear `phase_seen` first: a wait is judged by what its lanes knew before they acquire
        for watcher in machine.watchers if success else ():
            watcher.phase_seen(instruction, place, lanes)
        for watcher in machine.watchers if success else ():
            watcher.phase_wait(instruction, place, lanes)
        write(lanes, np.array([success]))

    def wait(lanes: Lanes) -> Successors:
        indices = indices_of(lanes)
        phases, success = np.broadcast_to(read(lanes), indices.shape), np.zeros(len(indices), bool)
        for barrier, positions in operand.objects(lanes):
            success[positions] = done(barrier, phases[positions])
            if len(done_positions := positions[success[positions]]):
                finish(barrier.place, as_lanes(indices[done_positions]), True)
            if len(waiting_positions := positions[~success[positions]]):
                barrier.waiting.append((Parked(pc, as_lanes(indices[waiting_positions]), ""), finish))
        if success.all():
            return None
        return [(pc + 1, as_lanes(indices[success]))] if success.any() else []

    return wait


def _pending_count(machine: Machine, instruction: Instruction, pc: int, opcode: Opcode, space: str) -> Handler:
    write, read = machine.writer(instruction.operands[0], "u32"), machine.reader(instruction.operands[1], "u64")
    return lambda lanes: write(lanes, (read(lanes) & np.uint64(LARGEST)).astype(np.uint32))


_ACTIONS: dict[str, Callable[[Machine, Instruction, int, Opcode, str], Handler]] = {
    "init": _init,
    "inval": _invalidate,
    "arrive": _arrive,
    "arrive_drop": _arrive,
    "expect_tx": _transactions,
    "complete_tx": _transactions,
    "test_wait": _wait,
    "try_wait": _wait,
    "pending_count": _pending_count,
}
