"""The check "async": what threads must not do while effects are in flight, and what the copy engine must not meet.

A byte is in flight from the issue of a copy or wgmma until somebody has waited for it, whatever the mode: nobody may
read or write a byte that is being written, nor write one that is being read (kind "async"). Two copies that read the
same byte count as one: it is free when the first is done.

The copy engine and wgmma (the async proxy) see what threads have written with ordinary stores or cp.async, and write
over it, only behind a proxy fence (kind "async-dirty"). Which fence counts: the PTX ISA wants one wherever two proxies
meet (8.6); it "takes effect within a single thread" and "composes with other forms of synchronization" (9.7, membar and
fence), for aliases in words: it stands along the base causality path from one access to the other (8.9.5), which
NVIDIA's formal model (Lustig, Cooksey and Giroux, ISCA 2022) has for every proxy. So a fence orders all writes that its
thread knows of, its own and what a barrier told it about, before whatever is asked for by itself or by those whom
it has told since. Fences of all writers ahead of the barrier do, and so does one of the issuing thread behind it; that
of a thread which has not heard of the writes, or of which the issuing thread has not heard, does not. That model also
wants the fence in the block of the copy, of which the ISA says nothing; here a fence in another block counts.

May a copy write over what threads have only read, without a proxy fence? The ISA (8.6) asks for a fence between any two
accesses of different proxies. Most kernels, CUTLASS's pipelines among them, release a stage by a barrier alone; some
have been seen to fail (DeepEP #642, TransformerEngine #2695). The check "proxy", which is not part of all, is strict:
such copies are findings (kind "war"), and copies of what another launch of a chain has written (`chain`).

A copy uses its mbarrier by the generic proxy (9.7, cp.async.bulk: "accesses its mbarrier operand using generic-proxy"),
so that it needs no proxy fence. Whoever issues the copy must know of mbarrier.init, by whatever orders ordinary
accesses. Behind fence.mbarrier_init a relaxed barrier of the cluster will do.
"""

from collections.abc import Callable

import numpy as np

from ptxlab.emulator.async_.cp_async import Boxes, Copies
from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.checks.happens_before import PROXY_SPACES, HappensBefore, actors_of, codes_of
from ptxlab.emulator.checks.shadow import Shadow, coarsest, repeat_byte
from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.effect import Effect, Places, by_entry
from ptxlab.emulator.core.effect_queue import EffectQueue
from ptxlab.emulator.core.lanes import Lanes, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array

_WRITTEN, _READ, _ADDED = 1, 2, 4  # what a copy in flight does to a byte
_CHANGED = _WRITTEN | _ADDED
Units = Callable[[int], Array]  # the places of an effect, as numbers of units of so many bytes
_GLOBAL = PROXY_SPACES.index("global")


