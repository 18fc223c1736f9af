"""Loads, stores and atomics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ptxlab.emulator import ir
from ptxlab.emulator.alu import UnknownOpcode
from ptxlab.emulator.ir import Instruction
from ptxlab.emulator.kinds import refuse_specials, require_kinds
from ptxlab.emulator.machine import Machine, Step, binder
from ptxlab.emulator.memory import BASE, Region
from ptxlab.emulator.types import DTYPES, Array, Lanes, bits_of, count_of, indices_of, is_signed
from ptxlab.emulator.wave import SHARED_START
from ptxlab.errors import ArgumentError, MemoryFault

SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry")
ORDERS = ("weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio")
SCOPES = ("cta", "cluster", "gpu", "sys")
# They steer caches, not results.
HINTS = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified", "noftz")

Sizes = int | Array  # of accesses: of all, or of each
Locate = Callable[..., Array]  # lanes[, sizes]


@dataclass(frozen=True)
class Access:
    """One memory instruction, as the watchers see it: `size` bytes per lane."""

    instruction: Instruction
    kind: str  # "load", "store" or "atomic"
    space: str  # "generic" where the opcode names none
    order: str
    type: str
    count: int  # elements of a vector access
    rest: tuple[str, ...]  # modifiers that are left: the operation of an atomic

    @cached_property
    def size(self) -> int:
        """Bytes that a lane touches."""
        return bits_of(self.type) // 8 * self.count


def decode(instruction: Instruction, kind: str) -> Access:
    """Sort the modifiers of a memory opcode."""
    space, order, count, rest = "generic", "weak" if kind != "atomic" else "relaxed", 1, []
    *modifiers, t = instruction.opcode.split(".")[1:]
    for word in modifiers:
        if word in SPACES:
            space = word if word == "shared::cluster" else word.split("::")[0]
        elif word in ORDERS:
            order = word
        elif word in ("v2", "v4", "v8"):
            count = int(word[1])
        elif word not in SCOPES and word not in HINTS and not word.startswith(("L1::", "L2::")):
            rest.append(word)
    if t not in DTYPES or t == "pred" or (rest and kind != "atomic"):
        raise UnknownOpcode(instruction.opcode)
    return Access(instruction, kind, space, order, t, count, tuple(rest))


def locator(machine: Machine, access: Access, address: ir.Operand) -> Locate:
    """Function lanes -> arena offsets (int64, one per lane), checked for alignment and bounds.

    Its second argument, the bytes that each lane touches, may differ from the access's size, by which they are aligned.
    """
    if not isinstance(address, ir.Address) or address.coordinates:
        raise ValueError("the operand is not an address")
    base, space = address.base, access.space
    if isinstance(base, ir.Symbol) and base.variable.space in ("shared", "local"):
        space = base.variable.space  # where the opcode says nothing; or .param, which in a body is a call's
    if isinstance(base, ir.Symbol):
        named, own = access.space.split("::")[0], base.variable.space
        if named not in (own, "generic") and (named, own) != ("param", "local"):
            raise ValueError(f"{base.variable.name} lies in .{own}, the instruction goes to .{named}")
    wide = not (isinstance(base, ir.Register) and bits_of(base.type) == 32)
    read = machine.reader(base, "u64" if wide else "u32")
    windows = {"shared": machine.shared_base, "local": machine.local_base}.get(space.split("::")[0])
    shift, size = address.offset - (BASE if windows is None else 0), access.size

    def addresses(lanes: Lanes) -> Array:
        values = read(lanes)
        offsets = (values.view(np.int64) if wide else values.astype(np.int64)) + shift
        return offsets if len(offsets) == count_of(lanes) else np.broadcast_to(offsets, (count_of(lanes),))

    def check_alignment(lanes: Lanes, offsets: Array) -> None:
        if np.bitwise_or.reduce(offsets) & (size - 1):
            first = int(np.argmax(offsets & (size - 1) != 0))
            where = machine.fault_place(access.instruction, indices_of(lanes)[first])
            value = int(offsets[first]) + (BASE if windows is None else 0)
            raise MemoryFault(f"{where}: address {value:#x} is not a multiple of the {size} bytes accessed")

    def in_window(lanes: Lanes, sizes: Sizes = size) -> Array:
        offsets, base = addresses(lanes), windows
        check_alignment(lanes, offsets)
        assert base is not None
        far = space == "shared::cluster" and machine.peers.is_far(offsets)
        if far:
            blocks, offsets = machine.peers.resolve(access.instruction, lanes, offsets)
        start = 0 if space == "local" else SHARED_START
        end = start + (machine.launch.entry.local_bytes if space == "local" else machine.launch.window_bytes)
        if int(offsets.min()) < start or furthest(offsets, sizes) > end:
            first = int(np.argmax((offsets < start) | (offsets + sizes > end)))
            where = machine.fault_place(access.instruction, indices_of(lanes)[first])
            place = f"{size_at(sizes, first)} bytes at {space.split('::')[0]} address {int(offsets[first]) - start}"
            raise MemoryFault(f"{where}: {place} (window of {end - start} bytes) are out of bounds")
        return machine.peers.windows[blocks] - SHARED_START + offsets if far else base[lanes] + offsets

    def anywhere(lanes: Lanes, sizes: Sizes = size) -> Array:
        offsets = addresses(lanes)
        check_alignment(lanes, offsets)
        end = furthest(offsets, sizes)
        region = machine.memory.touched(offsets, end)
        if region is not None:
            regions = [region]
        else:
            outside, regions = machine.memory.touch_each(offsets, sizes)
            if outside.any():
                first = int(np.argmax(outside))
                where = machine.fault_place(access.instruction, indices_of(lanes)[first])
                described = machine.memory.describe(int(offsets[first]), size_at(sizes, first))
                raise MemoryFault(f"{where}: {size_at(sizes, first)} bytes at {described}, are out of bounds")
        if end > machine.peers.first_window:  # shared memory lies behind all buffers
            machine.peers.check_generic(access.instruction, lanes, offsets)
        if access.kind != "load":
            for region in regions:
                mark_written(machine, access, lanes, region)
        return offsets

    return anywhere if windows is None else in_window


def furthest(offsets: Array, sizes: Sizes) -> int:
    """Where the last access ends."""
    return int(offsets.max()) + sizes if isinstance(sizes, int) else int((offsets + sizes).max())


def size_at(sizes: Sizes, index: int) -> int:
    """The size of one access."""
    return sizes if isinstance(sizes, int) else int(sizes[index])


def mark_written(machine: Machine, access: Access, lanes: Lanes, region: Region) -> None:
    """A store to the region: remember it, or refuse."""
    if not region.writable:
        if region.name.startswith("argument"):
            raise ArgumentError(region.name, "has to be writeable, the kernel stores to it", "a read-only array")
        raise MemoryFault(f"{machine.place(access.instruction, lanes)}: {region.name} is read-only")
    region.written = True


def elements(operand: ir.Operand, count: int) -> tuple:
    """The registers of a vector operand."""
    items = operand.items if isinstance(operand, ir.Vector) else (operand,)
    if len(items) != count:
        raise ValueError(f"{len(items)} registers for {count} elements")
    return items


def _without_policy(instruction: Instruction) -> tuple:
    """The two operands of a load or store; a third is a policy, which steers a cache."""
    may = 3 if instruction.opcode.startswith("ld") or "L2::cache_hint" in instruction.opcode else 2
    if len(instruction.operands) > may:
        raise ValueError(f"{instruction.opcode} takes {may} operands, not {len(instruction.operands)}")
    return instruction.operands[:2]


@binder("ld", "ldu")
def _load(machine: Machine, instruction: Instruction, pc: int) -> Step:
    access = decode(instruction, "load")
    target, address = _without_policy(instruction)
    # as bits, so that no NaN is touched, but with the sign that extends
    bits = bits_of(access.type)
    t = f"{'s' if is_signed(access.type) else 'u'}{bits}"
    if isinstance(target, ir.Sink):
        raise ValueError("the result cannot be discarded")
    require_kinds(items := elements(target, access.count), [access.type] * access.count)
    writers = [machine.writer(item, t, relaxed=True) for item in items]
    locate = locator(machine, access, address)
    view = machine.memory.arena.view(DTYPES[t])
    watchers, size = machine.watchers, access.size
    if (
        access.space == "param" and isinstance(address.base, ir.Symbol) and address.base.variable.space == "param"
    ):  # the same for every lane, for the whole launch
        offset = int(locate(slice(0, 1))[0]) // (bits // 8)
        constants = [view[offset + i : offset + i + 1].copy() for i in range(access.count)]

        def load_param(lanes: Lanes) -> None:
            for write, value in zip(writers, constants, strict=True):
                write(lanes, value)

        return load_param
    if access.count == 1:
        write, shift = writers[0], size.bit_length() - 1

        def load(lanes: Lanes) -> None:
            offsets = locate(lanes)
            for watcher in watchers:
                watcher.load(access, lanes, offsets)
            write(lanes, view[offsets >> shift])

        return load
    rows = view.reshape(-1, access.count)

    def load_vector(lanes: Lanes) -> None:
        offsets = locate(lanes)
        for watcher in watchers:
            watcher.load(access, lanes, offsets)
        values = rows[offsets // size]
        for i, write in enumerate(writers):
            write(lanes, values[:, i])

    return load_vector


@binder("prefetch")
def _prefetch(machine: Machine, instruction: Instruction, pc: int) -> Step:
    """A hint, that moves nothing; but what it names has to be there."""
    if "global" not in instruction.opcode.split("."):
        return lambda lanes: None
    locate = locator(machine, Access(instruction, "load", "global", "weak", "b8", 1, ()), instruction.operands[0])

    def prefetch(lanes: Lanes) -> None:
        locate(lanes)

    return prefetch


@binder("st")
def _store(machine: Machine, instruction: Instruction, pc: int) -> Step:
    access = decode(instruction, "store")
    address, source = _without_policy(instruction)
    t = f"u{bits_of(access.type)}"
    refuse_specials(items := elements(source, access.count))
    require_kinds(items, [access.type] * access.count)
    readers = [machine.reader(item, t, relaxed=True) for item in items]
    locate = locator(machine, access, address)
    view = machine.memory.arena.view(DTYPES[t])
    watchers, size = machine.watchers, access.size
    rows = view.reshape(-1, access.count) if access.count > 1 else view

    def store(lanes: Lanes) -> None:
        offsets = locate(lanes)
        if len(readers) == 1:
            values = readers[0](lanes)
        else:
            values = np.stack(np.broadcast_arrays(*[read(lanes) for read in readers]), axis=1)
        for watcher in watchers:
            watcher.store(access, lanes, offsets, values)
        rows[offsets // size] = values

    return store if access.order == "weak" else machine.in_parts(store, pc)
