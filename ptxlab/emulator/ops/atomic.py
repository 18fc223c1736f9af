"""atom and red. Lanes that hit the same address go one after another, in the order of their numbers.

In mode "late" atom of integers has them go in an order drawn from the seed, so it is not always the first lanes that
take a lock or the next piece of work. Of floats the sum would be another.

Vectors are of floats in global memory: each element is atomic by itself.
"""

from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np

from ptxlab.emulator.core.access import MemoryAccess, decode
from ptxlab.emulator.core.addressing import elements, locator
from ptxlab.emulator.core.lanes import Handler, Lanes, Reader, count_of, indices_of
from ptxlab.emulator.core.machine import Machine, binder
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import UnknownOpcode
from ptxlab.emulator.front.operand_rules import require_kinds
from ptxlab.emulator.front.types import DTYPES, Array, bits_of, is_float
from ptxlab.emulator.ops.alu import COMBINE, alu_operation
from ptxlab.errors import MemoryFault

_EXCHANGE: dict[str, Callable[..., Any]] = {
    "exch": lambda old, b: np.broadcast_to(b, old.shape),
    "cas": lambda old, b, c: np.where(old == b, c, old),
    "inc": lambda old, b: np.where(old >= b, 0, old + old.dtype.type(1)),
    "dec": lambda old, b: np.where((old == 0) | (old > b), b, old - old.dtype.type(1)),
}


_HALVES = ("f16", "f16x2", "bf16", "bf16x2")
_TYPES: dict[str, tuple[str, ...]] = {
    "add": ("u32", "s32", "u64", "f32", "f64", *_HALVES), "min": ("u32", "s32", "u64", "s64"),
    "max": ("u32", "s32", "u64", "s64"), **dict.fromkeys(("and", "or", "xor", "exch"), ("b32", "b64")),
    "cas": ("b16", "b32", "b64"), "inc": ("u32",), "dec": ("u32",),
}  # fmt: skip
# Elements of the vectors that there are, of floats in global memory
_VECTORS = {"f32": (2, 4), "f16": (2, 4, 8), "bf16": (2, 4, 8), "f16x2": (2, 4), "bf16x2": (2, 4)}


def combination(name: str, t: str) -> Callable[..., Any]:
    """Return the function (old, operands) -> new of an atomic operation."""
    return _EXCHANGE.get(name) or alu_operation(f"{name}.{t}").compute


def _update_function(machine: Machine, access: MemoryAccess) -> Callable[..., Any]:
    """Build the memory update of an atomic: (arena offsets, old values, operands) -> new values."""
    name = access.operation[0] if len(access.operation) == 1 else ""
    flushes_halves = access.type in _HALVES and ".noftz" not in access.instruction.opcode
    if name not in _TYPES or flushes_halves or (access.count == 1 and access.type not in _TYPES[name]):
        raise UnknownOpcode(access.instruction.opcode)
    update = combination(name, access.type)
    if access.count > 1:
        vector_operations = ("add",) if access.type == "f32" else ("add", "min", "max")
        if (
            name not in vector_operations
            or access.count not in _VECTORS.get(access.type, ())
            or "shared" in access.space
        ):
            raise UnknownOpcode(access.instruction.opcode)
        update = combination(name, "ftz.f32") if access.type == "f32" else update
        return lambda offsets, old, b: update(old.reshape(-1), b.reshape(-1)).reshape(old.shape)
    if (name, access.type) != ("add", "f32") or "shared" in access.space:
        return lambda offsets, *values: update(*values)
    flushing_add, is_shared = combination("add", "ftz.f32"), machine.launch.is_shared  # the L2's adders flush
    return lambda offsets, *values: np.where(is_shared(offsets), update(*values), flushing_add(*values))


def split_into_rounds(offsets: Array) -> list[Array]:
    """Split accesses into rounds without repeated addresses; return the positions, repeats in their order."""
    order = np.argsort(offsets, kind="stable")
    ordered_offsets = offsets[order]
    first = np.concatenate(([True], ordered_offsets[1:] != ordered_offsets[:-1]))
    if first.all():
        return [np.arange(len(offsets))]
    position = np.arange(len(offsets))
    rank = position - np.maximum.accumulate(np.where(first, position, 0))
    rank_order = np.argsort(rank, kind="stable")
    return np.split(order[rank_order], np.cumsum(np.bincount(rank))[:-1])


