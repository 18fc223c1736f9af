"""The check "float": where a NaN, an infinity, an f16 overflow or a subnormal number first arises.

It arises in arithmetic (also mma, wmma, wgmma, atom and red) none of whose operands is of that kind: 0 / 0, 1 / 0,
65504 + 65504 in f16, 2^-100 * 2^-100. So infinity - infinity is a NaN that arises, and what follows from it is not; nor
are constants and what is loaded. Of each kind the first place of the run is reported. Products of matrices are looked
at warp by warp, those of wgmma when they are done, a packed pair as one.

Kernels make infinities and subnormal numbers on purpose, so `all` does not include this check.
"""

from collections.abc import Sequence

import numpy as np

from ptxlab.emulator.async_.wgmma import WgmmaProducts
from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.core.access import MemoryAccess, decode
from ptxlab.emulator.core.effect import Effect
from ptxlab.emulator.core.lanes import Handler, Lanes, Reader, Successors, as_lanes, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import DTYPES, Array, bits_of, is_float
from ptxlab.emulator.ops.alu import typed_operands
from ptxlab.emulator.ops.rounding import element, widen

ARITHMETIC = frozenset({
    "add", "sub", "mul", "fma", "mad", "div", "rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh", "cvt",
})  # fmt: skip
MANTISSA = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}  # bits
_KIND_NAMES = {"nan": "a NaN", "infinity": "an infinity", "overflow": "an infinity", "subnormal": "a subnormal number"}
_MULTIPLIED = {"f16": "f16x2", "bf16": "bf16x2", "tf32": "f32", "f64": "f64"}  # what a register of A or B holds
_WMMA = {*_MULTIPLIED, "f32", "s32", "s8", "u8"}

Values = tuple[str, Array]  # PTX type, and register values of that type


def masks_by_kind(values: Values) -> dict[str, Array]:
    """Tell which registers hold a number of each kind, one bool each; nothing for integers."""
    type_name, raw = values
    if not is_float(type_name):
        return {}
    scalar_type = element(type_name)
    unsigned_dtype, without_sign = np.dtype(f"u{bits_of(scalar_type) // 8}"), (1 << bits_of(scalar_type) - 1) - 1
    smallest_normal = 1 << MANTISSA[scalar_type]
    infinity_bits = without_sign + 1 - smallest_normal
    magnitude = np.ascontiguousarray(raw).view(unsigned_dtype).reshape(len(raw), -1) & unsigned_dtype.type(without_sign)
    masks = {
        "nan": magnitude > infinity_bits,
        "overflow" if scalar_type == "f16" else "infinity": magnitude == infinity_bits,
        "subnormal": (magnitude > 0) & (magnitude < smallest_normal),
    }
    return {kind: mask.any(axis=1) for kind, mask in masks.items()}


def is_kind(operand: Values, kind: str) -> Array | bool:
    """Tell which of an operand's values are of a kind; an f16's infinity is one among others here."""
    masks = masks_by_kind(operand)
    is_infinite = masks.get("infinity", masks.get("overflow", False))
    return is_infinite if kind in ("infinity", "overflow") else masks.get(kind, False)


