"""Who holds what in a matrix instruction: the only fragment maps, as data.

A fragment spreads a small matrix over the lanes of a warp (or, for wgmma, of a warp group). Every map of the PTX ISA
that is needed here follows from one picture. Lane 4·g + t (g = 0..7, t = 0..3) holds a *run* of neighbouring elements
in row g of a *tile* of 8 rows:

                 columns   0 .. run-1   run .. 2·run-1   ...   3·run .. 4·run-1
    row 0                    lane 0         lane 1       ...       lane 3
    row 1                    lane 4         lane 5       ...       lane 7
      :
    row 7                    lane 28        lane 29      ...       lane 31

The lane's next run lies in the next tile: down the tile rows first, then to the right. A run is one register, except in
accumulators of 32 bits, where it is two. Operand B is the same picture with rows and columns exchanged; a warp group
stacks its four warps, 16 rows each.

PTX ISA 8.x, "Warp-level matrix instructions: ldmatrix, stmatrix", "Matrix fragments for mma.m16n8k16, .m16n8k32,
.m16n8k64", "Register fragments for wgmma.mma_async.m64nNk32". Recorded vectors pin each map to the hardware
(`tests/golden/test_fragments.py`).
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import U32

Indices: TypeAlias = npt.NDArray[np.intp]

WARP = 32
MMA_K = {16: 16, 32: 8, 64: 4}  # m16n8k16, m16n8k32, m16n8k64 -> bits of an element of A and B
_MMA_BITS = (32, 16, 8, 4)  # 32: tf32, of m16n8k8 and m16n8k4
WGMMA_N = (8, 16, 24, *range(32, 257, 16))  # what integer wgmma m64nNk32 allows


@dataclass(frozen=True, eq=False)
class Fragment:
    """A matrix spread over lanes: `rows` and `cols`, [lanes, registers, elements], say where each element lies.

    Elements count from a register's least significant bits. NumPy only (the emulator and the tests use it).
    """

    name: str
    bits: int  # of an element: 4, 8, 16 or 32
    rows: Indices
    cols: Indices

    @property
    def lanes(self) -> int:
        """32, or 128 for a warp group."""
        return int(self.rows.shape[0])

    @property
    def registers(self) -> int:
        """32-bit registers of a lane."""
        return int(self.rows.shape[1])

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the matrix, in elements."""
        return int(self.rows.max()) + 1, int(self.cols.max()) + 1

    def index(self, lane: int, register: int, element: int = 0) -> tuple[int, int]:
        """Return (row, column) of an element of a register of a lane."""
        return int(self.rows[lane, register, element]), int(self.cols[lane, register, element])

    def scatter(self, matrix: npt.NDArray[Any]) -> U32:
        """Return the registers u32 [..., lanes, registers] that hold `matrix` [..., rows, columns].

        Any dtype as wide as an element; 4-bit elements come as u8 0..15 or s8 -8..7. Raises ArgumentError for another
        shape or width.
        """
        matrix = np.asarray(matrix)
        if matrix.shape[-2:] != self.shape:
            raise ArgumentError("matrix", f"{self.name} is {self.shape[0]} x {self.shape[1]}", f"shape {matrix.shape}")
        if matrix.dtype != self._unsigned and matrix.dtype.itemsize != self._unsigned.itemsize:
            raise ArgumentError("matrix", f"{self.name} has {self.bits}-bit elements", matrix.dtype)
        flat_matrix = matrix.view(self._unsigned).reshape(*matrix.shape[:-2], -1)
        elements = flat_matrix[..., self._places].reshape(*matrix.shape[:-2], *self.rows.shape)
        if self.bits == 4:
            elements = (elements[..., 0::2] & np.uint8(15)) | elements[..., 1::2] << np.uint8(4)
        return np.ascontiguousarray(elements).view(np.uint32)[..., 0]

    def gather(self, registers: U32, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
        """Return the matrix [..., rows, columns] that `registers` u32 [..., lanes, registers] hold.

        It is the inverse of `scatter`. Elements are unsigned, or what `dtype` makes of their bits; s8 sign-extends
        elements of 4 bits. Raises ArgumentError for another shape or dtype of the registers.
        """
        registers = np.asarray(registers)
        if registers.dtype != np.uint32 or registers.shape[-2:] != self.rows.shape[:2]:
            rule = f"{self.name} is uint32 [{self.lanes}, {self.registers}]"
            raise ArgumentError("registers", rule, f"{registers.dtype} {registers.shape}")
        leading = registers.shape[:-2]
        elements = np.ascontiguousarray(registers)[..., None].view(self._unsigned)
        if self.bits == 4:
            elements = np.stack([elements & np.uint8(15), elements >> np.uint8(4)], axis=-1)
        matrix = elements.reshape(*leading, -1)[..., self._order].reshape(*leading, *self.shape)
        if dtype is None:
            return matrix
        if self.bits == 4 and np.dtype(dtype) == np.int8:
            return (matrix << np.uint8(4)).view(np.int8) >> np.int8(4)
        return matrix.view(dtype)

    @property
    def _unsigned(self) -> np.dtype[Any]:
        return np.dtype(f"u{max(self.bits, 8) // 8}")

    @cached_property
    def _places(self) -> Indices:
        """Index in the flattened matrix of each element, lane by lane."""
        return (self.rows * self.shape[1] + self.cols).reshape(-1)

    @cached_property
    def _order(self) -> Indices:
        return np.argsort(self._places)


def _fragment(
    name: str, bits: int, registers: int, run: int, tile_rows: int, *, transposed: bool = False, lanes: int = WARP
) -> Fragment:
    """Build the fragment of the picture above.

    It has `run` elements per lane and tile, and `tile_rows` tiles below each other.
    """
    per_register = 32 // bits
    lane, element = np.indices((lanes, registers * per_register))
    warp, g, t = lane // WARP, lane % WARP // 4, lane % 4
    tile, element_in_run = element // run, element % run
    rows = 16 * warp + 8 * (tile % tile_rows) + g
    cols = 4 * run * (tile // tile_rows) + run * t + element_in_run
    rows, cols = (grid.reshape(lanes, registers, per_register) for grid in (rows, cols))
    return Fragment(name, bits, cols, rows) if transposed else Fragment(name, bits, rows, cols)


@cache
def ldmatrix(count: int, trans: bool = False) -> Fragment:
    """Return the fragment of ldmatrix and stmatrix .m8n8.x1, .x2, .x4 .b16.

    It has `count` 8 x 8 matrices below each other, one per register. Row 8·i + j, 16 bytes, is the one at the address
    that lane 8·i + j gives. With `trans` each matrix is transposed on its way. Raises ArgumentError unless `count` is
    1, 2 or 4.
    """
    if count not in (1, 2, 4):
        raise ArgumentError("count", "must be 1, 2 or 4", count)
    name = f"ldmatrix.x{count}" + (".trans" if trans else "")
    return _fragment(name, 16, count, run=2, tile_rows=1 if trans else count, transposed=trans)


@cache
def mma_a(k: int, bits: int | None = None) -> Fragment:
    """Return operand A [16, k] of mma.sync m16n8k16 (16-bit), m16n8k32 (8-bit) or m16n8k64 (4-bit elements).

    With `bits` also of the forms half as deep: m16n8k8, m16n8k16 and m16n8k32 of 16, 8 and 4 bits; and of m16n8k8 and
    m16n8k4 of 32 bits (tf32). Raises ArgumentError for another k.
    """
    bits = _mma_bits(k, bits)
    return _fragment(_mma_name(k, bits, "a"), bits, k * bits // 64, run=32 // bits, tile_rows=2)


@cache
def mma_b(k: int, bits: int | None = None) -> Fragment:
    """Return operand B [k, 8] of mma.sync; forms as in `mma_a`. Raises ArgumentError for another k."""
    bits = _mma_bits(k, bits)
    return _fragment(_mma_name(k, bits, "b"), bits, k * bits // 128, run=32 // bits, tile_rows=1, transposed=True)


@cache
def mma_c(bits: int = 32) -> Fragment:
    """Return accumulators C and D [16, 8] of mma.sync m16n8k16, k32 and k64: s32, f32, or f16 with `bits` = 16.

    Raises ArgumentError for another number of bits.
    """
    _require_sum(bits)
    return _fragment(f"mma.m16n8.c{bits}", bits, bits // 8, run=2, tile_rows=2)


@cache
def wgmma_a() -> Fragment:
    """Return operand A [64, 32] of wgmma m64nNk32 from registers, 8-bit elements over 128 lanes."""
    return _fragment("wgmma.m64k32.a", 8, 4, run=4, tile_rows=2, lanes=4 * WARP)


@cache
def wgmma_d(n: int, is_float: bool = False, bits: int = 32) -> Fragment:
    """Return accumulator D [64, n] of wgmma m64nN, s32, f32 or f16 (`bits`).

    It has n/2 registers of 32 bits per lane, of f16 n/4. Raises ArgumentError unless `n` is one of `WGMMA_N`, or with
    `is_float` a multiple of 8 to 256, and `bits` 16 or 32.
    """
    _require_sum(bits)
    if not is_float and n not in WGMMA_N:
        raise ArgumentError("n", "integer wgmma takes 8, 16, 24, 32 and multiples of 16 to 256", n)
    if is_float and n not in range(8, 257, 8):
        raise ArgumentError("n", "floating wgmma takes multiples of 8 to 256", n)
    return _fragment(f"wgmma.m64n{n}.d{bits}", bits, n * bits // 64, run=2, tile_rows=2, lanes=4 * WARP)


def _require_sum(bits: int) -> None:
    if bits not in (16, 32):
        raise ArgumentError("bits", "must be 16 or 32", bits)


def _mma_bits(k: int, bits: int | None) -> int:
    if bits is None and k not in MMA_K:
        raise ArgumentError("k", f"must be one of {', '.join(map(str, MMA_K))}", k)
    bits = MMA_K[k] if bits is None else bits
    if bits not in _MMA_BITS or k * bits not in (128, 256):
        raise ArgumentError("k", "32, 16, 8 or 4 bits, of which k are 128 or 256", f"k={k}, bits={bits}")
    return bits


def _mma_name(k: int, bits: int, operand: str) -> str:
    """Name a fragment of mma.sync, with the width if the depth does not tell it."""
    return f"mma.m16n8k{k}{'' if MMA_K.get(k) == bits else f'.b{bits}'}.{operand}"
