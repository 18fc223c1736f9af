"""Runs PTX on the CPU, with checks that a GPU does not make: packed lanes, races, uninitialised reads.

`run` (`launch`) lays out memory and runs the grid as waves of blocks; `EmulatorOptions` (`options`) say how it runs;
`chain` checks launches that follow each other.
Folders, each of which imports only those before it (`tests/emulator/test_layers.py`):

- `front`: text -> instructions, and what can be told without running them.
- `core`: lanes, registers, memory, the scheduler; it knows no instruction and no check by name.
- `ops`: instructions that are done when they have been executed, entered into the machine with `binder`.
- `sync`: instructions that wait for others; their barriers are units of the machine.
- `async_`: instructions that ask for effects, which go on while their threads do.
- `checks`: watchers, which the machine tells of every access and synchronisation.
"""

from ptxlab.emulator.chain import Chain, chain
from ptxlab.emulator.core.findings import Finding, GlobalAccess, PackedOperand, SharedAccess
from ptxlab.emulator.front.architectures import require_target
from ptxlab.emulator.front.ir import Entry, Instruction, Module, Variable
from ptxlab.emulator.front.lane_annotation import LaneType
from ptxlab.emulator.front.parse import parse
from ptxlab.emulator.front.pointer_accesses import PointerAccess, accesses_of, pointers_of
from ptxlab.emulator.front.quirks import Note
from ptxlab.emulator.launch import Result, run, size_of, watch_launches
from ptxlab.emulator.options import CHECKS, MAX_STEPS, MODES, ON_REQUEST, EmulatorOptions, OptionKeywords, checks_of
from ptxlab.emulator.remedies import remedies_of, remedy_of
from ptxlab.emulator.unneeded import Need, Ran, Statement, needs_of, statements_of

__all__ = [
    "CHECKS",
    "MAX_STEPS",
    "MODES",
    "ON_REQUEST",
    "Chain",
    "EmulatorOptions",
    "Entry",
    "Finding",
    "GlobalAccess",
    "Instruction",
    "LaneType",
    "Module",
    "Need",
    "Note",
    "OptionKeywords",
    "PackedOperand",
    "PointerAccess",
    "Ran",
    "Result",
    "SharedAccess",
    "Statement",
    "Variable",
    "accesses_of",
    "chain",
    "checks_of",
    "needs_of",
    "parse",
    "pointers_of",
    "remedies_of",
    "remedy_of",
    "require_target",
    "run",
    "size_of",
    "statements_of",
    "watch_launches",
]
