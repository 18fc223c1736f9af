"""The check "narrow": integers that lose high bits, outside of annotated lanes.

Two places: an integer that a conversion or a store makes narrower, and a product (`mul.lo`, `mad.lo`) that does not fit
its type, as an index of 32 bits may not. What a store keeps is judged by the sign of the array that it goes to; where
nothing tells the sign, what fits with a sign or without one does. Wrapping on purpose, as in a hash, is silenced by
`// @wraps` on the line, or on the line of the call that it is inlined from. Shifts and bitwise operations are not
looked at: they pack bits. A line with a mask (`& 0xff`) is silent too: compilers leave out a mask that a store implies.
"""

import re
from functools import cache
from pathlib import Path

import numpy as np

from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.lanes import Handler, Lanes, Successors, count_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.core.memory import BASE
from ptxlab.emulator.front.ir import Instruction, Operand, Register, Vector
from ptxlab.emulator.front.types import Array, bits_of, is_signed, limits

SILENT = re.compile(r"@wraps|&\s*(0[xX][0-9a-fA-F]+|[0-9]+)")
_INTEGERS = frozenset(f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64))


def is_silent(instruction: Instruction) -> bool:
    """Tell whether a source line of the instruction masks the value, or says that it wraps on purpose."""
    return instruction.wraps or any(
        SILENT.search(_line(*place)) for place in ((instruction.path, instruction.line), *instruction.callers)
    )


def _line(path: str, line: int) -> str:
    """Return a line of a source; empty if that cannot be read."""
    try:
        lines = Path(path).read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return lines[line - 1] if line <= len(lines) else ""


class Narrowing(Check):
    """Check for integers that lose high bits in a conversion, product or store."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.is_silent = cache(lambda index: is_silent(machine.code[index]))
        launch, memory = machine.launch, machine.memory
        self.arrays: dict[int, np.dtype] = {}  # by the arena offset of a buffer: what an array holds
        for argument, param in zip(launch.args, launch.entry.params, strict=True):
            if isinstance(argument, np.ndarray):
                address = int(memory.view[8][(launch.addresses[id(param)] - BASE) // 8])
                self.arrays[address - BASE] = argument.dtype

    def wrap_handler(self, instruction: Instruction, handler: Handler) -> Handler:
        """Wrap handlers of integer conversions and products to check their results."""
        head, *modifiers = instruction.opcode.split(".")
        types = [word for word in modifiers if word in _INTEGERS]
        if instruction.lanes or not types:
            return handler
        if head == "cvt" and len(types) == 2 and bits_of(types[0]) < bits_of(types[1]) and "sat" not in modifiers:
            return self.wrap_conversion(instruction, handler, *types)
        if head in ("mul", "mad") and "lo" in modifiers and bits_of(types[-1]) < 64:
            return self.wrap_product(instruction, handler, types[-1])
        return handler

    def wrap_conversion(self, instruction: Instruction, handler: Handler, target: str, source: str) -> Handler:
        """Wrap a conversion to check that its source fits, signed or unsigned: compilers name either sign."""
        read = self.machine.reader(instruction.operands[1], source, relaxed=True)

        def convert(lanes: Lanes) -> Successors:
            self.check_range(instruction, lanes, read(lanes), bits_of(target), None, f"{bits_of(target)} bits")
            return handler(lanes)

        return convert

    def wrap_product(self, instruction: Instruction, handler: Handler, type_name: str) -> Handler:
        """Wrap a product to compare it with the one computed in 64 bits."""
        readers = [self.machine.reader(operand, type_name) for operand in instruction.operands[1:]]
        wide_dtype, (low, high) = (np.int64 if is_signed(type_name) else np.uint64), limits(type_name)

        def multiply(lanes: Lanes) -> Successors:
            a, b, *c = (np.broadcast_to(read(lanes), (count_of(lanes),)).astype(wide_dtype) for read in readers)
            exact_result = a * b + c[0] if c else a * b
            is_out_of_range = (exact_result < low) | (exact_result > high)
            if is_out_of_range.any():
                i = int(np.argmax(is_out_of_range))
                addend_text = f" + {c[0][i]}" if c else ""
                message = f"{a[i]} * {b[i]}{addend_text} = {exact_result[i]} does not fit {type_name},"
                self.report_unless_silent(instruction, lanes, is_out_of_range, message)
            return handler(lanes)

        return multiply

    def store(self, access: MemoryAccess, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Check that stored registers fit the narrower width of the store."""
        bits, operands = bits_of(access.type), access.instruction.operands
        if access.instruction.head != "st" or bits > 32:
            return
        region = self.machine.memory.region_of(int(offsets.min()))
        dtype = self.arrays.get(region.start) if region and int(offsets.max()) < region.end else None
        is_array = dtype is not None and dtype.kind in "iu" and dtype.itemsize * 8 == bits
        signed = dtype.kind == "i" if is_array and dtype is not None else None
        target_text = f"{dtype}, which the array holds" if is_array else f"{bits} bits"
        stored_operands: tuple[Operand, ...] = (
            operands[1].elements if isinstance(operands[1], Vector) else operands[1:2]
        )
        for register in stored_operands:
            if isinstance(register, Register) and bits_of(register.type) > bits:
                read = self.machine.reader(register, f"s{bits_of(register.type)}")
                self.check_range(access.instruction, lanes, read(lanes), bits, signed, target_text)

    def check_range(
        self, instruction: Instruction, lanes: Lanes, values: Array, bits: int, signed: bool | None, target: str
    ) -> None:
        """Report values that do not fit in `bits` bits; `signed` None accepts either sign convention."""
        low, high = -(1 << bits - 1) if signed is not False else 0, (1 << bits - (signed is True)) - 1
        width = values.itemsize
        as_signed = np.broadcast_to(values, (count_of(lanes),)).view(f"i{width}")
        is_out_of_range = ((as_signed < low) | (as_signed > high)) & (as_signed.view(f"u{width}") > high)
        if is_out_of_range.any():
            message = f"{as_signed[int(np.argmax(is_out_of_range))]} does not fit {target},"
            self.report_unless_silent(instruction, lanes, is_out_of_range, message)

    def report_unless_silent(self, instruction: Instruction, lanes: Lanes, wrong: Array, message: str) -> None:
        """Report lost bits, unless their line says that they are lost on purpose."""
        if not self.is_silent(self.machine.index[id(instruction)]):
            self.report(instruction, "narrow", lanes, wrong, message)
