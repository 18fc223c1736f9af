"""The check "race" for blocks of different waves: they never meet in the emulator, but may on a GPU, in any order.

What orders them is a flag: an acquire that finds what a block of an earlier wave released. Whoever knows of one such
acquire counts as ordered behind all earlier waves; so a race is missed where only some blocks of these were waited for.
Per byte of global memory the last write and the last read are remembered, as in `race`.
"""

import numpy as np

from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.checks.happens_before import HappensBefore
from ptxlab.emulator.checks.load_taint import LoadTaint
from ptxlab.emulator.checks.scopes import ALL, EVERYWHERE
from ptxlab.emulator.checks.shadow import UNITS, Shadow, coarsest
from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.effect import Effect
from ptxlab.emulator.core.lanes import Lanes, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array

Units = tuple[Array, Array, Array, int]  # of an access: positions of their lanes, the lanes, the units, bytes of each
EARLIER = -1  # stands for all earlier waves where clocks have a cluster
# An event: strong (1 bit), instruction index + 1 (20), wave + 1 (27), number of the block in its wave (16); 0 is none.
_STRONG, _CODE, _WAVE = np.uint64(63), np.uint64(43), np.uint64(16)
_CODES, _WAVES, _BLOCKS = (np.uint64((1 << bits) - 1) for bits in (20, 27, 16))


class Waves:
    """Accesses, flags and blocks that the waves of a launch leave for those after them."""

    def __init__(self, size: int) -> None:
        self.writes, self.reads = Shadow(size), Shadow(size)
        self.released: set[int] = set()  # flags, by arena offset
        self.blocks: list[Array] = []  # of each wave, those before this one and itself


