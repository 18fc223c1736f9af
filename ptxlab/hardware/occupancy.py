"""Occupancy: how many blocks of a kernel an SM holds at once, and what limits them.

CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", has the limits; registers are given to
warps in units of 256, and a warp's lie in one of the four quarters of an SM. A test on a GPU asks CUDA for the same.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.validate import require_integer

_REGISTERS, _QUARTERS, _UNIT = 65536, 4, 256  # of an SM; of a warp in multiples of the unit
_MAX_THREADS, _MAX_REGISTERS = 1024, 255  # of a block, of a thread


class _SM(NamedTuple):
    """Limits of an SM: blocks, warps, bytes of shared memory; what a block's bytes are rounded up to, and reserved."""

    blocks: int
    warps: int
    shared: int
    unit: int = 128
    reserved: int = 1024


_SMS = {
    75: _SM(16, 32, 64 << 10, 256, 0),
    80: _SM(32, 64, 164 << 10),
    86: _SM(16, 48, 100 << 10),
    89: _SM(24, 48, 100 << 10),
    90: _SM(32, 64, 228 << 10),
    100: _SM(32, 64, 228 << 10),
    120: _SM(24, 48, 100 << 10),
}


@dataclass(frozen=True)
class Occupancy:
    """Blocks of a kernel that an SM holds at once, and what limits them.

    Attributes:
        blocks: so many; 0 where one does not fit.
        warps: of these blocks.
        most_warps: that an SM holds of any kernel.
        limits: what allows no more blocks: `registers`, `shared memory`, `warps`, `blocks`.
    """

    blocks: int
    warps: int
    most_warps: int
    limits: tuple[str, ...]


def occupancy(arch: str, threads: int, registers: int, shared: int = 0) -> Occupancy:
    """Return the occupancy of blocks of so many threads on an architecture.

    Args:
        arch: such as `sm_90a`.
        threads: of a block, 1 to 1,024.
        registers: of a thread, as the kernel is launched.
        shared: bytes of shared memory of a block, static and dynamic.

    Raises ArgumentError for a number out of range, or an architecture whose limits are not known here.
    """
    number = int(re.sub(r"\D", "", arch) or 0)
    if number not in _SMS:
        names = ", ".join(f"sm_{arch_number}" for arch_number in _SMS)
        raise ArgumentError("arch", f"must be one of {names} for its occupancy", arch)
    for name, count, most_per_block in (("threads", threads, _MAX_THREADS), ("registers", registers, _MAX_REGISTERS)):
        require_integer(name, count, 1)
        if count > most_per_block:
            raise ArgumentError(name, f"must be at most {most_per_block}", count)
    require_integer("shared", shared)
    sm, warps = _SMS[number], ceil_div(threads, 32)
    warp_registers = ceil_div(registers * 32, _UNIT) * _UNIT
    with_registers = _REGISTERS // _QUARTERS // warp_registers * _QUARTERS
    block_bytes = ceil_div(shared + sm.reserved, sm.unit) * sm.unit
    blocks = {
        "registers": with_registers // warps,
        "shared memory": sm.shared // block_bytes if block_bytes else sm.blocks,
        "warps": sm.warps // warps,
        "blocks": sm.blocks,
    }
    fewest = min(blocks.values())
    return Occupancy(fewest, fewest * warps, sm.warps, tuple(name for name, count in blocks.items() if count == fewest))
