"""Element types by name: those that a compiled variant decides, and bfloat16, which NumPy and CuPy do not have.

Arrays of bfloat16 are held as uint16, bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.hardware.floats import bfloat16_bits, from_bfloat16_bits


@dataclass(frozen=True)
class ByVariant:
    """A dtype that one of the variant's `-D` constants decides: 0 stands for the first of `dtypes`, 1 for the next.

    `by_sizes`: the sizes say which, and no caller asks for another.
    """

    constant: str
    dtypes: tuple[str, ...]
    by_sizes: bool = False

    def __str__(self) -> str:
        return f"{'|'.join(self.dtypes)} by {self.constant}"


DType = str | ByVariant


def name_of(dtype: Any) -> str:
    """Return the name of a dtype in any form.

    It may be given by name, as NumPy's, as a scalar's type, as PyTorch's or JAX's.
    """
    if isinstance(dtype, str):
        return dtype
    return dtype.__name__ if isinstance(dtype, type) else str(dtype).removeprefix("torch.")


def dtype_in(dtype: DType, constants: Mapping[str, int]) -> str:
    """Return the name of `dtype` in the variant with these constants."""
    return dtype if isinstance(dtype, str) else dtype.dtypes[constants[dtype.constant]]


def storage(name: str) -> np.dtype[Any]:
    """Return the dtype in which NumPy and CuPy hold elements of that name."""
    return np.dtype("uint16" if name == "bfloat16" else name)


def convert_to_dtype(values: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """Convert float32 values to that dtype, rounded to nearest even, and s32 to s64.

    Anything else stays as it is.
    """
    if values.dtype == np.int32 and name == "int64":
        return values.astype(np.int64)
    if values.dtype != np.float32 or name == "float32":
        return values
    return bfloat16_bits(values) if name == "bfloat16" else values.astype(name)


def round_to_dtype(values: npt.NDArray[np.float32], name: str) -> npt.NDArray[np.float32]:
    """Round float32 values to that dtype and return them in float32."""
    return floats(convert_to_dtype(values, name))


def floats(array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Convert f16, f32, or bf16 by its bits (uint16), to float32."""
    return from_bfloat16_bits(array) if array.dtype == np.uint16 else array.astype(np.float32, copy=False)


def numbers(array: npt.NDArray[Any], name: str) -> npt.NDArray[np.float64]:
    """Convert elements of that dtype to float64."""
    return (from_bfloat16_bits(array) if name == "bfloat16" else array).astype(np.float64)
