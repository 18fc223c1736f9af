"""Operands of matrix instructions: which lane and register hold which element, and the matrix that they make."""

import re
from dataclasses import dataclass
from functools import cache

import numpy as np

from ptxlab.debugger.pending import line_of, ranges
from ptxlab.debugger.session import DebuggerError
from ptxlab.debugger.state import State
from ptxlab.debugger.values import dtype_of, format_values
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array
from ptxlab.hardware import fragments
from ptxlab.hardware.descriptors import MatrixDescriptor
from ptxlab.hardware.fragments import Fragment

_HEADS = ("mma", "wgmma", "ldmatrix", "stmatrix")
_BITS = {"s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8, "s4": 4, "u4": 4, "f16": 16, "bf16": 16, "b16": 16, "tf32": 32}
_VIEWED = {"e4m3": "b8", "e5m2": "b8", "tf32": "f32"}  # as what they are printed


@dataclass(frozen=True, eq=False)
class MatrixOperand:
    """An operand `letter` of an instruction, with elements of a PTX type.

    In registers: its fragment, over 32 lanes or the 128 of a warp group. In shared memory: the descriptor's register,
    and its rows; it is printed with K along the columns.
    """

    letter: str
    type: str
    fragment: Fragment | None
    registers: tuple[ir.Operand, ...]
    rows: int = 0


@cache
def of_warp_group(fragment: Fragment) -> Fragment:
    """Stack the fragments of four warps below each other."""
    rows = np.concatenate([fragment.rows + 16 * warp for warp in range(4)])
    return Fragment(f"{fragment.name} of a warp group", fragment.bits, rows, np.concatenate([fragment.cols] * 4))


def is_matrix(instruction: Instruction) -> bool:
    """Check whether the instruction's operands are matrices."""
    return instruction.head in _HEADS and ("mma_async" in instruction.opcode or instruction.head != "wgmma")


def operands_of(instruction: Instruction) -> dict[str, MatrixOperand]:
    """Return an instruction's matrices by letter. Raises DebuggerError for a form whose fragments are not known."""
    words = instruction.opcode.split(".")
    shape = re.fullmatch(r"m\d+n(\d+)k(\d+)", next((w for w in words if re.fullmatch(r"m\d+n\d+k\d+", w)), ""))
    types = [word for word in words if word in (*_BITS, "f32", "s32")]
    unknown = DebuggerError(f"fragment: the fragments of {instruction.opcode} are not known here")
    if instruction.head in ("ldmatrix", "stmatrix"):
        count = next((int(word[1]) for word in words if word in ("x1", "x2", "x4")), 0)
        if "m8n8" not in words or not count:
            raise unknown
        operand = instruction.operands[0 if instruction.head == "ldmatrix" else 1]
        return {"d": MatrixOperand("d", "b16", fragments.ldmatrix(count, "trans" in words), _elements_of(operand))}
    if (
        shape is None
        or shape[0].startswith("m8")
        or (instruction.head == "wgmma") != (len(types) == 3)
        or len(types) not in (3, 4)
    ):
        raise unknown
    n, k = int(shape[1]), int(shape[2])
    d, a, b = types[:3]
    try:
        if instruction.head == "wgmma":
            return _of_wgmma(instruction, n, k, d, a, b)
        maps = {"d": fragments.mma_c(_BITS.get(d, 32)), "a": fragments.mma_a(k, _BITS[a])}
        maps |= {"b": fragments.mma_b(k, _BITS[b]), "c": maps["d"]}
    except (KeyError, ValueError):
        raise unknown from None
    kinds = {"d": d, "a": a, "b": b, "c": d}
    return {letter: MatrixOperand(letter, kinds[letter], maps[letter], _elements_of(operand))
            for letter, operand in zip("dabc", instruction.operands, strict=False)}  # fmt: skip


def _of_wgmma(instruction: Instruction, n: int, k: int, d: str, a: str, b: str) -> dict[str, MatrixOperand]:
    if d not in ("s32", "f32"):
        raise KeyError(d)
    operands = instruction.operands
    matrices = {"d": MatrixOperand("d", d, fragments.wgmma_d(n, d == "f32"), _elements_of(operands[0]))}
    if isinstance(operands[1], ir.Vector):
        matrices["a"] = MatrixOperand("a", a, of_warp_group(fragments.mma_a(k, _BITS[a])), _elements_of(operands[1]))
    else:
        matrices["a"] = MatrixOperand("a", a, None, _elements_of(operands[1]), 64)
    return matrices | {"b": MatrixOperand("b", b, None, _elements_of(operands[2]), n)}


def _elements_of(operand: ir.Operand) -> tuple[ir.Operand, ...]:
    return tuple(operand.elements) if isinstance(operand, ir.Vector) else (operand,)


def nearest(state: State) -> Instruction:
    """Find the matrix instruction nearest to the stop.

    It is the present one, the last one above it, or the first of the kernel.
    """
    code, pc = state.machine.code, state.session.now.moment.pc
    preceding_indices = [i for i in code[: pc + 1] if is_matrix(i)]
    candidates = preceding_indices[-1:] or [i for i in code if is_matrix(i)]
    if not candidates:
        raise DebuggerError("fragment: this kernel has no mma, wgmma, ldmatrix or stmatrix")
    return candidates[0]


def operand(state: State, letter: str) -> tuple[Instruction, MatrixOperand]:
    """Return an operand of the nearest matrix instruction, and that instruction."""
    instruction = nearest(state)
    matrices = operands_of(instruction)
    if letter not in matrices:
        raise DebuggerError(f"fragment: {instruction.opcode} has {', '.join(matrices)} (got {letter!r})")
    return instruction, matrices[letter]


def matrix(state: State, operand: MatrixOperand) -> tuple[Array, str]:
    """Return an operand's present matrix, [rows, columns], and the type that its elements are printed in."""
    type_name = _VIEWED.get(operand.type, operand.type)
    view_type = {"s4": "s8", "u4": "u8"}.get(type_name, type_name)
    dtype = dtype_of(view_type)
    if operand.fragment is None:
        return _in_shared(state, operand).view(dtype), view_type
    return operand.fragment.gather(_registers(state, operand), dtype), view_type


def _registers(state: State, operand: MatrixOperand) -> Array:
    """Read an operand's registers, u32 [lanes, registers]."""
    assert operand.fragment is not None
    machine, lanes = state.machine, operand.fragment.lanes
    first = state.lane // lanes * lanes
    part = slice(first, first + lanes)
    # of f32, and of constants, the number's bits
    columns = [machine.reader(r, "b32")(part) if isinstance(r, ir.Register) and r.type != "f32"
               else machine.reader(r, "f32")(part).view(np.uint32) for r in operand.registers]  # fmt: skip
    return np.ascontiguousarray(np.stack([np.broadcast_to(column, (lanes,)) for column in columns], axis=1))


def _in_shared(state: State, operand: MatrixOperand) -> Array:
    """Read the bytes [rows, 32] of an operand that wgmma reads by its descriptor."""
    machine, lane = state.machine, state.lane
    read = machine.reader(operand.registers[0], "u64")
    descriptor = int(np.broadcast_to(read(slice(lane, lane + 1)), (1,))[0])
    places = MatrixDescriptor.decode(descriptor).addresses(operand.rows) + int(machine.shared_base[lane])
    if places.min() < 0 or places.max() >= machine.memory.size:
        raise DebuggerError(f"fragment: the descriptor {descriptor:#x} of {operand.letter} points nowhere yet")
    return np.ascontiguousarray(machine.memory.arena[places])


def holders(state: State, letter: str, row: int | None, column: int | None) -> list[str]:
    """List the lanes that hold a row, a column or an element of an operand.

    Each line has the registers and values too.
    """
    instruction, matrix_operand = operand(state, letter)
    fragment = matrix_operand.fragment
    if fragment is None:
        raise DebuggerError(f"holds: {letter} of {instruction.head} is in shared memory; `fragment {letter}` prints it")
    rows, columns = fragment.shape
    for axis, number, count in (("row", row, rows), ("column", column, columns)):
        if number is not None and not 0 <= number < count:
            raise DebuggerError(f"holds: {axis} 0 to {count - 1} of {letter} (got {number})")
    chosen = np.ones(fragment.rows.shape, bool)
    chosen &= True if row is None else fragment.rows == row
    chosen &= True if column is None else fragment.cols == column
    texts = format_values(*matrix(state, matrix_operand))
    selection = f"{'' if row is None else f'row {row}'}{', ' if None not in (row, column) else ''}"
    selection += "" if column is None else f"column {column}"
    title = f"{selection} of {letter} [{rows} x {columns}], {matrix_operand.type}"
    lines = [f"{title}, {line_of(instruction)}, `{instruction.opcode}`"]
    lane_first = state.lane // fragment.lanes * fragment.lanes % state.machine.stride
    for lane in np.flatnonzero(chosen.any(axis=(1, 2))).tolist():
        parts = []
        for register in np.flatnonzero(chosen[lane].any(axis=1)).tolist():
            elements = np.flatnonzero(chosen[lane, register]).tolist()
            places = [fragment.index(lane, register, element) for element in elements]
            along = f"{'column' if column is None else 'row'}{'s' * (len(places) > 1)} "
            along += ranges([place[column is None] for place in places])
            name = getattr(matrix_operand.registers[register], "name", "constant")
            label = name if None not in (row, column) else f"{name}, {along}"
            parts.append(f"{label}: {' '.join(texts[place] for place in places)}")
        lines.append(f"  lane {lane % 32:>2} of warp {(lane_first + lane) // 32}   {'   '.join(parts)}")
    return lines


def operand_matrix(state: State, letter: str) -> tuple[str, Array, str]:
    """Return a title, the matrix of an operand, and its type."""
    instruction, matrix_operand = operand(state, letter)
    elements, type_name = matrix(state, matrix_operand)
    location = "in shared memory" if matrix_operand.fragment is None else f"in {', '.join(_names(matrix_operand))}"
    title = f"{letter} [{elements.shape[0]} x {elements.shape[1]}], {matrix_operand.type}, {location}"
    return f"{title}; {line_of(instruction)}, `{instruction.opcode}`", elements, type_name


def _names(operand: MatrixOperand) -> list[str]:
    names = [getattr(register, "name", "constant") for register in operand.registers]
    return names if len(names) <= 8 else [*names[:2], "..", names[-1]]
