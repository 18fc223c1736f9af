"""Runs PTX on the CPU, and checks what a GPU would not: packed lanes, races, uninitialised reads.

`parse` (over `tokens`, `declare` and `operands`) makes `ir` of a text. `launch` lays out `memory` and runs the grid
as waves of blocks; a `machine` is a `wave` that runs. What instructions do stands in tables: register to register in
`integer`, `bits`, `floating` (over `rounding`), `convert` and `video`, entered into `alu`; everything else, entered
with `machine.binder` and held against ptxas's rules by `kinds`, in `control`, `access`, `atomic`, `sync`,
`collective`, `matrix`, `maxnreg`, `mma`, `mbarrier`, `clusters` (over `peers`), `copies` (over `bulk`), `remote` and
`wgmma`. What the last three ask for are `effects`, which wait in `pending`.

`check`, `packed`, `initialised`, `race`, `guests`, `inflight`, `registers`, `divergence` (over `flow`), `wavefronts`
and `stepclock` watch; `order` (over `clocks`) tells them what lies before what, `followed` whether anything depends on
a load; `standstill` finds out that nothing happens any more.
"""

from ptxlab.emulator.arguments import CHECKS, MAX_STEPS, MODES, size_of
from ptxlab.emulator.check import Finding
from ptxlab.emulator.ir import Entry, Instruction, Module
from ptxlab.emulator.launch import Result, run
from ptxlab.emulator.packed import LaneType, PackedOperand
from ptxlab.emulator.parse import parse
from ptxlab.emulator.wavefronts import SharedAccess

__all__ = [
    "CHECKS",
    "MAX_STEPS",
    "MODES",
    "Entry",
    "Finding",
    "Instruction",
    "LaneType",
    "Module",
    "PackedOperand",
    "Result",
    "SharedAccess",
    "parse",
    "run",
    "size_of",
]
