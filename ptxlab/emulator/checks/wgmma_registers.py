"""The check "async" for registers: a running wgmma owns its A (nobody may write it) and its D (nobody may touch it).

They are in use until wgmma.wait_group. And a wgmma sees only what registers held at the last wgmma.fence, which every
warp needs before its first. A `mov` of what a register held then, or of a constant, may follow the fence: ptxas makes
no instruction of it. Nor does arithmetic in the row of instructions between a fence and the first wgmma count:
compilers put it there, and ptxas ahead of the fence, as long as no other wgmma is under way.
"""

from typing import Any, NamedTuple

import numpy as np

from ptxlab.emulator.async_.wgmma import WgmmaProducts
from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.core.effect import Effect
from ptxlab.emulator.core.effect_queue import EffectQueue
from ptxlab.emulator.core.lanes import Handler, Lanes, count_of, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.ir import Entry, Instruction, Register, cache_on_subject
from ptxlab.emulator.front.types import Array

_TAKEN, _GIVEN = 1, 2  # what a wgmma in flight does to a register
_ENDS = ("bra", "brx", "call", "ret", "exit")  # of a row of instructions
_MEMORY = ("ld", "ldu", "ldmatrix", "atom", "shfl", "tex")  # whose results are no arithmetic


class RegistersInUse(Check):
    """Check for accesses to registers of a running wgmma, and for wgmma without a fence for its registers."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.used = np.zeros(machine.files[32].shape, np.uint8)
        # By width and register: which instruction has written it since the last fence, its index + 1.
        widths = {width for width, _ in seen_by_wgmmas(machine.launch.entry)}
        self.written = {width: np.zeros(machine.files[width].shape, np.int32) for width in widths}
        self.since: set[tuple[int, int]] = set()  # widths and registers that have been written since some fence
        self.in_use: set[int] = set()  # registers that are, in some lanes
        self.fenced = np.zeros(machine.lanes, bool)

    def wrap_handler(self, instruction: Instruction, handler: Handler) -> Handler:
        """Wrap a handler to check its registers against running wgmmas, then record which were written."""
        if instruction.opcode.startswith("wgmma"):
            return handler
        pc = self.machine.index[id(instruction)]
        if pc not in (accesses := register_accesses(self.machine.launch.entry)):
            return handler
        access = accesses[pc]
        rows, copied_rows = ([self._row(place) for place in places] for places in (access.written, access.copied))
        sources, targets = access.reads, access.writes
        number = np.int32(0 if access.is_copy else pc + 1)

        def check_and_run(lanes: Lanes) -> Any:
            if self.in_use:
                for register in sources:
                    self.report_use(instruction, register, lanes, _GIVEN, "reads")
                for register in targets:
                    self.report_use(instruction, register, lanes, _TAKEN | _GIVEN, "writes")
            writers: Any = np.where(self._is_busy(lanes), number, 0) if access.is_ahead else number
            for row in copied_rows:
                writers = np.maximum(writers, row[lanes])
            successors = handler(lanes)
            for row in rows:
                row[lanes] = writers
            self.since.update(access.written)
            return successors

        return check_and_run

    def _is_busy(self, lanes: Lanes) -> Any:
        """Tell which lanes have a wgmma under way, ahead of which what follows cannot be moved."""
        return self.used[sorted(self.in_use)][:, lanes].any(axis=0) if self.in_use else False

    def _row(self, place: tuple[int, int]) -> Array:
        """Return the row of last writers of a register, given its width and index."""
        width, index = place
        row: Array = self.written[width][index]
        return row

    def report_use(self, instruction: Instruction, register: Register, lanes: Lanes, flags: int, does: str) -> None:
        """Report an access to a register in use."""
        if register.index not in self.in_use:
            return
        is_used = self.used[register.index, lanes] & flags != 0
        if is_used.any():
            user = next(e.instruction for e in self.machine.unit(EffectQueue).queue if self.uses(e, register, flags))
            message = (
                f"{does} {register.name}, still in use by {user.seen_from(instruction)}, as nobody has waited for that,"
            )
            self.report(instruction, "async", lanes, is_used, message)

    def uses(self, effect: Effect, register: Register, flags: int) -> bool:
        """Tell whether the effect is a wgmma that uses the register in one of the roles in `flags`."""
        if not isinstance(effect, WgmmaProducts):
            return False
        a_registers, d_registers = effect.decoded.a_registers, effect.decoded.d_registers
        return register in (
            a_registers if flags == _TAKEN else d_registers if flags == _GIVEN else a_registers + d_registers
        )

    def issue(self, effect: Effect) -> None:
        """Check a wgmma's registers: no conflict with running wgmmas, and a fence since their last write."""
        if not isinstance(effect, WgmmaProducts):
            return
        lanes, instruction = indices_of(effect.all_lanes), effect.instruction
        if not self.fenced[lanes].all():
            self.report(instruction, "async", lanes, ~self.fenced[lanes], "no wgmma.fence since the kernel began,")
        decoded, (a_rows, d_rows) = effect.decoded, effect.decoded.rows
        for registers, rows, flag, verb in (
            (decoded.a_registers, a_rows, _GIVEN, "takes"),
            (decoded.d_registers, d_rows, _TAKEN, "writes"),  # two wgmmas may add to one D, in order
        ):
            late_writes = self.written[32][rows, lanes]
            for i in np.flatnonzero(late_writes.any(axis=1)).tolist():
                source_text = self.machine.code[int(late_writes[i].max()) - 1].seen_from(instruction)
                message = f"takes {registers[i].name}, which {source_text}, wrote, and no wgmma.fence since,"
                self.report(instruction, "async", lanes, late_writes[i] != 0, message)
            for i in np.flatnonzero((self.used[rows, lanes] & flag).any(axis=1)).tolist():
                self.report_use(instruction, registers[i], lanes, flag, verb)
        self.mark(effect)

    def mark(self, effect: WgmmaProducts) -> None:
        """Mark the registers of a wgmma as in use."""
        lanes = indices_of(effect.all_lanes)
        for rows, flag in zip(effect.decoded.rows, (_TAKEN, _GIVEN), strict=True):
            self.used[rows, lanes] |= flag
            self.in_use.update(rows[:, 0].tolist())

    def effect_wait(self, effect: Effect, only_read: bool) -> None:
        """Mark a wgmma's registers as free, except those that other wgmmas still use."""
        if isinstance(effect, WgmmaProducts):
            for rows in effect.decoded.rows:
                self.used[rows, indices_of(effect.all_lanes)] = 0
            self.in_use.clear()
            for pending_effect in self.machine.unit(EffectQueue).queue:
                if isinstance(pending_effect, WgmmaProducts):
                    self.mark(pending_effect)

    def register_fence(self, lanes: Lanes) -> None:
        """Record that wgmma sees all register writes of these lanes so far."""
        for place in self.since:
            self._row(place)[lanes] = 0
        if count_of(lanes) == self.machine.lanes:
            self.since.clear()
        self.fenced[lanes] = True


