"""The check "overrun": accesses by the address of one array in shared memory that reach another.

The bounds that every run checks are those of the block's whole shared memory. The arrays in it are variables of the
PTX; how they lie is nobody's promise. An access is followed to the one array that its address comes from
(`front.pointer_accesses`).
"""

import numpy as np

from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.effect import Effect
from ptxlab.emulator.core.lanes import Lanes, as_lanes, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.pointer_accesses import shared_arrays_of
from ptxlab.emulator.front.types import Array


class SharedArrays(Check):
    """Check for shared-memory accesses outside the array that their address is computed from."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        code = machine.code
        self.arrays = {id(code[index]): array for index, array in shared_arrays_of(machine.launch.entry).items()}

    def load(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Check reads."""
        self.check_bounds(access.instruction, "reads", lanes, offsets, access.size)

    def store(self, access: MemoryAccess, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Check writes."""
        self.check_bounds(access.instruction, "writes", lanes, offsets, access.size)

    def atomic(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Check atomics."""
        self.check_bounds(access.instruction, "changes", lanes, offsets, access.size)

    def issue(self, effect: Effect) -> None:
        """Check what `cp.async` writes."""
        lanes, starts, sizes = effect.writes
        if effect.kind == "cp.async" and len(lanes):
            self.check_bounds(effect.instruction, "copies to", as_lanes(lanes), starts, sizes)

    def check_bounds(
        self, instruction: Instruction, does: str, lanes: Lanes, offsets: Array, sizes: int | Array
    ) -> None:
        """Report lanes that leave the array for another place of the same block's shared memory."""
        array = self.arrays.get(id(instruction))
        if array is None:
            return
        starts = offsets - self.machine.cluster_memory.windows[indices_of(lanes) // self.machine.stride]
        bytes_past_end = starts + sizes - (array.offset + array.size)
        is_outside = (starts < array.offset) | (bytes_past_end > 0)
        is_outside &= (starts >= 0) & (starts < self.machine.launch.window_bytes)  # a peer's is elsewhere
        if is_outside.any():
            first = int(np.argmax(is_outside))
            distance_text = (
                f"{bytes_past_end[first]} bytes past its end"
                if bytes_past_end[first] > 0
                else "ahead of its first byte"
            )
            place = self.machine.memory.name_byte(int(offsets[first]))
            message = f"{does} {place} by an address of {array.name} ({array.size} bytes), {distance_text},"
            self.report(instruction, "overrun", lanes, is_outside, message)
