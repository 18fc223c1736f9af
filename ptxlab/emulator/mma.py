"""mma.sync: the warps that run it multiply their fragments in one batched product.

Integers: operands become float32, in which every sum of up to 64 products is exact (32 * 255 * 255 < 2^24), so BLAS
does the work; the accumulation wraps in int32, or saturates. Floating-point: products and their sum in float64, rounded
once to the accumulator's type. Hardware sums in an order of its own and truncates addends on the way, so that results
agree where all sums are exact, and are near elsewhere.

A straight line of mma with nothing in between (no label, no guard) runs as one product where it multiplies each of
several A by each of several B, as unrolled kernels do: BLAS takes the larger matrices faster, and each operand is
converted once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ptxlab.emulator import ir
from ptxlab.emulator.access import elements
from ptxlab.emulator.alu import Opcode, UnknownOpcode
from ptxlab.emulator.collective import together
from ptxlab.emulator.ir import Instruction
from ptxlab.emulator.machine import Machine, Outcome, Step, binder
from ptxlab.emulator.matrix import EVERYBODY, whole_warps
from ptxlab.emulator.rounding import round_to, widen
from ptxlab.emulator.types import Array, Lanes, count_of
from ptxlab.emulator.wave import Reader, Writer
from ptxlab.layout import fragments
from ptxlab.layout.fragments import WARP, Fragment

BITS = {"s8": 8, "u8": 8, "s4": 4, "u4": 4, "f16": 16, "bf16": 16}
QUAD = np.dtype("V16")  # a register of four neighbouring lanes: a run of a row, in the picture of `fragments`
LONGEST = 16  # mma of a product
CHUNK = 128 * WARP  # lanes at a time, so that what they need stays in the cache


@dataclass(frozen=True)
class Form:
    """The types of an mma, and its depth: k as in `fragments`, or half of that."""

    d: str
    a: str
    b: str
    c: str
    k: int
    saturates: bool

    @property
    def depth(self) -> int:
        """Tiles along k: 2 as in the fragment maps, or 1, their left half, with half the registers of A and B."""
        return self.k * BITS[self.a] // 128

    def tiles(self, operand: str) -> list[tuple[int, int]]:
        """Which tile, (down, along k), each register of operand "a" or "b" belongs to."""
        bits = BITS[self.a]
        fragment = fragments.mma_a(256 // bits) if operand == "a" else fragments.mma_b(256 // bits)
        rows, along = (fragment.rows, fragment.cols) if operand == "a" else (fragment.cols, fragment.rows)
        return [(int(r) // 8, int(k) // (128 // bits)) for r, k in zip(rows[0, :, 0], along[0, :, 0], strict=True)][
            : len(rows[0]) * self.depth // 2
        ]

    @property
    def accumulators(self) -> Fragment:
        """The map of C and D."""
        return fragments.mma_c(16 if self.d == "f16" else 32)


def decode(text: str) -> Form:
    """The form of an opcode."""
    opcode = Opcode(text)
    known = [opcode.flag(name) for name in ("sync", "aligned", "row", "col")]
    shape = opcode.choice("m16n8k8", "m16n8k16", "m16n8k32", "m16n8k64")
    saturates = opcode.flag("satfinite")
    if not all(known) or len(opcode.modifiers) != 4:
        raise UnknownOpcode(text)
    form = Form(*opcode.modifiers, int(shape.removeprefix("m16n8k")), saturates)
    pair, accumulators = {form.a, form.b}, {form.d, form.c}
    if pair <= {"s8", "u8"} or pair <= {"s4", "u4"}:
        fits = accumulators == {"s32"}
    else:
        fits = not saturates and (
            (pair == {"f16"} and accumulators in ({"f16"}, {"f32"})) or (pair == {"bf16"} and accumulators == {"f32"})
        )
    if not fits or form.depth not in (1, 2):
        raise UnknownOpcode(text)
    return form


# Straight lines


def group(machine: Machine, start: int) -> int:
    """Where the group of mma that begins here ends: it runs as one product."""
    code = machine.code

    def types(instruction: Instruction) -> tuple:
        return instruction.opcode, *(tuple(r.type for r in ir.registers((o,))) for o in instruction.operands)

    stop, written, pairs = start + 1, set(), []
    if code[start].guard is not None:
        return stop
    for at in range(start, min(start + LONGEST, len(code))):
        instruction = code[at]
        fits = instruction.guard is None and types(instruction) == types(code[start])
        if at > start and (not fits or at in machine.targets):
            break
        d, a, b, _ = instruction.operands
        if written & {r.name for r in ir.registers((a, b))}:
            break
        written |= {r.name for r in ir.registers((d,))}
        pairs.append((a, b))
        if len(set(pairs)) == len({a for a, _ in pairs}) * len({b for _, b in pairs}):
            stop = at + 1
    return stop


@binder("mma")
def _mma(machine: Machine, instruction: Instruction, pc: int) -> Step:
    form = decode(instruction.opcode)
    if pc < machine.done_before:
        return lambda lanes: None
    if len(instruction.operands) != 4:
        raise ValueError(f"{instruction.opcode} takes 4 operands, not {len(instruction.operands)}")
    machine.done_before = group(machine, pc)
    parts = [instruction.operands for instruction in machine.code[pc : machine.done_before]]
    sources = [list(dict.fromkeys(part[i] for part in parts)) for i in (1, 2)]
    places = [sources[0].index(part[1]) for part in parts], [sources[1].index(part[2]) for part in parts]
    count = form.accumulators.registers

    def readers(operand: ir.Operand, registers: int, type_name: str) -> list[Reader]:
        return [machine.reader(register, type_name) for register in elements(operand, registers)]

    a, b = ([readers(o, len(form.tiles(name)), "b32") for o in s] for name, s in zip("ab", sources, strict=True))
    kind = "s32" if form.d == "s32" else "b32"
    c = [readers(part[3], count, kind) for part in parts]
    d = [[machine.writer(register, kind) for register in elements(part[0], count)] for part in parts]
    accumulate = integer_sums(form) if form.d == "s32" else float_sums(form)
    work = list(zip(*places, c, d, strict=True))
    tiles_a, tiles_b = form.tiles("a"), form.tiles("b")

    def multiply(lanes: Lanes) -> None:
        left = numbers(matrices(a, tiles_a, lanes), form.a)
        right = numbers(matrices(b, tiles_b, lanes, swap=True), form.b)
        product = np.matmul(left, right.swapaxes(-1, -2))
        accumulate(product.reshape(len(product), len(a), 2, 8, len(b), 2, 4), work, lanes)

    def in_chunks(lanes: Lanes) -> None:
        first, last = (lanes.start, lanes.stop) if isinstance(lanes, slice) else (0, len(lanes))
        for start in range(first, last, CHUNK):
            part = slice(start, min(start + CHUNK, last))
            multiply(part if isinstance(lanes, slice) else lanes[part])

    def checked(lanes: Lanes, members: Array) -> None:
        whole_warps(machine, instruction, lanes, members)
        in_chunks(lanes)

    meeting = together(machine, pc, EVERYBODY, checked)

    def step(lanes: Lanes) -> Outcome:
        whole = isinstance(lanes, slice) and lanes.start % WARP == 0 == lanes.stop % WARP
        if not whole or machine.living != machine.lanes or pc in machine.meetings:
            return meeting(lanes)
        in_chunks(lanes)
        return None

    return step


# Operands


def matrices(operands: list[list[Reader]], tiles: list[tuple[int, int]], lanes: Lanes, swap: bool = False) -> Array:
    """Operands of all warps, below each other: bytes [warps, rows, bytes of k]; row 2 t + j at 4 j + t if `swap`."""
    warps = count_of(lanes) // WARP
    down, along = (1 + max(tile) for tile in zip(*tiles, strict=True))
    quads = np.empty((warps, len(operands), down, 8, along), QUAD)
    for i, readers in enumerate(operands):
        for read, (row, column) in zip(readers, tiles, strict=True):
            values = np.ascontiguousarray(read(lanes)).view(QUAD).reshape(warps, 8)
            if swap:
                quads[:, i, row, :4, column], quads[:, i, row, 4:, column] = values[:, 0::2], values[:, 1::2]
            else:
                quads[:, i, row, :, column] = values
    return quads.reshape(warps, -1, along).view(np.uint8)


def numbers(raw: Array, type_name: str) -> Array:
    """Bytes [warps, rows, bytes of k] as numbers; the order of k is any, but the same for A and B."""
    if type_name in ("f16", "bf16"):
        return widen(raw.view("f2" if type_name == "f16" else "u2"), type_name)
    dtype = np.int8 if type_name[0] == "s" else np.uint8
    if type_name[1:] == "8":
        return raw.view(dtype).astype(np.float32)
    nibbles = np.concatenate([raw << np.uint8(4), raw & np.uint8(0xF0)], axis=-1)
    return nibbles.view(dtype).astype(np.float32) * np.float32(1 / 16)


# Accumulators: sums take products [warps, A, tile, 8 rows, B, j, t], column 2 t + j of D, and for each mma its A, its B,
# the readers of C and the writers of D

Work = list[tuple[int, int, list[Reader], list[Writer]]]
Sums = Callable[[Array, Work, Lanes], None]


def integer_sums(form: Form) -> Sums:
    """C + product in int32."""
    places = [(int(row) // 8, int(col)) for row, col in zip(*(f[0, :, 0] for f in _maps(form)), strict=True)]

    def wrapped(c: Array, product: Array) -> Array:
        return c + product

    def saturated(c: Array, product: Array) -> Array:
        return np.add(c, product, dtype=np.int64).clip(-(2**31), 2**31 - 1).astype(np.int32)

    add = saturated if form.saturates else wrapped

    def sums(product: Array, work: Work, lanes: Lanes) -> None:
        quads = product.astype(np.int32).view(QUAD)[..., 0]
        for i, k, readers, writers in work:
            results = [
                add(read(lanes), np.ascontiguousarray(quads[:, i, row, :, k, j]).reshape(-1).view(np.int32))
                for read, (row, j) in zip(readers, places, strict=True)
            ]
            for write, values in zip(writers, results, strict=True):
                write(lanes, values)

    return sums


def _maps(form: Form) -> tuple[Array, Array]:
    return form.accumulators.rows, form.accumulators.cols


def float_sums(form: Form) -> Sums:
    """C + product in float64, rounded once."""
    fragment, dtype = form.accumulators, np.dtype(form.d.replace("f", "float"))

    def sums(product: Array, work: Work, lanes: Lanes) -> None:
        matrix = product.swapaxes(-1, -2)
        for i, k, readers, writers in work:
            c = fragment.gather(np.stack([read(lanes).reshape(-1, WARP) for read in readers], axis=-1), dtype)
            d = round_to(c + matrix[:, i, :, :, k].reshape(c.shape), 0.0, form.d)
            for write, values in zip(writers, np.moveaxis(fragment.scatter(d), -1, 0), strict=True):
                write(lanes, values.reshape(-1))

    return sums
