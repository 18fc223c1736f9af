"""mma.sync: D = A·B + C of one warp, over `layout.fragments`.

Integers are exact: a k step's sum is below 2^24, so float32 products serve. Floats are summed in float64 and rounded
once, while tensor cores cut the addends to a common exponent: where sums are not exact, results differ from hardware's
by at most (k + 1)·2^-23·(|c| + sum |a·b|), and f16 results by their rounding besides.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptxlab.emulator import ir
from ptxlab.emulator.access import elements
from ptxlab.emulator.alu import UnknownOpcode
from ptxlab.emulator.collective import together
from ptxlab.emulator.ir import Instruction
from ptxlab.emulator.machine import Machine, Step, binder
from ptxlab.emulator.matrix import EVERYBODY, whole_warps
from ptxlab.emulator.types import Array, Lanes
from ptxlab.layout.fragments import Fragment, mma_a, mma_b, mma_c

_SHAPES = {"m16n8k16": ("f16", "bf16"), "m16n8k32": ("s8", "u8"), "m16n8k64": ("s4", "u4")}  # and types of A and B
_INTEGERS = {"s8": np.int8, "u8": np.uint8, "s4": np.int8, "u4": np.uint8}
_INT32 = np.iinfo(np.int32)


def registers_of(machine: Machine, operand: ir.Operand, count: int) -> Callable[[Lanes], Array]:
    """Function: lanes, whole warps -> what a vector operand holds, u32 [warps, 32, count]."""
    readers = [machine.reader(register, "b32") for register in elements(operand, count)]

    def read(lanes: Lanes) -> Array:
        return np.stack([reader(lanes).reshape(-1, 32) for reader in readers], axis=-1)

    return read


def matrix(fragment: Fragment, registers: Array, type_name: str) -> Array:
    """The matrices that registers hold: float32 of 4- and 8-bit integers, float64 of floats, int64 of s32."""
    if type_name in _INTEGERS:
        return fragment.gather(registers, _INTEGERS[type_name]).astype(np.float32)
    if type_name == "s32":
        return fragment.gather(registers, np.int32).astype(np.int64)
    if type_name == "bf16":
        return (fragment.gather(registers).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return fragment.gather(registers, {"f16": np.float16, "f32": np.float32}[type_name]).astype(np.float64)


def to_int32(sums: Array, saturates: bool) -> Array:
    """Accumulators int64 as s32: clamped, or modulo 2^32."""
    return (sums.clip(_INT32.min, _INT32.max) if saturates else sums).astype(np.int32)


def _exists(shape: str, d: str, a: str, b: str, c: str) -> bool:
    """Whether mma.sync has this shape for these types."""
    if not {a, b} <= set(_SHAPES.get(shape, ())):
        return False
    if shape != "m16n8k16":
        return d == c == "s32"
    return a == b and {d, c} <= ({"f32"} if a == "bf16" else {"f16", "f32"})


@binder("mma")
def _mma(machine: Machine, instruction: Instruction, pc: int) -> Step:
    saturates = ".satfinite" in instruction.opcode
    parts = instruction.opcode.replace(".satfinite", "").split(".")
    if len(parts) != 10 or parts[:3] + parts[4:6] != ["mma", "sync", "aligned", "row", "col"]:
        raise UnknownOpcode(instruction.opcode)
    shape, d, a, b, c = parts[3], *parts[6:]
    integers = d == "s32"
    if not _exists(shape, d, a, b, c) or (saturates and not integers):
        raise UnknownOpcode(instruction.opcode)
    k = int(shape.partition("k")[2])
    fragment_d, fragment_c = (mma_c(16 if t == "f16" else 32) for t in (d, c))
    operands = instruction.operands
    writers = [machine.writer(register, "b32") for register in elements(operands[0], fragment_d.registers)]
    read_a, read_b = registers_of(machine, operands[1], 4), registers_of(machine, operands[2], 2)
    read_c = registers_of(machine, operands[3], fragment_c.registers)
    dtype = {"f16": np.float16, "f32": np.float32}.get(d, np.int32)

    def multiply(lanes: Lanes, members: Array) -> None:
        whole_warps(machine, instruction, lanes, members)
        product = matrix(mma_a(k), read_a(lanes), a) @ matrix(mma_b(k), read_b(lanes), b)
        addend = matrix(fragment_c, read_c(lanes), c)
        if integers:
            result = to_int32(product.astype(np.int64) + addend, saturates)
        else:
            result = (product + addend).astype(dtype)
        columns = fragment_d.scatter(result)
        for i, write in enumerate(writers):
            write(lanes, columns[:, :, i].reshape(-1))

    return together(machine, pc, EVERYBODY, multiply)
