"""Part of the check "async": mbarriers that are written over while they live, and bytes that were never balanced.

An mbarrier lives from `mbarrier.init` to `mbarrier.inval`; until then its memory may hold nothing else (PTX ISA,
mbarrier.inval). A copy, wait or arrival that finds it written over is an error of every run (`sync.mbarrier`). Who has
written there, and bytes of a phase that nobody waits for, are found here.
"""

import numpy as np

from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.effect import Effect, by_entry
from ptxlab.emulator.core.lanes import Lanes
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array
from ptxlab.emulator.sync.mbarrier import MBarriers

WORD = 8  # bytes of an mbarrier


class MBarrierLife(Check):
    """Check for writes over live mbarriers, and for last phases to which too few or too many bytes came."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.mbarriers = machine.unit(MBarriers)
        self.live = np.zeros(machine.memory.size // WORD + 1, bool)

    def begin(self, instruction: Instruction, lanes: Lanes, places: Array) -> None:
        """Mark mbarriers as alive."""
        self.live[places // WORD] = True

    def store(self, access: MemoryAccess, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Check a write; one by mbarrier.init or mbarrier.inval ends the life of the mbarrier there."""
        if access.instruction.head == "mbarrier":
            self.live[offsets // WORD] = False  # until `begin`, if it is initialised
            return
        words = (offsets[:, None] + np.arange(0, access.size, WORD)) // WORD
        self.report_overwrite(access.instruction, lanes, words, np.any(self.live[words], axis=1))

    def atomic(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Check an atomic as a write."""
        self.store(access, lanes, offsets, offsets)

    def issue(self, effect: Effect) -> None:
        """Check the bytes that a copy writes."""
        unit = min(effect.grain, WORD)
        words = effect.written_units(unit) * unit // WORD
        is_live = self.live[words]
        if np.count_nonzero(is_live):
            lanes, _, sizes = effect.writes
            self.report_overwrite(effect.instruction, lanes, words[is_live], by_entry(is_live, sizes // unit))

    def report_overwrite(self, instruction: Instruction, lanes: Lanes, words: Array, wrong: Array) -> None:
        """Report lanes that write over a live mbarrier."""
        if wrong.any():
            place = int(words[self.live[words]][0]) * WORD
            mbarrier = self.mbarriers.by_place[place]
            source_text = mbarrier.instruction.seen_from(instruction)
            message = f"writes over {mbarrier}, which {source_text}, initialised and nobody has invalidated,"
            self.report(instruction, "async", lanes, wrong, message)

    def end(self) -> None:
        """Report phases to which some bytes came, but not all, or too many; no thread has waited for these.

        None at all is no finding: a block may expect what others send to some blocks only.
        """
        for barrier in self.mbarriers.by_place.values():
            if barrier.bytes not in (0, barrier.expected):
                shortage_text = f"expects {barrier.bytes} bytes more than copies have brought"
                surplus_text = f"has got {-barrier.bytes} bytes that nobody expected"
                message = f"at the end {barrier} {shortage_text if barrier.bytes > 0 else surplus_text},"
                blocks = self.machine.cluster_memory.block_at(np.array([barrier.place]))
                self.report(barrier.expected_by, "async", blocks * self.machine.stride, np.array([True]), message)
