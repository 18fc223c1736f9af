"""Moves between registers, control flow, and addresses."""

import numpy as np

from ptxlab.emulator.core.lanes import Handler, Lanes, Successors, as_lanes, count_of, indices_of
from ptxlab.emulator.core.machine import Machine, binder
from ptxlab.emulator.core.memory import BASE, SHARED_START
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction, Operand
from ptxlab.emulator.front.opcode import UnknownOpcode
from ptxlab.emulator.front.operand_rules import check_special, require_kinds
from ptxlab.emulator.front.types import DTYPES, bits_of, is_float
from ptxlab.errors import EmulationError


@binder("mov")
def _move(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    parts = instruction.opcode.split(".")
    t = parts[-1]
    if len(parts) != 2 or (t not in DTYPES):
        raise UnknownOpcode(instruction.opcode)
    target, source = instruction.operands
    require_kinds((target, source), (t, t))
    if isinstance(source, ir.Special):
        check_special(source, bits_of(t))
    t = t if t == "pred" or is_float(t) else f"u{bits_of(t)}"
    if isinstance(source, ir.Vector):
        return _pack(machine, target, source.elements, bits_of(t))
    if isinstance(target, ir.Vector):
        return _unpack(machine, target.elements, source, bits_of(t))
    write, read = machine.writer(target, t), machine.reader(source, t)
    return lambda lanes: write(lanes, read(lanes))


def _pack(machine: Machine, target: Operand, elements: ir.Operands, bits: int) -> Handler:
    part = bits // len(elements)
    write = machine.writer(target, f"u{bits}")
    readers = [machine.reader(element, f"u{part}") for element in elements]

    def pack(lanes: Lanes) -> None:
        columns = np.broadcast_arrays(*[read(lanes) for read in readers])
        write(lanes, np.stack(columns, axis=1).view(f"u{bits // 8}")[:, 0])

    return pack


def _unpack(machine: Machine, elements: ir.Operands, source: Operand, bits: int) -> Handler:
    part = bits // len(elements)
    read = machine.reader(source, f"u{bits}")
    writers = [machine.writer(element, f"u{part}") for element in elements]

    def unpack(lanes: Lanes) -> None:
        columns = np.ascontiguousarray(read(lanes)).view(f"u{part // 8}").reshape(-1, len(writers)).copy()
        for i, write in enumerate(writers):
            write(lanes, columns[:, i])

    return unpack


@binder("bra")
def _branch(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    (target,) = instruction.operands
    if not isinstance(target, ir.Label):
        raise ValueError("bra takes a label")
    return lambda lanes: [(target.index, lanes)]


@binder("brx")
def _branch_by_index(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    index, targets = instruction.operands
    if not isinstance(targets, ir.Vector):
        raise ValueError("brx.idx takes a list of targets")
    places, read = np.array([target.index for target in targets.elements]), machine.reader(index, "u32")

    def branch(lanes: Lanes) -> Successors:
        chosen = np.broadcast_to(read(lanes), (count_of(lanes),))
        if int(chosen.max()) >= len(places):
            place = machine.place(instruction, lanes)
            raise EmulationError(f"{place}: index {int(chosen.max())} of {len(places)} targets")
        indices = indices_of(lanes)
        return [(int(place), as_lanes(indices[places[chosen] == place])) for place in np.unique(places[chosen])]

    return branch


@binder("ret", "exit")
def _return(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    if instruction.operands:
        raise ValueError(f"{instruction.opcode} takes no operands")

    def end(lanes: Lanes) -> Successors:
        machine.end(lanes)
        return []

    return end


@binder("cvta")
def _convert_address(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    parts = instruction.opcode.split(".")
    t, to_generic, space = f"u{parts[-1][1:]}", "to" in parts, parts[-2]
    target, source = instruction.operands
    require_kinds((target, source), (t, t))
    write, read = machine.writer(target, t), machine.reader(source, t)
    if space in ("shared", "shared::cta", "local"):
        base = (machine.local_base if space == "local" else machine.shared_base) + BASE
        sign = -1 if to_generic else 1
        row = (sign * base).astype(DTYPES[t])
        return lambda lanes: write(lanes, read(lanes) + row[lanes])
    if space == "shared::cluster" and t == "u64":
        peers = machine.cluster_memory

        def convert(lanes: Lanes) -> None:
            addresses = np.broadcast_to(read(lanes).view(np.int64), (count_of(lanes),))
            converted_addresses = (
                peers.from_generic(lanes, addresses) if to_generic else peers.to_generic(instruction, lanes, addresses)
            )
            write(lanes, converted_addresses.astype(np.uint64))

        return convert
    # LLVM takes such an address in 32 bits and widens it (Triton 3.9).
    if space == "param" and not to_generic and t == "u64":
        return lambda lanes: write(lanes, read(lanes) | np.uint64(BASE))
    if space in ("global", "const", "param"):
        return lambda lanes: write(lanes, read(lanes))
    raise UnknownOpcode(instruction.opcode)


@binder("isspacep")
def _is_space(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    space = instruction.opcode.split(".")[1]
    write, read = machine.writer(instruction.operands[0], "pred"), machine.reader(instruction.operands[1], "u64")

    def is_space(lanes: Lanes) -> None:
        offsets = read(lanes).view(np.int64) - BASE
        shared_offsets = offsets - machine.shared_base[lanes] - SHARED_START
        is_in_shared = (shared_offsets >= 0) & (shared_offsets < machine.launch.window_bytes)
        local_offsets = offsets - machine.launch.local_window
        is_in_local = (local_offsets >= 0) & (local_offsets < machine.launch.local_pitch * machine.lanes)
        peers, blocks = machine.cluster_memory, machine.cluster_memory.block_at(offsets)
        is_in_cluster = (blocks >= 0) & (blocks // peers.size == peers.block[lanes] // peers.size)
        spaces = {
            "shared": is_in_shared,
            "shared::cta": is_in_shared,
            "shared::cluster": is_in_cluster,
            "local": is_in_local,
            "global": (blocks < 0) & ~is_in_local,
        }
        write(lanes, spaces.get(space, np.zeros_like(is_in_shared)))

    return is_space


@binder("nanosleep", "prefetchu", "discard", "applypriority", "pmevent")
def _bind_hint(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    return lambda lanes: None


@binder("createpolicy")
def _policy(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    """Bind createpolicy, which writes a number as cache policy.

    Only accesses with `.L2::cache_hint` understand it; nothing here depends on it.
    """
    if instruction.opcode.split(".")[1:2] not in (["fractional"], ["range"], ["cvt"]):
        raise UnknownOpcode(instruction.opcode)
    write = machine.writer(instruction.operands[0], "b64")
    return lambda lanes: write(lanes, np.full(count_of(lanes), 1 << 52, np.uint64))


@binder("griddepcontrol")
def _grid_dependency(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    """Bind griddepcontrol.

    Launches run one after the other: the grid before this one has always ended, as far as memory tells (`chain`).
    """
    if instruction.opcode == "griddepcontrol.launch_dependents":
        return lambda lanes: None
    if instruction.opcode != "griddepcontrol.wait":
        raise UnknownOpcode(instruction.opcode)

    def wait(lanes: Lanes) -> None:
        machine.launch.wait_for_predecessors()
        for watcher in machine.watchers:
            watcher.wait_for_predecessors(lanes)

    return wait
