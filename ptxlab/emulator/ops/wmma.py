"""wmma: load, mma and store of fragments whose layout PTX leaves unspecified.

So any layout will do that all of them share. Here a lane holds neighbouring elements of the row-major matrix: lane 0
the first ones, and so on; where registers have room for more than the matrix (A and B in f16), it begins again.
Elements of four bits and of one are taken by words of 32 bits along K.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.addressing import elements, locator
from ptxlab.emulator.core.lanes import Handler, Lanes, count_of
from ptxlab.emulator.core.machine import Machine, binder
from ptxlab.emulator.core.warp import EVERYBODY, bind_collective, whole_warps
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, Array, limits
from ptxlab.emulator.ops.floating import MODES, canonical
from ptxlab.emulator.ops.mma_words import count_bits, fuse_products
from ptxlab.emulator.ops.narrow_floats import floats
from ptxlab.errors import EmulationError

_WARP = 32
_WIDE = ("m16n16k16", "m8n32k16", "m32n8k16")
# shape -> type of A and B -> types that D and C may have
_FORMS: dict[str, dict[str, tuple[str, ...]]] = {
    **{s: {"f16": ("f16", "f32"), "bf16": ("f32",), "s8": ("s32",), "u8": ("s32",)} for s in _WIDE},
    "m16n16k8": {"tf32": ("f32",)},
    "m8n8k4": {"f64": ("f64",)},
    "m8n8k32": {"s4": ("s32",), "u4": ("s32",)},
    "m8n8k128": {"b1": ("s32",)},
}
_PER_WORD = {"s4": 8, "u4": 8, "b1": 32}  # elements of a word
_MEMORY = {"bf16": "b16", "tf32": "b32", "s4": "b32", "u4": "b32", "b1": "b32"}  # as what an element, or word, is moved


@dataclass(frozen=True)
class WmmaFragment:
    """An operand of a wmma: its shape and types, and which lane holds which element."""

    rows: int
    cols: int
    type: str  # of an element; of those by words, rows and columns count words

    @classmethod
    def of(cls, shape: str, type_name: str, operand: str) -> Self:
        """Return the fragment of operand a, b, c or d of a shape such as m16n16k16."""
        m, columns_and_depth = shape[1:].split("n")
        n, k = map(int, columns_and_depth.split("k"))
        k //= _PER_WORD.get(type_name, 1)
        rows, cols = {"a": (int(m), k), "b": (k, n)}.get(operand, (int(m), n))
        return cls(rows, cols, type_name)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """NumPy type of an element in memory."""
        return DTYPES[_MEMORY.get(self.type, self.type)]

    @property
    def register(self) -> str:
        """Type of a register."""
        return self.type if self.type in ("f32", "s32", "f64") else "b32"

    def registers(self, of_product: bool) -> int:
        """Count the registers of a lane; A and B in f16 always take eight."""
        if self.type == "f16" and of_product:
            return 8
        return max(1, self.rows * self.cols * self.dtype.itemsize // (_WARP * DTYPES[self.register].itemsize))

    def places(self, count: int) -> tuple[Array, Array]:
        """Return rows and columns [lanes, count] of the elements that the lanes hold."""
        index = np.arange(_WARP * count).reshape(_WARP, count) % (self.rows * self.cols)
        return index // self.cols, index % self.cols

    def matrix(self, raw: Array) -> Array:
        """View registers [warps, lanes, count] as the matrix [warps, rows, columns] of elements."""
        flat_values = np.ascontiguousarray(raw).view(self.dtype).reshape(len(raw), -1)
        return flat_values[:, : self.rows * self.cols].reshape(-1, self.rows, self.cols)


@binder("wmma")
def _wmma(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    opcode = Opcode(instruction.opcode)
    action = opcode.choice("load", "store", "mma")
    if not (opcode.flag("sync") and opcode.flag("aligned")):
        raise UnknownOpcode(instruction.opcode)
    if action == "mma":
        handler = _multiply(machine, instruction, opcode)
    else:
        handler = _move(machine, instruction, opcode, action == "load")

    def run(lanes: Lanes, members: Array) -> None:
        whole_warps(machine, instruction, lanes, members)
        handler(lanes)

    return bind_collective(machine, pc, EVERYBODY, run)


def _move(machine: Machine, instruction: Instruction, opcode: Opcode, loads: bool) -> Callable[[Lanes], None]:
    """Bind load or store: element (i, j) is `stride` elements behind that of the row, or column, before."""
    operand = opcode.choice("a", "b", "c") if loads else opcode.choice("d")
    is_row_major, shape = opcode.choice("row", "col") == "row", opcode.choice(*_FORMS)
    space = opcode.choice("global", "shared", "shared::cta", default="generic").split("::")[0]
    (type_name,) = opcode.modifiers if len(opcode.modifiers) == 1 else ("",)
    inputs, outputs = _FORMS[shape], {t for types in _FORMS[shape].values() for t in types}
    is_wrong_layout = type_name in _PER_WORD and is_row_major != (operand == "a")
    if type_name not in (inputs if operand in "ab" else outputs) or is_wrong_layout:
        raise UnknownOpcode(instruction.opcode)
    fragment = WmmaFragment.of(shape, type_name, operand)
    first, second, *stride_operands = instruction.operands
    fragment_operand, address = (first, second) if loads else (second, first)
    registers = elements(fragment_operand, fragment.registers(operand in "ab"))
    per_register = DTYPES[fragment.register].itemsize // fragment.dtype.itemsize
    size, per_word = fragment.dtype.itemsize, _PER_WORD.get(type_name, 1)
    shortest = (fragment.cols if is_row_major else fragment.rows) * per_word
    read_stride = machine.reader(stride_operands[0] if stride_operands else ir.Immediate(shortest), "u32")
    element = _MEMORY.get(type_name, type_name)
    access = MemoryAccess(instruction, "load" if loads else "store", space, "weak", element, 1, ())
    locate, view = locator(machine, access, address), machine.memory.arena.view(fragment.dtype)
    watchers = machine.watchers
    rows, cols = fragment.places(len(registers) * per_register)
    writers = [machine.writer(r, fragment.register) for r in registers] if loads else []
    readers = [] if loads else [machine.reader(r, fragment.register) for r in registers]

    def offsets(lanes: Lanes) -> Array:
        """Compute the arena offsets [lanes, elements]."""
        warps = count_of(lanes) // _WARP
        strides = np.broadcast_to(read_stride(lanes), (count_of(lanes),)).astype(np.int64)[:, None]
        if (strides % per_word).any():
            raise EmulationError(f"{machine.place(instruction, lanes)}: the stride is no multiple of {per_word}")
        strides = strides // per_word
        i, j = (np.tile(places, (warps, 1)) for places in (rows, cols))
        distances = (i * strides + j if is_row_major else j * strides + i) * size
        longest = distances.reshape(warps, -1).max(axis=1).repeat(_WARP) + size
        arena_offsets: Array = locate(lanes, longest)[:, None] + distances
        return arena_offsets

    def load(lanes: Lanes) -> None:
        element_offsets = offsets(lanes)
        for column in element_offsets.T:
            for watcher in watchers:
                watcher.load(access, lanes, column)
        elements_read = view[element_offsets // size]  # [lanes, elements]
        words = elements_read.view(DTYPES[fragment.register]).reshape(len(elements_read), -1)  # [lanes, registers]
        for write, register_values in zip(writers, words.T, strict=True):
            write(lanes, register_values)

    def store(lanes: Lanes) -> None:
        element_offsets = offsets(lanes)
        register_values = np.broadcast_arrays(*[read(lanes) for read in readers], element_offsets[:, 0])[:-1]
        words = np.ascontiguousarray(np.stack(register_values, axis=1))  # [lanes, registers]
        values = words.view(fragment.dtype).reshape(len(words), -1)  # [lanes, elements]
        for place, element_values in zip(element_offsets.T, values.T, strict=True):
            for watcher in watchers:
                watcher.store(access, lanes, place, element_values)
            view[place // size] = element_values

    return load if loads else store


def _multiply(machine: Machine, instruction: Instruction, opcode: Opcode) -> Callable[[Lanes], None]:
    """Bind mma: D = A·B + C, rounded once, as `mma` does it."""
    layouts = opcode.choice("row", "col"), opcode.choice("row", "col")
    shape, saturates = opcode.choice(*_FORMS), opcode.flag("satfinite")
    combine = opcode.choice("xor", "and") if shape == "m8n8k128" and opcode.flag("popc") else ""
    rounding, types = opcode.choice(*MODES, default=""), opcode.modifiers
    d_type, a_type, b_type, c_type = (types[0], "f16", "f16", types[1]) if len(types) == 2 else (*types, "", "", "")[:4]
    is_allowed = a_type == b_type and {c_type, d_type} <= {*_FORMS[shape].get(a_type, ())}
    is_binary = a_type == "b1"
    if not is_allowed or len(types) not in (2, 4) or (saturates and (d_type != "s32" or is_binary)):
        raise UnknownOpcode(instruction.opcode)
    if (
        (rounding and a_type != "f64")
        or (a_type in _PER_WORD and layouts != ("row", "col"))
        or is_binary != bool(combine)
    ):
        raise UnknownOpcode(instruction.opcode)
    kinds = {"d": d_type, "a": a_type, "b": b_type, "c": c_type}
    fragments = {name: WmmaFragment.of(shape, kind, name) for name, kind in kinds.items()}
    if len(instruction.operands) != 4:
        raise ValueError(f"{instruction.opcode} takes 4 operands, not {len(instruction.operands)}")
    registers = {
        name: elements(operand, fragments[name].registers(name in "ab"))
        for name, operand in zip(kinds, instruction.operands, strict=True)
    }
    readers = {n: [machine.reader(r, fragments[n].register) for r in registers[n]] for n in "abc"}
    writers = [machine.writer(r, fragments["d"].register) for r in registers["d"]]

    def matrix(name: str, lanes: Lanes) -> Array:
        count = count_of(lanes)
        columns = np.stack([np.broadcast_to(read(lanes), (count,)) for read in readers[name]], axis=1)
        raw = fragments[name].matrix(columns.reshape(-1, _WARP, columns.shape[1]))
        return raw if kinds[name] in ("s32", "f32", "f64", "b1") else _numbers(raw, kinds[name], name)

    def multiply(lanes: Lanes) -> None:
        wide_dtype = np.int64 if d_type == "s32" else np.float64
        a, b, c = matrix("a", lanes), matrix("b", lanes), matrix("c", lanes).astype(wide_dtype)
        if is_binary:
            sums = count_bits(combine)(a, b, c)
        elif a_type == "f64":
            sums = fuse_products(rounding or "rn")(a, b, c)
        else:
            sums = c + a.astype(wide_dtype) @ b.astype(wide_dtype)
        if d_type == "s32":
            d = (sums.clip(*limits("s32")) if saturates else sums).astype(np.int32)
        else:
            d = canonical(sums.astype(DTYPES[d_type]), d_type)
        columns = d.reshape(count_of(lanes), -1).view(DTYPES[fragments["d"].register])
        for write, column in zip(writers, columns.T, strict=True):
            write(lanes, column)

    return multiply


def _numbers(raw: Array, type_name: str, operand: str) -> Array:
    """Convert elements to numbers."""
    if type_name in ("s4", "u4"):  # words [warps, rows, K] of A, [warps, K, columns] of B
        words = np.ascontiguousarray(raw if operand == "a" else raw.swapaxes(1, 2))
        nibbles = np.stack([words.view(np.uint8) << np.uint8(4), words.view(np.uint8) & np.uint8(0xF0)], axis=-1)
        numbers = nibbles.view(np.int8 if type_name == "s4" else np.uint8).reshape(*words.shape[:2], -1) >> 4
        return numbers if operand == "a" else numbers.swapaxes(1, 2)
    return raw if type_name in ("s8", "u8") else floats(raw, type_name)