@binder("atom", "red")
def _atomic(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    access = decode(instruction, "atomic")
    function = _update_function(machine, access)
    operands = list(instruction.operands)
    returns_old_value = instruction.opcode.startswith("atom")
    t, vector_size = access.type, access.count
    target = operands.pop(0) if returns_old_value else ir.Sink()
    address, *values = operands
    value_count = 2 if access.operation[0] == "cas" else 1
    values, policy = values[:value_count], values[value_count:]
    if len(values) < value_count or len(policy) > ("L2::cache_hint" in instruction.opcode):
        operand_count = 1 + value_count + returns_old_value
        raise ValueError(f"{instruction.opcode} takes {operand_count} operands, not {len(instruction.operands)}")
    if not returns_old_value and access.operation[0] in _EXCHANGE and access.operation[0] not in ("inc", "dec"):
        raise UnknownOpcode(instruction.opcode)
    columns = [elements(operand, vector_size) for operand in values]
    targets = (target,) if isinstance(target, ir.Sink) else elements(target, vector_size)
    require_kinds([*targets, *(element for column in columns for element in column)], repeat(t))
    writers = [machine.writer(register, t if is_float(t) else f"u{bits_of(t)}") for register in targets]
    readers = [_reader(machine, column, t) for column in columns]
    locate = locator(machine, access, address)
    view = machine.memory.arena.view(DTYPES[t])
    view = view if vector_size == 1 else view.reshape(-1, vector_size)
    watchers, size = machine.watchers, access.size
    shuffle_rng = np.random.default_rng((machine.launch.options.seed, 2))
    shuffles_lanes = returns_old_value and not is_float(t) and machine.launch.options.mode == "late"
    # of integers, whose order cannot be told from their result
    update_all = None if returns_old_value or is_float(t) else COMBINE.get(access.operation[0])

    def tell(lanes: Lanes, offsets: Array) -> None:  # the checks, which take the last lane for the last writer
        for watcher in watchers:
            watcher.atomic(access, lanes, offsets)

    def atomic(lanes: Lanes) -> None:
        offsets = locate(lanes)
        if vector_size > 1 and machine.launch.is_shared(offsets).any():
            _, place = machine.first_fault(instruction, lanes, machine.launch.is_shared(offsets))
            raise MemoryFault(f"{place}: vectors are added in global memory alone, this is shared memory")
        places = offsets // size
        operands = [read(lanes) for read in readers]
        if update_all is not None:
            tell(lanes, offsets)
            update_all.at(view, places, operands[0])
            return
        order = shuffle_rng.permutation(len(places)) if shuffles_lanes else np.arange(len(places))
        parts = [order[position] for position in split_into_rounds(places[order])]
        if shuffles_lanes and len(parts) > 1:
            lanes_in_turn = np.concatenate(parts)
            tell(indices_of(lanes)[lanes_in_turn], offsets[lanes_in_turn])
        else:
            tell(lanes, offsets)
        old_values = np.empty((len(places), *view.shape[1:]), view.dtype)
        for part in parts:
            old_values[part] = view[places[part]]
            view[places[part]] = function(offsets[part], old_values[part], *[operand[part] for operand in operands])
        # A sink has no writers.
        for write, element_values in zip(writers, old_values.reshape(len(places), -1).T, strict=False):
            write(lanes, element_values)

    return atomic


def _reader(machine: Machine, registers: ir.Operands, type_name: str) -> Reader:
    """Build a function lanes -> values [lanes] of one register, [lanes, elements] of several."""
    readers = [machine.reader(register, type_name) for register in registers]

    def read(lanes: Lanes) -> Array:
        columns = [np.broadcast_to(read_one(lanes), (count_of(lanes),)) for read_one in readers]
        return columns[0] if len(columns) == 1 else np.stack(columns, axis=1)

    return read
