"""Operations of a warp: shuffles, votes, matches, reductions."""

from functools import reduce

import numpy as np

from ptxlab.emulator.core.lanes import Handler, Lanes, Writer, indices_of
from ptxlab.emulator.core.machine import Machine, binder
from ptxlab.emulator.core.warp import bind_collective, pack_bits
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, Array
from ptxlab.emulator.ops.alu import COMBINE
from ptxlab.emulator.ops.floating import canonical, choose_extreme


def operands_of(instruction: Instruction, count: int) -> tuple[ir.Operand, ...]:
    """Return an instruction's operands; raise ValueError unless there are `count`."""
    if len(instruction.operands) != count:
        raise ValueError(f"{instruction.opcode} takes {count} operands, not {len(instruction.operands)}")
    return instruction.operands


def writers_of(machine: Machine, target: ir.Operand) -> tuple[Writer, Writer]:
    """Build the writers of the register and the predicate of a destination `d|p`, which may be without the latter."""
    if not isinstance(target, ir.Vector):
        return machine.writer(target, "u32"), machine.writer(ir.Sink(), "pred")
    if not target.pair:
        raise ValueError("the destination has to be a register, or a register and a predicate, d|p")
    register, predicate = target.elements
    return machine.writer(register, "u32"), machine.writer(predicate, "pred")


