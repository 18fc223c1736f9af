"""Waiting for each other: barriers of a block, and the meeting of a warp's lanes before `.sync` instructions.

Both park lanes with what they wait for, and put them back among the ready ones when it has come.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from ptxlab.emulator.core.access import SCOPES
from ptxlab.emulator.core.lanes import Handler, Lanes, Successors, as_lanes, count_of, indices_of, merge, split
from ptxlab.emulator.core.machine import Machine, Parked, Unit, binder
from ptxlab.emulator.core.warp import meet
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction, Operand
from ptxlab.emulator.front.opcode import UnknownOpcode
from ptxlab.emulator.front.types import Array
from ptxlab.errors import EmulationError

# What a fence between the ways to memory makes visible to the copy engine
PROXY_FENCES = {
    "proxy.alias": (),
    "proxy.tensormap::generic.acquire": (),  # a kernel here cannot change its tensor maps
    "proxy.tensormap::generic.release": (),
    "proxy.async": ("shared", "global"),
    "proxy.async.global": ("global",),
    "proxy.async.shared::cta": ("shared",),
    "proxy.async.shared::cluster": ("shared",),
    "proxy.async::generic.acquire.sync_restrict::shared::cluster": (),  # what the engine wrote, for threads
    "proxy.async::generic.release.sync_restrict::shared::cta": ("shared",),
}
# Fences of memory. Those that say `.sync_restrict` count like the others, though they order less.
_MEMORY_FENCES = ("sc", "acq_rel", "acquire", "release", "acquire.sync_restrict::shared::cluster",
                  "release.sync_restrict::shared::cta")  # fmt: skip

BARRIERS = 16  # of a block


@dataclass(eq=False)
class Barrier:
    """An open barrier of a block; `expected` arrivals complete it, None stands for all threads."""

    block: int
    number: int
    expected: int | None
    first: Instruction  # that anybody executed
    present: Array  # bool per lane of the block
    waiting: list[Parked] = field(default_factory=list)
    finish: Callable[[Lanes], None] | None = None  # writes the results of bar.red


class BlockBarriers(Unit):
    """The open barriers of all blocks: those at which some thread has arrived."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.by_key: dict[tuple[int, int], Barrier] = {}  # by block of the wave, and number

    def complete_if_due(self, barrier: Barrier) -> None:
        """Release the barrier if all expected threads have arrived; ended lanes of an arrived warp count too."""
        machine = self.machine
        is_alive = machine.alive.reshape(-1, machine.stride)[barrier.block]
        missing = is_alive & ~barrier.present
        if barrier.expected is not None:
            warps_here = np.repeat(barrier.present.reshape(-1, 32).any(axis=1), 32)
            missing = np.count_nonzero(barrier.present | (~is_alive & warps_here)) < barrier.expected
        if np.any(missing):
            return
        del self.by_key[barrier.block, barrier.number]
        released_lanes = reduce(merge, [parked.lanes for parked in barrier.waiting]) if barrier.waiting else None
        for watcher in machine.watchers:
            watcher.depart((barrier.block, barrier.number), released_lanes)
        if barrier.finish is not None and released_lanes is not None:
            barrier.finish(released_lanes)
        for parked in barrier.waiting:
            machine.make_ready(parked.pc + 1, parked.lanes)

    def has_room(self, block: int, number: int, expected: int | None, arriving: int) -> bool:
        """Tell whether `arriving` more threads fit in the barrier's current generation."""
        barrier = self.by_key.get((block, number))
        present_count = int(np.count_nonzero(barrier.present)) if barrier else 0
        return expected is None or present_count + arriving <= expected

    def recheck(self) -> None:
        """Complete barriers that waited only for threads that have now ended."""
        for barrier in list(self.by_key.values()):
            self.complete_if_due(barrier)

    def waiters(self) -> Iterator[Parked]:
        """Return the lanes that are parked at all barriers."""
        return (parked for barrier in self.by_key.values() for parked in barrier.waiting)

    def state(self) -> object:
        """List the barriers, each with the threads that have come."""
        return [(*key, barrier.present.tobytes()) for key, barrier in self.by_key.items()]


def check_barrier(numbers: Array, expected: Array | None) -> None:
    """Raise ValueError for barrier numbers out of range and for thread counts that are not whole warps."""
    if (numbers >= BARRIERS).any():
        raise ValueError(f"a block has barriers 0 to {BARRIERS - 1} (got {numbers.max()})")
    if expected is not None and (is_wrong := (expected % 32 != 0) | (expected == 0)).any():
        raise ValueError(f"the number of threads has to be a multiple of 32 (got {expected[is_wrong][0]})")


