"""Address operands -> places in the arena, checked for alignment and bounds."""

from collections.abc import Callable

import numpy as np

from ptxlab.emulator.core.access import AccessSizes, MemoryAccess
from ptxlab.emulator.core.lanes import Lanes, count_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.core.memory import BASE, SHARED_START, Region
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.types import Array, bits_of
from ptxlab.errors import ArgumentError, MemoryFault

Locate = Callable[..., Array]  # lanes[, sizes]


def locator(machine: Machine, access: MemoryAccess, address: ir.Operand) -> Locate:
    """Build a function lanes -> arena offsets (int64, one per lane) that checks their alignment and bounds.

    Its second argument, the bytes that each lane touches, may differ from the access's size, by which they are aligned.
    """
    if not isinstance(address, ir.Address) or address.coordinates:
        raise ValueError("the operand is not an address")
    base, space = address.base, access.space
    if isinstance(base, ir.Symbol) and base.variable.space in ("shared", "local"):
        space = base.variable.space  # where the opcode says nothing; or .param, which in a body is a call's
    if isinstance(base, ir.Symbol):
        named_space, declared_space = access.space.split("::")[0], base.variable.space
        if named_space not in (declared_space, "generic") and (named_space, declared_space) != ("param", "local"):
            raise ValueError(f"{base.variable.name} lies in .{declared_space}, the instruction goes to .{named_space}")
    is_wide = not (isinstance(base, ir.Register) and bits_of(base.type) == 32)
    read = machine.reader(base, "u64" if is_wide else "u32")
    windows = {"shared": machine.shared_base, "local": machine.local_base}.get(space.split("::")[0])
    shift, size = address.offset - (BASE if windows is None else 0), access.size
    shift = (shift + (1 << 63)) % (1 << 64) - (1 << 63)  # addresses wrap at 64 bits
    parameters = first_parameter(machine) if space.startswith("param") and not is_wide else None

    def addresses(lanes: Lanes) -> Array:
        register_values = read(lanes)
        if parameters is not None:  # whose addresses have 32 bits: by how much one lies behind the first
            distance = (register_values - np.uint32(parameters & 0xFFFFFFFF)).view(np.int32)
            return np.broadcast_to(distance + np.int64(parameters + shift), (count_of(lanes),))
        offsets = (register_values.view(np.int64) if is_wide else register_values.astype(np.int64)) + shift
        return offsets if len(offsets) == count_of(lanes) else np.broadcast_to(offsets, (count_of(lanes),))

    def check_alignment(lanes: Lanes, offsets: Array) -> None:
        if np.bitwise_or.reduce(offsets) & (size - 1):
            first, place = machine.first_fault(access.instruction, lanes, offsets & (size - 1) != 0)
            address = int(offsets[first]) + (BASE if windows is None else 0)
            raise MemoryFault(f"{place}: address {address:#x} is not a multiple of the {size} bytes accessed")

    def in_window(lanes: Lanes, sizes: AccessSizes = size) -> Array:
        offsets, base = addresses(lanes), windows
        check_alignment(lanes, offsets)
        assert base is not None
        is_far = space == "shared::cluster" and machine.cluster_memory.is_far(offsets)
        if is_far:
            blocks, offsets = machine.cluster_memory.resolve(access.instruction, lanes, offsets)
        start = 0 if space == "local" else SHARED_START
        window_end = start + (machine.launch.entry.local_bytes if space == "local" else machine.launch.window_bytes)
        if int(np.minimum.reduce(offsets)) < start or end_of_accesses(offsets, sizes) > window_end:
            first, fault = machine.first_fault(
                access.instruction, lanes, (offsets < start) | (offsets + sizes > window_end)
            )
            place = f"{size_at(sizes, first)} bytes at {space.split('::')[0]} address {int(offsets[first]) - start}"
            explanation = machine.cluster_memory.explain_address(int(offsets[first])) if space != "local" else ""
            raise MemoryFault(f"{fault}: {place} (window of {window_end - start} bytes) are out of bounds{explanation}")
        return machine.cluster_memory.windows[blocks] - SHARED_START + offsets if is_far else base[lanes] + offsets

    def in_arena(lanes: Lanes, sizes: AccessSizes = size) -> Array:
        offsets = addresses(lanes)
        check_alignment(lanes, offsets)
        end = end_of_accesses(offsets, sizes)
        region = machine.memory.touched_region(offsets, end)
        if region is not None:
            regions = [region]
        else:
            is_outside, regions = machine.memory.touch_each(offsets, sizes)
            if is_outside.any():
                first, fault = machine.first_fault(access.instruction, lanes, is_outside)
                description = machine.memory.describe(int(offsets[first]), size_at(sizes, first))
                raise MemoryFault(f"{fault}: {size_at(sizes, first)} bytes at {description}, are out of bounds")
        if end > machine.cluster_memory.first_window:  # shared memory lies behind all buffers
            machine.cluster_memory.check_generic(access.instruction, lanes, offsets)
        if access.kind != "load":
            for region in regions:
                mark_written(machine, access, lanes, region)
        return offsets

    return in_arena if windows is None else in_window


def first_parameter(machine: Machine) -> int:
    """Return the address of the kernel's parameters."""
    launch = machine.launch
    return min((launch.addresses[id(param)] for param in launch.entry.params), default=0)


def end_of_accesses(offsets: Array, sizes: AccessSizes) -> int:
    """Return the offset at which the last of the accesses ends."""
    return int(np.maximum.reduce(offsets)) + sizes if isinstance(sizes, int) else int((offsets + sizes).max())


def size_at(sizes: AccessSizes, index: int) -> int:
    """Return the size of the access at an index, in bytes."""
    return sizes if isinstance(sizes, int) else int(sizes[index])


def mark_written(machine: Machine, access: MemoryAccess, lanes: Lanes, region: Region) -> None:
    """Record that a store writes to the region, or raise if the region is read-only."""
    if not region.writable:
        if region.name.startswith("argument"):
            raise ArgumentError(region.name, "has to be writeable, the kernel stores to it", "a read-only array")
        raise MemoryFault(f"{machine.place(access.instruction, lanes)}: {region.name} is read-only")
    region.written = True


def elements(operand: ir.Operand, count: int) -> ir.Operands:
    """Return the registers of a vector operand; raise ValueError unless there are `count`."""
    registers = operand.elements if isinstance(operand, ir.Vector) else (operand,)
    if len(registers) != count:
        raise ValueError(f"{len(registers)} registers for {count} elements")
    return registers