def ballots(machine: Machine, lanes: Lanes, flags: Array) -> Array:
    """Return, for each of the lanes, the bits of its warp's lanes where the flag is set."""
    votes = np.zeros(machine.lanes, bool)
    votes[lanes] = flags
    ballot_bits: Array = pack_bits(votes)[indices_of(lanes) // 32]
    return ballot_bits


@binder("shfl")
def _shuffle(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    modifiers = instruction.opcode.split(".")[1:]
    is_sync = modifiers[:1] == ["sync"]
    mode, t, *extra_modifiers = (*modifiers[is_sync:], "", "")
    if mode not in ("up", "down", "bfly", "idx") or t != "b32" or any(extra_modifiers):
        raise UnknownOpcode(instruction.opcode)
    target, source, *lane_operands = operands_of(instruction, 4 + is_sync)
    write, write_predicate = writers_of(machine, target)
    read, read_b, read_c = (machine.reader(operand, "u32") for operand in (source, *lane_operands[:2]))
    all_lanes, watchers = slice(0, machine.lanes), machine.watchers

    def apply(lanes: Lanes, members: Array) -> None:
        indices = indices_of(lanes)
        lane = indices % 32
        b, c = read_b(lanes).astype(np.int64) & 31, read_c(lanes).astype(np.int64)
        segment, clamp = c >> 8 & 31, c & 31
        last = (lane & segment) | (clamp & ~segment)
        if mode == "up":
            source_lane = lane - b
            is_inside = source_lane >= last
        else:
            source_lane = {"down": lane + b, "bfly": lane ^ b, "idx": (lane & segment) | (b & ~segment)}[mode]
            is_inside = source_lane <= last
        values, valid_lane = np.broadcast_to(read(all_lanes), (machine.lanes,)), np.where(is_inside, source_lane, lane)
        for watcher in watchers:
            watcher.exchange(instruction, lanes, valid_lane, members)
        write(lanes, values[indices - lane + valid_lane])
        write_predicate(lanes, is_inside)

    return bind_collective(machine, pc, lane_operands[2] if is_sync else None, apply)


@binder("vote")
def _vote(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    modifiers = instruction.opcode.split(".")[1:]
    is_sync = modifiers[:1] == ["sync"]
    mode, t, *extra_modifiers = (*modifiers[is_sync:], "", "")
    if (mode, t) not in (("ballot", "b32"), ("all", "pred"), ("any", "pred"), ("uni", "pred")) or any(extra_modifiers):
        raise UnknownOpcode(instruction.opcode)
    target, source, *mask = operands_of(instruction, 2 + is_sync)
    write = machine.writer(target, "u32" if mode == "ballot" else "pred")
    read = machine.reader(source, "pred")

    def apply(lanes: Lanes, members: Array) -> None:
        votes = ballots(machine, lanes, read(lanes)) & members
        results_by_mode = {
            "ballot": votes,
            "all": votes == members,
            "any": votes != 0,
            "uni": (votes == 0) | (votes == members),
        }
        write(lanes, results_by_mode[mode])

    return bind_collective(machine, pc, mask[0] if is_sync else None, apply)


@binder("activemask")
def _active(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    if instruction.opcode != "activemask.b32":
        raise UnknownOpcode(instruction.opcode)
    (target,) = operands_of(instruction, 1)
    write = machine.writer(target, "u32")
    return lambda lanes: write(lanes, ballots(machine, lanes, np.array([True])))


def member_matrix(members: Array) -> Array:
    """Unpack masks u32 [n] to bool [n, 32]."""
    is_member: Array = members[:, None] >> np.arange(32, dtype=np.uint32) & np.uint32(1) != 0
    return is_member


IDENTITY = {"add": 0, "or": 0, "xor": 0, "and": -1, "min": np.iinfo(np.int64).max, "max": np.iinfo(np.int64).min}


@binder("redux")
def _reduce(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    opcode = Opcode(instruction.opcode)
    name, t = opcode.choice(*IDENTITY), opcode.type("u32", "s32", "b32", "f32")
    is_float_reduction, magnitude, nan = t == "f32", opcode.flag("abs"), opcode.flag("NaN")
    if not opcode.flag("sync") or opcode.modifiers or (magnitude or nan) > is_float_reduction:
        raise UnknownOpcode(instruction.opcode)
    if is_float_reduction and name not in ("min", "max"):
        raise UnknownOpcode(instruction.opcode)
    target, source, mask = operands_of(instruction, 3)
    write, read = machine.writer(target, t), machine.reader(source, t)
    choose = choose_extreme(name == "min", nan)
    infinity = np.inf if name == "min" else -np.inf
    neutral_value = IDENTITY[name] if not is_float_reduction else infinity if nan else np.nan

    def fold(rows: Array) -> Array:
        """Reduce rows [lanes, 32] to what each lane gets."""
        if is_float_reduction:
            return canonical(reduce(choose, rows.T).astype(np.float32), t)
        warp_values: Array = COMBINE[name].reduce(rows, axis=1).astype(DTYPES[t])
        return warp_values

    def apply(lanes: Lanes, members: Array) -> None:
        values = np.zeros(machine.lanes, np.float64 if is_float_reduction else np.int64)
        values[lanes] = np.abs(read(lanes)) if magnitude else read(lanes)
        rows = values.reshape(-1, 32)[indices_of(lanes) // 32]
        write(lanes, fold(np.where(member_matrix(members), rows, neutral_value)))

    return bind_collective(machine, pc, mask, apply)


@binder("match")
def _match(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    _, mode, sync_word, t = (*instruction.opcode.split("."), "", "", "")[:4]
    if sync_word != "sync" or mode not in ("any", "all") or t not in ("b32", "b64"):
        raise UnknownOpcode(instruction.opcode)
    target, source, mask = operands_of(instruction, 3)
    write, write_predicate = writers_of(machine, target)
    if mode == "any" and isinstance(target, ir.Vector):
        raise ValueError("match.any has no predicate")
    read = machine.reader(source, t)

    def apply(lanes: Lanes, members: Array) -> None:
        values = np.zeros(machine.lanes, DTYPES[t])
        values[lanes] = read(lanes)
        own_values = values[lanes]
        equal = (values.reshape(-1, 32)[indices_of(lanes) // 32] == own_values[:, None]) & member_matrix(members)
        matching = np.packbits(equal, axis=1, bitorder="little").view(np.uint32)[:, 0]
        matches_all = matching == members
        write(lanes, matching if mode == "any" else np.where(matches_all, members, 0))
        write_predicate(lanes, matches_all)

    return bind_collective(machine, pc, mask, apply)


@binder("elect")
def _elect(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    if instruction.opcode != "elect.sync":
        raise UnknownOpcode(instruction.opcode)
    target, mask = operands_of(instruction, 2)
    write, write_predicate = writers_of(machine, target)
    if not isinstance(target, ir.Vector) or isinstance(target.elements[1], ir.Sink):
        raise ValueError("the destination has to be a register, or _, and a predicate: d|p")

    def apply(lanes: Lanes, members: Array) -> None:
        leader = np.argmax(member_matrix(members), axis=1)
        write(lanes, leader)
        write_predicate(lanes, leader == indices_of(lanes) % 32)

    return bind_collective(machine, pc, mask, apply)
