"""mma.sync: the warps that run it multiply their fragments in one batched product.

Integers: operands become float32, in which every sum of up to 64 products is exact (32 * 255 * 255 < 2^24), so BLAS
does the work; the accumulation wraps in int32, or saturates. Floating-point: products and their sum in float64, rounded
once to the accumulator's type. Hardware adds in an order of its own and truncates on the way, so that results agree
where all partial sums are exact, and are near elsewhere. fp8 is rounded as often as in the code that ptxas has for it.

A straight line of mma (no label or guard in between) that multiplies each of several A by each of several B runs as one
product: each operand is converted once, and BLAS gets larger matrices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from ptxlab.emulator.core.addressing import elements
from ptxlab.emulator.core.lanes import Handler, Lanes, Reader, Writer, count_of
from ptxlab.emulator.core.machine import Machine, binder
from ptxlab.emulator.core.warp import EVERYBODY, bind_collective, whole_warps
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, Array, limits
from ptxlab.emulator.ops.floating import canonical
from ptxlab.emulator.ops.mma_quarters import is_of_quarters, quarters_mma
from ptxlab.emulator.ops.mma_words import is_of_words, words_mma
from ptxlab.emulator.ops.narrow_floats import OPERANDS, floats
from ptxlab.hardware import fragments
from ptxlab.hardware.fragments import WARP

BITS = {"s8": 8, "u8": 8, "s4": 4, "u4": 4, "f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8}
FP8 = {"e4m3", "e5m2"}
FORMS = [
    ({"s8", "u8"}, ("s32",)), ({"s4", "u4"}, ("s32",)), ({"f16"}, ("f16", "f32")), ({"bf16"}, ("f32",)),
    ({"tf32"}, ("f32",)), (FP8, ("f16", "f32")),
]  # fmt: skip
_SHAPES = (*(f"m16n8k{k}" for k in (4, 8, 16, 32, 64)), "m8n8k16", "m8n8k32")
QUAD = np.dtype("V16")  # a register of four neighbouring lanes: a run of a row, in the picture of `fragments`
LONGEST = 16  # mma of one product
CHUNK = 1 << 16  # lanes times mma at a time, so that what they need stays in the cache

Tiles = list[tuple[int, int]]  # per register, its tile: down (rows of A, columns of B), and along k
Work = tuple[int, int, list[Reader], list[Writer]]  # an mma: which A, which B, registers of C and D


@dataclass(frozen=True)
class DecodedMma:
    """Shape and types of an mma."""

    m: int  # rows of A: 16 or 8
    d: str
    a: str
    b: str
    k: int
    saturates: bool

    @classmethod
    def of(cls, text: str) -> Self:
        """Decode the shape and types of an opcode."""
        opcode = Opcode(text)
        flags = [opcode.flag(name) for name in ("sync", "aligned", "row", "col")]
        shape, saturates = opcode.choice(*_SHAPES), opcode.flag("satfinite")
        m, k = (int(number) for number in shape[1:].split("n8k"))
        d, a, b, c, *extra_modifiers = *opcode.modifiers, "", "", "", ""
        is_allowed = d == c and any({a, b} <= types and d in accumulators for types, accumulators in FORMS)
        is_whole_depth = k * BITS.get(a, 0) in ((128, 256) if m == 16 else (128,))
        if (
            not all(flags)
            or not is_allowed
            or any(extra_modifiers)
            or not is_whole_depth
            or ((saturates or m == 8) and d != "s32")
        ):
            raise UnknownOpcode(text)
        return cls(m, d, a, b, k, saturates)

    @property
    def tiles(self) -> tuple[Tiles, Tiles]:
        """Tiles of A's registers and of B's."""
        bits = BITS[self.a]
        a, b = fragments.mma_a(self.k, bits), fragments.mma_b(self.k, bits)
        places = (a.rows // 8, a.cols * bits // 128), (b.cols // 8, b.rows * bits // 128)
        tiles_a, tiles_b = (
            list(zip(row_indices[0, :, 0].tolist(), column_indices[0, :, 0].tolist(), strict=True))
            for row_indices, column_indices in places
        )
        return tiles_a[: len(tiles_a) * self.m // 16], tiles_b

    @property
    def accumulators(self) -> Tiles:
        """Row tile and column of the first lane's element of C and D, register by register."""
        c = fragments.mma_c(16 if self.d == "f16" else 32)
        places = [(int(i) // 8, int(j)) for i, j in zip(c.rows[0, :, 0], c.cols[0, :, 0], strict=True)]
        return places[: len(places) * self.m // 16]


def group(machine: Machine, start: int) -> int:
    """Return the end of the run of mma at `start` that multiplies each of some A by each of some B."""
    code = machine.code

    def types(instruction: Instruction) -> ir.Operands:
        operands = [tuple(register.type for register in ir.registers((o,))) for o in instruction.operands]
        return instruction.opcode, instruction.guard, *operands

    stop, written_places, pairs = start + 1, set[int](), set[ir.Operands]()
    for index in range(start, min(start + LONGEST, len(code))):
        is_alike = (
            code[index].guard is None and index not in machine.targets and types(code[index]) == types(code[start])
        )
        if index > start and not is_alike:
            break
        d, a, b, _ = code[index].operands
        if written_places & {register.index for register in ir.registers((a, b))}:
            break
        written_places |= {register.index for register in ir.registers((d,))}
        pairs.add((a, b))
        if len(pairs) == len({a for a, _ in pairs}) * len({b for _, b in pairs}):
            stop = index + 1
    return stop


@binder("mma")
def _mma(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    if is_of_words(instruction):
        return words_mma(machine, instruction, pc)
    if is_of_quarters(instruction):
        return quarters_mma(machine, instruction, pc)
    decoded = DecodedMma.of(instruction.opcode)
    if pc < machine.done_before:
        return lambda lanes: None
    if len(instruction.operands) != 4:
        raise ValueError(f"{instruction.opcode} takes 4 operands, not {len(instruction.operands)}")
    machine.done_before = group(machine, pc)
    parts = [member.operands for member in machine.code[pc : machine.done_before]]
    all_a, all_b = (list(dict.fromkeys(part[i] for part in parts)) for i in (1, 2))
    tiles_a, tiles_b = decoded.tiles
    count, kind = len(decoded.accumulators), "b32" if decoded.d == "f16" else decoded.d

    def readers(operand: ir.Operand, registers: int, type_name: str) -> list[Reader]:
        return [machine.reader(register, type_name) for register in elements(operand, registers)]

    a = [readers(operand, len(tiles_a), "b32") for operand in all_a]
    b = [readers(operand, len(tiles_b), "b32") for operand in all_b]
    work: list[Work] = [
        (all_a.index(p[1]), all_b.index(p[2]), readers(p[3], count, kind),
         [machine.writer(register, kind) for register in elements(p[0], count)])
        for p in parts
    ]  # fmt: skip
    accumulate, multiply_rows = accumulation(decoded), fp8_dots(decoded.d) if decoded.a in FP8 else dots
    chunk = min(CHUNK // len(work) // WARP * WARP, CHUNK // 4)

    def multiply(lanes: Lanes) -> None:
        left = numbers(matrices(a, tiles_a, lanes), decoded.a)
        right = numbers(matrices(b, tiles_b, lanes, swap=True), decoded.b)
        products = multiply_rows(left, right)
        accumulate(products.reshape(len(products), len(a), decoded.m // 8, 8, len(b), 2, 4), work, lanes)

    def run(lanes: Lanes, members: Array) -> None:
        whole_warps(machine, instruction, lanes, members)
        first, last = (lanes.start, lanes.stop) if isinstance(lanes, slice) else (0, len(lanes))
        for start in range(first, last, chunk):
            part = slice(start, min(start + chunk, last))
            multiply(part if isinstance(lanes, slice) else lanes[part])

    return bind_collective(machine, pc, EVERYBODY, run)


def matrices(operands: list[list[Reader]], tiles: Tiles, lanes: Lanes, swap: bool = False) -> Array:
    """Read the operands of all warps, below each other: bytes [warps, rows, bytes of k].

    Row 2 t + j is at 4 j + t if `swap`.
    """
    warps, (down, along) = count_of(lanes) // WARP, tiles[-1]  # the last tile of all
    quads = np.empty((warps, len(operands), down + 1, 8, along + 1), QUAD)
    for i, readers in enumerate(operands):
        for read, (row, column) in zip(readers, tiles, strict=True):
            values = np.ascontiguousarray(read(lanes))
            values = (values if len(values) > 1 else np.repeat(values, WARP * warps)).view(QUAD).reshape(warps, 8)
            if swap:
                quads[:, i, row, :4, column], quads[:, i, row, 4:, column] = values[:, 0::2], values[:, 1::2]
            else:
                quads[:, i, row, :, column] = values
    return quads.reshape(warps, -1, along + 1).view(np.uint8)


def numbers(raw: Array, type_name: str) -> Array:
    """Convert bytes [warps, rows, bytes of k] to numbers; the order of k is any, but the same for A and B."""
    if type_name in OPERANDS:
        return floats(raw.view(OPERANDS[type_name]), type_name)
    if type_name[1:] == "4":  # sixteen times the low halves of the bytes, then the high ones
        raw = np.concatenate([raw << np.uint8(4), raw & np.uint8(0xF0)], axis=-1)
    values = raw.view(np.int8 if type_name[0] == "s" else np.uint8).astype(np.float32)
    return values if type_name[1:] == "8" else values * np.float32(1 / 16)


def dots(a: Array, b: Array) -> Array:
    """Multiply rows of A by columns of B: [warps, rows, k] and [warps, columns, k] -> [warps, rows, columns]."""
    products: Array = np.matmul(a, b.swapaxes(-1, -2))
    return products


def fp8_dots(d_type: str) -> Callable[[Array, Array], Array]:
    """`dots` of fp8, by two mma of f16 as on sm_90: of the lower two bytes of all registers, then the upper ones."""
    kind = DTYPES[d_type]

    def multiply(a: Array, b: Array) -> Array:
        is_lower_half = np.arange(a.shape[-1]) % 4 < 2
        products = dots(a[..., is_lower_half], b[..., is_lower_half]).astype(kind)
        return (products + dots(a[..., ~is_lower_half], b[..., ~is_lower_half])).astype(kind).astype(np.float64)

    return multiply


def accumulation(decoded: DecodedMma) -> Callable[[Array, list[Work], Lanes], None]:
    """Build a function that adds products to the accumulators of each mma.

    The products have the axes [warps, A, tile, row, B, j, t]; a column is 2 t + j.
    """
    kind, places = np.dtype("i4" if decoded.d == "s32" else "f8"), decoded.accumulators

    def add(c: Array, products: Array) -> Array:
        if decoded.d != "s32":
            return canonical((c + products).astype(c.dtype), decoded.d)
        if decoded.saturates:
            return np.add(c, products, dtype=np.int64).clip(*limits("s32")).astype(np.int32)
        return c + products

    def accumulate(products: Array, work: list[Work], lanes: Lanes) -> None:
        quads = products.astype(kind, copy=False).view(f"V{4 * kind.itemsize}")[..., 0]

        def part(mma: Work, row: int, j: int) -> Array:
            return np.ascontiguousarray(quads[:, mma[0], row, :, mma[1], j]).reshape(-1).view(kind)

        for mma in work:
            readers, writers = mma[2:]
            if decoded.d == "f16":  # columns 2 t and 2 t + 1 in one register
                pairs = [np.ascontiguousarray(read(lanes)).view(np.float16).reshape(-1, 2) for read in readers]
                sums = [np.stack((part(mma, i, 0), part(mma, i, 1)), axis=1) for i, _ in places]
                new_values = [
                    add(*addend_and_sum).view(np.uint32)[:, 0] for addend_and_sum in zip(pairs, sums, strict=True)
                ]
            else:
                new_values = [add(read(lanes), part(mma, *place)) for read, place in zip(readers, places, strict=True)]
            for write, values in zip(writers, new_values, strict=True):
                write(lanes, values)

    return accumulate
