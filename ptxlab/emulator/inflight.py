"""The check "async": what threads must not do while effects are in flight, and what the copy engine must not meet.

A byte is in flight from the issue of a copy or wgmma until somebody has waited for it, whatever the mode: nobody may
read or write a byte that is being written, nor write one that is being read (kind "async"). The copy engine and wgmma
see what threads have written with ordinary stores or cp.async, and write over it, only after their proxy fence; until
then the bytes are dirty ("async-dirty"). So is an mbarrier until its fence. Two copies that read the same byte count as
one: it is free when the first is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptxlab.emulator.check import Watcher
from ptxlab.emulator.effects import Boxes, Copies, Effect, Places, by_entry, spans
from ptxlab.emulator.types import Array, Lanes, indices_of

if TYPE_CHECKING:
    from ptxlab.emulator.access import Access
    from ptxlab.emulator.ir import Instruction
    from ptxlab.emulator.machine import Machine

_WRITTEN, _READ, _ADDED = 1, 2, 4  # what a copy in flight does to a byte
_CHANGED = _WRITTEN | _ADDED
# A dirty byte remembers time (24 bits), instruction (22) and lane (18); 0 is clean.
_LANE, _TIME = 18, 40


class InFlight(Watcher):
    """Accesses that meet a copy in flight, and copies that meet what is not visible to them."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.pending, self.memory = machine.pending, machine.memory
        self.busy = np.zeros(machine.memory.size, np.uint8)
        self.words = {size: self.busy.view(f"u{size}") for size in (1, 2, 4, 8)}
        has_engine = machine.launch.entry.uses("cp.async.bulk", "wgmma", "st.async", "red.async")
        self.dirty = np.zeros(machine.memory.size, np.int64) if has_engine else None
        self.time = 1  # counts proxy fences
        self.fenced = {space: np.zeros(machine.lanes, np.int64) for space in ("shared", "global")}  # time of the last
        self.begun: dict[int, tuple[int, Instruction]] = {}  # mbarriers that the engine cannot see: lane, mbarrier.init

    # Threads

    def load(self, access: Access, lanes: Lanes, offsets: Array) -> None:
        """Nobody may read what a copy writes."""
        self.meet(access, lanes, offsets, _CHANGED, "reads")

    def store(self, access: Access, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Nobody may write what a copy reads or writes."""
        self.meet(access, lanes, offsets, _CHANGED | _READ, "writes")
        self.soil(access.instruction, lanes, offsets, np.full(len(offsets), access.size))

    def atomic(self, access: Access, lanes: Lanes, offsets: Array) -> None:
        """Writes."""
        self.store(access, lanes, offsets, offsets)

    def meet(self, access: Access, lanes: Lanes, offsets: Array, flags: int, does: str) -> None:
        """Report accesses to bytes that carry one of the flags."""
        step = min(access.size, 8)
        pattern = int.from_bytes(bytes([flags]) * step, "little")
        wrong = np.zeros(len(offsets), bool)
        for first in range(0, access.size, step):
            wrong |= self.words[step][(offsets + first) // step] & pattern != 0
        if wrong.any():
            start = int(offsets[int(np.argmax(wrong))])
            place = start + int(np.argmax(self.busy[start : start + access.size] & flags))
            self.report(
                access.instruction, "async", lanes, wrong, f"{does} {self.whose(access.instruction, place, flags)}"
            )

    def whose(self, instruction: Instruction, place: int, flags: int) -> str:
        """A byte in flight that an instruction meets, and who moves it, in words."""
        for effect in self.pending.queue:
            for does, flag, part in (("written", _CHANGED, effect.writes), ("read", _READ, effect.reads)):
                lanes, starts, sizes = part
                holds = (starts <= place) & (place < starts + sizes)
                if flags & flag and holds.any():
                    thread = "({},{},{})".format(*self.machine.place_of(int(lanes[int(np.argmax(holds))]))[1])
                    by = f"{effect.instruction.seen_from(instruction)}, for thread {thread}"
                    return f"{self.memory.byte(place)}, still being {does} by {by}, as nobody has waited for that,"
        return f"{self.memory.byte(place)}, which another entry of this copy moves"

    # Copies

    def issue(self, effect: Effect) -> None:
        """An effect meets others, dirty bytes, and mbarriers that it cannot see; now its bytes are in flight too."""
        self.collide(effect, effect.reads, effect.read_bytes, _CHANGED, "takes")
        adds = _ADDED if effect.accumulates else 0  # which several may do at once
        self.collide(effect, effect.writes, effect.written_bytes, (_CHANGED | _READ) & ~adds, "copies to")
        if effect.kind != "cp.async":
            self.see(effect)
        self.busy[effect.read_bytes] |= _READ
        self.busy[effect.written_bytes] |= adds or _WRITTEN

    def collide(self, effect: Effect, entries: Places, places: Array, flags: int, does: str) -> None:
        """Report entries that touch bytes in flight."""
        hit = self.busy[places] & flags != 0
        if hit.any():
            lanes, _, sizes = entries
            what = self.whose(effect.instruction, int(places[int(np.argmax(hit))]), flags)
            self.report(effect.instruction, "async", lanes, by_entry(hit, sizes), f"{does} {what}")

    def see(self, effect: Effect) -> None:
        """Report what the engine reads or tells without being able to see it."""
        for lane, place in zip(effect.lanes.tolist(), effect.barrier.tolist(), strict=True):
            if place in self.begun:
                by = self.begun[place][1].seen_from(effect.instruction)
                message = f"tells the mbarrier at {self.memory.byte(place)}, which {by}, initialised "
                message += "without fence.mbarrier_init (or fence.proxy.async): the async proxy may not see it,"
                self.report(effect.instruction, "async", np.array([lane]), np.array([True]), message)
        self.unfenced(effect, effect.reads, effect.read_bytes, "takes", "the engine may see what was there before")
        if isinstance(effect, Copies | Boxes):  # st.async and red.async go the way of ordinary stores
            places = effect.written_bytes
            self.unfenced(effect, effect.writes, places, "copies over", "that may land behind the copy")

    def unfenced(self, effect: Effect, entries: Places, places: Array, does: str, consequence: str) -> None:
        """Report bytes that threads have written, and not fenced since."""
        assert self.dirty is not None
        marks = self.dirty[places]
        writers, shared = marks & (1 << _LANE) - 1, self.machine.launch.is_shared(places)
        fenced = np.where(shared, self.fenced["shared"][writers], self.fenced["global"][writers])
        hit = marks >> _TIME >= np.maximum(fenced, 1)
        if hit.any():
            first = int(np.argmax(hit))
            writer = self.machine.code[int(marks[first] >> _LANE & (1 << _TIME - _LANE) - 1)]
            by = writer.seen_from(effect.instruction)
            message = f"{does} {self.memory.byte(int(places[first]))}, which {by}, wrote "
            message += f"without a fence.proxy.async behind it: {consequence},"
            lanes, _, sizes = entries
            self.report(effect.instruction, "async-dirty", lanes, by_entry(hit, sizes), message)

    def soil(self, instruction: Instruction, lanes: Lanes, starts: Array, sizes: Array) -> None:
        """Lanes have written bytes that the copy engine cannot see yet."""
        if self.dirty is not None:
            marks = indices_of(lanes) | self.machine.index[id(instruction)] << _LANE | self.time << _TIME
            self.dirty[spans(starts, sizes)] = np.repeat(marks, sizes)

    def waited(self, effect: Effect, only_read: bool) -> None:
        """The lanes' own effects are done, or have read their source."""
        self.settled(effect, only_read)

    def settled(self, effect: Effect, only_read: bool = False) -> None:
        """The bytes are at rest. What cp.async wrote is like a store; what the engine wrote, it can see."""
        self.busy[effect.read_bytes] &= ~np.uint8(_READ)
        for other in self.pending.queue if effect.kind == "wgmma" else ():  # these often share their operands
            if other.kind == "wgmma":
                self.busy[other.read_bytes] |= _READ
        if only_read:
            return
        self.busy[effect.written_bytes] &= ~np.uint8(_CHANGED)
        if effect.kind == "cp.async":
            self.soil(effect.instruction, *effect.writes)
        elif self.dirty is not None:
            self.dirty[effect.written_bytes] = 0

    # What makes visible

    def begin(self, instruction: Instruction, lanes: Lanes, places: Array) -> None:
        """mbarriers that only their thread knows of."""
        self.begun.update({int(place): (int(lane), instruction)
                           for place, lane in zip(places, indices_of(lanes), strict=True)})  # fmt: skip

    def proxy_fence(self, lanes: Lanes, spaces: tuple[str, ...]) -> None:
        """The copy engine sees what these lanes have done."""
        self.time += 1
        for space in ("shared", "global"):
            if space in spaces:
                self.fenced[space][lanes] = self.time
        if "mbarrier" in spaces:
            those = set(indices_of(lanes).tolist())
            self.begun = {place: by for place, by in self.begun.items() if by[0] not in those}

    def end(self) -> None:
        """Shared memory is gone when its block ends: copies from it must have been waited for."""
        for effect in self.pending.queue:
            lanes, starts, sizes = effect.reads
            wrong = (sizes > 0) & (self.busy[starts] & _READ != 0) & self.machine.launch.is_shared(starts)
            if wrong.any():
                message = "reads shared memory, and its block ends without waiting for that"
                self.report(effect.instruction, "async", lanes, wrong, message)
