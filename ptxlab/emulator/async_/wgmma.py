"""wgmma: D = A·B + D of a warp group; A in registers or in shared memory, B in shared memory.

Operands are 8-bit integers, which are exact, or f16, bf16, tf32 and fp8 with sums in f32 or f16. The latter are added
up in float64 and rounded once per instruction, whereas hardware truncates on the way, as in `ops.mma`.

Each of the four warps does its 16 rows by itself, as an effect of its own (`effect_queue`): late, it reads registers
and shared memory and writes the accumulators only when its group is waited for.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np

from ptxlab.emulator.core.addressing import elements
from ptxlab.emulator.core.effect import Effect, Places
from ptxlab.emulator.core.effect_queue import EffectQueue
from ptxlab.emulator.core.lanes import Handler, Lanes, as_lanes, indices_of
from ptxlab.emulator.core.machine import Machine, binder
from ptxlab.emulator.core.memory import SHARED_START, Memory
from ptxlab.emulator.core.warp import EVERYBODY, bind_collective, whole_warps
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, Array, bits_of, limits
from ptxlab.emulator.ops.floating import canonical
from ptxlab.emulator.ops.narrow_floats import OPERANDS, floats
from ptxlab.emulator.ops.rounding import TINY
from ptxlab.errors import ArgumentError, EmulationError, MemoryFault
from ptxlab.hardware.descriptors import MatrixDescriptor
from ptxlab.hardware.fragments import WGMMA_N, Fragment, mma_a, wgmma_d

_TYPES: dict[str, np.dtype[Any]] = {"s8": np.dtype("i1"), "u8": np.dtype("u1"), **OPERANDS}
_FP8 = ("e4m3", "e5m2")
_FORMS = {  # of D, and of A and B each
    ("s32", "s8"), ("s32", "u8"), ("f32", "f16"), ("f16", "f16"), ("f32", "bf16"), ("f32", "tf32"),
    *((d, type_name) for d in ("f32", "f16") for type_name in _FP8),
}  # fmt: skip
_PIECE = 16  # contiguous bytes of an operand, whatever its swizzle
ROWS = 16  # of a warp
_WARP_GROUP = 128  # threads


@cache
def accumulators(n: int, d_type: str) -> Fragment:
    """Return the fragment of D that a warp holds: its own 16 rows."""
    group_fragment = wgmma_d(n, d_type != "s32", bits_of(d_type))
    return Fragment(
        f"{group_fragment.name} of a warp", group_fragment.bits, group_fragment.rows[:32], group_fragment.cols[:32]
    )


@lru_cache(maxsize=1024)
def pieces(descriptor: int, rows: int, transposed: bool = False) -> Array:
    """Return the shared addresses of the 16-byte pieces of a descriptor's operand, in order of the rows.

    The shape is [rows, 2] along K, which is 32 bytes deep. If `transposed` it is [rows / 8, 16], eight rows at each of
    16 places along K.
    """
    matrix_descriptor = MatrixDescriptor.decode(descriptor)
    return matrix_descriptor.mn_major_addresses(rows) if transposed else matrix_descriptor.addresses(rows)[:, ::_PIECE]


def numbers(values: Array, type_name: str) -> Array:
    """Convert operands for BLAS: integers to float32, exact for sums of 32 products; floats to float64."""
    return values.astype(np.float32) if type_name in ("s8", "u8") else floats(values, type_name)


@dataclass(frozen=True, eq=False)
class DecodedWgmma:
    """Fixed parts of a wgmma instruction: its types, and its operands, as functions of lanes (whole warps)."""

    n: int
    d_type: str
    a_type: str
    b_type: str
    saturates: bool
    read_a: Callable[[Lanes], Array] | None  # A's registers u32 [warps, 32, 4]; None: A has a descriptor
    read_d: Callable[[Lanes], Array]
    write_d: Callable[[Lanes, Array], None]
    a_registers: tuple[ir.Register, ...]
    d_registers: tuple[ir.Register, ...]
    signs: float = 1.0  # of the products: floating operands may be negated
    transposed: tuple[bool, bool] = (False, False)  # whether A and B are MN-major

    @property
    def is_float(self) -> bool:
        """True if the instruction adds floats."""
        return self.d_type != "s32"

    @cached_property
    def rows(self) -> tuple[Array, Array]:
        """Rows of A's and of D's registers in the file of 32-bit registers, each [registers, 1]."""
        register_lists = self.a_registers, self.d_registers
        a, d = (np.array([register.index for register in registers], np.intp)[:, None] for registers in register_lists)
        return a, d


@dataclass(eq=False, kw_only=True)
class WgmmaProducts(Effect):
    """Products of a wgmma that is under way, one entry per warp."""

    decoded: DecodedWgmma
    quarter: Array  # which 16 rows are the warp's
    base: Array  # arena offset of shared address 0, of the warp's block
    a: Array  # descriptors u64; 0 for registers
    b: Array
    adds: Array  # bool: to D, instead of replacing it
    products: Array | None = None  # A·B int64 or float64 [warps, 16, n]
    notes_special: bool = False  # whether `special` is wanted, by the check "float"
    special: dict[str, Array] = field(default_factory=dict)  # kind of number -> [warps], whether A or B has such
    old_d: Array | None = None  # D before, u32 [warps, 32, registers]

    @property
    def all_lanes(self) -> Lanes:
        """The set of all lanes of the warps."""
        return as_lanes((self.lanes[:, None] + np.arange(32)).reshape(-1))

    @property
    def adds_to(self) -> list[tuple[ir.Register, Array]]:
        """Registers of D, each with the lanes whose D is added to, not replaced."""
        lanes = (self.lanes[self.adds, None] + np.arange(32)).reshape(-1)
        return [(register, lanes) for register in self.decoded.d_registers]

    def operand(self, memory: Memory, descriptor: int, base: int, rows: int, of_b: bool) -> Array:
        """Read a matrix in shared memory as numbers [rows, depth]."""
        type_name, transposed = (self.decoded.a_type, self.decoded.b_type)[of_b], self.decoded.transposed[of_b]
        places = (pieces(descriptor, rows, transposed) + base) // _PIECE
        raw: Array = memory.arena.reshape(-1, _PIECE)[places].view(_TYPES[type_name])
        return numbers((raw.swapaxes(1, 2) if transposed else raw).reshape(rows, -1), type_name)

    def take(self, memory: Memory) -> None:
        """Multiply: of integers exact in float32, as a sum of 32 products stays below 2^24."""
        if self.products is not None:
            return
        decoded = self.decoded
        products = np.empty((len(self.lanes), ROWS, decoded.n), np.float64 if decoded.is_float else np.int64)
        a_rows = None
        if decoded.read_a:
            dtype = _TYPES[decoded.a_type]
            fragment = mma_a(32 // dtype.itemsize, 8 * dtype.itemsize)
            a_rows = numbers(fragment.gather(decoded.read_a(self.all_lanes), dtype), decoded.a_type)
        warps_by_operands: dict[tuple[int, int, int], list[int]] = {}  # warps with the same operands
        for warp, key in enumerate(zip(self.base.tolist(), self.a.tolist(), self.b.tolist(), strict=True)):
            warps_by_operands.setdefault(key, []).append(warp)
        for (base, a, b), warps in warps_by_operands.items():
            right = self.operand(memory, b, base, decoded.n, of_b=True).T
            if a_rows is not None:
                left = a_rows[warps]
            else:
                group_rows = self.operand(memory, a, base, 4 * ROWS, of_b=False)
                left = group_rows.reshape(4, ROWS, -1)[self.quarter[warps]]
            products[warps] = left @ right  # warp by warp: products so small that BLAS takes no thread for them
            if self.notes_special:
                self.note_special(warps, (left, decoded.a_type), (right[None], decoded.b_type))
        # + 0.0: a sum of zeros is +0, also where the signs negate it
        self.products = products * decoded.signs + 0.0 if decoded.is_float else products

    def note_special(self, warps: list[int], *operands: tuple[Array, str]) -> None:
        """Note which kinds of numbers these warps multiply: operands [warps, .., ..], or one for all."""
        for x, type_name in operands:
            tiny = (x != 0) & (np.abs(x) < TINY.get(type_name, 0))
            for kind, mask in {"nan": np.isnan(x), "infinity": np.isinf(x), "subnormal": tiny}.items():
                self.special.setdefault(kind, np.zeros(len(self.lanes), bool))[warps] |= mask.any(axis=(1, 2))

    def write(self, memory: Memory) -> None:
        """Add the products to D, or replace D by them."""
        self.take(memory)
        assert self.products is not None
        decoded, fragment, lanes = self.decoded, accumulators(self.decoded.n, self.decoded.d_type), self.all_lanes
        kind, self.old_d = DTYPES[decoded.d_type], decoded.read_d(lanes)
        old_values = fragment.gather(self.old_d, kind).astype(self.products.dtype)
        sums = np.where(self.adds[:, None, None], old_values, 0) + self.products
        if decoded.is_float:
            sums = canonical(sums.astype(kind), decoded.d_type)
        elif decoded.saturates:
            sums = sums.clip(*limits("s32"))
        columns = fragment.scatter(sums.astype(kind))
        decoded.write_d(lanes, columns)
        self.products = None

    @cached_property
    def reads(self) -> Places:
        """The operands in shared memory, piece by piece."""
        lanes, starts = [], []
        for i, lane in enumerate(self.lanes.tolist()):
            is_a_transposed, is_b_transposed = self.decoded.transposed
            places = [pieces(int(self.b[i]), self.decoded.n, is_b_transposed).reshape(-1)]
            if self.decoded.read_a is None:
                places.append(pieces(int(self.a[i]), 4 * ROWS, is_a_transposed).reshape(4, -1)[int(self.quarter[i])])
            starts.append(np.concatenate(places) + self.base[i])
            lanes.append(np.full(starts[-1].shape, lane))
        return np.concatenate(lanes), np.concatenate(starts), np.full(sum(map(len, starts)), _PIECE)


@binder("wgmma")
def _wgmma(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    action, *modifiers = instruction.opcode.split(".")[1:]
    if modifiers[:2] != ["sync", "aligned"] or (modifiers[2:] and action != "mma_async"):
        raise UnknownOpcode(instruction.opcode)
    effects = machine.unit(EffectQueue)
    if action == "mma_async":
        return _multiply(machine, instruction, pc, modifiers[2:])
    if action == "commit_group":
        return bind_collective(machine, pc, EVERYBODY, lambda lanes, members: effects.commit("wgmma", lanes))
    if action == "wait_group":
        (newest_count,) = instruction.operands
        if not isinstance(newest_count, ir.Immediate):
            raise ValueError("the number of groups has to be a constant")
        return bind_collective(
            machine, pc, EVERYBODY, lambda lanes, members: effects.wait("wgmma", lanes, newest_count.bits)
        )
    if action != "fence":
        raise UnknownOpcode(instruction.opcode)

    def fence(lanes: Lanes, members: Array) -> None:
        for watcher in machine.watchers:
            watcher.register_fence(lanes)

    return bind_collective(machine, pc, EVERYBODY, fence)


def _reader(machine: Machine, registers: ir.Operands) -> Callable[[Lanes], Array]:
    """Build a function lanes (whole warps) -> contents of the registers, u32 [warps, 32, registers]."""
    read_indices = _index_of_registers(machine, registers)
    return lambda lanes: machine.files[32][read_indices(lanes)].T.reshape(-1, 32, len(registers))


def _writer(machine: Machine, registers: ir.Operands) -> Callable[[Lanes, Array], None]:
    """Build a function of lanes (whole warps) and new contents of the registers, u32 [warps, 32, registers]."""
    read_indices = _index_of_registers(machine, registers)

    def write(lanes: Lanes, values: Array) -> None:
        machine.files[32][read_indices(lanes)] = values.reshape(-1, len(registers)).T

    return write


def _index_of_registers(machine: Machine, registers: ir.Operands) -> Callable[[Lanes], tuple[Array, Lanes]]:
    """Build a function lanes -> index of their registers in the file of 32-bit registers."""
    for register in registers:
        machine.writer(register, "b32")  # refuses what is no register of 32 bits
    rows = np.array([register.index for register in registers], np.intp)
    return lambda lanes: (rows if isinstance(lanes, slice) else rows[:, None], lanes)


def _signs_and_layouts(
    constants: Sequence[ir.Operand], a_in_registers: bool, has_layouts: bool
) -> tuple[float, tuple[bool, bool]]:
    """Return the sign of the products, and whether A and B are transposed, from the last constants.

    A in registers is not transposed. Only operands of 16 bits may be (`has_layouts`).
    """
    values = [constant.bits for constant in constants if isinstance(constant, ir.Immediate)]
    signs = {1: 1.0, (1 << 32) - 1: -1.0, (1 << 64) - 1: -1.0, -1: -1.0}
    expected_count = 2 + has_layouts * (1 if a_in_registers else 2)
    if len(values) != len(constants) or len(values) != expected_count or not {*values[:2]} <= {*signs}:
        layouts = ", and 1 for each that is transposed" * has_layouts
        raise ValueError(f"takes {expected_count} constants: signs of A and B, 1 or -1{layouts}")
    if not {*values[2:]} <= {0, 1}:
        raise ValueError("an operand is transposed, 1, or not, 0")
    a_layout, b_layout = (0, 0, *values[2:])[-2:]
    return signs[values[0]] * signs[values[1]], (a_layout == 1, b_layout == 1)


def _multiply(machine: Machine, instruction: Instruction, pc: int, modifiers: list[str]) -> Handler:
    """Bind mma_async."""
    saturates = "satfinite" in modifiers
    shape, *types = [word for word in modifiers if word != "satfinite"]
    match = re.fullmatch(r"m64n(\d+)k(8|16|32)", shape)
    n, depth = (int(match[1]), int(match[2])) if match else (0, 0)
    if len(types) != 3 or any((types[0], type_name) not in _FORMS for type_name in types[1:]):
        raise UnknownOpcode(instruction.opcode)
    is_float, is_mixed = types[0] != "s32", types[1] != types[2]
    widths = range(8, 257, 8) if is_float else WGMMA_N
    if n not in widths or depth * _TYPES[types[1]].itemsize != 32 or (is_float and saturates):
        raise UnknownOpcode(instruction.opcode)
    if is_float and is_mixed and not {*types[1:]} <= {*_FP8}:
        raise UnknownOpcode(instruction.opcode)
    d, a, b, scale, *constants = instruction.operands
    d_registers = elements(d, n * bits_of(types[0]) // 64)
    a_registers = elements(a, 4) if isinstance(a, ir.Vector) else ()
    has_layouts = types[1] in ("f16", "bf16")
    signs, transposed = 1.0, (False, False)
    if is_float:
        signs, transposed = _signs_and_layouts(constants, bool(a_registers), has_layouts)
    if constants and not is_float:
        raise ValueError(f"{instruction.opcode} takes 4 operands, not {len(instruction.operands)}")
    decoded = DecodedWgmma(
        n=n,
        d_type=types[0],
        a_type=types[1],
        b_type=types[2],
        saturates=saturates,
        read_a=_reader(machine, a_registers) if a_registers else None,
        read_d=_reader(machine, d_registers),
        write_d=_writer(machine, d_registers),
        a_registers=a_registers,
        d_registers=d_registers,
        signs=signs,
        transposed=transposed,
    )
    read_a = None if a_registers else machine.reader(a, "u64")
    read_b, read_scale = machine.reader(b, "u64"), machine.reader(scale, "pred")
    effects = machine.unit(EffectQueue)

    def of_warps(lanes: Lanes, values: Array) -> Array:
        """Return one value per warp; raise EmulationError unless all lanes of each warp agree on it."""
        rows = np.broadcast_to(values, (len(indices_of(lanes)),)).reshape(-1, 32)
        if (rows != rows[:, :1]).any():
            raise EmulationError(f"{machine.place(instruction, lanes)}: a descriptor or scale differs between lanes")
        return rows[:, 0].copy()

    def check(lanes: Array, descriptors: Array, rows: int, transposed: bool) -> None:
        """Refuse descriptors that cannot be, or that reach beyond shared memory."""
        end = SHARED_START + machine.launch.window_bytes
        for lane, descriptor in zip(lanes.tolist(), descriptors.tolist(), strict=True):
            try:
                places = pieces(descriptor, rows, transposed)
            except ArgumentError as error:
                raise EmulationError(f"{machine.fault_place(instruction, lane)}: {error}") from None
            if places.min() < SHARED_START or places.max() + _PIECE > end:
                reach = f"{int(places.min()) - SHARED_START} to {int(places.max()) + _PIECE - SHARED_START}"
                place, window = machine.fault_place(instruction, lane), machine.launch.window_bytes
                raise MemoryFault(
                    f"{place}: the descriptor reaches shared addresses {reach} (window of {window} bytes)"
                )

    threads = prod(machine.launch.block)

    def multiply(lanes: Lanes, members: Array) -> None:
        whole_warps(machine, instruction, lanes, members)
        first = indices_of(lanes)[::32]
        if (machine.thread[first] // _WARP_GROUP * _WARP_GROUP + _WARP_GROUP > threads).any():
            place = machine.place(instruction, lanes)
            raise EmulationError(f"{place}: takes the four warps of a warp group (a block of {threads} threads)")
        b_values = of_warps(lanes, read_b(lanes))
        a_values = of_warps(lanes, read_a(lanes)) if read_a else np.zeros_like(b_values)
        check(first, b_values, n, decoded.transposed[1])
        if read_a:
            check(first, a_values, 4 * ROWS, decoded.transposed[0])
        effects.issue(
            WgmmaProducts(
                instruction=instruction,
                kind="wgmma",
                lanes=first,
                barrier=np.full(len(first), -1),
                decoded=decoded,
                base=machine.shared_base[first],
                quarter=machine.thread[first] // 32 % 4,
                a=a_values,
                b=b_values,
                adds=of_warps(lanes, read_scale(lanes)),
            )
        )

    return bind_collective(machine, pc, EVERYBODY, multiply)
