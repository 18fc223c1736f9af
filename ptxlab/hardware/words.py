"""Four bytes or eight nibbles in one 32-bit word: how kernels compute on several small integers at a time."""

import math
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

U8: TypeAlias = npt.NDArray[np.uint8]
S8: TypeAlias = npt.NDArray[np.int8]
U32: TypeAlias = npt.NDArray[np.uint32]
S32: TypeAlias = npt.NDArray[np.int32]
F16: TypeAlias = npt.NDArray[np.float16]
F32: TypeAlias = npt.NDArray[np.float32]
Bool: TypeAlias = npt.NDArray[np.bool_]

_LOW = np.uint32(0x0F0F0F0F)
_Scalar = TypeVar("_Scalar", bound=np.generic)


def as_words(values: U8) -> U32:
    """Convert bytes u8 [..., 4k] to little-endian words u32 [..., k]: byte i of a word is bits 8i to 8i+7.

    Raises TypeError for another dtype, ValueError if the last axis is not a multiple of 4.
    """
    require_dtype("values", values, np.uint8)
    if values.shape[-1] % 4:
        raise ValueError(f"values: the last axis must be a multiple of 4 (got {values.shape[-1]})")
    contiguous = values if values.flags.c_contiguous else values.copy(order="C")
    return contiguous.view(np.uint32)


def as_bytes(words: U32) -> U8:
    """Convert words u32 [..., k] to bytes u8 [..., 4k], least significant byte first; the inverse of `as_words`."""
    require_dtype("words", words, np.uint32)
    contiguous = words if words.flags.c_contiguous else words.copy(order="C")
    return contiguous.view(np.uint8)


def unpack_nibbles(words: U32) -> U8:
    """Unpack micro-kernel words u32 [..., K/8]: eight nibbles u8 [..., K], those of the low halves of bytes first."""
    require_dtype("words", words, np.uint32)
    halves = np.stack([words & _LOW, words >> np.uint32(4) & _LOW], axis=-1)
    return as_bytes(halves).reshape(*words.shape[:-1], 8 * math.prod(words.shape[-1:]))


def replicate(values: U8) -> U32:
    """Copy each byte u8 [...] into all four bytes of a word u32 [...]."""
    require_dtype("values", values, np.uint8)
    return values.astype(np.uint32) * np.uint32(0x01010101)


def spread(per_group: npt.NDArray[_Scalar], size: int) -> npt.NDArray[_Scalar]:
    """Repeat one value per group [R, K/g] along the last axis until it has `size` entries, a multiple of K/g."""
    groups = per_group.shape[-1]
    if groups == 0 or size % groups:
        raise ValueError(f"{size} values do not divide into {groups} groups")
    return np.repeat(per_group, size // groups, axis=-1)


def require_dtype(name: str, array: npt.NDArray[Any], dtype: type[np.generic]) -> None:
    """Raise TypeError unless `array` has `dtype`: in modular arithmetic a wrong one gives wrong numbers, not errors."""
    if array.dtype != dtype:
        raise TypeError(f"{name}: dtype must be {np.dtype(dtype)} (got {array.dtype})")