class FloatValues(Check):
    """Check floating-point arithmetic for special results (NaN, infinity, ...) where no operand is such."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.multiplied_before = 0  # mma before this instruction are done by an earlier one's handler
        self.memory_before: tuple[Array, Array] | None = None  # what an atomic met: arena offsets, and values there

    def wrap_handler(self, instruction: Instruction, handler: Handler) -> Handler:
        """Wrap a handler of floating-point arithmetic to compare its results with its operands."""
        if instruction.head == "mma":
            return self.wrap_mma(instruction, handler)
        if instruction.opcode.startswith("wmma.mma"):
            return self.wrap_wmma(instruction, handler)
        if instruction.head in ("atom", "red"):
            return self.wrap_atomic(instruction, handler)
        if instruction.head not in ARITHMETIC:
            return handler
        _, ((target, t), *_), sources = typed_operands(instruction)
        if not is_float(t):
            return handler
        is_conversion = instruction.head == "cvt"
        readers = [
            (type_name, self.machine.reader(operand, type_name, is_conversion)) for operand, type_name in sources
        ]
        read_stored = self.machine.reader(target, t, is_conversion)

        def run_and_compare(lanes: Lanes) -> Successors:
            operands = [(type_name, read(lanes).copy()) for type_name, read in readers]
            successors = handler(lanes)
            self.compare(instruction, lanes, (t, read_stored(lanes)), operands)
            return successors

        return run_and_compare

    def compare(self, instruction: Instruction, lanes: Lanes, destination: Values, operands: Sequence[Values]) -> None:
        """Report the lanes whose result is of a special kind (NaN, infinity, ...) that no operand is of."""
        for kind, is_arising in masks_by_kind(destination).items():
            if is_arising.any():
                for operand in operands:
                    is_arising = is_arising & ~np.asarray(is_kind(operand, kind))
                if is_arising.any():
                    index = int(np.argmax(is_arising))
                    operand_text = ", ".join(text_of(operand, index) for operand in operands)
                    message = f"makes {_KIND_NAMES[kind]} of {operand_text},"
                    self.report_origin(instruction, kind, lanes, is_arising, message)

    def report_origin(self, instruction: Instruction, kind: str, lanes: Lanes, wrong: Array, message: str) -> None:
        """Report numbers of a kind that arise here, unless that kind has arisen elsewhere before."""
        first = next((f for f in self.machine.launch.findings.by_key.values() if f.kind == kind), None)
        location = instruction.path, instruction.line, instruction.callers
        if first is None or (first.path, first.line, first.callers) == location:
            self.report(instruction, kind, lanes, wrong, message)

    # What is no operation of registers alone

    def wrap_atomic(self, instruction: Instruction, handler: Handler) -> Handler:
        """Check the sums that an atomic makes in memory."""
        access = decode(instruction, "atomic")
        t = access.type
        if not is_float(t) or access.operation != ("add",):
            return handler
        address = next(i for i, o in enumerate(instruction.operands) if isinstance(o, ir.Address))
        source = instruction.operands[address + 1]
        addends = source.elements if isinstance(source, ir.Vector) else (source,)
        readers = [self.machine.reader(addend, t) for addend in addends]
        rows = self.machine.memory.arena.view(DTYPES[t]).reshape(-1, len(addends))

        def run_and_compare(lanes: Lanes) -> Successors:
            addends = [np.broadcast_to(read(lanes), len(indices_of(lanes))).copy() for read in readers]
            successors = handler(lanes)
            assert self.memory_before is not None
            offsets, old_values = self.memory_before
            new_values = rows[offsets // rows[0].nbytes]
            for i, addend in enumerate(addends):
                self.compare(instruction, lanes, (t, new_values[:, i]), [(t, old_values[:, i]), (t, addend)])
            return successors

        return run_and_compare

    def atomic(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Save what an atomic's addresses hold before it runs."""
        rows = self.machine.memory.arena.view(DTYPES[access.type]).reshape(-1, access.count)
        self.memory_before = offsets, rows[offsets // access.size]

    def wrap_mma(self, instruction: Instruction, handler: Handler) -> Handler:
        """Wrap an mma to check the products of its group, which the first mma's handler computes, by warp."""
        machine = self.machine
        pc = machine.index[id(instruction)]
        d, a, b, _ = [word for word in instruction.opcode.split(".")[1:] if word[-1].isdigit() and word[0] != "m"][:4]
        if pc < self.multiplied_before or not is_float(d):
            return handler
        self.multiplied_before = machine.done_before

        def readers(operand: ir.Operand, type_name: str) -> list[tuple[str, Reader]]:
            kind = "b32" if "x2" in type_name else type_name
            return [(type_name, machine.reader(element, kind)) for element in elements_of(operand)]

        d_type = "f16x2" if d == "f16" else d
        members = []
        for mma in machine.code[pc : machine.done_before]:
            destination, *sources = mma.operands
            types = _MULTIPLIED.get(a, "u32"), _MULTIPLIED.get(b, "u32"), d_type
            operand_readers = [pair for o, t in zip(sources, types, strict=True) for pair in readers(o, t)]
            members.append((mma, readers(destination, d_type), operand_readers))

        def run_and_compare(lanes: Lanes) -> Successors:
            warps = np.unique(indices_of(lanes) // 32)
            warp_lanes = as_lanes((warps[:, None] * 32 + np.arange(32)).reshape(-1))
            old_values = [
                [
                    [(t, np.broadcast_to(read(warp_lanes), 32 * len(warps)).copy()) for t, read in group]
                    for group in (d_readers, operand_readers)
                ]
                for _, d_readers, operand_readers in members
            ]
            successors = handler(lanes)
            for (mma, d_readers, _), (old_d, operands) in zip(members, old_values, strict=True):
                for (t, read), (_, old_d_values) in zip(d_readers, old_d, strict=True):
                    self.compare_warps(mma, warp_lanes, (t, read(warp_lanes)), old_d_values, operands)
            return successors

        return run_and_compare

    def wrap_wmma(self, instruction: Instruction, handler: Handler) -> Handler:
        """Check the product that a wmma makes."""
        d, *middle, c = [word for word in instruction.opcode.split(".") if word in _WMMA]
        if not is_float(d):
            return handler
        a = b = _MULTIPLIED.get(middle[0] if middle else "f16", "u32")
        types = ["f16x2" if t == "f16" else t for t in (d, a, b, c)]
        d_readers, *operand_readers = (
            [(t, self.machine.reader(element, "b32" if "x2" in t else t)) for element in elements_of(operand)]
            for operand, t in zip(instruction.operands, types, strict=True)
        )

        def run_and_compare(lanes: Lanes) -> Successors:
            def read(readers: list[tuple[str, Reader]]) -> list[Values]:
                return [(t, np.broadcast_to(values(lanes), len(indices_of(lanes))).copy()) for t, values in readers]

            operands, old_d = [pair for readers in operand_readers for pair in read(readers)], read(d_readers)
            successors = handler(lanes)
            for new_values, (_, old_values) in zip(read(d_readers), old_d, strict=True):
                self.compare_warps(instruction, lanes, new_values, old_values, operands)
            return successors

        return run_and_compare

    def issue(self, effect: Effect) -> None:
        """Make a wgmma of floats note special numbers among its operands."""
        if isinstance(effect, WgmmaProducts):
            effect.notes_special = effect.decoded.is_float

    def effect_complete(self, effect: Effect) -> None:
        """Check the product that a wgmma has made."""
        if not isinstance(effect, WgmmaProducts) or not effect.notes_special or effect.old_d is None:
            return
        t, lanes, warps = ("f16x2" if effect.decoded.d_type == "f16" else "f32"), effect.all_lanes, len(effect.lanes)
        new_masks, old_masks = (
            masks_by_kind((t, np.ascontiguousarray(raw).reshape(-1).view(DTYPES[t])))
            for raw in (effect.decoded.read_d(lanes), effect.old_d)
        )
        for kind, mask in new_masks.items():
            is_in_sums = old_masks[kind].reshape(warps, -1).any(axis=1) & effect.adds
            is_in_operands = is_in_sums | effect.special["infinity" if kind == "overflow" else kind]
            is_arising = (mask.reshape(warps, 32, -1).any(axis=2) & ~is_in_operands[:, None]).reshape(-1)
            if is_arising.any():
                message = f"makes {_KIND_NAMES[kind]}, and no operand of its warp is one,"
                self.report_origin(effect.instruction, kind, lanes, is_arising, message)

    def compare_warps(
        self, instruction: Instruction, lanes: Lanes, destination: Values, old_values: Array, operands: Sequence[Values]
    ) -> None:
        """Report results of a kind that no operand of the whole warp is of."""
        is_changed = destination[1].view(f"u{old_values.itemsize}") != old_values.view(f"u{old_values.itemsize}")
        for kind, is_arising in masks_by_kind(destination).items():
            if not (is_arising := is_arising & is_changed).any():
                continue
            is_in_operands = np.any(
                [np.broadcast_to(is_kind(operand, kind), len(is_arising)) for operand in operands], axis=0
            )
            is_arising &= ~np.repeat(is_in_operands.reshape(-1, 32).any(axis=1), 32)
            if is_arising.any():
                message = f"makes {_KIND_NAMES[kind]}, and no operand of its warp is one,"
                self.report_origin(instruction, kind, lanes, is_arising, message)


def elements_of(operand: ir.Operand) -> ir.Operands:
    """Return the registers of a vector, or the operand itself."""
    return operand.elements if isinstance(operand, ir.Vector) else (operand,)


def text_of(values: Values, index: int) -> str:
    """Write one of the values, or a packed pair (low half first), as text."""
    type_name, raw = values
    raw = raw[index if len(raw) > 1 else 0 :][:1]
    if not is_float(type_name):
        return str(raw[0])
    numbers = [f"{number:.6g}" for number in widen(raw, type_name).reshape(-1).tolist()]
    return numbers[0] if len(numbers) == 1 else f"({', '.join(numbers)})"
