"""PTX types, and NumPy's word for each."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# bf16 and the packed float pairs have no NumPy type: they travel as raw bits.
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        **{f"{kind}{bits}": f"{letter}{bits // 8}" for kind, letter in (("u", "u"), ("s", "i"), ("b", "u"))
           for bits in (8, 16, 32, 64)},
        "f16": "f2", "f32": "f4", "f64": "f8",
        "bf16": "u2", "f16x2": "u4", "bf16x2": "u4", "u16x2": "u4", "s16x2": "u4", "f32x2": "u8",
        "pred": "?",
    }.items()
}  # fmt: skip

FILES = {1: np.dtype("?"), 8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8")}


_BITS = {name: dtype.itemsize * 8 for name, dtype in DTYPES.items()} | {"pred": 1}


def bits_of(type_name: str) -> int:
    """Return the width of a PTX type in bits; 1 for a predicate."""
    return _BITS[type_name]


def is_signed(type_name: str) -> bool:
    """Tell whether the type extends by its sign when it is widened."""
    return type_name[0] == "s"


def is_float(type_name: str) -> bool:
    """Tell whether the type is one of PTX's floating-point types."""
    return type_name[0] == "f" or type_name.startswith("bf")


def limits(type_name: str) -> tuple[int, int]:
    """Return the smallest and the largest value of an integer type."""
    bits = bits_of(type_name)
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if is_signed(type_name) else (0, (1 << bits) - 1)
