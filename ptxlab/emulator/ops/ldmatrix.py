"""ldmatrix, stmatrix, movmatrix: a warp moves 8 x 8 matrices of b16 to or from shared memory, or turns one over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptxlab.emulator import ir
from ptxlab.emulator.access import Access, elements, locator
from ptxlab.emulator.alu import Opcode, UnknownOpcode
from ptxlab.emulator.collective import together
from ptxlab.emulator.ir import Instruction
from ptxlab.emulator.machine import Machine, Step, binder
from ptxlab.emulator.types import Array, Lanes, as_lanes, indices_of
from ptxlab.errors import EmulationError
from ptxlab.layout import fragments

EVERYBODY = ir.Immediate(-1)  # the mask of an .aligned instruction


def whole_warps(machine: Machine, instruction: Instruction, lanes: Lanes, members: Array) -> None:
    """Raise unless all 32 threads of each warp are there, as an .aligned instruction needs."""
    if (members != 0xFFFFFFFF).any():
        raise EmulationError(f"{machine.place(instruction, lanes)}: not all 32 threads of the warp are there")


@binder("ldmatrix", "stmatrix")
def _matrix(machine: Machine, instruction: Instruction, pc: int) -> Step:
    opcode = Opcode(instruction.opcode)
    aligned = opcode.flag("sync") and opcode.flag("aligned") and opcode.flag("m8n8") and opcode.flag("b16")
    count, trans = int(opcode.choice("x1", "x2", "x4")[1]), opcode.flag("trans")
    space = opcode.choice("shared", "shared::cta", default="generic").split("::")[0]
    if not aligned or opcode.modifiers:
        raise UnknownOpcode(instruction.opcode)
    loads, fragment, rows = opcode.name == "ldmatrix", fragments.ldmatrix(count, trans), 8 * count
    operands = instruction.operands if loads else instruction.operands[::-1]
    registers, address = elements(operands[0], count), operands[1]
    access = Access(instruction, "load" if loads else "store", space, "weak", "b16", 8, ())
    locate = locator(machine, access, address)
    memory = machine.memory.arena.view(np.uint16).reshape(-1, 8)
    readers = [machine.reader(register, "b32") for register in registers]
    writers = [machine.writer(register, "b32") for register in registers] if loads else []
    watchers = machine.watchers

    def rows_of(lanes: Lanes, members: Array) -> tuple[Lanes, Array]:
        """The lanes that give the address of a row, and where the rows lie."""
        whole_warps(machine, instruction, lanes, members)
        givers = as_lanes(indices_of(lanes).reshape(-1, 32)[:, :rows].reshape(-1))
        return givers, locate(givers)

    def load(lanes: Lanes, members: Array) -> None:
        givers, offsets = rows_of(lanes, members)
        for watcher in watchers:
            watcher.load(access, givers, offsets)
        loaded = fragment.scatter(memory[offsets // 16].reshape(-1, rows, 8))
        for i, write in enumerate(writers):
            write(lanes, loaded[:, :, i].reshape(-1))

    def store(lanes: Lanes, members: Array) -> None:
        givers, offsets = rows_of(lanes, members)
        columns = [np.broadcast_to(read(lanes), members.shape).reshape(-1, 32) for read in readers]
        values = fragment.gather(np.stack(columns, axis=-1)).reshape(-1, 8)
        for watcher in watchers:
            watcher.store(access, givers, offsets, values)
        memory[offsets // 16] = values

    return together(machine, pc, EVERYBODY, load if loads else store)


@binder("movmatrix")
def _transposed(machine: Machine, instruction: Instruction, pc: int) -> Step:
    """A matrix, two elements of a row per lane, becomes its transpose."""
    if instruction.opcode != "movmatrix.sync.aligned.m8n8.trans.b16":
        raise UnknownOpcode(instruction.opcode)
    write, read = machine.writer(instruction.operands[0], "b32"), machine.reader(instruction.operands[1], "b32")
    fragment = fragments.ldmatrix(1, False)

    def run(lanes: Lanes, members: Array) -> None:
        whole_warps(machine, instruction, lanes, members)
        registers = np.ascontiguousarray(np.broadcast_to(read(lanes), members.shape)).reshape(-1, 32, 1)
        matrices = np.ascontiguousarray(fragment.gather(registers).swapaxes(-1, -2))
        write(lanes, fragment.scatter(matrices)[:, :, 0].reshape(-1))

    return together(machine, pc, EVERYBODY, run)


_INTEGERS = {"s8": np.int8, "u8": np.uint8}
_INT32 = np.iinfo(np.int32)


def registers_of(machine: Machine, operand: ir.Operand, count: int) -> Callable[[Lanes], Array]:
    """Function: lanes, whole warps -> what a vector operand holds, u32 [warps, 32, count]."""
    readers = [machine.reader(register, "b32") for register in elements(operand, count)]

    def read(lanes: Lanes) -> Array:
        return np.stack([reader(lanes).reshape(-1, 32) for reader in readers], axis=-1)

    return read


def integers(fragment: fragments.Fragment, registers: Array, type_name: str) -> Array:
    """The matrices that registers hold: float32 of 8-bit integers, int64 of s32."""
    if type_name == "s32":
        return fragment.gather(registers, np.int32).astype(np.int64)
    return fragment.gather(registers, _INTEGERS[type_name]).astype(np.float32)


def to_int32(sums: Array, saturates: bool) -> Array:
    """Accumulators int64 as s32: clamped, or modulo 2^32."""
    return (sums.clip(_INT32.min, _INT32.max) if saturates else sums).astype(np.int32)