def warps_of(indices: Array) -> list[Array]:
    """Split lanes by warp."""
    return np.split(indices, np.flatnonzero(np.diff(indices // 32)) + 1)


@binder("bar", "barrier")
def _barrier(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    modifiers = [m for m in instruction.opcode.split(".")[1:] if m not in ("cta", "aligned")]
    operands = list(instruction.operands)
    if modifiers == ["warp", "sync"]:
        return _warp_barrier(machine, instruction, pc)
    finish = None
    if modifiers[:1] == ["red"] and len(modifiers) == 3:
        finish = _reduction(machine, modifiers[1], operands.pop(0), operands.pop())
    elif modifiers not in (["sync"], ["arrive"]):
        raise UnknownOpcode(instruction.opcode)
    waits = modifiers != ["arrive"]
    if len(operands) > 2 or (len(operands) == 1 and not waits):
        conjunction = "and, maybe," if waits else "and"
        raise ValueError(f"{instruction.opcode} takes a barrier {conjunction} a number of threads")
    read_number = machine.reader(operands[0], "u32")
    read_expected = machine.reader(operands[1], "u32") if len(operands) > 1 else None
    barriers, watchers, stride = machine.unit(BlockBarriers), machine.watchers, machine.stride
    is_constant = all(isinstance(operand, ir.Immediate) for operand in operands)
    if is_constant:
        check_barrier(read_number(slice(0, 1)), read_expected and read_expected(slice(0, 1)))

    def barrier(lanes: Lanes) -> Successors:
        indices = indices_of(lanes)
        numbers = np.broadcast_to(read_number(lanes), indices.shape)
        expected = np.broadcast_to(read_expected(lanes), indices.shape) if read_expected else None
        if not is_constant:
            try:
                check_barrier(numbers, expected)
            except ValueError as error:
                raise EmulationError(f"{machine.place(instruction, lanes)}: {error}") from None
        simple = finish is None and waits and expected is None and not barriers.by_key and not watchers
        if simple and count_of(lanes) == machine.living and (numbers == numbers[0]).all():
            return None
        keys = indices // stride * BARRIERS + numbers
        for key in np.unique(keys):
            is_at_key = keys == key
            block, number = divmod(int(key), BARRIERS)
            for threads in [None] if expected is None else np.unique(expected[is_at_key]).tolist():
                arriving_lanes = indices[is_at_key if threads is None else is_at_key & (expected == threads)]
                # warps that come when it is complete begin its next generation
                has_room = barriers.has_room(block, number, threads, len(arriving_lanes))
                for part in [arriving_lanes] if has_room else warps_of(arriving_lanes):
                    arrive(block, number, threads, part)
        return [] if waits else None

    def arrive(block: int, number: int, threads: int | None, indices: Array) -> None:
        lanes = as_lanes(indices)
        state = barriers.by_key.get((block, number))
        if state is None:
            state = Barrier(block, number, threads, instruction, np.zeros(stride, bool))
            barriers.by_key[block, number] = state
        elif (threads or stride) != (state.expected or stride):
            first = f"{state.expected or 'all'} at {state.first.seen_from(instruction)}"
            problem = f"{threads or 'all'} threads are to meet at barrier {number}, but {first}"
            raise EmulationError(f"{machine.place(instruction, lanes)}: {problem}")
        for watcher in watchers:
            watcher.arrive(instruction, (block, number), lanes)
        state.present[indices % stride] = True
        if waits:
            missing_text = "all threads" if threads is None else f"{threads} threads"
            state.waiting.append(Parked(pc, lanes, f"{missing_text} of its block at barrier {number}"))
            state.finish = finish
        barriers.complete_if_due(state)

    return barrier


def _reduction(machine: Machine, kind: str, target: Operand, source: Operand) -> Callable[[Lanes], None]:
    write = machine.writer(target, "u32" if kind == "popc" else "pred")
    read = machine.reader(source, "pred")
    if kind not in ("popc", "and", "or"):
        raise UnknownOpcode(f"bar.red.{kind}")
    combine: dict[str, Callable[[Array], Any]] = {"popc": np.count_nonzero, "and": np.all, "or": np.any}
    return lambda lanes: write(lanes, np.array([combine[kind](read(lanes))]))


def _warp_barrier(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    read = machine.reader(instruction.operands[0], "u32")

    def warp_barrier(lanes: Lanes) -> Successors:
        masks = np.broadcast_to(read(lanes), (count_of(lanes),))
        successors: list[tuple[int, Lanes]] = []
        for mask in np.unique(masks):  # lanes that name different members do not meet
            chosen, _ = split(lanes, masks == mask)
            assert chosen is not None
            complete = meet(machine, ("bar.warp.sync", int(mask)), pc, chosen, masks[masks == mask])
            for watcher in machine.watchers if complete else ():
                watcher.converge(reduce(merge, complete.values()))
            if complete.get(pc) is lanes and len(complete) == 1:
                return None
            successors += [(target + 1, target_lanes) for target, target_lanes in complete.items()]
        return successors

    return warp_barrier


@binder("membar", "fence")
def _fence(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    name, *parts = instruction.opcode.split(".")
    kind, has_scope = ".".join(part for part in parts if part not in SCOPES), any(part in SCOPES for part in parts)
    watchers = machine.watchers
    if (name == "membar" and parts and kind in ("", "gl")) or (kind in _MEMORY_FENCES and has_scope):

        def fence(lanes: Lanes) -> None:
            for watcher in watchers:
                watcher.fence(instruction, lanes)

        return fence
    if kind == "mbarrier_init.release" and has_scope:

        def release_mbarriers(lanes: Lanes) -> None:
            for watcher in watchers:
                watcher.release_mbarriers(lanes)

        return release_mbarriers
    spaces = PROXY_FENCES.get(kind)
    if spaces is None:
        raise UnknownOpcode(instruction.opcode)

    def proxy_fence(lanes: Lanes) -> None:
        for watcher in watchers:
            watcher.proxy_fence(lanes, spaces)

    return proxy_fence
