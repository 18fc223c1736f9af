"""ld, st and prefetch."""

import numpy as np

from ptxlab.emulator.core.access import MemoryAccess, decode
from ptxlab.emulator.core.addressing import elements, locator
from ptxlab.emulator.core.lanes import Handler, Lanes
from ptxlab.emulator.core.machine import Machine, binder
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.operand_rules import refuse_specials, require_kinds
from ptxlab.emulator.front.types import DTYPES, bits_of, is_signed


def _without_policy(instruction: Instruction) -> ir.Operands:
    """Return the two operands of a load or store; a third is a policy, which steers a cache."""
    most_operands = 3 if instruction.opcode.startswith("ld") or "L2::cache_hint" in instruction.opcode else 2
    if len(instruction.operands) > most_operands:
        raise ValueError(f"{instruction.opcode} takes {most_operands} operands, not {len(instruction.operands)}")
    return instruction.operands[:2]


@binder("ld", "ldu")
def _load(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    access = decode(instruction, "load")
    target, address = _without_policy(instruction)
    # as bits, so that no NaN is touched, but with the sign that extends
    bits = bits_of(access.type)
    t = f"{'s' if is_signed(access.type) else 'u'}{bits}"
    if isinstance(target, ir.Sink):
        raise ValueError("the result cannot be discarded")
    require_kinds(registers := elements(target, access.count), [access.type] * access.count)
    writers = [machine.writer(register, t, relaxed=True) for register in registers]
    locate = locator(machine, access, address)
    view = machine.memory.arena.view(DTYPES[t])
    watchers, size = machine.watchers, access.size
    base = address.base
    if access.space == "param" and isinstance(base, ir.Symbol) and base.variable.space == "param":
        # the same for every lane, for the whole launch
        offset = int(locate(slice(0, 1))[0]) // (bits // 8)
        constants = [view[offset + i : offset + i + 1].copy() for i in range(access.count)]

        def load_param(lanes: Lanes) -> None:
            for write, constant in zip(writers, constants, strict=True):
                write(lanes, constant)

        return load_param
    rows, shift = view.reshape(-1, access.count) if access.count > 1 else view, size.bit_length() - 1

    def load(lanes: Lanes) -> None:
        offsets = locate(lanes)
        for watcher in watchers:
            watcher.load(access, lanes, offsets)
        values = rows[offsets >> shift]
        if len(writers) == 1:
            writers[0](lanes, values)
            return
        for i, write in enumerate(writers):
            write(lanes, values[:, i])

    return load


@binder("prefetch")
def _prefetch(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    """Bind prefetch: a hint, that moves nothing; but the address that it names has to be valid."""
    if "global" not in instruction.opcode.split("."):
        return lambda lanes: None
    locate = locator(machine, MemoryAccess(instruction, "load", "global", "weak", "b8", 1, ()), instruction.operands[0])

    def prefetch(lanes: Lanes) -> None:
        locate(lanes)

    return prefetch


@binder("st")
def _store(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    access = decode(instruction, "store")
    address, source = _without_policy(instruction)
    t = f"u{bits_of(access.type)}"
    refuse_specials(registers := elements(source, access.count))
    require_kinds(registers, [access.type] * access.count)
    readers = [machine.reader(register, t, relaxed=True) for register in registers]
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

    return store if access.order == "weak" else machine.split_strong_store(store, pc)
