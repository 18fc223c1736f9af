"""mma of f64 and of single bits. A register of A and B is one *word* of k: a number, or 32 bits that are counted.

Lane 4g + t holds A[g (+ 8), t (+ 4 ...)], B[t (+ 4 ...), g] and C[g (+ 8), 2t and 2t + 1], in words. Sums of f64 are
chains of fused multiply-adds along k, those of bits are exact.
"""

from collections.abc import Callable

import numpy as np

from ptxlab.emulator.core.addressing import elements
from ptxlab.emulator.core.lanes import Handler, Lanes, Reader, count_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.core.warp import EVERYBODY, bind_collective, whole_warps
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import Array
from ptxlab.emulator.ops.floating import MODES
from ptxlab.emulator.ops.rounding import fused_multiply_add

_SHAPES = {  # of types: the shapes, with words of k in a register's column of lanes
    "f64": {"m8n8k4": 1, "m16n8k4": 1, "m16n8k8": 2, "m16n8k16": 4},
    "b1": {"m8n8k128": 1, "m16n8k128": 1, "m16n8k256": 2},
}


def is_of_words(instruction: Instruction) -> bool:
    """Tell whether the instruction is an mma of f64 or of single bits."""
    return bool({*_SHAPES} & {*instruction.opcode.split(".")})


def words_mma(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    """Build the handler of an mma of f64 or bits."""
    opcode = Opcode(instruction.opcode)
    flags = [opcode.flag(name) for name in ("sync", "aligned", "row", "col")]
    kind = "b1" if "b1" in opcode.modifiers else "f64"
    depth = _SHAPES[kind][shape := opcode.choice(*_SHAPES[kind])]
    combine = opcode.choice("xor", "and") if kind == "b1" else ""
    counts = opcode.flag("popc")
    d_type = "s32" if kind == "b1" else "f64"
    rounding = opcode.choice(*MODES, default="rn") if kind == "f64" else ""
    if not all(flags) or counts != (kind == "b1") or opcode.modifiers != [d_type, kind, kind, d_type]:
        raise UnknownOpcode(instruction.opcode)
    if len(instruction.operands) != 4:
        raise ValueError(f"{instruction.opcode} takes 4 operands, not {len(instruction.operands)}")
    row_halves, word = 2 if shape.startswith("m16") else 1, "b32" if kind == "b1" else "f64"
    d, a, b, c = instruction.operands

    def readers(operand: object, count: int, type_name: str) -> list[Reader]:
        return [machine.reader(register, type_name) for register in elements(operand, count)]  # type: ignore[arg-type]

    a_readers = readers(a, depth * row_halves, word)
    b_readers = readers(b, depth, word)
    c_readers = readers(c, 2 * row_halves, d_type)
    writers = [machine.writer(register, d_type) for register in elements(d, 2 * row_halves)]
    accumulate = count_bits(combine) if kind == "b1" else fuse_products(rounding)

    def read_words(readers: list[Reader], lanes: Lanes, *parts: int) -> Array:
        """Read the registers as [warps, g, t, *parts]."""
        columns = [np.broadcast_to(read(lanes), (count_of(lanes),)) for read in readers]
        return np.stack(columns, axis=1).reshape(-1, 8, 4, *parts)

    def multiply(lanes: Lanes, members: Array) -> None:
        whole_warps(machine, instruction, lanes, members)
        left = (
            read_words(a_readers, lanes, depth, row_halves)
            .transpose(0, 4, 1, 3, 2)
            .reshape(-1, 8 * row_halves, 4 * depth)
        )
        right = read_words(b_readers, lanes, depth).transpose(0, 3, 2, 1).reshape(-1, 4 * depth, 8)
        start = read_words(c_readers, lanes, row_halves, 2).transpose(0, 3, 1, 2, 4).reshape(-1, 8 * row_halves, 8)
        sums = accumulate(left, right, start)
        columns = sums.reshape(-1, row_halves, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(count_of(lanes), -1)
        for write, column in zip(writers, columns.T, strict=True):
            write(lanes, column)

    return bind_collective(machine, pc, EVERYBODY, multiply)


# Functions of words [..., rows, k] and [..., k, columns], and of what [..., rows, columns] they are added to


def count_bits(combine: str) -> Callable[[Array, Array, Array], Array]:
    """Build the accumulation of a single-bit mma: add the number of set bits of `a combine b`."""
    operation = np.bitwise_xor if combine == "xor" else np.bitwise_and

    def accumulate(left: Array, right: Array, sums: Array) -> Array:
        combined_words = operation(left[..., :, None, :], right.swapaxes(-1, -2)[..., None, :, :])
        counts: Array = np.bitwise_count(combined_words).sum(axis=-1, dtype=np.int64)
        return counts.astype(sums.dtype) + sums

    return accumulate


def fuse_products(rounding: str) -> Callable[[Array, Array, Array], Array]:
    """Build the accumulation of an f64 mma: one fma after another, each rounded."""

    def accumulate(left: Array, right: Array, sums: Array) -> Array:
        for k in range(left.shape[-1]):
            a, b = np.broadcast_arrays(left[..., k, None], right[..., k, None, :])
            sums = fused_multiply_add(a.reshape(-1), b.reshape(-1), sums.reshape(-1), rounding).reshape(sums.shape)
        return sums

    return accumulate