class InFlight(Check):
    """Check for accesses that touch bytes of a copy in flight, and for copies of bytes not visible to them."""

    def __init__(self, machine: Machine, order: HappensBefore, strict: bool = False) -> None:
        super().__init__(machine)
        self.pending, self.memory, self.order = machine.unit(EffectQueue), machine.memory, order
        self.busy = np.zeros(machine.memory.size, np.uint8)
        self.words = {size: self.busy.view(f"u{size}") for size in (1, 2, 4, 8)}
        # event of the last write that was not the engine's, 0 where there is none
        tracks_writers = machine.launch.entry.uses_async_proxy or machine.launch.unfenced is not None
        self.dirty = Shadow(machine.memory.size) if tracks_writers else None
        # likewise of the last read of shared memory; None: not asked for
        self.read = None if self.dirty is None or not strict else Shadow(machine.memory.size)
        self.waits = np.zeros(0, np.uint64)  # events: griddepcontrol.wait of some threads

    # Threads

    def load(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Report reads of bytes that a copy in flight writes."""
        self.check_access(access, lanes, offsets, _CHANGED, "reads")
        if self.read is not None and (is_shared := self.machine.launch.is_shared(offsets)).any():
            threads = indices_of(lanes)[is_shared]
            events = self.order.event(access.instruction, threads, self.order.clocks.own_times[threads], strong=False)
            self.read.mark(offsets[is_shared], access.size, events)

    def store(self, access: MemoryAccess, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Report writes to bytes that a copy in flight reads or writes."""
        self.check_access(access, lanes, offsets, _CHANGED | _READ, "writes")
        threads = indices_of(lanes)
        times = self.order.clocks.own_times[threads]
        if self.dirty is not None:
            self.dirty.mark(offsets, access.size, self.order.event(access.instruction, threads, times, strong=False))

    def atomic(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Check an atomic as a write."""
        self.store(access, lanes, offsets, offsets)

    def check_access(self, access: MemoryAccess, lanes: Lanes, offsets: Array, flags: int, does: str) -> None:
        """Report the lanes whose access touches a byte with one of the `flags`."""
        width = min(access.size, 8)
        pattern = repeat_byte(flags, width)
        is_collision = np.zeros(len(offsets), bool)
        for first in range(0, access.size, width):
            is_collision |= self.words[width][(offsets + first) // width] & pattern != 0
        if is_collision.any():
            start = int(offsets[int(np.argmax(is_collision))])
            place = start + int(np.argmax(self.busy[start : start + access.size] & flags))
            description = self.describe_byte(access.instruction, place, flags)
            self.report(access.instruction, "async", lanes, is_collision, f"{does} {description}")

    def describe_byte(self, instruction: Instruction, place: int, flags: int) -> str:
        """Name in words a byte in flight that an instruction meets, and who moves it."""
        for effect in self.pending.queue:
            for verb, flag, part in (("written", _CHANGED, effect.writes), ("read", _READ, effect.reads)):
                lanes, starts, sizes = part
                is_holder = (starts <= place) & (place < starts + sizes)
                if flags & flag and is_holder.any():
                    thread = "({},{},{})".format(*self.machine.place_of(int(lanes[int(np.argmax(is_holder))]))[1])
                    source_text = f"{effect.instruction.seen_from(instruction)}, for thread {thread}"
                    byte_name = self.memory.name_byte(place)
                    return f"{byte_name}, still being {verb} by {source_text}, as nobody has waited for that,"
        return f"{self.memory.name_byte(place)}, which another entry of this copy moves"

    # Copies

    def issue(self, effect: Effect) -> None:
        """Check an effect against others, dirty bytes, and mbarriers that it cannot see.

        Its bytes are in flight, too, from then on.
        """
        self.check_collisions(effect, effect.reads, effect.read_units, _CHANGED, "takes")
        added_flag = _ADDED if effect.accumulates else 0  # which several may do at once
        self.check_collisions(
            effect, effect.writes, effect.written_units, (_CHANGED | _READ) & ~added_flag, "copies to"
        )
        if effect.kind != "cp.async":
            self.check_visibility(effect)
        self.set_flags(effect, effect.read_units, _READ)
        self.set_flags(effect, effect.written_units, added_flag or _WRITTEN)

    def set_flags(self, effect: Effect, units_of: Units, flag: int) -> None:
        """Set the flag on the bytes of an effect."""
        unit = min(effect.grain, 8)
        self.words[unit][units_of(unit)] |= repeat_byte(flag, unit)

    def clear_flags(self, effect: Effect, units_of: Units, flags: int) -> None:
        """Clear the flags on the bytes of an effect."""
        unit = min(effect.grain, 8)
        self.words[unit][units_of(unit)] &= repeat_byte(~flags & 0xFF, unit)

    def check_collisions(self, effect: Effect, entries: Places, units_of: Units, flags: int, does: str) -> None:
        """Report entries that touch bytes in flight."""
        unit = min(effect.grain, 8)
        if not np.count_nonzero(self.words[unit][units_of(unit)] & repeat_byte(flags, unit)):
            return
        places = units_of(1)
        is_hit = self.busy[places] & flags != 0
        if is_hit.any():
            lanes, _, sizes = entries
            description = self.describe_byte(effect.instruction, int(places[int(np.argmax(is_hit))]), flags)
            self.report(effect.instruction, "async", lanes, by_entry(is_hit, sizes), f"{does} {description}")

    def check_visibility(self, effect: Effect) -> None:
        """Report bytes of an effect that no proxy fence orders before it, and mbarriers unknown to its thread."""
        is_unknown = ~self.order.are_initialised(effect.barrier, effect.lanes)
        for lane, place in zip(effect.lanes[is_unknown].tolist(), effect.barrier[is_unknown].tolist(), strict=True):
            writer_text = self.order.instruction_of(self.order.initialised[place]).seen_from(effect.instruction)
            message = f"tells the mbarrier at {self.memory.name_byte(place)}, which {writer_text}, initialised "
            message += "and nothing orders before this: neither a barrier nor fence.mbarrier_init,"
            self.report(effect.instruction, "async", np.array([lane]), np.array([True]), message)
        assert self.dirty is not None
        stale_read = "the engine may see what was there before"
        self.report_unfenced(effect, self.dirty, effect.reads, effect.read_units, ("takes", "wrote", stale_read))
        if self.machine.launch.unfenced is not None:
            self.report_unfenced_launches(effect)
        if isinstance(effect, Copies | Boxes):  # st.async and red.async go the way of ordinary stores
            written_units = effect.written_units
            late_store, early_copy = "that may land behind the copy", "that may see the copy already"
            self.report_unfenced(effect, self.dirty, effect.writes, written_units, ("copies over", "wrote", late_store))
            if self.read is not None:
                self.report_unfenced(
                    effect, self.read, effect.writes, written_units, ("copies over", "read", early_copy)
                )

    def wait_for_predecessors(self, lanes: Lanes) -> None:
        """Record that these lanes see the writes of earlier launches from now on, in the generic proxy."""
        if self.machine.launch.unfenced is not None:
            threads = indices_of(lanes)
            instruction = self.machine.launch.entry.instructions[0]
            events = self.order.event(instruction, threads, self.order.clocks.own_times[threads], strong=False)
            self.waits = np.concatenate([self.waits, events])

    def report_unfenced_launches(self, effect: Effect) -> None:
        """Report bytes that the engine reads, written by an earlier launch and fenced neither there nor here."""
        assert self.machine.launch.unfenced is not None
        lanes, _, sizes = effect.reads
        places = effect.read_units(1)
        writer_numbers = self.machine.launch.unfenced[places]
        if not writer_numbers.any():
            return
        threads = np.repeat(lanes, sizes)
        is_fenced = np.zeros(len(threads), bool)  # a fence that itself is behind a wait
        for wait in self.waits:
            is_fenced |= ~self.order.is_unordered(np.full(len(threads), wait), threads, _GLOBAL)
        is_hit = (writer_numbers > 0) & ~is_fenced
        if is_hit.any():
            first = int(np.argmax(is_hit))
            writer = self.machine.launch.writers[writer_numbers[first] - 1]
            message = f"takes {self.memory.name_byte(int(places[first]))}, which {writer}, wrote "
            message += "without a fence.proxy.async behind it, and nobody has fenced here since griddepcontrol.wait: "
            message += "the engine may see what was there before,"
            self.report(effect.instruction, "async-dirty", lanes, by_entry(is_hit, sizes), message)

    def report_unfenced(
        self, effect: Effect, marked: Shadow, entries: Places, units_of: Units, words: tuple[str, str, str]
    ) -> None:
        """Report bytes of an effect that threads wrote (or read), by events in `marked`, with no proxy fence since."""
        verb, past_verb, consequence = words
        lanes, _, sizes = entries
        unit, units = coarsest(effect.grain, units_of, marked)
        last_events = marked.get(units, unit)
        if not np.count_nonzero(last_events):
            return
        threads, places = lanes.repeat(sizes // unit), units * unit
        is_shared = self.machine.launch.is_shared(places)
        writers = actors_of(last_events) % self.machine.lanes
        is_hit = np.zeros(len(places), bool)
        for space, is_in_space in enumerate((is_shared, ~is_shared)):
            is_hit[is_in_space] = self.order.is_unordered(last_events[is_in_space], threads[is_in_space], space)
            # what its writer has fenced, and nobody has told the issuing thread of, is a race and no more
            is_fenced = ~self.order.is_unordered(last_events[is_in_space], writers[is_in_space], space)
            is_hit[is_in_space] &= ~(
                is_fenced & self.order.is_unordered(last_events[is_in_space], threads[is_in_space])
            )
        if is_hit.any():
            first = int(np.argmax(is_hit))
            writer = self.order.instruction_of(last_events[first])
            writer_text = writer.seen_from(effect.instruction)
            message = f"{verb} {self.memory.name_byte(int(places[first]))}, which {writer_text}, {past_verb} "
            message += f"without a fence.proxy.async behind it: {consequence},"
            kind = "async-dirty" if past_verb == "wrote" else "war"
            self.report(effect.instruction, kind, lanes, by_entry(is_hit, sizes // unit), message)

    def effect_wait(self, effect: Effect, only_read: bool) -> None:
        """Clear the flags of an effect that its lanes have waited for (`only_read`: for its reads)."""
        self.effect_seen(effect, only_read)

    def effect_seen(self, effect: Effect, only_read: bool = False) -> None:
        """Clear the in-flight flags of an effect's bytes.

        What cp.async wrote is like a store; what the engine wrote, it can see.
        """
        self.clear_flags(effect, effect.read_units, _READ)
        for pending_effect in self.pending.queue if effect.kind == "wgmma" else ():  # these often share their operands
            if pending_effect.kind == "wgmma":
                self.set_flags(pending_effect, pending_effect.read_units, _READ)
        if only_read:
            return
        self.clear_flags(effect, effect.written_units, _CHANGED)
        if self.dirty is None:
            return
        unit, (lanes, _, sizes) = effect.grain, effect.writes
        if effect.kind == "cp.async":
            times = np.full(len(lanes), effect.serial)
            events = self.order.event(effect.instruction, self.machine.lanes + lanes, times, strong=False)
            self.dirty.put(effect.written_units(unit), unit, events.repeat(sizes // unit))
        else:
            self.dirty.put(effect.written_units(unit), unit, 0)
            if self.read is not None:
                self.read.put(effect.written_units(unit), unit, 0)

    def end(self) -> None:
        """Report copies from shared memory that nobody has waited for: it is freed when its block ends."""
        self.publish()
        for effect in self.pending.queue:
            lanes, starts, sizes = effect.reads
            is_unfinished = (sizes > 0) & (self.busy[starts] & _READ != 0) & self.machine.launch.is_shared(starts)
            if is_unfinished.any():
                message = "reads shared memory, and its block ends without waiting for that"
                self.report(effect.instruction, "async", lanes, is_unfinished, message)

    def publish(self) -> None:
        """Record for the next launch of a chain which bytes of global memory have no proxy fence after their write."""
        launch = self.machine.launch
        if launch.unfenced is None or self.dirty is None:
            return
        events_by_byte = self.dirty.by_byte
        places = np.flatnonzero(events_by_byte[: self.machine.cluster_memory.first_window])
        events = events_by_byte[places]
        is_unfenced = self.order.fenced_by_nobody(events, _GLOBAL)
        launch.unfenced[places] = 0
        for code in np.unique(codes_of(events[is_unfenced])).tolist():
            instruction = self.machine.code[code]
            writer = f"`{instruction.text}` of {launch.entry.name} ({instruction.path}:{instruction.line})"
            launch.writers.append(writer)
            launch.unfenced[places[is_unfenced & (codes_of(events) == code)]] = len(launch.writers)
