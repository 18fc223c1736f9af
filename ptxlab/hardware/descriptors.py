"""Matrices that wgmma reads from shared memory: swizzles and matrix descriptors.

K-major operands have elements of any size, MN-major ones (`mn_major_addresses`) of 16 bits.

The unit is a *core matrix*, 8 rows of 16 bytes. Under swizzle `span` 8 rows of `span` bytes follow each other
(span 16: no swizzle, a core matrix is 128 contiguous bytes), and within them the 16-byte columns are permuted by an XOR
of address bits, so that the 8 rows of a core matrix lie in 8 different bank groups:

    span  32:  bit 4     ^= bit 7           row r, 16-byte column c of an atom of 8 rows (span 128):
    span  64:  bits 4-5  ^= bits 7-8        byte 128·r + 16·(c ^ r)
    span 128:  bits 4-6  ^= bits 7-9

The XOR works on absolute shared addresses: an atom starts at a multiple of 8·span, and a step of 32 bytes along K is
plain addition to the start address.

PTX ISA 8.x, "Shared memory matrix layout", "Strides", "Matrix descriptor format" under wgmma.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.hardware.fragments import Indices

SPANS = (16, 32, 64, 128)  # bytes per row of a swizzle atom; 16 is "no swizzle"
_MODES = {16: 0, 128: 1, 64: 2, 32: 3}  # bits 62-63 of a descriptor


def swizzle(addresses: npt.ArrayLike, span: int) -> Indices:
    """Return the addresses of bytes at unswizzled shared `addresses` under swizzle `span`; its own inverse.

    Raises ArgumentError for an unknown span.
    """
    if span not in SPANS:
        raise ArgumentError("span", f"must be one of {', '.join(map(str, SPANS))}", span)
    linear = np.asarray(addresses, dtype=np.intp)
    return linear ^ (linear >> 3 & (span - 16))


@dataclass(frozen=True)
class MatrixDescriptor:
    """The 64-bit descriptor of a matrix in shared memory, K-major but for `mn_major_addresses`, sizes in bytes.

    `start`: address of its first row; `stride` ("stride dimension"): from 8 rows to the next 8; `leading` ("leading
    dimension"): from one core matrix to the next along K, without swizzle only. Raises ArgumentError for sizes that are
    not multiples of 16 below 2^18, and for an unknown span.
    """

    start: int
    stride: int
    leading: int = 16
    span: int = 16

    def __post_init__(self) -> None:
        for field in ("start", "stride", "leading"):
            nbytes = getattr(self, field)
            if nbytes % 16 or not 0 <= nbytes < 1 << 18:
                raise ArgumentError(field, "must be a multiple of 16 below 2^18", nbytes)
        if self.span not in _MODES:
            raise ArgumentError("span", f"must be one of {', '.join(map(str, SPANS))}", self.span)

    def encode(self) -> int:
        """Return the descriptor's 64 bits, as wgmma takes them."""
        return self.start >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32 | _MODES[self.span] << 62

    @classmethod
    def decode(cls, bits: int) -> "MatrixDescriptor":
        """Decode a descriptor's 64 bits. Raises ArgumentError for a base offset: atoms must be aligned here."""
        if bits >> 49 & 7:
            raise ArgumentError("descriptor", "base offset must be 0, atoms at multiples of 8·span", f"{bits:#x}")
        start, leading, stride = ((bits >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        return cls(start, stride, leading, {mode: span for span, mode in _MODES.items()}[bits >> 62])

    def addresses(self, rows: int, k: int = 32) -> Indices:
        """Return the shared address [rows, k] of each byte of the operand: `rows` of N (or M), `k` bytes along K."""
        row, byte = np.indices((rows, k))
        column, byte_in_atom = byte // self.span, byte % self.span
        offsets = row // 8 * self.stride + row % 8 * self.span + column * self.leading + byte_in_atom
        return swizzle(self.start + offsets, self.span)

    def mn_major_addresses(self, rows: int) -> Indices:
        """Return the shared addresses of an MN-major operand, 16 deep, of 2-byte elements.

        There is an address [rows / 8, 16] for each run of 8 rows. An atom is `span` bytes of rows by 8 of K; `leading`
        is from atom to atom along the rows, `stride` along K. Raises ArgumentError without a swizzle: no example shows
        which of the two is which then.
        """
        if self.span == 16:
            raise ArgumentError("descriptor", "an MN-major operand needs a swizzle", f"{self.encode():#x}")
        run, k = np.indices((rows // 8, 16))
        atom, within = run * 16 // self.span, run * 16 % self.span
        offsets = atom * self.leading + k // 8 * self.stride + k % 8 * self.span + within
        return swizzle(self.start + offsets, self.span)