class RegisterAccess(NamedTuple):
    """Accesses of an instruction to registers of wgmmas, or to registers that are copied to those.

    Attributes:
        reads, writes: registers of wgmmas.
        written: of all, width and index.
        copied: likewise, of what a copy copies.
        is_copy: whether it only copies.
        is_ahead: whether it is arithmetic between a fence and the first wgmma behind it, with no branch between.
    """

    reads: list[Register]
    writes: list[Register]
    written: list[tuple[int, int]]
    copied: list[tuple[int, int]]
    is_copy: bool
    is_ahead: bool


@cache_on_subject
def register_accesses(entry: Entry) -> dict[int, RegisterAccess]:
    """Find instructions that read or write registers of some wgmma, or write what is copied to these.

    The registers of a wgmma are those that it takes or gives.
    """
    wgmma_places, visible_places = registers_of_wgmmas(entry), seen_by_wgmmas(entry)
    accesses, is_behind_fence = {}, False
    for pc, instruction in enumerate(entry.instructions):
        if pc in entry.targets or instruction.head in _ENDS or instruction.opcode.startswith("wgmma"):
            is_behind_fence = instruction.opcode.startswith("wgmma.fence")
        reads, writes = (
            [r for r in registers if r.place in wgmma_places]
            for registers in (instruction.sources, instruction.destinations)
        )
        written_places = [register.place for register in instruction.destinations if register.place in visible_places]
        if reads or written_places:
            copied_places = (
                [source.place for source in instruction.sources] if written_places and instruction.head == "mov" else []
            )
            is_ahead = is_behind_fence and instruction.head not in _MEMORY
            accesses[pc] = RegisterAccess(
                reads, writes, written_places, copied_places, instruction.head == "mov", is_ahead
            )
    return accesses


@cache_on_subject
def seen_by_wgmmas(entry: Entry) -> set[tuple[int, int]]:
    """Return the registers of wgmmas and all that are copied to them, by width and index."""
    places, count = registers_of_wgmmas(entry), 0
    copies = [instruction for instruction in entry.instructions if instruction.head == "mov"]
    while count < len(places):
        count = len(places)
        for copy in copies:
            if any(register.place in places for register in copy.destinations):
                places = places.union(source.place for source in copy.sources)
    return places


@cache_on_subject
def registers_of_wgmmas(entry: Entry) -> set[tuple[int, int]]:
    """Return the registers of A and D of all wgmmas, by width (32 bits) and index."""
    multiplies = (i for i in entry.instructions if i.opcode.startswith("wgmma.mma_async"))
    places = (register.place for i in multiplies for register in (*i.destinations, *i.sources))
    return {(width, index) for width, index in places if width == 32}
