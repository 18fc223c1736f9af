"""Clusters: addresses of each other's shared memory, and the barrier of all their threads."""

from collections import defaultdict
from collections.abc import Iterator

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
    t, takes_cluster_address = opcode.choice("u32", "u64"), opcode.flag("shared::cluster")
    if opcode.modifiers or (t == "u32" and not takes_cluster_address):
        raise UnknownOpcode(instruction.opcode)
    target, address, rank = instruction.operands
    write, read, read_rank = machine.writer(target, t), machine.reader(address, t), machine.reader(rank, "u32")

    def map_shared(lanes: Lanes) -> None:
        addresses, ranks = np.broadcast_arrays(read(lanes).astype(np.int64), read_rank(lanes).astype(np.int64))
        write(lanes, peers.map_addresses(instruction, lanes, addresses, ranks).astype(DTYPES[t]))

    def map_generic(lanes: Lanes) -> None:
        addresses, ranks = np.broadcast_arrays(read(lanes).view(np.int64), read_rank(lanes).astype(np.int64))
        if (peers.block_at(addresses - BASE) < 0).any():
            raise EmulationError(f"{machine.place(instruction, lanes)}: an address that is not in shared memory")
        mapped_addresses = peers.map_addresses(instruction, lanes, peers.from_generic(lanes, addresses), ranks)
        write(lanes, peers.to_generic(instruction, lanes, mapped_addresses).astype(np.uint64))

    return map_shared if takes_cluster_address else map_generic


@binder("getctarank")
def _rank(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    opcode, peers = Opcode(instruction.opcode), machine.cluster_memory
    t, takes_cluster_address = opcode.choice("u32", "u64"), opcode.flag("shared::cluster")
    if opcode.modifiers or (t == "u32" and not takes_cluster_address):
        raise UnknownOpcode(instruction.opcode)
    target, address = instruction.operands
    write, read = machine.writer(target, "u32"), machine.reader(address, t)

    def rank(lanes: Lanes) -> None:
        addresses = read(lanes).astype(np.int64)
        blocks = (
            peers.resolve(instruction, lanes, addresses)[0]
            if takes_cluster_address
            else peers.block_at(addresses - BASE)
        )
        write(lanes, (blocks % peers.size).astype(np.uint32))

    return rank


class ClusterBarriers(Unit):
    """The barrier of each cluster: all its threads that have not ended arrive, then those who wait go on.

    Watchers know it as an mbarrier at the place -1 - cluster, which is none.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.lanes_per_cluster = machine.cluster_memory.size * machine.stride
        self.arrivals, self.waits = np.zeros((2, machine.lanes), np.int64)  # how often each lane has
        self.phase = np.zeros(machine.lanes // self.lanes_per_cluster, np.int64)  # of each cluster: completed so far
        self.waiting: dict[int, list[Parked]] = defaultdict(list)

    def parts(self, lanes: Lanes) -> Iterator[tuple[int, Array]]:
        """Yield the clusters that these lanes belong to, each with its lanes among them."""
        indices = indices_of(lanes)
        clusters = indices // self.lanes_per_cluster
        for cluster in np.unique(clusters).tolist():
            yield cluster, indices[clusters == cluster]

    def complete_if_due(self, cluster: int) -> None:
        """Complete the cluster's phase if all of its threads that have not ended have arrived."""
        lanes = slice(cluster * self.lanes_per_cluster, (cluster + 1) * self.lanes_per_cluster)
        is_alive = self.machine.alive[lanes]
        if not is_alive.any() or (self.arrivals[lanes][is_alive] <= self.phase[cluster]).any():
            return
        self.phase[cluster] += 1
        for watcher in self.machine.watchers:
            watcher.phase_complete(-1 - cluster)
        for parked in self.waiting.pop(cluster, []):
            self.leave(self.machine.code[parked.pc], cluster, parked.lanes)
            self.machine.make_ready(parked.pc + 1, parked.lanes)

    def leave(self, instruction: Instruction, cluster: int, lanes: Lanes) -> None:
        """Record that these lanes' wait is over, and notify the watchers."""
        self.waits[lanes] += 1
        for watcher in self.machine.watchers:
            watcher.phase_wait(instruction, -1 - cluster, lanes)

    def recheck(self) -> None:
        """Complete the phases that waited only for threads that have now ended."""
        for cluster in range(len(self.phase)):
            self.complete_if_due(cluster)

    def waiters(self) -> Iterator[Parked]:
        """Return the lanes that are parked at all barriers."""
        return (parked for waiting in self.waiting.values() for parked in waiting)

    def state(self) -> object:
        """Return the phase of each cluster and the arrivals of each lane."""
        return self.phase.tobytes(), self.arrivals.tobytes()


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

    def check(cluster_lanes: Array, lead: int, problem: str) -> None:
        """Check that the lanes have arrived `lead` times more often than waited."""
        is_wrong = barriers.arrivals[cluster_lanes] - barriers.waits[cluster_lanes] != lead
        if is_wrong.any():
            raise EmulationError(f"{machine.place(instruction, as_lanes(cluster_lanes[is_wrong]))}: {problem}")

    def arrive(lanes: Lanes) -> None:
        for cluster, cluster_lanes in barriers.parts(lanes):
            check(cluster_lanes, 0, "arrives at the barrier of its cluster again, without having waited")
            for watcher in machine.watchers:
                watcher.phase_arrive(instruction, -1 - cluster, as_lanes(cluster_lanes))
            barriers.arrivals[cluster_lanes] += 1
            barriers.complete_if_due(cluster)

    def wait(lanes: Lanes) -> Successors:
        successors: list[tuple[int, Lanes]] = []
        for cluster, cluster_lanes in barriers.parts(lanes):
            check(cluster_lanes, 1, "waits at the barrier of its cluster without having arrived")
            is_done = barriers.arrivals[cluster_lanes] <= barriers.phase[cluster]
            if is_done.any():
                barriers.leave(instruction, cluster, as_lanes(cluster_lanes[is_done]))
                successors.append((pc + 1, as_lanes(cluster_lanes[is_done])))
            if not is_done.all():
                waiting_lanes = as_lanes(cluster_lanes[~is_done])
                barriers.waiting[cluster].append(Parked(pc, waiting_lanes, "all threads of its cluster"))
        return successors

    return arrive if action == "arrive" else wait