class RaceWaves(Check):
    """Conflicting accesses by blocks of different waves that no flag orders."""

    def __init__(self, machine: Machine, order: HappensBefore, waves: Waves, taint: LoadTaint | None) -> None:
        super().__init__(machine)
        self.order, self.waves, self.taint = order, waves, taint
        waves.blocks.append(machine.blocks)
        times = np.ones(order.clocks.rows.shape[1], np.int32)
        order.flags.update({place: {EVERYWHERE: {EARLIER: times}} for place in waves.released})

    def load(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Report a read that races with an earlier write."""
        if access.space not in ("generic", "global"):
            return
        instruction, strong = access.instruction, access.order != "weak"
        units = self.units(access, lanes, offsets)
        found = self.race(instruction, units, self.waves.writes, strong, "read of")
        self.mark(self.waves.reads, instruction, units, strong)
        if found is None:
            return
        racing, message = found
        if not strong:  # its value may not matter
            self.machine.launch.suspects.add(self.machine.index[id(instruction)])
        if not strong and self.taint and self.taint.is_tracked(instruction):
            reads = self.taint.events(instruction, lanes)
            self.taint.hold(reads, lambda used: self.tell(instruction, lanes, used & racing, message))
        else:
            self.tell(instruction, lanes, racing, message)

    def store(self, access: MemoryAccess, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Report a write that races with earlier reads and writes, unless it changes nothing."""
        if access.space not in ("generic", "global"):
            return
        new = np.ascontiguousarray(np.broadcast_to(values, (len(offsets), *values.shape[1:]))).view(np.uint8)
        before = self.machine.memory.arena[offsets[:, None] + np.arange(access.size)]
        changed = (before != new.reshape(before.shape)).any(axis=1)
        units = self.units(access, lanes, offsets)
        self.write(access.instruction, lanes, units, access.order != "weak", "write to", changed)

    def atomic(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Report an atomic that races; atomics race with ordinary accesses only."""
        if access.space in ("generic", "global"):
            self.write(access.instruction, lanes, self.units(access, lanes, offsets), True, "atomic on")

    def issue(self, effect: Effect) -> None:
        """Check the reads and writes of copies, too."""
        strong = effect.accumulates
        for (lanes, _, sizes), units_of, writes in (
            (effect.reads, effect.read_units, False),
            (effect.writes, effect.written_units, True),
        ):
            unit, places = coarsest(effect.grain, units_of, self.waves.writes, self.waves.reads)
            found = self.ours(np.arange(len(lanes)).repeat(sizes // unit), lanes, places, unit)
            if writes:
                self.write(effect.instruction, lanes, found, strong, "write to")
                continue
            if race := self.race(effect.instruction, found, self.waves.writes, False, "read of"):
                self.tell(effect.instruction, lanes, *race)
            self.mark(self.waves.reads, effect.instruction, found, False)

    def end(self) -> None:
        """Hand flags that have been released to the next wave."""
        last = self.machine.cluster_memory.first_window
        self.waves.released |= {
            place
            for place, told in self.order.flags.items()
            if place < last and any(release[0] == ALL for release in told)
        }

    # Units of an access that lie in global memory

    def units(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> Units:
        """Return the units that the threads of an access touch."""
        size = access.size
        unit, places = coarsest(
            min(size, UNITS[0]),
            lambda unit: (offsets[:, None] // unit + np.arange(size // unit)).reshape(-1),
            self.waves.writes,
            self.waves.reads,
        )
        return self.ours(np.arange(len(offsets)).repeat(size // unit), indices_of(lanes), places, unit)

    def ours(self, who: Array, lanes: Array, places: Array, unit: int) -> Units:
        """Leave out the units that lie in shared memory."""
        mine = places * unit < self.machine.cluster_memory.first_window
        return who[mine], lanes, places[mine], unit

    def write(self, instruction: Instruction, lanes: Lanes, units: Units, strong: bool, what: str,
              among: Array | None = None) -> None:  # fmt: skip
        """Compare with earlier writes and reads, and remember."""
        for past in (self.waves.writes, self.waves.reads):
            if found := self.race(instruction, units, past, strong, what, among):
                self.tell(instruction, lanes, *found)
        self.mark(self.waves.writes, instruction, units, strong)

    def race(self, instruction: Instruction, units: Units, past: Shadow, strong: bool, what: str,
             among: Array | None = None) -> tuple[Array, str] | None:  # fmt: skip
        """Find the lanes, of those in `among`, that race with an earlier wave, and the message; None if none does."""
        who, lanes, places, unit = units
        events = past.get(places, unit)
        wrong = (events != 0) & (events >> _WAVE & _WAVES != len(self.waves.blocks))
        if strong:
            wrong &= events >> _STRONG == 0
        if among is not None:
            wrong &= among[who]
        if not np.count_nonzero(wrong):
            return None
        clocks = self.order.clocks
        behind = [row for row, clock in clocks.far.items() if EARLIER in clock]
        wrong &= ~np.isin(clocks.row[lanes[who]], behind)
        if not np.count_nonzero(wrong):
            return None
        first = int(np.argmax(wrong))
        event = events[first]
        other = self.machine.code[int(event >> _CODE & _CODES) - 1]
        blocks = self.waves.blocks[int(event >> _WAVE & _WAVES) - 1]
        block = "({},{},{})".format(*blocks[int(event & _BLOCKS)])
        message = f"{what} {self.machine.memory.byte(int(places[first]) * unit)} races with "
        message += f"{other.seen_from(instruction)}, by block {block}, which nothing orders before this one,"
        return np.bincount(who[wrong], minlength=len(lanes)) > 0, message

    def tell(self, instruction: Instruction, lanes: Lanes, racing: Array, message: str) -> None:
        """Report it."""
        if racing.any():
            self.report(instruction, "race", lanes, racing, message)

    def mark(self, shadow: Shadow, instruction: Instruction, units: Units, strong: bool) -> None:
        """Remember accesses for the waves to come."""
        who, lanes, places, unit = units
        blocks = (lanes[who] // self.machine.stride).astype(np.uint64)
        code, wave = self.machine.index[id(instruction)] + 1, len(self.waves.blocks)
        shadow.put(places, unit, blocks | np.uint64(int(strong) << 63 | code << 43 | wave << 16))
