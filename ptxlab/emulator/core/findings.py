"""What a run reports: findings, and what its accesses to memory cost."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ptxlab.emulator.front.ir import Instruction, called_from
from ptxlab.emulator.front.lane_annotation import LaneType
from ptxlab.emulator.options import KINDS
from ptxlab.mangled import demangle_message

_KINDS = frozenset(kind for kinds in KINDS.values() for kind in kinds)


@dataclass(frozen=True, slots=True)
class PackedOperand:
    """A register of an annotated instruction: which operand, the type of its lanes, and all its bits."""

    letter: str
    type: LaneType
    word: int

    @property
    def lanes(self) -> tuple[int, ...]:
        """The value of each lane, lane 0 first; of a plain number just that."""
        return tuple(int(v) for v in self.type.decode(np.array([self.word], np.uint64))[:, 0])


@dataclass(frozen=True, slots=True)
class LaneFault:
    """Register lane `lane` of position `index` (in the set of lanes that ran) broke a rule; `times` positions did.

    `operands` are the values in that lane; `registers` are whole, `exact` has every lane of the wide result.
    """

    kind: str
    lane: int
    index: int
    times: int
    operands: dict[str, int]
    problem: str
    registers: tuple[PackedOperand, ...]
    exact: tuple[int, ...]


Index = tuple[int, int, int]


@dataclass(frozen=True)
class Finding:
    """Something a check found: the first occurrence at its line (and packed lane), and how many times it occurred."""

    kind: str  # one of `options.KINDS`
    path: str
    line: int
    text: str
    block: Index
    thread: Index
    lane: int | None  # packed lane within the register
    operands: dict[str, int]
    message: str
    count: int = 1
    callers: tuple[tuple[str, int], ...] = ()  # (path, line) of the calls, if the line is in an inlined function
    fault: LaneFault | None = field(default=None, repr=False)  # of packed lanes: registers and results in full

    def __str__(self) -> str:
        repeats = f"; {self.count - 1} more" if self.count > 1 else ""
        block, thread = ("({},{},{})".format(*index) for index in (self.block, self.thread))
        place = f"{self.path}:{self.line}{called_from(self.path, self.callers)}: `{self.text}`"
        return f"{self.kind}: {place}: {self.message} in block {block} thread {thread}{repeats}"


@dataclass
class Findings:
    """Findings so far, one per kind, line and packed lane."""

    by_key: dict[tuple[Any, ...], Finding] = field(default_factory=dict)

    def add(
        self,
        instruction: Instruction,
        kind: str,
        place: tuple[Index, Index],
        message: str,
        count: int = 1,
        fault: LaneFault | None = None,
    ) -> None:
        """Enter `count` occurrences, the first in this (block, thread); ValueError for a kind that no check has."""
        if kind not in _KINDS:
            raise ValueError(f"{kind}: not among the kinds of findings (emulator/options.py)")
        packed_lane, operands = (fault.lane, fault.operands) if fault else (None, {})
        code = instruction.path, instruction.line, demangle_message(instruction.text)
        message = demangle_message(message)
        key = (kind, *code[:2], instruction.callers, packed_lane)
        if earlier_finding := self.by_key.get(key):
            self.by_key[key] = replace(earlier_finding, count=earlier_finding.count + count)
            return
        self.by_key[key] = Finding(
            kind, *code, *place, packed_lane, operands, message, count, instruction.callers, fault
        )


@dataclass(frozen=True)
class SharedAccess:
    """Executions of one load or store of shared memory, ldmatrix and stmatrix among them.

    Attributes:
        path, line, text: where it stands.
        requests: how many warps have executed it; a warp whose lanes came apart counts once for each part.
        wavefronts, conflicts: passes over the banks, and those beyond the minimum; see `hardware.banks`.
        width: bytes per lane, a row's 16 for ldmatrix and stmatrix.
        store: as `hardware.banks` takes it: ldmatrix counts as a store, its rows are never taken together.
        addresses: of the 32 lanes of the first request, from the block's first byte of shared memory; -1 for a lane
            that takes no part. For ldmatrix and stmatrix those of the rows.
    """

    path: str
    line: int
    text: str
    requests: int
    wavefronts: int
    conflicts: int
    width: int
    store: bool
    addresses: tuple[int, ...]


@dataclass(frozen=True)
class GlobalAccess:
    """Executions of one load, store, atomic or `cp.async` of global memory.

    Attributes:
        path, line, text: where it stands.
        requests: how many warps have executed it; a warp whose lanes came apart counts once for each part.
        sectors: of 32 bytes, that these have touched; a warp counts each once.
        needed: sectors that the same bytes would fill beside each other.
    """

    path: str
    line: int
    text: str
    requests: int
    sectors: int
    needed: int
