"""`TensorMap`: what the copy engine is told of an array, so that one instruction moves a box of it.

A kernel takes it as a parameter of 128 bytes (`const __grid_constant__ CUtensorMap`). A box lies in shared memory row
after row; what lies outside the array arrives as zeros, and is not written on the way back. Under a swizzle the box has
rows of `span` bytes, whose 16-byte columns the engine permutes as `descriptors.swizzle` says: by bits of the absolute
shared address, not of the place in the box.

CUDA Driver API, "Tensor Map Object Management"; PTX ISA 8.x, "Tensor copies in tiled mode".
"""

from dataclasses import dataclass
from math import prod
from typing import Any

from ptxlab.errors import ArgumentError
from ptxlab.validate import is_integer, is_one_of, shape_of

SWIZZLES = (0, 32, 64, 128)
TENSOR_MAP_BYTES = 128  # of the parameter
_UNIT = 16  # bytes: what rows and boxes are multiples of


@dataclass(frozen=True, eq=False)
class TensorMap:
    """Boxes of a row-major matrix, or of an array of up to five axes.

    Attributes:
        array: NumPy or CuPy, [..., rows, columns], elements of 1, 2, 4 or 8 bytes. (A kernel names coordinates the
            other way around: of the last axis first.)
        box: what one copy moves, a size for each axis.
        swizzle: span of the swizzle in bytes, which a row of the box then has to fill; 0 for none.

    Raises:
        ArgumentError: what the driver would refuse; and a swizzled box narrower than its span, which has no use here.
    """

    array: Any
    box: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self) -> None:
        shape = shape_of(self.array)
        if not 1 <= len(shape) <= 5 or 0 in shape:
            raise ArgumentError("tensor map: array", "an array of one to five axes, none empty", f"shape {shape}")
        if not self.array.flags.c_contiguous:
            raise ArgumentError("tensor map: array", "C-contiguous", f"strides {self.array.strides}")
        if self.itemsize not in (1, 2, 4, 8) or self.array.dtype.kind not in "iuf":
            raise ArgumentError("tensor map: array", "integers or floats of 1, 2, 4 or 8 bytes", self.array.dtype)
        if len(shape) > 1 and self.pitch % _UNIT:
            raise ArgumentError("tensor map: array", "rows of a multiple of 16 bytes", f"{self.pitch} bytes")
        sides = self.box if isinstance(self.box, tuple) else ()
        if len(sides) != len(shape) or not all(is_integer(side) and 1 <= side <= 256 for side in sides):
            expected_box = "(rows, columns)" if len(shape) == 2 else f"{len(shape)} sizes"
            raise ArgumentError("tensor map: box", f"{expected_box}, each 1 to 256", self.box)
        if self.row_bytes % _UNIT:
            raise ArgumentError("tensor map: box", "rows of a multiple of 16 bytes", f"{self.row_bytes} bytes")
        if not is_one_of(self.swizzle, SWIZZLES):
            raise ArgumentError("tensor map: swizzle", f"one of {', '.join(map(str, SWIZZLES))}", self.swizzle)
        if self.swizzle and self.row_bytes != self.swizzle:
            rule = f"rows as wide as the swizzle of {self.swizzle} bytes"
            raise ArgumentError("tensor map: box", rule, f"{self.row_bytes} bytes")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(self.array.dtype.itemsize)

    @property
    def pitch(self) -> int:
        """Bytes of a row of the array."""
        return int(self.array.shape[-1]) * self.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the box."""
        return int(self.box[-1]) * self.itemsize

    @property
    def box_bytes(self) -> int:
        """Bytes of a whole box, as the mbarrier counts them, wherever it lies."""
        return prod(self.box[:-1]) * self.row_bytes
