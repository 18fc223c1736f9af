"""mma.m8n8k4 of f16, as Volta has it: each quarter of a warp multiplies matrices of its own.

Quarter q is lanes 4q to 4q + 3, its low half, and lanes 16 + 4q to 16 + 4q + 3, its high half. The high half holds the
lower four rows of A, C and D, and the right four columns of B.
"""

import numpy as np

from ptxlab.emulator.core.addressing import elements
from ptxlab.emulator.core.lanes import Handler, Lanes, Reader, count_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.core.warp import EVERYBODY, bind_collective, whole_warps
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, Array
from ptxlab.emulator.ops.floating import canonical

Places = tuple[Array, Array]  # rows and columns [8 lanes of a quarter, elements]
_SHAPE = "m8n8k4"
_TYPES = ("f16.f16.f16.f16", "f32.f16.f16.f16", "f32.f16.f16.f32")


def is_of_quarters(instruction: Instruction) -> bool:
    """Tell whether the instruction is an mma m8n8k4 of f16."""
    words = instruction.opcode.split(".")
    return _SHAPE in words and "f16" in words


def places_of_factor(by_lane: bool) -> Places:
    """Return rows and columns of A's or B's elements, by lane of the quarter.

    A by rows, and B by columns transposed, have a row in each lane (`by_lane`); else a lane has part of a column.
    """
    lane, i = np.indices((8, 4))
    high, lane_in_quad = lane // 4 * 4, lane % 4
    return (lane_in_quad + high, i) if by_lane else (i + high, lane_in_quad)


def places_of_sum(type_name: str) -> Places:
    """Return rows and columns of C's or D's elements, by lane: a row of f16, or f32 pairs in 2 rows by 2 columns."""
    lane, i = np.indices((8, 8))
    high, lane_in_quad = lane // 4 * 4, lane % 4
    if type_name == "f16":
        return lane_in_quad + high, i
    return (lane_in_quad & 1) + (i & 2) + high, (i & 4) + (lane_in_quad & 2) + (i & 1)


def add_pairs(a: Array, b: Array, c: Array) -> Array:
    """Compute an f16 D: C plus the first two products, then plus the other two, each sum in f32."""
    for k in (0, 2):
        c = c + _fma(a, b, k + 1, _fma(a, b, k, np.float32(-0.0)))
    return c


def add_chain(a: Array, b: Array, c: Array) -> Array:
    """Compute an f32 D: four fma of f32 that begin at 0, then plus C."""
    products = np.zeros_like(c)
    for k in range(4):
        products = _fma(a, b, k, products)
    return products + c


def _fma(a: Array, b: Array, k: int, c: Array | np.float32) -> Array:
    """Return the k-th product plus c, rounded once: halves have too few bits for float64 to round too."""
    return (a[:, :, k, None] * b[:, None, k, :] + c).astype(np.float32)


def quarters_mma(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    """Build the handler of an mma.m8n8k4 of f16; sums are in the order of the code that ptxas generates.

    sm_90 has no such instruction.
    """
    opcode = Opcode(instruction.opcode)
    flags = [opcode.flag(name) for name in ("sync", "aligned", _SHAPE)]
    layouts = [opcode.choice("row", "col") for _ in "ab"]
    if not all(flags) or ".".join(opcode.modifiers) not in _TYPES:
        raise UnknownOpcode(instruction.opcode)
    d_type, _, _, c_type = opcode.modifiers
    if len(instruction.operands) != 4:
        raise ValueError(f"{instruction.opcode} takes 4 operands, not {len(instruction.operands)}")
    d, a, b, c = instruction.operands

    def registers(operand: ir.Operand, type_name: str, count: int) -> ir.Operands:
        return elements(operand, count if type_name == "f32" else count // 2)

    def readers_of(operand: ir.Operand, type_name: str, count: int) -> list[Reader]:
        kind = "f32" if type_name == "f32" else "b32"
        return [machine.reader(register, kind) for register in registers(operand, type_name, count)]

    a_readers, b_readers, c_readers = readers_of(a, "f16", 4), readers_of(b, "f16", 4), readers_of(c, c_type, 8)
    kind = "f32" if d_type == "f32" else "b32"
    writers = [machine.writer(register, kind) for register in registers(d, d_type, 8)]
    a_places, b_places = places_of_factor(layouts[0] == "row"), places_of_factor(layouts[1] == "col")

    def matrix(readers: list[Reader], type_name: str, places: Places, lanes: Lanes) -> Array:
        """Read the registers as [quarters, rows, columns]."""
        columns = np.stack([np.broadcast_to(read(lanes), (count_of(lanes),)) for read in readers], axis=1)
        numbers = columns.view(DTYPES[type_name]).reshape(-1, 2, 4, 4, places[0].shape[1])  # [warps, half, quarter, ..]
        numbers_by_quarter = numbers.swapaxes(1, 2).reshape(-1, *places[0].shape)
        matrices = np.empty((len(numbers_by_quarter), 8, places[1].max() + 1))
        matrices[:, places[0], places[1]] = numbers_by_quarter
        return matrices

    def multiply(lanes: Lanes, members: Array) -> None:
        whole_warps(machine, instruction, lanes, members)
        left = matrix(a_readers, "f16", a_places, lanes)
        right = matrix(b_readers, "f16", b_places, lanes).swapaxes(1, 2)
        addend = matrix(c_readers, c_type, places_of_sum(c_type), lanes).astype(np.float32)
        total = (add_pairs if d_type == "f16" else add_chain)(left, right, addend)
        rows, columns = places_of_sum(d_type)
        lane_values = canonical(total.astype(DTYPES[d_type]), d_type)[:, rows, columns]
        packed_registers = (
            lane_values.reshape(-1, 4, 2, 4, 8).swapaxes(1, 2).reshape(count_of(lanes), 8).view(DTYPES[kind])
        )
        for write, column in zip(writers, packed_registers.T, strict=True):
            write(lanes, column)

    return bind_collective(machine, pc, EVERYBODY, multiply)
