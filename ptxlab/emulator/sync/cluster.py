"""Clusters: addresses of each other's shared memory, and the barrier of all their threads."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ptxlab.emulator.core.lanes import Handler, Lanes, Successors, as_lanes, indices_of
from ptxlab.emulator.core.machine import Machine, Parked, Unit, binder
from ptxlab.emulator.core.memory import BASE
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, Array
from ptxlab.errors import EmulationError


@binder("mapa")
def _map(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    opcode, peers = Opcode(instruction.opcode), machine.cluster_memory
    t, shared = opcode.choice("u32", "u64"), opcode.flag("shared::cluster")
    if opcode.modifiers or (t == "u32" and not shared):
        raise UnknownOpcode(instruction.opcode)
    target, address, rank = instruction.operands
    write, read, read_rank = machine.writer(target, t), machine.reader(address, t), machine.reader(rank, "u32")

    def map_shared(lanes: Lanes) -> None:
        addresses, ranks = np.broadcast_arrays(read(lanes).astype(np.int64), read_rank(lanes).astype(np.int64))
        write(lanes, peers.mapped(instruction, lanes, addresses, ranks).astype(DTYPES[t]))

    def map_generic(lanes: Lanes) -> None:
        addresses, ranks = np.broadcast_arrays(read(lanes).view(np.int64), read_rank(lanes).astype(np.int64))
        if (peers.block_at(addresses - BASE) < 0).any():
            raise EmulationError(f"{machine.place(instruction, lanes)}: an address that is not in shared memory")
        far = peers.mapped(instruction, lanes, peers.from_generic(lanes, addresses), ranks)
        write(lanes, peers.to_generic(instruction, lanes, far).astype(np.uint64))

    return map_shared if shared else map_generic


@binder("getctarank")
def _rank(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    opcode, peers = Opcode(instruction.opcode), machine.cluster_memory
    t, shared = opcode.choice("u32", "u64"), opcode.flag("shared::cluster")
    if opcode.modifiers or (t == "u32" and not shared):
        raise UnknownOpcode(instruction.opcode)
    target, address = instruction.operands
    write, read = machine.writer(target, "u32"), machine.reader(address, t)

    def rank(lanes: Lanes) -> None:
        addresses = read(lanes).astype(np.int64)
        blocks = peers.resolve(instruction, lanes, addresses)[0] if shared else peers.block_at(addresses - BASE)
        write(lanes, (blocks % peers.size).astype(np.uint32))

    return rank


@dataclass(eq=False)
class ClusterBarrier:
    """The barrier of a cluster: all its threads that have not ended arrive, then those who wait go on."""

    machine: Machine
    cluster: int
    lanes: slice
    arrivals: Array  # per lane of the cluster, how often it has arrived, and waited
    waits: Array
    phase: int = 0  # completed so far
    waiting: list[Parked] = field(default_factory=list)

    @property
    def key(self) -> int:
        """What the watchers know it by: as an mbarrier, at a place that is none."""
        return -1 - self.cluster

    def look_again(self) -> None:
        """Complete the phase if everybody has arrived."""
        alive = self.machine.alive[self.lanes]
        if not alive.any() or (self.arrivals[alive] <= self.phase).any():
            return
        self.phase += 1
        for watcher in self.machine.watchers:
            watcher.phase_complete(self.key)
        waiting, self.waiting = self.waiting, []
        for parked in waiting:
            self.leave(parked.lanes)
            self.machine.put(parked.pc + 1, parked.lanes)

    def leave(self, lanes: Lanes) -> None:
        """These lanes have waited."""
        self.waits[indices_of(lanes) - self.lanes.start] += 1
        for watcher in self.machine.watchers:
            watcher.phase_wait(self.key, lanes)


class ClusterBarriers(Unit):
    """Those of the wave's clusters."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.lanes = machine.cluster_memory.size * machine.stride  # of a cluster
        self.of: dict[int, ClusterBarrier] = {}

    def around(self, lanes: Lanes) -> Iterator[tuple[ClusterBarrier, Array]]:
        """The barrier of each cluster that these lanes belong to, with its lanes among them."""
        indices = indices_of(lanes)
        clusters = indices // self.lanes
        for cluster in np.unique(clusters).tolist():
            if cluster not in self.of:
                start, none = cluster * self.lanes, np.zeros(self.lanes, np.int64)
                its_lanes = slice(start, start + self.lanes)
                self.of[cluster] = ClusterBarrier(self.machine, cluster, its_lanes, none, none.copy())
            yield self.of[cluster], indices[clusters == cluster]

    def look_again(self) -> None:
        """Threads that have ended are not waited for."""
        for barrier in self.of.values():
            barrier.look_again()

    def waiters(self) -> Iterator[Parked]:
        """At all barriers."""
        return (parked for barrier in self.of.values() for parked in barrier.waiting)

    def state(self) -> object:
        """Who has arrived."""
        return [(cluster, barrier.phase, barrier.arrivals.tobytes()) for cluster, barrier in self.of.items()]


@binder("barrier.cluster")
def _barrier(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    opcode = Opcode(instruction.opcode)
    opcode.flag("cluster")
    opcode.flag("aligned")
    action = opcode.choice("arrive", "wait")
    order = opcode.choice("release", "relaxed", "acquire", default="release" if action == "arrive" else "acquire")
    if opcode.modifiers or (order == "acquire") == (action == "arrive"):
        raise UnknownOpcode(instruction.opcode)
    barriers = machine.unit(ClusterBarriers)

    def check(barrier: ClusterBarrier, who: Array, ahead: int, problem: str) -> None:
        """The lanes have arrived `ahead` times more often than waited."""
        wrong = barrier.arrivals[who - barrier.lanes.start] - barrier.waits[who - barrier.lanes.start] != ahead
        if wrong.any():
            raise EmulationError(f"{machine.place(instruction, as_lanes(who[wrong]))}: {problem}")

    def arrive(lanes: Lanes) -> None:
        for barrier, who in barriers.around(lanes):
            check(barrier, who, 0, "arrives at the barrier of its cluster again, without having waited")
            for watcher in machine.watchers if order == "release" else ():
                watcher.phase_arrive(barrier.key, as_lanes(who))
            barrier.arrivals[who - barrier.lanes.start] += 1
            barrier.look_again()

    def wait(lanes: Lanes) -> Successors:
        on: list[tuple[int, Lanes]] = []
        for barrier, who in barriers.around(lanes):
            check(barrier, who, 1, "waits at the barrier of its cluster without having arrived")
            done = barrier.arrivals[who - barrier.lanes.start] <= barrier.phase
            if done.any():
                barrier.leave(as_lanes(who[done]))
                on.append((pc + 1, as_lanes(who[done])))
            if not done.all():
                barrier.waiting.append(Parked(pc, as_lanes(who[~done]), "all threads of its cluster"))
        return on

    return arrive if action == "arrive" else wait
