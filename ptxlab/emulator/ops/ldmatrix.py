"""ldmatrix, stmatrix, movmatrix: a warp moves 8 x 8 matrices of b16 from or to shared memory, or transposes one."""

import numpy as np

from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.addressing import elements, locator
from ptxlab.emulator.core.lanes import Handler, Lanes, as_lanes, indices_of
from ptxlab.emulator.core.machine import Machine, binder
from ptxlab.emulator.core.warp import EVERYBODY, bind_collective, whole_warps
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import Array
from ptxlab.hardware import fragments


@binder("ldmatrix", "stmatrix")
def _matrix(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    opcode = Opcode(instruction.opcode)
    aligned = opcode.flag("sync") and opcode.flag("aligned") and opcode.flag("m8n8") and opcode.flag("b16")
    count, trans = int(opcode.choice("x1", "x2", "x4")[1]), opcode.flag("trans")
    space = opcode.choice("shared", "shared::cta", default="generic").split("::")[0]
    if not aligned or opcode.modifiers:
        raise UnknownOpcode(instruction.opcode)
    is_load, fragment, rows = opcode.name == "ldmatrix", fragments.ldmatrix(count, trans), 8 * count
    operands = instruction.operands if is_load else instruction.operands[::-1]
    registers, address = elements(operands[0], count), operands[1]
    access = MemoryAccess(instruction, "load" if is_load else "store", space, "weak", "b16", 8, ())
    locate = locator(machine, access, address)
    memory = machine.memory.arena.view(np.uint16).reshape(-1, 8)
    readers = [machine.reader(register, "b32") for register in registers]
    writers = [machine.writer(register, "b32") for register in registers] if is_load else []
    watchers = machine.watchers

    def rows_of(lanes: Lanes, members: Array) -> tuple[Lanes, Array]:
        """Return the lanes that give the address of a row, and where the rows lie."""
        whole_warps(machine, instruction, lanes, members)
        address_lanes = as_lanes(indices_of(lanes).reshape(-1, 32)[:, :rows].reshape(-1))
        return address_lanes, locate(address_lanes)

    def load(lanes: Lanes, members: Array) -> None:
        address_lanes, offsets = rows_of(lanes, members)
        for watcher in watchers:
            watcher.load(access, address_lanes, offsets)
        fragment_registers = fragment.scatter(memory[offsets // 16].reshape(-1, rows, 8))
        for i, write in enumerate(writers):
            write(lanes, fragment_registers[:, :, i].reshape(-1))

    def store(lanes: Lanes, members: Array) -> None:
        address_lanes, offsets = rows_of(lanes, members)
        columns = [np.broadcast_to(read(lanes), members.shape).reshape(-1, 32) for read in readers]
        values = fragment.gather(np.stack(columns, axis=-1)).reshape(-1, 8)
        for watcher in watchers:
            watcher.store(access, address_lanes, offsets, values)
        memory[offsets // 16] = values

    return bind_collective(machine, pc, EVERYBODY, load if is_load else store)


@binder("movmatrix")
def _transpose(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    """Bind movmatrix: a matrix, two elements of a row per lane, becomes its transpose."""
    if instruction.opcode != "movmatrix.sync.aligned.m8n8.trans.b16":
        raise UnknownOpcode(instruction.opcode)
    write, read = machine.writer(instruction.operands[0], "b32"), machine.reader(instruction.operands[1], "b32")
    fragment = fragments.ldmatrix(1, False)

    def run(lanes: Lanes, members: Array) -> None:
        whole_warps(machine, instruction, lanes, members)
        registers = np.ascontiguousarray(np.broadcast_to(read(lanes), members.shape)).reshape(-1, 32, 1)
        matrices = np.ascontiguousarray(fragment.gather(registers).swapaxes(-1, -2))
        write(lanes, fragment.scatter(matrices)[:, :, 0].reshape(-1))

    return bind_collective(machine, pc, EVERYBODY, run)
