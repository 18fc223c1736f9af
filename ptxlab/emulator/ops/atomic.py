"""atom and red. Lanes that hit the same address go one after another, in the order of their numbers.

Of vectors there is red, of floats in global memory: atomic for each element.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxlab.emulator.core.access import MemoryAccess, decode
from ptxlab.emulator.core.addressing import elements, locator
from ptxlab.emulator.core.lanes import Handler, Lanes
from ptxlab.emulator.core.machine import Machine, binder
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import UnknownOpcode
from ptxlab.emulator.front.operand_rules import require_kinds
from ptxlab.emulator.front.types import DTYPES, Array, bits_of, is_float
from ptxlab.emulator.ops.alu import COMBINE, alu_operation

_EXCHANGE: dict[str, Callable[..., Any]] = {
    "exch": lambda old, b: np.broadcast_to(b, old.shape),
    "cas": lambda old, b, c: np.where(old == b, c, old),
    "inc": lambda old, b: np.where(old >= b, 0, old + old.dtype.type(1)),
    "dec": lambda old, b: np.where((old == 0) | (old > b), b, old - old.dtype.type(1)),
}


_VECTORS = {"f32": (2, 4), "f16": (2, 4, 8), "bf16": (2, 4, 8), "f16x2": (2, 4), "bf16x2": (2, 4)}  # elements


def combination(name: str, t: str) -> Callable[..., Any]:
    """old, operands -> new."""
    return _EXCHANGE.get(name) or alu_operation(f"{name}.{t}").compute


def _function(machine: Machine, access: MemoryAccess) -> Callable[..., Any]:
    """What an atomic does to memory: arena offsets, old values, operands -> new values."""
    if len(access.rest) != 1:
        raise UnknownOpcode(access.instruction.opcode)
    (name,) = access.rest
    update = combination(name, access.type)
    if (name, access.type) != ("add", "f32") or access.space.startswith("shared"):
        return lambda offsets, *values: update(*values)
    flushing, is_shared = combination("add", "ftz.f32"), machine.launch.is_shared  # the L2's adders flush
    return lambda offsets, *values: np.where(is_shared(offsets), update(*values), flushing(*values))


def rounds(offsets: Array) -> list[Array]:
    """Positions of the accesses, so parted that no two of a part have the same address; repeats keep their order."""
    order = np.argsort(offsets, kind="stable")
    ordered = offsets[order]
    first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    if first.all():
        return [np.arange(len(offsets))]
    position = np.arange(len(offsets))
    rank = position - np.maximum.accumulate(np.where(first, position, 0))
    by_rank = np.argsort(rank, kind="stable")
    return np.split(order[by_rank], np.cumsum(np.bincount(rank))[:-1])


@binder("atom", "red")
def _atomic(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    access = decode(instruction, "atomic")
    if access.count > 1:
        return _of_vectors(machine, instruction, access)
    function = _function(machine, access)
    operands = list(instruction.operands)
    returns = instruction.opcode.startswith("atom")
    t = access.type
    require_kinds((o for o in operands if not isinstance(o, ir.Address)), [t] * len(operands))
    write = machine.writer(operands.pop(0), t if is_float(t) else f"u{bits_of(t)}") if returns else None
    address, *values = operands
    expected = 2 if access.rest[0] == "cas" else 1
    values, policy = values[:expected], values[expected:]
    if len(values) < expected or len(policy) > ("L2::cache_hint" in instruction.opcode):
        count = 1 + expected + returns
        raise ValueError(f"{instruction.opcode} takes {count} operands, not {len(instruction.operands)}")
    if not returns and access.rest[0] in _EXCHANGE and access.rest[0] not in ("inc", "dec"):
        raise UnknownOpcode(instruction.opcode)
    readers = [machine.reader(value, t) for value in values]
    locate = locator(machine, access, address)
    view = machine.memory.arena.view(DTYPES[t])
    watchers, size = machine.watchers, access.size
    # of integers, whose order cannot be told from their result
    together = None if returns or is_float(t) else COMBINE.get(access.rest[0])

    def atomic(lanes: Lanes) -> None:
        offsets = locate(lanes)
        for watcher in watchers:
            watcher.atomic(access, lanes, offsets)
        places = offsets // size
        operands = [np.broadcast_to(read(lanes), places.shape) for read in readers]
        if together is not None:
            together.at(view, places, operands[0])
            return
        before = np.empty(len(places), view.dtype)
        for part in rounds(places):
            before[part] = view[places[part]]
            values = [operand[part] for operand in operands]
            view[places[part]] = function(offsets[part], before[part], *values)
        if write is not None:
            write(lanes, before)

    return atomic


def _of_vectors(machine: Machine, instruction: Instruction, access: MemoryAccess) -> Handler:
    known = access.count in _VECTORS.get(access.type, ()) and access.rest == ("add",)
    if not known or access.space != "global" or instruction.head != "red":
        raise UnknownOpcode(instruction.opcode)
    if len(instruction.operands) != 2:
        raise ValueError(f"{instruction.opcode} takes 2 operands, not {len(instruction.operands)}")
    address, source = instruction.operands
    require_kinds(items := elements(source, access.count), [access.type] * access.count)
    readers = [machine.reader(item, access.type) for item in items]
    locate, function = locator(machine, access, address), _function(machine, access)
    rows = machine.memory.arena.view(DTYPES[access.type]).reshape(-1, access.count)
    watchers, size = machine.watchers, access.size

    def red(lanes: Lanes) -> None:
        offsets = locate(lanes)
        for watcher in watchers:
            watcher.atomic(access, lanes, offsets)
        places = offsets // size
        values = np.stack([np.broadcast_to(read(lanes), places.shape) for read in readers], axis=1)
        for part in rounds(places):
            repeated = offsets[part].repeat(access.count)
            sums = function(repeated, rows[places[part]].reshape(-1), values[part].reshape(-1))
            rows[places[part]] = sums.reshape(-1, access.count)

    return red
