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
    """Check for conflicting accesses by blocks of different waves that no flag orders."""

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
        instruction, is_strong = access.instruction, access.order != "weak"
        units = self.units(access, lanes, offsets)
        race = self.find_race(instruction, units, self.waves.writes, is_strong, "read of")
        self.mark(self.waves.reads, instruction, units, is_strong)
        if race is None:
            return
        racing_mask, message = race
        if not is_strong:  # its value may not matter
            self.machine.launch.suspects.add(self.machine.index[id(instruction)])
        if not is_strong and self.taint and self.taint.is_tracked(instruction):
            reads = self.taint.events(instruction, lanes)
            self.taint.report_when_used(
                reads, lambda used: self.report_race(instruction, lanes, used & racing_mask, message)
            )
        else:
            self.report_race(instruction, lanes, racing_mask, message)

    def store(self, access: MemoryAccess, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Report a write that races with earlier reads and writes, unless it changes nothing."""
        if access.space not in ("generic", "global"):
            return
        new_bytes = np.ascontiguousarray(np.broadcast_to(values, (len(offsets), *values.shape[1:]))).view(np.uint8)
        old_bytes = self.machine.memory.arena[offsets[:, None] + np.arange(access.size)]
        is_changed = (old_bytes != new_bytes.reshape(old_bytes.shape)).any(axis=1)
        units = self.units(access, lanes, offsets)
        self.write(access.instruction, lanes, units, access.order != "weak", "write to", is_changed)

    def atomic(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Report an atomic that races; atomics race with ordinary accesses only."""
        if access.space in ("generic", "global"):
            self.write(access.instruction, lanes, self.units(access, lanes, offsets), True, "atomic on")

    def issue(self, effect: Effect) -> None:
        """Check the reads and writes of copies, too."""
        is_strong = effect.accumulates
        for (lanes, _, sizes), touched_units, writes in (
            (effect.reads, effect.read_units, False),
            (effect.writes, effect.written_units, True),
        ):
            unit, places = coarsest(effect.grain, touched_units, self.waves.writes, self.waves.reads)
            global_units = self.keep_global(np.arange(len(lanes)).repeat(sizes // unit), lanes, places, unit)
            if writes:
                self.write(effect.instruction, lanes, global_units, is_strong, "write to")
                continue
            if race := self.find_race(effect.instruction, global_units, self.waves.writes, False, "read of"):
                self.report_race(effect.instruction, lanes, *race)
            self.mark(self.waves.reads, effect.instruction, global_units, False)

    def end(self) -> None:
        """Pass released flags on to the next wave."""
        last = self.machine.cluster_memory.first_window
        self.waves.released |= {
            place
            for place, released_clocks in self.order.flags.items()
            if place < last and any(release[0] == ALL for release in released_clocks)
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
        return self.keep_global(np.arange(len(offsets)).repeat(size // unit), indices_of(lanes), places, unit)

    def keep_global(self, positions: Array, lanes: Array, places: Array, unit: int) -> Units:
        """Keep only the units in global memory."""
        is_global = places * unit < self.machine.cluster_memory.first_window
        return positions[is_global], lanes, places[is_global], unit

    def write(self, instruction: Instruction, lanes: Lanes, units: Units, strong: bool, action: str,
              among: Array | None = None) -> None:  # fmt: skip
        """Report writes that race with writes or reads of earlier waves, then record them."""
        for shadow in (self.waves.writes, self.waves.reads):
            if race := self.find_race(instruction, units, shadow, strong, action, among):
                self.report_race(instruction, lanes, *race)
        self.mark(self.waves.writes, instruction, units, strong)

    def find_race(self, instruction: Instruction, units: Units, past: Shadow, strong: bool, action: str,
             among: Array | None = None) -> tuple[Array, str] | None:  # fmt: skip
        """Find the lanes, of those in `among`, that race with an earlier wave, and the message; None if none does."""
        positions, lanes, places, unit = units
        events = past.get(places, unit)
        is_race = (events != 0) & (events >> _WAVE & _WAVES != len(self.waves.blocks))
        if strong:
            is_race &= events >> _STRONG == 0
        if among is not None:
            is_race &= among[positions]
        if not np.count_nonzero(is_race):
            return None
        clocks = self.order.clocks
        ordered_rows = [row for row, clock in clocks.other_clusters.items() if EARLIER in clock]
        is_race &= ~np.isin(clocks.row[lanes[positions]], ordered_rows)
        if not np.count_nonzero(is_race):
            return None
        first = int(np.argmax(is_race))
        event = events[first]
        past_instruction = self.machine.code[int(event >> _CODE & _CODES) - 1]
        blocks = self.waves.blocks[int(event >> _WAVE & _WAVES) - 1]
        block = "({},{},{})".format(*blocks[int(event & _BLOCKS)])
        message = f"{action} {self.machine.memory.name_byte(int(places[first]) * unit)} races with "
        message += f"{past_instruction.seen_from(instruction)}, by block {block}, which nothing orders before this one,"
        return np.bincount(positions[is_race], minlength=len(lanes)) > 0, message

    def report_race(self, instruction: Instruction, lanes: Lanes, racing: Array, message: str) -> None:
        """Report the lanes that race, if there are any."""
        if racing.any():
            self.report(instruction, "race", lanes, racing, message)

    def mark(self, shadow: Shadow, instruction: Instruction, units: Units, strong: bool) -> None:
        """Record accesses for the check of later waves."""
        positions, lanes, places, unit = units
        blocks = (lanes[positions] // self.machine.stride).astype(np.uint64)
        code, wave = self.machine.index[id(instruction)] + 1, len(self.waves.blocks)
        shadow.put(places, unit, blocks | np.uint64(int(strong) << 63 | code << 43 | wave << 16))
